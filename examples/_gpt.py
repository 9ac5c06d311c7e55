"""A small GPT that fits on one screen: rotary positions, RMSNorm, causal attention, GELU, an untied head.

Nothing in it knows that it will be sharded. The blocks sit in one list, so that every `blocks.i` becomes a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab: int = 256  # bytes
    width: int = 128
    depth: int = 4
    heads: int = 4
    dropout: float = 0.0


def rotary(length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each [length, head_dim / 2]."""
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    rates = 10_000 ** -torch.linspace(0, 1, head_dim // 2, device=like.device)
    angles = torch.outer(positions, rates)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.out = nn.Linear(c.width, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(rearrange(y, "b h t d -> b t (h d)"))


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.up = nn.Linear(c.width, 4 * c.width, bias=False)
        self.down = nn.Linear(4 * c.width, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm_attention, self.attention = nn.RMSNorm(c.width), Attention(c)
        self.norm_mlp, self.mlp = nn.RMSNorm(c.width), MLP(c)
        self.dropout = nn.Dropout(c.dropout) if c.dropout else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """Bytes [b, t] -> logits [b, t, vocab], in float32 at least."""

    def __init__(self, c: Config):
        super().__init__()
        self.head_dim = c.width // c.heads
        self.embed = nn.Embedding(c.vocab, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.norm = nn.RMSNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def features(self, tokens: Tensor) -> Tensor:
        """What the head is given."""
        x = self.embed(tokens)
        cos, sin = rotary(tokens.shape[1], self.head_dim, like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.features(tokens))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
