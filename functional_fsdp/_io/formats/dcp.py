"""DCP: folders of torch.distributed.checkpoint, as FSDP2, torchtitan, Megatron-FSDP, Accelerate and Lightning write
them.

.metadata         a pickle: of each tensor its chunks (boxes), of each chunk its file, byte and length
__0_0.distcp      what torch.save wrote of each chunk, end to end

Optimizer states are there by names of leaves (`get_state_dict`), or by numbers (`optimizer.state_dict()`).

Accelerate: what `save_state` and `save_fsdp_model` write.

pytorch_model_fsdp_0/, optimizer_0/            sharded: two folders of torch's DCP
pytorch_model_fsdp.bin, optimizer.bin          full: two files of torch.save
model.safetensors, optimizer.bin               without FSDP; of transformers' Trainer it is optimizer.pt
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..._common.errors import CheckpointError
from ..contents import Contents, buffers_by_shards, by_number, sorted_out, steps_from
from ..pickles import Inert, read_pickle, read_saved, saved_tensor
from ..safetensors_file import Entry
from ..spans import Blob, Cut, box, numel_of
from .hugging_face import HuggingFace, files_of
from .state_dicts import StateDict, moments_of

__all__ = ["Accelerate", "Dcp", "dcp_tensors"]

METADATA = ".metadata"


class Dcp:
    """A folder with `.metadata`."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and (path / METADATA).exists()

    def read(self, path: Path) -> Contents:
        named, version, world, groups = dcp_tensors(path)
        weights, moments, others, prefix = sorted_out(named)
        if not moments:
            moments, others = _by_number(path, named, groups, weights, others)
        steps = steps_from(moments)
        return Contents(
            "torch.distributed.checkpoint",
            weights,
            version,
            world,
            buffers=buffers_by_shards(weights, moments),
            moments=moments,
            steps=steps,
            prefix=prefix,
            left=tuple(others),
        )


NUMBERED = re.compile(r"^(?:[\w-]*\.)*?state\.(\d+)\.(\w+)$")
GROUPS = re.compile(r"^(?:[\w-]*\.)*?param_groups(?:\.(?P<group>\d+)\.params)?$")


