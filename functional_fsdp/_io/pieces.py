"""Pieces: where in files the elements of a leaf lie that a rank holds; pure, and alike for reading and for writing.

    leaf in memory ── pieces: what it has in common with each leaf of the file; a stride in either for every dim
    run of a rank  ── boxes: what of a piece lies in the run
                   ── blocks: what of a box lies end to end in the file, 16 Mi elements at most

    memory    [4, 3], a rank has its elements 2 to 6; the file has it transposed, [3, 4]
    boxes     row 0, column 2;  row 1, columns 0 to 2;  row 2, column 0
    blocks    the file's elements 8;  1, 5, 9;  2

A leaf that the file holds as it is, is one piece, and a run of it one block; so is a leaf of a stack. Of a transposed
one a run of whole rows has a block for each row of the file, and the whole leaf is one block.

Recut: leaves that are cut along axes of the model's own by another number of ranks than when they were saved.

    there    main.w of tp 0, of tp 1    [n / 2] each       here    main.w of tp 0 to 3    [n / 4] each, or main.w [n]
             └── joined, a leaf at a time ──▶ whole leaf ── this rank's part ──▶ this rank's run of it

Leaves that lie as they were saved are read as all others are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._axes import Cut, Cuts, cut_of, join, part_shape, whole_shape
from .._common.errors import CheckpointError, SpecError
from .._plan.layout import Leaf
from .._redistribute import nodes_of
from .._runtime.runtime import runtime_of
from .._state.state import State
from .._storage import FlatBuffer, refuse_blocks
from .conversions import Concatenated, Conversion, Sliced, Stacked, Transposed
from .dcp_files import read_tensors
from .manifest import NOTE, Tensor
from .parts import PLACE, SAVED, SavedTensor, places_of

__all__ = [
    "CHUNK",
    "Block",
    "Dim",
    "Line",
    "Piece",
    "Recut",
    "blocks",
    "cuts_in",
    "names_by_place",
    "piece_of",
    "pieces",
    "read_recut",
    "recut",
    "strides_of",
]  # fmt: skip

CHUNK = 1 << 24  # elements of a block at most, read or written at once


class Dim(NamedTuple):
    """A dim of a block of a leaf in memory: `stride` there; `size` elements, from `start` on, of `of` in the file."""

    size: int
    stride: int
    start: int
    of: int


class Line(NamedTuple):
    """`size` elements, so far apart in memory and in the file."""

    size: int
    memory: int
    file: int


class Piece(NamedTuple):
    """Elements that a leaf in memory has in common with one of the file.

    Attributes:
        name, shape: of the leaf in the file.
        box: what of that leaf, as start and stop of each dim.
        lines: how they lie, from the largest stride in memory on.
        memory, file: where the first of them is in either leaf.
        numel: how many they are.
    """

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    lines: tuple[Line, ...]
    memory: int
    file: int
    numel: int

    def meets(self, other: Piece) -> bool:
        """Whether two pieces of one leaf of the file have elements of it in common."""
        pairs = zip(self.box, other.box, strict=True)
        return self.numel > 0 < other.numel and all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)


class Block(NamedTuple):
    """Elements that lie end to end in a leaf of the file, from `file` on.

    Attributes:
        memory, sizes, strides: where they are in the leaf in memory, in the file's order.
    """

    file: int
    memory: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def of(self, run: torch.Tensor, start: int) -> torch.Tensor:
        """A view of them in the run [n] of a leaf's elements that begins with element `start`."""
        return run.as_strided(self.sizes, self.strides, run.storage_offset() + self.memory - start)


