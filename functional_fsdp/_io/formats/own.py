"""This library's own checkpoints, as any other: leaves, buffers, and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ..._axes.cuts import Cuts, boxes, part_shape
from ..._common.errors import CheckpointError
from ..contents import Contents, number_of
from ..manifest import NOTE, read_note, sizes, tensors_of
from ..parts import PLACE
from ..pieces import Dim, cuts_in, names_by_place, piece_of, strides_of
from ..safetensors_file import Entry
from ..spans import Cut, numel_of, run

__all__ = ["Own"]

NAMES = {"mean": "exp_avg", "square": "exp_avg_sq"}  # of adamw, as others call them


class Own:
    """A folder with `layout.json`."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and (path / NOTE).exists()

    def read(self, path: Path) -> Contents:
        note = read_note(path)
        sizes(path, note)
        there: dict[str, Any] = dict(tensors_of(path, note))
        leaves = note["leaves"]
        cut = {leaf: cuts_in(path, leaf, one) for leaf, one in leaves.items()}
        size = {leaf: numel_of(part_shape(one["shape"], cut[leaf])) for leaf, one in leaves.items()}
        numbers = {what for leaf, what, one in _kept(there, leaves) if numel_of(one.shape) != size[leaf]}
        numbers |= {"missed", "step"}  # a number for each leaf, which may have one element, too
        parted: dict[str | None, set[str]] = {}
        for base in {name.partition(PLACE)[0] for name in there if PLACE in name}:
            parted.setdefault(_leaf_of(base, leaves), set()).add(base)
        for leaf, cuts in cut.items():
            if cuts:
                _join(path, there, parted.get(leaf, ()), leaf, cuts, tuple(leaves[leaf]["shape"]), numbers)
        apart = next((name for name in there if PLACE in name), None)
        if apart is not None:
            raise CheckpointError(
                f"{path} has leaves that each rank has for itself ({apart!r}), which have no one value. Read it by "
                "fsdp.load."
            )
        packed = next((name for name, one in leaves.items() if one.get("codec")), None)
        if packed is not None:
            raise CheckpointError(
                f"{path} has leaves that are packed ({packed!r}, by {leaves[packed]['codec']}), which others cannot "
                "read. Read it by fsdp.load, with the spec that it was saved with."
            )
        found = {path_: _span(path, there[f"main.{path_}"], tuple(one["shape"])) for path_, one in leaves.items()}
        moments: dict[str, dict[str, Any]] = {}
        steps: dict[str, Any] = {}
        missed: dict[str, int] = {}
        for leaf, what, one in _kept(there, leaves):
            held = _span(path, one, () if what in numbers else tuple(leaves[leaf]["shape"]))
            if what == "missed":
                missed[leaf] = number_of(held, f"{path}: {leaf!r}")
            elif what == "step":
                steps[leaf] = held
            else:
                moments.setdefault(leaf, {})[NAMES.get(what, what)] = held
        for name in moments:
            steps.setdefault(name, note["step"] - missed.get(name, 0))
        steps[""] = note["step"]  # which no leaf need have had
        buffers = {n.removeprefix("buffers."): one for n, one in there.items() if n.startswith("buffers.")}
        found |= {name: _span(path, one, one.shape) for name, one in buffers.items()}
        return Contents(
            "functional_fsdp", found, f"format {note['format']}", None,
            ties={alias: leaf for leaf, one in leaves.items() for alias in one["ties"]},
            buffers=frozenset(buffers), frozen=frozenset(p for p, one in leaves.items() if not one["trainable"]),
            moments=moments, steps=steps, step=note["step"],
            left=tuple(n for n in there if n.startswith("extras.")),
        )  # fmt: skip


def _kept(there: dict[str, Any], leaves: Iterable[str]) -> list[tuple[str, str, Any]]:
    """What the optimizer keeps: of which leaf, under which name, and it."""
    found = []
    for name in sorted(name for name in there if name.startswith("opt.")):
        base = name.partition(PLACE)[0]
        leaf = _leaf_of(base, leaves)
        if leaf is not None:
            found.append((leaf, base[4 : -len(leaf) - 1], there[name]))
    return found


def _leaf_of(base: str, leaves: Iterable[str]) -> str | None:
    """Whose tensor it is: "opt.mean.a.w" is not of "w" where there is an "a.w"."""
    return max((path for path in leaves if base.endswith(f".{path}")), key=len, default=None)


def _join(
    path: Path, there: dict[str, Any], bases: Iterable[str], leaf: str, cuts: Cuts, shape: tuple[int, ...],
    numbers: Collection[str],
) -> None:  # fmt: skip
    """Put the whole tensors in the place of the parts that ranks had of a leaf, cut along axes of the model's own.

    Args:
        bases: the leaf's tensors, without places. numbers: what the optimizer keeps as a number for each leaf.
    """
    local = part_shape(shape, cuts)
    for base in bases:
        names = names_by_place(base, cuts, there)
        parts, found = [], {at: there.pop(name) for at, name in names.items()}
        for at, one in found.items():
            if base.removeprefix("opt.")[: -len(leaf) - 1] in numbers:  # the same on all of them
                there[base] = one
                break
            span = _span(path, one, local)
            coordinate = {cut.axis: i for cut, i in zip(cuts, at, strict=True)}
            for begin, own, size in boxes(shape, cuts, coordinate):
                steps = strides_of(shape)
                dims = tuple(Dim(*one) for one in zip(size, steps, own, local, strict=True))
                parts.append((piece_of("", dims, sum(a * step for a, step in zip(begin, steps, strict=True))), span))
        else:
            there[base] = Cut(shape, next(iter(found.values())).dtype, tuple(parts))


def _span(path: Path, one: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(one, Cut):
        return one
    parts = []
    for chunk in one.chunks:
        n = chunk.stop - chunk.start
        parts.append(run(chunk.start, n, Entry(path / chunk.file, one.dtype, (n,), chunk.data)))
    return Cut(shape, one.dtype, tuple(parts))
