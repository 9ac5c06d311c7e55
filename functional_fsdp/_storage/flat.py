"""FlatBuffer: one rank's part of a bucket, and the one operation on it, `redistribute`.

    FlatBuffer(local [n / ranks], bucket, (("data", Sharded),), mesh)
        .redistribute({"data": Replicated})         all-gather: local [n]

What a transition issues is a `Route` (see `route`), found once and kept; this file only follows it, on the side lane.
Gathers and reductions that a plan names are jobs on lanes of their own: see `_engine.gathers` and `_engine.staging`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .._common.calls import provided
from .._common.device import host_memory, in_host_memory, make_room, zeros_as
from .._common.errors import ScheduleError, SpecError
from .._common.torch_names import foreach_zero_, pytree, unflatten_dense_tensors
from .._common.tracing import traced_as
from .._common.tree import register
from .._plan.layout import Bucket, Leaf
from .._plan.route import Axis, How, Replicated, Sharded, States, route
from .._runtime.runtime import runtime_of

_joined_leaves, summary = provided("axes.joined_leaves"), provided("look.summary")


@dataclass(frozen=True, eq=False, init=False, repr=False)
class FlatBuffer:
    """A bucket, or the part of it that this rank holds.

    Attributes:
        local: 1-D tensor, [bucket.numel / product of the sharding axes' sizes] elements.
        bucket: where the leaves lie in the whole.
        states: (axis, Sharded | Replicated | Partial) for each data axis.
        mesh: the device mesh that the axes belong to.

    A FlatBuffer is a pytree node with one child, so `tree_map` over a dict of them reaches the tensors.
    """

    local: torch.Tensor
    bucket: Bucket
    states: States
    mesh: Any

    def __init__(self, local: torch.Tensor, bucket: Bucket, states: States, mesh: Any) -> None:
        fields = self.__dict__  # the cheapest way, and one that compilers follow: a step makes one for each bucket
        fields["local"], fields["bucket"], fields["states"], fields["mesh"] = local, bucket, states, mesh

    def __repr__(self) -> str:
        """One line: a notebook shows a tree of them as a table. `tree_map` may have put something else in it."""
        local: Any = self.local
        if not isinstance(local, torch.Tensor):
            return f"FlatBuffer({self.bucket.name!r}, {local!r})"
        n, whole = local.numel(), self.bucket.numel
        part = f"{n:,}" if n == whole else f"{n:,} of {whole:,}"
        placed = ", ".join(f"{axis}: {state}" for axis, state in self.states)
        count, dtype = len(self.bucket.leaves), str(local.dtype).removeprefix("torch.")
        leaves = f"{count} leaves" if count != 1 else "1 leaf"
        return f"FlatBuffer({self.bucket.name!r}, {leaves}, {part} elements, {dtype}, {placed or 'on no axis'})"

    def but(self, local: torch.Tensor, states: States | None = None) -> FlatBuffer:
        """The same bucket with other numbers, and perhaps in other states."""
        return FlatBuffer(local, self.bucket, states or self.states, self.mesh)

    def sharded(self) -> tuple[str, ...]:
        return tuple(axis for axis, state in self.states if state is Sharded)

    def only(self, labels: Container[str]) -> FlatBuffer | None:
        """The same tensor as that of the leaves with these labels, which lie among the others; None if it has none of
        them. Example: `buffer.only({"matrix"})`."""
        bucket = self.bucket.only(labels)
        if bucket is None or bucket is self.bucket:
            return self if bucket else None
        return FlatBuffer(self.local, bucket, self.states, self.mesh)

    def span(self) -> tuple[int, int]:
        """The elements [start, stop) of the bucket that `local` holds."""
        return self.bucket.span(self.sharded(), coordinate_of(self.mesh))

    def by_label(self, given: Sequence[bool] | None = None) -> list[tuple[str, torch.Tensor]]:
        """(label, view) for each run of leaves of one label in `local`: what an optimizer updates with one setting.

        Args:
            given: for each leaf of the bucket, whether it got a gradient; runs are of those that did. None: all.
        """
        if given is None and len(self.bucket.labels) == 1 and not self.bucket.among:
            return [(self.bucket.labels[0][0], self.local)]
        start, stop = self.span()
        runs = self.bucket.labels if given is None else self.bucket.runs(given)
        cuts = ((label, max(a, start), min(b, stop)) for label, a, b in runs)
        return [(label, self.local[a - start : b - start]) for label, a, b in cuts if a < b]

    def by_leaf(self, given: Sequence[bool] | None = None) -> list[tuple[int, torch.Tensor]]:
        """(which leaf of the bucket, view) for each leaf of which `local` has a part, of those that `given` names."""
        start, stop = self.span()
        leaves = enumerate(self.bucket.leaves)
        cuts = ((i, *leaf.within(start, stop)) for i, leaf in leaves if given is None or given[i])
        return [(i, self.local[a - start : b - start]) for i, a, b in cuts if a < b]

    def gather(self, whole: torch.Tensor, lane: str = "side") -> torch.Tensor:
        """Cast `local` into its own place in `whole` [n] (of any dtype) and gather in place: no copy-out."""
        start, stop = self.span()
        own = self.but(whole[start:stop].copy_(self.local))
        own.redistribute(tuple((axis, Replicated) for axis, _ in self.states), whole, lane=lane)
        return whole

    def redistribute(
        self,
        target: Mapping[str, Axis] | States,
        out: torch.Tensor | None = None,
        *,
        average: str = "mean",
        lane: str = "side",
    ) -> FlatBuffer:
        """Move to other per-axis states, by the collectives in the table at the top of this file.

        Args:
            target: the state wanted for each axis; axes left out keep theirs.
            out: 1-D destination of the result's size and this buffer's dtype. A gather is in place when `self.local` is
                this rank's own slice of `out`.
            average: "mean" or "sum" for what was Partial.
            lane: whose communicator it goes by.

        Returns:
            the result; its `local` is `out` where that was given, a view of this one's where nothing had to move.

        Raises:
            SpecError: an unknown axis, a transition that is not in the table, or an `out` of the wrong size or dtype.

        Example, [n / ranks] -> [n]: `FlatBuffer(shard, bucket, (("data", Sharded),), mesh).redistribute({"data":
        Replicated})`
        """
        run = runtime_of(self.mesh)
        wanted = target if isinstance(target, tuple) else tuple(target.items())
        dtype = self.local.dtype
        way = route(self.bucket, self.states, wanted, run.position, How(dtype, dtype, (lane, lane), average))
        if out is not None and (out.shape != (way.numel,) or out.dtype != dtype):
            raise SpecError(
                f"redistribute({self.bucket.name!r}): out has shape {tuple(out.shape)} and dtype {out.dtype}; expected "
                f"({way.numel},) and {dtype}."
            )
        moves = bool(way.steps) or way.states == self.states or out is not None
        local = self.local.clone() if way.sums or not moves else self.local  # what is whole is nobody's shard
        for i, (kind, collectives, start, size) in enumerate(way.steps):
            if kind == "slice":
                local = local[start : start + size]
                continue
            (one,) = collectives
            part = local
            if kind == "gather":
                if i == 0:
                    whole = out if out is not None else local.new_empty(way.numel)
                part = whole[start : start + size]
            elif kind == "scatter":
                part = out if out is not None and size == way.numel else local.new_empty(size)
            run.now(one, part, local)
            local = part
        if out is not None and local is not out:
            local = out if local.data_ptr() == out.data_ptr() else out.copy_(local)
        return self.but(local, way.states)


register(
    FlatBuffer,
    lambda b: ((b.local,), (b.bucket, b.states, b.mesh)),
    ("local",),
    lambda context, children: FlatBuffer(children[0], *context),
)


def _places(mesh: Any) -> dict[str, int]:
    """As the mesh itself says it; of one that only plans, at the first place."""
    if isinstance(mesh, tuple):
        return {axis: 0 for axis, _ in mesh}
    return {axis: mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names}


@traced_as(_places)  # compilers cannot look a runtime up
def coordinate_of(mesh: Any) -> dict[str, int]:
    """Where this rank stands on each axis."""
    return runtime_of(mesh).coordinate


def zeros(like: dict[str, FlatBuffer], trees: int = 1) -> list[dict[str, FlatBuffer]]:
    """So many trees of zeros: what an optimizer keeps beside main weights."""
    there = [buffer.local for buffer in like.values() if not in_host_memory(buffer.local)]
    for device in {local.device for local in there}:
        make_room([local.nbytes for local in there] * trees, device)
    return [{name: b.but(zeros_as(b.local)) for name, b in like.items()} for _ in range(trees)]


def at_home(tree: Any, weights: bool = False) -> Any:
    """A tree of main weights, or of what an optimizer keeps, with FlatBuffers in the memory that their placement names:
    those that an optimizer has made elsewhere, or that a file or a copy brings, are moved.

    weights: of compute copies.
    """

    def moved(x: Any) -> Any:
        if not isinstance(x, FlatBuffer) or x.bucket.by_leaf or x.local.device.type == "meta":
            return x
        if not (x.bucket.copy_on_host if weights else x.bucket.on_host) or in_host_memory(x.local):
            return x
        return x.but(host_memory(x.local.numel(), x.local.dtype, x.local.device).copy_(x.local))

    return pytree.tree_map(moved, tree, is_leaf=lambda x: isinstance(x, FlatBuffer))


def no_counts(like: FlatBuffer, dtype: torch.dtype = torch.int64) -> FlatBuffer:
    """Zeros [leaves of the bucket], the same on every rank that shares the leaves."""
    bucket = like.bucket.counts
    states = tuple((axis, Replicated) for axis, _ in like.states)
    return FlatBuffer(torch.zeros(bucket.numel, dtype=dtype, device=like.local.device), bucket, states, like.mesh)


@lru_cache(maxsize=65536)
def templates(bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(shape, device="meta") for shape in bucket.pieces)


def leaves_of(bucket: Bucket, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The leaves by path, as views of the whole bucket [numel], each of its global shape; one call for all."""
    pieces = unflatten_dense_tensors(whole, templates(bucket))
    views = {leaf.path: pieces[i] for leaf, i in zip(bucket.leaves, bucket.leaf_pieces, strict=True)}
    for leaf in bucket.empty:  # the one call forgets their shapes
        views[leaf.path] = whole.new_empty(leaf.shape)
    return views


class LeafShard(NamedTuple):
    """This rank's elements of one leaf: those from `start` on of the leaf, flattened. `local` is a view, 1-D."""

    leaf: Leaf
    start: int
    local: torch.Tensor


def leaf_shards(buffer: FlatBuffer) -> list[LeafShard]:
    """The leaves of a buffer's bucket, in order, the same on every rank; each with the part that this rank holds.

    Returns:
        (leaf, start, local): a leaf has its global `shape`, its `path` and its `numel`; element i of `local` is element
        `start + i` of the leaf, flattened. Where other ranks hold all of it, `local` is empty and `start` 0.

    Collective: none.

    Example: `for leaf, start, local in extend.leaf_shards(buffer): ...`.
    """
    start, stop = buffer.span()
    found = []
    for leaf in buffer.bucket.leaves:
        a, b = leaf.within(start, stop)
        part = (a - leaf.offset, buffer.local[a - start : b - start]) if a < b else (0, buffer.local[:0])
        found.append(LeafShard(leaf, *part))
    return found


def padding(buffer: FlatBuffer) -> list[torch.Tensor]:
    """What this rank holds that is of no leaf, between leaves and after them: views, 1-D."""
    gaps = _gaps(buffer.bucket)
    start, stop = buffer.span() if gaps else (0, 0)
    cuts = ((max(a, start), min(b, stop)) for a, b in gaps)
    return [buffer.local[a - start : b - start] for a, b in cuts if a < b]


def _found_gaps(bucket: Bucket) -> list[tuple[int, int]]:
    leaves = bucket.leaves
    begins, ends = [0, *(one.offset + one.numel for one in leaves)], [*(one.offset for one in leaves), bucket.numel]
    return [(a, b) for a, b in zip(begins, ends, strict=True) if a < b]


_gaps = traced_as(_found_gaps)(lru_cache(maxsize=65536)(_found_gaps))  # `change` asks in each step


def clear_padding(buffers: Iterable[FlatBuffer]) -> None:
    """Put zeros where no leaf lies, at once."""
    if views := [view for buffer in buffers for view in padding(buffer)]:
        foreach_zero_(views)


def gather_leaves(buffer: FlatBuffer, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The leaves of a buffer by path, whole, of their global shapes: views of one new tensor.

    Args:
        dtype: of the result, and so of what travels; by default the buffer's own.

    Raises:
        ScheduleError: gradients that may still be under way, or are partial.

    Collective: an all-gather for each axis that shards it, which compute waits for. Eager.

    Example: `extend.gather_leaves(fsdp.finish_reductions(state).grads["head"])["head.weight"]`.
    """
    bucket = buffer.bucket
    for lineage in runtime_of(buffer.mesh).lineages:
        if lineage.executor is not None and lineage.executor.reductions.awaits(buffer):
            raise ScheduleError(
                f"gather_leaves: the gradients of {bucket.name!r} may be on their way still, or partial. Take whole "
                "ones: state = fsdp.finish_reductions(state), and then those of state.grads."
            )
    return leaves_of(bucket, buffer.gather(buffer.local.new_empty(bucket.numel, dtype=dtype or buffer.local.dtype)))


def whole_leaves(buffer: FlatBuffer, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """As `gather_leaves`, and of leaves that are cut along axes of the model's own the parts of all ranks, joined.

    Collective: one all-gather more for each such axis of a bucket.

    Raises:
        SpecError: of scales of blocks, see `refuse_blocks`.
    """
    if not any(leaf.cuts for leaf in buffer.bucket.leaves):
        return gather_leaves(buffer, dtype)
    refuse_blocks(buffer.bucket, buffer.bucket.leaves[0].path)
    joined: dict[str, torch.Tensor] = _joined_leaves(buffer, dtype)
    return joined


def refuse_blocks(bucket: Bucket, path: str) -> None:
    """Refuse to join or cut otherwise what lies by blocks of each rank's part of a leaf.

    Raises:
        SpecError: the bucket is of such blocks.
    """
    if bucket.every > 1:
        raise SpecError(
            f"what the optimizer keeps of {path!r} is in a codec, by blocks of each rank's part: the leaf is cut along "
            "axes of the model's own, and these parts are neither joined nor cut otherwise. Keep the axes and their "
            "ranks; or have plain moments, adamw without moments=, which begin anew: load(..., allow=['optimizer'])."
        )
