"""What the ranks of a mesh tell each other on the host: which leaves got a gradient, and what they are about to do.

    GradientMask          which leaves got a gradient in a step
    Log, Vote, Agreement  what was issued; ballots and exchanges; news of ranks that have left
    Joint                 a call that fails on all ranks if it fails on one
    Topic, agree          what ranks are to have been given alike, before there is a State

`GradientMask`: which leaves got a gradient in a step, on any rank that shares them. The others keep weights and
moments.

    reduce    notes the leaves of a unit that came (None means none), as a bitmask; ALL where all did, nearly always
    step      the vote carries whether this rank has them all; if none has, ranks exchange a row of bytes
    update    a leaf that no rank has is left as it is

The row has one byte a leaf; of leaves that ranks have each their own (experts) one for each of them:

    [ blocks.0: w, bias | experts of rank 0: w, bias | of rank 1: w, bias ]       0 another rank's
      2          1        2                   2        0            0             1 got none, 2 got one

The largest of each is what any rank got. A captured step has what it found when it was captured, and votes FIXED if
that was not everything: replays of the same step then compare one number, and no rows.

`Agreement`: how the ranks of a mesh compare what they are about to do, tell each other small things, and hear of it
when one of them has left.

    compare     ballots: every rank's number, largest and smallest, for one of the cases of `Case`
    exchange    every rank's object; a `Joint` is a call that fails on all ranks if it fails on one
    listen      while a rank waits for anything, it hears of news: a peer has restarted, failed, or is gone

All of it is on the host. A rank that leaves an exchange before its end, by an interrupt say, is out of step with its
peers, and meets them before anything else (see `_runtime.restart`).

An exchange gives bytes of every rank to every rank:

    head [512]   length, first bytes      one collective: most are that small
    rest [n]     what is left             one more, if there is any, of as many bytes as the longest

Each is a job on the control lane like a ballot, so a rank that does not come to one is missed, and met, as there.

`Joint`: what every rank does at once, part by part, and raises together if it fails on any of them.

    rank 0   do() ── error ──┐            raises its own error
    rank 1   do() ── value ──┴─ exchange ─ raises one of the same kind, which names rank 0 and what it met

So that no rank waits in an exchange for one that has gone.

`agree`: what ranks are to have been given alike, compared before a State is made of it.

    rank 0   work() ── lines ── digests ──┐
    rank 1   work() ── lines ── digests ──┴─ one exchange ── alike: go on
                                                          └─ not: another, of the lines; all raise, naming the first

A line says one thing: a leaf and its shape, the checksum of its values, one setting. Where ranks may differ along some
axes of the mesh (experts, of which each has its own), a line is compared among ranks of one place on those axes.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._common.calls import guard, leave, provided, uninterruptible
from .._common.device import current_device
from .._common.errors import CommError, FsdpError, RestartError, ScheduleError
from .._common.record import QUEUES, Collective, Mark, Steps
from .._common.tree import grouped
from .._distributed import NUMBER, PROCESSES, RING, Ballot, Case, HostVote, ProcessWatch
from .._plan.layout import Bucket, Layout
from .restart import Meeting, announce, restart

if TYPE_CHECKING:
    from .runtime import Runtime

_forms = provided("metrics.Forms")
ALL = -1
OTHERS, NONE, ONE = 0, 1, 2  # in a row
LACKS, FULL, FIXED = 0, 1, 2  # in the vote
EAGER = 1 << 32  # no checksum of a row

Leaves = Mapping[str, tuple[bool, ...]]  # by bucket: for each of its leaves, whether it got a gradient


class Lacking(NamedTuple):
    """Where a leaf got no gradient.

    given: this rank's buckets in which a leaf got none. anywhere: those, and where ranks have leaves of their own,
    other ranks', too: the same on every rank.
    """

    given: Leaves
    anywhere: tuple[str, ...]


WHOLE = Lacking({}, ())


class NewCounts(ScheduleError):
    """While a step is captured the optimizer's state would grow: the step has to be taken eagerly once."""


class Seat(NamedTuple):
    """A bucket's places in the row: `each` for each set of its leaves, this rank's from `start` on."""

    bucket: Bucket
    bits: tuple[int, ...]  # of each leaf in its unit's mask; 0 if it has no elements
    each: range
    start: int


