"""Before each real step of an elementwise class: the same step on two small leaves, whose operations are compared.

    scouts    two leaves of six numbers, with the counts and the rate of this step
    proved    sequences of operations that were observed: another one is observed now, or the step is not taken

Python of a proved class sees no value and no shape, so it does with the scouts what it will do with the real leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._common.errors import TreeError
from .._common.torch_names import TorchDispatchMode
from .._common.tracing import traced_as
from .probe import Known, State, driven, name_of, states_of
from .prove import Watch, numbers_like

__all__ = ["Scout"]

SIZE = 6
Sequences = set[tuple[str, ...]]


class Names(TorchDispatchMode):
    """The names of the operations, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _always(*args: Any) -> bool:
    return True


class Scout:
    """For one class with options."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.proved: dict[Any, Sequences] = {}
        self.buckets: dict[str, set[str]] = {}
        self.count: Any = None
        self.turn = 0

    @traced_as(_always)
    def due(self, label: str, bucket: str, count: torch.Tensor) -> bool:
        """Whether a step begins with this call: of another State, which has its own count, or its first bucket came
        before."""
        if count is not self.count:
            self.count = count
            self.buckets.clear()
        seen = self.buckets.setdefault(label, set())
        begins = not seen or bucket in seen
        if begins:
            seen.clear()
        seen.add(bucket)
        return begins

    def look(
        self, label: str, known: Known, options: Mapping[str, Any], like: torch.Tensor, states: Sequence[State], lr: Any
    ) -> None:
        """Take the step on scouts.

        Args:
            like: a parameter, for its dtype and device.
            states: of the real leaves; two of them have their numbers here, by turns.

        Raises:
            TreeError: the class does what is not elementwise. Nothing was changed.
        """
        self.turn += 1
        chosen = [states[(self.turn + i) % len(states)] for i in range(min(2, len(states)))]
        with torch.inference_mode(False), torch.no_grad():
            names = Names()
            self._step(known, options, like, chosen, lr, names)
            proved = self.proved.setdefault((label, like.device.type, like.dtype), set())
            if (sequence := tuple(names.names)) in proved:
                return
            watch = Watch([SIZE] * len(chosen))
            self._step(known, options, like, chosen, lr, watch.and_reads(), watch)
        if found := [*watch.findings.values()]:
            raise TreeError(
                f"{name_of(self.cls)}: in this step the class does what it had not done when it was proved "
                f"elementwise, and what is not: {found[0]}. The step was not taken. Give by='leaf'."
            )
        proved.add(sequence)

    def _step(
        self, known: Known, options: Mapping[str, Any], like: torch.Tensor, states: Sequence[State], lr: Any,
        within: AbstractContextManager[Any], watch: Watch | None = None,
    ) -> None:  # fmt: skip
        params = [numbers_like((SIZE,), 1 + i).to(like.device, like.dtype) for i in range(len(states))]
        grads = [numbers_like((SIZE,), 5 + i).to(like.device, like.dtype) for i in range(len(states))]
        given = []
        for param, real in zip(params, states, strict=True):
            own = states_of(known.kept, param)
            for name, value in real.items():
                if known.kept[name].number:
                    own[name] = value.clone() if isinstance(value, torch.Tensor) else value
            given.append(own)
        for i, (param, grad, own) in enumerate(zip(params, grads, given, strict=True)):
            for tensor in (param, grad, *(own[name] for name, one in known.kept.items() if not one.number)):
                if watch is not None:
                    watch.touch(tensor, i)
        driven(self.cls, options, params, grads, given, lr, within)
