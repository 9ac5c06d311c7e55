"""Recut: leaves that are cut along axes of the model's own by another number of ranks than when they were saved.

    there    main.w of tp 0, of tp 1    [n / 2] each       here    main.w of tp 0 to 3    [n / 4] each, or main.w [n]
             └── joined, a leaf at a time ──▶ whole leaf ── this rank's part ──▶ this rank's run of it

Leaves that lie as they were saved are read as all others are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._common.errors import CheckpointError
from .._plan.layout import Leaf
from .._runtime.runtime import runtime_of
from .._spec.cuts import Cut, Cuts, cut_of, join, part_shape, whole_shape
from .._state.state import State
from .._storage.flat import FlatBuffer, nodes_of
from .manifest import NOTE, Tensor
from .parts import PLACE, SAVED, SavedTensor, places_of
from .reader import read_tensors

__all__ = ["Recut", "cuts_in", "names_by_place", "read_recut", "recut"]


class Recut(NamedTuple):
    """A tensor that this state wants by other cuts than it has there.

    Attributes:
        leaf: as this state has it. cuts: as they were, those of more than one rank.
        names: there, by place along these.
    """

    leaf: Leaf
    cuts: Cuts
    names: dict[tuple[int, ...], str]


def recut(
    path: Path, note: Mapping[str, Any], state: State, there: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Recut]]:
    """The tensors of a checkpoint under the names and in the shapes that this state has for them, and by name which of
    these are to be joined and cut.

    Raises:
        CheckpointError: cuts that no save has written.
    """
    found, again = dict(there), {}
    run = runtime_of(state.spec.mesh)
    told = {name: cuts_in(path, name, one) for name, one in note["leaves"].items()}
    for field in SAVED:
        for node in nodes_of(getattr(state, field)):
            if not isinstance(node.value, FlatBuffer):
                continue
            bucket = node.value.bucket
            for leaf in bucket.leaves:
                old = told.get(leaf.path, ())
                new = () if bucket.by_leaf else tuple(cut for cut in leaf.cuts if cut.ranks > 1)
                places = [*bucket.cut] if bucket.by_leaf else [cut.axis for cut in new]
                if old == new or (bucket.by_leaf and [cut.axis for cut in old] == places):
                    continue
                base = f"{'.'.join(filter(None, (field, node.path)))}.{leaf.path}"
                names = names_by_place(base, old, there)
                if not names or any(name not in there for name in names.values()):
                    continue
                one = there[next(iter(names.values()))]
                for name in names.values():
                    found.pop(name, None)
                for at in places_of(bucket.apart(run.sizes), run.sizes):
                    found[f"{base}{at}"] = one if bucket.by_leaf else Tensor(one.dtype, (leaf.numel,), [])
                    if not bucket.by_leaf:
                        again[f"{base}{at}"] = Recut(leaf, old, names)
    return found, again


def read_recut(
    folder: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], again: Mapping[str, Recut],
    parts: Iterable[SavedTensor], coordinate: Mapping[str, int],
) -> None:  # fmt: skip
    """Read this rank's runs of such leaves. Memory: two whole leaves at a time, on the host."""
    for part in parts:
        leaf, cuts, names = again[part.name]
        local = part_shape(leaf.whole, cuts)
        dtype = there[next(iter(names.values()))].dtype
        held = {at: torch.empty(torch.Size(local).numel(), dtype=dtype, device="cpu") for at in names}
        wanted = [SavedTensor(name, held[at], tuple(held[at].shape)) for at, name in names.items()]
        read_tensors(folder, note, there, wanted)
        value = _joined({at: tensor.view(local) for at, tensor in held.items()}, cuts)
        mine = cut_of(value, leaf.cuts, coordinate).reshape(-1)
        part.tensor.copy_(mine[part.start : part.start + part.tensor.numel()])


def _joined(held: dict[tuple[int, ...], torch.Tensor], cuts: Cuts) -> torch.Tensor:
    """The whole leaf, from the parts by place along each cut."""
    for i in reversed(range(len(cuts))):
        rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at in sorted(held):
            rows.setdefault(at[:i], []).append(held[at])
        held = {at: join(some, cuts[i]) for at, some in rows.items()}
    return held[()]


def names_by_place(base: str, cuts: Cuts, there: Mapping[str, Any]) -> dict[tuple[int, ...], str]:
    """Under which names it is there, by place along the cuts: axes are said in the order of the mesh that was."""
    if not cuts:
        return {(): base}
    axes = [cut.axis for cut in cuts]
    for order in itertools.permutations(range(len(axes))):
        found = {}
        for at in itertools.product(*(range(cut.ranks) for cut in cuts)):
            said = ", ".join(f"{axes[i]} {at[i]}" for i in order)
            found[at] = f"{base}{PLACE}{said}"
        if all(name in there for name in found.values()):
            return found
    return {}


def cuts_in(path: Path, name: str, leaf: Mapping[str, Any]) -> Cuts:
    """How a leaf was cut, as `layout.json` says of it: for more than one rank.

    Raises:
        CheckpointError: no save has written this.
    """
    try:
        found = tuple(Cut(axis, ranks, dim, tuple(sizes)) for axis, ranks, dim, sizes in leaf.get("cuts", ()))
        shape = list(leaf["shape"])
        for cut in found:
            whole = [cut.ranks, cut.dim, *cut.sizes]
            if type(cut.axis) is not str or any(type(n) is not int or n < 0 for n in whole) or not cut.ranks:
                raise ValueError(f"a cut {cut}")
            if sum(cut.sizes) != shape[cut.dim] or any(size % cut.ranks for size in cut.sizes):
                raise ValueError(f"a cut {cut} of {shape}")
            shape[cut.dim] //= cut.ranks
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path / NOTE} has cuts of the leaf {name!r} that no save has written: {error}."
        ) from None
    assert whole_shape(shape, found) == tuple(leaf["shape"])
    return tuple(cut for cut in found if cut.ranks > 1)
