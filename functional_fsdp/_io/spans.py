"""Spans: tensors that lie in files, or in parts of several, read a run of elements at a time.

    Entry    one run of bytes of a file (see `safetensors_file`)
    Blob     the same, where only a look into the file says at which byte it begins
    Cut      parts of any of these kinds, each a box of the tensor, or a run of its elements
    Filled   one value everywhere, in no file

All have a `shape`, a `dtype` and `values(first, n, files)`: elements [first, first + n) in C order, on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from .pieces import Dim, Line, Piece, blocks, piece_of, strides_of
from .safetensors_file import Entry, read_into

__all__ = ["Blob", "Cut", "Files", "Filled", "Part", "Span", "box", "entry_values", "numel_of", "run", "strided"]


class Files:
    """Files that are open while something is read from them."""

    def __init__(self) -> None:
        self.opened: dict[Path, int] = {}

    def of(self, path: Path) -> int:
        if path not in self.opened:
            self.opened[path] = os.open(path, os.O_RDONLY)
        return self.opened[path]

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: Any) -> None:
        while self.opened:
            os.close(self.opened.popitem()[1])


class Span(Protocol):
    """A tensor that can be read in runs."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def values(self, first: int, n: int, files: Files) -> torch.Tensor: ...


Part = tuple[Piece, "Span | Entry | torch.Tensor"]


def entry_values(one: Any, first: int, n: int, files: Files) -> torch.Tensor:
    """Elements [first, first + n) [n] of a tensor, an Entry or a Span, on the device where they lie."""
    if isinstance(one, torch.Tensor):
        return one.detach().reshape(-1)[first : first + n]
    if isinstance(one, Entry):
        values = torch.empty(n, dtype=one.dtype, device="cpu")
        read_into(files.of(one.path), one, first, values)
        return values
    found: torch.Tensor = one.values(first, n, files)
    return found


@dataclass(frozen=True)
class Cut:
    """A tensor in parts: which of its elements (`Piece`: "memory" is this tensor, "file" the part) lie in which."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def values(self, first: int, n: int, files: Files) -> torch.Tensor:
        found = torch.empty(n, dtype=self.dtype, device="cpu")
        for piece, one in self.parts:
            for block in blocks(piece, first, first + n):
                values = entry_values(one, block.file, block.numel, files)
                block.of(found, first).copy_(values.view(block.sizes))
        return found

    @property
    def covered(self) -> int:
        """How many elements the parts have."""
        return sum(piece.numel for piece, _ in self.parts)


@dataclass(frozen=True)
class Blob:
    """A tensor whose place is looked up when it is first read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    find: Callable[[], Any]

    @cached_property
    def found(self) -> Any:
        return self.find()

    def values(self, first: int, n: int, files: Files) -> torch.Tensor:
        return entry_values(self.found, first, n, files)


@dataclass(frozen=True)
class Filled:
    """A tensor of one value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float

    def values(self, first: int, n: int, files: Files) -> torch.Tensor:
        return torch.full((n,), self.value, dtype=self.dtype, device="cpu")


def numel_of(shape: Iterable[int]) -> int:
    return torch.Size(shape).numel()


def box(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], part: Any) -> Part:
    """A part that is a box of a tensor of this shape, and lies in C order."""
    steps = strides_of(tuple(shape))
    dims = tuple(Dim(n, step, 0, n) for n, step in zip(sizes, steps, strict=True))
    return piece_of("", dims, sum(a * step for a, step in zip(offsets, steps, strict=True))), part


def run(first: int, n: int, part: Any, at: int = 0) -> Part:
    """A part that is elements [first, first + n) of a tensor; they are those from `at` on of what it lies in."""
    piece = piece_of("", (Dim(n, 1, 0, n),), first)
    return piece._replace(file=at), part


def strided(shape: Sequence[int], strides: Sequence[int], at: int, dtype: torch.dtype, memory: Any) -> Cut:
    """A tensor of any strides, whose first element is that at `at` of what it lies in."""
    own = strides_of(tuple(shape))
    lines = [Line(n, step, jump) for n, step, jump in zip(shape, own, strides, strict=True) if n != 1]
    piece = Piece("", tuple(shape), (), tuple(lines), 0, at, numel_of(shape))
    return Cut(tuple(shape), dtype, ((piece, memory),))
