"""Whether the code that runs now is being traced: by torch.compile, or by `lower`.

Verbs, optimizers and transforms ask this; when traced they are plain tensor operations and functional collectives
(`_traced`), with no stream, no event and no state in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["KEEPING", "LOWERING", "keeping", "lowering", "tracing"]

LOWERING: list[bool] = []
KEEPING: list[bool] = []


def tracing() -> bool:
    """Whether torch.compile or `lower` is looking."""
    return torch.compiler.is_dynamo_compiling() or bool(LOWERING)


@contextmanager
def lowering() -> Iterator[None]:
    """What runs inside is traced by `lower`."""
    LOWERING.append(True)
    try:
        yield
    finally:
        LOWERING.pop()


@contextmanager
def keeping(residuals: bool) -> Iterator[None]:
    """Whether, inside, a traced `T.vjp` keeps residuals and leaves the weights to `_regather`; else it recomputes."""
    if residuals:
        KEEPING.append(True)
    try:
        yield
    finally:
        if residuals:
            KEEPING.pop()
