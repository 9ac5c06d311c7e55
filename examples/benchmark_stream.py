"""Weights out to another process: by `fsdp.stream` into memory that both share, and by files that it reads back.

    python examples/benchmark_stream.py                                   # CPU, 2 ranks, 5.5 M parameters
    python examples/benchmark_stream.py --model 6.7b --seq 2048 --folder /tmp       # 2 GPUs, about 3 minutes

Each row is printed when it is measured, as a median of the rounds, with its ratio:

| row                    | what it is                                                                       |
|------------------------|----------------------------------------------------------------------------------|
| save_safetensors       | seconds until the files are written, in bfloat16                                 |
| read back              | seconds in which the other process loads them                                    |
| stream                 | seconds until all leaves lie in the other process's memory, ranks in turn by unit; |
|                        | ratio: of both rows above to this one                                            |
| peak of stream         | bytes on the device beyond what there was; ratio: to the largest unit in bfloat16 |
| step                   | milliseconds of a training step, of several in a row                             |
| step, stream beside it | the same with `fsdp.stream_to` before it; ratio: to a step                       |
| step, parts beside it  | the same with `gather=False`: each rank puts its own part there                  |
| delta of a LoRA step   | bytes of all ranks' deltas; ratio: to the bytes of what trains                   |

The other process looks at each leaf once, and its sum is compared.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from _benchmark_models import MODELS, Config, batches
from safetensors.torch import load_file

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

KIND = torch.bfloat16
STEPS = 4  # in a row


# ---------------------------------------------------------------- the other process


class Shared:
    """Leaves in memory that processes share: pinned, where there is CUDA."""

    def __init__(self, state: fsdp.State, path: str = "") -> None:
        leaves = [leaf for unit in state.layout.units for bucket in unit.buckets for leaf in bucket.leaves]
        self.at: dict[str, tuple[int, torch.Size]] = {}
        self.nbytes = 0
        for leaf in leaves:
            self.at[leaf.path] = self.nbytes, torch.Size(leaf.shape)
            self.nbytes += -(-leaf.numel * KIND.itemsize // 64) * 64
        self.file: Any = None
        if not path:
            self.file = open(os.memfd_create("weights"), "r+b")  # noqa: SIM115 # as long as this object
            os.ftruncate(self.file.fileno(), self.nbytes)
            path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        self.path = path
        self.bytes = mapped(path, self.nbytes)
        self.room = {name: self.leaf(name) for name in self.at}
        if torch.cuda.is_available():
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.nbytes, 0)))

    def leaf(self, name: str) -> torch.Tensor:
        begin, shape = self.at[name]
        return self.bytes[begin : begin + shape.numel() * KIND.itemsize].view(KIND).view(shape)


def mapped(path: str, nbytes: int) -> torch.Tensor:
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


def receive() -> None:
    """One request a line: load a folder, or look at a leaf in shared memory."""
    held: dict[str, torch.Tensor] = {}
    memory = torch.empty(0)
    for line in sys.stdin:
        what, *rest = line.split()
        begun = time.perf_counter()
        if what == "load":
            held = {}
            for file in sorted(Path(rest[0]).glob("*.safetensors")):
                held |= load_file(file)
            print(time.perf_counter() - begun, flush=True)
        elif what == "drop":
            held = {}
        elif what == "map":
            memory = mapped(rest[0], int(rest[1]))
        else:
            begin, n = map(int, rest)
            print(memory[begin : begin + n].view(torch.int16).sum().item(), flush=True)


class Other:
    """The other process, for the first rank."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--receive"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *words: Any) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def ask(self, *words: Any) -> float:
        assert self.process.stdout is not None
        self.tell(*words)
        return float(self.process.stdout.readline())


# ---------------------------------------------------------------- measured


def timed(cuda: bool, call: Callable[[], Any]) -> float:
    """Seconds, of the slowest rank."""
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    call()
    if cuda:
        torch.cuda.synchronize()
    took = torch.tensor(time.perf_counter() - begun, device="cuda" if cuda else "cpu")
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def say(row: str, value: str, ratio: str = "") -> None:
    if dist.get_rank() == 0:
        print(f"| {row:22} | {value:>14} | {ratio:>30} |", flush=True)


