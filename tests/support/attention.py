"""Blocks of an attention and an MLP with dropout, which count how often each ran: what tests of `T.remat` compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from functional_fsdp import transforms as T

CALLS: Counter[str] = Counter()
DEPTH = 3


def called(name: str) -> None:
    """In eager code."""
    if not torch.compiler.is_compiling():
        CALLS[name] += 1


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called("attn")
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).split(x.shape[-1], -1))
        return self.out(F.dropout(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), 0.1))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called("mlp")
        return self.down(self.drop(F.gelu(self.up(x))))


class AttentionBlock(nn.Module):
    """Draws before its parts, in them and between them; `scale` is a buffer that it computes with."""

    scale: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp, self.drop = Attention(width), Mlp(width), nn.Dropout(0.3)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called("block")
        x = x + self.drop(self.attn(self.norm(x)) * self.scale)
        return x + self.drop(self.mlp(self.after(x)).tanh())


class Blocks(nn.Module):
    def __init__(self, width: int = 32, depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


#: what is made of a model, by name, and how often block, attention and MLP run for each call of a block
CHANGES: dict[str, tuple[Callable[[nn.Module], nn.Module], tuple[int, int, int]]] = {
    "remat": (lambda m: T.remat(m, "blocks.*"), (2, 2, 2)),
    "save attn": (lambda m: T.remat(m, "blocks.*", save=("attn",)), (2, 1, 2)),
    "save mlp": (lambda m: T.remat(m, "blocks.*", save=("mlp",)), (2, 2, 1)),
    "offload attn": (lambda m: T.remat(m, "blocks.*", offload=("a*n",)), (2, 1, 2)),
    "both": (lambda m: T.remat(m, "blocks.*", save=("attn",), offload=("mlp",)), (2, 1, 1)),
    "deeper": (lambda m: T.remat(m, "blocks.*", save=("mlp.up",), offload=("attn.qkv", "attn.out")), (2, 2, 2)),
    "only offload": (lambda m: T.offload(m, "blocks.*.mlp"), (1, 1, 1)),
    "offload inputs": (lambda m: T.offload(T.remat(m, "blocks.*"), "blocks.*"), (2, 2, 2)),
}


def calls_of() -> tuple[int, int, int]:
    """How often each ran since the last time."""
    found = CALLS["block"], CALLS["attn"], CALLS["mlp"]
    CALLS.clear()
    return found
