"""Groups of ranks that take turns: torch's ProcessGroup, whose collectives meet in memory.

    rank 0   all_reduce ──▶ [ 0 ·  ·  · ]
    rank 2   all_reduce ──▶ [ 0 ·  2  · ]   the one that comes last does it for all of them, in order of ranks
    ...

Each rank has an object of its own for a group; the n-th collective of each is the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._common.record import Collective

__all__ = ["Group", "Work"]

Act = Callable[[list[Any]], None]
_Base: Any = dist.ProcessGroup  # whose methods have several forms, of which `torch.distributed` calls one


class Meeting:
    """One collective, until all have come."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.first = what, rank
        self.came: dict[int, Any] = {}
        self.done = False

    def over(self) -> bool:
        return self.done


class Work(dist.Work):
    """A collective under way, of one rank."""

    def __init__(self, world: Any, meeting: Meeting, result: Any = None) -> None:
        super().__init__()
        self.world, self.meeting, self.found = world, meeting, result

    def is_completed(self) -> bool:
        return self.meeting.done

    def is_success(self) -> bool:
        return self.meeting.done

    def result(self) -> Any:
        return self.found

    def wait(self, timeout: timedelta | None = None) -> bool:
        """RuntimeError: not within the timeout."""
        patience = timeout.total_seconds() if timeout else float("inf")
        if not self.meeting.done and not self.world.turns.park(self.meeting.over, self.meeting.what, patience):
            raise RuntimeError("not all ranks have come yet")
        return True


