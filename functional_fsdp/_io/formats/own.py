"""This library's own checkpoints, as any other: leaves, buffers, and what the optimizer keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..._axes import Cuts, boxes, part_shape
from ..._common.errors import CheckpointError
from ..contents import Contents, number_of
from ..manifest import NOTE, read_note, sizes, tensors_of
from ..parts import without_place
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
        whose = _whose({without_place(name) for name in there}, leaves)
        cut = {leaf: cuts_in(path, leaf, one) for leaf, one in leaves.items()}
        size = {leaf: numel_of(part_shape(one["shape"], cut[leaf])) for leaf, one in leaves.items()}
        numbers = {what for leaf, what, one in _kept(there, whose) if numel_of(one.shape) != size[leaf]}
        numbers |= {"missed", "step"}  # a number for each leaf, which may have one element, too
        for base, (tree, leaf) in whose.items():
            if base not in there and cut[leaf]:
                _join(path, there, base, cut[leaf], tuple(leaves[leaf]["shape"]), tree[4:] in numbers)
        apart = next((name for name in there if name != without_place(name)), None)
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
        for leaf, what, one in _kept(there, whose):
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


def _whose(bases: Iterable[str], leaves: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Of each tensor in which tree and of which leaf it is. "opt.mean.w" is of "w" in "opt.mean", or of "mean.w" in
    "opt": of two trees the one that has more leaves, since a tree has all that are trained."""
    ways: dict[str, list[tuple[str, str]]] = {}
    for base in bases:
        dots = [at for at, letter in enumerate(base) if letter == "." and base[at + 1 :] in leaves]
        some = [(base[:at], base[at + 1 :]) for at in dots]
        ways[base] = [one for one in some if leaves[one[1]]["trainable"] or not base.startswith("opt.")]
    many = Counter(tree for some in ways.values() for tree, _ in some)
    return {base: max(some, key=lambda one: many[one[0]]) for base, some in ways.items() if some}


def _kept(there: Mapping[str, Any], whose: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, Any]]:
    """What the optimizer keeps: of which leaf, under which name, and it."""
    owners = ((name, *whose.get(without_place(name), ("", ""))) for name in sorted(there))
    return [(leaf, tree[4:], there[name]) for name, tree, leaf in owners if tree == "opt" or tree.startswith("opt.")]


def _join(path: Path, there: dict[str, Any], base: str, cuts: Cuts, shape: tuple[int, ...], number: bool) -> None:
    """Put the whole tensor in the place of the parts that ranks had of it, cut along axes of the model's own; or the
    number of its leaf, the same on all of them."""
    found = {at: there.pop(name) for at, name in names_by_place(base, cuts, there).items()}
    if number and found:
        there[base] = next(iter(found.values()))
    elif found:
        local, steps, parts = part_shape(shape, cuts), strides_of(shape), []
        for at, one in found.items():
            span = _span(path, one, local)
            coordinate = {cut.axis: i for cut, i in zip(cuts, at, strict=True)}
            for begin, own, size in boxes(shape, cuts, coordinate):
                dims = tuple(Dim(*one) for one in zip(size, steps, own, local, strict=True))
                parts.append((piece_of("", dims, sum(a * step for a, step in zip(begin, steps, strict=True))), span))
        there[base] = Cut(shape, next(iter(found.values())).dtype, tuple(parts))


def _span(path: Path, one: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(one, Cut):
        return one
    parts = []
    for chunk in one.chunks:
        n = chunk.stop - chunk.start
        parts.append(run(chunk.start, n, Entry(path / chunk.file, one.dtype, (n,), chunk.data)))
    return Cut(shape, one.dtype, tuple(parts))