def _by_number(
    path: Path, named: dict[str, Any], groups: list[list[int]], weights: dict[str, Any], others: list[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Moments that are there by numbers, by the names of weights; and what else is left."""
    state: dict[int, dict[str, Any]] = {}
    read = []
    for name in others:
        match = NUMBERED.match(name)
        if match is not None:
            state.setdefault(int(match[1]), {})[match[2]] = named[name]
            read.append(name)
    if not state:
        return {}, others
    order = [{"params": numbers} for numbers in groups or [sorted(state)]]
    moments, why = by_number(path / METADATA, state, order, weights)
    return moments, [why, *others] if why else [name for name in others if name not in read]


def dcp_tensors(path: Path) -> tuple[dict[str, Any], str | None, int, list[list[int]]]:
    """Every tensor of a folder by its name there, in the order of what was saved; the format's version; how many ranks
    wrote files; and the numbers that an optimizer has for its leaves, by groups.

    Raises:
        CheckpointError: naming the file that is damaged, missing, cut short or of another checkpoint.
    """
    where = path / METADATA
    with open(where, "rb") as file:
        about = read_pickle(where, file)
    try:
        tensors, places = about.state_dict_metadata, _places(path, about.storage_data)
        version = about.version if isinstance(getattr(about, "version", None), str) else None
        order = {name: i for i, name in enumerate(getattr(about, "planner_data", None) or ())}
        found: dict[str, Any] = {}
        groups: dict[int, list[int]] = {}
        for name in sorted(tensors, key=lambda name: order.get(name, -1)):
            match = GROUPS.match(name)
            if isinstance(tensors[name], Inert) and tensors[name].name.endswith(".TensorStorageMetadata"):
                found[name] = _tensor(path, name, tensors[name], places)
            elif match is not None and (name, ()) in places:
                there, begin, length = places[name, ()]
                held, _ = read_saved(path / there, begin, length)
                groups |= {int(match["group"]): held} if match["group"] else dict(enumerate(g["params"] for g in held))
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is no metadata of torch.distributed.checkpoint: {error}.") from None
    ranks = {file.split("_")[2] for file, *_ in places.values() if file.count("_") >= 3}
    return found, version, len(ranks), [groups[i] for i in sorted(groups)]


Places = dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]


def _places(path: Path, storage: Any) -> Places:
    """{(name, offsets): (file, byte, length)} of all chunks, in files that are there and long enough."""
    found: Places = {}
    ends: dict[str, int] = {}
    for index, info in storage.items():
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{path / info.relative_path} is written through {info.transform_descriptors} (compressed), which is "
                "not read. Save it without extensions."
            )
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{path / METADATA} names {info.relative_path!r}, which lies elsewhere.")
        found[index.fqn, tuple(getattr(index, "offset", None) or ())] = (info.relative_path, info.offset, info.length)
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for file, end in ends.items():
        try:
            size = os.stat(path / file).st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path / file} is missing: {path / METADATA} names it.") from None
        if size < end:
            raise CheckpointError(f"{path / file} has {size} bytes; {end} were written.")
    return found


def _tensor(path: Path, name: str, one: Any, places: Places) -> Any:
    shape, dtype = tuple(one.size), _dtype(one.properties)
    parts = []
    for chunk in one.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if (name, offsets) not in places:
            raise CheckpointError(f"{path / METADATA} says nothing of where {name!r} from {list(offsets)} on lies.")
        file, begin, length = places[name, offsets]
        find = partial(saved_tensor, path / file, begin, length, sizes, dtype)
        parts.append(box(shape, offsets, sizes, Blob(sizes, dtype, find)))
    made = Cut(shape, dtype, tuple(parts))
    if made.covered != numel_of(shape):
        raise CheckpointError(
            f"{path / METADATA} has chunks for {made.covered} of the {numel_of(shape)} elements of {name!r}."
        )
    if len(parts) == 1 and not isinstance(parts[0][1], Entry) and parts[0][1].shape == shape:
        return parts[0][1]
    return made


def _dtype(properties: Any) -> torch.dtype:
    state = properties.__dict__["state"]
    dtype = state[0] if isinstance(state, tuple) else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype {dtype!r}")
    return dtype


SHARDED, FULL = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"
OPTIMIZERS = ("optimizer.bin", "optimizer.pt")


class Accelerate:
    """A folder of Accelerate."""

    def claims(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        return any((path / one).exists() for one in (SHARDED, FULL)) or (
            any((path / one).exists() for one in OPTIMIZERS) and bool(files_of(path))
        )

    def read(self, path: Path) -> Contents:
        if (path / SHARDED).is_dir():
            found = Dcp().read(path / SHARDED)
            found.format = "Accelerate FSDP, sharded"
            if (path / "optimizer_0").is_dir():
                named, *_ = dcp_tensors(path / "optimizer_0")
                _, found.moments, others, _ = sorted_out(named)
                found.left = (*found.left, *others)
            found.buffers = buffers_by_shards(found.tensors, found.moments)
        else:
            found = StateDict().read(path / FULL) if (path / FULL).exists() else HuggingFace().read(path)
            found.format = "Accelerate FSDP, full" if (path / FULL).exists() else f"Accelerate, {found.format}"
            optimizer = next((path / one for one in OPTIMIZERS if (path / one).exists()), None)
            if optimizer is not None:
                tree, span = read_saved(optimizer)
                found.moments, why = moments_of(optimizer, tree, found.tensors, span, found.prefix)
                found.left = (*found.left, why) if why else found.left
        found.steps = steps_from(found.moments)
        return found
