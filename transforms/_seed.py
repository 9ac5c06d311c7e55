"""Random numbers of a step, the same whenever it is taken again.

On a GPU each microbatch has a generator of its own, which stands in for the default one while it runs: a captured step
draws from the same generators when it is replayed, seeded anew before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from functional_fsdp import ScheduleError, State
from functional_fsdp._runtime import Runtime, runtime_of

__all__ = ["reseed", "seeded"]


def _seed(state: State, microbatch: int, run: Runtime, step: int | None = None) -> int:
    where = f"{int(state.rng)} {state.steps if step is None else step} {microbatch} {run.rank}"
    return int.from_bytes(hashlib.sha256(where.encode()).digest()[:7], "little")


@contextmanager
def seeded(state: State, microbatch: int, step: int | None = None) -> Iterator[None]:
    """Random numbers from (state.rng, steps taken, microbatch, this rank); the caller's own go on afterwards.

    Args:
        step: how many steps were taken, where the lineage does not know.
    """
    run = runtime_of(state.spec.mesh)
    seed = _seed(state, microbatch, run, step)
    host = torch.default_generator
    before = host.get_state()
    host.manual_seed(seed)
    try:
        if run.cuda:
            with _standing_in(run, microbatch, seed):
                yield
        else:
            yield
    finally:
        host.set_state(before)


@contextmanager
def _standing_in(run: Runtime, microbatch: int, seed: int) -> Iterator[None]:
    if microbatch not in run.generators:
        if run.capturing:
            raise ScheduleError(
                f"cuda_graph: microbatch {microbatch} of a step that is captured; the steps before had fewer. Run the "
                "model as often in every step."
            )
        run.generators[microbatch] = torch.Generator(run.device)
    own = run.generators[microbatch]
    if not run.capturing:  # else it is seeded before each replay
        own.manual_seed(seed)
    default = torch.cuda.default_generators[run.device.index]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


def reseed(state: State) -> None:
    """Before the replay of a step from `state`: what its microbatches draw."""
    run = runtime_of(state.spec.mesh)
    for microbatch, generator in run.generators.items():
        generator.manual_seed(_seed(state, microbatch, run))
