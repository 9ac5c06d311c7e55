"""collectives: what a model's own ranks send each other along a mesh axis, as pure functions with transposes.

A value is *equal* along an axis, where its ranks hold the same, or *varying*, where each holds its own. The functions
are linear. A derivative of one is its transpose, which is again one of them:

| function                    | from -> to       | transpose                  | also known as                   |
|-----------------------------|------------------|----------------------------|---------------------------------|
| `psum(x)`                   | varying -> equal | `pvary`                    | Megatron's g                    |
| `pvary(x)`                  | equal -> varying | `psum`                     | Megatron's f; shard_map's pcast |
| `all_gather(x, dim=)`       | varying          | `reduce_scatter`           |                                 |
| `reduce_scatter(x, dim=)`   | varying          | `all_gather`               | shard_map's psum_scatter        |
| `all_gather(x, equal=True)` | varying -> equal | `split`                    | all_gather_invariant            |
| `split(x, dim=)`            | equal -> varying | `all_gather(equal=True)`   | a slice                         |
| `all_to_all(x, cut, join)`  | varying          | `all_to_all(x, join, cut)` | Ulysses' exchange               |
| `ppermute(x, pairs)`        | varying          | `ppermute` of pairs back   | a ring's shift                  |

So a loss that is equal along an axis gives each rank the gradient of that one loss, not of a sum over its ranks. A
parameter that is equal, and meets a value that varies, has a gradient of which each rank has a summand: `Spec(own=)`
adds them up, or `pvary` of the parameter does.

Source: the rules are those of JAX's shard_map with "varying manual axes" (its documentation, "shard_map"); f and g are
those of Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from functional_fsdp import SpecError, TreeError
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import traced_as

__all__ = [
    *("all_gather", "all_to_all", "dropout", "pmax", "pmean", "ppermute", "psum", "pvary"),
    *("reduce_scatter", "split"),
]

Pairs = tuple[tuple[int, int], ...]


def psum(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """The sum over the ranks of an axis: varying [...] -> equal [...]. Its transpose is `pvary`: nothing is sent.

    Args:
        axis: one axis of a mesh, as `mesh["tp"]`; take it once, not in each call.

    Raises:
        SpecError: a mesh of several axes.

    Collective: one all-reduce along the axis, on the stream of the caller, in the forward only. Every rank of the axis
    calls it, in the same order.

    Example, the end of a layer whose input is cut, `x [n, m/tp]` and `w [m/tp, k]`:
    `h = T.collectives.psum(x @ w, tp)`.
    """
    return _call(x, _op("psum", axis))


def pvary(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """The same values, from here on each rank's own: equal [...] -> varying [...]. Its transpose is `psum`.

    It says that what follows differs along the axis. Without it the gradient of `x` is a summand on each rank.

    Raises:
        SpecError: a mesh of several axes.

    Collective: none; in the backward one all-reduce along the axis.

    Example, the begin of a layer whose output is cut, `w [m, k/tp]`: `y = T.collectives.pvary(x, tp) @ w`.
    """
    return _call(x, _op("pvary", axis))


def pmean(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """The mean over the ranks of an axis: varying [...] -> equal [...].

    Raises:
        SpecError: a mesh of several axes.

    Collective: as `psum`.

    Example, a loss over tokens that are cut along "cp": `loss = T.collectives.pmean(loss, cp)`.
    """
    return psum(x, axis) / _op("pmean", axis).n


def pmax(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """The largest of each element over the ranks of an axis: varying [...] -> equal [...]. It has no derivative: zero.

    Raises:
        SpecError: a mesh of several axes.

    Collective: one all-reduce along the axis.

    Example, what a softmax over a cut vocabulary subtracts: `top = T.collectives.pmax(logits.amax(-1), tp)`.
    """
    return _call(x.detach(), _op("pmax", axis))


def all_gather(x: torch.Tensor, axis: DeviceMesh, dim: int = 0, *, equal: bool = False) -> torch.Tensor:
    """What all ranks of an axis have, end to end: varying [..., n, ...] -> [..., ranks · n, ...].

    Args:
        dim: along which ranks' parts lie.
        equal: what follows is the same on every rank of the axis, so the gradient is, too: the transpose is then
            `split`, and sends nothing. Otherwise it is `reduce_scatter`: each rank has a summand.

    Raises:
        SpecError: a mesh of several axes. TreeError: there is no such dim.

    Collective: one all-gather along the axis; in the backward one reduce-scatter, or none.

    Example, the tokens of a sequence that is cut along "tp": `x = T.collectives.all_gather(x, tp, 1)`.
    """
    op = _op("all_gather", axis, _dim(x, dim, "all_gather"))
    return _call(x, replace(op, kind="all_gather_equal") if equal else op)


def split(x: torch.Tensor, axis: DeviceMesh, dim: int = 0) -> torch.Tensor:
    """This rank's slice of what all ranks of an axis hold: equal [..., ranks · n, ...] -> varying [..., n, ...].

    Raises:
        SpecError: a mesh of several axes. TreeError: there is no such dim, or it does not divide by the ranks.

    Collective: none; in the backward one all-gather along the axis.

    Example, where the tokens of a sequence part: `x = T.collectives.split(x, tp, 1)`.
    """
    op = _op("split", axis, _dim(x, dim, "split"))
    _divides(x, op.dim, op.n, "split")
    return _call(x, op)


def reduce_scatter(x: torch.Tensor, axis: DeviceMesh, dim: int = 0) -> torch.Tensor:
    """This rank's slice of the sum over the ranks of an axis: varying [..., ranks · n, ...] -> varying [..., n, ...].

    Raises:
        SpecError: a mesh of several axes. TreeError: there is no such dim, or it does not divide by the ranks.

    Collective: one reduce-scatter along the axis; in the backward one all-gather.

    Example, the end of a layer whose input is cut, before norms on cut sequences:
    `h = T.collectives.reduce_scatter(x @ w, tp, 1)`.
    """
    op = _op("reduce_scatter", axis, _dim(x, dim, "reduce_scatter"))
    _divides(x, op.dim, op.n, "reduce_scatter")
    return _call(x, op)


def all_to_all(x: torch.Tensor, axis: DeviceMesh, cut: int = 0, join: int = 0) -> torch.Tensor:
    """To each rank of an axis its slice along one dim, joined along another: [..., ranks · n, ..., m, ...] ->
    [..., n, ..., ranks · m, ...], or of the same shape where both are one dim.

    Args:
        cut: the dim whose slices go to the ranks. join: the dim along which what comes lies, in order of ranks.

    Raises:
        SpecError: a mesh of several axes. TreeError: there is no such dim, or `cut` does not divide by the ranks.

    Collective: one all-to-all along the axis; in the backward one that brings everything back.

    Example, from cut sequences [b, s/cp, h, d] to cut heads [b, s, h/cp, d]:
    `q = T.collectives.all_to_all(q, cp, cut=2, join=1)`.
    """
    dims = _dim(x, cut, "all_to_all"), _dim(x, join, "all_to_all")
    op = _op("all_to_all", axis, *dims)
    _divides(x, op.dim, op.n, "all_to_all")
    return _call(x, op)


def dropout(x: torch.Tensor, p: float, axis: DeviceMesh, dim: int, training: bool = True) -> torch.Tensor:
    """Dropout of a tensor that is cut along `dim`, by the mask that the whole one would have: varying -> varying.

    Ranks of the axis draw the same numbers, those of the whole [..., ranks · n, ...], and each takes its part: driven
    steps seed them alike (`Ranks.drawer`). So masks are those of the plain model, where it draws as much.

    Raises:
        SpecError: a mesh of several axes. TreeError: there is no such dim.

    Collective: none.

    Example, of probabilities [b, h/tp, s, s]: `p = T.collectives.dropout(p, 0.1, tp, 1, self.training)`.
    """
    op = _op("dropout", axis, _dim(x, dim, "dropout"))
    if not training or p == 0.0:
        return x
    shape = list(x.shape)
    shape[op.dim] *= op.n
    kept = F.dropout(x.new_ones(shape), p)
    return x * kept.chunk(op.n, op.dim)[op.group.rank()]


def ppermute(x: torch.Tensor, axis: DeviceMesh, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """What another rank of an axis has: varying [...] -> varying [...], of the same shape on every rank.

    Args:
        pairs: (from, to), ranks along the axis; no rank sends twice, none gets twice. Who gets nothing has zeros.

    Raises:
        SpecError: a mesh of several axes; a rank that there is not, or that is there twice.

    Collective: one message for each pair; in the backward one in the other direction.

    Example, a ring: `k = T.collectives.ppermute(k, cp, [(r, (r + 1) % n) for r in range(n)])`.
    """
    op = _op("ppermute", axis)
    chosen = tuple((int(a), int(b)) for a, b in pairs)
    for which in zip(*chosen, strict=True):
        if len({*which}) < len(which) or not {*which} <= {*range(op.n)}:
            raise SpecError(
                f"ppermute(pairs={list(pairs)!r}): expected pairs (from, to) of ranks 0 to {op.n - 1} of the "
                "axis, in which none sends twice and none gets twice."
            )
    return _call(x, replace(op, pairs=chosen))


# ---------------------------------------------------------------- a collective, and its transpose

_TRANSPOSED = {
    "psum": "pvary", "pvary": "psum", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather",
    "all_gather_equal": "split", "split": "all_gather_equal", "all_to_all": "all_to_all", "ppermute": "ppermute",
}  # fmt: skip


@dataclass(frozen=True)
class _Op:
    """A linear function of a tensor along a group of ranks, those of an axis. dim, join: of the tensor, from its
    beginning."""

    kind: str
    group: Any
    axis: str
    dim: int = 0
    join: int = 0
    pairs: Pairs = ()

    @property
    def n(self) -> int:
        return int(self.group.size())

    def transposed(self) -> _Op:
        kind = _TRANSPOSED[self.kind]
        return _Op(kind, self.group, self.axis, *self._back, tuple((b, a) for a, b in self.pairs))

    @property
    def _back(self) -> tuple[int, int]:
        return (self.join, self.dim) if self.kind == "all_to_all" else (self.dim, self.join)

    def of_batch(self) -> _Op:
        """For a tensor with one more dim, the first."""
        return replace(self, dim=self.dim + 1, join=self.join + 1)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """What it makes of a tensor: in eager code, and of fake tensors and in graphs."""
        n, dim = self.n, self.dim
        if self.kind == "pvary" or n == 1:
            return x.view_as(x)
        if self.kind == "split":
            return x.chunk(n, dim)[self.group.rank()].clone(memory_format=torch.contiguous_format)
        send = _sender(x, self)
        if self.kind in ("psum", "pmax"):
            return send.all_reduce(x.contiguous(), "sum" if self.kind == "psum" else "max")
        if self.kind == "ppermute":
            return send.permute(x.contiguous(), self.pairs)
        if self.kind in ("all_gather", "all_gather_equal"):
            return _joined(send.all_gather(x.contiguous()).view(n, *x.shape), dim)
        parts = _cut(x, n, dim)
        if self.kind == "reduce_scatter":
            return send.reduce_scatter(parts)[0]
        return _joined(send.all_to_all(parts), self.join)


class _Compiled(torch.autograd.Function):
    """As Dynamo traces it, which knows of no `jvp`."""

    @staticmethod
    def forward(x: torch.Tensor, op: _Op) -> torch.Tensor:
        return op.of(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op = inputs[1]
        if ctx.op.kind == "pmax":
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _call(grad, ctx.op.transposed()), None


class _Collective(_Compiled):
    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        return _call(tangent, ctx.op)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, op: _Op) -> Any:
        return _call(x.movedim(in_dims[0], 0), op.of_batch()), 0


def _in_graph(x: torch.Tensor, op: _Op) -> torch.Tensor:
    found: torch.Tensor = _Compiled.apply(x, op)
    return found


@traced_as(_in_graph)
def _call(x: torch.Tensor, op: _Op) -> torch.Tensor:
    found: torch.Tensor = _Collective.apply(x, op)
    return found


@traced_as(lambda x, op: _Traced(op.group))
def _sender(x: torch.Tensor, op: _Op) -> _Eager | _Traced:
    return _Traced(op.group) if isinstance(x, torch_private.FakeTensor) else _Eager(op)


class _Eager:
    """Collectives of torch.distributed, on the caller's stream."""

    def __init__(self, op: _Op) -> None:
        self.group = op.group
        counted = getattr(op.group, "note", None)  # simulated ranks count what they send
        self.note: Any = partial(counted, op.axis) if counted else lambda kind, x: None

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        out = x.clone()
        self.note("all_reduce", out)
        dist.all_reduce(out, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.group)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.group.size() * x.numel())
        self.note("all_gather", out)
        torch_private.all_gather_single(out, x.view(-1), group=self.group)
        return out

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(parts[:1])
        self.note("reduce_scatter", parts)
        torch_private.reduce_scatter_single(out, parts, group=self.group)
        return out

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(parts)
        self.note("all_to_all", parts)
        dist.all_to_all_single(out, parts, group=self.group)
        return out

    def permute(self, x: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        me, out = self.group.rank(), None
        calls = []
        for source, to in pairs:
            if source == to == me:
                out = x.clone()
            elif source == me:
                calls.append(dist.P2POp(dist.isend, x, group=self.group, group_peer=to))
            elif to == me:
                out = torch.empty_like(x)
                self.note("permute", out)
                calls.append(dist.P2POp(dist.irecv, out, group=self.group, group_peer=source))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        return torch.zeros_like(x) if out is None else out


class _Traced:
    """The same as operations of a graph."""

    def __init__(self, group: Any) -> None:
        self.group, self.name = group, group.group_name
        self.ops: Any = torch_private.functional_collectives

    def done(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = self.ops.wait_tensor(x)
        return waited

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        return self.done(self.ops.all_reduce(x, op, self.name))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.done(self.ops.all_gather_into_tensor(x.reshape(-1), self.group.size(), self.name))

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        return self.done(self.ops.reduce_scatter_tensor(parts, "sum", self.group.size(), self.name))

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        ones = [1] * self.group.size()
        return self.done(self.ops.all_to_all_single(parts, ones, ones, self.name))

    def permute(self, x: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        me, ranks = self.group.rank(), range(self.group.size())
        came, sent = [int((r, me) in pairs) for r in ranks], [int((me, r) in pairs) for r in ranks]
        got = self.done(self.ops.all_to_all_single(x[None][: sum(sent)], came, sent, self.name))
        return got[0] if sum(came) else torch.zeros_like(x)


def _cut(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """[..., n · m, ...] -> [n, ..., m, ...]"""
    return torch.stack(x.chunk(n, dim))


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """[n, ..., m, ...] -> [..., n · m, ...]"""
    return parts.flatten(0, 1) if dim == 0 else parts.movedim(0, dim).flatten(dim, dim + 1)


# ---------------------------------------------------------------- what is given


def _op(what: str, axis: Any, dim: int = 0, join: int = 0) -> _Op:
    if isinstance(axis, DeviceMesh):
        names = axis.mesh_dim_names or tuple(map(str, axis.shape))
        if axis.ndim == 1:
            return _Op(what, axis.get_group(), names[0], dim, join)
        raise SpecError(f'{what}(axis): a mesh of the axes {names}; expected one axis of it, as mesh["{names[-1]}"].')
    if isinstance(axis, dist.ProcessGroup):
        return _Op(what, axis, "", dim, join)
    raise SpecError(f'{what}(axis={axis!r}): expected one axis of a mesh, as mesh["tp"].')


def _dim(x: torch.Tensor, dim: Any, what: str) -> int:
    if not isinstance(dim, Integral) or not -x.ndim <= int(dim) < x.ndim:
        raise TreeError(f"{what}(dim={dim!r}): the tensor {list(x.shape)} has dims {-x.ndim} to {x.ndim - 1}.")
    return int(dim) % x.ndim


def _divides(x: torch.Tensor, dim: int, n: int, what: str) -> None:
    if x.shape[dim] % n:
        raise TreeError(
            f"{what}: dim {dim} of the tensor {list(x.shape)} has {x.shape[dim]} elements, which do not divide by the "
            f"{n} ranks of the axis. Pad it, or choose another dim."
        )
