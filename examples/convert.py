"""Weights from one kind of files into another, without GPUs and without other ranks.

    python examples/convert.py checkpoints/step_100 llama-tuned --dtype bfloat16      a checkpoint -> safetensors
    python examples/convert.py llama-tuned checkpoints/step_0                         safetensors or torch.save
    python examples/convert.py fsdp2-checkpoint checkpoints/step_0 --prefix model.    what torch's FSDP2 saved by DCP
    python examples/convert.py mixtral checkpoints/step_0 --config mixtral            files that cut leaves otherwise
    python examples/convert.py checkpoints/step_9 mixtral-tuned --config mixtral      and back, as transformers has them

A checkpoint that is made so has weights and no optimizer state: load it with `fsdp.load(folder, spec, optimizer,
allow=["optimizer"])`. Files name a tied weight twice, and each name becomes a leaf: tie them before a model uses them,
`params["head.weight"] = params["embed.weight"]` and `fsdp.shard`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import functional_fsdp as fsdp


def of_dcp(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors below a prefix of a checkpoint of torch.distributed.checkpoint, whole, without the prefix."""
    about = FileSystemReader(folder).read_metadata().state_dict_metadata
    held = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in about.items()
        if name.startswith(prefix) and isinstance(one, TensorStorageMetadata)
    }
    if not held:
        raise SystemExit(f"{folder} has no tensors below {prefix!r}; there are {', '.join([*about][:5])}, ...")
    dcp.load(held, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    return {name.removeprefix(prefix): tensor for name, tensor in held.items()}


def of_files(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder of safetensors, or of one file of them or of torch.save."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        named = file.suffix == ".safetensors"
        found |= load_file(file) if named else torch.load(file, map_location="cpu", weights_only=True)
    if not found:
        raise SystemExit(f"{path} has no weights: no layout.json, no .metadata and no *.safetensors.")
    return found


def of_config(folder: Path) -> Any:
    """The model of a config.json, with weights that its initialisers make."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of safetensors; default: as it is")
    parser.add_argument("--config", type=Path, help="folder with a config.json of transformers, whose files these are")
    parser.add_argument("--prefix", default="", help="of the weights' names in a checkpoint of FSDP2")
    args = parser.parse_args(argv)
    spec = fsdp.Spec(fsdp.local_mesh("cpu"), precision=fsdp.Precision())
    if (args.source / "layout.json").exists():
        state = fsdp.load(args.source, spec, allow=["average", "optimizer"])
        dtype = getattr(torch, args.dtype) if args.dtype else None
        with torch.device("meta"):
            convert = fsdp.conversions_of(of_config(args.config)) if args.config else None
        return fsdp.save_safetensors(state, args.target, dtype=dtype, convert=convert)
    if args.config:
        make = partial(of_config, args.config)
        state, _ = fsdp.init(make, spec, weights=args.source, convert=fsdp.conversions_of)
        return fsdp.save(state, args.target)
    by_torch = (args.source / ".metadata").exists()
    params = of_dcp(args.source, args.prefix) if by_torch else of_files(args.source)
    return fsdp.save(fsdp.shard(params, spec), args.target)


if __name__ == "__main__":
    print(main())
