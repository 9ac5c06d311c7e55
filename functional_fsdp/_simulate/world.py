"""World: what simulated ranks share, the lanes of one, and how torch and this package come to know them.

Traffic: what simulated ranks have sent each other.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from .._common.errors import FsdpError
from .._common.record import QUEUES, Collective, Mark
from .._common.torch_names import c10d
from .._distributed import HostVote, Levelled
from .._runtime.lanes import HostLanes
from .groups import Group, Meeting, Work
from .turns import Turns

__all__ = ["Medium", "Traffic", "World"]

BY = ("axis", "lane", "unit", "kind")


class Traffic:
    """The collectives of this package that simulated ranks issued, and the bytes that each rank received. Those of
    `T.collectives` in a model are on the lane "compute".

    Printing it shows a table by axis, lane, unit and kind, of all ranks together.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Count from here on."""
        self.found: Counter[tuple[int, str, str, str, str]] = Counter()
        self.received: Counter[tuple[int, str, str, str, str]] = Counter()

    def note(self, rank: int, hop: Collective, ranks: int) -> None:
        key = rank, hop.axis or "(all)", hop.lane, hop.bucket, hop.kind
        self.found[key] += 1
        self.received[key] += hop.received(ranks)

    def bytes(self, **only: Any) -> int:
        """Received, by all ranks together or by those that are asked for.

        Args:
            **only: of rank, axis, lane, unit and kind, those that count.

        Example: `w.traffic.bytes(axis="shard", lane="gather", rank=0)`.
        """
        return _sum(self.received, only)

    def collectives(self, **only: Any) -> int:
        """How many were issued, each counted by every rank; otherwise as `bytes`."""
        return _sum(self.found, only)

    def __repr__(self) -> str:
        rows: dict[tuple[str, ...], list[int]] = {}
        for key, count in self.found.items():
            row = rows.setdefault(key[1:], [0, 0])
            row[0] += count
            row[1] += self.received[key]
        lines: list[tuple[str, ...]] = [(*BY, "collectives", "bytes received")]
        lines += [(*key, f"{count:,}", f"{nbytes:,}") for key, (count, nbytes) in sorted(rows.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = ("<",) * len(BY) + (">", ">")
        return "\n".join(
            "  ".join(f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True))
            for line in lines
        )


def _sum(counted: Counter[tuple[int, str, str, str, str]], only: dict[str, Any]) -> int:
    names = ("rank", *BY)
    if unknown := only.keys() - {*names}:
        raise TypeError(f"traffic: {sorted(unknown)[0]!r} is unknown; expected some of {', '.join(names)}")
    chosen = [(names.index(name), value) for name, value in only.items()]
    return sum(n for key, n in counted.items() if all(key[i] == value for i, value in chosen))


BACKEND = "simulated"
WHOLE_STEP = (
    "simulated ranks cannot compile a whole step: torch.compile does one thing at a time in a process, and finds the "
    "communicators of one rank only. Take the step eagerly or by T.cuda_graph, or compile units by "
    "T.forward_backward(compile=...); or run it on processes."
)
NAMES = 1 << 20  # of groups, for each rank
_starts = itertools.count(1)


class World:
    """What the ranks of one simulation share.

    Attributes:
        ranks: those that there are; others bring what the first one brings.
        said: the ranks' store. cells: of votes, by the place of a mesh in it.
    """

    def __init__(self, size: int, turns: Turns) -> None:
        self.size, self.turns = size, turns
        self.ranks = {rank.number: rank for rank in turns.ranks}
        self.meetings: dict[Any, Meeting] = {}
        self.letters: dict[Any, list[torch.Tensor]] = {}
        self.said: dict[str, bytes] = {}
        self.cells: dict[str, bytearray] = {}
        self.traffic = Traffic(size)
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]


def simulated(hop: Collective, out: torch.Tensor, given: torch.Tensor, group: Group) -> Iterator[list[Any] | str]:
    """One collective, as `gloo` in `_runtime.lanes`: the same, as one meeting."""
    yield [partial(_issue, hop, out, given, group)]


def _issue(hop: Collective, out: torch.Tensor, given: torch.Tensor, group: Group) -> Work:
    what = f"{hop.kind} of {hop.bucket!r} ({hop.lane} lane, {hop.numel} {str(hop.dtype).removeprefix('torch.')})"
    world = group.world
    world.traffic.note(group.global_rank, hop, group.n)
    world.turns.offer()
    if hop.kind == "barrier":
        return group.meet(what, (None, None), lambda came: None)
    if hop.kind == "all_gather":
        return group.all_gather(what, out, given)
    if hop.kind == "all_to_all" and hop.splits:
        came, sent = hop.splits
        return group.exchange(what, [*out.split(list(came))], [*given.split(list(sent))])
    if hop.kind == "all_to_all":
        return group.exchange_even(what, out, given)
    return group.reduce_to(what, hop.op, out, given if hop.kind == "reduce_scatter" else out, hop.kind != "all_reduce")


class Lanes(HostLanes):
    """The host's queues, whose collectives are meetings."""

    backend = BACKEND
    collective = exchange = staticmethod(simulated)

    def traced(self, lane: str) -> str:
        raise FsdpError(WHOLE_STEP)

    def submit(self, lane: str, hops: tuple[Collective, ...], *args: Any, **kwargs: Any) -> Mark:
        self.run.medium.world.turns.issues(self.run.votes + 1, lane, [hop.bucket for hop in hops])
        return super().submit(lane, hops, *args, **kwargs)


