"""QLoRA of a Llama beside accelerate's FSDP2 with bitsandbytes: ms a step, peaks, and losses, in one table.

    python examples/benchmark_qlora.py                          # 2 processes on CPUs, a tiny Llama
    python examples/benchmark_qlora.py --model 8b --ranks 2     # the shapes of Llama-3-8B, random weights

| row                         | the base                                                                         |
|-----------------------------|----------------------------------------------------------------------------------|
| nf4                         | `Precision(main=fsdp.nf4(nested=True))`                                          |
| nf4, chunked loss           | the same with `T.chunked_loss`: no table of all logits                           |
| nf4, chunked loss, compiled | the same, units compiled                                                         |
| nf4, chunked loss, graph    | the same, not compiled, each step a CUDA graph (on CPUs it is none)              |
| accelerate                  | `Linear4bit` with `quant_storage=bfloat16`, sharded                              |
| accelerate, uint8           | with the default `quant_storage=uint8`, which accelerate leaves whole on ranks   |

The model, the adapters (rank 16, of all linears of the layers), the batches and the bytes of the base are the same in
all rows; layers are recomputed in the backward. accelerate's rows call its `fsdp2_apply_ac` and `fsdp2_prepare_model`,
which `Accelerator.prepare` calls. Each row has processes of its own. ms: the middle one of the steps, on the first
rank; GiB: the peak of the steps, of the caching allocator (GPUs only); between: what is there between two steps; first,
last: the losses, which accelerate's policy rounds to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from qlora import TARGETS, adapted, loss_fn, rules
from torch import nn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers

ROWS = ("nf4", "nf4, chunked loss", "nf4, chunked loss, compiled", "nf4, chunked loss, graph", "accelerate",
        "accelerate, uint8")  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "8b": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
LR, LAYERS, HALF = 1e-4, "base_model.model.model.layers.*", torch.bfloat16
UNITS = (LAYERS, "base_model.model.model.embed_tokens", "base_model.model.lm_head")


def made(model: str, layers: int | None, device: str) -> nn.Module:
    """The model with its adapters, the same on every rank: no weight is zero."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SIZES[model] | ({"num_hidden_layers": layers} if layers else {}), max_position_embeddings=8192
    )
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(HALF)
        try:
            plain = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        found = adapted(plain, rank=16, alpha=32)
    for path, p in found.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(p, std=1e-2)
    return found.train()


def batch(args: argparse.Namespace, step: int, device: str) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ids = torch.randint(0, SIZES[args.model]["vocab_size"], (args.batch, args.length), generator=seeded)
    return ids.to(device)


def features(model: Any, ids: torch.Tensor) -> Any:
    return model.base_model["model"].model(input_ids=ids, use_cache=False).last_hidden_state


def with_labels(loss: Any, model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = loss(model, ids, ids)
    return found


def ours(args: argparse.Namespace, device: str, row: str) -> Any:
    """A step: ids -> the loss."""
    model = made(args.model, args.layers, device)
    params, skeleton = fsdp.functionalize(model)
    spec = fsdp.Spec(fsdp.local_mesh(), precision=rules(fsdp.nf4(nested=True), HALF), units=UNITS)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=LR, weight_decay=0.0), buffers=fsdp.buffers(model))
    del params, model
    skeleton = T.remat(skeleton, LAYERS)
    loss: Any = loss_fn
    if "chunked" in row:
        skeleton, chunked = T.chunked_loss(skeleton, head="base_model.model.lm_head", hidden=features, shift=True)
        loss = partial(with_labels, chunked)
    forward_backward = T.forward_backward(skeleton, loss, compile="compiled" in row)

    def train_step(state: fsdp.State, ids: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, ids)
        return fsdp.step(state), loss

    call: Any = T.cuda_graph(train_step, warmup=2) if "graph" in row and device == "cuda" else train_step
    kept = [state]

    def step(ids: torch.Tensor) -> torch.Tensor:
        state, loss = call(kept.pop(), ids)
        kept.append(state)
        return loss

    return step


