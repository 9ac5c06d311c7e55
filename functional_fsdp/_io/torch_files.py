"""Readers of what torch writes: Hugging Face's folders, files of torch.save, and DCP.

    HuggingFace, SafetensorsFile     Hugging Face's
    Peft                             adapters
    StateDict, RankFiles             files of torch.save: one, or one of each rank
    Dcp, Accelerate                  folders of torch.distributed.checkpoint; Accelerate's, which has either

Hugging Face's folders and files: safetensors or torch.save, with an index or without; and torch's DCP in them.

torch's HuggingFaceStorageWriter writes each rank's boxes under the leaves' own names, and says in the header where a
box begins. A folder of these that nobody has put together is read as what it is.

PEFT: a folder of an adapter, under the names that the model of get_peft_model has; onto a base, or alone.

file     base_model.model.L.q_proj.lora_A.weight        model    base_model.model.L.q_proj.lora_A.default.weight
         ....q_proj.lora_magnitude_vector  (DoRA)                ....lora_magnitude_vector.default.weight
         ....embed_tokens.lora_embedding_A                       ....lora_embedding_A.default
         ....norm.weight  (modules_to_save)                      ....norm.modules_to_save.default.weight
base     L.q_proj.weight                                         base_model.model.L.q_proj.base_layer.weight
         norm.weight                                             base_model.model.norm.original_module.weight

Single files of torch.save: a state dict, or what a trainer saves, with a state dict and an optimizer's in it.

Lightning    "state_dict", "optimizer_states", "pytorch-lightning_version", "global_step"
others       "model" or "model_state_dict" or "state_dict" or "module"; "optimizer" or "optimizer_state_dict"

Files of ranks: each rank's state dict of DTensors, by torch.save, as verl writes them, put together without ranks.

model_world_size_2_rank_0.pt    boxes of leaves, and how the mesh cuts them
optim_world_size_2_rank_0.pt    the same of an optimizer's state

DCP: folders of torch.distributed.checkpoint, as FSDP2, torchtitan, Megatron-FSDP, Accelerate and Lightning write
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

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .._common.errors import CheckpointError
from .contents import (
    Blob,
    Contents,
    Cut,
    Distributed,
    Held,
    Inert,
    Moments,
    box,
    buffers_by_shards,
    by_number,
    numel_of,
    plain_name,
    plain_names,
    read_pickle,
    read_saved,
    saved_tensor,
    sorted_out,
    span_of,
    steps_from,
    tensors_expected,
    without_prefix,
)
from .folder import Entry, entries, read_header

INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SHARDING = "DCP_SHARDING_INFO"
NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


class HuggingFace:
    """A folder of weights."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and bool(files_of(path))

    def read(self, path: Path) -> Contents:
        files = files_of(path)
        boxes: dict[str, list[tuple[tuple[int, ...], Entry]]] = {}
        found: dict[str, Any] = {}
        ties: dict[str, str] = {}
        for file in files:
            if file.suffix != ".safetensors":
                tensors, more = state_dict_of(file)
                ties |= more
                origins: Mapping[str, Any] = {}
            else:
                tensors, about = read_header(file)
                origins = _origins(file, about)
            for name, one in tensors.items():
                if name in origins:
                    boxes.setdefault(name, []).append((origins[name], one))
                elif name in found or name in boxes:
                    raise CheckpointError(f"{path} has {name!r} in two files, {file.name} and another.")
                else:
                    found[name] = one
        found |= {name: _whole(path, name, some) for name, some in boxes.items()}
        kind = "Hugging Face, DCP by rank" if boxes else "Hugging Face"
        suffix = "safetensors" if files[0].suffix == ".safetensors" else "torch.save"
        shards = {match[1] for file in files if (match := re.match(r"shard-(\d+)-", file.name))}
        if shards and len(shards) != max(map(int, shards)):
            raise CheckpointError(
                f"{path} has {len(shards)} shards, and one of number {max(shards)}: some are missing."
            )
        index, names = _index(path)
        numbered = {match[1]: int(match[2]) for file in files if (match := NUMBERED.fullmatch(file.name))}
        if not index and len(numbered) < (of := max(numbered.values(), default=0)):
            raise CheckpointError(f"{path} has {len(numbered)} of {of} files of weights: some are missing.")
        lacking = next((name for name in names if name not in found), None)
        if lacking is not None:
            raise CheckpointError(f"{path / index} names {lacking!r}, which none of its files has.")
        found = {name: one for name, one in found.items() if name not in ties}
        return Contents(f"{kind} ({suffix}, {len(files)} files)" if len(files) > 1 else f"{kind} ({suffix})",
                        found, world=len(shards) or None, ties=ties or None,
                        buffers=buffers_by_shards(found, {}) if boxes else None)  # fmt: skip


