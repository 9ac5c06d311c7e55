"""How much memory a step takes, and how long it is, by what is kept where; beside FSDP2 with its own means.

    python examples/benchmark_memory.py --model 1.2b                        # all ways, each in processes of its own
    python examples/benchmark_memory.py --largest 80 --ranks 1              # the deepest GPT that trains in 80 GB
    python examples/benchmark_memory.py --ways "both memories" --model 6.7b --depth 63 --near 27 --ranks 1
    python examples/benchmark_memory.py --model tiny --ranks 2 --device cpu

| way                 | what it is                                                                            |
|---------------------|---------------------------------------------------------------------------------------|
| plain               | driven, zero3, everything on the device                                               |
| recomputed          | `T.remat(model, "blocks.*")`: of a block its input is kept, the rest computed again   |
| mlp offloaded       | `T.remat(model, "blocks.*", save=("attn",), offload=("mlp",))`                        |
| main on host        | `zero3(memory_kind={"main": "pinned_host"})`: main weights and optimizer state        |
| host memory         | `zero3(memory_kind="pinned_host")`: those, main gradients and compute shards          |
| all of it           | host memory, recomputed                                                               |
| both memories       | the same, but `--near` blocks are on the device: a placement by pattern               |
| FSDP2               | `fully_shard` of embedding, blocks and head                                           |
| FSDP2 recomputed    | with torch's `checkpoint_wrapper` around each block                                   |
| FSDP2 host memory   | with `CPUOffloadPolicy`: parameters, gradients and the optimizer on the host          |
| FSDP2 all of it     | both                                                                                  |
| FSDP2 both memories | the same, `--near` blocks without `CPUOffloadPolicy`                                  |

Columns: milliseconds a step (median of `--steps`), the most bytes of tensors alive on the device in a step, bytes of
the host that the ranks held, the peak that `T.step_memory` predicted, and the time at most, if compute hid no copy.
The model is a GPT of blocks with the parts `attn` and `mlp`; bfloat16 compute, float32 main weights, AdamW.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

GIB = 1 << 30
LR = 1e-4
Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    width: int
    depth: int
    heads: int
    batch: int
    seq: int
    vocab: int = 32000
    near: int = 0  # blocks whose state is on the device, where a way has both memories

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return 12 * self.width**2 + 2 * self.width

    @property
    def parameters(self) -> int:
        return self.depth * self.block + 2 * self.vocab * self.width + self.width


MODELS = {
    "tiny": Shape(64, 3, 4, 2, 32, vocab=256),
    "1.2b": Shape(2048, 21, 16, 2, 2048),
    "6.7b": Shape(4096, 32, 32, 1, 4096),
}


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.norm = s.heads, nn.RMSNorm(s.width)
        self.qkv, self.out = nn.Linear(s.width, 3 * s.width, bias=False), nn.Linear(s.width, s.width, bias=False)

    def forward(self, h: torch.Tensor) -> Any:
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(s.width)
        self.up, self.down = nn.Linear(s.width, 4 * s.width, bias=False), nn.Linear(4 * s.width, s.width, bias=False)

    def forward(self, h: torch.Tensor) -> Any:
        return self.down(F.gelu(self.up(self.norm(h))))


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(s), Mlp(s)

    def forward(self, h: torch.Tensor) -> Any:
        h = h + self.attn(h)
        return h + self.mlp(h)


class GPT(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.depth))
        self.norm, self.head = nn.RMSNorm(s.width), nn.Linear(s.width, s.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_fn(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


# ---------------------------------------------------------------- the ways


@dataclass(frozen=True)
class Way:
    peer: bool = False
    recomputed: bool = False
    offloaded: bool = False
    on_host: bool = False
    only_main: bool = False
    near: bool = False  # whether some blocks' state is on the device


WAYS = {
    "plain": Way(),
    "recomputed": Way(recomputed=True),
    "mlp offloaded": Way(offloaded=True),
    "main on host": Way(on_host=True, only_main=True),
    "host memory": Way(on_host=True),
    "all of it": Way(recomputed=True, on_host=True),
    "both memories": Way(recomputed=True, on_host=True, near=True),
    "FSDP2": Way(peer=True),
    "FSDP2 recomputed": Way(peer=True, recomputed=True),
    "FSDP2 host memory": Way(peer=True, on_host=True),
    "FSDP2 all of it": Way(peer=True, recomputed=True, on_host=True),
    "FSDP2 both memories": Way(peer=True, recomputed=True, on_host=True, near=True),
}


def ours(way: Way, shape: Shape, device: str) -> tuple[Step, Any, fsdp.HostTransfer]:
    where: Any = {"main": "pinned_host"} if way.only_main else "pinned_host" if way.on_host else "device"
    placement: Any = fsdp.zero3("data", memory_kind=where)
    if way.near:
        near = [f"blocks.{i}.*" for i in range(min(shape.near, shape.depth))]
        placement = {**dict.fromkeys(near, fsdp.zero3("data")), "*": placement}
    # of one microbatch main gradients lose nothing in the dtype of the wire
    precision = fsdp.Precision(compute=torch.bfloat16, grads=torch.bfloat16 if way.on_host else None)
    schedule = fsdp.Schedule(overlap_update=way.near or not way.on_host)  # on the host it keeps buffers of its own
    spec = fsdp.Spec(fsdp.local_mesh(device), placement, precision=precision, schedule=schedule)
    state, model = fsdp.init(lambda: GPT(shape), spec, fsdp.adamw(lr=LR), seed=0)
    if way.offloaded:
        model = T.remat(model, "blocks.*", save=("attn",), offload=("mlp",))
    elif way.recomputed:
        model = T.remat(model, "blocks.*")
    forward_backward, kept = T.forward_backward(model, loss_fn), [state]
    batch = torch.empty(shape.batch, shape.seq + 1, dtype=torch.int64, device="meta")
    memory = T.step_memory(forward_backward, state, batch)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        state, loss = forward_backward(kept[0], tokens)
        kept[0] = fsdp.step(state)
        return loss

    return step, memory, fsdp.host_transfer(state)


def fsdp2(way: Way, shape: Shape, device: str) -> Step:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = fsdp.local_mesh(device)
    with torch.device("meta"):
        model = GPT(shape)
    if way.recomputed:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    more: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    here, there = (OffloadPolicy(), mesh.device_type), (CPUOffloadPolicy(), "cpu")
    far = there if way.on_host else here
    for i, block in enumerate(model.blocks):
        policy, home = here if way.near and i < shape.near else far
        fully_shard(block, offload_policy=policy, **more)
        block.to_empty(device=home)
    fully_shard(model, offload_policy=far[0], **more)
    for part in (model.embed, model.norm, model.head):
        part.to_empty(device=far[1])
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            own = p.to_local()  # type: ignore[attr-defined]
            drawn = torch.empty_like(own, device=mesh.device_type)  # drawing there is faster
            own.copy_(drawn.fill_(1) if "norm" in name else drawn.normal_(0, 0.02))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# ---------------------------------------------------------------- measuring


def measured(name: str, shape: Shape, steps: int, limit: float, device: str) -> dict[str, Any]:
    """On each rank: milliseconds, bytes, losses; or that the memory did not do."""
    way, cuda = WAYS[name], device == "cuda"
    found: dict[str, Any] = {}
    if cuda and limit:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 1e9 / total))
    try:
        if way.peer:
            step = fsdp2(way, shape, device)
        else:
            step, memory, transfer = ours(way, shape, device)
            found["predicted"], found["table"] = memory.peak, repr(memory)
            found["longer"] = transfer.seconds + 2 * memory.moved / transfer.bandwidth  # at most: if nothing is hidden
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = (steps + 3, shape.batch, shape.seq + 1)
        data = torch.randint(0, shape.vocab, size, generator=generator).to("cuda" if cuda else "cpu")
        losses, times = [], []
        for i, tokens in enumerate(data):
            if cuda and i == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            losses.append(step(tokens))
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    except torch.OutOfMemoryError as error:
        return {"failed": str(error)[:200]}
    found["ms"] = 1e3 * statistics.median(times[3:])
    found["losses"] = [round(float(loss), 4) for loss in losses]
    if cuda:
        found["peak"], found["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    found["host"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def run(name: str, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """In processes of its own."""
    with fsdp.workers(nprocs=args.ranks) as ranks:
        try:
            found = ranks(measured, name, shape, args.steps, args.largest, args.device).get()
        except Exception as error:  # a process that was killed for the host's memory, say
            return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    if any("failed" in one for one in found):
        return next(one for one in found if "failed" in one)
    return {**found[0], "ms": max(one["ms"] for one in found), "peak": max(one.get("peak", 0) for one in found)}


def line(name: str, found: dict[str, Any], plain: dict[str, Any] | None) -> str:
    if "failed" in found:
        return f"{name:20} {found['failed']}"
    peak, host = found.get("peak", 0) / GIB, found["host"] / GIB
    said = f"{name:20} {found['ms']:9.1f} ms  peak {peak:6.2f} GiB  host {host:6.1f} GiB"
    if "predicted" in found:
        said += f"  predicted {found['predicted'] / GIB:6.2f} GiB"
    if plain and "failed" not in plain and found.get("longer"):
        again = plain["ms"] / 3 if WAYS[name].recomputed else 0  # a forward is a third of a step's compute
        said += f", at most {plain['ms'] + again + 1e3 * found['longer']:.1f} ms"
    return f"{said}  loss {found['losses'][-1]}"


def largest(name: str, shape: Shape, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """The most blocks with which it trains, to a twelfth."""
    low, high, best = 0, 0, {}
    depth = args.depth or 16
    while True:
        found = run(name, replace(shape, depth=depth), args)
        size = replace(shape, depth=depth).parameters / 1e9
        print(f"  {name}: {depth} blocks, {size:.2f} B: {line('', found, None)}", flush=True)
        if "failed" in found:
            high = depth
        else:
            low, best = depth, found
        if high and high - low <= max(1, high // 12):
            return low, best
        depth = (low + high) // 2 if high else depth * 2
        if depth == low:
            return low, best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="tiny")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    add("--ways", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    add("--steps", type=int, default=8)
    add(
        "--largest", type=float, default=0, metavar="GB", help="look for the most blocks that train in so many GB a GPU"
    )
    add("--depth", type=int, help="blocks; with --largest, to begin with")
    add("--near", type=int, help='of the ways "both memories": blocks whose state is on the device; default: half')
    add("--json", type=Path)
    args = parser.parse_args()
    shape, rows = MODELS[args.model], {}
    if args.depth and not args.largest:
        shape = replace(shape, depth=args.depth)
    shape = replace(shape, near=shape.depth // 2 if args.near is None else args.near)
    for name in args.ways:
        if args.largest:
            depth, found = largest(name, shape, args)
            rows[name] = {"blocks": depth, "parameters": replace(shape, depth=depth).parameters, **found}
            print(f"{name:20} {depth} blocks, {rows[name]['parameters'] / 1e9:.2f} B parameters", flush=True)
        else:
            rows[name] = run(name, shape, args)
            print(line(name, rows[name], rows.get("plain")), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
