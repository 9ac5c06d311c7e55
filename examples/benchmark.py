"""This project, FSDP2 and DDP side by side, in one run: the same model, weights, data, dtypes and optimizer.

    python examples/benchmark.py                              # CPU (gloo): a tiny GPT on 2 ranks, under a minute
    python examples/benchmark.py --model 1.2b --ranks 8       # GPUs (NCCL), bfloat16
    torchrun --nproc-per-node 8 examples/benchmark.py --model 6.7b

| row             | what it is                                                                                       |
|-----------------|--------------------------------------------------------------------------------------------------|
| whole tree      | unshard, torch.func.grad_and_value, reduce, step                                                 |
| whole tree vjp  | the same with T.vjp, which is autograd underneath and frees residuals as it goes                 |
| unit by unit    | the loop of by_hand.py: a unit is gathered, used, released, gathered again, reduced              |
| driven          | the same by `T.forward_backward(model, loss_fn)`, which would take any module                    |
| FSDP2           | `fully_shard` of embedding, blocks and head; the head stays gathered, as in torchtitan           |
| DDP             | `DistributedDataParallel`; with bfloat16, of a bfloat16 copy, and float32 main weights beside it |
| float32 wire    | unit by unit, with gradients that travel and are added up in float32 (`--only` asks for it)      |
| exact sum       | unit by unit, with a bfloat16 wire that is added up in float32 in rank order (`--only`)          |
| FSDP2 float32   | FSDP2 with `MixedPrecisionPolicy(reduce_dtype=torch.float32)` (`--only`)                         |
| compiled        | unit by unit, with blocks compiled by `T.compile_units(model, "blocks.*")` (`--only`); also      |
|                 | "driven compiled", and with `block.compile()` "FSDP2 compiled" and "DDP compiled"                |
| resident        | what no sharding can beat (`--only` asks for it): whole weights stay in place, nothing is sent,  |
|                 | and each rank updates its share of main weights; the weights that compute sees never change; its |
|                 | blocks compiled: "resident compiled"                                                             |

The contestants take turns in rounds, in rotating order, so that drift of the machine meets all of them. Before a turn
ranks meet and devices are synchronized; a turn is `--steps` steps without a pause. Weights and data are random, never
zeros, on which a GPU computes faster.

| column       | what it is                                                                                           |
|--------------|------------------------------------------------------------------------------------------------------|
| step         | a turn's time by its steps, on the slowest rank; the median over rounds                              |
| spread       | the fastest and the slowest round                                                                    |
| host         | until the host returned from one step that began with an idle device (GPU only)                      |
| peak         | most bytes of tensors alive in a step, the state included, that of the other contestants not; of any |
|              | rank; counted by the caching allocator on GPU, by torch's memory profiler on CPU                     |
| loss         | mean over ranks at the last step; the rows must agree to 3 digits                                    |
| FSDP2 / this | FSDP2's time by this row's in the same round, the median over rounds; above 1: faster than FSDP2     |
| this / hand  | this row's time by that of "unit by unit" in the same round, the median over rounds; what driving    |
|              | costs is "driven" here: at most 1.05 is what it should be                                            |
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

LR = 3e-5  # low: larger ones make the first steps of an untrained model chaotic, and then losses cannot be compared

# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Config:
    vocab: int
    width: int
    depth: int
    heads: int
    hidden: int
    batch: int  # sequences a rank
    seq: int  # tokens a sequence


MODELS = {
    "tiny": Config(vocab=4096, width=256, depth=4, heads=4, hidden=768, batch=4, seq=128),
    "0.16b": Config(vocab=50304, width=768, depth=12, heads=12, hidden=2048, batch=4, seq=1024),
    "1.2b": Config(vocab=32000, width=2048, depth=20, heads=16, hidden=5632, batch=2, seq=2048),
    "6.7b": Config(vocab=32000, width=4096, depth=32, heads=32, hidden=11008, batch=1, seq=4096),
}


class Embed(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.table = nn.Embedding(c.vocab, c.width)

    def forward(self, h: None, tokens: torch.Tensor) -> Any:
        return self.table(tokens[:, :-1])


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(c.width), nn.RMSNorm(c.width)
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width, bias=False), nn.Linear(c.width, c.width, bias=False)
        self.gate_up, self.down = nn.Linear(c.width, 2 * c.hidden, bias=False), nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> Any:
        q, k, v = self.qkv(self.norm_attention(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mlp(h)).chunk(2, dim=-1)
        return h + self.down(F.silu(gate) * up)


class Head(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(c.width), nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> Any:
        logits = self.out(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class GPT(nn.Module):
    """Tokens [batch, seq + 1] -> loss []. Every stage has the signature (h, tokens) -> h; each becomes a unit."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = Embed(c)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.head = Head(c)

    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.embed(None, tokens)
        for block in self.blocks:
            h = block(h, tokens)
        return self.head(h, tokens)


