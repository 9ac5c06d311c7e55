"""QLoRA of a Hugging Face model, unchanged: a base in 4 bits that is sharded, and adapters that train.

    python examples/qlora.py                                    # 2 processes, a tiny Llama with random weights
    python examples/qlora.py --strategy zero2 --ranks 4
    python examples/qlora.py --model meta-llama/Meta-Llama-3-8B --out tuned     # what `save_adapter` wrote, for PEFT

All there is to it is a rule of the spec, `{"*.base_layer.weight": Precision(main=fsdp.nf4)}`: each rank packs the
matrices of the base, and keeps its part of the bytes. They have no gradient and no optimizer. `adapted` puts adapters
where PEFT would, under its names; `peft.get_peft_model` does as well. A model that bitsandbytes has
quantized already is taken over by `fsdp.from_quantized`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import _corpus
import torch
import torch.distributed as dist
from torch import nn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A linear that is frozen, and a product of two small matrices beside it, as in LoRA; names are those of PEFT."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B.get_parameter("default.weight"))
        self.scaling = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        return out + self.scaling * self.lora_B["default"](self.lora_A["default"](x))


class Adapted(nn.Module):
    """A model with adapters, at the path that PEFT gives it."""

    def __init__(self, model: nn.Module, rank: int, alpha: int) -> None:
        super().__init__()
        model.requires_grad_(False)
        for path, part in [*model.named_modules()]:
            if isinstance(part, nn.Linear) and path.rpartition(".")[2] in TARGETS:
                owner, _, name = path.rpartition(".")
                setattr(model.get_submodule(owner), name, LoraLinear(part, rank, alpha))
        self.base_model = nn.ModuleDict({"model": model})

    def forward(self, **batch: Any) -> Any:
        return self.base_model["model"](**batch)


def adapted(model: nn.Module, rank: int = 8, alpha: int = 16) -> nn.Module:
    return Adapted(model, rank, alpha)


def tiny() -> nn.Module:
    """A Llama of transformers with random weights: bytes are its words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def pretrained(name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)


def loss_fn(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def rules(codec: fsdp.Codec, compute: torch.dtype) -> dict[str, fsdp.Precision]:
    """The base's matrices packed; what else is frozen in the dtype of compute; adapters in float32."""
    return {
        "*.base_layer.weight": fsdp.Precision(main=codec, compute=compute),
        "*.lora_*": fsdp.Precision(compute=compute),
        "*": fsdp.Precision(main=compute, compute=compute),
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    mesh = fsdp.local_mesh()
    compute = torch.bfloat16 if mesh.device_type != "cpu" else torch.float32
    model = adapted(tiny() if args.model is None else pretrained(args.model))
    params, skeleton = fsdp.functionalize(model)
    codec = {"nf4": fsdp.nf4(nested=True), "int8": fsdp.int8(), "mxfp8": fsdp.mxfp8()}[args.codec]
    placement = {"zero3": fsdp.zero3, "zero2": fsdp.zero2, "ddp": fsdp.ddp}[args.strategy]("data")
    spec = fsdp.Spec(mesh, placement, precision=rules(codec, compute))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3, weight_decay=0.0), buffers=fsdp.buffers(model))
    del params, model
    base = [bucket for bucket in state.layout.buckets.values() if bucket.packed]
    text, losses = _corpus.load().train, []
    forward_backward = T.forward_backward(skeleton, loss_fn)
    for step in range(args.steps):
        ids = _corpus.batch(text, args.batch, args.length, 0, step, dist.get_rank(), dist.get_world_size())
        state, loss = forward_backward(state, ids.to(mesh.device_type))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss)
    if args.out is not None:
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": [*TARGETS], "task_type": "CAUSAL_LM"}
        fsdp.save_adapter(state, args.out, config | {"base_model_name_or_path": args.model})
    elements = sum(math.prod(leaf.seen_shape) for bucket in base for leaf in bucket.leaves)
    return {
        "losses": [*map(float, losses)],
        "elements": elements,
        "bytes a rank": sum(bucket.nbytes("main") for bucket in base),
        "trained": sum(leaf.numel for bucket in state.layout.trainable.values() for leaf in bucket.leaves),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="QLoRA of a Hugging Face model.")
    parser.add_argument("--model", help="a name or a folder; by default a tiny one with random weights")
    parser.add_argument("--codec", choices=["nf4", "int8", "mxfp8"], default="nf4")
    parser.add_argument("--strategy", choices=["zero3", "zero2", "ddp"], default="zero3")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--out", type=Path, help="a folder for the adapter")
    args = parser.parse_args()
    ranks = args.ranks or torch.cuda.device_count() or 2
    found = fsdp.launch(train, (args,), nprocs=ranks)[0]
    losses, elements = found["losses"], found["elements"]
    print(f"{elements} elements of the base in {args.codec}: {found['bytes a rank']} bytes on each of {ranks} ranks")
    print(f"{found['trained']} elements train")
    for step in dict.fromkeys([*range(0, args.steps, max(args.steps // 5, 1)), args.steps - 1]):
        print(f"{step:>6} {losses[step]:.4f}")


if __name__ == "__main__":
    main()
