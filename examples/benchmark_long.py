"""One long sequence: Llama-3-8B of transformers, cut along "cp" by Ulysses, each rank with its part of the tokens.

    python examples/benchmark_long.py --layers 16                 # 2 GPUs: half of its layers, 32,768 tokens
    python examples/benchmark_long.py --cp 4                      # 8 GPUs: data 2 × cp 4, all layers
    python examples/benchmark_long.py --cp 4 --keep all           # 4 of 141 GB: nothing is computed again
    python examples/benchmark_long.py --ranks 1                   # CPU: a tiny one; the losses of --ranks 2 are equal

The model is transformers' own: its attention is given by name, and exchanges heads for tokens before and after. Layers
recompute all but their attention (`--keep`: the outputs of their products, or all), and the loss is taken with the head
in chunks of tokens. Rows: eager steps, the same with compiled layers as CUDA graphs. Of 32 layers on 4 GPUs
`T.step_memory` says 40.4 GiB a rank with the attention kept, eagerly 50.0 with products and 77.4 with all.

Columns: milliseconds a step (median, the slowest rank's), tokens a second of each GPU, TFLOP/s of each and their share
of its peak (6 operations for each parameter and token, and 6 × layers × width × sequence of causal attention; what is
recomputed does not count), the most GiB that a rank allocated, and the first and the last loss.

torchtitan publishes, for Llama-3.1-8B on 8 H100s (96 GB, 500 W), in float8, compiled, every layer recomputed
(benchmarks/llama3_h100_202412_torchtitan.md): 3,890 tokens a second a GPU for 32,768 tokens with FSDP 8 and CP 1, 2,540
for 65,536 with CP 2, and 1,071 for 131,072 with CP 4. Here all is bfloat16. The same shapes a rank are `--cp 1`, `--seq
65536 --cp 2`, `--seq 131072 --cp 4`; with other ones, or fewer layers, compare TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from _benchmark_models import MODELS, Config

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms import collectives as C

PUBLISHED = {32768: (1, 3890), 65536: (2, 2540), 131072: (4, 1071)}  # by tokens: cp, and tokens a second of a GPU


class Found(NamedTuple):
    seconds: float
    peak: int
    losses: list[float]


def ulysses(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, cp: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention of [b, heads, s/cp, d] -> [b, s/cp, heads, d]: by whole sequences of some heads."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = (C.all_to_all(t, cp, cut=1, join=2) for t in (q, k, v))
    out, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
    return C.all_to_all(out, cp, cut=1, join=2), None


def run(args: Namespace, graph: bool) -> Found:
    """One row, on this rank."""
    import transformers

    gc.collect()
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config, mesh = sized(args), fsdp.local_mesh(args.device, data=-1, cp=args.cp)
    cp = mesh["cp"]

    def build() -> Any:
        model: Any = config.build()
        model.config._attn_implementation = "ulysses"
        return model

    transformers.AttentionInterface.register("ulysses", partial(ulysses, cp=cp))
    precision = fsdp.Precision(compute=torch.bfloat16 if cuda else None)
    spec = fsdp.Spec(
        mesh, fsdp.zero3("data", "cp"), precision=precision, units=config.units(),
        schedule=fsdp.Schedule(overlap_update=True), transport=args.transport,
    )  # fmt: skip
    state, model = fsdp.init(build, spec, fsdp.adamw(lr=3e-5), seed=0)
    kept: dict[str, Any] = {
        "attention": {"save": ("self_attn",)}, "products": {"products": ("self_attn", "mlp")},
    }  # fmt: skip
    model = model if args.keep == "all" else T.remat(model, config.layers, **kept[args.keep])
    model, chunked = T.chunked_loss(model, shift=False)

    def loss_fn(model: Any, tokens: torch.Tensor, labels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return chunked(model, tokens, labels=labels, position_ids=places, use_cache=False)

    forward_backward = T.forward_backward(model, loss_fn, compile=graph)

    def train_step(state: fsdp.State, *data: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, *data)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step, warmup=2) if graph and cuda else train_step
    losses, times = [], []
    for i in range(args.steps + 4):
        draw = torch.Generator().manual_seed(1000 * i + mesh.get_local_rank("data"))
        words = torch.randint(0, config.vocab, (1, config.seq + 1), generator=draw)
        whole = words[:, :-1], words[:, 1:], torch.arange(config.seq)[None]
        data = [t.chunk(args.cp, 1)[cp.get_local_rank()].contiguous().to(args.device) for t in whole]
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        state, loss = step(state, *data)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        state, loss = fsdp.pmean(state, loss)
        losses.append(float(loss))
    peak = torch.cuda.max_memory_allocated() + state.shared_bytes if cuda else 0
    return Found(statistics.median(times[4:]), peak, losses)


def sized(args: Namespace) -> Config:
    base = MODELS["llama3-8b"] if args.device == "cuda" else MODELS["tiny-llama"]
    return replace(base, batch=1, seq=args.seq, depth=args.layers or base.depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    cuda = torch.cuda.device_count()
    add("--ranks", type=int, default=cuda or 2)
    add("--cp", type=int, help="default: all ranks, at most 4")
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    add("--layers", type=int)
    add("--seq", type=int, default=32768 if cuda else 64)
    add("--steps", type=int, default=4)
    add("--transport", default="copy_engine" if cuda else "collective")
    add("--only", choices=("eager", "graph"))
    add("--keep", choices=("attention", "products", "all"), default="attention", help="of layers, for their backward")
    args = parser.parse_args()
    args.cp = args.cp or min(args.ranks, 4)
    config, said = sized(args), ""
    for row in ("eager", "graph") if args.only is None else (args.only,):
        ranks = fsdp.launch(run, (args, row == "graph"), nprocs=args.ranks)
        seconds, peak = max(one.seconds for one in ranks), max(one.peak for one in ranks)
        if not said:  # only now: what asks for the GPU begins to use it
            name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
            print(
                f"{args.ranks} × {name}, {args.seq} tokens over cp {args.cp}, {config.depth} layers, kept: {args.keep}",
                flush=True,
            )
        rate = args.seq / args.cp / seconds
        said = (
            f"{row:6} {1e3 * seconds:9.1f} ms  {rate:8,.0f} tokens/s a GPU  {rate * config.flops() / 1e12:6.1f} TFLOP/s"
        )
        if args.device == "cuda":
            said += f"  {100 * rate * config.flops() / fsdp.Hardware.here().peak(torch.bfloat16):.1f} % of peak"
        losses = ranks[0].losses
        print(f"{said}  {peak / 2**30:.2f} GiB  losses {losses[0]:.4f} {losses[-1]:.4f}", flush=True)
    if args.device == "cuda" and args.seq in PUBLISHED:
        cp, tokens = PUBLISHED[args.seq]
        flops = tokens * replace(config, depth=32).flops() / 1e12
        print(f"published by torchtitan, 8 H100, float8, cp {cp}: {tokens:,} tokens/s a GPU, {flops:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
