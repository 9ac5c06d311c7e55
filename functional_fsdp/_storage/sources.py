"""Sources: where weights come from, a run of elements at a time.

a folder     model.safetensors.index.json and its files, or every *.safetensors; pytorch_model.bin alike
a file       *.safetensors, or what torch.save has written: a state dict, memory-mapped, read with weights_only
a mapping    {name: tensor}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .._common.errors import CheckpointError, SpecError, TreeError
from .._runtime.agree import Topic
from .conversions import Conversions, checked, same_conversions
from .flat import FlatBuffer, leaf_shards
from .pieces import Piece, blocks, pieces
from .safetensors import Entry, entries, read_into

__all__ = ["Rename", "Source", "fill", "opened", "same_source"]

Rename = Callable[[str], str] | Mapping[str, str]
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class Source:
    """Tensors by name, in files or in memory."""

    def __init__(self, what: str, tensors: Mapping[str, Entry | torch.Tensor]) -> None:
        self.what, self.tensors = what, tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, some: Iterable[Piece], start: int, into: torch.Tensor) -> None:
        """Elements [start, start + n) of the leaf that has these pieces, into `into` [n], of any dtype and device."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for piece in some:
                one = self.tensors[piece.name]
                for block in blocks(piece, start, start + into.numel()):
                    if isinstance(one, torch.Tensor):
                        values = one.detach().reshape(-1)[block.file : block.file + block.numel]
                    else:
                        if one.path not in files:
                            files[one.path] = stack.enter_context(open(one.path, "rb", buffering=0))
                        values = torch.empty(block.numel, dtype=one.dtype, device="cpu")
                        read_into(files[one.path].fileno(), one, block.file, values)
                    block.of(into, start).copy_(values.view(block.sizes))


def opened(source: Any) -> Source:
    """What a source holds, before anything of it is read.

    Raises:
        FileNotFoundError, CheckpointError: there are no weights, or they are damaged. SpecError: no kind of source.
    """
    if isinstance(source, Mapping):
        return Source("the mapping", _tensors("the mapping", source))
    if not isinstance(source, str | os.PathLike):
        raise SpecError(
            f"weights: got a {type(source).__name__}; expected a folder, a file, or a mapping of names to tensors."
        )
    path = Path(source)
    if path.is_dir():
        return Source(str(path), _folder(path))
    if not path.exists():
        raise FileNotFoundError(f"weights: there is no {path}.")
    return Source(str(path), _file(path))


def same_source(source: Source, convert: Conversions) -> tuple[Source, list[Topic]]:
    """A source, and what ranks compare of it: names, shapes and dtypes, and what is said of other leaves in memory."""
    lines = [f"{name} {list(one.shape)} {one.dtype}" for name, one in source.tensors.items()]
    remedy = "Give every rank the same weights; a folder must be one that all ranks see."
    return source, [Topic(lines, TreeError, "weights in their sources", "one", remedy), same_conversions(convert)]


def _folder(path: Path) -> dict[str, Entry | torch.Tensor]:
    files: Iterable[Path] = sorted(path.glob("*.safetensors"))
    for name in INDEX:
        if (path / name).is_file():
            try:
                chosen = sorted({*json.loads((path / name).read_text())["weight_map"].values()})
                if any(Path(one).name != one for one in chosen):
                    raise ValueError(f"it names {chosen[0]!r}, which lies elsewhere")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{path / name} is no index of weights: {error}") from None
            files = [path / one for one in chosen]
            break
    files = files or [one for one in (path / "pytorch_model.bin",) if one.exists()]
    if not files:
        raise FileNotFoundError(f"weights: {path} has no *.safetensors and no pytorch_model.bin.")
    found: dict[str, Entry | torch.Tensor] = {}
    for file in files:
        for name, one in _file(file).items():
            if name in found:
                raise CheckpointError(f"{path} has {name!r} in two files, {file.name} and another.")
            found[name] = one
    return found