class Store:
    """The ranks' store, of one mesh. What ranks say that are not there is what the first one says."""

    def __init__(self, world: World, ranks: list[int], place: str) -> None:
        self.world, self.place = world, place
        here = [i for i, rank in enumerate(ranks) if rank in world.ranks]
        self.instead = {str(i): str(here[0]) for i in range(len(ranks)) if i not in here}

    def _key(self, key: str) -> str:
        what, _, rank = key.rpartition("/")
        told = what.startswith(("status", "log")) and rank in self.instead
        return f"{self.place}/{what}/{self.instead[rank]}" if told else f"{self.place}/{key}"

    def check(self, keys: list[str]) -> bool:
        return all(self._key(key) in self.world.said for key in keys)

    def get(self, key: str) -> bytes:
        return self.world.said[self._key(key)]

    def set(self, key: str, value: str | bytes) -> None:
        key, data = f"{self.place}/{key}", value.encode() if isinstance(value, str) else value
        self.world.said[key] = data
        self.world.turns.stir((key, data))

    def delete_key(self, key: str) -> bool:
        return self.world.said.pop(f"{self.place}/{key}", None) is not None


class Watch:
    """Which ranks are gone, by place among those of a mesh."""

    def __init__(self, world: World, ranks: Mapping[int, int]) -> None:
        self.seen = {place: world.ranks[rank] for place, rank in ranks.items() if rank in world.ranks}
        self.size = len(ranks)

    def ended(self) -> list[int]:
        return [place for place, rank in self.seen.items() if rank.gone]

    def __len__(self) -> int:
        return self.size


class Vote(HostVote):
    """Numbers of a ballot meet as others do; what is issued is compared in cells."""

    def __init__(self, run: Any, memory: Any) -> None:
        super().__init__(memory, run.rank, run.size, run.watch, run.timeout)
        self.group = run.control

    def largest(self, ballot: Any) -> Iterator[list[Any] | str]:
        def act(came: list[Any]) -> None:
            most, least = (max(given[i] for _, given in came) for i in range(2))
            for out, _ in came:
                if out is not None:
                    out[0], out[1] = most, least

        yield [lambda: self.group.meet("a vote", (ballot, [int(n) for n in ballot]), act)]


class Medium:
    """By what a simulated rank reaches the others, see `_distributed`."""

    lanes = Lanes

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.met: Counter[Any] = Counter()

    def level(self, ranks: list[int], timeout: timedelta, offers: Any = ()) -> Levelled:
        self.met[tuple(ranks)] += 1
        place = f"{'.'.join(map(str, ranks))}/{self.met[tuple(ranks)]}"
        return Levelled(place, [], {i: rank for i, rank in enumerate(ranks) if rank != self.rank})

    def forget(self, place: str, ranks: list[int]) -> None:
        pass

    def store(self, place: str) -> Store:
        return Store(self.world, [*map(int, place.partition("/")[0].split("."))], place)

    def group(
        self, ranks: list[int], what: str, timeout: Any, backend: str, options: Any = None, gone: Any = None
    ) -> Group:
        key = tuple(ranks), what, self.met[tuple(ranks), what]
        self.met[tuple(ranks), what] += 1
        return Group(self.world, self.rank, ranks, key)

    def watch(self, ranks: Mapping[int, int]) -> Watch:
        return Watch(self.world, ranks)

    def vote(self, run: Any) -> Vote:
        size = Vote.nbytes(run.size, len(QUEUES))
        return Vote(run, self.world.cells.setdefault(run.place, bytearray(size)))

    def now(self) -> float:
        return self.world.turns.now

    def rest(self, seconds: float) -> None:
        self.world.turns.rest(seconds)

    def elsewhere(self) -> str:
        current = self.world.turns.current
        if current is not None and current.number == self.rank:
            return ""
        return (
            f"this state is of simulated rank {self.rank}, and ranks communicate within a call only. "
            "Give their handle to a function: ranks(fn, state)."
        )

    def until_done(self, future: Any) -> None:
        if self.world.turns.current is None:  # the caller asks, when all have ended
            Future.exception(future)
        else:
            self.world.turns.park(future.done, "what this process does beside it", real=True)


def torch_world(medium: Medium) -> Any:
    """What `torch.distributed` knows of groups, of one rank: nothing yet. Groups have names, which C++ has one space
    for: so each rank counts from another number on."""
    return SimpleNamespace(
        default_pg=None, pg_map={}, pg_names={}, pg_group_ranks={}, pg_backend_config={}, tags_to_pg={}, pg_to_tag={},
        pg_coalesce_state={}, comms=[], pg_config_info=[], group_count=next(_starts) * NAMES, medium=medium,
    )  # fmt: skip


def enter_torch(world: World, rank: int) -> None:
    """Have `torch.distributed` know this rank, in whose turn this is."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _made, extended_api=True, devices=["cpu", "cuda"])
    hook = sys.excepthook
    dist.init_process_group(BACKEND, store=world.store, rank=rank, world_size=world.size)
    sys.excepthook = hook
    group: Any = dist.group.WORLD
    group.medium = c10d._world.medium


def leave_torch(known: Any) -> None:
    """Nobody looks for these groups any more."""
    for name in known.pg_names.values():
        c10d._unregister_process_group(name)


def _made(options: Any, _: Any) -> Group:
    """A group of torch's, for the rank whose turn it is."""
    medium: Medium = c10d._world.medium
    return medium.group(list(options.global_ranks_in_group) or [*range(options.group_size)], "torch", None, BACKEND)
