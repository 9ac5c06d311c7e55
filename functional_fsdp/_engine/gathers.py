"""Units that are asked for: when their gathers start, where they lie, and what a transport does to fill them.

    Gathers    what a verb starts and sets free, one for each lineage
    Arena      the bytes in which gathered units lie
    Carrier    the transport's part: a unit's gather as a job on a lane; `extend.Carrier`, for transports of one's own

`Gathers`: how units that are asked for come to be there, and what their release sets free.

    unshard ─▶ gathers to start now ─▶ the bytes' last release ─▶ gather lane ─▶ flying ─▶ compute waits ─▶ lent
    release ─▶ a mark on compute ─▶ gathers that waited for the bytes

Units that no plan names are gathered outside of the arena: slower, never wrong. Ranks first agree on the unit; then
compute waits for its gather, into bytes that are this unit's own.

`Arena`: gathered units lie at planned addresses.

    main shard ──cast──▶ own slice of the unit's place ──all-gather, in place──▶ the unit's weights, as views

The arena is one allocation, which comes and goes; where other ranks read it, or NCCL knows it, it stays. Where it
comes and goes, and the plan has two sides, units that stand on the bottom and units that hang from the top, it is two,
each as large as the unit that is there: a step's peak then need not hold the largest pair.

On GPUs compute begins with a unit when the cast of the next one is done, if that is all there is between:

    gather lane   ── cast 1 ── gather 1 ── cast 2 ────────── gather 2 ── cast 3 ──
    compute                                       unit 1 ───────────────         unit 2 ──

Both may begin at the same moment, and a matrix product that is first leaves a cast no room until its end: the gather
behind it would come too late to be hidden.

A unit's views are made once and handed out again and again, so that residuals that point at them stay good. They lie
on the arena's bytes and have a version counter of their own: filling a place again is no in-place change to autograd.

`Carrier`: what one lineage of states has of a transport on this rank. This one calls collectives, as most would.

    gather   Place ──fill──▶ a job: cast each shard into its own slice, gather in place        gather lane
    reduce   staged gradients ──▶ the collectives of a route; `exchange` is an exact sum's      reduce lane

Its memory comes and goes with a step, unless it keeps an arena, or `staging` gives bytes that stay.

A transport of one's own can change every gather that the plan names (`gathers`, and `gather` or `fill`), and the
first collective of an exact sum (`reduces` and `exchange`). All other reductions are collectives of a route, issued by
`_engine.reductions`. What no plan names is gathered by collectives: whole trees, and units in a driven step before its
order of use is known. Steps that are compiled whole have collectives only.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._common.calls import provided, ranged
from .._common.device import keeps_released
from .._common.errors import ScheduleError
from .._common.record import Collective, Mark, Steps, check_kinds, together
from .._common.torch_names import profiler
from .._plan.cursor import Action, Move
from .._plan.layout import Bucket, Layout, LeafInfo, Unit, plan_layout
from .._plan.plan import Plan, records
from .._plan.route import Route
from .._runtime.runtime import Runtime, runtime_of
from .._spec.spec import Spec, Traits, Transport
from .._storage import VERSION, BucketPlace, Filling, Gathered, Loan, Place, Stored, gather, lent_unit, own_of, read
from .sink import GradientSink

if TYPE_CHECKING:
    from .executor import Progress

GatherSteps = tuple[tuple[Collective, torch.Tensor], ...]  # collectives, and where each one lands
PLAIN = Traits()
_take_turn, _planned_copies = provided("extend.take_turn"), provided("extend.PlannedCopies")
LANE = "gather"  # by which units go in a pass in which ranks agree on each: its communicator is there anyway


class Gathers:
    """The weights of one lineage: units that are gathered in the arena by its plan, or beside it.

    Attributes:
        arena: where they lie by the plan; unplanned: those that are, or were in this step, gathered outside it.
        warned: of which of these there was a warning.
        flying: gathers that compute has not waited for; newest: the end of the newest one.
        released: the point from which a unit's bytes are free, in order of release.
        fence: whether the next gather waits for all that compute has done.
        copied: units that are gathered off the plan, and copied to their planned place.
        written: units that are lent, and into whose weights an operation has written.
        digest: of the gathers that this step has issued.
    """

    def __init__(self, run: Runtime, progress: Progress, carrier: Carrier, sink: GradientSink) -> None:
        self.run, self.progress, self.carrier, self.sink = run, progress, carrier, sink
        self.unplanned: dict[str, Gathered] = {}
        self.warned: set[str] = set()
        self.names, self.debug = tuple(progress.layout.by_name), progress.spec.schedule.debug
        self.digest = 0
        self.prepare()

    def prepare(self) -> None:
        """An arena for the plan, in which there is nothing yet."""
        self.arena = Arena(self.run, self.progress.plan, self.carrier)
        self.fence = True
        self.newest: Mark = None
        self.flying: dict[str, Place] = {}
        self.released: dict[str, Mark] = {}
        self.written: list[str] = []
        self.copied: Any = _planned_copies()

    # ---------------------------------------------------------------- unshard

    def plan_unshard(self, names: tuple[str, ...]) -> Move:
        """What follows where units are asked for. Changes nothing.

        Raises:
            ScheduleError: a gather would write over a unit that was not released.
        """
        progress = self.progress
        if progress.order.recording:
            return self.move_off_plan(names)
        if self.unplanned:
            names = self._by_plan(names)
            if not names:
                return progress.position, ()
        if self.copied and any(self.copied.lie_over(progress.plan, name) for name in names):
            return self.move_off_plan(names)
        return progress.position["unshard", names]

    def move_off_plan(self, names: Sequence[str]) -> Move:
        """What follows where units are asked for, and this is no use of the plan, even if it expects one."""
        return self.progress.position, tuple([("unplanned", name) for name in names])

    def lend(self, state: Stored, names: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
        """The weights of units whose gathers were started, once they are there."""
        lent = {}
        for name in names:
            if self.unplanned and self.is_off_plan(name):
                lent[name] = dict(self.unplanned[name].loan.weights)
                continue
            place = self.flying.pop(name, None)
            if place is not None:
                lanes = self.run.lanes
                lanes.wait(place.gathered if lanes.waits_on_host else place.ready(self.flying, self.newest))
            else:
                place = self.arena.place(state, name)
            loan = place.loan
            if not loan.held:  # `Loan.lend`, without a call
                loan.versions, loan.held = [*map(VERSION, loan.bases)], True
            lent[name] = dict(loan.weights)
        return lent

    def start(self, state: Stored, index: int) -> None:
        """Start gather number `index` of the plan."""
        unit = self.progress.plan.gathers[index].unit
        lying = self.copied.make_way(self, unit) if self.copied else ()
        after = self._free(unit)
        fresh = self.arena.allocate(unit)
        place = self.arena.place(state, unit)
        if self.sink.untouched or self.sink.consumers:  # its lane reads main weights from here on
            self.sink.touched(self.progress.layout.by_name[unit])
        self.digest = zlib.crc32(place.key, self.digest)
        if fresh or self.fence:  # waits for all that compute has done: the bytes or the weights may be new
            self.fence = False
            after = self.run.lanes.mark()
        issued, job, single = self.carrier.fill(place, state)
        submit = self.run.lanes.submit
        if profiler._is_profiler_enabled:
            submit = ranged(submit, f"gather {unit}")
        place.gathered = self.newest = submit("gather", issued, job, after, single, mark=place.gathered)
        self.flying[unit] = place
        for name in lying:
            self.copied.put(self, name)

    # ---------------------------------------------------------------- off the plan

    def is_off_plan(self, name: str) -> bool:
        """Whether a unit is handed out from outside the arena, and not released."""
        return name in self.unplanned and self.unplanned[name].loan.held

    def is_lent(self, unit: str, by_plan: bool) -> bool:
        """Whether a unit is lent already: outside the arena, or, if that is wished, in it."""
        place = self.arena.places.get(unit)
        return self.is_off_plan(unit) or bool(by_plan and place and place.loan.held)

    def agree(self, state: Stored, unit: str) -> None:
        """Ranks agree on a use that no plan expects."""
        cursor = self.progress.cursor
        if cursor.agreed:
            _take_turn(self, state, unit)
        else:
            self.agree_off_plan(unit, "unshard")

    def agree_off_plan(self, name: str, verb: str) -> None:
        """Every rank must come with this. One warning for each unit that a schedule does not expect.

        Raises:
            ScheduleError: in a step that is being captured: ranks cannot agree when it is replayed.
        """
        if self.run.capturing:
            raise ScheduleError(
                f"{verb}({name!r}) is not what the schedule expects here, and a captured step cannot stop for ranks to "
                "agree on it. Give the order of use, Schedule(order=[...]), with as many uses as the step has, or have "
                "it recorded: Schedule(order='recorded')."
            )
        self.run.agree(self.names.index(name), self.names, verb)
        if not self.progress.order.open and name not in self.warned:
            self.warned.add(name)
            warnings.warn(
                f"{verb}({name!r}) is not what the schedule expects here: it works, but nothing is overlapped. Give "
                "the order of use, Schedule(order=[...]), or have it recorded: Schedule(order='recorded').",
                stacklevel=8 if verb == "unshard" else 6,  # where the verb was called
            )

    def gather_off_plan(self, state: Stored, unit: str, by_plan: bool) -> None:
        """Gather a unit on which ranks have agreed: at its place, if that is wished, unless what is lent lies there.
        Not in memory that ranks share: peers that only help have none there."""
        self.sink.touched(self.progress.layout.by_name[unit])
        if by_plan and not self.arena.stays and not self.is_crowded(unit):
            self._free(unit)
            self.arena.allocate(unit)
            for part in self.arena.place(state, unit).parts:
                gather(state, part.bucket, part.whole, LANE)
        else:
            if unit not in self.unplanned:
                self.unplanned[unit] = Gathered(state, self.progress.layout.by_name[unit], self.debug)
            self.unplanned[unit].gather(state, LANE if self.progress.cursor.agreed else "side")
            self.unplanned[unit].loan.lend()

    # ---------------------------------------------------------------- release

    def plan_release(self, names: tuple[str, ...]) -> Move:
        """What follows where units are released. Changes nothing.

        Raises:
            ScheduleError: one of them is not lent.
        """
        progress = self.progress
        if self.unplanned:
            self.written.extend([name for name in names if not self._unchanged(name)])
            names = self._by_plan(names)
            if not names:
                return progress.position, ()
        else:
            places = self.arena.places
            for name in names:
                loan = places[name].loan if name in places else None  # below: `Loan.unchanged`, without a call
                if loan is not None and loan.held and loan.versions != [*map(VERSION, loan.bases)]:
                    self.written.append(name)
        if progress.position.cursor.agreed:
            return progress.position, tuple([("free", name) for name in names])
        return progress.position["release", names]

    def release(self, names: Sequence[str], actions: Sequence[Action]) -> None:
        """Units are released, with these actions: a mark on compute, behind which their bytes are free."""
        planned = names
        if self.unplanned:
            planned = self._by_plan(names)
            for name in names:
                if name in self.unplanned:  # lent, or see `copy_to_fallback`
                    self.unplanned[name].release()
                    self.unplanned[name].loan.held = False
        for name in planned:
            self.arena.places[name].loan.held = False
        for kind, what in actions if self.progress.plan.schedule.debug else ():
            if kind == "free":
                place = self.arena.places[what]
                place.poison(self.carrier.spared(place))
        if planned and not self.run.lanes.waits_on_host:
            place = self.arena.places[planned[-1]]
            place.released = self.run.lanes.mark(place.released)
            for name in planned:
                self.released.pop(name, None)
                self.released[name] = place.released

    def note_written(self) -> None:
        """Note in `written` the units that are lent and into whose weights an operation has written."""
        for here in (self.unplanned, self.arena.places):
            self.written.extend([name for name, it in here.items() if it.loan.held and not it.loan.unchanged])

    # ---------------------------------------------------------------- the end of a step

    def fence_off(self) -> None:
        """The next gather waits for all that compute has done."""
        self.fence = True

    def settle(self) -> None:
        """Compute waits for the newest gather, and so for all."""
        self.run.lanes.wait(self.newest)
        self.newest = None

    def drop(self) -> None:
        """What is under way was captured and will never run: no mark of it can be waited for."""
        self.newest, self.flying = None, {}

    def restart(self) -> None:
        """Back to the state between steps, in which nothing is lent. Compute has waited for all."""
        self.digest = 0
        self.flying.clear()
        self.released.clear()
        self.copied.clear()
        self.written.clear()
        for place in self.arena.places.values():
            place.loan.held = False
        for gathered in self.unplanned.values():
            gathered.loan.held = False
        self.unplanned.clear()
        self.arena.free()
        self.fence = True

    def invalidate(self) -> None:
        """The next step gathers other numbers: autograd shall refuse residuals that are kept until then."""
        for place in self.arena.places.values():
            torch.autograd.graph.increment_version(place.loan.bases)

    # ---------------------------------------------------------------- who lies where

    def _by_plan(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those that are not lent off the plan."""
        return tuple([name for name in names if not self.is_off_plan(name)])

    def _unchanged(self, name: str) -> bool:
        """Whether no operation has written into a unit's weights since they were lent, if they are."""
        places, outside = self.arena.places, self.unplanned
        return all(here[name].loan.unchanged for here in (outside, places) if name in here)

    def is_crowded(self, unit: str) -> bool:
        """Whether something that is lent lies where a unit would."""
        plan = self.progress.plan
        places = self.arena.places.items() if unit in plan.crowded else ()
        lent = any(place.loan.held and plan.overlap(unit, name) for name, place in places)
        return lent or self.copied.lie_over(plan, unit)

    def _free(self, unit: str) -> Mark:
        """The point from which a unit's place may be written: the newest release of what lay there."""
        plan = self.progress.plan
        if unit not in plan.crowded:
            if (flying := self.flying.pop(unit, None)) is not None:
                self.run.lanes.wait(flying.gathered)
            return self.released.pop(unit, None)
        begin, end = plan.by_name[unit].address, plan.by_name[unit].address + plan.by_name[unit].nbytes
        mark = None
        for name in (*self.flying, *self.released):  # these in order of release
            other = plan.by_name[name]
            if other.address < end and begin < other.address + other.nbytes:  # `Plan.overlap`, without a call
                if name in self.flying:  # it was skipped: nobody waited for it
                    self.run.lanes.wait(self.flying.pop(name).gathered)
                else:
                    mark = self.released.pop(name)
        return mark


