"""PEFT: a folder of an adapter, under the names that the model of get_peft_model has; onto a base, or alone.

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
from pathlib import Path
from typing import Any

from ..._common.errors import CheckpointError
from ..contents import Contents
from ..safetensors_file import entries
from .hugging_face import state_dict_of

__all__ = ["Peft", "in_file", "in_merged", "in_model", "onto", "parts_of_adapter"]

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
