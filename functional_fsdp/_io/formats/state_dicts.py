"""Single files of torch.save: a state dict, or what a trainer saves, with a state dict and an optimizer's in it.

Lightning    "state_dict", "optimizer_states", "pytorch-lightning_version", "global_step"
others       "model" or "model_state_dict" or "state_dict" or "module"; "optimizer" or "optimizer_state_dict"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._common.errors import CheckpointError
from ..contents import Contents, by_number, plain_name, plain_names, steps_from, without_prefix
from ..pickles import Distributed, Held, read_saved, span_of
from .hugging_face import tensors_of

__all__ = ["StateDict", "moments_of", "weights_of"]

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
    names = plain_names(found)
    prefix = without_prefix([*names.values()])
    names = {name: plain.removeprefix(prefix) for name, plain in names.items()}
    kept = {names[name]: one for name, one in found.items() if name not in ties}
    return kept, {names[alias]: names[first] for alias, first in ties.items()}, prefix


def moments_of(
    path: Path, optimizer: Any, weights: Mapping[str, Any], span: Any, prefix: str = ""
) -> tuple[dict[str, dict[str, Any]], str]:
    """What a torch.optim optimizer's state dict keeps, by the names of weights; and why there is nothing."""
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("state"), Mapping):
        return {}, f"{path.name}: an optimizer's state that is no state dict of torch.optim"
    state = {
        key: {slot: span_of(t, span) for slot, t in kept.items() if isinstance(t, Held | int | float) or _lies(t)}
        for key, kept in optimizer["state"].items()
    }
    if state and all(isinstance(key, str) for key in state):
        return {plain_name(key).removeprefix(prefix): kept for key, kept in state.items()}, ""
    return by_number(path, state, optimizer.get("param_groups", ()), weights)


def _lies(one: Any) -> bool:
    return hasattr(one, "shape") and hasattr(one, "dtype")