class Arena:
    """The bytes, and a `Place` for each unit, made when it is first used."""

    def __init__(self, run: Runtime, plan: Plan, carrier: Carrier) -> None:
        self.run = run
        self.plan = plan
        self.carrier = carrier
        self.stays = carrier.keeps_arena  # whether the bytes are the transport's, which stay
        self.kept = keeps_released(run.device)
        self.places: dict[str, Place] = {}
        sides = not self.stays and all(u.address in (0, plan.arena - u.nbytes) for u in plan.units if u.nbytes)
        #: where each unit lies: (which allocation, how large that is then, the address in it)
        self.where = {
            u.name: (int(u.address > 0), u.nbytes, 0) if sides else (0, plan.arena, u.address) for u in plan.units
        }
        self.memory = [torch.empty(0, dtype=torch.uint8, device=run.device).untyped_storage() for _ in range(1 + sides)]

    def place(self, state: Stored, unit: str) -> Place:
        if self.stays and not self.places:
            self.memory[0] = self.carrier.arena(self.plan.arena).untyped_storage()
        found = self.places.get(unit)
        if (
            found is None
            or (
                found.resident
                and any(own_of(state, b, self.plan.schedule.debug) is not whole for b, whole in found.resident)
            )
            or (found.scales and any(state.scales[name] is not scale for name, scale in found.scales))
        ):
            found = self.places[unit] = self._make(state, self.carrier.layout.by_name[unit])
        return found

    def loan(self, unit: str) -> Loan | None:
        """What a unit was lent by, if it has been gathered here."""
        place = self.places.get(unit)
        return place.loan if place else None

    def allocate(self, unit: str) -> bool:
        """Have the bytes for a unit, before it is gathered. Returns whether they are new: views come back to life.

        What lay there was released, and compute has waited for all that wrote it.
        """
        if self.stays:
            return False
        which, size, _ = self.where[unit]
        memory = self.memory[which]
        there = memory.nbytes()
        if there == size or (there > size and (self.plan.schedule.debug or self.kept)):
            return False
        memory.resize_(0)
        memory.resize_(size)
        return True

    def free(self) -> None:
        """Give all bytes back, when compute has waited for all that reads or writes them; in debug mode poison them.

        On the CPU they stay, so that reading weights after the step is wrong, but no crash.
        """
        if self.plan.schedule.debug:
            for place in self.places.values():
                place.poison(self.carrier.spared())
        elif not (self.kept or self.stays):
            for memory in self.memory:
                memory.resize_(0)
        self.carrier.step_begins()

    def _make(self, state: Stored, unit: Unit) -> Place:
        planned = self.plan.by_name[unit.name]
        starts = {part.bucket: part.address - planned.address for part in planned.parts}
        parts, resident, wholes = [], [], []
        for bucket in unit.buckets:
            if bucket.name in starts:
                which, _, address = self.where[unit.name]
                whole = torch.empty(0, dtype=bucket.gather, device=self.run.device)
                at = (address + starts[bucket.name]) // bucket.gather.itemsize
                whole.set_(self.memory[which], at, (bucket.gathered.numel,), (1,))
                parts.append(self._part(state, bucket, whole))
            else:
                kept = own_of(state, bucket, self.plan.schedule.debug)
                assert kept is not None
                whole = kept
                resident.append((bucket, whole))
            wholes.append(whole)
        scales = tuple((b.name, state.scales[b.name]) for b in unit.buckets if b.in_float8)
        return Place(lent_unit(state, unit, wholes), tuple(parts), tuple(resident), scales)

    def _part(self, state: Stored, bucket: Bucket, whole: torch.Tensor) -> BucketPlace:
        start, stop = read(state, bucket).span()
        way = records(bucket, self.run.position, "mean", self.carrier.traits).unshard
        steps = tuple((one, whole[at : at + size]) for _, (one,), at, size in way.steps)
        steps = self.carrier.gathers(bucket, whole, steps)
        check_kinds(one for one, _ in steps)
        return BucketPlace(bucket, whole, whole[start:stop], steps)