class Group(_Base):  # type: ignore[misc]
    """This rank's part of a group.

    Args:
        ranks: all of them, in the order of the group. key: the same on each of them.
    """

    def __init__(self, world: Any, rank: int, ranks: Sequence[int], key: Any) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self.world, self.global_rank, self.ranks, self.key = world, rank, list(ranks), key
        self.place, self.n = self.ranks.index(rank), len(ranks)
        self.count = 0
        self.name = self.description = ""
        self.here = [i for i, other in enumerate(ranks) if other in world.ranks]

    # ---- meeting

    def meet(self, what: str, mine: Any, act: Act) -> Work:
        """This rank comes to a collective.

        Args:
            what: the same on all ranks. act: does it, of what each rank brought.

        Raises:
            RuntimeError: another rank has come to something else.
        """
        world, key = self.world, (self.key, self.count)
        meeting = world.meetings.get(key)
        if meeting is None:
            meeting = world.meetings[key] = Meeting(what, self.global_rank)
        if meeting.what != what:
            raise RuntimeError(
                f"rank {self.global_rank} comes to {what}, where rank {meeting.first} came to {meeting.what}: the "
                f"collective number {self.count + 1} of the ranks {self.ranks}"
            )
        self.count += 1
        meeting.came[self.place] = mine
        world.turns.stir()
        if len(meeting.came) == len(self.here):
            del world.meetings[key]
            with torch.no_grad():
                act(self._all(meeting.came))
            meeting.done, meeting.came = True, {}
        return Work(world, meeting)

    def _all(self, came: dict[int, Any]) -> list[Any]:
        """By place. Those that are not there bring what the first does, and get nothing."""
        if len(came) == self.n:
            return [came[i] for i in range(self.n)]
        _, given = came[self.here[0]]
        return [came.get(i, (None, given)) for i in range(self.n)]

    def note(self, axis: str, kind: str, x: torch.Tensor) -> None:
        """A model's own code sends this."""
        hop = Collective(kind, axis, x.numel(), x.dtype, "", "compute", "(the model)")
        self.world.traffic.note(self.global_rank, hop, self.n)

    # ---- collectives of this package

    def all_gather(self, what: str, out: torch.Tensor, given: torch.Tensor) -> Work:
        return self.meet(what, (out, given), _gather)

    def reduce_to(self, what: str, op: str, out: torch.Tensor, given: torch.Tensor, scatter: bool) -> Work:
        def act(came: list[Any]) -> None:
            total = _reduced([given for _, given in came], op)
            parts = total.view(-1).chunk(len(came)) if scatter else [total] * len(came)
            for (out, _), part in zip(came, parts, strict=True):
                if out is not None:
                    out.copy_(part.view(out.shape))

        return self.meet(what, (out, given), act)

    def exchange(self, what: str, out: list[torch.Tensor], given: list[torch.Tensor]) -> Work:
        """To each rank what every rank has for it."""

        def act(came: list[Any]) -> None:
            copies = [[part.clone() for part in given] for _, given in came]
            for place, (outs, _) in enumerate(came):
                for out, parts in zip(outs or (), copies, strict=False):
                    out.copy_(parts[place].view(out.shape))

        return self.meet(what, (out, given), act)

    def exchange_even(self, what: str, out: torch.Tensor, given: torch.Tensor) -> Work:
        def act(came: list[Any]) -> None:
            n = len(came)
            every = torch.stack([given.reshape(n, -1) for _, given in came], 1)  # [to, from, n / ranks]
            for place, (out, _) in enumerate(came):
                if out is not None:
                    out.copy_(every[place].view(out.shape))

        return self.meet(what, (out, given), act)

    # ---- torch's names for them, as `torch.distributed` calls them

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        op = _op(getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        works = [self.reduce_to(_said("all_reduce", t, op), op, t, t, False) for t in tensors]
        return works[-1]

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        root = opts.rootRank

        def act(came: list[Any]) -> None:
            for place, (out, _) in enumerate(came):
                if out is not None and place != root:
                    out.copy_(came[root][1])

        (t,) = tensors
        return self.meet(_said(f"broadcast from {self.ranks[root]}", t), (t, t), act)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        op, root = _op(opts.reduceOp), opts.rootRank

        def act(came: list[Any]) -> None:
            if came[root][0] is not None:
                came[root][0].copy_(_reduced([given for _, given in came], op))

        (t,) = tensors
        return self.meet(_said(f"reduce to {self.ranks[root]}", t, op), (t, t), act)

    def allgather(self, outs: list[list[torch.Tensor]], given: list[torch.Tensor], opts: Any = None) -> Work:
        def act(came: list[Any]) -> None:
            for every, _ in came:
                for out, (_, part) in zip(every or (), came, strict=False):
                    out.copy_(part.view(out.shape))

        return self.meet(_said("all_gather", given[0]), (outs[0], given[0].clone()), act)

    def all_gather_single(self, out: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather(_said("all_gather", given), out, given)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outs: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return [self.all_gather_single(out, one) for out, one in zip(outs, given, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outs: list[list[torch.Tensor]], given: list[torch.Tensor], opts: Any) -> Work:
        def act(came: list[Any]) -> None:
            for out, (_, part) in zip(came[opts.rootRank][0] or (), came, strict=False):
                out.copy_(part)

        mine = outs[0] if outs else None
        return self.meet(_said(f"gather to {self.ranks[opts.rootRank]}", given[0]), (mine, given[0].clone()), act)

    def scatter(self, outs: list[torch.Tensor], given: list[list[torch.Tensor]], opts: Any) -> Work:
        def act(came: list[Any]) -> None:
            for (out, _), part in zip(came, came[opts.rootRank][1], strict=True):
                if out is not None:
                    out.copy_(part)

        mine = [part.clone() for part in given[0]] if given else None
        return self.meet(_said(f"scatter from {self.ranks[opts.rootRank]}", outs[0]), (outs[0], mine), act)

    def reduce_scatter(self, outs: list[torch.Tensor], given: list[list[torch.Tensor]], opts: Any = None) -> Work:
        return self.reduce_scatter_single(outs[0], torch.cat([part.reshape(-1) for part in given[0]]), opts)

    def reduce_scatter_single(self, out: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        op = _op(getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        return self.reduce_to(_said("reduce_scatter", given, op), op, out, given, True)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return [self.reduce_scatter_single(out, one, opts) for out, one in zip(outs, given, strict=True)][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, out: torch.Tensor, given: torch.Tensor, came: Any = None, sent: Any = None, opts: Any = None
    ) -> Work:
        outs = [*out.split(list(came))] if came else [*out.chunk(self.n)]
        parts = [*given.split(list(sent))] if sent else [*given.chunk(self.n)]
        return self.exchange(f"all_to_all {given.dtype}", outs, parts)

    alltoall_base = all_to_all_single

    def alltoall(self, outs: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None) -> Work:
        return self.exchange(f"all_to_all {given[0].dtype}", outs, given)

    def barrier(self, opts: Any = None) -> Work:
        return self.meet("barrier", (None, None), lambda came: None)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        self.world.letters.setdefault((self.key, self.place, to, tag), []).append(tensors[0].clone())
        self.world.turns.stir()
        return Work(self.world, _over(Meeting("send", self.global_rank)))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        letters = self.world.letters.setdefault((self.key, source, self.place, tag), [])
        self.world.turns.park(lambda: bool(letters), f"a message from rank {self.ranks[source]}")
        tensors[0].copy_(letters.pop(0))
        return Work(self.world, _over(Meeting("recv", self.global_rank)))

    # ---- what torch asks

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def group_desc(self) -> str:
        return self.description

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _set_group_desc(self, description: str) -> None:
        self.description = description

    def getBackendName(self) -> str:
        return "simulated"

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_splitting(self) -> bool:
        return False


def _over(meeting: Meeting) -> Meeting:
    meeting.done = True
    return meeting


def _gather(came: list[Any]) -> None:
    whole = torch.cat([given.reshape(-1) for _, given in came])
    for out, _ in came:
        if out is not None:
            out.copy_(whole.view(out.shape))


def _reduced(every: list[torch.Tensor], op: str) -> torch.Tensor:
    """In order of ranks."""
    total = every[0].clone()
    for one in every[1:]:
        if op in ("sum", "mean"):
            total += one
        else:
            total = _BINARY[op](total, one)
    return total.div_(len(every)) if op == "mean" else total


_BINARY: dict[str, Any] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_OPS = {
    "SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min", "PRODUCT": "product", "BAND": "band", "BOR": "bor",
    "BXOR": "bxor",
}  # fmt: skip


def _op(op: Any) -> str:
    found = next((name for kind, name in _OPS.items() if op == getattr(dist.ReduceOp, kind)), None)
    if found is None:
        raise RuntimeError(f"simulated ranks cannot reduce by {op}")
    return found


def _said(kind: str, t: torch.Tensor, op: str = "") -> str:
    return f"{kind}{op and f' ({op})'} of {str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
