"""The mixed stack of benchmark.py: state-space, attention and mixture-of-experts blocks in turn, in plain torch.

    blocks.0    Mamba      a causal convolution and a selective scan, by chunks, with a gate
    blocks.1    Block      attention and an MLP, those of the GPT
    blocks.2    Experts    two experts of several for each token, each with room for a fixed number of tokens
    ...                    and again

Every shape follows from the batch's, and nothing is read on the host, so a CUDA graph can hold a step. The scan takes
many kernels, where mamba_ssm has a few: compare rows, not models.

Source: Dao and Gu 2024 (arXiv:2405.21060), listing 1, for the scan; Fedus et al. 2021 (arXiv:2101.03961) for the room.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ["Experts", "Mamba", "scan"]

STATE = 64  # numbers of a channel's state
HEAD = 64  # channels that decay alike
CHUNK = 64  # tokens that a scan takes at once
TAPS = 4  # of the convolution
ACTIVE = 2  # experts of a token
ROOM = 1.25  # of an expert, beside what it has if all get as many tokens


def summed(decay: torch.Tensor) -> torch.Tensor:
    """[..., T] -> [..., T, T]: at (i, j) the sum over j+1 .. i, and -inf where j > i."""
    total = decay.cumsum(-1)
    size = decay.shape[-1]
    after = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(after, -math.inf)


def scan(x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """y_t = s_t c_t, where s_t = exp(decay_t) s_(t-1) + x_t b_tᵀ: a state [P, N] for each head.

    Args:
        x: [B, T, H, P]. decay: [B, T, H], at most 0, float32 or more. b, c: [B, T, N].

    Returns:
        [B, T, H, P]. Within chunks of tokens it is a product of matrices, as attention is; between them go states.
    """
    tokens = x.shape[1]
    chunk = min(chunk, tokens)
    more = -tokens % chunk
    x, decay = F.pad(x, (0, 0, 0, 0, 0, more)), F.pad(decay, (0, 0, 0, more))
    b, c = (F.pad(t, (0, 0, 0, more)).unflatten(1, (-1, chunk)) for t in (b, c))  # [B, C, Q, N]
    x = x.unflatten(1, (-1, chunk)).transpose(2, 3)  # [B, C, H, Q, P]
    decay = decay.unflatten(1, (-1, chunk)).transpose(2, 3)  # [B, C, H, Q]
    total = decay.cumsum(-1)

    within = (c @ b.transpose(-1, -2))[:, :, None] * summed(decay).exp().to(x.dtype)  # [B, C, H, Q, Q]
    y = within @ x
    left = (total[..., -1:] - total).exp().to(x.dtype)  # what is left of a token at its chunk's end
    states = (left[..., None] * x).transpose(-1, -2) @ b[:, :, None]  # [B, C, H, P, N]
    between = summed(F.pad(total[..., -1].transpose(1, 2), (1, 0))).exp()  # [B, H, 1 + C, 1 + C]
    carried = torch.einsum("bhij,bjhpn->bihpn", between[:, :, :-1, 1:], states.to(total.dtype)).to(
        x.dtype
    )  # before a chunk
    y = y + total.exp().to(x.dtype)[..., None] * (c[:, :, None] @ carried.transpose(-1, -2))
    return y.transpose(2, 3).flatten(1, 2)[:, :tokens]


class Mamba(nn.Module):
    """[batch, tokens, width] -> the same: a selective state-space mixer of twice the width, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = 2 * width
        self.heads = self.inner // HEAD
        self.norm, self.norm_out = nn.RMSNorm(width), nn.RMSNorm(self.inner)
        self.into = nn.Linear(width, 2 * self.inner + 2 * STATE + self.heads, bias=False)
        self.convolution = nn.Conv1d(mixed := self.inner + 2 * STATE, mixed, TAPS, groups=mixed)
        self.out = nn.Linear(self.inner, width, bias=False)
        self.log_rate = nn.Parameter(torch.linspace(0, math.log(16), self.heads))
        self.step = nn.Parameter(torch.linspace(-6.9, -2.3, self.heads))  # a softplus of it: 0.001 to 0.1
        self.skip = nn.Parameter(torch.ones(self.heads))

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> Any:
        gate, mixed, step = self.into(self.norm(h)).split((self.inner, self.inner + 2 * STATE, self.heads), -1)
        mixed = F.silu(self.convolution(F.pad(mixed.transpose(1, 2), (TAPS - 1, 0)))).transpose(1, 2)
        x, b, c = mixed.split((self.inner, STATE, STATE), -1)
        x = x.unflatten(-1, (self.heads, HEAD))
        step = F.softplus(step.float() + self.step.float())  # [batch, tokens, heads]
        y = scan(x * step.to(x.dtype)[..., None], -step * self.log_rate.float().exp(), b, c)
        y = (y + self.skip[:, None] * x).flatten(2)
        return h + self.out(self.norm_out(y * F.silu(gate)))


class Experts(nn.Module):
    """[batch, tokens, width] -> the same: an MLP of two experts for each token, and a residual.

    An expert has room for `ROOM` times its share; a token that comes later does without it.
    """

    def __init__(self, width: int, hidden: int, experts: int, room: float = ROOM) -> None:
        super().__init__()
        self.experts, self.room = experts, room
        self.norm, self.router = nn.RMSNorm(width), nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> Any:
        x = self.norm(h).flatten(0, 1)  # [n, width]
        n = len(x)
        room = math.ceil(self.room * ACTIVE * n / self.experts)
        shares, chosen = self.router(x).float().softmax(-1).topk(ACTIVE)  # [n, ACTIVE]
        shares, chosen = shares / shares.sum(-1, keepdim=True), chosen.T.flatten()  # first choices come first
        of_expert = chosen[:, None] == torch.arange(self.experts, device=x.device)
        place = (of_expert.cumsum(0) * of_expert).sum(1) - 1  # among those that chose the same
        slot = torch.where(place < room, chosen * room + place, self.experts * room)  # or the one that nobody computes

        source = torch.full((self.experts * room + 1,), n, device=x.device)  # whose token a slot has; n: nobody's
        source = source.scatter(0, slot, torch.arange(n, device=x.device).repeat(ACTIVE))
        inputs = F.pad(x, (0, 0, 0, 1)).index_select(0, source[:-1]).unflatten(0, (self.experts, room))
        gate, up = (inputs @ self.gate_up).chunk(2, -1)
        outputs = F.pad(((F.silu(gate) * up) @ self.down).flatten(0, 1), (0, 0, 0, 1))
        mine = outputs.index_select(0, slot).unflatten(0, (ACTIVE, n))
        return h + (mine * shares.T[..., None].to(x.dtype)).sum(0).view_as(h)
