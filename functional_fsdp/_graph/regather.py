"""Residuals that point at the second gather: a pass over the graph of a traced step.

    forward    w1 = all_gather(shard) ──▶ y = x @ w1          backward as traced     dx = dy @ w1.t()
    backward   w2 = all_gather(shard) ──▶ (nobody)            after the pass         dx = dy @ w2.t()

A step traced whole, with its vjp inside, has no autograd that would save tensors: the backward uses the forward's
weights, which then stay gathered in between. Computing the unit again from the second gather would release them, for
the price of another forward. This pass costs nothing: whatever uses the first gather, or a view of it, after the
mark that `T.vjp` left, uses the second one. The values are the same: main weights do not change within a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from .._common.errors import ScheduleError

__all__ = ["again", "is_view", "point_at_second_gathers"]

aten = torch.ops.aten
#: what leads from a gathered bucket to a weight as compute sees it
VIEWS = {
    aten.alias.default, aten.as_strided.default, aten.detach.default, aten.expand.default, aten.permute.default,
    aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
    aten.squeeze.dim, aten.squeeze.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    aten.view.default, aten._unsafe_view.default, aten.view.dtype, aten.unbind.int, aten.lift_fresh.default,
    aten.squeeze.dims, aten.diagonal.default, aten.unfold.default, aten.view_as_real.default, aten.narrow.default,
    aten.view_as_complex.default, aten.movedim.int, aten.unsafe_split.Tensor, aten.chunk.default, aten.real.default,
}  # fmt: skip


@torch.library.custom_op("functional_fsdp::again", mutates_args=())
def again(cotangent: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    """A mark in the graph: from here on `second` stands for `first`. Returns the cotangent, copied."""
    return cotangent.clone()


@again.register_fake
def _(cotangent: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(cotangent)


def point_at_second_gathers(graph: fx.Graph) -> int:
    """Carry out what the marks say, in place, and take them out. Returns how many uses were changed."""
    changed = 0
    for mark in [node for node in graph.nodes if node.target is torch.ops.functional_fsdp.again.default]:
        cotangent, first, second = mark.args
        gathers = dict(zip(map(_root, first), map(_root, second), strict=True))
        after = {node: i for i, node in enumerate(graph.nodes)}
        for old, new in gathers.items():
            if old is not new:
                if not _same(old, new):
                    raise ScheduleError(
                        "T.compile: a pullback was given other weights than its forward had; expected the unit's, "
                        "gathered again. torch.compile(train_step, fullgraph=True) runs the function again from any."
                    )
                changed += _replace(graph, old, new, mark, after)
        mark.replace_all_uses_with(cotangent)
        graph.erase_node(mark)
    return changed


def is_view(node: fx.Node) -> bool:
    """Whether a node's value lies in the bytes of its first argument's."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])  # of what was split
    return node.op == "call_function" and node.target in VIEWS


def _root(node: fx.Node) -> fx.Node:
    """The node whose views this one is."""
    while is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _same(a: Any, b: Any) -> bool:
    """Whether two values are made in the same way from the same inputs: one gather, issued twice."""
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return bool(a == b)
    if a is b:
        return True
    called = a.op == b.op == "call_function" and a.target == b.target
    return called and _same(a.args, b.args) and a.kwargs == b.kwargs


def _tree(root: fx.Node) -> Iterable[fx.Node]:
    """A node and all its views."""
    left = [root]
    while left:
        node = left.pop()
        yield node
        left += [user for user in node.users if is_view(user) and user.args[0] is node]


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node, mark: fx.Node, after: dict[fx.Node, int]) -> int:
    """Uses of `old` and its views after the mark: of `new` and its views."""
    twins = {old: new}

    def twin(node: fx.Node) -> fx.Node:
        if node not in twins:
            source: Any = node.args[0]
            base = twin(source)
            with graph.inserting_before(mark):
                copy = graph.node_copy(node, lambda n: base if n is source else n)
            twins[node] = copy
        return twins[node]

    changed = 0
    for node in [node for node in _tree(old) if after[node] < after[mark]]:
        for user in [user for user in node.users if user in after and after[user] > after[mark]]:
            user.replace_input_with(node, twin(node))
            changed += 1
    return changed
