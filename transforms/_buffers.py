"""Buffers of a driven module: they come from the state, and what the forward made of them goes into the next one.

A forward works on copies, so the state that it started from keeps its own. Only persistent buffers ride in a state;
what a module makes for itself (masks, rotary tables) stays with its copy.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from functional_fsdp import SpecError, State
from functional_fsdp._metrics import over_ranks
from functional_fsdp._runtime import runtime_of
from functional_fsdp._skeleton import persistent

__all__ = ["Buffers", "Rule"]

Rule = Literal["mean", "first", "local"]


class Buffers:
    """The persistent buffers of one module: `lend` puts a state's into it, `collect` takes them out again."""

    def __init__(self, module: nn.Module, rule: Rule) -> None:
        if rule not in ("mean", "first", "local"):
            raise SpecError(
                f"buffers={rule!r}: expected 'mean' (averaged over the data ranks), 'first' (the first rank's) or "
                "'local' (each rank's own)."
            )
        self.rule = rule
        self.module = module
        self.places = {path: (held, name) for path, held, name in persistent(module)}
        training = {id(part._buffers) for part in module.modules() if part.training}
        self.live = {path for path, (held, _) in self.places.items() if id(held) in training}
        self.dicts = [part._buffers for part in module.modules()]
        self.sizes = [*map(len, self.dicts)]
        self.device: torch.device | None = None
        self.lent: dict[str, torch.Tensor] = {}
        self.checked = False  # that what is not in the state does not change
        self.own = {path: held[name] for path, (held, name) in self.places.items()}

    def lend(self, state: State, device: torch.device) -> None:
        """Copies of the state's buffers into the module, of all others the module's own; all on the device."""
        if device != self.device:
            self._move(device)
        if not self.own:
            return
        given = state.buffers if isinstance(state.buffers, dict) else {}
        self.lent = {}
        by_dtype: dict[torch.dtype, list[str]] = {}
        source = {path: given.get(path, own) for path, own in self.own.items()}
        for path, buffer in source.items():
            by_dtype.setdefault(buffer.dtype, []).append(path)
        for paths in by_dtype.values():
            tensors = [source[path].to(device) for path in paths]
            flat = _flatten_dense_tensors(tensors) if len(tensors) > 1 else tensors[0].clone()
            copies = _unflatten_dense_tensors(flat, tensors) if len(tensors) > 1 else [flat]
            self.lent |= dict(zip(paths, copies, strict=True))
        self.versions = {path: tensor._version for path, tensor in self.lent.items()}
        for path, tensor in self.lent.items():
            held, name = self.places[path]
            held[name] = tensor

    def _move(self, device: torch.device) -> None:
        """The module's own buffers, once."""
        self.device = device
        for part in self.module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    part._buffers[name] = buffer.to(device)
        self.own = {path: held[name] for path, (held, name) in self.places.items()}

    def collect(self, state: State) -> Any:
        """The buffers of the new state: the old ones if the forward can have changed nothing.

        Kernels write running statistics without telling (their versions do not change), so floating buffers of modules
        in training mode count as changed.

        Raises:
            SpecError: it changed one that the state does not have.
        """
        if [*map(len, self.dicts)] != self.sizes:
            self._refuse_new()
        now = {path: held[name] for path, (held, name) in self.places.items()}
        changed = [
            path for path, t in now.items()
            if t is not self.lent[path] or t._version != self.versions[path]
            or (path in self.live and t.is_floating_point())
        ]  # fmt: skip
        given = state.buffers if isinstance(state.buffers, dict) else {}
        missing = [] if self.checked else [path for path in changed if path not in given]
        self.checked = True
        for path in missing:  # once: it waits for the device
            if not torch.equal(now[path], self.own[path].to(now[path].device)):
                self.checked = False
                raise SpecError(
                    f"the forward changed the buffer {path!r}, which is not in the state. Give the state its buffers: "
                    "shard(params, spec, optimizer, buffers=fsdp.buffers(model)), or build it with init."
                )
        mine = {path: now[path].detach() for path in changed if path in given}
        return {**given, **self._agreed(state, mine)} if mine else state.buffers

    def _refuse_new(self) -> None:
        """Caches may come in a forward; what a state dict would have may not."""
        new = [(path, held, name) for path, held, name in persistent(self.module) if path not in self.places]
        for _, held, name in new:
            del held[name]
        self.sizes = [*map(len, self.dicts)]
        if new:
            raise SpecError(
                f"the forward registered the buffer {new[0][0]!r}, which the state cannot know of. Register it when "
                "the module is built, or with persistent=False."
            )

    def restore(self) -> None:
        """The module's own buffers back into it."""
        for path, (held, name) in self.places.items():
            held[name] = self.own[path]

    def _agreed(self, state: State, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the rule, across the data ranks. One all-reduce an axis and dtype of floats; integers are the same."""
        run = runtime_of(state.spec.mesh)
        if self.rule == "local" or run.size == 1:
            return mine
        first = self.rule == "first"
        kinds = {p: t for p, t in mine.items() if t.dtype is not torch.bool and (first or t.is_floating_point())}
        zeros = first and any(run.coordinate[axis] for axis in state.spec.data)
        tensors = [torch.zeros_like(t) if zeros else t for t in kinds.values()]
        summed = over_ranks(state, tensors, "sum" if first else "mean", "buffers")
        return mine | dict(zip(kinds, summed, strict=True))
