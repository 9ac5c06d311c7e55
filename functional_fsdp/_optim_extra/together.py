"""Optimizers that couple leaves: all of them whole on every rank, in one instance of the class itself.

    shards    [ w0 w0 | w1 ] [ w1 w2 | w2 ]      weights and gradients; what the class keeps, as `WholeLeaves` has it
    gathered  an all-gather an axis, for each of them
    each rank cls([w0, w1, w2], **options); its state is handed in; `step()`; each rank keeps its own slice

Every rank computes the same, so nothing travels back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .._common.errors import SpecError, TreeError
from .._common.record import Collective
from .._optim.optimizer import Sender, Tree
from .._runtime.given import Leaves
from .._storage import FlatBuffer
from .probe import hand_over, name_of
from .prove import numbers_like
from .whole import Form, Job, LeafStates, Rates, Trees, WholeLeaves

__all__ = ["AllLeaves"]

LABEL = "default"


@dataclass(frozen=True)
class AllLeaves(WholeLeaves):
    """A torch.optim class with options, that has all leaves together. See `from_torch(by="all")`."""

    def __hash__(self) -> int:
        return hash((type(self), self.cls))

    def __str__(self) -> str:
        held = f" ({max(self._held):,} bytes)" if self._held else ""
        return f"{name_of(self.cls)}: all leaves together, on one gathered copy a rank{held}, since {self.why}"

    @cached_property
    def _held(self) -> list[int]:
        """Bytes of the copies of States that were begun."""
        return []

    def nbytes(self, opt: Trees, main: Tree) -> int:
        """Bytes of the gathered copy that each rank has in a step: weights, gradients, and all that is kept."""
        buffers = [b for tree in (main, main, *opt.values()) for b in tree.values()]
        return sum(b.bucket.numel * b.local.itemsize for b in buffers)

    # ---- an instance

    def _tried(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, path: str) -> list[Form]:
        """Forms of a leaf alone, and as the first and the second one of two, which begin together or not."""
        found, before = list[Form](), self._moving.setdefault(label, frozenset())
        first: Exception | None = None
        for leaves, place, late in ((1, 0, -1), *((2, place, late) for place in (0, 1) for late in (-1, 0, 1))):
            params = [torch.nn.Parameter(numbers_like(shape, 1 + i).to(dtype)) for i in range(leaves)]
            try:
                names = [path if i == place else f"another {i}" for i in range(leaves)]
                optimizer, fresh = self._made(label, params, [None] * leaves, names)
                for step in range(12 if math.prod(shape) <= 1 << 16 else 4):
                    for i, param in enumerate(params):
                        lacks = step < 3 and i == late
                        hand_over(param, None if lacks else numbers_like(shape, 2 + step + i).to(dtype))
                    optimizer.step()
                    form, _ = self._taken(label, optimizer, params[place], fresh, True)
                    found += [form] if form not in found else []
            except (SpecError, TreeError):
                raise
            except Exception as error:  # without a gradient, say: then a real step says so
                first = first or error
        if not found:
            raise SpecError(
                f"{name_of(self.cls)}: the class does not take the leaf {path!r} of shape {list(shape)}: it raised "
                f"{type(first).__name__}: {first}. Give the leaf to another optimizer by its label: fsdp.partition."
            ) from first
        return found if self._moving[label] == before else self._tried(label, shape, dtype, path)

    def _run(
        self, label: str, shape: tuple[int, ...], dtype: torch.dtype, forms: list[Form] | None, leaves: int = 3,
        late: Sequence[int] = (0, 1, 7),
    ) -> torch.Tensor:  # fmt: skip
        """Of three leaves, one of which gets no gradient in some steps; if the class can have that."""
        try:
            return super()._run(label, shape, dtype, forms, leaves, late)
        except SpecError:
            return super()._run(label, shape, dtype, forms, leaves)

    # ---- what is kept

    def init(self, main: Tree) -> Trees:
        opt = super().init(main)
        self._held.append(self.nbytes(opt, main))
        return opt

    # ---- a step

    def _labels(self, main: Tree) -> list[str]:
        return [LABEL]

    def _updated(
        self, given: Leaves, grads: Tree, opt: Trees, main: Tree, rates: Rates, sender: Sender
    ) -> tuple[Tree, Trees]:
        whole = {id(b): _whole(b, sender) for tree in (main, grads, *opt.values()) for b in tree.values()}
        kept, jobs = LeafStates(opt, whole), list[Job]()
        for name, buffer in main.items():
            for i, leaf in enumerate(buffer.bucket.leaves):
                if leaf.numel:
                    weights, grad = (whole[id(b)][leaf.offset :][: leaf.numel] for b in (buffer, grads[name]))
                    has = name not in given or given[name][i]
                    job = Job(leaf, weights.dtype, weights, grad if has else None, kept.rows.get(leaf.path, {}),
                              kept.numbers[leaf.path])  # fmt: skip
                    jobs.append(job)
        self._step(LABEL, jobs, rates)
        kept.put_numbers()
        for buffer in (*main.values(), *kept.tensors):
            start, stop = buffer.span()
            buffer.local.copy_(whole[id(buffer)][start:stop])
        return main, opt


def _whole(buffer: FlatBuffer, sender: Sender) -> torch.Tensor:
    """A bucket's elements from all ranks that shard it, [numel]."""
    flat, bucket = buffer.local, buffer.bucket
    for axis in reversed([axis for axis in bucket.placement.order if axis in bucket.placement.main]):
        ranks = bucket.ranks[axis]
        if ranks > 1:
            one = Collective("all_gather", axis, ranks * flat.numel(), flat.dtype, "", "side", "all leaves")
            flat = sender.send(one, flat, ([flat.numel()] * ranks, [flat.numel()] * ranks))
    return flat if flat is not buffer.local else flat.clone()
