"""The model and the data of the small checkpoints in tests/data/peers, made by other packages: see tools/peers."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, STEPS, MORE = 13, 6, 3, 10
LR, DECAY = 1e-2, 0.1


class PeerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + h


class PeerModel(nn.Module):
    """Odd sizes, a tied head, a frozen leaf, and two buffers, one of integers."""

    scale: torch.Tensor
    seen: torch.Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.gate = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
            self.blocks = nn.ModuleList([PeerBlock()])
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
            self.register_buffer("seen", torch.tensor([3, 40000]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.gate(x) * self.scale.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(step: int, rank: int) -> torch.Tensor:
    """int64 [4, 6], another one for each rank and step."""
    at = torch.arange(24).view(4, 6)
    return (at * (3 + rank) + 5 * step + at // 6 * rank) % VOCAB


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