class Portions:
    """The portions of each rank's summand [n] in which it is used, one beside the coming of the next.

    Args:
        cuts: the elements [start, stop) of each, in a row; none: it is used as a whole.

    Attributes:
        there: the points, on the lane that brings them, from which on each portion has come from all ranks; none: they
            are there when all is.
    """

    def __init__(self, cuts: Sequence[tuple[int, int]] = ()) -> None:
        self.cuts = cuts
        self.there: list[Mark] = []


class Carrier:
    """Collectives, and memory that comes and goes.

    Where this rank is: `self.run.sizes[axis]` ranks along an axis of the mesh, `self.run.coordinate[axis]` among them.

    Attributes:
        inside: whether collectives read and write its own memory only: a shard is copied there first, whatever its
            dtype, and what was reduced is copied from there.
        keeps_arena: whether `arena` gives bytes, which stay. read: whether other ranks read them.
        nbytes: of the memory that stays, on this rank.
    """

    inside = False
    keeps_arena = False
    read = False
    nbytes = 0

    def __init__(self, run: Runtime, layout: Layout, traits: Traits = PLAIN) -> None:
        self.run, self.layout, self.traits = run, layout, traits

    # ---- memory

    def prepare(self, plan: Plan) -> bool:
        """Make all memory that ranks share for this plan, and that not every rank has. Collective, if there is some.

        Returns whether something is new.
        """
        return False

    def arena(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes [uint8] for gathered units, where `keeps_arena`."""
        raise NotImplementedError

    def staging(self, unit: Unit, nbytes: int) -> torch.Tensor | None:
        """At least so many bytes [uint8] in which all of a unit's gradients are staged, which stay; or None: then
        staging comes and goes, and `reduces` is not asked."""
        return None

    # ---- gathers

    def gathers(self, bucket: Bucket, whole: torch.Tensor, steps: GatherSteps) -> GatherSteps:
        """The collectives that bring a bucket to its place `whole`, in the place of those that were planned.

        Args:
            steps: (record, where it lands), one for each axis, in this order. It lands in the slices of all ranks along
                that axis, in their order. The own slice is there before: of the first axis it is `part.own`, of a later
                one what the axis before has completed.

        Returns:
            `part.steps` of `gather`, which has to issue just these records in this order. Nothing checks that it does.
            A step may become several, or none; its place may come back as it is, or as any tensor that `gather` needs.

        A record's kind is one of those of `Collective`; another one is not refused, but taken for a reduction. What one
        rank sends to one other is an "all_to_all" with `splits`. Its `numel` is the most that comes or goes on any
        rank. `splits` is a value, whose `at(coordinate)` gives (elements that come, elements that go), by rank along
        the axis. It prints the same on every rank, can be pickled and has a hash, as a NamedTuple does: ranks compare
        records by how they print.
        """
        return steps

    def fill(self, place: Place, state: Stored) -> Filling:
        """The job that gathers a unit, from the shards of its buckets: parts travel together."""
        jobs: list[Steps] = []
        for part in place.parts:
            name = part.bucket.name  # below: `read`, without a call
            source = state.weights[name] if name in state.weights else state.main[name]
            jobs.append(self.gather(place, part, source.local, not jobs))
        return place.issued, jobs[0] if len(jobs) == 1 else together(jobs), place.single

    def gather(self, place: Place, part: BucketPlace, source: torch.Tensor, first: bool = False) -> Steps:
        """Bring one bucket to its place, as a part of a job: `yield from self.run.collective(record, out, given)`.

        Args:
            part: the bucket, its `whole` place, this rank's `own` slice of that, and the `steps` of `gathers`.
            source: this rank's shard, in the dtype that is stored; it may have to be cast.
            first: whether the bucket is the first of its unit. After its cast `place.cast` may be marked: from there on
                the job only communicates, and on GPUs compute may begin. Without a mark it begins later.
        """
        given = part.own
        if source.dtype is part.whole.dtype and not self.inside:
            given = source  # no cast: the first gather reads the shard itself
        else:
            part.own.copy_(source)
            if first:
                place.cast = self.run.lanes.mark(place.cast)
        for one, out in part.steps:
            yield from self.run.collective(one, out, given)
            given = out
        if not part.steps and given is source:
            part.own.copy_(source)

    def spared(self, place: Place | None = None) -> list[range]:
        """The bytes of the arena that other ranks may be reading: all such, or those of a unit that was just
        released."""
        return []

    def step_begins(self) -> None:
        """A step begins, or is begun anew, and others may still be in the one before."""

    # ---- reductions

    def reduces(self, way: Route) -> Route:
        """What carries out a reduction of what is staged in this transport's bytes, those of `staging`.

        Only the records of the first step of an exact sum (`way.exact`) are free: they go to `exchange`. Of other steps
        the first record is issued, as it stands.
        """
        return way

    def exchange(
        self, collectives: tuple[Collective, ...], stage: torch.Tensor, came: torch.Tensor, portions: Portions
    ) -> Generator[Any, None, bool]:
        """For an exact sum: `stage` [ranks · n] -> `came` [ranks · n], each rank's summand of this rank's part, by
        rank. Returns whether the own one is left out, and only in `stage`.

        Args:
            portions: in which what comes is used. A transport that brings one after the other may say when each is
                there: `portions.there.append(self.run.lanes.mark())`, once for each of `portions.cuts`, in their order,
                on the lane of this job. All or none.
            collectives: of the first step, as `reduces` left them; as they were planned where gradients are staged in
                other bytes than those of `staging` (beside the plan). The last one is not to be issued here where the
                sum stays whole: it gathers that.
        """
        yield from self.run.collective(collectives[0], came, stage)
        return False


class CollectiveTransport(Transport):
    """NCCL or gloo, on lanes beside compute."""

    name = "collective"

    def on(self, run: Runtime, layout: Layout) -> Carrier:
        return Carrier(run, layout)


def resolve_transport(
    spec: Spec, leaves: Sequence[LeafInfo], order: Sequence[str], layout: Layout
) -> tuple[Spec, Layout]:
    """The spec with a transport that is on this machine, the same on every rank, and its layout. Collective where the
    transport is "auto". `layout`: that of the spec as it is."""
    transport = spec.transport.resolve_transport(runtime_of(spec.mesh), layout)
    if transport is spec.transport:
        return spec, layout
    alike = transport.exact == spec.transport.exact  # all that a layout depends on
    spec = spec.with_transport(transport)
    return spec, layout if alike else plan_layout(leaves, spec, order)