class SafetensorsFile:
    """One file of safetensors."""

    def claims(self, path: Path) -> bool:
        return path.is_file() and path.suffix == ".safetensors"

    def read(self, path: Path) -> Contents:
        tensors, about = read_header(path)
        origins = _origins(path, about)
        if any(any(at) for at in origins.values()):
            raise CheckpointError(
                f"{path} is one rank's part of a folder that torch.distributed.checkpoint wrote. Open the folder: "
                f"{path.parent}."
            )
        return Contents("safetensors", dict(tensors))


def _origins(file: Path, about: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Of each tensor of a file where its box begins, as torch's DCP says it."""
    if SHARDING not in about:
        return {}
    try:
        told = json.loads(about[SHARDING])
        return {name: tuple(map(int, one["saved_offsets"])) for name, one in told.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: its {SHARDING} is damaged: {error}.") from None


def _whole(path: Path, name: str, some: list[tuple[tuple[int, ...], Entry]]) -> Any:
    dims = {len(at) for at, _ in some} | {len(one.shape) for _, one in some}
    kinds = {one.dtype for _, one in some}
    if len(dims) != 1 or len(kinds) != 1:
        raise CheckpointError(f"{path} has {name!r} in parts of several dtypes or numbers of dims.")
    ends = [tuple(a + n for a, n in zip(at, one.shape, strict=True)) for at, one in some]
    shape = tuple(max(sizes) for sizes in zip(*ends, strict=True)) if ends[0] else ()
    made = Cut(shape, some[0][1].dtype, tuple(box(shape, at, one.shape, one) for at, one in some))
    if made.covered != numel_of(shape):
        files = ", ".join(sorted({one.path.name for _, one in some}))
        raise CheckpointError(
            f"{path} has {made.covered} of the {numel_of(shape)} elements of {name!r} {list(shape)}, in {files}: a "
            "file of another rank is missing, or one is of another checkpoint."
        )
    return some[0][1] if len(some) == 1 else made


def _index(path: Path) -> tuple[str, dict[str, str]]:
    """The name of a folder's index, and {leaf: file} as it says; nothing where there is none."""
    name = next((one for one in INDEX if (path / one).is_file()), "")
    if not name:
        return "", {}
    try:
        found: dict[str, str] = {**json.loads((path / name).read_text())["weight_map"]}
        apart = next((one for one in found.values() if Path(one).name != one), None)
        if apart is not None:
            raise ValueError(f"it names {apart!r}, which lies elsewhere")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / name} is no index of weights: {error}") from None
    return name, found


def files_of(path: Path) -> list[Path]:
    """The files of weights of a folder, as its index says where it has one."""
    name, files_by_leaf = _index(path)
    if name:
        chosen = sorted({*files_by_leaf.values()})
        missing = [one for one in chosen if not (path / one).exists()]
        if missing:
            raise FileNotFoundError(f"weights: {path / missing[0]} is missing: {name} names it.")
        return [path / one for one in chosen]
    files = sorted(path.glob("*.safetensors"))
    return files or [one for one in (path / "pytorch_model.bin",) if one.exists()]


def state_dict_of(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a state dict of torch.save, and which of its names are one tensor."""
    tree, span = read_saved(path)
    return tensors_of(path, tree, span)


def tensors_of(path: Path, tree: Any, span: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Where the tensors of a state dict lie, and {further name: first name} of those that are the same bytes."""
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}; expected a state dict.")
    for name, one in tree.items():
        if not isinstance(name, str) or not isinstance(one, Held | torch.Tensor):
            kind = getattr(one, "name", None) or type(one).__name__
            raise CheckpointError(f"weights: {path} has a {kind} at {name!r}; {tensors_expected(name)}")
    return {name: span_of(one, span) for name, one in tree.items()}, ties_of(tree.items())


def ties_of(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """{further name: first name} of tensors that are the same bytes of a file."""
    first: dict[Any, str] = {}
    found = {}
    for name, one in named:
        if isinstance(one, Held) and numel_of(one.shape):
            key = (one.storage.name, one.first, one.shape, one.strides, one.dtype)
            if first.setdefault(key, name) != name:
                found[name] = first[key]
    return found


CONFIG = "adapter_config.json"
ROOT = "base_model.model."
MODULE = re.compile(
    r"^(?P<module>.*?)\.(?P<kind>lora_[AB]|lora_magnitude_vector|lora_embedding_[AB])(?P<rest>(?:\.\w+)*)$"
)


class Peft:
    """A folder with `adapter_config.json`."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and (path / CONFIG).exists()

    def read(self, path: Path) -> Contents:
        try:
            config = json.loads((path / CONFIG).read_text())
            kind, version = config["peft_type"], config.get("peft_version")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path / CONFIG} is damaged: {type(error).__name__}: {error}.") from None
        if kind != "LORA":
            raise CheckpointError(f"{path / CONFIG} is of {kind}; LORA is read (DoRA and modules_to_save with it).")
        file = path / "adapter_model.safetensors"
        named: dict[str, Any]
        if file.exists():
            named = {**entries(file)}
        elif (path / "adapter_model.bin").exists():
            named, _ = state_dict_of(path / "adapter_model.bin")
        else:
            raise CheckpointError(f"{file} is missing, beside {CONFIG}.")
        frozen = frozenset(name for name in named if ".base_layer." in name)
        return Contents(
            f"PEFT {kind}", {in_model(name): one for name, one in named.items()}, version, frozen=frozen
        )  # fmt: skip


def in_model(name: str) -> str:
    """What the model calls a leaf of an adapter's file, whose adapter has the name that peft gives it."""
    match = MODULE.match(name)
    if match is None:
        module, _, last = name.rpartition(".")
        return name if ".base_layer." in name else f"{module}.modules_to_save.default.{last}"
    rest = ".weight" if match["kind"] == "lora_magnitude_vector" else match["rest"]
    return f"{match['module']}.{match['kind']}.default{rest}"


def in_file(name: str, adapter: str = "default") -> str | None:
    """What an adapter's file calls a leaf of the model; None: it is of the base."""
    module, saved, last = name.partition(f".modules_to_save.{adapter}.")
    if saved:
        return f"{module}.{last}"
    match = MODULE.match(name)
    if match is None or not match["rest"].startswith(f".{adapter}"):
        return None
    rest = match["rest"].removeprefix(f".{adapter}")
    return f"{match['module']}.{match['kind']}{'' if match['kind'] == 'lora_magnitude_vector' else rest}"


def parts_of_adapter(name: str, adapter: str = "default") -> tuple[str, str] | None:
    """Of a leaf of LoRA's in the model its module, and which it is, as ("L.q_proj", "lora_A.weight"); else None."""
    match = MODULE.match(name)
    if match is None or not f"{match['rest']}.".startswith(f".{adapter}."):
        return None
    return match["module"], match["kind"] + match["rest"].removeprefix(f".{adapter}")


def in_merged(name: str, adapter: str = "default") -> str | None:
    """What the model without an adapter calls a leaf; None: it has none of it."""
    name = name.removeprefix(ROOT)
    module, saved, last = name.partition(f".modules_to_save.{adapter}.")
    if saved:
        return f"{module}.{last}"
    if MODULE.match(name) or ".original_module." in name or ".modules_to_save." in name:
        return None
    return name.replace(".base_layer.", ".")


def onto(adapter: Contents, base: Contents) -> Contents:
    """An adapter and the base that it is of, under the names of the whole model."""
    adapted = {match["module"] for name in adapter.tensors if (match := MODULE.match(name))}
    saved = {name.partition(".modules_to_save.")[0] for name in adapter.tensors if ".modules_to_save." in name}

    def whole(name: str) -> str:
        module, _, last = f"{ROOT}{name}".rpartition(".")
        inner = ".base_layer" if module in adapted else ".original_module" if module in saved else ""
        return f"{module}{inner}.{last}"

    found = {whole(name): one for name, one in base.tensors.items()}
    return Contents(
        f"{adapter.format} on {base.format}", {**found, **adapter.tensors}, adapter.version,
        ties=None if base.ties is None else {whole(a): whole(b) for a, b in base.ties.items()},
        buffers=None if base.buffers is None else frozenset(map(whole, base.buffers)),
        frozen=frozenset(found), left=(*adapter.left, *base.left),
    )  # fmt: skip


MODELS = ("state_dict", "model_state_dict", "model", "module")
OPTIMIZERS = ("optimizer_states", "optimizer_state_dict", "optimizer", "optim")


class StateDict:
    """A file that is not of safetensors."""

    def claims(self, path: Path) -> bool:
        return path.is_file()

    def read(self, path: Path) -> Contents:
        tree, span = read_saved(path)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{path} holds a {type(tree).__name__}; expected a state dict.")
        name = next((n for n in MODELS if isinstance(tree.get(n), Mapping)), None)
        if name is None:
            found, ties, prefix = weights_of(path, tree, span)
            return Contents("torch.save", found, ties=ties or None, prefix=prefix)
        found, ties, prefix = weights_of(path, tree[name], span)
        version = tree.get("pytorch-lightning_version")
        optimizer = next((tree[n] for n in OPTIMIZERS if tree.get(n)), None)
        several = len(optimizer) if isinstance(optimizer, list) else 1
        if isinstance(optimizer, list):
            optimizer = optimizer[0] if several == 1 else None
        moments, why = moments_of(path, optimizer, found, span, prefix) if optimizer else ({}, "")
        why = f"{path.name}: states of {several} optimizers" if several > 1 else why
        steps = steps_from(moments)
        step = tree.get("global_step")
        left = [n for n in tree if n != name and n not in OPTIMIZERS]
        return Contents(
            "Lightning" if version else f"torch.save, {name!r}",
            found,
            version if isinstance(version, str) else None,
            ties=ties or None,
            moments=moments,
            steps=steps,
            step=step if isinstance(step, int) else None,
            prefix=prefix,
            left=(*left, *([why] if why else [])),
        )


def weights_of(path: Path, tree: Mapping[Any, Any], span: Any) -> tuple[dict[str, Any], dict[str, str], str]:
    """A state dict's tensors, ties once; its ties; and the prefix that its names had."""
    if any(isinstance(one, Distributed) for one in tree.values()):
        raise CheckpointError(
            f"{path} has DTensors, of which it is one rank's file. Open the folder of all ranks' files: {path.parent}."
        )
    tree = {name: one for name, one in tree.items() if not (isinstance(name, str) and name.endswith("_extra_state"))}
    found, ties = tensors_of(path, tree, span)
    names, prefix = _short_names(found)
    kept = {names[name]: one for name, one in found.items() if name not in ties}
    return kept, {names[alias]: names[first] for alias, first in ties.items()}, prefix


def _short_names(names: Iterable[str]) -> tuple[dict[str, str], str]:
    """{name: what it is without wrappers, and without the prefix that all have}, and the prefix."""
    names_of = plain_names(names)
    prefix = without_prefix([*names_of.values()])
    return {name: plain.removeprefix(prefix) for name, plain in names_of.items()}, prefix


def moments_of(
    path: Path, optimizer: Any, weights: Mapping[str, Any], span: Any, prefix: str = ""
) -> tuple[Moments, str]:
    """What a torch.optim optimizer's state dict keeps, by the names of weights; and why there is nothing."""
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("state"), Mapping):
        return {}, f"{path.name}: an optimizer's state that is no state dict of torch.optim"
    state = {
        key: {slot: span_of(t, span) for slot, t in kept.items() if isinstance(t, Held | int | float | torch.Tensor)}
        for key, kept in optimizer["state"].items()
    }
    if state and all(isinstance(key, str) for key in state):
        return {plain_name(key).removeprefix(prefix): kept for key, kept in state.items()}, ""
    return by_number(path, state, optimizer.get("param_groups", ()), weights)


FILE = re.compile(r"^(?P<what>.*?)(?:_world_size_(?P<world>\d+))?_rank_?(?P<rank>\d+)\.(?:pt|pth|bin)$")
Tree = Mapping[Any, Any]
Spanned = tuple[Any, Callable[[Held], Any], Path]  # what a file holds, where a tensor of it lies, and the file


class RankFiles:
    """A folder with a file of each rank."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and bool(_files(path, "model"))

    def read(self, path: Path) -> Contents:
        ranks = _opened(path, _files(path, "model"))
        weights, ties = _joined(ranks, [tree for tree, _, _ in ranks])
        names, prefix = _short_names(weights)
        found = {names[name]: one for name, one in weights.items() if name not in ties}
        moments, left = _moments(path, found, len(ranks))
        steps = steps_from(moments)
        return Contents(
            "files of ranks (torch.save of DTensors)", found, None, len(ranks),
            {names[alias]: names[one] for alias, one in ties.items()} or None,
            buffers=buffers_by_shards(found, moments), moments=moments, steps=steps, prefix=prefix, left=left,
        )  # fmt: skip


def _files(path: Path, kind: str) -> dict[int, tuple[Path, int | None]]:
    """The files of ranks of a kind: {rank: (file, how many there are, as its name says)}."""
    found: dict[int, tuple[Path, int | None]] = {}
    for file in path.iterdir():
        match = FILE.match(file.name)
        if match and kind in match["what"]:
            rank = int(match["rank"])
            if rank in found:
                raise CheckpointError(f"{path} has two files of rank {rank}: {file.name} and {found[rank][0].name}.")
            found[rank] = (file, int(match["world"]) if match["world"] else None)
    return found


def _opened(path: Path, files: Mapping[int, tuple[Path, int | None]]) -> list[Spanned]:
    """What each rank's file holds, of all ranks."""
    world = max([max(files) + 1, *(n for _, n in files.values() if n)])
    missing = [rank for rank in range(world) if rank not in files]
    if missing:
        name = next(iter(files.values()))[0].name
        raise CheckpointError(f"{path} lacks the file of rank {missing[0]} of {world}, beside {name}.")
    found = []
    for rank in range(world):
        file, said = files[rank]
        if said not in (None, world):
            raise CheckpointError(f"{file} is of {said} ranks, and another file there is of {world}.")
        tree, span = read_saved(file)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{file} holds a {type(tree).__name__}; expected a state dict.")
        found.append((tree, span, file))
    return found


def _joined(ranks: list[Spanned], trees: list[Tree]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of all ranks' trees, put together; and those that are the same bytes."""
    found: dict[str, Any] = {}
    for name, one in trees[0].items():
        if not isinstance(one, Distributed | Held | torch.Tensor):
            continue
        for (_, _, file), tree in zip(ranks, trees, strict=True):
            if name not in tree or type(tree[name]) is not type(one):
                raise CheckpointError(f"{file} has no {name!r} as the first rank's file has it: is it of another run?")
        found[name] = _leaf(name, [tree[name] for tree in trees], ranks)
    locals_ = ((name, one.local if isinstance(one, Distributed) else one) for name, one in trees[0].items())
    return found, ties_of(locals_)


def _leaf(name: str, held: list[Any], ranks: list[Spanned]) -> Any:
    """One tensor, from what each rank has of it."""
    one = held[0]
    if not isinstance(one, Distributed):
        return span_of(one, ranks[0][1])
    parts = []
    for rank, (part, (_, span, file)) in enumerate(zip(held, ranks, strict=True)):
        if (part.shape, part.mesh, part.placements) != (one.shape, one.mesh, one.placements):
            raise CheckpointError(
                f"{file} has {name!r} of another shape or on another mesh than the first rank's file."
            )
        if numel_of(one.mesh) != len(ranks):
            raise CheckpointError(
                f"{file} is of {numel_of(one.mesh)} ranks (mesh {[*one.mesh]}); {len(ranks)} are there."
            )
        place = _place(rank, part)
        if place is None:
            continue
        offsets, sizes = place
        if part.local.shape != tuple(sizes):
            raise CheckpointError(
                f"{file} has {[*part.local.shape]} of {name!r} {[*one.shape]}; rank {rank} of {len(ranks)} should have "
                f"{sizes}."
            )
        parts.append(box(one.shape, offsets, sizes, span(part.local)))
    return Cut(one.shape, one.local.dtype, tuple(parts))


def _place(rank: int, part: Distributed) -> tuple[list[int], list[int]] | None:
    """Where a rank's box begins, and its sizes, as torch cuts them; None of further replicas."""
    offsets, sizes = [0] * len(part.shape), [*part.shape]
    inner = numel_of(part.mesh)
    for n, (kind, dim) in zip(part.mesh, part.placements, strict=True):
        inner //= n
        i = rank // inner % n
        if kind == "replicate":
            if i:
                return None
            continue
        each = -(-sizes[dim] // n)
        start = min(sizes[dim], each * i)
        offsets[dim], sizes[dim] = offsets[dim] + start, min(each, sizes[dim] - start)
    return offsets, sizes


def _state_of(one: Spanned) -> Mapping[Any, Any]:
    tree, _, file = one
    found = tree.get("state")
    if not isinstance(found, Mapping) or not all(isinstance(kept, Mapping) for kept in found.values()):
        raise CheckpointError(f"{file} has no 'state' by parameters: it is no state dict of an optimizer.")
    return found


def _moments(path: Path, weights: dict[str, Any], world: int) -> tuple[Moments, tuple[str, ...]]:
    files = _files(path, "optim")
    if not files:
        return {}, ()
    ranks = _opened(path, files)
    if len(ranks) != world:
        raise CheckpointError(f"{path} has weights of {world} ranks and optimizer states of {len(ranks)}.")
    state: dict[Any, dict[str, Any]] = {}
    for key in _state_of(ranks[0]):
        trees = [_state_of(one).get(key, {}) for one in ranks]
        numbers = {slot: one for slot, one in trees[0].items() if isinstance(one, int | float)}
        state[key] = {**_joined(ranks, trees)[0], **numbers}
    if state and all(isinstance(key, str) for key in state):
        return {plain_name(key): kept for key, kept in state.items()}, ()
    moments, why = by_number(path, state, ranks[0][0].get("param_groups", ()), weights)
    return moments, (why,) if why else ()


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


NUMBERED_FILES = re.compile(r"^(?:[\w-]*\.)*?state\.(\d+)\.(\w+)$")
GROUPS = re.compile(r"^(?:[\w-]*\.)*?param_groups(?:\.(?P<group>\d+)\.params)?$")


def _by_number(
    path: Path, named: dict[str, Any], groups: list[list[int]], weights: dict[str, Any], others: list[str]
) -> tuple[Moments, list[str]]:
    """Moments that are there by numbers, by the names of weights; and what else is left."""
    state: dict[int, dict[str, Any]] = {}
    read = []
    for name in others:
        match = NUMBERED_FILES.match(name)
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
DCP_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")


class Accelerate:
    """A folder of Accelerate."""

    def claims(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        return any((path / one).exists() for one in (SHARDED, FULL)) or (
            any((path / one).exists() for one in DCP_OPTIMIZERS) and bool(files_of(path))
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
            optimizer = next((path / one for one in DCP_OPTIMIZERS if (path / one).exists()), None)
            if optimizer is not None:
                tree, span = read_saved(optimizer)
                found.moments, why = moments_of(optimizer, tree, found.tensors, span, found.prefix)
                found.left = (*found.left, why) if why else found.left
        found.steps = steps_from(found.moments)
        return found