def batches(c: Config, count: int, device: torch.device) -> list[torch.Tensor]:
    """Random tokens [batch, seq + 1], with frequencies like those of words (p ~ 1/k), in another order on each rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    words = torch.randperm(c.vocab, generator=generator)
    draws = (c.vocab ** torch.rand(count, c.batch, c.seq + 1, generator=generator)).long() - 1
    return list(words[draws.clamp(0, c.vocab - 1)].to(device))


# ---------------------------------------------------------------- the contestants: (model, ...) -> step(tokens) -> loss

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    mesh: DeviceMesh
    placement: str
    dtype: torch.dtype
    wire: torch.dtype | None = None  # as dtype
    sum: str = "auto"
    compiled: bool = False  # blocks by torch.compile

    def functionalize(self, model: GPT) -> tuple[dict[str, torch.Tensor], GPT]:
        params, skeleton = fsdp.functionalize(model)
        return params, T.compile_units(skeleton, "blocks.*") if self.compiled else skeleton

    def compile(self, model: GPT) -> None:
        """The peers' way."""
        for block in model.blocks if self.compiled else ():
            block.compile(dynamic=False)

    def spec(self) -> fsdp.Spec:
        placement = getattr(fsdp, self.placement)(*(self.mesh.mesh_dim_names or ()))
        precision = fsdp.Precision(torch.float32, compute=self.dtype, wire=self.wire, sum=self.sum)
        return fsdp.Spec(self.mesh, placement, precision=precision, units=["embed", "blocks.*", "head"])


def whole_tree(model: GPT, setting: Setting) -> Step:
    params, skeleton = setting.functionalize(model)
    state = fsdp.shard(params, setting.spec(), fsdp.adamw(lr=LR))

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, weights = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda w: fsdp.bind(skeleton, w)(tokens))(weights)
        state = fsdp.reduce(state, grads)
        return fsdp.step(state), loss

    return keeping(state, train_step)


def unit_by_unit(model: GPT, setting: Setting) -> Step:
    params, skeleton = setting.functionalize(model)
    state = fsdp.shard(params, setting.spec(), fsdp.adamw(lr=LR))
    stages = {unit: skeleton.get_submodule(unit) for unit in state.units}

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        h, pullbacks = None, {}
        for unit, stage in stages.items():
            state, w = fsdp.unshard(state, unit)
            h, pullbacks[unit] = T.vjp(lambda w, h, stage=stage: fsdp.bind(stage, w)(h, tokens), w, h)
            if unit != "head":  # used again at once
                state = fsdp.release(state, unit)
        assert h is not None
        loss, dh = h, torch.ones_like(h)
        for unit in reversed(stages):
            state, w = fsdp.unshard(state, unit)
            dw, dh = pullbacks.pop(unit)(w, dh)
            state = fsdp.release(state, unit)
            state = fsdp.reduce(state, dw, unit)
        return fsdp.step(state), loss

    return keeping(state, train_step)


def driven(model: GPT, setting: Setting) -> Step:
    params, skeleton = setting.functionalize(model)
    state = fsdp.shard(params, setting.spec(), fsdp.adamw(lr=LR))
    forward_backward = T.forward_backward(skeleton, lambda model, tokens: model(tokens))

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    return keeping(state, train_step)


def whole_vjp(model: GPT, setting: Setting) -> Step:
    params, skeleton = setting.functionalize(model)
    state = fsdp.shard(params, setting.spec(), fsdp.adamw(lr=LR))

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, weights = fsdp.unshard(state)
        loss, pullback = T.vjp(lambda w: fsdp.bind(skeleton, w)(tokens), weights)
        (grads,) = pullback(weights, torch.ones_like(loss))
        state = fsdp.reduce(state, grads)
        return fsdp.step(state), loss

    return keeping(state, train_step)


