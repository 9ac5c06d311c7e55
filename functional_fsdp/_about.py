"""About: what a checkpoint says of the state that wrote it, and what a state that reads it must have in common."""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Any

from ._errors import SpecError
from ._parts import SAVED, nodes_of
from ._state import State
from ._update import with_counts

__all__ = ["about_of", "same_layout"]


def about_of(state: State) -> dict[str, Any]:
    """What a state must have in common with one that is read into it."""
    state = with_counts(state, ())  # they come and go
    tree = {}
    for field in SAVED:
        paths, nodes = nodes_of(getattr(state, field))
        kinds = [f"{path} {type(node).__name__}" for path, node in zip(paths, nodes, strict=True)]
        tree[field] = f"{len(kinds)} leaves, {zlib.crc32(repr(kinds).encode()):08x}"
    return {
        "placement": ", ".join(f"{pattern}: {placement}" for pattern, placement in state.spec.placements),
        "mesh": " × ".join(f"{axis} {size}" for axis, size in state.spec.axes.items()),
        "average": state.spec.average,
        "leaves": len(state.layout.paths),
        "layout": state.layout.hash,
        "optimizer": _kind(state.optimizer),
        "tree": tree,
    }


def _kind(optimizer: Any) -> str:
    """What an optimizer is called: its class, or for a mere pair of functions the first one's name."""
    if optimizer is None:
        return "none"
    pair = getattr(optimizer, "pair", optimizer)
    named = getattr(pair, "init", pair) if isinstance(pair, tuple) else type(pair)
    name = getattr(named, "__qualname__", type(named).__qualname__)
    return name if pair is optimizer else f"{type(optimizer).__qualname__}({name})"


def same_layout(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse what was written by a state of another kind."""
    trees = [field for field in SAVED if there["tree"].get(field) != here["tree"][field]]
    differ = [key for key in here if key not in ("optimizer", "tree") and there[key] != here[key]]
    said = [f"{key} {there[key]!r} there, {here[key]!r} here" for key in differ]
    if "opt" in trees and not differ:
        raise SpecError(
            f"load: {path} was written with another optimizer: {there['optimizer']} there (State.opt has "
            f"{there['tree'].get('opt')}), {here['optimizer']} here ({here['tree']['opt']}). Give the state the "
            "optimizer of the checkpoint; only its numbers may be others."
        )
    said += [f"State.{field} has {there['tree'].get(field)} there, {here['tree'][field]} here" for field in trees]
    if said:
        raise SpecError(
            f"load: {path} was written with another layout: {'; '.join(said)}. Checkpoints are read back by the same "
            f"placement, world size, units and dtypes only, so far."
        )
    if there["optimizer"] != here["optimizer"]:
        warnings.warn(
            f"load: {path} was written with the optimizer {there['optimizer']}, and this state has "
            f"{here['optimizer']}, whose state has the same shape. What it holds is taken over as it is.",
            stacklevel=2,
        )
