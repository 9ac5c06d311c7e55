"""Random numbers of a step, the same whenever it is taken again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from functional_fsdp import State
from functional_fsdp._runtime import runtime_of

__all__ = ["seeded"]


@contextmanager
def seeded(state: State, microbatch: int) -> Iterator[None]:
    """Random numbers from (state.rng, steps taken, microbatch, this rank); the caller's own go on afterwards."""
    run = runtime_of(state.spec.mesh)
    where = f"{int(state.rng)} {state.token.ledger.steps} {microbatch} {run.rank}"
    seed = int.from_bytes(hashlib.sha256(where.encode()).digest()[:7], "little")
    generators = [torch.default_generator]
    if run.device.type == "cuda":
        generators.append(torch.cuda.default_generators[run.device.index])
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state_of in zip(generators, before, strict=True):
            generator.set_state(state_of)