def streams(config: Config, rounds: int, folder: Path) -> None:
    mesh = fsdp.local_mesh()
    cuda, rank, world = mesh.device_type == "cuda", mesh.get_rank(), mesh.size()
    spec = fsdp.Spec(mesh, units=list(config.units().values()), precision=fsdp.Precision(compute=KIND))
    state, model = fsdp.init(config.build, spec, fsdp.adamw(lr=1e-4), seed=0)
    other = Other() if rank == 0 else None
    paths: list[Any] = [None]
    shared = Shared(state) if rank == 0 else None
    paths[0] = shared.path if shared else None
    dist.broadcast_object_list(paths, src=0)
    shared = shared or Shared(state, paths[0])
    say("row", "median", "ratio")
    say("---", "---:", "---:")
    say("parameters", f"{config.parameters() / 1e9:.3f} B", f"{shared.nbytes / 2**30:.2f} GiB in bfloat16")

    turns = {unit: i % world for i, unit in enumerate(state.layout.by_name)}

    def put(unit: str, named: dict[str, torch.Tensor]) -> None:
        if turns.get(unit) == rank:
            for name, leaf in named.items():
                shared.room[name].copy_(leaf, non_blocking=True)

    def stream() -> None:
        for unit, named in fsdp.stream(state, dtype=KIND):
            put(unit, named)

    stream()  # communicators, and what allocators make
    timed(cuda, lambda: None)
    before = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = [timed(cuda, stream) for _ in range(rounds)]
    took = statistics.median(times)
    if cuda:
        unit = max(sum(bucket.numel for bucket in unit.buckets) for unit in state.layout.units) * KIND.itemsize
        most = torch.cuda.max_memory_allocated() - before
        say("peak of stream", f"{most / 2**20:.0f} MiB", f"{most / unit:.2f} of the largest unit")
    say("stream", f"{took:.3f} s", f"{shared.nbytes / took / 2**30:.2f} GiB/s")

    saves, loads = [], []
    for i in range(min(rounds, 2)):
        there = folder / f"files_{i}"
        saves.append(timed(cuda, lambda: fsdp.save_safetensors(state, there, dtype=KIND)))  # noqa: B023
        if other is not None:
            loads.append(other.ask("load", there))
            other.tell("drop")
        dist.barrier()
    say("save_safetensors", f"{statistics.median(saves):.3f} s")
    if other is not None:
        files = statistics.median(saves) + statistics.median(loads)
        say("read back", f"{statistics.median(loads):.3f} s", f"files / stream: {files / took:.2f}")
        other.tell("map", shared.path, shared.nbytes)
    state = beside_steps(config, state, model, put, shared.room, rounds, cuda)
    fsdp.stream_to(put, state, dtype=KIND)()
    timed(cuda, lambda: None)
    for name, (begin, shape) in shared.at.items():
        mine = shared.room[name].view(torch.int16).sum().item() if rank == 0 and shape.numel() else 0
        if other is not None and shape.numel():
            assert other.ask("sum", begin, shape.numel() * KIND.itemsize) == mine, name
    if other is not None:
        other.process.kill()


def beside_steps(
    config: Config, state: fsdp.State, model: Any, put: Any, room: Any, rounds: int, cuda: bool
) -> fsdp.State:
    device = torch.device("cuda" if cuda else "cpu")
    tokens = batches(config, 1, device)[0]
    forward_backward = T.forward_backward(model, config.loss)
    held = [state]

    def step(way: str) -> None:
        if way == "step, stream beside it":
            fsdp.stream_to(put, held[0], dtype=KIND)
        elif way == "step, parts beside it":
            fsdp.stream_to(lambda _, part: fsdp.apply_delta(room, part), held[0], dtype=KIND, gather=False)
        state, _ = forward_backward(held.pop(), tokens)
        held.append(fsdp.step(state))

    def steps(way: str) -> None:
        for _ in range(STEPS):
            step(way)

    ways = ("step", "step, stream beside it", "step, parts beside it")
    for way in ("step", *ways):
        step(way)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way in ways:
            found[way].append(timed(cuda, lambda: steps(way)) / STEPS)  # noqa: B023
    alone = statistics.median(found["step"])
    for way, took in found.items():
        say(way, f"{1e3 * statistics.median(took):.1f} ms", f"{statistics.median(took) / alone:.3f} of a step")
    return held.pop()


class Adapted(nn.Module):
    """A linear that is frozen, and a product of two small ones beside it."""

    def __init__(self, linear: nn.Linear, r: int = 8) -> None:
        super().__init__()
        self.base = linear
        self.lora_a = nn.Parameter(torch.randn(r, linear.in_features) / 8)
        self.lora_b = nn.Parameter(torch.randn(linear.out_features, r) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)
        return out


def deltas(config: Config) -> None:
    """A step of LoRA."""
    mesh = fsdp.local_mesh()

    def build() -> nn.Module:
        model: Any = config.build()
        for block in model.blocks:
            block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
        return model

    spec = fsdp.Spec(mesh, trainable={"*lora_*": True, "*": False}, precision=fsdp.Precision(compute=KIND))
    state, model = fsdp.init(build, spec, fsdp.adamw(lr=1e-2), seed=0)
    since = fsdp.snapshot(state, dtype=KIND)
    state, _ = T.forward_backward(model, config.loss)(state, batches(config, 1, torch.device(mesh.device_type))[0])
    state = fsdp.step(state)
    begun = time.perf_counter()
    changed = fsdp.delta(since, state)
    took = time.perf_counter() - begun
    total = torch.tensor(changed.nbytes, device=mesh.device_type)
    dist.all_reduce(total)
    own = sum(leaf.numel for name in state.layout.trainable for leaf in state.layout.buckets[name].leaves)
    own *= KIND.itemsize
    say("delta of a LoRA step", f"{total.item():,} bytes", f"{total.item() / own:.4f} of its own, {took:.2f} s")


def measured(config: Config, lora: Config, rounds: int, folder: str) -> None:
    streams(config, rounds, Path(folder))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    deltas(lora)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="tiny", choices=[name for name, c in MODELS.items() if c.kind == "gpt"])
    parser.add_argument("--seq", type=int, help="tokens of a sequence")
    parser.add_argument("--lora-model", choices=MODELS, help="of which the LoRA step is; default: 1.2b, or tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where files are written; default: that of the system")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        with suppress(KeyboardInterrupt):
            receive()
        return
    config = MODELS[args.model]
    config = replace(config, seq=args.seq or config.seq)
    lora = MODELS[args.lora_model or ("tiny" if args.model == "tiny" else "1.2b")]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        fsdp.launch(measured, (config, lora, args.rounds, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