def keeping(state: fsdp.State, train_step: Callable[..., tuple[fsdp.State, torch.Tensor]]) -> Step:
    """tokens -> loss, the state kept in between."""
    kept = [state]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        kept[0], loss = train_step(kept[0], tokens)
        return loss

    return step


def fsdp2(model: GPT, setting: Setting) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=setting.dtype, reduce_dtype=setting.wire or setting.dtype)
    reshard = setting.placement not in ("zero1", "zero2")
    setting.compile(model)
    for stage in (model.embed, *model.blocks):
        fully_shard(stage, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model.head, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=setting.mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(model: GPT, setting: Setting) -> Step:
    main = list(model.parameters())
    if setting.dtype is not torch.float32:
        main = [nn.Parameter(p.detach().clone()) for p in main]
        model = model.to(setting.dtype)
    setting.compile(model)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compute = list(model.parameters())
    optimizer = torch.optim.AdamW(main, lr=LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = parallel(tokens)
        loss.backward()
        if setting.dtype is not torch.float32:
            for m, p in zip(main, compute, strict=True):
                m.grad = p.grad.float() if p.grad is not None else None
        optimizer.step()
        if setting.dtype is not torch.float32:
            with torch.no_grad():
                torch._foreach_copy_(list[torch.Tensor](compute), list[torch.Tensor](main))
        parallel.zero_grad()
        return loss.detach()

    return step


def resident(model: GPT, setting: Setting) -> Step:
    params, skeleton = setting.functionalize(model)
    weights = {path: p.detach().to(setting.dtype) for path, p in params.items()}
    ranks = dist.get_world_size()
    shares = {path: p.detach().flatten()[: -(-p.numel() // ranks)].clone() for path, p in params.items()}
    main = [nn.Parameter(share) for share in shares.values()]
    optimizer = torch.optim.AdamW(main, lr=LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss, pullback = T.vjp(lambda w: fsdp.bind(skeleton, w)(tokens), weights)
        (grads,) = pullback(weights, torch.ones_like(loss))
        for p, grad in zip(main, grads.values(), strict=True):
            p.grad = grad.flatten()[: p.numel()].float()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def with_compiled_blocks(contestant: Callable[[GPT, Setting], Step]) -> Callable[[GPT, Setting], Step]:
    return lambda model, setting: contestant(model, replace(setting, compiled=True))


CONTESTANTS: dict[str, Callable[[GPT, Setting], Step]] = {
    "whole tree": whole_tree,
    "whole tree vjp": whole_vjp,
    "unit by unit": unit_by_unit,
    "driven": driven,
    "FSDP2": fsdp2,
    "DDP": ddp,
    "float32 wire": lambda model, setting: unit_by_unit(model, replace(setting, wire=torch.float32)),
    "exact sum": lambda model, setting: unit_by_unit(model, replace(setting, wire=torch.bfloat16, sum="fp32")),
    "FSDP2 float32": lambda model, setting: fsdp2(model, replace(setting, wire=torch.float32)),
    "compiled": with_compiled_blocks(unit_by_unit),
    "driven compiled": with_compiled_blocks(driven),
    "FSDP2 compiled": with_compiled_blocks(fsdp2),
    "DDP compiled": with_compiled_blocks(ddp),
    "resident": resident,
    "resident compiled": with_compiled_blocks(resident),
}
ROWS = ("whole tree", "whole tree vjp", "unit by unit", "driven", "FSDP2", "DDP")  # the others only when they are named
PEER, BY_HAND, BOUNDS = "FSDP2", "unit by unit", ("resident", "resident compiled")
ALL = ",".join(CONTESTANTS)
HYBRID = {"replica": 2, "shard": -1}

# ---------------------------------------------------------------- measuring


@contextmanager
def hushed() -> Iterator[None]:
    """Nothing on stderr: the profiler's C++ side announces itself there, and complains in forked processes."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


class Meter:
    """Clock and memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        if self.cuda:  # a library's workspace is allocated on first use: not on the first contestant's account
            x = torch.ones(64, 64, device=device)
            F.linear(x, x, x[0])

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All ranks are here, and nothing is left to do."""
        gc.collect()
        dist.all_reduce(torch.zeros((), device=self.device))
        self.synchronize()

    def time(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Seconds until the device was done with `run()`, and until the host was."""
        self.meet()
        start = time.perf_counter()
        run()
        returned = time.perf_counter()
        self.synchronize()
        return time.perf_counter() - start, returned - start

    def memory(self, run: Callable[[], None], lead_in: Callable[[], None] = lambda: None) -> tuple[int, int]:
        """Bytes of tensors that `run()` leaves behind, and most alive meanwhile, both beyond those alive before.

        On the CPU a block that is freed counts only if its allocation was seen: that is what `lead_in` is for.
        """
        self.meet()
        if self.cuda:
            lead_in()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            gc.collect()
            self.synchronize()
            return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        cpu = torch.profiler.ProfilerActivity.CPU
        with hushed(), torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
            lead_in()
            with torch.profiler.record_function("run"):
                run()
                gc.collect()
        profiler: Any = profile.profiler
        events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
        start = next(event.start_ns() for event in events if event.name() == "run")
        sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.start_ns() >= start]
        alive = list(accumulate(sizes, initial=0))
        return alive[-1], max(alive)

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return list(tensor.tolist())


class Runner:
    """A contestant, its data and what was measured of it."""

    def __init__(self, name: str, config: Config, setting: Setting, data: list[torch.Tensor], meter: Meter) -> None:
        self.name, self.data, self.meter = name, iter(data), meter
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []  # a step, by rounds
        self.host: list[float] = []

        def build() -> None:
            torch.manual_seed(0)
            with meter.device:
                model = GPT(config)
            self.step = CONTESTANTS[name](model, setting)
            del model
            self.run(1)  # after the first step optimizers have their state

        self.resident, _ = meter.memory(build)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(self.step(next(self.data)))

    def turn(self, steps: int) -> None:
        self.seconds.append(self.meter.time(lambda: self.run(steps))[0] / steps)
        if self.meter.cuda:
            self.host.append(self.meter.time(lambda: self.run(1))[1])

    def row(self, peer: Runner | None, by_hand: Runner | None) -> Row:
        once = partial(self.run, 1)
        peak = self.resident + self.meter.memory(once, lead_in=once)[1]
        seconds, host = self.meter.slowest(self.seconds), self.meter.slowest(self.host)
        loss = self.losses[-1].double() / dist.get_world_size()
        dist.all_reduce(loss)

        def by_round(over: list[float], under: list[float]) -> float:
            return median(a / b for a, b in zip(over, under, strict=True))

        return Row(
            self.name,
            step_ms=1e3 * median(seconds),
            fastest_ms=1e3 * min(seconds),
            slowest_ms=1e3 * max(seconds),
            host_ms=1e3 * median(host) if host else None,
            peak_bytes=int(self.meter.slowest([peak])[0]),
            loss=loss.item(),
            ratio=by_round(self.meter.slowest(peer.seconds), seconds) if peer else None,
            by_hand=by_round(seconds, self.meter.slowest(by_hand.seconds)) if by_hand else None,
        )


@dataclass
class Row:
    name: str
    step_ms: float
    fastest_ms: float
    slowest_ms: float
    host_ms: float | None
    peak_bytes: int
    loss: float
    ratio: float | None  # FSDP2's time / this row's
    by_hand: float | None  # this row's time / that of the loop by hand


def measure(args: argparse.Namespace) -> list[Row]:
    """Run on every rank; the rows are the same on all of them."""
    mesh = fsdp.local_mesh(args.device, **HYBRID if args.placement in ("hsdp", "hfsdp") else {"data": -1})
    cuda = mesh.device_type == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    meter = Meter(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    base = MODELS[args.model]
    config = replace(base, batch=args.batch or base.batch, seq=args.seq or base.seq)
    setting = Setting(mesh, args.placement, getattr(torch, args.dtype or ("bfloat16" if cuda else "float32")))
    data = batches(config, args.warmup + args.rounds * (args.steps + cuda) + 2, meter.device)

    runners = [Runner(name, config, setting, data, meter) for name in args.only]
    for runner in runners:
        runner.run(args.warmup - 1)
    for r in range(args.rounds):
        first = r % len(runners)
        for runner in runners[first:] + runners[:first]:
            runner.turn(args.steps)
    named = {runner.name: runner for runner in runners}
    rows = [runner.row(named.get(PEER), named.get(BY_HAND)) for runner in runners]

    if dist.get_rank() == 0:
        report(args, config, setting, rows)
    losses = [row.loss for row in rows if row.name not in BOUNDS]
    assert max(losses) - min(losses) <= 1e-3 * abs(losses[0]), f"the losses do not agree to 3 digits: {losses}"
    return rows


# ---------------------------------------------------------------- the report


def report(args: argparse.Namespace, config: Config, setting: Setting, rows: list[Row]) -> None:
    with torch.device("meta"):
        size = sum(p.numel() for p in GPT(config).parameters())
    ranks, dtype = dist.get_world_size(), str(setting.dtype).removeprefix("torch.")
    print(
        f"\n{args.model}: {size / 1e6:.1f} M parameters, {config.batch}×{config.seq} tokens a rank, {ranks} ranks, "
        f"{dtype} compute and wire, {args.placement}\n"
        f"{args.rounds} rounds of {args.steps} steps, after {args.warmup} steps to warm up\n"
        f"{machine()}; torch {torch.__version__}, functional-fsdp {fsdp.__version__}\n"
    )
    print(f"| {'':17} | step ms | {'spread ms':>15} | host ms | peak MiB |    loss | FSDP2 / this | this / hand |")
    print(f"|{'-' * 19}|--------:|----------------:|--------:|---------:|--------:|-------------:|------------:|")
    for row in rows:
        spread = f"{row.fastest_ms:.1f} – {row.slowest_ms:.1f}"
        host = "-" if row.host_ms is None else f"{row.host_ms:.1f}"
        ratio, by_hand = ("-" if r is None else f"{r:.3f}" for r in (row.ratio, row.by_hand))
        print(
            f"| {row.name:17} | {row.step_ms:7.1f} | {spread:>15} | {host:>7} | {row.peak_bytes / 2**20:8.0f} "
            f"| {row.loss:7.4f} | {ratio:>12} | {by_hand:>11} |"
        )
    if args.json:
        about = {"machine": machine(), "torch": torch.__version__, "functional_fsdp": fsdp.__version__, "ranks": ranks}
        about |= {"parameters": size, "dtype": dtype, "arguments": vars(args), "config": asdict(config)}
        Path(args.json).write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def machine() -> str:
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return f"{torch.cuda.device_count()}× {torch.cuda.get_device_name()}, NCCL {nccl}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {name}, gloo, 1 thread a rank"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="tiny")
    add("--ranks", type=int, help="default: one for each GPU, or 2 on the CPU; torchrun decides for itself")
    add("--device", choices=("cpu", "cuda"), help="default: CUDA where there is any")
    add("--batch", type=int, help="sequences a rank; default by model")
    add("--seq", type=int, help="tokens a sequence; default by model")
    add("--steps", type=int, default=3, help="steps of a turn")
    add("--rounds", type=int, default=6, help="turns of each contestant")
    add("--warmup", type=int, default=3, help="steps before the clock runs, at least 1")
    add("--dtype", choices=("float32", "bfloat16"), help="compute and wire; default float32 on CPU, bfloat16 on GPU")
    add(
        "--placement",
        choices=("zero3", "zero2", "zero1", "ddp", "hsdp", "hfsdp"),
        default="zero3",
        help="of this project's rows; FSDP2 follows for zero3 and hsdp, keeps weights gathered after forward for zero1 "
        "and zero2, and has no match for ddp (zero3 then) and hfsdp (hsdp then)",
    )
    add("--only", type=lambda text: text.split(","), default=[*ROWS], help=f"a choice of {ALL}")
    add("--json", help="write everything to this file")
    args = parser.parse_args()
    for name in args.only:
        if name not in CONTESTANTS:
            parser.error(f"--only: {name!r} is none of {ALL}")
    if args.model == "6.7b" and {"DDP", "DDP compiled"} & {*args.only}:
        args.only = [name for name in args.only if not name.startswith("DDP")]
        print("DDP is left out: 6.7 B parameters with their AdamW state take 100 GiB and more on every rank.")
    return args


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started the ranks
        measure(arguments())
        dist.destroy_process_group()
    else:
        settings = arguments()
        fsdp.launch(measure, settings.ranks, settings)
