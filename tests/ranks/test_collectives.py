"""Collectives of a model's own, along an axis: values, transposes, tangents and batches, beside one big tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.driven import refused
from support.ranks import each_rank
from torch.distributed.device_mesh import DeviceMesh

import functional_fsdp as fsdp
from functional_fsdp import launch, simulate
from functional_fsdp.transforms import collectives as C

Fn = Callable[[torch.Tensor], torch.Tensor]
LINEAR = (
    *("psum", "pmean", "pvary", "all_gather", "all_gather_equal", "split", "reduce_scatter"),
    *("all_to_all", "all_to_all_same", "ring", "shift"),
)


def function(name: str, tp: DeviceMesh) -> Fn:
    n = tp.size()
    ring = [(r, (r + 1) % n) for r in range(n)]
    return {
        "psum": lambda x: C.psum(x, tp),
        "pmean": lambda x: C.pmean(x, tp),
        "pmax": lambda x: C.pmax(x, tp),
        "pvary": lambda x: C.pvary(x, tp),
        "all_gather": lambda x: C.all_gather(x, tp, 1),
        "all_gather_equal": lambda x: C.all_gather(x, tp, -1, equal=True),
        "split": lambda x: C.split(x, tp, 1),
        "reduce_scatter": lambda x: C.reduce_scatter(x, tp, 0),
        "all_to_all": lambda x: C.all_to_all(x, tp, cut=1, join=0),
        "all_to_all_same": lambda x: C.all_to_all(x, tp, cut=1, join=1),
        "ring": lambda x: C.ppermute(x, tp, ring),
        "shift": lambda x: C.ppermute(x, tp, ring[:-1]),
    }[name]


def whole(name: str, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank gets, from what all of them have."""
    n = len(xs)
    zero = torch.zeros_like(xs[0])
    cut = [x.chunk(n, 1) for x in xs]
    return {
        "psum": lambda: [torch.stack(xs).sum(0)] * n,
        "pmean": lambda: [torch.stack(xs).mean(0)] * n,
        "pmax": lambda: [torch.stack(xs).amax(0)] * n,
        "pvary": lambda: xs,
        "all_gather": lambda: [torch.cat(xs, 1)] * n,
        "all_gather_equal": lambda: [torch.cat(xs, 2)] * n,
        "split": lambda: [cut[r][r] for r in range(n)],
        "reduce_scatter": lambda: [*torch.stack(xs).sum(0).chunk(n, 0)],
        "all_to_all": lambda: [torch.cat([cut[s][r] for s in range(n)], 0) for r in range(n)],
        "all_to_all_same": lambda: [torch.cat([cut[s][r] for s in range(n)], 1) for r in range(n)],
        "ring": lambda: [xs[r - 1] for r in range(n)],
        "shift": lambda: [xs[r - 1] if r else zero for r in range(n)],
    }[name]()


def given(rank: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n * 2, n * 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + rank))


def tried(name: str) -> dict[str, torch.Tensor]:
    tp = fsdp.local_mesh(tp=-1)["tp"]
    fn, n, rank = function(name, tp), tp.size(), tp.get_local_rank()
    x = given(rank, n)
    out = {"value": fn(x)}
    out["batch"] = torch.func.vmap(fn, in_dims=2, out_dims=1)(torch.stack([x, 3 * x], 2)).select(1, 1)
    if name == "pmax":
        return out
    cotangent = torch.randn(out["value"].shape, dtype=x.dtype, generator=torch.Generator().manual_seed(9 + rank))
    pullback: Any = torch.func.vjp(fn, x)[1]
    out["cotangent"], out["transpose"] = cotangent, pullback(cotangent)[0]
    out["tangent"] = torch.func.jvp(fn, (x,), (2 * x,))[1]
    leaf = x.clone().requires_grad_()
    (out["autograd"],) = torch.autograd.grad(fn(leaf), leaf, cotangent)
    out["samples"] = torch.func.vmap(torch.func.grad(lambda x: fn(x).square().sum()))(torch.stack([x, 3 * x]))
    (first,) = torch.autograd.grad(fn(leaf).pow(3).sum(), leaf, create_graph=True)
    (out["second"],) = torch.autograd.grad(first.sum(), leaf)
    return out


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", [*LINEAR, "pmax"])
def test_values_transposes_tangents_and_batches(name: str, n: int) -> None:
    found = launch(tried, (name,), nprocs=n, simulate=True)
    xs = [given(rank, n) for rank in range(n)]
    for rank, want in enumerate(whole(name, xs)):
        torch.testing.assert_close(found[rank]["value"], want, rtol=0, atol=1e-14)
        torch.testing.assert_close(found[rank]["batch"], 3 * want, rtol=0, atol=1e-14)
    if name == "pmax":
        return
    for rank in range(n):
        torch.testing.assert_close(found[rank]["tangent"], 2 * found[rank]["value"])
        assert torch.equal(found[rank]["autograd"], found[rank]["transpose"])
        assert found[rank]["samples"].shape == (2, *xs[0].shape)
        assert found[rank]["second"].shape == xs[0].shape


