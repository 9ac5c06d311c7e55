"""Planning a run: common models × GPUs on paper, from 8 B to 671 B parameters. Needs no GPU.

    python examples/planning.py                                    # the table of docs/guide/planning.md
    python examples/planning.py --models "Llama 405 B" --gpus 4096 16384 --hardware H200
    python examples/planning.py --details --models "MoE 671 B"     # what each prediction is made of

Models have the sizes of the published ones that their names recall, and no weights. One sequence of 8192 tokens a rank,
bfloat16 compute, float32 main weights, AdamW, a CUDA graph, compiled layers. "zero3" is over all GPUs, "hsdp" shards
over 64 or 512 ranks and replicates over the others. Every block recomputes where a row says so.

The mixture of experts spreads its 256 experts over 64 ranks of an axis of their own, where each rank has four; its
tokens' way to the experts and back is the model's own communication and not in the prediction.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    seq: int = 8192
    experts: int = 0  # on all ranks together
    chosen: int = 0  # for each token
    expert_hidden: int = 0
    dense: int = 0  # layers without experts, the first ones
    spread: int = 64  # ranks that share the experts


MODELS = {
    "Llama 8 B": Shape(4096, 32, 32, 8, 14336, 128256),
    "Llama 70 B": Shape(8192, 80, 64, 8, 28672, 128256),
    "Llama 405 B": Shape(16384, 126, 128, 8, 53248, 128256),
    "MoE 671 B": Shape(
        7168, 61, 128, 128, 18432, 129280, experts=256, chosen=8, expert_hidden=2048, dense=3
    ),
}  # fmt: skip


class Attention(nn.Module):
    """Grouped queries; with experts, keys and values of low rank, as DeepSeek's."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s, size = s, s.width // s.heads if not s.experts else 128
        self.size = size
        if s.experts:
            self.q: nn.Module = nn.Sequential(
                nn.Linear(s.width, 1536, bias=False), nn.Linear(1536, s.heads * size, bias=False)
            )
            self.kv: nn.Module = nn.Sequential(
                nn.Linear(s.width, 576, bias=False), nn.Linear(576, 2 * s.heads * size, bias=False)
            )
        else:
            self.q = nn.Linear(s.width, s.heads * size, bias=False)
            self.kv = nn.Linear(s.width, 2 * s.kv_heads * size, bias=False)
        self.out = nn.Linear(s.heads * size, s.width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        q = self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, -1, self.size)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.out(h.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A rank's experts, each with as many tokens as the others; and one that all tokens go through."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.here, self.chosen = s.experts // s.spread, s.chosen
        self.router = nn.Linear(s.width, s.experts, bias=False)
        self.shared = Mlp(s.width, s.expert_hidden)
        self.up = nn.Parameter(torch.empty(self.here, s.width, 2 * s.expert_hidden))
        self.down = nn.Parameter(torch.empty(self.here, s.expert_hidden, s.width))

    def forward(self, x: torch.Tensor) -> Any:
        weights = self.router(x).softmax(-1)[..., : self.chosen]
        rows = x.flatten(0, 1).repeat_interleave(self.chosen, 0).view(self.here, -1, x.shape[-1])
        gate, up = torch.bmm(rows, self.up).chunk(2, -1)
        out = torch.bmm(F.silu(gate) * up, self.down).view(*x.shape[:2], self.chosen, -1)
        return self.shared(x) + (out * weights[..., None]).sum(-2)


class Block(nn.Module):
    def __init__(self, s: Shape, i: int) -> None:
        super().__init__()
        self.norm_attn, self.norm_mlp = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.attn = Attention(s)
        self.mlp: nn.Module = Experts(s) if s.experts and i >= s.dense else Mlp(s.width, s.hidden)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attn(self.norm_attn(x))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.width)
        self.blocks = nn.ModuleList(Block(s, i) for i in range(s.depth))
        self.norm, self.head = nn.RMSNorm(s.width), nn.Linear(s.width, s.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_fn(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def spec_of(s: Shape, gpus: int, way: str) -> fsdp.Spec:
    precision = fsdp.Precision(compute=torch.bfloat16)
    schedule = fsdp.Schedule(overlap_update=True)
    if s.experts:
        mesh = {"data": gpus // s.spread, "expert": s.spread}
        placement: Any = {
            "blocks.*.mlp.up": fsdp.zero3("data"), "blocks.*.mlp.down": fsdp.zero3("data"),
            "*": fsdp.zero3("data", "expert"),
        }  # fmt: skip
        return fsdp.Spec(mesh, placement, precision=precision, schedule=schedule)
    if way == "zero3":
        return fsdp.Spec({"data": gpus}, precision=precision, schedule=schedule)
    shard = int(way.removeprefix("hsdp "))
    mesh = {"replica": gpus // shard, "shard": shard}
    return fsdp.Spec(mesh, fsdp.hsdp("replica", "shard"), precision=precision, schedule=schedule)


#: model, GPUs, placement, whether blocks recompute
ROWS = [
    ("Llama 8 B", 8, "zero3", False), ("Llama 8 B", 64, "zero3", False), ("Llama 8 B", 1024, "hsdp 64", False),
    ("Llama 70 B", 64, "zero3", True), ("Llama 70 B", 256, "zero3", True), ("Llama 70 B", 1024, "hsdp 64", True),
    ("Llama 405 B", 1024, "zero3", True), ("Llama 405 B", 4096, "hsdp 512", True),
    ("Llama 405 B", 16384, "hsdp 512", True), ("Llama 405 B", 16384, "zero3", True),
    ("MoE 671 B", 1024, "zero3", True), ("MoE 671 B", 4096, "zero3", True), ("MoE 671 B", 16384, "zero3", True),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    add("--gpus", nargs="*", type=int, default=[])
    add("--hardware", default="H100")
    add("--details", action="store_true")
    args = parser.parse_args()
    print(
        "| model | GPUs | placement | ms a step | tokens/s a GPU | of the peak | GiB | received, GiB | bound by | s |"
    )
    print("|---|---:|---|---:|---:|---:|---:|---:|---|---:|")
    for name, gpus, way, recomputes in ROWS:
        if name not in args.models or (args.gpus and gpus not in args.gpus):
            continue
        begun, shape = time.process_time(), MODELS[name]
        with torch.device("meta"):
            model: Any = Decoder(shape)
        if recomputes:
            model = T.remat(model, "blocks.*")
        tokens = torch.empty(1, shape.seq + 1, dtype=torch.int64, device="meta")
        spec = spec_of(shape, gpus, way)
        found = fsdp.predict(model, loss_fn, tokens, spec, hardware=args.hardware, graph=True, compiled=True)
        size = shape.seq / found.seconds
        forward = 3 * sum(found.traffic.values()) / GIB / 3
        fits = "" if found.fits else " (too large)"
        cells = [name, f"{gpus:,}", way + (", recomputed" if recomputes else ""), f"{1e3 * found.seconds:,.0f}"]
        cells += [f"{size:,.0f}", f"{100 * found.utilization:.0f} %", f"{found.peak / GIB:.0f}{fits}"]
        cells += [f"{forward:,.0f}", found.bound, f"{time.process_time() - begun:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        if args.details:
            print(found)


if __name__ == "__main__":
    main()
