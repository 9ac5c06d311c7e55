"""Accelerate: what `save_state` and `save_fsdp_model` write.

pytorch_model_fsdp_0/, optimizer_0/            sharded: two folders of torch's DCP
pytorch_model_fsdp.bin, optimizer.bin          full: two files of torch.save
model.safetensors, optimizer.bin               without FSDP; of transformers' Trainer it is optimizer.pt
"""

from __future__ import annotations

from pathlib import Path

from ..contents import Contents, buffers_by_shards, sorted_out, steps_from
from ..pickles import read_saved
from .dcp import Dcp, dcp_tensors
from .hugging_face import HuggingFace, files_of
from .state_dicts import StateDict, moments_of

__all__ = ["Accelerate"]

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
                named, _, _ = dcp_tensors(path / "optimizer_0")
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
