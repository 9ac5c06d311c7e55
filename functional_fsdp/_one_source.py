"""`shard(src=)`: one rank has the values, and every other one gets them from it.

Whole leaves that one rank has, for every rank, a unit at a time.

    rank src    [leaf | leaf | leaf]  bytes of a unit          others    [0 | 0 | 0]
                └──────── all-reduce (max) along each axis of the mesh ────────┘
    every rank  [leaf | leaf | leaf]                                     the same bits

Zeros are the least of bytes, so the largest is what `src` has: any dtype, NaN and -0.0 included.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._common.calls import provide
from ._common.errors import SpecError
from ._common.record import Collective
from ._common.torch_names import pytree
from ._common.tree import flatten
from ._plan.layout import Layout, Unit, aligned
from ._runtime.agreement import Topic
from ._runtime.runtime import Runtime
from ._state.shard import is_dtensor

ALIGN = 16  # bytes: where a leaf begins


class OneSource:
    """The rank `src` of a mesh, where only that one has read the values. `here`: whether it is this one."""

    def __init__(self, run: Runtime, src: int) -> None:
        self.run, self.src = run, src
        self.here = run.ranks[run.rank] == src

    def refuse_parts(self, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        """Refuse DTensors."""
        cut = next((path for path, leaf in zip(paths, leaves, strict=True) if is_dtensor(leaf)), None)
        if cut is not None:
            raise SpecError(
                f"shard(src={self.src}): the leaf {cut!r} is a DTensor, of which each rank has its part. Leave src out."
            )

    def topic(self, buffers: Any) -> Topic:
        """What ranks compare, beside what each was given."""
        paths, leaves, _ = flatten(buffers)
        shapes = [f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else "" for leaf in leaves]
        lines = [f"src: {self.src}", *(f"buffer {path} {said}" for path, said in zip(paths, shapes, strict=True))]
        alike = "Give every rank the same src, and buffers of the same names, shapes and dtypes."
        return Topic(lines, SpecError, "sources", "one", alike)

    def check(self, plan: Layout) -> None:
        """Refuse a rank that is not of the mesh, and leaves that ranks have of their own: one rank has not all of
        them."""
        if self.src not in self.run.ranks:
            raise SpecError(f"shard(src={self.src!r}): the mesh has the ranks {self.run.ranks}. Give one of them.")
        for bucket in plan.buckets.values():
            own = [*bucket.unlike(self.run.sizes)]
            if own:
                raise SpecError(
                    f"shard(src={self.src}): ranks have {bucket.leaves[0].path!r} of their own along {own}, and rank "
                    f"{self.src} has not all of them. Give each rank its values, without src."
                )

    def of_unit(self, unit: Unit, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The leaves of a unit, on every rank."""
        return self._spread({leaf.path: values[leaf.path] for bucket in unit.buckets for leaf in bucket.leaves})

    def buffers(self, buffers: Any) -> Any:
        """A tree of buffers, on every rank."""
        paths, leaves, treedef = flatten(buffers)
        tensors = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
        found = self._spread(tensors) if tensors else {}
        return pytree.tree_unflatten([found.get(path, leaf) for path, leaf in zip(paths, leaves, strict=True)], treedef)

    def _spread(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that the source has, on the mesh's device. Others give tensors of the same shapes and dtypes,
        which are not read and may be on the meta device.

        Memory: the bytes of all of them, once more. Collective: an all-reduce along each axis of the mesh.
        """
        run = self.run
        sizes = [tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values()]
        places = [*itertools.accumulate((aligned(size, ALIGN) for size in sizes), initial=0)]
        whole = torch.zeros(places[-1], dtype=torch.uint8, device=run.device)
        found = {}
        for (path, tensor), at, size in zip(tensors.items(), places, sizes, strict=False):
            found[path] = whole[at : at + size].view(tensor.dtype).view(tensor.shape)
            if self.here and size:
                found[path].copy_(tensor.detach())
        for axis, size in run.sizes.items():
            if size > 1 and len(whole):
                run.now(Collective("all_reduce", axis, len(whole), whole.dtype, "max", "side", ""), whole, whole)
        return found


provide("one_source", OneSource)
