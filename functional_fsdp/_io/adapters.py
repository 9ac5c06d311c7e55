"""save_adapter: the leaves of an adapter, as PEFT keeps them in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._common.calls import alone
from .._common.errors import SpecError, TreeError
from .._state.state import State
from .._storage.flat import whole_leaves
from .checkpoint import saving
from .folder import sync, write_file
from .formats.peft import CONFIG, in_file
from .safetensors_file import create, write_at
from .stream import check_dtype, none_apart

__all__ = ["save_adapter"]


@alone
@torch.no_grad()
def save_adapter(
    state: State,
    folder: str | os.PathLike[str],
    config: Any = None,
    *,
    adapter: str = "default",
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the leaves of a PEFT adapter to `folder`, as `PeftModel.from_pretrained` reads them. Never consumes it.

    The state is that of a model of `get_peft_model`: its leaves of LoRA, DoRA's vectors, those of embeddings, and
    modules that are saved whole. The base is not written, nor gathered. For weights with the adapter in them give the
    whole model to PEFT itself: `fsdp.as_module(model, state).merge_and_unload()`.

    Args:
        folder: appears when everything is on disk. All ranks must see it.
        config: of the adapter, `model.peft_config["default"]`; or a mapping, for `adapter_config.json`. None: written
            by you.
        adapter: its name in the model.
        dtype: of the file; None: that of `Precision.main`.

    Returns:
        the folder.

    Memory: on the first rank the adapter, on the host; on the device the adapter's buckets one after another.

    Raises:
        TreeError: the state has no leaf of an adapter of this name. SpecError: a dtype that is not floating, no config;
        a mapping with what JSON has not. FileExistsError: the folder exists.
        StaleStateError: a state in the middle of a step. CheckpointError: ranks name different folders. OSError: what a
        rank met. If one rank raises, all do.

    Collective: every rank calls it; an all-gather for each bucket that has leaves of the adapter.

    Example: `fsdp.save_adapter(state, "tuned", model.peft_config["default"])`.
    """
    with saving("save_adapter", state, folder) as (joint, _, _, path, claim):
        named: dict[str, list[str]] = {}  # of each leaf the names in the file: of a tied one several
        for name, home in zip(state.layout.paths, state.layout.source, strict=True):
            named.setdefault(home, []).extend(one for one in (in_file(name, adapter),) if one)
        held: dict[str, torch.Tensor] = {}

        def begin() -> None:
            state._resting("save_adapter")
            none_apart(state, "save_adapter")
            check_dtype("save_adapter", dtype)
            if not (config is None or isinstance(config, Mapping) or hasattr(config, "save_pretrained")):
                raise SpecError(
                    f"save_adapter(config={config!r}): expected the adapter's config, as model.peft_config['default'], "
                    "or a mapping."
                )
            if not any(named.values()):
                raise TreeError(
                    f"save_adapter: no leaf of the state is of an adapter {adapter!r}; they are called "
                    f"{', '.join([*named][:3])}, ... Make the model by peft.get_peft_model, within init."
                )
            if claim is not None:
                claim.make()

        def write() -> None:
            if claim is None:
                return
            entries = create(
                path / "adapter_model.safetensors", {n: (t.dtype, tuple(t.shape)) for n, t in held.items()}
            )
            with open(path / "adapter_model.safetensors", "r+b") as file:
                for name, tensor in held.items():
                    write_at(file.fileno(), entries[name], 0, tensor.reshape(-1))
                os.fsync(file.fileno())
            if isinstance(config, Mapping):
                write_file(path / CONFIG, json.dumps({**config}, indent=2, default=_listed).encode())
            elif config is not None:
                config.save_pretrained(str(path))
            sync(path)
            claim.appear()

        joint(begin, "begin")
        with state.version.lineage.looking(state):
            for name, buffer in state.main.items():
                wanted = [leaf.path for leaf in state.layout.buckets[name].leaves if named[leaf.path]]
                if wanted:
                    whole = whole_leaves(buffer, dtype)
                    if claim is not None:
                        for p in wanted:
                            held |= dict.fromkeys(named[p], whole[p].to("cpu", copy=True).contiguous())
        joint(write, "tensors")
    return Path(folder)


def _listed(one: Any) -> Any:
    """Sets, of which PEFT's configs have some, as lists."""
    if isinstance(one, set | frozenset):
        return sorted(one)
    raise SpecError(f"save_adapter: the config has a {type(one).__name__}, which JSON has not.")
