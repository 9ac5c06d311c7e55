"""A small GPT whose layers may be cut along "tp": columns, rows, a vocabulary, norms on cut sequences. One class for
the plain model and for the cut one; `tp` is the axis, or None."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from functional_fsdp.transforms import collectives as C

WIDTH, HEADS, VOCAB, LENGTH = 8, 4, 12, 8
OWN: dict[str, Any] = {
    "*.qkv.*": "FUSED", "*.up.*": ("tp", 0), "*.out.weight": ("tp", 1), "*.down.weight": ("tp", 1),
    "embed.weight": ("tp", 0), "head.weight": ("tp", 0),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.tp = tp
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = HEADS // (self.tp.size() if self.tp else 1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.linear(y, self.out.weight)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(self.up(x)), self.down.weight)


class Block(nn.Module):
    """Between the norms the tokens are whole and the layers cut; at the norms tokens are cut, if `sequence`."""

    def __init__(self, tp: Any, sequence: bool) -> None:
        super().__init__()
        self.tp, self.sequence = tp, sequence
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(tp)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return x
        return C.all_gather(x, self.tp, 1) if self.sequence else C.pvary(x, self.tp)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return x
        return C.reduce_scatter(x, self.tp, 1) if self.sequence else C.psum(x, self.tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.leave(self.attention(self.enter(self.norm1(x)))) + self.attention.out.bias
        return x + self.leave(self.mlp(self.enter(self.norm2(x)))) + self.mlp.down.bias


class GPT(nn.Module):
    def __init__(self, tp: Any = None, sequence: bool = False, depth: int = 2) -> None:
        super().__init__()
        self.tp, self.sequence = tp, sequence and tp is not None
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(tp, self.sequence) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.tp is not None:
            x = C.all_gather(x, self.tp, 1) if self.sequence else C.pvary(x, self.tp)
        return self.loss(self.head(x).flatten(0, 1), targets.flatten())

    def first(self) -> int:
        """The first word of this rank's part of the vocabulary."""
        return self.tp.get_local_rank() * (VOCAB // self.tp.size())

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        place = self.place
        if self.tp is None:
            return self.embed(tokens) + place
        mine = tokens - self.first()
        here = (mine >= 0) & (mine < VOCAB // self.tp.size())
        x = F.embedding(mine.where(here, 0), self.embed.weight) * here[..., None]
        if not self.sequence:
            return C.psum(x, self.tp) + place
        n = LENGTH // self.tp.size()
        return C.reduce_scatter(x, self.tp, 1) + place[self.tp.get_local_rank() * n :][:n]

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return F.cross_entropy(logits, targets)
        top = C.pmax(logits.amax(-1), self.tp)
        total = C.psum((logits - top[:, None]).exp().sum(-1), self.tp)
        mine = targets - self.first()
        here = (mine >= 0) & (mine < VOCAB // self.tp.size())
        chosen = C.psum(logits.gather(-1, mine.where(here, 0)[:, None])[:, 0] * here, self.tp)
        return (total.log() + top - chosen).mean()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return windows[:, :-1], windows[:, 1:]


def loss_fn(model: Any, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(*data)


def plain() -> GPT:
    torch.manual_seed(0)
    return GPT().double()


def cut(tp: Any, sequence: bool) -> GPT:
    """The same weights, whole, in a model that takes its part of them."""
    torch.manual_seed(0)
    return GPT(tp, sequence).double()


def own(sequence: bool) -> dict[str, Any]:
    """How leaves lie along "tp"."""
    import functional_fsdp as fsdp

    rules = {**OWN, "*.qkv.*": fsdp.Along("tp", 0, parts=3)}
    equal = fsdp.Along("tp", grads="sum" if sequence else "equal")
    return {**rules, "*": equal}


def whole_losses(
    steps: int, ranks: int, clip: float, lr: float = 0.1
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, norms and weights of the plain model, on the batches of so many data ranks."""
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.stack([loss_fn(model, batch(step, rank)) for rank in range(ranks)]).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def rank_on(mesh: Any, axes: tuple[str, ...]) -> int:
    """Which of the batches is this rank's: its place along the axes of the data."""
    at = 0
    for axis in axes:
        at = at * mesh[axis].size() + mesh.get_local_rank(axis)
    return at
