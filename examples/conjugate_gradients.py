"""Conjugate gradients on sharded vectors. Nobody has the matrix: products are `T.hvp`, or `T.jvp` and `T.pullback`.

    state, x = conjugate_gradients.solve(state, product, b, steps=20, damping=0.1)

A vector is `{bucket: FlatBuffer}`, sharded as gradients are: each rank adds and multiplies its shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

__all__ = ["Vector", "solve"]

Vector = dict[str, fsdp.FlatBuffer]


def solve(
    state: fsdp.State, product: Callable[..., tuple[fsdp.State, Vector]], b: Vector, steps: int, damping: float
) -> tuple[fsdp.State, Vector]:
    """x with (A + damping) x = b. `product(state, v) -> state, A v`, of an A that is symmetric; A + damping > 0."""

    def plus(a: Vector, b: Vector, factor: Any) -> Vector:
        return {name: buffer.but(buffer.local + factor * b[name].local) for name, buffer in a.items()}

    x, r, p = plus(b, b, -1.0), b, b
    state, rr = T.dot(state, r, r)
    for _ in range(steps):
        state, ap = product(state, p)
        ap = plus(ap, p, damping)
        state, curvature = T.dot(state, p, ap)
        length = rr / curvature
        x, r, before = plus(x, p, length), plus(r, ap, -length), rr
        state, rr = T.dot(state, r, r)
        p = plus(r, p, rr / before)
    return state, x
