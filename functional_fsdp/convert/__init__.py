"""Weights from one kind of files into another, without GPUs and without other ranks: a command.

    python -m functional_fsdp.convert

    convert SOURCE                                what lies there, as a table
    convert SOURCE TARGET                         a checkpoint of this library, with AdamW's moments if they are there
    convert checkpoints/step_100 llama-tuned      of this library's own: safetensors instead (--dtype bfloat16)

SOURCE is any folder or file that `open_checkpoint` knows. With --config, a folder with a config.json of transformers,
leaves, ties and buffers are those of its model, and files that cut leaves otherwise (Mixtral) are read and written.
Without one they are as the files say; where files name a leaf twice, two matrices with the same bits become one leaf
(--untied leaves them). Buffers of floating numbers that no moments and no shards tell apart stay frozen leaves then.
float16 becomes float32. Load the result by `fsdp.load(folder, spec, optimizer)`, or with another optimizer
`allow=["optimizer"]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from .._common.errors import SpecError
from .._init import init
from .._io.checkpoint import load, save
from .._io.conversions import conversions_of
from .._io.foreign import Checkpoint, open_checkpoint
from .._io.load_weights import load_optimizer_state
from .._io.safetensors import save_safetensors
from .._launch.launch import local_mesh
from .._optim.adamw import adamw
from .._spec.precision import Precision
from .._spec.spec import Spec

__all__ = ["convert", "main", "model_of_config"]

HOST = torch.device("cpu")
ADAM = ("exp_avg", "exp_avg_sq")


def model_of_config(folder: Path) -> Any:
    """The model that a config.json of transformers names, of whatever kind, with weights that its initialisers make."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        raise SpecError(f"--config {folder}: transformers finds no config there: {str(error)[:200]}") from error
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if kind is not None:
            return kind(config)
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        if type(config) in getattr(transformers, auto)._model_mapping:
            return getattr(transformers, auto).from_config(config)
    raise SpecError(f"{folder}: transformers {transformers.__version__} has no model for {type(config).__name__}.")


def convert(
    source: Path, target: Path, *, dtype: torch.dtype | None = None, config: Path | None = None,
    prefix: str | None = None, untied: bool = False,
) -> Path:  # fmt: skip
    """Write `target` from what lies at `source`; see the top of this file. Returns the folder."""
    spec = Spec(local_mesh("cpu"), precision=Precision())
    if (source / "layout.json").exists():
        state = load(source, spec, allow=["average", "optimizer"])
        with torch.device("meta"):
            said = conversions_of(model_of_config(config)) if config else None
        return save_safetensors(state, target, dtype=dtype, convert=said)
    there = open_checkpoint(source, prefix=prefix)
    make = partial(model_of_config, config) if config else partial(model_of, there, {} if untied else ties_of(there))
    kept = [*there.optimizer.values()]
    optimizer = adamw() if kept and all({*ADAM} <= {*names} for names in kept) else None
    cuts: Any = conversions_of if config else None
    state, _ = init(make, spec, optimizer, weights=there, convert=cuts)
    if optimizer is not None:
        state = load_optimizer_state(state, there, steps=there.step)
    return save(state, target)


def ties_of(there: Checkpoint) -> Mapping[str, str]:
    """{further name: first name}: as the files say, or of matrices with the same bits."""
    if there.contents.ties is not None:
        return there.ties
    found = there.alike()
    moved = {}
    for alias, first in found.items():  # the name that has moments is the leaf's
        if alias in there.optimizer and first not in there.optimizer:
            moved[first] = alias
        elif not (alias in there.optimizer and first in there.optimizer):
            moved[alias] = first
    return moved


def model_of(there: Checkpoint, ties: Mapping[str, str]) -> nn.Module:
    """A module with the leaves, ties and buffers of a checkpoint, at their paths, without a forward."""
    try:
        return _model_of(there, ties)
    except KeyError as error:
        raise SpecError(
            f"{there.path} has names that a module cannot have: {error}. Give --config, or read it by init(weights=, "
            "rename=) or load_weights into a model of yours."
        ) from None


def _model_of(there: Checkpoint, ties: Mapping[str, str]) -> nn.Module:
    model = nn.Module()
    leaves: dict[str, nn.Parameter] = {}
    trained = there.optimizer
    for name, (shape, dtype) in there.leaves.items():
        owner, last = _owner(model, name)
        if name in there.buffers:
            owner.register_buffer(last, torch.empty(shape, dtype=dtype, device=HOST))
        elif name not in ties:
            wide = torch.float32 if dtype is torch.float16 else dtype
            trains = dtype.is_floating_point and name not in there.frozen and (not trained or name in trained)
            leaves[name] = nn.Parameter(torch.empty(shape, dtype=wide, device=HOST), requires_grad=trains)
            owner.register_parameter(last, leaves[name])
    for alias, first in ties.items():
        owner, last = _owner(model, alias)
        owner.register_parameter(last, leaves[first])
    return model


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The part of a module that has what lies at a path, made where it is not there; and the last name."""
    *parts, last = path.split(".")
    for part in parts:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    return model, last


def main(argv: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m functional_fsdp.convert", description=(__doc__ or "").split("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?", help="a folder that does not exist; none: look only")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of safetensors; default: as it is")
    parser.add_argument("--config", type=Path, help="folder with a config.json of transformers, whose files these are")
    parser.add_argument("--prefix", help="of the weights' names in the source; default: found")
    parser.add_argument("--untied", action="store_true", help="leaves with the same bits stay apart")
    args = parser.parse_args(argv)
    if args.target is None:
        return open_checkpoint(args.source, prefix=args.prefix)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    return convert(
        args.source, args.target, dtype=dtype, config=args.config, prefix=args.prefix, untied=args.untied
    )  # fmt: skip