def _file(path: Path) -> Mapping[str, Entry | torch.Tensor]:
    if path.suffix == ".safetensors":
        return entries(path)
    try:
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever an unpickler meets
        raise CheckpointError(f"{path} is no state dict that torch.load reads with weights_only: {error}") from error
    if not isinstance(held, Mapping):
        raise CheckpointError(f"{path} holds a {type(held).__name__}; expected a state dict.")
    return _tensors(str(path), held)


def _tensors(what: str, held: Mapping[Any, Any]) -> dict[str, Entry | torch.Tensor]:
    for name, one in held.items():
        if not isinstance(name, str) or not isinstance(one, torch.Tensor):
            raise TreeError(f"weights: {what} has a {type(one).__name__} at {name!r}; expected tensors by name.")
    return dict(held)


def fill(
    main: Mapping[str, FlatBuffer],
    buffers: Mapping[str, torch.Tensor],
    source: Source,
    rename: Rename | None,
    convert: Conversions,
    partial: bool,
    aliases: Mapping[str, str],
) -> set[str]:
    """Read this rank's runs of the leaves into main weights, and buffers whole. Nothing else of the source is read.

    Args:
        rename: from a leaf's path to its name in the source, a function or a mapping of those that differ.
        convert: from a leaf's path to the leaves there that hold it, in the place of `rename`.
        partial: whether leaves may be missing there, and others be there; what is missing stays as it is.
        aliases: of further paths of tied leaves the one that holds the leaf.

    Returns:
        the paths that were read.

    Raises:
        TreeError: leaves that are missing, unexpected or of another shape, by name, before anything is read.
        SpecError: a conversion that does not fit its leaf.
    """

    def there(path: str) -> list[Piece]:
        named = rename(path) if callable(rename) else (rename or {}).get(path, path)
        return pieces(path, leaves[aliases.get(path, path)][0], convert.get(path, named))

    leaves = {leaf.path: (leaf.shape, buffer.local.dtype) for buffer in main.values() for leaf in buffer.bucket.leaves}
    leaves |= {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in buffers.items()}
    checked(convert, None if partial else (*leaves, *aliases))
    wanted = {path: there(path) for path in (*leaves, *aliases)}
    found: dict[str, list[Piece]] = {}
    again: dict[str, list[list[Piece]]] = {}  # of tied leaves what is there under another name, too
    for path, some in wanted.items():
        if all(piece.name in source.tensors for piece in some):
            chosen = found.setdefault(aliases.get(path, path), some)
            if [piece.name for piece in chosen] != [piece.name for piece in some]:
                again.setdefault(aliases.get(path, path), []).append(some)
    _complain(source, leaves, wanted, found, partial)
    for buffer in main.values():
        for leaf, first, local in leaf_shards(buffer):
            if local.numel() and leaf.path in found:
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
    if shapes[0] != shapes[1] or not torch.equal(theirs, local):
        raise TreeError(
            f"weights: {names} in {source.what} are one leaf of the model, {path!r}, which is tied, and they have "
            "other values. Untie the model's leaves, or leave one out of the source."
        )


def _complain(
    source: Source,
    leaves: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    wanted: Mapping[str, list[Piece]],
    found: Mapping[str, list[Piece]],
    partial: bool,
) -> None:
    """Raise TreeError unless what a source has is what leaves want of it."""
    tensors = source.tensors
    names = {path: dict.fromkeys(piece.name for piece in some) for path, some in wanted.items()}
    cut = [path for path in leaves if path not in found and (not partial or any(n in tensors for n in names[path]))]
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
    filled = {name: sum(piece.numel for piece in some) for name, some in taken.items()}
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
            "cut otherwise; with partial=True leaves may be missing, and others be there."
        )


def _holds(mine: torch.dtype, theirs: torch.dtype) -> bool:
    """Whether a leaf can have these values: floating ones may be rounded, others must stay."""
    if mine.is_floating_point or theirs.is_floating_point:
        return mine.is_floating_point and theirs.is_floating_point
    return mine.itemsize >= theirs.itemsize


def _some(names: list[str]) -> str:
    return f"{names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
