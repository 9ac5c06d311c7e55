"""save_dcp: a state as FSDP2 saves its own, so that torch.distributed.checkpoint.load reads it into a sharded model.

.metadata        of each leaf its boxes: a run of elements is a part of a row, whole rows, a part of a row
__0_0.distcp     the boxes of rank 0, as torch.save writes them
__0_1.distcp     numbers of the optimizer's groups, by rank 0
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .._axes import boxes as cut_boxes
from .._common.calls import alone
from .._common.errors import SpecError, as_path
from .._optim.adamw import AdamW
from .._optim.optimizer import at, by_label
from .._optim_extra.from_torch import FromTorch
from .._plan.layout import Leaf
from .._redistribute import nodes_of
from .._runtime.runtime import Runtime
from .._shared.torch_names import storage_info
from .._state.state import State
from .._storage import FlatBuffer
from .checkpoint import saving
from .contents import THEIRS, boxes, numel_of
from .folder import check_shared, sync, write_file
from .manifest import METADATA, SavedTensor, buffers_of, file_of, parts_of, place_at, refuse_packed
from .pieces import Written, write_tensors
from .stream import none_apart

Shape = tuple[int, ...]
Placed = tuple[SavedTensor, Shape]  # a box, and where it begins in its leaf
Names = dict[str, tuple[Any, ...]]  # of each entry the keys under which it lies
HOST = torch.device("cpu")


@alone
@torch.no_grad()
def save_dcp(
    state: State, folder: str | os.PathLike[str], *, model: str = "model", optimizer: str | None = "optim"
) -> Path:
    """Write the weights, buffers and optimizer state to `folder` as FSDP2 does. Never consumes it.

    In the other program `torch.distributed.checkpoint.load({"model": ..., "optim": ...}, checkpoint_id=folder)` fills
    what `get_state_dict(module, optimizer)` gave, and `set_state_dict` puts it in place; of any number of ranks. The
    optimizer's state is that of the torch.optim class that `from_torch` was given, or of torch.optim.AdamW; groups are
    one for each label.

    Args:
        folder: appears when everything is on disk. All ranks must see it.
        model, optimizer: under which keys weights and the optimizer's state lie. model="": weights at the top, as
            torchtitan has them. optimizer=None: it is left out.

    Returns:
        the folder.

    Memory: on the host a leaf's part at a time; nothing is gathered.

    Raises:
        StaleStateError: a state in the middle of a step. SpecError: an optimizer that torch.optim has not, experts of
            which ranks have their own, one key for both. FileExistsError: the folder exists. CheckpointError: ranks
            name different folders, or do not see the same. OSError: what a rank met. If one rank raises, all do.

    Collective: every rank calls it; exchanges on the host.

    Example: `fsdp.save_dcp(state, "for-fsdp2/step_100")`.
    """
    with saving("save_dcp", state, folder) as (joint, _, token, path, claim):
        run = joint.run
        parts: list[Placed] = []
        groups: dict[str, dict[str, Any]] = {}

        def begin() -> None:
            state._resting("save_dcp")
            none_apart(state, "save_dcp")
            if optimizer is not None and optimizer in ("", model):
                raise SpecError(
                    f"save_dcp(model={model!r}, optimizer={optimizer!r}): expected two different keys; model "
                    "may be '', optimizer None."
                )
            if optimizer is not None and state.optimizer is not None:
                groups.update(_groups(state))
            parts.extend(_parts(state, model, optimizer if groups else None, run))
            if claim is not None:
                claim.make()

        def write() -> Any:
            check_shared("save_dcp", path, run.ranks, run.rank)
            if not parts:
                return []
            some = write_tensors(path, file_of(run.rank), token, [part for part, _ in parts])[0]
            return [(one, at, (*part.tensor.shape,)) for one, (part, at) in zip(some, parts, strict=True)]

        def complete() -> None:
            if claim is not None:
                _complete(path, state, [one for some in written for one in some], model, optimizer or "", groups)
                sync(path)
                claim.appear()

        joint(begin, "begin")
        written = joint(write, "tensors")
        joint(complete, "end")
    return as_path("folder", folder)


def _parts(state: State, model: str, optimizer: str | None, run: Runtime) -> Iterator[Placed]:
    """What this rank writes, and where it begins: each run of a leaf in boxes; of the first rank buffers and counts."""
    names: dict[str, tuple[str, Leaf]] = {}  # of each part, its name in the files
    trees = [("main", buffer, "") for buffer in state.main.values()]
    if optimizer is not None:
        trees += [
            (f"opt.{node.path}", node.value, THEIRS.get(node.path, node.path)) for node in nodes_of(state.opt)
            if isinstance(node.value, FlatBuffer) and node.path not in ("missed", "step")
        ]  # fmt: skip
    for tree, buffer, slot in trees:
        own = place_at(run, buffer.bucket.apart(run.sizes))
        twice = buffer.bucket.by_leaf and any(run.coordinate[axis] for axis in buffer.bucket.cut)
        for leaf in buffer.bucket.leaves:  # of its own shape: [] of one number for each leaf
            if slot and not twice:
                names[f"{tree}.{leaf.path}{own}"] = f"{optimizer}.state.{leaf.path}.{slot}", leaf
            elif not slot:
                refuse_packed("save_dcp", leaf)
                names[f"{tree}.{leaf.path}{own}"] = _join(model, leaf.path), leaf
    for part in parts_of(state):
        if part.writes and part.name in names:
            name, leaf = names[part.name]
            flat, start = part.tensor.detach().reshape(-1), part.start
            for at, sizes in boxes(leaf.shape, start, start + flat.numel()):
                box = flat[start - part.start :][: numel_of(sizes)].view(sizes)
                start += box.numel()
                for there, here, size in cut_boxes(leaf.whole, leaf.cuts, run.coordinate):
                    low = [*map(max, at, here)]
                    high = [min(a + n, b + m) for a, n, b, m in zip(at, sizes, here, size, strict=True)]
                    if all(a < b or not n for a, b, n in zip(low, high, sizes, strict=True)):
                        inner = box[tuple(slice(a - i, b - i) for a, b, i in zip(low, high, at, strict=True))]
                        begins = tuple(a - i + k for a, i, k in zip(low, here, there, strict=True))
                        yield SavedTensor(name, inner, leaf.whole, 0, True), begins
    if run.rank == 0:
        for path, held in buffers_of(state).items():
            yield SavedTensor(_join(model, path), held, tuple(held.shape), 0, True), (0,) * held.ndim
        if optimizer is not None:
            for path, steps in _steps(state).items():
                yield SavedTensor(f"{optimizer}.state.{path}.step", steps, (), 0, True), ()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _steps(state: State) -> dict[str, torch.Tensor]:
    """float32 [] of each leaf that trains: how many steps its moments have seen."""
    found = {}
    counts: dict[str, dict[str, Any]] = {}
    for node in nodes_of(state.opt):
        if isinstance(node.value, FlatBuffer) and node.value.bucket.by_leaf:
            for leaf, number in zip(node.value.bucket.leaves, node.value.local.tolist(), strict=True):
                counts.setdefault(node.path, {})[leaf.path] = number
    for name in state.layout.trainable:
        for leaf in state.layout.buckets[name].leaves:
            n = counts.get("step", {}).get(leaf.path, state.steps - counts.get("missed", {}).get(leaf.path, 0))
            found[leaf.path] = torch.tensor(float(n), device="cpu")
    return found


def _groups(state: State) -> dict[str, dict[str, Any]]:
    """By label the numbers of a group of the torch.optim class, and the leaves that are in it, as "params"."""
    optimizer: Any = state.optimizer
    if isinstance(optimizer, AdamW):
        cls: Any = torch.optim.AdamW
        options: Mapping[str, Any] = {name: getattr(optimizer, name) for name in ("lr", "betas", "eps", "weight_decay")}
    elif isinstance(optimizer, FromTorch):
        cls, options = optimizer.cls, optimizer.options
    else:
        raise SpecError(
            f"save_dcp: torch.optim has no class for the optimizer {optimizer}. Give optimizer=None for weights alone."
        )
    leaves: dict[str, list[str]] = {}
    for name in state.layout.trainable:
        for leaf in state.layout.buckets[name].leaves:
            leaves.setdefault(leaf.label, []).append(leaf.path)
    found = {}
    for label, paths in leaves.items():
        numbers = {}
        for name, value in options.items():
            value = by_label(name, value, label)
            if callable(value) or isinstance(value, torch.Tensor):
                value = float(at(name, value, label, state.count))
            elif isinstance(value, tuple | list):
                value = tuple(float(one(state.count)) if callable(one) else one for one in value)
            numbers[name] = value
        group = cls([torch.nn.Parameter(torch.zeros(1, device=HOST))], **numbers).param_groups[0]
        found[label] = {**group, "params": paths}
    return found


def _complete(
    path: Path, state: State, written: list[tuple[Written, Shape, Shape]], model: str, optimizer: str,
    groups: dict[str, dict[str, Any]],
) -> None:  # fmt: skip
    """The first rank's: `.metadata`, and the numbers of groups."""
    from torch.distributed.checkpoint import metadata as dcp

    about: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    chunks: dict[str, list[Any]] = {}
    keys: Names = {}
    for (name, dtype, shape, chunk), offsets, sizes in sorted(written, key=lambda one: (one[0].name, one[1])):
        some = chunks.setdefault(name, [])
        index = dcp.MetadataIndex(name, torch.Size(offsets), len(some))
        some.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        places[index] = storage_info()(chunk.file, chunk.offset, chunk.length)
        about[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), some)
        keys[name] = _keys(name, model, optimizer)
    for alias, home in zip(state.layout.paths, state.layout.source, strict=True):  # the same bytes under each name
        if alias != home:
            name, other = _join(model, alias), _join(model, home)
            about[name], keys[name] = about[other], _keys(name, model, optimizer)
            for i, chunk_ in enumerate(about[other].chunks):
                there = places[dcp.MetadataIndex(other, chunk_.offsets, i)]
                places[dcp.MetadataIndex(name, chunk_.offsets, i)] = there
    data = io.BytesIO()
    file = "__0_1.distcp"
    for name, entry in _numbers(optimizer, groups, keys).items():
        start = data.tell()
        torch.save(entry, data)
        about[name] = dcp.BytesStorageMetadata()
        places[dcp.MetadataIndex(name)] = storage_info()(file, start, data.tell() - start)
    if groups:
        write_file(path / file, data.getvalue())
    whole = dcp.Metadata(about, keys, places, dcp.StorageMeta(), "1.0.0")
    write_file(path / METADATA, pickle.dumps(whole))


def _keys(name: str, model: str, optimizer: str) -> tuple[Any, ...]:
    if optimizer and name.startswith(f"{optimizer}.state."):
        leaf, _, slot = name.removeprefix(f"{optimizer}.state.").rpartition(".")
        return optimizer, "state", leaf, slot
    return (model, name.removeprefix(f"{model}.")) if model else (name,)


def _numbers(optimizer: str, groups: dict[str, dict[str, Any]], keys: Names) -> dict[str, Any]:
    """Numbers of groups by their names, both ways in which FSDP2 may ask for them."""
    found: dict[str, Any] = {}
    for i, group in enumerate(groups.values()):
        for option, value in group.items():
            found[f"{optimizer}.param_groups.{i}.{option}"] = value
            keys[f"{optimizer}.param_groups.{i}.{option}"] = (optimizer, "param_groups", i, option)
            for leaf in group["params"] if option != "params" else ():
                name = f"param_groups.{leaf}.{option}"
                found[f"{optimizer}.{name}"] = value
                keys[f"{optimizer}.{name}"] = (optimizer, name)
    return found
