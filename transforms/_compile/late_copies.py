"""Late copies: what a backward wants of a weight in float8 in another order is copied in the backward.

    forward    y = x @ w.t()                              saved: w, which lies in the arena and is gathered again
    backward   copy = w.t().contiguous().t()  ─▶  dx = dy @ copy

The copy depends on inputs alone, and a product reads it. So Inductor's partitioner would have the forward make it:
copies of the weights of all layers would then be there between forward and backward, whole on each rank. Here such
nodes are marked before the graph is cut in two, as checkpointed regions mark theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from functional_fsdp._verbs.seams import torch_private

from .inductors import graph_pass

__all__ = ["mark_copies", "with_late_copies"]

PASS = "joint_custom_pre_pass"  # of Inductor's settings
VIEWS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int)


def with_late_copies(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of torch.compile, with the pass where Inductor compiles and nobody has another one."""
    mode, own = options.get("mode"), options.get("options")
    named = [name.replace("-", "_") for name in own or ()]
    if options.get("backend", "inductor") != "inductor" or (mode and own) or PASS in named:
        return {**options}
    inductor = torch_private.inductor()
    if getattr(inductor.config, PASS, None) is not None:
        return {**options}
    asked = inductor.list_mode_options(mode, options.get("dynamic")) if mode else own or {}
    return {**{name: value for name, value in options.items() if name != "mode"}, "options": {**asked, PASS: _pass()}}


def mark_copies(graph: fx.Graph) -> None:
    """In a graph of a forward with its backward, have the backward make the copies of inputs in float8."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.clone.default and _is_view_of_input(node.args[0]):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _is_view_of_input(node: Any) -> bool:
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    dtype = getattr(node.meta.get("val"), "dtype", torch.bool)
    return node.op == "placeholder" and bool(dtype.is_floating_point) and dtype.itemsize == 1


@cache
def _pass() -> Any:
    return graph_pass(mark_copies)
