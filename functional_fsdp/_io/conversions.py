"""Conversions: which leaves of a file hold a leaf in memory, where they are not one and the same.

    leaf in memory             what is said of it               leaves of the file
    [n, m]                     "a"                              a [n, m]
    [2, n, m]                  Stacked(["a", "b"])              a [n, m], b [n, m]
    [n, 2 m]                   Concatenated(["a", "b"], dim=1)  a [n, m], b [n, m]
    [n, m]                     Transposed("a")                  a [m, n]
    [n, m]                     Sliced("a", 4, of=12)            a [12, m], its rows 4 to 4 + n

They nest, and hold for reading as for writing. Each is a value that knows no ranks; `pieces.py` has what follows.

conversions_of: what transformers says of the files of a model, as values.

    registered for Mixtral    WeightRenaming(".block_sparse_moe.", ".mlp.")
                              WeightConverter([".experts.*.w1.weight", ".experts.*.w3.weight"], ".experts.gate_up_proj",
                                              [MergeModulelist(dim=0), Concatenate(dim=1)])
    of a leaf [8, 2 n, m]     Concatenated([Stacked(["....block_sparse_moe.experts.0.w1.weight", ...]),
                                            Stacked(["....block_sparse_moe.experts.0.w3.weight", ...])], dim=1)

transformers goes from names in files to leaves, and back when it saves. Names here are by that way back. What it does
to tensors is followed from the last operation to the first, with the shape that each of them makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import torch.nn as nn

from .._axes import Cuts
from .._common.errors import SpecError, expect
from .._runtime.agreement import Topic


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
        object.__setattr__(self, "parts", _parts("Stacked", parts, dim=dim))
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
        sizes = expect("Concatenated(sizes)", sizes, Iterable, "a number for each part")
        object.__setattr__(self, "sizes", tuple(sizes))
        object.__setattr__(self, "parts", _parts("Concatenated", parts, dim=dim, sizes=self.sizes))
        object.__setattr__(self, "dim", dim)
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

    def __post_init__(self) -> None:
        _parts("Transposed", (self.part,), dim0=self.dim0, dim1=self.dim1)


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

    def __post_init__(self) -> None:
        _parts("Sliced", (self.part,), start=self.start, of=self.of, dim=self.dim)


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


def _parts(what: str, parts: Iterable[Conversion], **numbers: Any) -> tuple[Conversion, ...]:
    """The parts of a conversion; these and its numbers are what they are to be."""
    if isinstance(parts, str):
        raise SpecError(f"{what}: got the one name {parts!r}; expected several names. Put them into a list.")
    found = tuple(expect(f"{what}(parts)", parts, Iterable, "names in the file, or further conversions"))
    for part in found:
        expect(f"{what}: a part", part, (str, Stacked, Concatenated, Transposed, Sliced), "a name, or a conversion")
    for name, given in numbers.items():
        for number in given if name == "sizes" else (given,):
            expect(f"{what}({name})", number, Integral, "a whole number")
    return found


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


Shape = tuple[int, ...]


def conversions_of(model: nn.Module) -> dict[str, Conversion]:
    """What `convert=` needs for a model of transformers: {path: which leaves of its released files hold the leaf}.

    Experts of Mixtral are stacked in memory, `gate_up_proj` [experts, 2 n, m], and apart in files, `w1.weight` [n, m].
    Leaves whose names and shapes in files are those in memory are left out.

    Args:
        model: a transformers model, on any device, or its skeleton, as `functionalize` and `init` return it. It is only
            looked at. Files are taken to be as its `save_pretrained` writes them; where older ones hold a leaf
            transposed, say so: `{**fsdp.conversions_of(model), path: fsdp.Transposed(path, 1, 2)}`.

    Returns:
        conversions of parameters and persistent buffers, for `load_weights`, `save_safetensors` and `init`; further
        paths of tied leaves are among them.

    Raises:
        SpecError: no model of transformers, a transformers without such conversions (before 5), or one that Stacked,
            Concatenated, Transposed and Sliced cannot say, as it changes numbers or their order within a row.

    Collective: none.

    Example: `state, model = fsdp.init(make, spec, optimizer, weights="mixtral/", convert=fsdp.conversions_of)`.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise SpecError(
            "conversions_of: transformers is not installed. Install it, or write convert= by hand."
        ) from None
    if not isinstance(model, PreTrainedModel):
        raise SpecError(
            f"conversions_of: got a {type(model).__name__}; expected a PreTrainedModel of transformers, or its "
            "skeleton. For another module write convert= by hand."
        )
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming
    except ImportError:
        import transformers

        raise SpecError(
            f"conversions_of: transformers {transformers.__version__} keeps no conversions where they are looked for; "
            "expected 5 or later. Upgrade it, or write convert= by hand."
        ) from None
    said = getattr(model, "_weight_conversions", None)  # of a model that from_pretrained made: what it went by
    if said is None:  # a prefix in files or none: only files say
        said = [
            one for one in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(one, PrefixChange)
        ]
    back = [(one, one.reverse_transform()) for one in reversed(said)]
    renamings = [inverse for _, inverse in back if isinstance(inverse, WeightRenaming)]
    converters = [pair for pair in back if isinstance(pair[1], WeightConverter)]
    shapes = {path: tuple(p.shape) for path, p in model.named_parameters(remove_duplicate=False)}
    kept = {*model.state_dict(keep_vars=True)}
    shapes |= {path: tuple(b.shape) for path, b in model.named_buffers(remove_duplicate=False) if path in kept}

    def in_file(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    found: dict[str, Conversion] = {}
    for path in sorted(shapes, key=_natural):
        said_of: Conversion | None = None
        for converter, inverse in converters:
            name, pattern = inverse.rename_source_key(path)
            if pattern is not None:
                said_of = _Making(
                    model,
                    shapes,
                    in_file,
                    path,
                    name,
                    pattern,
                    inverse.target_patterns,
                    inverse.source_patterns,
                    converter.operations,
                ).all()
                break
        found[path] = in_file(path) if said_of is None else said_of
    return {path: one for path, one in found.items() if one != path}


def _natural(name: str) -> list[Any]:
    """Layers in the order of their numbers, as transformers goes through names."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"\.", name)]


class _Making(NamedTuple):
    """How transformers makes a leaf in memory.

    Attributes:
        name, pattern: what its way back makes of the leaf's path, and by which of `leaves`.
        files, leaves: patterns of names in files and in memory.
        operations: from files to leaves.
    """

    model: Any
    shapes: dict[str, Shape]
    in_file: Callable[[str], str]
    path: str
    name: str
    pattern: str
    files: list[str]
    leaves: list[str]
    operations: list[Any]

    def all(self) -> Conversion:
        if self.files[0] not in self.name:
            raise self.refused(f"a name {self.name!r} that is not made of {self.files[0]!r}")
        return self.of([*self.operations], self.shapes[self.path], self.files)

    def of(self, operations: list[Any], shape: Shape, patterns: list[str]) -> Conversion:
        """What has this shape after the operations, from files of these patterns."""
        if not operations:
            if len(patterns) != 1 or "*" in patterns[0]:
                raise self.refused(f"several leaves {patterns[0]!r} that nothing puts together")
            return self.in_file(self.name.replace(self.files[0], patterns[0], 1).replace("*", "0"))
        *before, last = operations
        kind = type(last).__name__
        dim = last.dim % len(shape) if isinstance(getattr(last, "dim", None), int) and shape else 0
        if kind == "MergeModulelist" and len(patterns) == 1 and "*" in patterns[0]:
            inner = shape[:dim] + shape[dim + 1 :]
            return Stacked((self.of(before, inner, [one]) for one in _counted(patterns[0], shape[dim])), dim)
        if kind == "Concatenate":
            number = getattr(last, "num_shards_attribute", None)
            if number is not None:
                patterns = _counted(patterns[0], getattr(self.model.config.get_text_config(), number))
            inner = (*shape[:dim], shape[dim] // len(patterns), *shape[dim + 1 :])
            return Concatenated((self.of(before, inner, [one]) for one in patterns), dim)
        if kind == "Transpose":
            i, j = last.dim0 % len(shape), last.dim1 % len(shape)
            if getattr(last, "check_dims", False):  # transposed in some files; those that it writes are not
                return self.of(before, shape, patterns)
            order = [*shape]
            order[i], order[j] = order[j], order[i]
            return Transposed(self.of(before, tuple(order), patterns), i, j)
        if kind in ("Chunk", "Split"):
            sizes = self.sizes(kind, dim, getattr(last, "num_shards_attribute", None))
            index = self.leaves.index(self.pattern)
            inner = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
            return Sliced(self.of(before, inner, patterns), sum(sizes[:index]), sum(sizes), dim)
        raise self.refused(kind)

    def sizes(self, kind: str, dim: int, number: str | None) -> list[int]:
        """Of the leaves in memory that a leaf of the file is cut into, along `dim`."""
        if number is not None:
            raise self.refused(f"{kind} into as many leaves as {number} says")
        own = self.shapes[self.path][dim]
        if kind == "Chunk":
            return [own] * len(self.leaves)
        others = [self.path.replace(self.pattern, other, 1) for other in self.leaves]
        if any(other not in self.shapes for other in others):
            raise self.refused(f"{kind} into {', '.join(others)}, which the model has not all")
        return [self.shapes[other][dim] for other in others]

    def refused(self, what: str) -> SpecError:
        return SpecError(
            f"conversions_of: transformers makes {self.path!r} of {', '.join(self.files)} by {self.operations}; "
            f"expected MergeModulelist, Concatenate, Transpose, Chunk and Split, met {what}. Save the files with "
            "save_pretrained(save_original_format=False), which needs no conversion, or write convert= by hand."
        )


def _counted(pattern: str, count: int) -> list[str]:
    return [pattern.replace("*", str(k), 1) for k in range(count)]
