"""What tests of `forward_backward` and of functions like it share: a state to drive, and errors on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from support.models import Stack
from support.problems import mesh_and_placement

import functional_fsdp as fsdp


class Boom(Exception):
    pass


def start(model: nn.Module, preset: str = "zero3", **spec: Any) -> tuple[fsdp.State, nn.Module]:
    mesh, placement = mesh_and_placement(preset)
    params, skeleton = fsdp.functionalize(model)
    optimizer = fsdp.adamw(lr=1e-2, weight_decay=0.1)
    return fsdp.shard(params, fsdp.Spec(mesh, placement, **spec), optimizer, buffers=fsdp.buffers(model)), skeleton


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (fsdp.FsdpError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(*calls: tuple[Any, ...]) -> None:
    """Each of these calls raises an error of the package's, whose kind and text have these words."""
    for call, *words in calls:
        said = raised(call)
        assert all(text in said for text in words), (words, said)


class Dropout(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), 0.5)
        return x
