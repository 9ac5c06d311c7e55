"""Random losses that take derivatives by inputs: grad, vjp, jvp, vmap, Jacobians and dual numbers, nested."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

WIDTH = 4
Field = Callable[[torch.Tensor], torch.Tensor]  # [WIDTH] -> [WIDTH]


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH, eps=0.5),
            nn.Linear(WIDTH, 5),
            nn.Linear(5, WIDTH, bias=False),
        )
        self.drop = nn.Dropout(rate)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.up(self.norm(x)))
        y = x + self.drop(self.down(h))
        return (y if shift is None else y + shift), h


class Net(nn.Module):
    """Blocks of two outputs, a weight that two modules have, one of no module below, and frozen ones."""

    def __init__(self, blocks: int = 2, rate: float = 0.0, tied: bool = False, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(blocks)
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.double()
        if tied:
            self.head.weight = self.inp.weight
        for path, p in self.named_parameters():
            p.requires_grad_(not path.startswith(frozen) if frozen else True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, shift = F.softplus(self.inp(x)), None
        for block in self.blocks:
            x, h = block(x, shift)
            shift = h[..., :WIDTH]
        return self.head(x) * self.scale


class Random:
    """A case: a model, and a loss of it that a seed chooses."""

    def __init__(self, seed: int, depth: int = 3) -> None:
        self.seed, r = seed, random.Random(seed)
        self.rate = r.choice((0.0, 0.0, 0.3))
        self.blocks, self.tied = r.choice((1, 2, 3)), r.random() < 0.4
        self.frozen = r.choice(((), (), ("inp",), ("blocks.0.up",), ("scale", "head"), ("blocks.0",)))
        self.units = r.choice((None, None, ["blocks.*", "inp", "head"], ["blocks.*.up", "blocks.*.down", "head"]))
        self.prefetch, self.microbatches = r.randrange(4), r.choice((1, 1, 2))
        self.terms = [self.field(r, r.randint(1, depth)) for _ in range(r.choice((1, 1, 2)))]

    def module(self) -> Net:
        return Net(self.blocks, self.rate, self.tied, self.frozen)

    def loss(self, model: Any, seed: int) -> torch.Tensor:
        found = [of(model)(numbers(WIDTH, seed=seed + i)).sin().sum() for i, (_, of) in enumerate(self.terms)]
        if self.seed % 3 == 0 or self.frozen:
            found.append(model(numbers(2, WIDTH, seed=seed)).square().mean())
        return torch.stack(found).sum()

    def __repr__(self) -> str:
        terms = " + ".join(name for name, _ in self.terms)
        model = f"rate {self.rate}, {self.blocks} blocks, tied {self.tied}, frozen {self.frozen}, units {self.units}"
        return f"{self.seed}: {terms}; {model}, prefetch {self.prefetch}, {self.microbatches} microbatches"

    def field(self, r: random.Random, depth: int) -> tuple[str, Callable[[Any], Field]]:
        """Its name, and the function of a model that gives it."""
        if not depth:
            return r.choice(LEAVES)
        name, inner = self.field(r, depth - 1)
        forward = any(word in name for word in ("jvp", "jacfwd", "dual"))
        which = r.choice([w for w in WRAPS if w != "dual" or not forward])  # dual numbers do not nest
        wrap = WRAPS[which]
        if r.random() < 0.2:
            other, beside = self.field(r, 0)
            return f"{which}({name} + {other})", lambda m: wrap(lambda x: inner(m)(x) + beside(m)(x.cos()))
        return f"{which}({name})", lambda m: wrap(inner(m))


LEAVES: list[tuple[str, Callable[[Any], Field]]] = [
    ("model", lambda m: m),
    ("twice", lambda m: lambda x: m(m(x).tanh())),
    ("block", lambda m: lambda x: m.blocks[0](x)[0] * x),
    ("head", lambda m: lambda x: m.head(x.sin()) * m.scale),
]


def _dual(f: Field) -> Field:
    def along(x: torch.Tensor) -> torch.Tensor:
        if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
            return jvp(f, (x,), (x.cos(),))[1]
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos())))
            assert found.tangent is not None
            return found.primal + found.tangent

    return along


def _twice(f: Field) -> Field:
    def both(x: torch.Tensor) -> torch.Tensor:
        y, back = vjp(f, x)  # type: ignore[misc]
        return back(y)[0] + back(x)[0]

    return both


def _along(f: Field) -> Field:
    def both(x: torch.Tensor) -> torch.Tensor:
        y, moved = jvp(f, (x,), (x.cos(),))  # type: ignore[misc]
        return y + moved.sin()

    return both


WRAPS: dict[str, Callable[[Field], Field]] = {
    "grad": lambda f: grad(lambda x: f(x).square().sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](x.sin())[0],
    "vjp twice": _twice,
    "jvp": _along,
    "vmap": lambda f: lambda x: vmap(f, randomness="different")(torch.stack([x, x.sin(), 2 * x])).mean(0),
    "jacrev": lambda f: lambda x: jacrev(f)(x).sum(0),
    "jacfwd": lambda f: lambda x: jacfwd(f, randomness="same")(x).sum(1),
    "dual": _dual,
}
