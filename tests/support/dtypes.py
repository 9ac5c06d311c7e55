"""The law of dtypes: its table, and what does not hold of a row, on any device."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from support.presets import PRESETS, TWO_AXES
from support.problems import full_grads

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

F32, BF16 = torch.float32, torch.bfloat16
RANKS = 4
COLUMNS: dict[str, tuple[Any, ...]] = {
    "preset": PRESETS,
    "main": (F32, BF16),
    "compute": (F32, BF16),
    "grads": (F32, BF16),
    "wire": (F32, BF16),
    "sum": ("native", "fp32"),
    "micro": (1, 3),
    "axes": (1, 2),
}


class Law(NamedTuple):
    preset: str
    main: torch.dtype
    compute: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    sum: str
    micro: int
    axes: int

    @property
    def precision(self) -> fsdp.Precision:
        return fsdp.Precision(self.main, self.compute, self.grads, self.wire, self.sum)


PRODUCT = [Law(*values) for values in itertools.product(*COLUMNS.values())]


def pairs(law: Law) -> set[Any]:
    return set(itertools.combinations(enumerate(law), 2))


def mesh_of(law: Law) -> tuple[Any, fsdp.Placement]:
    make = getattr(fsdp, law.preset)
    if law.preset in TWO_AXES:
        return fsdp.local_mesh(replica=law.axes, shard=-1), make("replica", "shard")
    if law.axes == 1:
        return fsdp.local_mesh(), make("data")
    return fsdp.local_mesh(a=2, b=2), make("a", "b")


class Net(nn.Module):
    """Three units, one of them with two buckets of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.head = nn.Linear(9, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def broken(law: Law, way: str = "driven") -> list[str]:
    """What of this law does not hold, in two steps."""
    mesh, placement = mesh_of(law)
    torch.manual_seed(0)
    params, model = fsdp.functionalize(Net())
    spec = fsdp.Spec(mesh, placement, precision=law.precision)
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.5, momentum=0.9))
    forward_backward = T.forward_backward(model, loss_fn)
    wrong: list[str] = []
    eps = {dtype: torch.finfo(dtype).eps for dtype in (F32, BF16)}
    summed = F32 if law.sum == "fp32" else law.wire
    # whole sums stay between microbatches where gradients are not sharded over every axis
    again = law.micro > 1 and set(placement.grads) != set(placement.data)

    def expect(what: str, holds: bool) -> None:
        if not holds:
            wrong.append(f"{law}: {what}")

    for step in range(2):
        before = fsdp.full_params(state)
        total = {key: torch.zeros(p.shape, dtype=torch.float64) for key, p in before.items()}
        size = {key: torch.zeros(p.shape, dtype=torch.float64) for key, p in before.items()}
        for k in range(law.micro):
            g = torch.Generator().manual_seed(100 * step + 10 * k + dist.get_rank())
            x = torch.randn(4, 9, generator=g).to(state.count.device, law.compute)
            weights = {key: p.to(law.compute) for key, p in before.items()}
            mine, loss = torch.func.grad_and_value(lambda w, x=x: loss_fn(fsdp.bind(model, w), x))(weights)
            state, got = forward_backward(state, x, last_microbatch=k == law.micro - 1)
            expect("the loss is that of main weights cast to compute", torch.equal(got, loss))
            for theirs in everyone({key: grad.cpu() for key, grad in mine.items()}):
                for key, grad in theirs.items():
                    total[key] += grad.to(law.wire).double() / RANKS
                    size[key] += grad.to(law.wire).double().abs() / RANKS
        state = fsdp.finish_reductions(state)
        grads = full_grads(state)
        unit = RANKS * eps[summed] + again * eps[law.wire] + (law.micro + 1) * eps[law.grads]
        for key, want in total.items():
            error = (grads[key].double() - want).abs() - unit * size[key]
            expect(
                f"step {step}, gradient of {key}, beyond the bound by {error.max():.2e}", bool((error <= 1e-30).all())
            )
        dtypes = {"main": law.main, "weights": law.compute, "grads": law.grads, "opt": law.main}
        for kind, dtype in dtypes.items():
            for buffer in (getattr(state, kind) or {}).values():
                expect(f"{kind} has {buffer.local.dtype}", buffer.local.dtype is dtype)
        state = fsdp.step(state)
        after = fsdp.full_params(state)
        if step == 0:  # momentum begins with the gradient
            for key, p in before.items():
                want = p.double().cpu() - 0.5 * grads[key].to(law.main).double()
                bound = 2 * eps[law.main] * (p.double().cpu().abs() + grads[key].double().abs())
                expect(f"weights of {key}", bool(((after[key].double().cpu() - want).abs() <= bound).all()))
    return wrong


def hold(laws: list[Law]) -> list[str]:
    return [said for law in laws for said in broken(law)]


def exact(preset: str, axes: int, runs: int) -> tuple[bool, bool]:
    """Whether a bf16 wire with an fp32 sum gives the bits of the sum in rank order, and the same bits in all runs."""
    law = Law(preset, F32, F32, F32, BF16, "fp32", 1, axes)
    mesh, placement = mesh_of(law)
    g = torch.Generator().manual_seed(dist.get_rank())
    shapes = {"w": (301, 7), "b": (5,)}  # of many sizes: else a sum of bfloat16s is exact in float32, in any order
    mine = {key: torch.randn(n, generator=g) * 4.0 ** torch.randint(16, n, generator=g) for key, n in shapes.items()}
    results = []
    for _ in range(runs):
        params = {"w": torch.zeros(301, 7), "b": torch.zeros(5)}
        spec = fsdp.Spec(mesh, placement, precision=law.precision, average="sum")
        state = fsdp.shard(params, spec, fsdp.sgd())
        state = fsdp.finish_reductions(fsdp.reduce(state, {key: t.to(state.count.device) for key, t in mine.items()}))
        results.append(full_grads(state))
    rank = everyone({key: t.bfloat16().float() for key, t in mine.items()})
    expected, turned = (
        {key: ((rank[a][key] + rank[b][key]) + rank[c][key]) + rank[d][key] for key in mine}
        for a, b, c, d in (range(RANKS), range(RANKS)[::-1])
    )
    assert not torch.equal(expected["w"], turned["w"]), "sums have the same bits in any order"
    if axes == 2:  # by the first axis to be split, the inner one, and then the sums of that
        expected = {key: (rank[0][key] + rank[1][key]) + (rank[2][key] + rank[3][key]) for key in mine}
    right = all(torch.equal(results[0][key], expected[key]) for key in expected)
    return right, all(torch.equal(r[key], results[0][key]) for r in results for key in r)
