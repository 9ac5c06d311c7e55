"""Random numbers of a step, the same whenever it is taken again.

On a GPU each microbatch has a generator of its own, which stands in for the default one while it runs: a captured step
draws from the same generators when it is replayed, seeded anew before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from functional_fsdp import ScheduleError, State
from functional_fsdp.extend import Ranks, ranks_of, seeds

__all__ = ["reseed", "seeded"]


@contextmanager
def seeded(state: State, microbatch: int, step: int | None = None) -> Iterator[None]:
    """Random numbers from (state.rng, steps taken, microbatch, this rank); the caller's own go on afterwards.

    Args:
        step: how many steps were taken, where the lineage does not know.
    """
    ranks = ranks_of(state)
    seed = seeds(state, step=step)(microbatch, ranks.index)
    host = torch.default_generator
    before = host.get_state()
    host.manual_seed(seed)
    try:
        if ranks.generator is None:
            yield
        else:
            with _standing_in(ranks, microbatch, seed):
                yield
    finally:
        host.set_state(before)


@contextmanager
def _standing_in(ranks: Ranks, microbatch: int, seed: int) -> Iterator[None]:
    if microbatch not in ranks.generators:
        if ranks.capturing:
            raise ScheduleError(
                f"cuda_graph: microbatch {microbatch} of a step that is captured; the steps before had fewer. Run the "
                "model as often in every step."
            )
        ranks.generators[microbatch] = torch.Generator(ranks.device)
    own = ranks.generators[microbatch]
    if not ranks.capturing:  # else it is seeded before each replay
        own.manual_seed(seed)
    default = ranks.generator
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


def reseed(state: State) -> None:
    """Before the replay of a step from `state`: what its microbatches draw."""
    ranks = ranks_of(state)
    for microbatch, generator in ranks.generators.items():
        generator.manual_seed(seeds(state)(microbatch, ranks.index))
