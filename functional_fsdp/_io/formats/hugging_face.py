"""Hugging Face's folders and files: safetensors or torch.save, with an index or without; and torch's DCP in them.

torch's HuggingFaceStorageWriter writes each rank's boxes under the leaves' own names, and says in the header where a
box begins. A folder of these that nobody has put together is read as what it is.

PEFT: a folder of an adapter, under the names that the model of get_peft_model has; onto a base, or alone.

file     base_model.model.L.q_proj.lora_A.weight        model    base_model.model.L.q_proj.lora_A.default.weight
         ....q_proj.lora_magnitude_vector  (DoRA)                ....lora_magnitude_vector.default.weight
         ....embed_tokens.lora_embedding_A                       ....lora_embedding_A.default
         ....norm.weight  (modules_to_save)                      ....norm.modules_to_save.default.weight
base     L.q_proj.weight                                         base_model.model.L.q_proj.base_layer.weight
         norm.weight                                             base_model.model.norm.original_module.weight
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..._common.errors import CheckpointError
from ..contents import Contents, buffers_by_shards, tensors_expected
from ..pickles import Held, read_saved, span_of
from ..safetensors_file import Entry, entries, read_header
from ..spans import Cut, box, numel_of

__all__ = [
    "HuggingFace", "Peft", "SafetensorsFile", "files_of", "in_file", "in_merged", "in_model", "onto",
    "parts_of_adapter", "state_dict_of",
]  # fmt: skip

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
        numbered = {match[1]: int(match[2]) for file in files if (match := NUMBERED.fullmatch(file.name))}
        if not _index(path)[0] and len(numbered) < (of := max(numbered.values(), default=0)):
            raise CheckpointError(f"{path} has {len(numbered)} of {of} files of weights: some are missing.")
        lacking = next((name for name in _index(path)[1] if name not in found), None)
        if lacking is not None:
            raise CheckpointError(f"{path / _index(path)[0]} names {lacking!r}, which none of its files has.")
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
    bad = next(((k, v) for k, v in tree.items() if not isinstance(k, str) or not _is_tensor(v)), None)
    if bad is not None:
        raise CheckpointError(f"weights: {path} has a {_kind(bad[1])} at {bad[0]!r}; {tensors_expected(bad[0])}")
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


def _is_tensor(one: Any) -> bool:
    return isinstance(one, Held) or (hasattr(one, "dtype") and hasattr(one, "untyped_storage"))


def _kind(one: Any) -> str:
    return getattr(one, "name", None) or type(one).__name__


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


def in_model(name: str, adapter: str = "default") -> str:
    """What the model calls a leaf of an adapter's file."""
    match = MODULE.match(name)
    if match is None:
        module, _, last = name.rpartition(".")
        return name if ".base_layer." in name else f"{module}.modules_to_save.{adapter}.{last}"
    rest = ".weight" if match["kind"] == "lora_magnitude_vector" else match["rest"]
    return f"{match['module']}.{match['kind']}.{adapter}{rest}"


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