@pytest.mark.parametrize(
    "name", [n for n in LINEAR if n not in ("psum", "pmean", "pvary", "all_gather_equal", "split")]
)
def test_a_transpose_is_the_transpose_of_all_ranks_together(name: str) -> None:
    """The sum over ranks of <cotangent, f(x)> and of <transpose of cotangent, x> are one number."""
    found = launch(tried, (name,), nprocs=3, simulate=True)
    left = sum(float((one["cotangent"] * one["value"]).sum()) for one in found)
    right = sum(float((one["transpose"] * given(rank, 3)).sum()) for rank, one in enumerate(found))
    assert left == pytest.approx(right, abs=1e-12)


def layers(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, tp: DeviceMesh | None) -> torch.Tensor:
    """Two cut matrices between equal values, then a cut sum of cut rows."""
    if tp is None:
        return ((x @ up).tanh() @ down).square().sum()
    h = C.psum((C.pvary(x, tp) @ up).tanh() @ down, tp)
    return C.psum(C.split(h, tp).square().sum(), tp)


def cut_layers() -> Any:
    tp = fsdp.local_mesh(tp=-1)["tp"]
    x, up, down = (t.double() for t in (torch.ones(4, 3).cumsum(0), torch.eye(3, 8) + 0.1, torch.ones(8, 2) / 3))
    mine = up.chunk(tp.size(), 1)[tp.get_local_rank()], down.chunk(tp.size(), 0)[tp.get_local_rank()]
    return torch.func.grad_and_value(lambda a, b, c: layers(a, b, c, tp), argnums=(0, 1, 2))(x, *mine)


@pytest.mark.parametrize(("nprocs", "simulated"), [(2, True), (4, True), (2, False)])
def test_gradients_of_an_equal_loss_are_those_of_one_loss(nprocs: int, simulated: bool) -> None:
    found = launch(cut_layers, (), nprocs=nprocs, simulate=simulated)
    x, up, down = (t.double() for t in (torch.ones(4, 3).cumsum(0), torch.eye(3, 8) + 0.1, torch.ones(8, 2) / 3))
    want, loss = torch.func.grad_and_value(lambda a, b, c: layers(a, b, c, None), argnums=(0, 1, 2))(x, up, down)
    for rank, (grads, value) in enumerate(found):
        torch.testing.assert_close(value, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(grads[0], want[0], rtol=1e-12, atol=1e-12)  # on every rank the same
        torch.testing.assert_close(grads[1], want[1].chunk(nprocs, 1)[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads[2], want[2].chunk(nprocs, 0)[rank], rtol=1e-12, atol=1e-12)


@each_rank(2, processes=True)
def test_torch_compile_has_them_in_one_graph() -> None:
    tp = fsdp.local_mesh(tp=-1)["tp"]
    x = given(tp.get_local_rank(), 2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = C.psum(C.reduce_scatter(C.all_to_all(x[:, :2].sin(), tp, 1, 0), tp, 0).square(), tp)
        return (C.ppermute(C.split(y, tp), tp, [(0, 1), (1, 0)]) * C.pvary(x, tp).sum()).sum()

    def grad(fn: Fn) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(fn(leaf), leaf)
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated")  # of Dynamo's own
        torch.testing.assert_close(grad(fn), grad(torch.compile(fn, backend="aot_eager", fullgraph=True)))


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    def calls() -> None:
        mesh = fsdp.local_mesh(data=2, tp=2)
        x, tp = torch.ones(3, 4), mesh["tp"]
        uneven, twice = "3 elements, which do not divide by the 2 ranks", "none sends twice and none gets twice"
        name: Any = "tp"
        refused(
            (lambda: C.psum(x, mesh), "SpecError: psum(axis): a mesh of the axes ('data', 'tp'); expected one axis"),
            (lambda: C.psum(x, name), "expected one axis of a mesh"),
            (lambda: C.all_gather(x, tp, 2), "TreeError: all_gather(dim=2): the tensor [3, 4] has dims -2 to 1."),
            (lambda: C.reduce_scatter(x, tp, 0), uneven), (lambda: C.split(x, tp, 0), uneven),
            (lambda: C.all_to_all(x, tp, 0, 1), uneven), (lambda: C.ppermute(x, tp, [(0, 1), (1, 1)]), twice),
            (lambda: C.ppermute(x, tp, [(0, 2)]), twice),
        )  # fmt: skip

    with simulate(data=2, tp=2) as ranks:
        ranks(calls).get()
        assert not ranks.traffic.collectives(lane="compute")


def test_simulated_ranks_count_what_a_model_sends() -> None:
    with simulate(tp=2) as ranks:
        ranks(tried, "psum")
        assert ranks.traffic.collectives(axis="tp", lane="compute", kind="all_reduce") > 0
        assert not ranks.traffic.collectives(lane="compute", kind="all_gather")
        ranks.traffic.clear()
        ranks(tried, "ring")
        one = 4 * 6 * 2 * 8
        assert ranks.traffic.bytes(kind="permute") % one == 0
        assert ranks.traffic.bytes(kind="permute") >= 2 * one
