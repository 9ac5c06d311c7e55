"""Model soups (arXiv:2203.05482): the average of several checkpoints of one model, read one after another.

    state = soups.uniform(["run_1/step_900", "run_2/step_900"], spec)
    state = soups.greedy(folders, spec, score)            the best comes first; of the others those that help

Each rank reads its shards only, and holds those of two checkpoints, however many there are. What comes out has no
optimizer: evaluate it, save it, or export it. Its buffers are those of the last checkpoint that was taken in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike

import functional_fsdp as fsdp
from functional_fsdp import State, extend

__all__ = ["greedy", "uniform"]

Folder = str | PathLike[str]


def uniform(folders: Sequence[Folder], spec: fsdp.Spec) -> State:
    """The mean of them all. Every rank must call it."""
    return greedy(folders, spec, lambda state: 0.0)


def greedy(folders: Sequence[Folder], spec: fsdp.Spec, score: Callable[[State], float]) -> State:
    """The mean of the first, and of each that does not make `score` of the mean so far less.

    score: a number for a state, the same on every rank: of held-out data, averaged by `fsdp.pmean`.
    """
    first, *others = folders
    state, taken = fsdp.load(first, spec, allow=["optimizer"]), 1
    best = score(state)
    for folder in others:
        tried = mixed(fsdp.load(folder, spec, allow=["optimizer"]), state, taken / (taken + 1))
        new = score(tried)
        if new >= best:
            state, best, taken = tried, new, taken + 1
        del tried  # so that there are two at a time
    return state


def mixed(state: State, other: State, share: float) -> State:
    """The first state, its weights moved towards the other's, in place."""

    def mix() -> None:
        for name, buffer in state.main.items():
            if buffer.local.is_floating_point():  # not bytes of packed leaves
                buffer.local.lerp_(other.main[name].local, share)

    return extend.change_weights(state, "soup", mix, share)