def theirs(args: argparse.Namespace, device: str, storage: torch.dtype) -> Any:
    """A step: ids -> the loss. As `Accelerator.prepare` does it, for a model that `BitsAndBytesConfig` would make."""
    bnb, accelerate = import_module("bitsandbytes"), import_module("accelerate")
    sharding = import_module("accelerate.utils.fsdp_utils")
    whole = made(args.model, args.layers, device)
    for path, part in [*whole.named_modules()]:
        if path.rpartition(".")[2] == "base_layer":
            assert isinstance(part, nn.Linear)
            size = part.in_features, part.out_features
            packed = bnb.nn.Linear4bit(*size, False, HALF, True, "nf4", storage, device="meta")
            packed.weight = bnb.nn.Params4bit(
                part.weight.data, False, quant_type="nf4", quant_storage=storage, module=packed
            ).to(device)
            whole.set_submodule(path, packed)
    model: Any = whole.get_submodule("base_model.model")
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], activation_checkpointing=True,
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    plugin.set_mixed_precision("bf16")
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="bf16", device=torch.device(device),
        is_main_process=dist.get_rank() == 0, torch_device_mesh=None,
    )  # fmt: skip
    plugin.set_auto_wrap_policy(model)
    model = sharding.fsdp2_prepare_model(accelerator, sharding.fsdp2_apply_ac(accelerator, model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measured(row: str, args: argparse.Namespace) -> dict[str, Any]:
    """ms of a step, the peak and what is allocated between steps in GiB, and the mean loss of each step."""
    device = fsdp.local_mesh().device_type
    gpu = device == "cuda"
    if row.startswith("nf4"):
        run = ours(args, device, row)
    else:
        run = theirs(args, device, torch.uint8 if "uint8" in row else HALF)
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for step in range(args.steps + 2):
        ids = batch(args, step, device)
        if gpu:
            torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        loss = run(ids)
        if gpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    peak, between = (
        (torch.cuda.max_memory_allocated() / 2**30, torch.cuda.memory_allocated() / 2**30) if gpu else (0.0, 0.0)
    )
    return {"row": row, "ms": median(times[2:]), "GiB": peak, "between": between, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description="QLoRA beside accelerate's FSDP2 with bitsandbytes, in one table.")
    parser.add_argument("--model", choices=[*SIZES], default="tiny")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", help=f"rows, by semicolons, of: {'; '.join(ROWS)}")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks = args.ranks or torch.cuda.device_count() or 2
    rows = args.only.split(";") if args.only else [*ROWS]
    print(
        f"{args.model}, {ranks} ranks, {args.batch} x {args.length} tokens a rank, adapters of {len(TARGETS)} linears"
    )
    print(f"{'row':>27} {'ms':>8} {'GiB':>8} {'between':>8} {'first':>8} {'last':>8}")
    found = []
    for row in rows:
        if row.startswith("accelerate") and not all(map(find_spec, ("accelerate", "bitsandbytes"))):
            print(f"{row:>27} accelerate or bitsandbytes is not installed")
            continue
        one = fsdp.launch(measured, (row, args), nprocs=ranks)[0]
        stop_workers()
        found.append(one)
        numbers = " ".join(f"{one[name]:>8.2f}" for name in ("ms", "GiB", "between"))
        print(f"{row:>27} {numbers} {one['losses'][0]:>8.4f} {one['losses'][-1]:>8.4f}", flush=True)
    for other in (one for one in found if one["row"].startswith("accelerate")):
        for one in (one for one in found if one["row"].startswith("nf4")):
            peak = one["GiB"] / other["GiB"] if other["GiB"] else float("nan")
            print(f"{one['row']} / {other['row']}: peak {peak:.3f}, time {one['ms'] / other['ms']:.3f}")
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "ranks": ranks, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
