"""Gathers in few bits beside bfloat16's, and moments in 8 bits: one table.

    python examples/benchmark_codecs.py                                # 2 processes on CPUs, a tiny GPT
    python examples/benchmark_codecs.py --model 1.2b                   # every GPU, bfloat16; units compiled
    python examples/benchmark_codecs.py --model 6.7b --eager --only "bfloat16,mxfp8"

| row            | matrices of the layers are gathered                                                       |
|----------------|-------------------------------------------------------------------------------------------|
| bfloat16       | cast by each gather                                                                       |
| float8 recipe  | in float8 with one scale a matrix, for linears of torchao that multiply in float8         |
| fp8_block      | in float8 with a scale for 256 elements; the products are in bfloat16                     |
| mxfp8          | in float8 with a power of 2 for 32 elements; the same                                     |
| 8-bit moments  | as bfloat16; `adamw(moments=fsdp.dynamic8)`                                               |

Each row has processes of its own. ms: the middle one of the steps, on the first rank; GiB: the peak of the step, of the
caching allocator (GPUs only); received: bytes of gathers on a rank in a step, by the plan; loss: of the last step.
`--graph`: each step is one CUDA graph. `--kernels 10` prints the ten kernels that take most of one more step: ms, and
how often each is launched.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from operator import itemgetter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _benchmark_models import MODELS, Config
from float8 import converted

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers
from functional_fsdp._plan.plan import records

ROWS: dict[str, Any] = {
    "bfloat16": None,
    "float8 recipe": torch.float8_e4m3fn,
    "fp8_block": fsdp.fp8_block(),
    "mxfp8": fsdp.mxfp8(),
    "8-bit moments": None,
}
FIRST = 5  # steps that are not counted


def received(state: fsdp.State) -> int:
    """Bytes of gathers that a rank receives in a step."""
    plan, found = state.cursor.plan, 0
    here, traits = tuple(dict.fromkeys(state.spec.axes, 0).items()), state.spec.transport.traits
    for unit in state.layout.units:
        hops = [one for b in unit.buckets for one in records(b, here, "mean", traits).unshard.collectives]
        found += plan.by_name[unit.name].gathers * sum(one.received(state.spec.axes[one.axis]) for one in hops)
    return found


def measured(
    row: str, model: str, steps: int, eager: bool, graph: bool, kernels: int
) -> tuple[float, float, int, float, list[str]]:
    """ms of a step, the peak in GiB, bytes that gathers receive, the loss, and lines about kernels."""
    mesh, config = fsdp.local_mesh(), MODELS[model]
    gpu = mesh.device_type == "cuda"
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        plain = config.build()
    if row == "float8 recipe":
        plain = converted(plain, (config.layers[:-1],), not gpu)
    wide = fsdp.Precision(torch.float32, compute=torch.bfloat16, inputs=True)
    matrices = [path for path, p in plain.named_parameters() if path.startswith(config.layers[:-1]) and p.dim() == 2]
    narrow = replace(wide, gather=ROWS[row])
    spec = fsdp.Spec(
        mesh, precision={**dict.fromkeys(matrices, narrow), "*": wide}, units=config.units(),
        schedule=fsdp.Schedule(overlap_update=True),
    )  # fmt: skip
    params, skeleton = fsdp.functionalize(plain)
    moments = fsdp.dynamic8 if row == "8-bit moments" else None
    state = fsdp.shard(params, spec, fsdp.adamw(lr=3e-5, moments=moments), buffers=fsdp.buffers(plain))
    del params, plain
    forward_backward = T.forward_backward(skeleton, config.loss, compile=not eager)

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step, warmup=2) if graph and gpu else train_step
    times, loss = [], torch.zeros(())
    activities, said = torch.profiler.ProfilerActivity, []
    profile = torch.profiler.profile(activities=[activities.CUDA if gpu else activities.CPU], acc_events=True)
    for i in range(FIRST + steps + bool(kernels)):
        tokens = batch(config, i).to(mesh.device_type)
        if gpu:
            if i == FIRST:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        with profile if i == FIRST + steps else nullcontext():
            state, loss = step(state, tokens)
            if gpu:
                torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
    state, loss = fsdp.pmean(state, loss)
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    if kernels:
        spent = [
            (one.self_device_time_total if gpu else one.self_cpu_time_total, one) for one in profile.key_averages()
        ]
        spent.sort(key=itemgetter(0), reverse=True)
        said = [f"{us / 1000:>9.2f} ms {one.count:>5} x {one.key[:100]}" for us, one in spent[:kernels]]
    return median(times[FIRST : FIRST + steps]), peak, received(state), float(loss), said


def batch(config: Config, step: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(0, config.vocab, (config.batch, config.seq + 1), generator=seeded)


def main() -> None:
    parser = argparse.ArgumentParser(description="Gathers by codec beside bfloat16's, in one table.")
    parser.add_argument("--model", choices=[*MODELS], default="tiny")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--eager", action="store_true", help="units are not compiled; so it is on CPUs")
    parser.add_argument("--graph", action="store_true", help="the step as a CUDA graph: the host is no limit")
    parser.add_argument("--only", help="rows, by commas")
    parser.add_argument("--kernels", type=int, default=0, help="how many are printed")
    args = parser.parse_args()
    ranks, eager = args.ranks or torch.cuda.device_count() or 2, args.eager or not torch.cuda.is_available()
    rows = args.only.split(",") if args.only else [*ROWS]
    print(f"{args.model}, {ranks} ranks, units {'eager' if eager else 'compiled'}{', a graph' * args.graph}")
    print(f"{'gathers':>15} {'ms':>9} {'GiB':>7} {'received MiB':>13} {'loss':>8}")
    for row in rows:
        if row == "float8 recipe" and find_spec("torchao") is None:
            print(f"{row:>15} torchao is not installed")
            continue
        given = row, args.model, args.steps, eager, args.graph, args.kernels
        ms, peak, nbytes, loss, said = fsdp.launch(measured, given, nprocs=ranks)[0]
        stop_workers()
        print(f"{row:>15} {ms:>9.1f} {peak:>7.2f} {nbytes / 2**20:>13.1f} {loss:>8.4f}", *said, sep="\n", flush=True)


if __name__ == "__main__":
    main()
