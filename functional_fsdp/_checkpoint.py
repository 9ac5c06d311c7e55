"""Checkpoints: each rank's shards by torch.distributed.checkpoint, written whole or not at all.

    folder/            appears by one rename, when everything is on disk
      layout.json      what wrote it: layout hash, spec, world, step
      .metadata, *.distcp

Only the same layout (placement, world size, units, dtypes) is read back for now; another is refused before anything is
read.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree

from ._errors import SpecError, TreeError
from ._flat import FlatBuffer
from ._runtime import runtime_of
from ._state import Ledger, State, Token
from ._tree import flatten
from ._update import counted, with_counts
from ._weights import refresh

__all__ = ["latest", "load", "save"]

SAVED = ("main", "opt", "buffers", "count", "rng", "extras")


def save(state: State, folder: str | os.PathLike[str]) -> Path:
    """Write a state between steps to `folder`. Never consumes it. Collective: every rank of the mesh calls it.

    The folder appears only when it is complete; an interrupted save leaves a `.partial` folder that the next save
    replaces. Main weights, optimizer state, buffers, count, rng and extras are written, each shard once; compute copies
    are not.

    Raises:
        StaleStateError: a state in the middle of a step. FileExistsError: the folder exists. TreeError: an optimizer
            state or extra that is no tensor. OSError: what the first rank met, on every rank.

    Example: `fsdp.save(state, f"checkpoints/step_{n}")`.
    """
    state.resting("save")
    run, final = runtime_of(state.spec.mesh), Path(folder)
    partial = final.with_name(final.name + ".partial")
    tensors = _tensors(state, only_sharded=run.size > 1 and run.rank > 0)
    about = {**_about(state), "step": state.steps, "counted": counted(state)}
    state.token.ledger.look(state.token.serial)

    def prepare() -> None:
        if final.exists():
            raise FileExistsError(f"save: {final} exists. Choose another folder, or remove it first.")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def complete() -> None:
        (partial / "layout.json").write_text(json.dumps(about, indent=1))
        os.replace(partial, final)

    _first(run, prepare)
    with _quiet():
        dcp.save(  # type: ignore[attr-defined]
            tensors, checkpoint_id=str(partial), process_group=_group(run), no_dist=run.size == 1
        )
    _first(run, complete)
    return final


def load(state: State, folder: str | os.PathLike[str]) -> State:
    """Read what `save` wrote, into a new state of the same spec. `state` is the template; it is not changed.

    Args:
        state: a state of the same placement, world size and units, as `init` or `shard` gives; also one that `step`
            consumed, or that an error left half updated.
        folder: what was given to `save`.

    Returns:
        a new State (of its own lineage) with the same bits as the one that was saved.

    Raises:
        FileNotFoundError: no complete checkpoint there.
        SpecError: it was written with another layout (placement, world size, units, dtypes): both are named.

    Collective: every rank calls it.
    """
    path = Path(folder)
    if not (path / "layout.json").is_file():
        raise FileNotFoundError(f"load: {path} is not a complete checkpoint (it has no layout.json).")
    there, here = json.loads((path / "layout.json").read_text()), _about(state)
    differ = [key for key in here if there.get(key) != here[key]]
    if differ:
        said = "; ".join(f"{key} {there.get(key)!r} there, {here[key]!r} here" for key in differ)
        raise SpecError(
            f"load: {path} was written with another layout: {said}. Checkpoints are read back by the same "
            f"placement, world size, units and dtypes only, so far."
        )
    run = runtime_of(state.spec.mesh)
    state = with_counts(state, map(str, there.get("counted", ())))  # as there, whatever this one missed
    trees = {name: pytree.tree_map_only(torch.Tensor, torch.empty_like, getattr(state, name)) for name in SAVED}
    fresh = state.evolve(**trees)
    with _quiet():
        dcp.load(  # type: ignore[attr-defined]
            _tensors(fresh), checkpoint_id=str(path), process_group=_group(run), no_dist=run.size == 1
        )
    weights: Any = ()
    if state.weights:
        weights = pytree.tree_map(torch.empty_like, state.weights)
        with torch.no_grad():
            for name, copy in weights.items():
                refresh(fresh.main[name], copy)
    ledger = Ledger(run, state.layout, state.spec, int(there["step"]))
    ledger.enroll()
    return fresh.evolve(weights=weights, grads=(), token=Token(ledger, 0)).prepared()


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint (by its step) among the subfolders of `folder`, or None."""
    found = [p.parent for p in Path(folder).glob("*/layout.json") if p.parent.suffix != ".partial"]
    return max(found, key=lambda p: json.loads((p / "layout.json").read_text())["step"], default=None)


def _about(state: State) -> dict[str, Any]:
    placements = ", ".join(f"{pattern}: {placement}" for pattern, placement in state.spec.placements)
    state = with_counts(state, ())  # they come and go
    return {
        "placement": placements,
        "mesh": " × ".join(f"{axis} {size}" for axis, size in state.spec.axes.items()),
        "leaves": len(state.layout.paths),
        "tree": ", ".join(f"{name} {len(pytree.tree_leaves(getattr(state, name)))}" for name in SAVED),
        "layout": state.layout.hash,
    }


def _tensors(state: State, only_sharded: bool = False) -> dict[str, torch.Tensor]:
    """{name: tensor}: shards under the index of their slice, so that replicas are written once; what is not cut into
    shards is written by the first rank."""
    found: dict[str, torch.Tensor] = {}
    for name in SAVED:
        nodes, _ = pytree.tree_flatten(getattr(state, name), is_leaf=lambda x: isinstance(x, FlatBuffer))
        paths, _, _ = flatten(
            pytree.tree_map(lambda x: 0, getattr(state, name), is_leaf=lambda x: isinstance(x, FlatBuffer))
        )
        for path, node in zip(paths, nodes, strict=True):
            if isinstance(node, FlatBuffer):
                start, stop = node.span()
                found[f"{name}.{path}[{start}:{stop}]{_own(state, node)}"] = node.local
            elif isinstance(node, torch.Tensor) and only_sharded:
                continue
            elif isinstance(node, torch.Tensor):
                found[f"{name}.{path}"] = node
            elif node is not None:
                raise TreeError(
                    f"checkpoint: State.{name} holds a {type(node).__name__} at {path!r}; only tensors are written. "
                    "Keep it as a tensor."
                )
    return found


def _own(state: State, buffer: FlatBuffer) -> str:
    """Where on the axes that a bucket is not averaged over: ranks there have leaves of their own."""
    at = runtime_of(state.spec.mesh).coordinate
    axes = (axis for axis in state.spec.axes if axis not in buffer.bucket.placement.data and state.spec.axes[axis] > 1)
    said = ", ".join(f"{axis} {at[axis]}" for axis in axes)
    return f" of {said}" if said else ""


def _group(run: Any) -> dist.ProcessGroup | None:
    return None if run.size == 1 else run.control


def _first(run: Any, do: Callable[[], None]) -> None:
    """Run `do` on the first rank. All ranks wait for it, and raise what it raised."""
    result: list[BaseException | None] = [None]
    if run.size == 1 or run.rank == 0:
        try:
            do()
        except OSError as error:
            result = [error]
    if run.size > 1:
        dist.broadcast_object_list(result, src=run.ranks[0], group=run.control)
    if result[0] is not None:
        raise result[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's checkpointing warns about what it was asked to do (a process group given, no group needed)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
