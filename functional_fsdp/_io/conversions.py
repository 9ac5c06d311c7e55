"""Conversions: which leaves of a file hold a leaf in memory, where they are not one and the same.

    leaf in memory             what is said of it               leaves of the file
    [n, m]                     "a"                              a [n, m]
    [2, n, m]                  Stacked(["a", "b"])              a [n, m], b [n, m]
    [n, 2 m]                   Concatenated(["a", "b"], dim=1)  a [n, m], b [n, m]
    [n, m]                     Transposed("a")                  a [m, n]
    [n, m]                     Sliced("a", 4, of=12)            a [12, m], its rows 4 to 4 + n

They nest, and hold for reading as for writing. Each is a value that knows no ranks; `pieces.py` has what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._common.errors import SpecError
from .._runtime.agree import Topic
from .._spec.cuts import Cuts

__all__ = [
    "Concatenated",
    "Conversion",
    "Conversions",
    "Sliced",
    "Stacked",
    "Transposed",
    "checked",
    "part_of",
    "same_conversions",
]


@dataclass(frozen=True)
class Stacked:
    """A leaf in memory whose slices along `dim` are leaves of the file: [experts, n, m] -> experts × [n, m].

    Args:
        parts: names in the file, or further conversions: as many as the leaf has elements along `dim`.
        dim: of the leaf in memory, as for torch.stack.

    Example: `fsdp.Stacked(f"layers.0.experts.{e}.w2.weight" for e in range(8))`.
    """

    parts: tuple[Conversion, ...]
    dim: int = 0

    def __init__(self, parts: Iterable[Conversion], dim: int = 0) -> None:
        object.__setattr__(self, "parts", _parts("Stacked", parts))
        object.__setattr__(self, "dim", dim)


@dataclass(frozen=True)
class Concatenated:
    """A leaf in memory whose parts along `dim` are leaves of the file, end to end: [2 n, m] -> [n, m] and [n, m].

    Args:
        parts: names in the file, or further conversions.
        dim: of the leaf in memory, as for torch.cat.
        sizes: of the parts along `dim`; none given: all alike.

    Example: `fsdp.Concatenated(["q.weight", "k.weight", "v.weight"], sizes=[64, 16, 16])`.
    """

    parts: tuple[Conversion, ...]
    dim: int = 0
    sizes: tuple[int, ...] = ()

    def __init__(self, parts: Iterable[Conversion], dim: int = 0, sizes: Iterable[int] = ()) -> None:
        object.__setattr__(self, "parts", _parts("Concatenated", parts))
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "sizes", tuple(sizes))
        if self.sizes and len(self.sizes) != len(self.parts):
            raise SpecError(f"Concatenated: got {len(self.parts)} parts, {len(self.sizes)} sizes. Give one size each.")


@dataclass(frozen=True)
class Transposed:
    """A leaf in memory that a leaf of the file holds with two dims exchanged: [n, m] -> [m, n].

    Args:
        part: a name in the file, or a further conversion.
        dim0, dim1: as for torch.transpose.

    Example: `fsdp.Transposed("h.0.attn.c_attn.weight")`.
    """

    part: Conversion
    dim0: int = 0
    dim1: int = 1


@dataclass(frozen=True)
class Sliced:
    """A leaf in memory that is a slice of one of the file: [n, m] -> elements start to start + n of [of, m].

    Args:
        part: a name in the file, or a further conversion. Other leaves in memory are its other slices.
        start: where in it along `dim` this leaf begins.
        of: elements that it has along `dim`.
        dim: as for torch.narrow.

    Example: `{"k.weight": fsdp.Sliced("qkv.weight", 64, of=192)}`, with q before it and v behind.
    """

    part: Conversion
    start: int
    of: int
    dim: int = 0


Conversion: TypeAlias = "str | Stacked | Concatenated | Transposed | Sliced"
Conversions: TypeAlias = Mapping[str, Conversion]


def part_of(said: Conversion, whole: Sequence[int], cuts: Cuts, coordinate: Mapping[str, int]) -> Conversion:
    """What is to be said of a rank's part of a leaf, from what is said of the whole one."""
    shape = list(whole)
    for cut in cuts:
        spans = cut.spans(coordinate[cut.axis])
        some = [_narrowed(said, cut.dim, start, count, shape[cut.dim]) for start, count in spans]
        said = some[0] if len(some) == 1 else Concatenated(some, cut.dim, [count for _, count in spans])
        shape[cut.dim] //= cut.ranks
    return said


def _narrowed(said: Conversion, dim: int, start: int, count: int, of: int) -> Conversion:
    """Elements start to start + count along a dim, of so many: of parts along it those that have them."""
    if isinstance(said, Stacked) and said.dim == dim:
        return Stacked(said.parts[start : start + count], dim)
    if not isinstance(said, Concatenated) or said.dim != dim:
        return Sliced(said, start, of, dim)
    sizes = said.sizes or (of // max(len(said.parts), 1),) * len(said.parts)
    found: list[tuple[Conversion, int]] = []
    at = 0
    for part, size in zip(said.parts, sizes, strict=True):
        a, b = max(start, at), min(start + count, at + size)
        if a < b:
            found.append((part if b - a == size else _narrowed(part, dim, a - at, b - a, size), b - a))
        at += size
    return found[0][0] if len(found) == 1 else Concatenated([p for p, _ in found], dim, [n for _, n in found])


def _parts(what: str, parts: Iterable[Conversion]) -> tuple[Conversion, ...]:
    if isinstance(parts, str):
        raise SpecError(f"{what}: got the one name {parts!r}; expected several names. Put them into a list.")
    return tuple(parts)


def checked(convert: Any, paths: Iterable[str] | None = None) -> Conversions:
    """What was given as convert=, `{}` for None.

    Args:
        paths: of all leaves that there are; None where others may be named.
    """
    if convert is None:
        return {}
    if not isinstance(convert, Mapping):
        raise SpecError(
            f"convert: got a {type(convert).__name__}; expected a mapping from leaves' paths to names in the "
            "file, Stacked, Concatenated, Transposed or Sliced, as conversions_of(model) makes it."
        )
    more = [] if paths is None else sorted(convert.keys() - {*paths})
    if more:
        raise SpecError(
            f"convert: {more[0]!r}{f' and {len(more) - 1} more are no paths' if more[1:] else ' is no path'} "
            "of a leaf or buffer of the state. Give paths as State.layout.paths has them; buffers come into a state by "
            "shard(buffers=)."
        )
    return convert


def same_conversions(convert: Conversions) -> Topic:
    """What ranks compare of them."""
    lines = [f"{path!r}: {said!r}" for path, said in convert.items()]
    return Topic(lines, SpecError, "conversions", "one", "Give every rank the same convert=.")