class Seats:
    """The row. Pure.

    Args:
        sizes, coordinate: of the mesh's axes, and this rank's place.
    """

    def __init__(self, layout: Layout, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> None:
        self.units = [unit.name for unit in layout.units if unit.trained]
        self.seats: list[Seat] = []
        self.own = False  # whether ranks have leaves of their own
        at = 0
        for bucket in layout.trainable.values():
            paths = layout.by_name[bucket.unit].paths
            bits = tuple(1 << paths.index(leaf.path) if leaf.numel else 0 for leaf in bucket.leaves)
            index = 0
            axes = bucket.apart(sizes)
            for axis in axes:
                index = index * sizes[axis] + coordinate[axis]
            n, sets = len(bits), prod(sizes[axis] for axis in axes)
            self.seats.append(Seat(bucket, bits, range(at, at + n * sets), at + n * index))
            self.own |= sets > 1
            at += n * sets
        self.numel = at

    def row(self, noted: Mapping[str, int]) -> bytes:
        """This rank's row, from the masks of the units that were reduced."""
        row = bytearray(self.numel)
        for bucket, bits, _, start in self.seats:
            mask = noted.get(bucket.unit, 0)
            row[start : start + len(bits)] = bytes([ONE if not bit or mask & bit else NONE for bit in bits])
        return bytes(row)

    def lacking(self, row: bytes) -> Lacking:
        """What a row of all ranks says; an empty one, that every leaf got a gradient."""
        if NONE not in row:
            return WHOLE
        given = {}
        for bucket, bits, _, start in self.seats:
            mine = row[start : start + len(bits)]
            if NONE in mine:
                given[bucket.name] = tuple([one == ONE for one in mine])
        anywhere = [seat.bucket.name for seat in self.seats if NONE in row[seat.each.start : seat.each.stop]]
        return Lacking(given, tuple(anywhere))

    def parted(self, rows: Sequence[bytes]) -> str:
        """The first leaf that some ranks have a gradient for, of those that share it, and others not; "" if none."""
        for bucket, bits, each, _ in self.seats:
            for i in each:
                if {NONE, ONE} <= {row[i] for row in rows}:
                    return bucket.leaves[(i - each.start) % len(bits)].path
        return ""

    def names(self, row: bytes) -> str:
        """The leaves of this rank that have none, for error texts."""
        given = self.lacking(row).given
        paths = [
            leaf.path for bucket, *_ in self.seats if bucket.name in given
            for leaf, one in zip(bucket.leaves, given[bucket.name], strict=True) if not one
        ]  # fmt: skip
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        return ", ".join(map(repr, paths[:3])) + more if paths else "no leaf"


class GradientMask:
    """Which leaves of the step in progress got a gradient on this rank, by unit, and what ranks made of it."""

    def __init__(self, layout: Layout, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> None:
        self.seats = Seats(layout, sizes, coordinate)
        self.full: set[str] = set()  # units of which all leaves did
        self.noted: dict[str, int] = {}  # masks of those of which only some did
        self.row = b""  # this rank's in the last vote; empty: every leaf has a gradient
        self.agreed = b""  # and that of all ranks

    def note(self, unit: str, came: int) -> None:
        """Gradients of a unit came, of some of its leaves: one bit each as `Unit.paths`. Calls add up."""
        self.noted[unit] = self.noted.get(unit, 0) | came

    def fill(self) -> None:
        """Every leaf has a gradient: noise, say."""
        self.full.update(self.seats.units)

    def begin(self) -> tuple[set[str], dict[str, int]]:
        """Note from the beginning. Returns what was noted, for `resume`."""
        before, self.full, self.noted = (self.full, self.noted), set(), {}
        return before

    def resume(self, before: tuple[set[str], dict[str, int]]) -> None:
        self.full, self.noted = before

    def vote(self) -> int:
        """FULL if this rank has a gradient for every leaf, or was given gradients without `reduce`; else LACKS."""
        self.row = b""
        if len(self.full) == len(self.seats.units) or not (self.full or self.noted):
            return FULL
        row = self.seats.row({**self.noted, **dict.fromkeys(self.full, ALL)})
        if NONE not in row:
            return FULL
        self.row = row
        return LACKS

    def agree(self, run: Agreement, seen: tuple[int, int]) -> Lacking:
        """Which leaves got no gradient on any rank that shares them, after a vote in which all came.

        Args:
            seen: the least and the most of all ranks' votes.

        Collective: where no rank has them all, an all-reduce of a byte a leaf, on the host.
        """
        self.agreed = agreed_row(run, self.seats, seen, self.row)
        return self.seats.lacking(self.agreed)


def agreed_row(run: Agreement, seats: Seats, seen: tuple[int, int], row: bytes, fixed: bytes | None = None) -> bytes:
    """The row of all ranks. Empty ones: every leaf got a gradient. `fixed`: what a captured step had found."""
    if run.size == 1:
        return row
    least, most = seen
    if most == FULL and (least == FULL or not seats.own):
        return b""
    if most == FIXED and run.alike("captured", EAGER if fixed is None else zlib.crc32(fixed)):
        return fixed or b""
    found = _largest(run, row or seats.row(dict.fromkeys(seats.units, ALL)))
    if most == FIXED or seats.own:
        differs = fixed is not None and seats.lacking(found) != seats.lacking(fixed)
        if run.most("captured", int(differs)):
            raise ScheduleError(
                "a rank takes a step that was captured when other leaves got gradients than now; in this step none "
                f"came for: {seats.names(found)}. The step was not taken. Capture it anew (T.cuda_graph(train_step)), "
                "or give zeros in the place of None."
            )
    return found if NONE in found else b""


def _largest(run: Agreement, row: bytes) -> bytes:
    flat = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    hop = Collective("all_reduce", "", len(row), flat.dtype, "max", "control", "leaves with gradients")
    run.lanes.wait(run.lanes.submit("control", (hop,), run.collective(hop, flat, flat)))
    return bytes(flat.tolist())


T = TypeVar("T")

REMEMBER = 1 << 14  # jobs: how far apart two ranks may be and still be drained
GIVEN = 2  # bits of a vote's number; the other 32 are its digest
UNITS = 1 << 16  # units that have numbers of their own
HEAD = 512  # bytes
LENGTH = 8  # bytes
PLACES = {
    Case.EXCHANGE: "an exchange",
    Case.METRICS: "pmean, psum or pmax",
    Case.TURN: "a use in the first step",
    Case.APART: "something planned",
}

ON_LOSS: list[Callable[[Agreement, str], None]] = []  # called where the communicators of a mesh become of no use
DESTROYED = "The process group that they were made with was destroyed."
GRACE = 1.0  # seconds that what a rank sent before it ended may still be on its way


class Log:
    """The jobs issued on one lane: how many, and the last of them.

        cells[job % RING][rank] = number of the job and a checksum of its collectives

    On CPUs a rank also writes there, for those on its host, what it is about to issue, and looks whether others have
    issued something else in its place: collectives of other sizes would end the process.

    Args:
        behind: jobs are only captured, and have the numbers of their eager twins, which would follow those.
    """

    def __init__(self, behind: Log | None = None) -> None:
        self.count = 0
        self.tail: deque[tuple[Collective, ...]] = deque(maxlen=REMEMBER)
        self.behind = behind
        self.cells: memoryview | None = None
        if behind is not None and behind.cells is not None:
            self.compare(behind.cells, behind.rank, behind.ranks)

    def compare(self, cells: memoryview, rank: int, ranks: int) -> None:
        """Compare jobs with those of the other ranks from here on."""
        self.cells, self.rank, self.ranks = cells, rank, ranks

    def append(self, hops: tuple[Collective, ...]) -> int | None:
        """A job that this rank is about to issue. Returns one of the ranks that has issued, or is about to issue,
        something else as that; then it is not logged, and this rank must not issue it. (Along any axis: what another
        rank issues in its place may go along an axis that this rank's does not.)"""
        cells = self.cells
        if cells is not None:
            number = 1 + self.count + (0 if self.behind is None else self.behind.count)
            row = number % RING * self.ranks
            word = (number & 0x7FFFFFFF) << 32 | _code(hops)
            cells[row + self.rank] = word
            for other, there in enumerate(cells[row : row + self.ranks].tolist()):
                if there != word and there >> 32 == word >> 32:
                    cells[row + self.rank] = 0
                    return other
        self.count += 1
        self.tail.append(hops)
        return None

    def extend(self, jobs: list[tuple[Collective, ...]]) -> None:
        self.count += len(jobs)
        self.tail.extend(jobs)


@lru_cache(maxsize=1 << 12)
def _code(hops: tuple[Collective, ...]) -> int:
    """A checksum of what a job issues."""
    return zlib.crc32(repr(hops).encode())


class Vote(NamedTuple):
    """A ballot under way: this rank's number, the largest of (word, -word) in the end, and the job."""

    mine: int
    words: Any  # [word, -word]: numbers for the host vote, a tensor for gloo
    job: Mark


class Agreement:
    """The ranks of one mesh, and the half of their Runtime by which they agree.

    Attributes:
        sizes, coordinate: of the mesh's axes, and this rank's place along each; position: the same, as items.
        grid: the ranks, as the mesh has them; ranks: sorted; rank: which of these this one is.
        rows: the ranks along each axis that this one is in.
        epoch: how often a restart dropped what was under way, or all was lost: states of a step know theirs.
        meetings: restarts, and meetings that found every rank at the same place.
        restarted: how many there were after the last restart.
        failed: why the communicators are of no more use; "" as long as they are.
        parted: whether this rank left an exchange before its end.
        stage: "voted" from a vote for a step to `confirm`, "confirming" in that; "moving" while a state is moved, see
            `_redistribute`; else "".
        forms: the structures of the metrics that are reduced. heard: at the last meeting, every rank's, in words.
        meeting: the one that this rank came to last.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        self.sizes = dict(zip(names, mesh.shape, strict=True))
        try:
            self.coordinate = {axis: mesh.get_local_rank(axis) for axis in names}
        except (RuntimeError, ValueError) as error:  # torch looks for the groups of its axes
            raise CommError(
                f"the mesh {self.sizes}: torch does not know its process groups ({error}). "
                "dist.destroy_process_group() was called after the mesh was made, say: call it last, after what is "
                "saved. Or make another mesh. What ranks of simulate have made is used in a call: ranks(fn, state)."
            ) from error
        self.position = tuple(self.coordinate.items())
        self.size = mesh.size()
        self.device = current_device(mesh.device_type)
        self.rows: dict[str, list[int]] = {}  # of ranks, along each axis, that this one is in
        self.grid = mesh.mesh  # ranks [sizes]; the mesh itself is not kept: when it is let go, so is this
        self.ranks: list[int] = sorted(mesh.mesh.flatten().tolist())
        self.rank = 0  # which of them this one is
        self.timeout = timedelta()
        self.lanes: Any = None  # `HostLanes`, of which this one knows only that it takes jobs
        self.groups: dict[tuple[str, str], dist.ProcessGroup] = {}  # communicators, by lane and axis
        self.control: Any = None  # and that of all ranks, on the host
        self.world: Any = dist.group.WORLD
        self.medium: Any = getattr(self.world, "medium", PROCESSES)
        self.store: Any = None  # by which ranks leave each other word, where there are others
        self.arrivals: dist.ProcessGroup | None = None  # of restarts, where not all ranks see each other's processes
        self.issued = {name: Log() for name in QUEUES}
        self.logs = self.issued  # where jobs are logged: elsewhere while they are only captured
        self.capturing = False
        self.remarks: list[str] = []  # of the step that is captured
        self.lineage_count = 0
        self.lineages: weakref.WeakSet[Any] = weakref.WeakSet()  # copies, too
        self.epoch = self.meetings = self.restarted = 0
        self.votes = 0  # that ended with all ranks agreed
        self.voted = (0, 0)  # in the last vote: the digest given, and how many remarks a capture had before it
        self.digest = 0  # of remarks, since the last vote
        self.host_vote: HostVote | None = None  # for votes, where all ranks are on one host
        self.watch: ProcessWatch | None = None  # the processes of the other ranks
        self.failed, self.parted, self.stage = "", False, ""
        self.forms = _forms()
        self.heard: list[str] = []
        self.meeting: Meeting | None = None
        self.absent = 0.0  # since when a rank is known to be gone

    # ---- what is compared

    def enroll(self) -> int:
        """The number of a lineage, by which ranks compare it. Called in the same order on every rank."""
        self.lineage_count += 1
        return self.lineage_count

    def count_lineages(self, count: int) -> None:
        """Go on from this number, the largest of all ranks': one may have been stopped before it made its last ones."""
        self.lineage_count = count

    @contextmanager
    def recording(self, forms: list[tuple[Any, int]]) -> Iterator[dict[str, Log]]:
        """Within, a step is captured: on the device nothing runs, so its jobs are logged as issued elsewhere, in what
        this gives; and the forms of its metrics in `forms`."""
        logs = {name: Log(issued) for name, issued in self.issued.items()}
        self.logs = {**logs, "control": self.issued["control"]}
        self.capturing, self.remarks = True, []
        self.forms.record(forms)
        try:
            yield logs
        finally:
            self.logs, self.capturing = self.issued, False
            self.forms.record(None)

    def remark(self, said: str) -> None:
        """Have the next vote compare this."""
        self.digest = zlib.crc32(said.encode(), self.digest)
        if self.capturing:
            self.remarks.append(said)

    # ---- collectives

    def along(self, axes: frozenset[str], rank: int | None = None) -> list[int]:
        """The ranks with the coordinates of a rank, by default this one, but along these axes."""
        place = self.coordinate if rank is None else self.coordinate_of(rank)
        row = tuple(slice(None) if axis in axes else at for axis, at in place.items())
        return self.grid[row].flatten().tolist()

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis of the mesh."""
        return dict(zip(self.sizes, (self.grid == rank).nonzero()[0].tolist(), strict=True))

    def collective(self, hop: Collective, out: Any, given: Any) -> Steps:
        """One collective, as a part of a job. `given` may be the rank's own slice of `out`, or the same
        tensor. (A ballot of the host vote is a list.)"""
        if self.sizes.get(hop.axis, self.size) == 1:
            if out.data_ptr() != given.data_ptr():
                out.copy_(given)
            return iter(())
        if hop.splits is not None:
            hop = hop._replace(splits=hop.splits.at(self.coordinate))
        if hop.lane != "control":
            return self.lanes.collective(hop, out, given, self.groups[hop.lane, hop.axis])
        if hop.kind == "all_reduce" and hop.dtype is torch.int64 and self.host_vote is not None:
            return self.host_vote.largest(out)
        return self.lanes.exchange(hop, out, given, self.control)

    # ---- ballots

    def ballot(self, case: Case, number: int, what: str) -> Vote:
        """Start comparing every rank's number. Host, 16 bytes."""
        word = case << NUMBER | number
        words: Any = [word, -word]
        if self.host_vote is None:
            words = torch.tensor(words, device="cpu")
        hop = Collective("all_reduce", "", 2, torch.int64, "max", "control", what)
        return Vote(number, words, self.lanes.submit("control", (hop,), self.collective(hop, words, words)))

    def vote(self, identity: int, digest: int, given: int = FULL) -> Vote | None:
        """Start the vote before `step` commits; the host may do something else before it waits in `compare`.

        Args:
            identity: of the state that the step began with (`Lineage.identity`).
            digest: of what this lineage issued since its last step.
            given: whether this rank has a gradient for every leaf; see `GradientMask`.
        """
        if self.size == 1:
            return None
        self.voted, self.stage = (digest, len(self.remarks)), "voted"
        mine, self.digest = zlib.crc32(f"{identity} {digest} {self.digest}".encode()), 0
        return self.ballot(Case.STEP, mine << GIVEN | given, "vote")

    def compare(self, vote: Vote | None) -> tuple[int, int]:
        """The first round: every rank arrived at `step`, having issued the same collectives. Returns the least and the
        most of what was `given`.

        In this round ranks wait for the slowest; whoever is interrupted there, or before `confirm`, abandons the step,
        and tells its peers by `withdraw`.

        Raises:
            ScheduleError: ranks issued different collectives since the last step.
            RestartError, CommError: as for every collective.
        """
        if vote is None:
            return FULL, FULL
        most, least = self.tally(vote)
        mine, lowest, highest = (number >> GIVEN for number in (vote.mine, least.number, most.number))
        if highest != lowest or most.case is not Case.STEP:
            raise ScheduleError(
                "ranks issued different collectives in this step, or changed its gradients in other ways, as by "
                "clipping to another norm, by other noise, after another number of microbatches, or with another "
                "skip=, or they stepped different states "
                f"(this rank's digest is {mine}, the digests lie between {lowest} and {highest}), so the step was not "
                "taken. Call unshard and reduce for the same units, in the same order and with the same "
                "last_microbatch, on every rank; only units of the schedule may be left out. The state before the step "
                f"is valid.{self.of_several()}"
            )
        return least.number & (1 << GIVEN) - 1, most.number & (1 << GIVEN) - 1

    def tally(self, vote: Vote) -> tuple[Ballot, Ballot]:
        """The largest and the smallest of every rank's ballot, once all have come."""
        self.lanes.wait(vote.job)
        most, least = int(vote.words[0]), -int(vote.words[1])
        largest = Ballot.of(most)
        smallest = largest if least == most else Ballot.of(least)
        if largest.case is Case.APART:
            self.void()
        if most != least:
            self.digest = 0  # as of those that came to the vote of a step: ranks go on alike
        return largest, smallest

    def confirm(self) -> None:
        """The second round: nobody waits here for longer than a message takes, and then all commit.

        Raises:
            RestartError: a peer has withdrawn, so nobody takes the step.
            ScheduleError: a peer cannot come here: it has issued other collectives than this rank.
        """
        if self.size > 1:
            self.stage = "confirming"
            try:
                most, _ = self.tally(self.ballot(Case.STEP, 0, "confirm"))
            finally:
                self.stage = ""
            if most.case is Case.APART:
                raise ScheduleError(
                    "a rank issued other collectives in this step than the others, so the step was not taken. Call "
                    "unshard and reduce for the same units, in the same order and with the same last_microbatch, on "
                    f"every rank. The state before the step is valid.{self.of_several()}"
                )
        self.votes += 1

    def of_several(self) -> str:
        """What else may have happened, where there are several states: a rank that raises between the steps of two,
        and goes on with the first, has nothing of that one to tell its peers."""
        if len(self.lineages) < 2:
            return ""
        return (
            f" There are {len(self.lineages)} states on this mesh: if a rank raised after the step of one of them and "
            "before that of another, have it call fsdp.drop_gradients on each of them before it goes on."
        )

    def stand(self, stage: str) -> None:
        """This rank stands there, in what all ranks do together."""
        self.stage = stage

    @uninterruptible
    def withdraw(self, error: BaseException) -> None:
        """What ranks do together ends by an error. If this rank has voted for a step, its peers wait in `confirm`,
        where no interrupt comes through; if it moves a state, perhaps on another mesh. They hear of it now, and not
        only when this rank comes to them again."""
        stage, self.stage = self.stage, ""
        known = isinstance(error, FsdpError if stage == "moving" else ScheduleError)  # as it is raised on every rank
        if stage and (not known or isinstance(error, RestartError)):
            self.void()
            with suppress(RuntimeError):  # whoever keeps the store may be gone
                announce(self)

    def alike(self, what: str, number: int = 0) -> bool:
        """Whether every rank comes here, and not to a vote, with the same number. For what is rare. Host."""
        if self.size == 1:
            return True
        most, least = self.tally(self.ballot(Case.NUMBER, number, what))
        return most == least

    def come_to_look(self, what: str, identity: int) -> None:
        """Every rank is about to look at this state (`Lineage.identity`). Host, 16 bytes.

        Raises:
            RestartError: a peer comes from a step that it abandoned; ScheduleError: it does something else, or looks at
            another state.
        """
        if not (self.capturing or self.alike(what, identity)):
            raise ScheduleError(
                f"{what}: this rank came to it, another one to something else, or to another state. Save a state, or "
                "take its parameters whole, on every rank at the same place. Nothing is lost: the state is valid."
            )

    def most(self, what: str, number: int) -> int:
        """The largest of every rank's number. Host."""
        return number if self.size == 1 else self.tally(self.ballot(Case.NUMBER, number, what))[0].number

    def agree(self, number: int, names: tuple[str, ...], verb: str) -> None:
        """Before a use outside the plan: every rank is about to `verb` the unit `names[number]`. Host, 16 bytes.

        Raises:
            ScheduleError: ranks came with different units, or are elsewhere.
        """
        if self.size == 1:
            return
        before = 1 + self.logs["reduce"].count % UNITS if verb == "reduce" else 0  # which must be the same ones
        most, least = self.tally(self.ballot(Case.USE, before * UNITS + number, f"{verb} {names[number]!r}"))
        if most != least:
            both = [place_of(ballot, names) for ballot in (least, most)]
            raise ScheduleError(
                f"{verb}({names[number]!r}) is not what the schedule expects here, so every rank must do the same, but "
                f"ranks came with {both[0]} and {both[1]}. Use the same units in the same order on every rank, or "
                "give the order: Schedule(order=...). The state before the step is valid."
            )

    # ---- exchanges

    def everyone(self, value: T, what: str) -> list[T]:
        """Every rank's value, by rank: a small object. Host; waits for all.

        Args:
            what: what it is for, the same on every rank.

        Raises:
            CommError: a rank is gone, or never came. ScheduleError: a rank came with another exchange.
            RestartError: a rank was stopped in it, and begins again.
        """
        if self.size == 1:
            return [value]
        self.meet(what)
        data = pickle.dumps(value)
        self.parted = True
        try:
            most, least = self.tally(self.ballot(Case.EXCHANGE, zlib.crc32(what.encode()), what))
            if most != least:
                self.parted = False  # all know
                raise ScheduleError(
                    f"this rank came to exchange {what!r}, another one to something else. Make the same "
                    "calls in the same order on every rank."
                )
            found = exchanged(self, data, what)
            if not all(one.endswith(pickle.STOP) for one in found):  # a rank was stopped, and has sent zeros instead
                self._join(noticed=True)
        except BaseException:
            self.epoch += 1  # what is under way is out of step as well
            raise
        self.parted = False
        return [pickle.loads(one) for one in found]

    # ---- news

    def gone(self) -> list[int]:
        """The ranks that are known to have ended: those whose processes this one can see."""
        return [self.ranks[place] for place in self.watch.ended()] if self.watch else []

    def usable(self, verb: str) -> None:
        """Raise CommError if the communicators are of no more use."""
        if not self.failed and self.size > 1 and dist.group.WORLD is not self.world:
            if elsewhere := self.medium.elsewhere():
                raise CommError(f"{verb}: {elsewhere}")
            self.lose(DESTROYED, tell=False)
        if self.failed:
            raise CommError(
                f"{verb}: this state's ranks cannot communicate any more. {self.failed} Restart the job from its last "
                "checkpoint."
            )

    def meet(self, verb: str) -> None:
        """Before ranks communicate anew: whoever left an exchange before its end meets its peers first."""
        self.usable(verb)
        if self.parted:
            self.restart()

    def fail(self, what: str, error: object = "") -> CommError:
        """From here on nothing that needs the other ranks works, and peers are told. Returns the error to raise."""
        gone = self.gone()
        why = "a rank died, hangs, or issued another collective"
        if gone:
            one = len(gone) == 1
            why = f"the process of rank {gone[0]} has ended" if one else f"the processes of ranks {gone} have ended"
        self.lose(f"{what}: {why}.")
        said = f" The backend says: {str(error)[:300]}" if str(error) else ""
        return CommError(f"{what}: {why}. Restart the job from its last checkpoint.{said}")

    def void(self) -> None:
        """Whatever is under way on this mesh is of no use: ranks meet before anything else."""
        if self.size > 1:
            self.parted = True
            self.epoch += 1

    def lose(self, why: str, tell: bool = True) -> None:
        """The communicators are of no more use."""
        if tell and self.size == 1:  # nobody waits
            return
        first = not self.failed
        self.failed = self.failed or why
        self.epoch += 1
        if not tell:
            return
        with suppress(RuntimeError):  # whoever keeps the store may be gone, too
            self.store.set("failed", why)
            self.store.set(f"restart/{self.meetings}", "1")
        for record in ON_LOSS if first else ():
            record(self, why)

    def listen(self, what: str, begun: float, error: object, failed: bool = False, restarts: Any = True) -> None:
        """While this rank waits for `what`, since `begun`: raise if it need not wait any longer.

        Args:
            failed: it has ended with an error.
            restarts: whether a peer's restart is one to join, or a function that says it.

        Raises:
            CommError: a rank is gone, or the time is over. RestartError: a peer abandoned the step.
        """
        now, limit = self.medium.now(), self.timeout.total_seconds()
        spent = now - begun
        if not self.gone():
            self.absent = 0.0
        elif not self.absent:
            self.absent = now
        if failed or spent > limit or (self.absent and now - max(self.absent, begun) > GRACE):
            raise self.fail(f"{what} failed after {spent:.1f} s of {limit:.0f} s", error)
        try:
            news = self.store.check([f"restart/{self.meetings}"])
            lost = self.store.get("failed").decode() if news and self.store.check(["failed"]) else ""
            asked = restarts and not news and self.forms.asked_for(self.store, self.meetings)
            news = news and (not callable(restarts) or restarts())
        except dist.DistError as why:
            spent = self.medium.now() - begun
            raise self.fail(f"{what} failed after {spent:.1f} s: the ranks' store cannot be reached", why) from why
        if lost:
            self.lose(f"Another rank says: {lost}")
            raise CommError(
                f"{what} was given up after {spent:.1f} s of {limit:.0f} s. Another rank says: {lost} Restart the job "
                "from its last checkpoint."
            )
        if restarts and (news or asked):
            self._join(noticed=news)

    def _join(self, noticed: bool) -> None:
        if self.stage in ("confirming", "moving"):  # where nobody may wait for long: the next verb meets them
            self.void()
        elif not self.capturing:  # else the next verb meets them: what is captured now must not be drained
            self.restart(noticed=noticed)
            if self.forms.form:
                self.forms.differ(self, self.heard)
        raise RestartError(
            "another rank abandoned this step and restarted. Nothing is lost: go on from the state that "
            "the step started from (it is still valid), on every rank."
        ) from None

    def leave(self) -> None:
        """This rank has left an exchange before its end: it meets its peers before anything else."""
        self.parted = True

    def come_to(self, meeting: Meeting) -> None:
        """This rank comes to a meeting."""
        self.meeting = meeting

    def have_met(self, forms: list[str], abandoned: bool) -> None:
        """Every rank was at the meeting, and what was under way is drained.

        Args:
            forms: of the metrics that each rank was reducing, in words. abandoned: some ranks have abandoned a step.
        """
        self.digest = 0
        self.heard = forms
        self.forms.clear()
        if abandoned:
            self.epoch += 1
            self.restarted = self.meetings + 1
        self.parted, self.stage = False, self.stage if self.stage == "moving" else ""
        self.meetings += 1  # last: whoever is interrupted before that comes again

    def rewind(self, digest: int) -> None:
        """The step was taken back, and with it what it remarked: the next vote compares this, as the step began."""
        self.digest = digest

    def restart(self, lineage: int = 0, noticed: bool = False) -> None:
        """Meet every rank of the mesh; see `_runtime.restart`."""
        if self.size > 1:
            restart(self, lineage, noticed)


def place_of(ballot: Ballot, names: tuple[str, ...]) -> str:
    """Where a rank is that came to a ballot with this one, in words."""
    if ballot.case is Case.USE:
        before, unit = divmod(ballot.number, UNITS)
        return f"{names[unit]!r}{f' after {before - 1} reductions' if before else ''}"
    return PLACES.get(ballot.case, "step")


def exchanged(run: Agreement, data: bytes, what: str) -> list[bytes]:
    """Every rank's bytes: a head of a fixed length, which says how many there are; then what did not fit."""
    mine = len(data).to_bytes(LENGTH, "little") + data
    heads = _gathered(run, mine[:HEAD], HEAD, what)
    lengths = [LENGTH + int.from_bytes(head[:LENGTH], "little") for head in heads]
    rest = max(lengths) - HEAD
    tails = _gathered(run, mine[HEAD:], rest, what) if rest > 0 else [b""] * run.size
    return [(head + tail)[LENGTH:n] for head, tail, n in zip(heads, tails, lengths, strict=True)]


def _gathered(run: Agreement, data: bytes, size: int, what: str) -> list[bytes]:
    """So many bytes of every rank's. (By the address, since torch takes numpy to make bytes of a tensor.)"""
    out = torch.zeros(run.size * size, dtype=torch.uint8, device="cpu")
    given = out[run.rank * size : (run.rank + 1) * size]
    ctypes.memmove(given.data_ptr(), data, len(data))
    hop = Collective("all_gather", "", out.numel(), out.dtype, "", "control", what)
    run.lanes.wait(run.lanes.submit("control", (hop,), run.collective(hop, out, given)))
    every = ctypes.string_at(out.data_ptr(), out.numel())
    return [every[i : i + size] for i in range(0, len(every), size)]


class Met(NamedTuple):
    """An error, as other ranks are told of it."""

    kinds: tuple[type[Exception], ...]  # its classes that every rank knows, nearest first
    stopped: bool
    name: str
    text: str
    errno: int | None

    @classmethod
    def of(cls, error: BaseException) -> Met:
        known = ("builtins", FsdpError.__module__)
        mro = type(error).__mro__
        kinds = [k for k in mro if issubclass(k, Exception) and k is not Exception and k.__module__ in known]
        number = getattr(error, "errno", None)
        return cls(tuple(kinds), not isinstance(error, Exception), type(error).__name__, str(error), number)

    def again(self, what: str, rank: int) -> Exception:
        """The error for a rank that did not meet it."""
        text = self.text.removeprefix(f"{what}: ")
        said = f"{self.name}: {text}" if text else self.name
        if self.stopped:
            return RestartError(
                f"{what}: rank {rank} was stopped by {said}. Nothing is lost: make the same call again on every rank."
            )
        for kind in self.kinds:
            try:
                error = kind(f"{what}: rank {rank} met {said}")
            except TypeError:  # it wants to be told more
                continue
            if isinstance(error, OSError):
                error.errno = self.errno
            return error
        return FsdpError(f"{what}: rank {rank} met {said}")


class Joint:
    """A call that every rank makes. Within it, `joint(do, part)` is one exchange.

    An error of this package (FsdpError) that is raised between exchanges is raised on all ranks, as it follows from
    what all were told. A rank that anything else stops there meets the others in its next call.
    """

    def __init__(self, run: Runtime, what: str) -> None:
        self.run, self.what = run, what
        self.known = False  # whether all ranks have been told of the error

    def __enter__(self) -> Joint:
        guard()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.known and not isinstance(error, FsdpError):
            self.run.leave()
        leave()

    def __call__(self, do: Callable[[], T], part: str = "") -> list[T]:
        """Every rank's result of `do`, by rank: small objects. Host; waits for all.

        Args:
            part: of the call, the same on every rank: ranks that come with different ones raise ScheduleError.

        Raises:
            BaseException: what `do` raised here. Exception: where it raised elsewhere, one of the same kind, which
                names the first rank that met it; RestartError where that rank was interrupted.
            CommError, RestartError: as `Runtime.everyone`.
        """
        mine: Any = None
        error: BaseException | None = None
        told: list[Any] = []
        try:
            mine = do()
        except BaseException as met:
            error = met
        try:
            said = mine, None if error is None else Met.of(error), self.run.lineage_count
            told = self.run.everyone(said, f"{self.what}{part and ', '}{part}")
            self.run.count_lineages(max(count for *_, count in told))
            self.known = any(there for _, there, _ in told)
        except Exception as left:  # a rank has left: what this one met may only follow from that
            if isinstance(error, Exception):
                raise left from error
            if error is None:
                raise
        try:
            if error is not None:
                raise error
        finally:
            error = None  # its traceback has this frame
        for rank, (_, there, _) in enumerate(told):
            if there is not None:
                raise there.again(self.what, self.run.ranks[rank])
        return [value for value, *_ in told]


Axes = tuple[str, ...]
LONG = 160  # characters of a line in an error


class Topic(NamedTuple):
    """Lines to be compared, and what is said where they differ.

    Attributes:
        lines: the same on all ranks, in the same order.
        own: for each line the mesh axes along which ranks may differ; `()` for none at all.
        error: what is raised, with a text like "shard: ranks have different `what`. The first `one` that differs: ...
            `remedy`".
    """

    lines: list[str]
    error: type[FsdpError]
    what: str
    one: str
    remedy: str
    own: Sequence[Axes] = ()

    def axes(self, line: int) -> Axes:
        return self.own[line] if line < len(self.own) else ()


def agree(joint: Joint, part: str, work: Callable[[], tuple[T, list[Topic]]]) -> T:
    """The result of `work` on this rank, if no rank raised in it and all have the same lines. Host; waits for all.

    Args:
        part: of the joint call, as it has several.

    Raises:
        BaseException: what `work` raised here; where it raised elsewhere, one of the same kind that names the rank.
        FsdpError: that of the first topic whose lines differ, the same on every rank.
    """
    run, where = joint.run, joint.what
    if run.size == 1:
        return work()[0]
    made: list[tuple[T, list[Topic]]] = []

    def do() -> dict[tuple[int, Axes], str]:
        made.append(work())
        return _digests(made[0][1])

    found = joint(do, part)
    result, topics = made.pop()
    places = [run.coordinate_of(rank) for rank in run.ranks]
    if _alike(found, places):
        return result
    everyone = joint(lambda: [topic.lines for topic in topics], f"{part}, line by line")
    for t, topic in enumerate(topics):
        for i in range(max(len(lines[t]) for lines in everyone)):
            first: dict[tuple[int, ...], tuple[int, str]] = {}
            for rank, lines in enumerate(everyone):
                line = lines[t][i] if i < len(lines[t]) else "nothing"
                at = tuple(places[rank][axis] for axis in topic.axes(i))
                other, expected = first.setdefault(at, (rank, line))
                if line != expected:
                    raise topic.error(
                        f"{where}: ranks have different {topic.what}. The first {topic.one} that differs: rank "
                        f"{run.ranks[other]} has {_short(expected)}, rank {run.ranks[rank]} has {_short(line)}. "
                        f"{topic.remedy}"
                    )
    raise FsdpError(f"{where}: ranks have the same, and differ in which of it may differ. Give all of them one Spec.")


def _digests(topics: list[Topic]) -> dict[tuple[int, Axes], str]:
    """A digest of the lines of each topic that are compared among the same ranks."""
    lines = grouped(((t, topic.axes(i)), line) for t, topic in enumerate(topics) for i, line in enumerate(topic.lines))
    return {
        key: hashlib.sha256(repr(some).encode(errors="backslashreplace")).hexdigest() for key, some in lines.items()
    }


def _alike(found: list[dict[tuple[int, Axes], str]], places: list[dict[str, int]]) -> bool:
    if any(digests.keys() != found[0].keys() for digests in found):
        return False
    for key in found[0]:
        seen: dict[Any, str] = {}
        for digests, place in zip(found, places, strict=True):
            if seen.setdefault(tuple(place[axis] for axis in key[1]), digests[key]) != digests[key]:
                return False
    return True


def _short(line: str) -> str:
    return line if len(line) <= LONG else f"{line[:LONG]}..."
