"""Restart: how ranks that stopped a step at different points meet again.

A rank that abandons a step and goes back to the state before it must not pair its first collective with
whatever its peers are waiting in. So it announces a restart in the store; peers notice while they wait for a
collective; each says how many jobs it issued on each lane; whoever is behind issues the missing ones with scratch
buffers, lane after lane, until all are equal and drained; then all continue in a new epoch, on the same communicators.
Ranks that had not abandoned the step themselves get a `RestartError`. A peer that never answers is a `CommError`
within the group's timeout.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ._errors import CommError
from ._lanes import ARENA, Issued, Steps, together

if TYPE_CHECKING:
    from ._runtime import Runtime

__all__ = ["QUEUES", "restart"]

QUEUES = ("gather", "reduce", "side", "control")  # in which jobs are issued; a job of "reduce" may go on on "outer"


def restart(run: Runtime, lineage: int, noticed: bool) -> None:
    """Meet every rank of the mesh, drain what any of them had issued, and begin a new epoch. Collective.

    When every rank comes of its own accord, for the same lineage and from the same place (all look at the state
    before a step, say), nothing was abandoned by some ranks only, and the epoch goes on.

    Args:
        lineage: whose state before the step is used again (0: nobody's in particular).
        noticed: this rank comes because a peer announced a restart.

    Raises:
        CommError: a rank did not answer within the timeout, or is a step ahead or behind.
    """
    epoch = run.meetings
    counts = {name: log.count for name, log in run.issued.items()}
    here = (counts, 0 if noticed else lineage)
    steps = {key: ledger.steps for key, ledger in run.ledgers.items()}
    run.store.set(f"restart/{epoch}", "1")
    run.store.set(f"status/{epoch}/{run.rank}", pickle.dumps((here, steps)))  # type: ignore[arg-type]
    statuses = [pickle.loads(data) for data in _read(run, f"status/{epoch}/", range(run.size))]
    for rank, (_, theirs) in enumerate(statuses):
        for key in steps.keys() & theirs.keys():
            if steps[key] != theirs[key]:
                raise CommError(
                    f"restart: this rank's state is at step {steps[key]}, that of rank {run.ranks[rank]} at step "
                    f"{theirs[key]}. Restart the job from its last checkpoint."
                )
    for name in QUEUES:
        _catch_up(run, name, [status[0][0][name] for status in statuses], f"log/{epoch}/{name}/")
    if run.cuda:
        torch.cuda.synchronize()
    run.digest = 0
    run.meetings += 1
    if not (here[-1] and all(status[0] == here for status in statuses)):
        run.epoch += 1
    run.store.delete_key(f"status/{epoch - 1}/{run.rank}")


def _read(run: Runtime, prefix: str, ranks: Iterable[int]) -> list[bytes]:
    """What these ranks (by their place in the mesh) put under `prefix`, as soon as all have."""
    deadline = time.monotonic() + run.timeout.total_seconds()
    keys = {r: f"{prefix}{r}" for r in ranks}
    while missing := [r for r, key in keys.items() if not run.store.check([key])]:
        if time.monotonic() > deadline:
            raise CommError(
                f"restart: rank(s) {[run.ranks[r] for r in missing]} did not answer within "
                f"{run.timeout.total_seconds():.0f} s. They died, hang, or never use the state again. "
                f"Restart the job from its last checkpoint."
            )
        time.sleep(0.002)
    return [run.store.get(key) for key in keys.values()]


def _catch_up(run: Runtime, name: str, counts: list[int], prefix: str) -> None:
    """Finish this lane's jobs, then issue those that the furthest rank issued and this one did not."""
    log, furthest = run.issued[name], max(counts)
    if counts[run.rank] == furthest:
        behind = furthest - min(counts)
        if behind > len(log.tail):
            raise CommError(f"restart: ranks are {behind} jobs apart, more than the {len(log.tail)} remembered.")
        if behind and counts.index(furthest) == run.rank:
            run.store.set(f"{prefix}{run.rank}", pickle.dumps(list(log.tail)[-behind:]))  # type: ignore[arg-type]
    _drain(run, name)  # one after the other, as every rank does
    missing = furthest - counts[run.rank]
    if missing:
        (data,) = _read(run, prefix, [counts.index(furthest)])
        for hops in pickle.loads(data)[-missing:]:
            run.submit(name, hops, _twin(run, hops))
            _drain(run, name)


def _drain(run: Runtime, name: str) -> None:
    try:
        run.queues[name].drain()
    except RuntimeError as error:
        run.failed = True
        raise CommError(
            f"restart: what was in flight on the {name} lane never came to an end: a rank died, hangs, or issued "
            f"another collective. Restart the job from its last checkpoint. The backend says: {str(error)[:300]}"
        ) from error


def _twin(run: Runtime, hops: tuple[Issued, ...]) -> Steps:
    """The collectives of a job on scratch buffers, for whoever waits for them: buckets side by side, as in a job, after
    a gather's barriers."""
    chains: dict[str, list[Issued]] = {}
    for hop in hops:
        chains.setdefault(hop.what, []).append(hop)
    yield from _scratch(run, chains.pop(ARENA, []))
    yield from together([_scratch(run, chain) for chain in chains.values()])


def _scratch(run: Runtime, chain: list[Issued]) -> Steps:
    for hop in chain:
        device = torch.device("cpu") if hop.lane == "control" else run.device
        whole = torch.zeros(hop.numel, dtype=hop.dtype, device=device)
        if hop.kind in ("all_reduce", "barrier"):
            part = whole
        else:
            part = whole.new_zeros(hop.numel // (1 if hop.kind == "all_to_all" else run.sizes[hop.axis]))
        if hop.lane == "outer":
            yield "outer"
        yield from run.collective(hop, *((part, whole) if hop.kind == "reduce_scatter" else (whole, part)))
