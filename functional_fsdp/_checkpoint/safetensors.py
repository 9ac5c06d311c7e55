"""save_safetensors: the weights as Hugging Face's files, each rank writing its runs at their places.

folder/                                  appears by one rename, when everything is on disk
  model-00001-of-00003.safetensors       the first rank writes headers and makes room; then all ranks write
  model.safetensors.index.json           which leaf is in which file
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from .._common.calls import alone
from .._common.errors import SpecError
from .._common.tree import flatten
from .._runtime.joint import Joint
from .._runtime.runtime import runtime_of
from .._state.state import State
from .._storage.safetensors import DTYPES, Entry, create, entries, write_at
from .checkpoint import check_shared, same_folder
from .folder import Claim, partial, sync
from .parts import parts_of

__all__ = ["save_safetensors"]

CHUNK = 1 << 24  # elements written at once
Files = list[dict[str, tuple[torch.dtype, tuple[int, ...]]]]


@alone
@torch.no_grad()
def save_safetensors(
    state: State,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
) -> Path:
    """Write the weights to `folder` as safetensors with an index, as `from_pretrained` reads them. Never consumes it.

    Names are those of the leaves and buffers; a tied leaf is written once, under its first path.

    Args:
        folder: appears when everything is on disk. All ranks must see it.
        dtype: of floating leaves in the files; None: that of `Precision.main`.
        max_shard_size: bytes of a file at most; a leaf is never cut.

    Returns:
        the folder.

    Memory: on the host 16 Mi elements a rank; nothing is gathered.

    Raises:
        StaleStateError: a state in the middle of a step. SpecError: a dtype that safetensors has not, or experts of
            which ranks have their own. FileExistsError: the folder exists. CheckpointError: ranks name different
            folders, or do not see the same. OSError: what a rank met. If one rank raises, all do.

    Collective: every rank calls it; exchanges on the host.

    Example: `fsdp.save_safetensors(state, "llama-tuned", dtype=torch.bfloat16)`.
    """
    run = runtime_of(state.spec.mesh)
    with Joint(run, "save_safetensors") as joint:
        state.version.lineage.look(state.version.serial)
        final, token = same_folder(joint, folder)
        claim = Claim(final, token) if run.rank == 0 else None
        path = partial(final, token)

        def begin() -> None:
            state._resting("save_safetensors")
            files = _files(state, dtype, max_shard_size)
            if claim is not None:
                claim.make()
                names = _names(len(files))
                for name, tensors in zip(names, files, strict=True):
                    create(path / name, tensors)
                if len(files) > 1:
                    _index(path, names, files)

        def write() -> None:
            check_shared(run, path, "save_safetensors")
            _write(state, path, _files(state, dtype, max_shard_size))

        def complete() -> None:
            if claim is not None:
                claim.appear()

        try:
            joint(begin, "begin")
            joint(write, "weights")
            joint(complete, "end")
        finally:
            if claim is not None:
                claim.drop()
    return Path(folder)


def _files(state: State, dtype: torch.dtype | None, most: int) -> Files:
    """What goes into which file: leaves in the tree's order, then buffers."""
    if dtype is not None and (dtype not in DTYPES.values() or not dtype.is_floating_point):
        raise SpecError(f"save_safetensors(dtype={dtype}): expected a floating dtype that safetensors has, or None.")
    run = runtime_of(state.spec.mesh)
    at = {leaf.path: (leaf, bucket) for bucket in state.layout.buckets.values() for leaf in bucket.leaves}
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for path in state.layout.paths:
        if path in at:
            leaf, bucket = at[path]
            own = [axis for axis, size in run.sizes.items() if size > 1 and axis not in bucket.placement.data]
            if own:
                raise SpecError(
                    f"save_safetensors: ranks along {own} have {path!r} of their own, and a file has one leaf of a "
                    "name. Save a checkpoint, which has all of them."
                )
            tensors[path] = (dtype if dtype and bucket.main.is_floating_point else bucket.main), leaf.shape
    for path, held in zip(*flatten(state.buffers)[:2], strict=True):
        if path in tensors:
            raise SpecError(f"save_safetensors: a parameter and a buffer are both called {path!r}. Rename one of them.")
        tensors[path] = held.dtype, tuple(held.shape)
    unknown = [(name, kind) for name, (kind, _) in tensors.items() if kind not in DTYPES.values()]
    if unknown:
        raise SpecError(f"save_safetensors: {unknown[0][0]!r} is {unknown[0][1]}, which safetensors has not.")
    files: Files = [{}]
    size = 0
    for name, (kind, shape) in tensors.items():
        n = torch.Size(shape).numel() * kind.itemsize
        if files[-1] and size + n > most:
            files.append({})
            size = 0
        files[-1][name] = (kind, shape)
        size += n
    return files


def _names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _index(path: Path, names: list[str], files: Files) -> None:
    total = sum(torch.Size(shape).numel() * kind.itemsize for some in files for kind, shape in some.values())
    index = {name: file for file, some in zip(names, files, strict=True) for name in some}
    with open(path / "model.safetensors.index.json", "x", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _write(state: State, path: Path, files: Files) -> None:
    """This rank's runs, and of the first rank buffers, at their places."""
    places: dict[str, Entry] = {}
    for name in _names(len(files)):
        places |= entries(path / name)
    mine = [
        (part.name.removeprefix("main."), part.start, part.tensor)
        for part in parts_of(state)
        if part.name.startswith("main.") and part.writes
    ]
    if runtime_of(state.spec.mesh).rank == 0:
        mine += [(name, 0, held) for name, held in zip(*flatten(state.buffers)[:2], strict=True)]
    opened: dict[Path, int] = {}
    try:
        for name, start, tensor in mine:
            place = places[name]
            if place.path not in opened:
                opened[place.path] = os.open(place.path, os.O_WRONLY)
            flat = tensor.detach().reshape(-1)
            for at in range(0, flat.numel(), CHUNK):
                host = flat[at : at + CHUNK].to("cpu", place.dtype).contiguous()
                write_at(opened[place.path], place, start + at, host)
        for file in opened.values():
            os.fsync(file)
    finally:
        for file in opened.values():
            os.close(file)
    sync(path)