def pieces(path: str, shape: Iterable[int], said: Conversion) -> list[Piece]:
    """What a leaf in memory has in each leaf of the file; together all of its elements.

    Raises:
        SpecError: a conversion that does not fit the leaf.
    """
    shape = tuple(shape)
    dims = tuple(Dim(n, stride, 0, n) for n, stride in zip(shape, strides_of(shape), strict=True))
    return [*_pieces(f"convert: {path!r} is {list(shape)}, and", said, dims, 0)]


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, of a leaf in C order."""
    return tuple(accumulate(reversed((*shape, 1)[1:]), int.__mul__))[::-1]


def _pieces(where: str, said: Conversion, dims: tuple[Dim, ...], offset: int) -> Iterator[Piece]:
    def at(dim: int, whole: bool = False) -> int:
        name, shape = type(said).__name__, [one.size for one in dims]
        if not -len(dims) <= dim < len(dims):
            raise SpecError(f"{where} {name} has dim {dim} of {shape}, which has {len(dims)} dims. Give another dim.")
        one = dims[dim]
        if whole and one.size != one.of:
            raise SpecError(f"{where} a slice along dim {dim} of {name} is of several leaves. Slice each part.")
        return dim % len(dims)

    if isinstance(said, str):
        yield piece_of(said, dims, offset)
    elif isinstance(said, Stacked):
        i = at(said.dim, whole=True)
        if dims[i].size != len(said.parts):
            raise SpecError(
                f"{where} Stacked has {len(said.parts)} parts for the {dims[i].size} elements along its dim "
                f"{said.dim}. Give one part each."
            )
        for k, part in enumerate(said.parts):
            yield from _pieces(where, part, dims[:i] + dims[i + 1 :], offset + k * dims[i].stride)
    elif isinstance(said, Concatenated):
        i = at(said.dim, whole=True)
        parts, total = len(said.parts), dims[i].size
        sizes = said.sizes or (total // max(parts, 1),) * parts
        if sum(sizes) != total:
            raise SpecError(
                f"{where} Concatenated has {parts} parts of {[*sizes] if said.sizes else 'one size'} for the {total} "
                f"elements along its dim {said.dim}. Give sizes= that add up."
            )
        start = 0
        for part, n in zip(said.parts, sizes, strict=True):
            inner = (*dims[:i], Dim(n, dims[i].stride, 0, n), *dims[i + 1 :])
            yield from _pieces(where, part, inner, offset + start * dims[i].stride)
            start += n
    elif isinstance(said, Transposed):
        i, j = at(said.dim0), at(said.dim1)
        order = [*dims]
        order[i], order[j] = dims[j], dims[i]
        yield from _pieces(where, said.part, tuple(order), offset)
    elif isinstance(said, Sliced):
        i = at(said.dim)
        one = dims[i]
        if not 0 <= said.start <= said.start + one.of <= said.of:
            raise SpecError(
                f"{where} Sliced takes {one.of} elements from {said.start} on along dim {said.dim}, of {said.of}. Give "
                "start= and of= that hold them."
            )
        inner = (*dims[:i], Dim(one.size, one.stride, said.start + one.start, said.of), *dims[i + 1 :])
        yield from _pieces(where, said.part, inner, offset)
    else:
        raise SpecError(
            f"{where} a {type(said).__name__} is said of it; expected a name in the file, Stacked, Concatenated, "
            "Transposed or Sliced."
        )


def piece_of(name: str, dims: tuple[Dim, ...], memory: int) -> Piece:
    """A piece from its dims in the file's order; those that follow one another in both leaves are one line."""
    shape = tuple(dim.of for dim in dims)
    strides = strides_of(shape)
    file = sum(dim.start * stride for dim, stride in zip(dims, strides, strict=True))
    lines: list[Line] = []
    for one in sorted(
        (Line(dim.size, dim.stride, stride) for dim, stride in zip(dims, strides, strict=True) if dim.size != 1),
        key=lambda line: -line.memory,
    ):
        if lines and (lines[-1].memory, lines[-1].file) == (one.size * one.memory, one.size * one.file):
            lines[-1] = Line(lines[-1].size * one.size, one.memory, one.file)
        else:
            lines.append(one)
    box = tuple((dim.start, dim.start + dim.size) for dim in dims)
    return Piece(name, shape, box, tuple(lines), memory, file, prod(dim.size for dim in dims))


def blocks(piece: Piece, start: int, stop: int, most: int = CHUNK) -> Iterator[Block]:
    """The elements of a piece that lie in [start, stop) of the leaf in memory, `most` in a block at most."""
    if piece.numel:
        for lines, memory, file in _within(piece.lines, piece.memory, piece.file, start, stop):
            yield from _dense(tuple(sorted(lines, key=lambda line: -line.file)), memory, file, most)


Box = tuple[tuple[Line, ...], int, int]


def _within(lines: tuple[Line, ...], memory: int, file: int, start: int, stop: int) -> Iterator[Box]:
    """Boxes of what lies in [start, stop) in memory: whole ones along the first line, and what is cut at its ends."""
    if not lines:
        if start <= memory < stop:
            yield lines, memory, file
        return
    (n, step, jump), inner = lines[0], lines[1:]
    extent = 1 + sum((line.size - 1) * line.memory for line in inner)
    first = max(0, -((memory + extent - 1 - start) // step))  # the first that begins or ends behind `start`
    last = min(n, -((memory - stop) // step))
    low = max(first, -((memory - start) // step))
    high = max(low, min(last, (stop - extent - memory) // step + 1))
    for i in range(first, min(low, last)):
        yield from _within(inner, memory + i * step, file + i * jump, start, stop)
    if low < high:
        yield (Line(high - low, step, jump), *inner), memory + low * step, file + low * jump
    for i in range(max(high, low), last):
        yield from _within(inner, memory + i * step, file + i * jump, start, stop)


def _dense(lines: tuple[Line, ...], memory: int, file: int, most: int) -> Iterator[Block]:
    """A box, from its largest stride in the file on, in blocks that lie end to end there."""
    sizes = tuple(line.size for line in lines)
    inner = prod(sizes[1:])
    dense = all(line.file == n for line, n in zip(lines, strides_of(sizes), strict=True))
    if dense and prod(sizes) <= most:
        yield Block(file, memory, sizes, tuple(line.memory for line in lines))
        return
    (n, step, jump), rest = lines[0], lines[1:]
    many = most // inner if dense else 0
    for i in range(0, n, max(many, 1)):
        one = (Line(min(many, n - i), step, jump), *rest) if many else rest
        yield from _dense(one, memory + i * step, file + i * jump, most)


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
                new = tuple(cut for cut in leaf.cuts if cut.ranks > 1)
                places = {axis: run.sizes[axis] for axis in bucket.cut if run.sizes[axis] > 1}
                if {cut.axis: cut.ranks for cut in old} == places if bucket.by_leaf else old == new:
                    continue
                refuse_blocks(bucket, leaf.path)
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
