"""Restart: how ranks that stopped a step at different points meet again.

A rank that abandons a step and goes back to the state before it must not pair its first collective with
whatever its peers are waiting in. So it announces a restart in the store; peers notice while they wait for a
collective; each says how many jobs it issued on each lane; whoever is behind issues the missing ones with scratch
buffers, lane after lane, until all are equal and drained; then all continue in a new epoch, on the same communicators.
Ranks that had not abandoned the step themselves get a `RestartError`. A peer that is gone is a `CommError` at once: its
process has ended, where it can be seen, or connections to it break. One that never answers is a `CommError` within the
group's timeout.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._common.errors import CommError
from .._common.record import ARENA, QUEUES, Collective, Steps, together
from .._common.tree import grouped

POLL = timedelta(seconds=0.1)
LOOK = 0.05  # seconds
ALL = -1  # in place of a lineage: ranks come for none of them, and have abandoned nothing if they are alike


class Status(NamedTuple):
    """What a rank says of itself at a meeting: jobs issued by lane, whose step it abandoned (0: nobody's in
    particular) and how far that is, the steps that its states have taken if the host knows, and the metrics that it is
    reducing."""

    counts: dict[str, int]
    lineage: int
    begun: dict[int, Any]
    steps: dict[int, int]
    form: str


def restart(run: Any, lineage: int, noticed: bool) -> None:
    """Meet every rank of the mesh, drain what any of them had issued, and begin a new epoch. Collective.

    When every rank comes of its own accord, for the same lineage and from the same place (all look at the state
    before a step, say), nothing was abandoned by some ranks only, and the epoch goes on.

    A rank that is interrupted in a meeting comes to the same one again, and says the same.

    Args:
        lineage: whose state before the step is used again (0: nobody's in particular; ALL: see there).
        noticed: this rank comes because a peer announced a restart.

    Raises:
        CommError: a rank is gone, did not answer within the timeout, or is a step ahead or behind.
    """
    run.usable("restart")
    number = run.meetings
    here = announce(run, 0 if noticed else lineage)
    run.meeting.arrive(run)
    statuses: list[Status] = [pickle.loads(data) for data in _read(run, f"status/{number}/", range(run.size))]
    for rank, status in enumerate(statuses):
        theirs = status.steps
        for key in here.steps.keys() & theirs.keys():
            if here.steps[key] != theirs[key]:
                raise _lost(
                    run,
                    f"restart: this rank's state is at step {here.steps[key]}, that of rank {run.ranks[rank]} at step "
                    f"{theirs[key]}.",
                )
    for name in QUEUES:
        _catch_up(run, name, [status.counts[name] for status in statuses], f"log/{number}/{name}/")
    run.lanes.synchronize()
    alike = here.lineage and all(status[:3] == here[:3] for status in statuses)
    run.have_met([status.form for status in statuses], abandoned=not alike)
    run.store.delete_key(f"status/{number - 1}/{run.rank}")
    run.store.delete_key(f"restart/{number - 1}")


def announce(run: Any, lineage: int = 0) -> Status:
    """Say that this rank comes to the next meeting, and where it is. It issues nothing until it has been there."""
    number = run.meetings
    if run.meeting is None or run.meeting.number != number:
        counts = {name: log.count for name, log in run.issued.items()}
        steps = {one.number: one.steps for one in run.lineages if one.number and one.counted and not one.graphed}
        begun = {one.number: one.place for one in run.lineages if one.begun and lineage in (one.number, ALL)}
        nobody = run.parted or 0 in begun  # copies have no number by which ranks could compare them
        said = Status(counts, 0 if nobody else lineage, begun, steps, run.forms.said)
        run.come_to(Meeting(number, said))
    if run.host_vote is not None:
        run.host_vote.forget()  # before others may go on
    run.store.set(f"status/{number}/{run.rank}", pickle.dumps(run.meeting.status))
    run.store.set(f"restart/{number}", "1")
    return run.meeting.status


def _lost(run: Any, why: str, more: str = "") -> CommError:
    """Ranks will never meet, and peers are told why. Returns the error to raise."""
    run.lose(why)
    return CommError(f"{why}{more} Restart the job from its last checkpoint.")


class Meeting:
    """The meeting that this rank has come to: what it said there."""

    def __init__(self, number: int, status: Status) -> None:
        self.number = number
        self.status = status
        self.works: list[Any] | None = None

    def arrive(self, run: Any) -> None:
        """Where not all ranks see each other's processes, one that is gone breaks the connections that this uses."""
        if self.works is None and run.arrivals is not None:
            self.works = [dist.all_reduce(torch.zeros(1, device="cpu"), group=run.arrivals, async_op=True)]

    def broken(self) -> bool:
        """Whether one of those has broken."""
        try:
            for work in self.works or ():
                if work.is_completed():
                    work.wait()
        except RuntimeError:
            return True
        return False


def _read(run: Any, prefix: str, ranks: Iterable[int]) -> list[bytes]:
    """What these ranks (by their place in the mesh) put under `prefix`, as soon as all have."""
    begun = looked = run.medium.now()
    keys = {r: f"{prefix}{r}" for r in ranks}
    while missing := [r for r, key in keys.items() if not run.store.check([key])]:
        now = run.medium.now()
        if now - begun > run.timeout.total_seconds():
            absent = [run.ranks[r] for r in missing]
            why = f"restart: rank(s) {absent} did not answer within {now - begun:.0f} s."
            raise _lost(run, why, " They died, hang, or never use the state again.")
        if now - looked > LOOK:
            looked = now
            broken = run.meeting is not None and run.meeting.broken()
            run.listen("restart: waiting for the other ranks", begun, "", failed=broken, restarts=False)
        _progress(run)
        run.medium.rest(0.002)
    return [run.store.get(key) for key in keys.values()]


def _progress(run: Any) -> None:
    """Take what is under way as far as it goes: a rank that still waits for a job lets it end before it comes here."""
    for lane in QUEUES:
        try:
            run.lanes.progress(lane)
        except CommError:
            raise
        except Exception:  # of a job's own code: its step is void, and what it did not issue is issued by its twin
            run.leave()


def _catch_up(run: Any, name: str, counts: list[int], prefix: str) -> None:
    """Finish this lane's jobs, then issue those that the furthest rank issued and this one did not."""
    log, furthest = run.issued[name], max(counts)
    if counts[run.rank] == furthest:
        behind = furthest - min(counts)
        if behind > len(log.tail):
            raise _lost(run, f"restart: ranks are {behind} jobs apart, more than the {len(log.tail)} remembered.")
        if behind and counts.index(furthest) == run.rank:
            run.store.set(f"{prefix}{run.rank}", pickle.dumps(list(log.tail)[-behind:]))
    _drain(run, name)  # one after the other, as every rank does
    missing = furthest - log.count
    if missing > 0:
        (data,) = _read(run, prefix, [counts.index(furthest)])
        for hops in pickle.loads(data)[-missing:]:
            run.lanes.submit(name, hops, twin(run, hops))
            _drain(run, name)


def _drain(run: Any, name: str) -> None:
    """Finish what is in flight on a lane: every rank that takes part is here."""
    lanes, begun = run.lanes, run.medium.now()
    while (error := lanes.drain(name, POLL)) is not None:
        what = f"restart: what was in flight on the {name} lane never came to an end: it"
        run.listen(what, begun, error, failed=lanes.queues[name][0].failed(), restarts=False)


def twin(run: Any, hops: tuple[Collective, ...]) -> Steps:
    """The collectives of a job on scratch buffers, for whoever waits for them: buckets side by side, as in a job, after
    a gather's barriers."""
    chains = grouped((hop.bucket, hop) for hop in hops)
    yield from _scratch(run, chains.pop(ARENA, []))
    yield from together([_scratch(run, chain) for chain in chains.values()])


def _scratch(run: Any, chain: list[Collective]) -> Steps:
    lane = ""
    for hop in chain:
        device = torch.device("cpu") if hop.lane == "control" else run.device
        whole = torch.zeros(hop.numel, dtype=hop.dtype, device=device)
        if hop.splits is not None:
            whole, part = (whole.new_zeros(sum(some)) for some in hop.splits.at(run.coordinate))
        elif hop.kind in ("all_reduce", "barrier"):
            part = whole
        else:
            part = whole.new_zeros(hop.numel // (1 if hop.kind == "all_to_all" else run.sizes.get(hop.axis, run.size)))
        if hop.lane == "outer" != lane:
            yield "outer"
        lane = hop.lane
        yield from run.collective(hop, *((part, whole) if hop.kind == "reduce_scatter" else (whole, part)))
