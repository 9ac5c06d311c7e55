"""Graphs through Inductor, in the order that they have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from functional_fsdp._seams import torch_private

__all__ = ["graph_pass", "through_inductor"]

#: the step's own order is the plan's: gathers one use ahead, reductions waited for when the next one comes
ORDERED = {"reorder_for_peak_memory": False, "reorder_for_locality": False}


def through_inductor(
    module: fx.GraphModule, inputs: list[torch.Tensor], config: dict[str, Any], change: Callable[[fx.Graph], Any],
    *key: Any,
) -> Callable[..., Any]:  # fmt: skip
    """A function that does what the module does.

    Args:
        config: Inductor's settings.
        change: made to the graph before it is lowered; one of this package's functions.
        key: what it goes by, beside the graph, for caches on disk.
    """
    settings = ORDERED | config | {"post_grad_custom_pre_pass": graph_pass(change, *key)}
    compiled: Callable[..., Any] = torch_private.inductor().compile_fx.compile_fx(
        module, inputs, config_patches=settings
    )
    return compiled


def graph_pass(change: Callable[[fx.Graph], Any], *key: Any) -> Any:
    """A pass of Inductor's that makes a change to graphs; one of this package's functions.

    Args:
        key: what it goes by, beside its module's code, for caches on disk.
    """
    passes = torch_private.inductor().custom_graph_pass
    files = (str(sys.modules[change.__module__].__file__),)

    class Pass(passes.CustomGraphPass):  # type: ignore[misc, name-defined]
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> Any:
            return passes.get_hash_for_files(files, repr(key))

    return Pass()
