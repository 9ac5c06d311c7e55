"""Models as Hugging Face gives them, no units named: one script, only the family's name changing.

    python examples/benchmark_families.py --families qwen2,vit             # CPU, 2 ranks: small ones, losses
    python examples/benchmark_families.py --families whisper --full        # GPUs, at full size: milliseconds and GiB

| way            | what it is                                                                                      |
|----------------|-------------------------------------------------------------------------------------------------|
| driven         | `T.forward_backward(model, loss_fn)`                                                            |
| compiled       | the same with `compile=True`                                                                    |
| graph          | driven, the whole step as a CUDA graph: `T.cuda_graph(train_step, host_reads="guard")`          |
| compiled graph | compiled, as a CUDA graph                                                                       |
| FSDP2          | `fully_shard` of each layer and of the model; on GPUs with `layer.compile()`                    |

Weights and batches are random. The sixth step counts from the building of the model. Where a way cannot be gone, the
table says why.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _benchmark_meter import Meter
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

hf: Any = transformers
LR = 3e-5
Batch = dict[str, torch.Tensor]


def decoder(kind: str, vocab: int = 32000, **full: Any) -> Callable[[bool], tuple[Any, Any]]:
    """A causal language model: small, or with these sizes."""
    small = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    }  # fmt: skip

    def made(large: bool) -> tuple[Any, Any]:
        words = vocab if large else 1000
        config = getattr(hf, f"{kind}Config")(vocab_size=words, pad_token_id=0, **(full if large else small))
        shape = (2, 2048) if large else (4, 64)

        def batch(draw: torch.Generator) -> Batch:
            ids = torch.randint(1, words, shape, generator=draw)
            return {"input_ids": ids, "labels": ids}

        return (lambda: getattr(hf, f"{kind}ForCausalLM")(config)), batch

    return made


def bert(large: bool) -> tuple[Any, Any]:
    config = hf.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0) if large else hf.BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip

    def batch(draw: torch.Generator) -> Batch:
        ids = torch.randint(1, config.vocab_size, (16, 512) if large else (4, 64), generator=draw)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return (lambda: hf.BertForMaskedLM(config)), batch


def t5(large: bool) -> tuple[Any, Any]:
    sizes = {} if large else {"vocab_size": 1000, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4}
    config = hf.T5Config(**sizes, num_layers=12 if large else 4, dropout_rate=0.0, decoder_start_token_id=0)

    def batch(draw: torch.Generator) -> Batch:
        ids = torch.randint(1, config.vocab_size, (8, 512) if large else (4, 48), generator=draw)
        return {"input_ids": ids, "labels": ids[:, ::2].contiguous()}

    return (lambda: hf.T5ForConditionalGeneration(config)), batch


def whisper(large: bool) -> tuple[Any, Any]:
    width, depth, heads = (768, 12, 12) if large else (64, 4, 4)
    config = hf.WhisperConfig(
        d_model=width, encoder_layers=depth, decoder_layers=depth, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        max_source_positions=1500 if large else 50, vocab_size=51865 if large else 1000, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip

    def batch(draw: torch.Generator) -> Batch:
        n, words = (8, 448) if large else (2, 24)
        sound = torch.randn(n, config.num_mel_bins, 2 * config.max_source_positions, generator=draw)
        return {"input_features": sound, "labels": torch.randint(3, config.vocab_size, (n, words), generator=draw)}

    return (lambda: hf.WhisperForConditionalGeneration(config)), batch


def vision(kind: str, head: str, small: dict[str, Any], full: dict[str, Any], rows: int) -> Any:
    def made(large: bool) -> tuple[Any, Any]:
        config = getattr(hf, f"{kind}Config")(num_labels=10, **(full if large else small))
        side = 224 if large else config.image_size if hasattr(config, "image_size") else 32

        def batch(draw: torch.Generator) -> Batch:
            n = rows if large else 4
            images = torch.randn(n, 3, side, side, generator=draw)
            return {"pixel_values": images, "labels": torch.randint(10, (n,), generator=draw)}

        return (lambda: getattr(hf, head)(config)), batch

    return made


NO_DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
FAMILIES: dict[str, Any] = {
    "qwen2": decoder(
        "Qwen2", 151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "qwen3": decoder("Qwen3"),
    "gemma2": decoder(
        "Gemma2", hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, sliding_window=1024,
    ),
    "phi3": decoder("Phi3"),
    "olmo2": decoder("Olmo2"),
    "neox": decoder("GPTNeoX"),
    "granite": decoder("Granite"),
    "bert": bert,
    "t5": t5,
    "whisper": whisper,
    "vit": vision(
        "ViT", "ViTForImageClassification", {**TINY, "image_size": 32, "patch_size": 8},
        {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120,
         "patch_size": 14, **NO_DROP}, 32,
    ),
    "convnext": vision(
        "ConvNext", "ConvNextForImageClassification", {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}, {}, 64
    ),
}  # fmt: skip


def loss_of(model: Any, **batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def ours(build: Any, mesh: Any, dtype: torch.dtype, compile: bool, graph: bool) -> Callable[[Batch], torch.Tensor]:
    with torch.device(mesh.device_type):
        model = build()
    params, skeleton = fsdp.functionalize(model)
    spec = fsdp.Spec(mesh, precision=fsdp.Precision(compute=dtype), schedule=fsdp.Schedule(overlap_update=True))
    kept = [fsdp.shard(params, spec, fsdp.adamw(lr=LR), buffers=fsdp.buffers(model))]
    del params, model
    forward_backward: Any = T.forward_backward(skeleton, loss_of, compile=compile)

    def train_step(state: fsdp.State, batch: Batch) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, **batch)
        return fsdp.step(state), loss

    run: Any = T.cuda_graph(train_step, host_reads="guard") if graph else train_step

    def step(batch: Batch) -> torch.Tensor:
        kept[0], loss = run(kept[0], batch)
        return loss

    step.graphs = run.graphs if graph else {}  # type: ignore[attr-defined]
    return step


def fsdp2(build: Any, mesh: Any, dtype: torch.dtype, compile: bool) -> Callable[[Batch], torch.Tensor]:
    with torch.device(mesh.device_type):
        model = build()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=True)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    layers = [layer for stack in stacks if not inner(stacks, stack) for layer in stack]
    for layer in layers:
        if compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_of(model, **batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def inner(stacks: list[nn.ModuleList], stack: nn.ModuleList) -> list[nn.Module]:
    """The layers of other stacks that have this one inside them."""
    return [layer for other in stacks if other is not stack for layer in other if stack in [*layer.modules()]]


def measured(family: str, way: str, large: bool, steps: int, dtype: torch.dtype) -> tuple[str, list[float]]:
    """What went wrong, if anything; the last loss, milliseconds a step, GiB, seconds to the sixth step."""
    mesh = fsdp.local_mesh()
    cuda = mesh.device_type == "cuda"
    build, batch = FAMILIES[family](large)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    data = [{k: v.to(mesh.device_type) for k, v in batch(draw).items()} for _ in range(8)]
    for one in data:
        one.update({k: v.to(dtype) for k, v in one.items() if v.is_floating_point()})
    loss = torch.zeros((), device=mesh.device_type)

    def run(numbers: range) -> None:
        nonlocal loss
        for i in numbers:
            loss = step(data[i % 8])

    meter = Meter(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    torch.manual_seed(0)
    start, before = time.perf_counter(), torch.cuda.memory_allocated() if cuda else 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if way == "FSDP2":
                step = fsdp2(build, mesh, dtype, cuda)
            else:
                step = ours(build, mesh, dtype, "compiled" in way, "graph" in way)
            run(range(6))
            loss.item()
        sixth = time.perf_counter() - start
        times = [meter.time(partial(run, range(r, r + 4)))[0] * 250 for r in range(6, steps, 4)]
        held = torch.cuda.max_memory_allocated() - before if cuda else 0
        for graph in getattr(step, "graphs", {}).values():
            held = max(held, torch.cuda.memory_allocated() - before + graph.peak)
        return "", [float(loss), statistics.median(times), held / 2**30, sixth]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300], []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--ways", default="")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=18)
    args = parser.parse_args()
    cuda = torch.cuda.device_count() > 0
    ways = ["driven", "compiled", "graph", "compiled graph", "FSDP2"] if cuda else ["driven", "FSDP2"]
    dtype = torch.bfloat16 if cuda else torch.float32
    print("| family | way | loss | ms | GiB | s to the sixth step |\n|---|---|---:|---:|---:|---:|")
    for family in args.families.split(","):
        group = fsdp.workers(nprocs=args.ranks, timeout=60)
        for way in args.ways.split(",") if args.ways else ways:
            try:
                said, numbers = (one.get()[0] for one in group(measured, family, way, args.full, args.steps, dtype))
            except fsdp.LaunchError as error:
                said, numbers = str(error).splitlines()[0], []
            if said:  # ranks may have parted
                group.close()
                group = fsdp.workers(nprocs=args.ranks, timeout=60)
            shown = "{:.5f} | {:.1f} | {:.2f} | {:.1f}".format(*numbers) if numbers else f"{said} | | |"
            print(f"| {family} | {way} | {shown} |", flush=True)
        group.close()


if __name__ == "__main__":
    main()
