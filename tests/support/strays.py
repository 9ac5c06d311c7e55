"""Copies of main weights that compute sees, cast or packed: whether they follow wherever main weights change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import functional_fsdp as fsdp

__all__ = ["strays"]


def strays(
    state: fsdp.State,
    stepped: Callable[..., fsdp.State],
    right: Callable[[fsdp.State], bool],
    folder: Path,
    specs: Sequence[fsdp.Spec],
) -> tuple[list[str], fsdp.State, fsdp.State]:
    """What leaves copies other than they should be, of whatever changes main weights, or makes a state of others'.

    Args:
        state: of a model that has `blocks.0`.
        stepped: takes a step by its number, with what `fsdp.step` is given besides.
        right: whether a state's copies are those of its main weights.
        specs: others, which are loaded into, and moved to, one after the other; the last one has no copies.

    Returns:
        the names; the state as the last but one of the specs has it, and the last.
    """
    found = {"shard": right(state)}
    state = stepped(state, 0)
    found["step"] = right(state)
    before = fsdp.full_params(state)

    def same(other: fsdp.State) -> bool:
        return all(map(torch.equal, before.values(), fsdp.full_params(other).values()))

    state = stepped(state, 1, skip=torch.tensor(True))
    found["a skipped step"] = right(state) and same(state)
    found["a copy"] = right(copy.deepcopy(state)) and right(pickle.loads(pickle.dumps(state)))
    other = fsdp.replace_params(state, {path: 3 * w for path, w in before.items()})
    found["replace_params"] = right(other) and not same(other)
    found["the one replaced"] = right(state) and same(state)

    def shrink() -> None:
        for buffer in other.main.values():
            buffer.local.mul_(0.3)

    found["change_weights"] = right(fsdp.extend.change_weights(other, "shrink()", shrink))
    found["load_weights"] = right(fsdp.load_weights(state, {path: 5 * w for path, w in before.items()}))
    optimizer: Any = state.optimizer
    fsdp.save(state, folder / "one")
    found["load"] = right(fsdp.load(folder / "one", state.spec, optimizer))
    found["load like"] = right(fsdp.load(folder / "one", like=state))
    frozen = fsdp.freeze(copy.deepcopy(state), "blocks.0.*")
    found["freeze"] = right(frozen)
    found["frozen, a step"] = right(stepped(frozen, 2))
    *others, without = specs
    for spec in others:
        there = fsdp.load(folder / "one", spec, optimizer)
        found[f"load into {spec}"] = right(there) and same(there)
        state = fsdp.redistribute(state, spec)
        found[f"redistribute to {spec}"] = right(state) and same(state)
    plain = fsdp.redistribute(copy.deepcopy(state), without)
    found["redistribute to what has none"] = same(plain) and not (plain.weights or plain.scales)
    found["load into what has none"] = same(fsdp.load(folder / "one", without, optimizer))
    again = fsdp.redistribute(copy.deepcopy(plain), others[-1])
    found["and back"] = right(again) and same(again)
    return [name for name, well in found.items() if not well], state, plain
