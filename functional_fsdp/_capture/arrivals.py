"""Updates on arrival: what a captured step does with gradients that the eager step before it updated beside the rest.

    eager      ── reduce 3 ─▶ main gradients ─┬─ reduce 2 ─▶ main gradients ─┬── ...    step: ranks vote, then update
                                              └─ (update 3)                  └─ (update 2)
    captured   ── reduce 3 ─▶ update 3 ── reduce 2 ─▶ update 2 ── ...                   replay: ranks vote, then all

An eager step votes before anything changes, so its main gradients wait. A captured one changes nothing: its replay
comes after a vote. So there each bucket is updated where its gradients arrive (see `Arrival`), with the same
bits, if the eager step before it has shown that nothing looks at gradients and weights in between.

Arrivals: gradients that are used up where they arrive, piece by piece, so that there are no main gradients.

    reduce lane   copies of 3 ─ sum 3a ─ update 3a ─ sum 3b ─ update 3b ─ copies of 2 ─ sum 2a ─ ...

Each piece of the sum lies on the bytes of the one before, and its update reads it while the GPU's cache still has it:
so the sum goes through memory neither way. `Staging` ends a reduction like this where it has an `Arrival` for the
bucket, which steps that are captured have.

The last reductions of a step have little backward left beside which they could travel. Where a sum over one axis is all
that one does, and the copy engines bring it, each piece is used up while the next ones come; by collectives all pieces
come at once, and are used up while the next reduction travels:

    reduce lane   1a comes ─ 1b comes ──────────────┬─ 0a comes ─ 0b comes
    update lane              sum 1a ─ update 1a ─ sum 1b ─ update 1b ─ sum 0a ─ ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._common.errors import ScheduleError
from .._common.record import Mark
from .._common.torch_names import make_wrapper, pytree
from .._engine.sink import BucketConsumer, StepConsumer
from .._exact_sums.ordered_sum import ordered_sum
from .._host_memory.cut import cut, cuts
from .._optim.optimizer import labels_of
from .._runtime.given import NewCounts
from .._runtime.lanes import HostLanes
from .._storage import FlatBuffer
from .._verbs import in_place, renew

if TYPE_CHECKING:
    from .._state.state import State

__all__ = ["Arrival", "Gone", "Rooms", "UpdatesOnArrival", "gone"]


class Rooms:
    """Memory for one piece from each lane, of each dtype. It is there until the step is captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.largest: dict[torch.dtype, int] = {}  # elements of a piece
        self.rooms: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def fit(self, dtype: torch.dtype, numel: int) -> None:
        """Pieces have so many elements. Said of all before the first begins: lanes still use what is there."""
        self.largest[dtype] = max(numel, self.largest.get(dtype, 0))

    def have(self, lane: str, dtype: torch.dtype) -> None:
        """Have one on a lane. Compute makes it: what is made on a lane is free for that lane's next work."""
        if (lane, dtype) not in self.rooms:
            self.rooms[lane, dtype] = torch.empty(self.largest[dtype], dtype=dtype, device=self.device)

    def at(self, lane: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self.rooms[lane, dtype][:numel]


class Arrival(BucketConsumer):
    """What becomes of one bucket's gradients in a step in which they come once.

    Args:
        name: of the bucket. pieces: the elements [start, stop) of what this rank holds of it, in a row; at least one.
        update: uses a piece up: the optimizer's update of these main weights.

    Attributes:
        used: whether the gradients have come. sums: whether exact sums are made in its rooms. lane: which brings them.
            beside: whether they are used up on the update lane, while the rest comes.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, pieces: Sequence[tuple[int, int]], rooms: Rooms,
        update: Callable[[int, int, torch.Tensor], None],
    ) -> None:  # fmt: skip
        self.name, self.dtype, self.pieces, self.rooms, self.update = name, dtype, pieces, rooms, update
        self.sums = dtype is torch.float32
        rooms.fit(dtype, max(stop - start for start, stop in pieces))

    def begin(self, lane: str, sums: bool, beside: bool) -> torch.Tensor:
        """They are on their way on this lane, if need be to be summed or cast in its room. Returns what stands for main
        gradients."""
        self.used = True
        self.lane, self.beside = lane, beside
        if sums:
            self.rooms.have(lane, self.dtype)
        return gone(self.name, self.pieces[-1][1], self.dtype, self.rooms.device)

    def add_up(
        self, came: torch.Tensor, ranks: int, mean: bool, own: tuple[int, torch.Tensor] | None, lanes: HostLanes,
        there: Sequence[Mark] = (),
    ) -> Mark:  # fmt: skip
        """They came as each rank sent them, or come, each piece by its point of `there`: add each up as `ordered_sum`
        does, and use it up. Returns the point from which on all are added up.

        Raises:
            ScheduleError: the transport said of another number of pieces that they are there.
        """
        if there and len(there) != len(self.pieces):
            raise ScheduleError(
                f"exchange of the transport's Carrier: portions.there has {len(there)} points, and portions.cuts has "
                f"{len(self.pieces)} portions. Append self.run.lanes.mark() once for each portion, in their order, "
                "after it has come from all ranks; or leave portions alone."
            )
        for (start, stop), came_in in zip(self.pieces, there or [None] * len(self.pieces), strict=True):
            lanes.wait(came_in)
            room = self.rooms.at(self.lane, self.dtype, stop - start)
            ordered_sum(came, ranks, room, mean, own, start)
            summed = lanes.mark() if stop == self.pieces[-1][1] else None
            self.update(start, stop, room)
        return summed

    def use(self, local: torch.Tensor) -> None:
        """They are there, added up: use them up."""
        for start, stop in self.pieces:
            piece = local[start:stop]
            if piece.dtype is not self.dtype:
                piece = self.rooms.at(self.lane, self.dtype, stop - start).copy_(piece)
            self.update(start, stop, piece)

    def refuse(self, what: str) -> None:
        """The step does something that cannot be, now that its weights are new."""
        raise ScheduleError(
            f"cuda_graph: {what} after the gradients of {self.name!r} had come. With "
            "Schedule(overlap_update=True) a captured step updates these weights where their gradients arrive, as the "
            "eager step before it let it; between reduce and step nothing may read them, replace gradients or add to "
            "them. Do the same in every step, or leave overlap_update out."
        )


class Gone(torch.Tensor):
    """Stands for main gradients that were used up: it has a shape and a dtype, and whoever reads it is told."""

    bucket: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        one = next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Gone)), None)
        raise ScheduleError(
            f"cuda_graph: state.grads[{'...' if one is None else repr(one.bucket)}] was read or changed in a captured "
            "step. With Schedule(overlap_update=True) such a step updates weights where their gradients arrive, and "
            "keeps none. Call state = fsdp.finish_reductions(state) in every step before gradients are read: "
            "then they are kept."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Gone({self.bucket!r}, {self.numel():,} elements, {self.dtype})"


def gone(bucket: str, numel: int, dtype: torch.dtype, device: torch.device) -> Gone:
    made: Gone = make_wrapper(Gone, (numel,), dtype=dtype, device=device)
    made.bucket = bucket
    return made


LEAST = 1 << 20  # bytes of main gradients: smaller buckets share updates at the end of a step
PIECE = 1 << 25  # bytes: what the caches of GPUs hold beside other things, and not so few that launches take the time


class UpdatesOnArrival(StepConsumer):
    """Takes part in a step that is captured: these buckets are updated where their gradients arrive, as far as they
    can be."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.changes: tuple[Any, ...] = ()  # what updates change

    def begin(self, state: Any) -> dict[str, BucketConsumer]:
        """What a rate is computed from is read now, by compute."""
        self.changes = _changing(state)
        return _arrivals(state, self.names)

    def check(self, state: Any, used: Sequence[BucketConsumer], skip: Any, lacking: Collection[str]) -> None:
        """Refuse to end a captured step that would have kept what it has updated already.

        Raises:
            ScheduleError: it may be taken back, or has another state than when its first gradients came. NewCounts:
                leaves got no gradient, which have one as a rule.
        """
        if skip is not None:
            used[0].refuse("step(skip=) was called")
        if state.version.lineage.runtime.gate is not None:
            used[0].refuse("ranks were asked whether they take the step")
        if any(a is not b for a, b in zip(_changing(state), self.changes, strict=True)):
            used[0].refuse("main weights, optimizer state, the optimizer or the count were replaced")
        for one in used:
            if one.name in lacking:
                raise NewCounts(
                    f"cuda_graph: leaves of {one.name!r} that got a gradient in the step before got none in the step "
                    "that is captured, which has updated them."
                )


def _changing(state: State) -> tuple[Any, ...]:
    return state.main, state.opt, state.optimizer, state.count


def _arrivals(state: State, names: Sequence[str]) -> dict[str, BucketConsumer]:
    """Of these buckets, which the last eager step reduced once and updated beside the rest of its backward, those that
    a captured one can update on arrival."""
    optimizer = state.optimizer
    if getattr(optimizer, "communicates", False) or not getattr(optimizer, "elementwise", False):
        return {}
    buckets = [state.layout.buckets[name] for name in names]
    fixed = optimizer.for_step(state.count, labels_of(buckets)) if hasattr(optimizer, "for_step") else None
    if fixed is None:
        return {}
    nodes = pytree.tree_leaves(state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
    by_leaf = {x.bucket.name for x in nodes if isinstance(x, FlatBuffer) and x.bucket.by_leaf}
    rooms = Rooms(state._executor.run.device)
    found: dict[str, BucketConsumer] = {}
    for bucket in buckets:
        n, width = state.main[bucket.name].local.numel(), bucket.grads.itemsize
        if n * width < LEAST or bucket.on_host or bucket.grads_on_host:
            continue
        pieces = cuts(n, width, PIECE)
        if bucket.name in by_leaf and len(pieces) > 1:  # each piece would count a step
            continue
        update = _update(state._evolve(optimizer=fixed), bucket.name)
        found[bucket.name] = Arrival(bucket.name, bucket.grads, pieces, rooms, update)
    return found


def _update(state: State, name: str) -> Any:
    def update(start: int, stop: int, grad: torch.Tensor) -> None:
        def mine(x: Any) -> Any:
            here = isinstance(x, FlatBuffer) and x.bucket.name == name and not x.bucket.by_leaf
            return cut(x, x.local[start:stop], start) if here else x

        opt = pytree.tree_map(mine, state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
        main = state.main[name]
        part = mine(main)
        in_place(state._evolve(opt=opt), {name: part}, grads={name: cut(main, grad, start)})
        renew(state, part)  # while the cache has it

    return update
