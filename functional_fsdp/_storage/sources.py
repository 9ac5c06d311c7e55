"""Sources: where weights come from, a run of elements at a time.

a folder     model.safetensors.index.json and its files, or every *.safetensors; pytorch_model.bin alike
a file       *.safetensors, or what torch.save has written: a state dict, memory-mapped, read with weights_only
a mapping    {name: tensor}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._common.errors import CheckpointError, SpecError, TreeError
from .._runtime.agree import Topic
from .flat import FlatBuffer
from .safetensors import Entry, entries, read_into

__all__ = ["Rename", "Source", "fill", "opened", "same_source"]

Rename = Callable[[str], str] | Mapping[str, str]
CHUNK = 1 << 24  # elements read at once
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class Source:
    """Tensors by name, in files or in memory."""

    def __init__(self, what: str, tensors: Mapping[str, Entry | torch.Tensor]) -> None:
        self.what, self.tensors = what, tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, first: int, into: torch.Tensor) -> None:
        """Elements [first, first + n) of a tensor, into `into` [n] of any floating dtype and device."""
        one, n = self.tensors[name], into.numel()
        if isinstance(one, torch.Tensor):
            flat = one.detach().reshape(-1)
            into.copy_(flat[first : first + n])
            return
        with open(one.path, "rb", buffering=0) as file:
            for at in range(0, n, CHUNK):
                host = torch.empty(min(CHUNK, n - at), dtype=one.dtype)
                read_into(file, one, first + at, host)
                into[at : at + host.numel()].copy_(host)


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


def same_source(source: Source) -> tuple[Source, list[Topic]]:
    """A source, and what ranks compare of it: names, shapes and dtypes."""
    lines = [f"{name} {list(one.shape)} {one.dtype}" for name, one in source.tensors.items()]
    remedy = "Give every rank the same weights; a folder must be one that all ranks see."
    return source, [Topic(lines, TreeError, "weights in their sources", "one", remedy)]


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
    partial: bool,
    aliases: Mapping[str, str],
) -> set[str]:
    """Read this rank's runs of the leaves into main weights, and buffers whole. Nothing else of the source is read.

    Args:
        rename: from a leaf's path to its name in the source, a function or a mapping of those that differ.
        partial: whether leaves may be missing there, and others be there; what is missing stays as it is.
        aliases: of further paths of tied leaves the one that holds the leaf.

    Returns:
        the paths that were read.

    Raises:
        TreeError: leaves that are missing, unexpected or of another shape, by name, before anything is read.
    """

    def there(path: str) -> str:
        return rename(path) if callable(rename) else (rename or {}).get(path, path)

    shapes = {leaf.path: leaf.shape for buffer in main.values() for leaf in buffer.bucket.leaves}
    shapes |= {path: tuple(tensor.shape) for path, tensor in buffers.items()}
    names: dict[str, str] = {}
    for path in (*shapes, *aliases):
        if there(path) in source.tensors:
            names.setdefault(aliases.get(path, path), there(path))
    known = {there(path) for path in (*shapes, *aliases)}
    missing = [] if partial else [path for path in shapes if path not in names]
    more = [] if partial else [name for name in source.tensors if name not in known]
    odd = [path for path, name in names.items() if source.shape(name) != tuple(shapes[path])]
    kinds = {leaf.path: buffer.local.dtype for buffer in main.values() for leaf in buffer.bucket.leaves}
    kinds |= {path: tensor.dtype for path, tensor in buffers.items()}
    floats = {p: source.tensors[name].dtype.is_floating_point for p, name in names.items()}
    other = [p for p, floating in floats.items() if floating != kinds[p].is_floating_point]
    said = [f"lacks {_some([there(path) for path in missing])}"] if missing else []
    said += [f"has {_some(more)}, which the model has not"] if more else []
    said += [f"has {names[p]!r} as {list(source.shape(names[p]))}, the model {list(shapes[p])}" for p in odd[:3]]
    said += [f"has {names[p]!r} as {source.tensors[names[p]].dtype}, the model {kinds[p]}" for p in other[:3]]
    if said:
        raise TreeError(
            f"weights: {source.what} {'; it '.join(said)}. Give names by rename=; with partial=True leaves may be "
            "missing, and others be there."
        )
    for buffer in main.values():
        start, stop = buffer.span()
        for leaf in buffer.bucket.leaves:
            a, b = max(leaf.offset, start), min(leaf.offset + leaf.numel, stop)
            if a < b and leaf.path in names:
                source.read(names[leaf.path], a - leaf.offset, buffer.local[a - start : b - start])
    for path, tensor in buffers.items():
        if path in names and tensor.numel():
            source.read(names[path], 0, tensor.view(-1))
    return {*names}


def _some(names: list[str]) -> str:
    return f"{names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
