"""Sources: where weights come from, a run of elements at a time.

a mapping      {name: tensor}
a checkpoint   what `open_checkpoint` gives, of any format; a path is opened by it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from .._axes import Cuts, whole_shape
from .._common.calls import provide
from .._common.errors import SpecError, TreeError, as_names, as_path, expect
from .._common.tree import PathIndex, flatten
from .._runtime.agreement import Topic
from .._storage import FlatBuffer, coordinate_of, leaf_shards
from .contents import tensors_expected
from .conversions import Conversions, checked, part_of, same_conversions
from .pieces import Piece, blocks, pieces
from .spans import Files, entry_values

__all__ = [
    "Partial", "Rename", "Source", "fill", "fill_weights", "opened", "opens_paths", "renamed", "same_source",
    "weights_given",
]  # fmt: skip

Leaves = dict[str, tuple[tuple[int, ...], torch.dtype, Cuts]]  # shape, dtype, and how it is cut, by path
Rename = Callable[[str], str] | Mapping[str, str]
Partial = bool | str | Sequence[str]  # which leaves may be missing: all, none, or those of patterns
Opener = TypeVar("Opener", bound=Callable[..., "Source"])
OPENERS: list[Callable[[Path], Source]] = []  # by what a path is opened: the reader of checkpoints registers itself


class Source:
    """Tensors by name, in files or in memory: each a tensor, an Entry or a Span (see `spans`)."""

    def __init__(self, what: str, tensors: Mapping[str, Any]) -> None:
        self.what, self.tensors = what, tensors

    def held_as(self, name: str) -> str:
        """The name under which the source holds what this name says."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, some: Iterable[Piece], start: int, into: torch.Tensor) -> None:
        """Elements [start, start + n) of the leaf that has these pieces, into `into` [n], of any dtype and device."""
        with Files() as files:
            for piece in some:
                one = self.tensors[piece.name]
                for block in blocks(piece, start, start + into.numel()):
                    values = entry_values(one, block.file, block.numel, files)
                    block.of(into, start).copy_(values.view(block.sizes))

    def prefix_for(self, paths: Iterable[str]) -> tuple[str, str]:
        """What a name in the source has at its beginning that a path has not, and the other way round: ("model.", "")
        where "model.w" is the leaf "w". Nothing where a path is a name there, or where not all names follow."""
        paths = [*paths]
        if any(path in self.tensors for path in paths) or not paths:
            return "", ""
        tails = {path: [name for name in self.tensors if name.endswith(f".{path}")] for path in paths[:1]}
        for name in tails[paths[0]]:
            prefix = name.removesuffix(paths[0])
            if all(one.startswith(prefix) and one.removeprefix(prefix) in {*paths} for one in self.tensors):
                return prefix, ""
        for name in self.tensors:
            for path in paths:
                if path.endswith(f".{name}"):
                    prefix = path.removesuffix(name)
                    if all(prefix + one in {*paths} for one in self.tensors):
                        return "", prefix
            break
        return "", ""


def opens_paths(opener: Opener) -> Opener:
    """Have paths opened by this function."""
    OPENERS[:] = [opener]
    return opener


def opened(source: Any) -> Source:
    """What a source holds, before anything of it is read.

    Raises:
        FileNotFoundError, CheckpointError: there are no weights, or they are damaged. SpecError: no kind of source.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Mapping):
        return Source("the mapping", _tensors("the mapping", source))
    said = "a folder, a file, what open_checkpoint gives, or a mapping of names to tensors"
    return OPENERS[0](as_path("weights", source, said))


def same_source(source: Source, convert: Conversions) -> tuple[Source, list[Topic]]:
    """A source, and what ranks compare of it: names, shapes and dtypes, and what is said of other leaves in memory."""
    lines = [f"{name} {list(one.shape)} {one.dtype}" for name, one in source.tensors.items()]
    remedy = "Give every rank the same weights; a folder must be one that all ranks see."
    return source, [Topic(lines, TreeError, "weights in their sources", "one", remedy), same_conversions(convert)]


Fill = Callable[[Mapping[str, FlatBuffer], Mapping[str, torch.Tensor], Mapping[str, str]], None]


def weights_given(
    weights: Any, convert: Conversions | None, rename: Rename | None, partial: Partial
) -> tuple[Fill, list[Topic]]:
    """What `init(weights=)` was given: a function that fills main weights and buffers from there, of these and of tied
    leaves; and what ranks compare of it. See `fill_weights`."""
    cuts = checked(convert)
    source, topics = same_source(opened(weights), cuts)
    return lambda main, buffers, aliases: fill_weights(main, buffers, source, rename, cuts, partial, aliases), topics


def _tensors(what: str, held: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    for name, one in held.items():
        if not isinstance(name, str) or not isinstance(one, torch.Tensor):
            raise TreeError(f"weights: {what} has a {type(one).__name__} at {name!r}; {tensors_expected(name)}")
        if type(one) not in (torch.Tensor, torch.nn.Parameter) and hasattr(one, "full_tensor"):
            raise TreeError(
                f"weights: {what} has a {type(one).__name__} at {name!r}; expected plain tensors. Give whole ones, "
                ".full_tensor() on every rank; or save them, and open the folder by open_checkpoint."
            )
    return dict(held)


def renamed(path: str, rename: Rename | None, theirs: str, ours: str) -> str:
    """What a leaf is called in a source: as is said, or else with another beginning."""
    return rename(path) if callable(rename) else (rename or {}).get(path, theirs + path.removeprefix(ours))


def fill_weights(
    main: Mapping[str, FlatBuffer],
    buffers: Mapping[str, torch.Tensor],
    source: Source,
    rename: Rename | None,
    convert: Conversions,
    partial: Partial,
    aliases: Mapping[str, str],
) -> None:
    """As `fill`; and TreeError where the source has none of the leaves, whatever may be missing."""
    found = fill(main, buffers, source, rename, convert, partial, aliases)
    if partial and not found:
        path = next((leaf.path for buffer in main.values() for leaf in buffer.bucket.leaves), "")
        raise TreeError(
            f"weights: no name in {source.what} is one of the model's ({path!r} and others), so nothing would be "
            "loaded. Say how names differ: rename=."
        )


def _optional(partial: Partial, paths: Sequence[str], aliases: Mapping[str, str]) -> set[str]:
    """The paths of leaves that may be missing in a source."""
    if isinstance(partial, bool):
        return {*paths} if partial else set()
    index, found = PathIndex(paths), set()
    for pattern in as_names("partial", partial):
        hits = index.hits(pattern)
        if not hits:
            raise SpecError(
                f"partial: the pattern {pattern!r} matches nothing. Paths look like {', '.join(paths[:4])}, ..."
            )
        found |= {aliases.get(paths[i], paths[i]) for i in hits}
    return found


def fill(
    main: Mapping[str, FlatBuffer],
    buffers: Mapping[str, torch.Tensor],
    source: Source,
    rename: Rename | None,
    convert: Conversions,
    partial: Partial,
    aliases: Mapping[str, str],
) -> set[str]:
    """Read this rank's runs of the leaves into main weights, and buffers whole. Nothing else of the source is read.

    Args:
        rename: from a leaf's path to its name in the source, a function or a mapping of those that differ.
        convert: from a leaf's path to the leaves there that hold it, in the place of `rename`.
        partial: True where leaves may be missing there, and others be there; or patterns of those that may be missing.
            What is missing stays as it is.
        aliases: of further paths of tied leaves the one that holds the leaf.

    Returns:
        the paths that were read.

    Raises:
        TreeError: leaves that are missing, unexpected or of another shape, by name, before anything is read.
        SpecError: a conversion that does not fit its leaf, a pattern that matches nothing.
    """
    said = "a function from a leaf's path to its name there, or {path: name}"
    expect("rename", rename, (Mapping, Callable, type(None)), said)

    def there(path: str) -> list[Piece]:
        named = renamed(path, rename, theirs, ours)
        shape, _, cuts = leaves[aliases.get(path, path)]
        said = part_of(convert.get(path, source.held_as(named)), whole_shape(shape, cuts), cuts, at)
        return pieces(path, shape, said)

    buffers = dict(zip(*flatten(buffers)[:2], strict=True))  # which may be a tree
    at = coordinate_of(next(iter(main.values())).mesh) if main else {}
    leaves: Leaves = {
        leaf.path: (leaf.seen_shape, leaf.form.dtype if leaf.form is not None else buffer.local.dtype, leaf.cuts)
        for buffer in main.values()
        for leaf in buffer.bucket.leaves
    }
    leaves |= {path: (tuple(tensor.shape), tensor.dtype, ()) for path, tensor in buffers.items()}
    checked(convert, None if partial is True else (*leaves, *aliases))
    optional = _optional(partial, (*leaves, *aliases), aliases)
    theirs, ours = ("", "") if rename or convert else source.prefix_for((*leaves, *aliases))
    wanted = {path: there(path) for path in (*leaves, *aliases)}
    found: dict[str, list[Piece]] = {}
    again: dict[str, list[list[Piece]]] = {}  # of tied leaves what is there under another name, too
    for path, some in wanted.items():
        if all(piece.name in source.tensors for piece in some):
            chosen = found.setdefault(aliases.get(path, path), some)
            if [piece.name for piece in chosen] != [piece.name for piece in some]:
                again.setdefault(aliases.get(path, path), []).append(some)
    _complain(source, leaves, wanted, found, optional, partial is True)
    for buffer in main.values():
        for leaf, first, local in leaf_shards(buffer):
            if local.numel() and leaf.path in found and leaf.form is not None:  # all of it, to pack
                whole = torch.empty(leaf.form.numel, dtype=leaf.form.dtype, device=local.device)
                source.read(found[leaf.path], 0, whole)
                local.copy_(leaf.form.pack(whole)[first : first + local.numel()])
            elif local.numel() and leaf.path in found:
                source.read(found[leaf.path], first, local)
                for other in again.get(leaf.path, ()):
                    _same_there(source, leaf.path, found[leaf.path], other, first, local)
    for path, tensor in buffers.items():
        if path in found and tensor.numel():
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            source.read(found[path], 0, flat)
            tensor.copy_(flat.view(tensor.shape))
    return {*found}


def _same_there(
    source: Source, path: str, mine: list[Piece], other: list[Piece], first: int, local: torch.Tensor
) -> None:
    """Raise TreeError unless a tied leaf has the same values under its other name."""
    names = " and ".join(repr(some[0].name) for some in (mine, other))
    shapes = [[source.shape(piece.name) for piece in some] for some in (mine, other)]
    theirs = torch.empty_like(local)
    if shapes[0] == shapes[1]:
        source.read(other, first, theirs)
    same = torch.equal(theirs, local) or torch.equal(theirs.view(torch.uint8), local.view(torch.uint8))  # NaN, too
    if shapes[0] != shapes[1] or not same:
        raise TreeError(
            f"weights: {names} in {source.what} are one leaf of the model, {path!r}, which is tied, and they have "
            "other values. Untie the model's leaves, or leave one out of the source."
        )


def _complain(
    source: Source,
    leaves: Leaves,
    wanted: Mapping[str, list[Piece]],
    found: Mapping[str, list[Piece]],
    optional: set[str],
    partial: bool,
) -> None:
    """Raise TreeError unless what a source has is what leaves want of it."""
    tensors = source.tensors
    names = {path: dict.fromkeys(piece.name for piece in some) for path, some in wanted.items()}
    lost = [path for path in leaves if path not in found]
    cut = [path for path in lost if path not in optional or any(n in tensors for n in names[path])]
    missing = [*dict.fromkeys(name for path in cut for name in names[path] if name not in tensors)]
    known = {name for some in names.values() for name in some}
    more = [] if partial else [name for name in tensors if name not in known]
    odd = {one.name: one.shape for some in found.values() for one in some if source.shape(one.name) != one.shape}
    kinds = {one.name: leaves[path][1] for path, some in found.items() for one in some}
    other = [n for n, dtype in kinds.items() if not _holds(dtype, tensors[n].dtype)]
    taken: dict[str, list[Piece]] = {}  # what is taken twice counts once
    for piece in (piece for some in found.values() for piece in some):
        before = taken.setdefault(piece.name, [])
        if not any(map(piece.meets, before)):
            before.append(piece)
    in_parts = {piece.name for path, some in found.items() if leaves[path][2] for piece in some}  # others have the rest
    filled = {name: sum(piece.numel for piece in some) for name, some in taken.items() if name not in in_parts}
    whole = {name: torch.Size(source.shape(name)).numel() for name in filled}
    left = [] if partial or missing or odd else [name for name in filled if filled[name] < whole[name]]
    said = [f"lacks {_some(missing)}"] if missing else []
    said += [f"has {_some(more)}, which the model has not"] if more else []
    said += [f"has {n!r} as {list(source.shape(n))}, the model {list(odd[n])}" for n in [*odd][:3]]
    said += [f"has {n!r} as {tensors[n].dtype}, the model {kinds[n]}" for n in other[:3]]
    said += [f"has {n!r} with {whole[n]} elements, the model {filled[n]} of them" for n in left[:3]]
    if said:
        raise TreeError(
            f"weights: {source.what} {'; it '.join(said)}. Give names by rename=, and by convert= leaves that files "
            "cut otherwise. Leaves that may be missing are named by patterns, as partial='*lora_*'; with partial=True "
            "any may be, and others be there."
        )


UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
PAIRS = torch.float4_e2m1fn_x2  # two numbers in an element, which nothing converts


def _holds(mine: torch.dtype, theirs: torch.dtype) -> bool:
    """Whether a leaf can have these values: floating ones may be rounded, others must stay."""
    if mine is theirs:
        return True
    if PAIRS in (mine, theirs) or mine.is_complex or theirs.is_complex:
        return mine.is_complex and theirs.is_complex
    if mine.is_floating_point or theirs.is_floating_point:
        return mine.is_floating_point and theirs.is_floating_point
    if torch.bool in (mine, theirs):
        return theirs is torch.bool
    if (theirs in UNSIGNED) is not (mine in UNSIGNED):
        return theirs in UNSIGNED and mine.itemsize > theirs.itemsize
    return mine.itemsize >= theirs.itemsize


def _some(names: list[str]) -> str:
    return f"{names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


provide("io", weights_given)
