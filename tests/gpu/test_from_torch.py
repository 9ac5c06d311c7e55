"""Classes of torch.optim on shards on GPUs: as torch's own there, and the same bits when a step is captured.

`pytest tests/gpu/test_from_torch.py`
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gpu.machine import RANKS, no_synchronisation
from support.torch_optimizers import ByParameter

import functional_fsdp as fsdp
from functional_fsdp import Schedule, Spec, launch
from functional_fsdp import transforms as T
from functional_fsdp._launch.pool import LaunchError

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("fresh_workers")]

Tree = dict[str, torch.Tensor]
SHAPES = {"a.w": (90, 40), "a.bias": (130,), "b.w": (4, 4), "b.bias": (1,), "scale": ()}
REFUSED = ("LBFGS", "Muon", "Adafactor", "SparseAdam")  # or not elementwise
CLASSES = [
    name
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in (*REFUSED, "Optimizer")
]
STEPS = 7


def tree(seed: int) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).cuda() for name, shape in SHAPES.items()}


def train_step(state: fsdp.State, grads: Tree) -> fsdp.State:
    return fsdp.step(fsdp.reduce(state, grads))


def trained(name: str, how: str) -> tuple[float, bool]:
    """How far weights are from those of torch's own, at most; and whether updates may go bucket by bucket."""
    mesh = fsdp.local_mesh()  # from now on this rank has its GPU
    options: dict[str, Any] = {"lr": lambda count: 0.01 / (1 + count)} if how == "rate" else {"lr": 0.01}
    params = {path: torch.nn.Parameter(p) for path, p in tree(0).items()}
    cls = getattr(torch.optim, name)
    same = {"capturable": True} if "capturable" in inspect.signature(cls).parameters else {}  # other arithmetic
    plain = cls(params.values(), lr=0.01, **same)
    optimizer = fsdp.from_torch(getattr(torch.optim, name), **options)
    spec = Spec(mesh, units=["a", "b", "scale"], schedule=Schedule(overlap_update=how == "overlap"))
    state = fsdp.shard(tree(0), spec, optimizer)
    step: Any = T.cuda_graph(train_step) if how == "graph" else train_step
    for i in range(STEPS):
        for path, grad in tree(i + 1).items():
            params[path].grad = grad
        for group in plain.param_groups if how == "rate" else ():
            group["lr"] = 0.01 / (1 + i)
        plain.step()
        state = step(state, tree(i + 1))
    found = fsdp.full_params(state)
    return max(float((found[path] - p.detach()).abs().max()) for path, p in params.items()), optimizer.by_bucket


@pytest.mark.parametrize("how", ["eager", "rate", "overlap"])
@pytest.mark.parametrize("name", CLASSES)
def test_it_is_torchs_own(name: str, how: str) -> None:
    for apart, by_bucket in launch(trained, (name, how), nprocs=RANKS):
        assert apart < 1e-6
        assert by_bucket or name == "Adagrad" or how == "rate"


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Adagrad"])
def test_a_captured_step_does_the_same(name: str) -> None:
    assert max(apart for apart, _ in launch(trained, (name, "graph"), nprocs=RANKS)) < 1e-6


def test_what_keeps_numbers_on_the_host_is_not_captured() -> None:
    with pytest.raises(LaunchError, match=r"ScheduleError: from_torch\(Adagrad\): the class needs 'step' on the host"):
        launch(trained, ("Adagrad", "graph"), nprocs=RANKS)


class ByNorm(ByParameter):
    """As LAMB: moments, a Python count, and a norm of the leaf."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if not s:
            s["mean"], s["square"], s["turns"] = torch.zeros_like(p), torch.zeros_like(p), 0
        s["turns"] += 1
        s["mean"].lerp_(g, 0.1)
        s["square"].lerp_(g.square(), 0.01)
        by = s["mean"] / (1 - 0.9 ** s["turns"]) / (s["square"].sqrt() + 1e-6)
        p.sub_(by * (group["lr"] * p.norm() / by.norm()))


def whole_leaves(by: str) -> float:
    """How far weights are from the class's own, at most; once begun, the host waits for nothing in a step."""
    mesh = fsdp.local_mesh()
    params = {path: torch.nn.Parameter(p) for path, p in tree(0).items()}
    plain = ByNorm(params.values(), lr=0.01)
    state = fsdp.shard(tree(0), Spec(mesh, units=["a", "b", "scale"]), fsdp.from_torch(ByNorm, lr=0.01, by=by))
    for i in range(STEPS):
        for path, grad in tree(i + 1).items():
            params[path].grad = grad
        plain.step()
        state = fsdp.finish_reductions(fsdp.reduce(state, tree(i + 1)))
        torch.cuda.synchronize()
        with no_synchronisation() if i > 2 and by == "leaf" else nullcontext():
            state = fsdp.step(state)
    found = fsdp.full_params(state)
    return max(float((found[path] - p.detach()).abs().max()) for path, p in params.items())


@pytest.mark.parametrize("by", ["leaf", "all"])
def test_whole_leaves_are_the_classs_own(by: str) -> None:
    assert max(launch(whole_leaves, (by,), nprocs=RANKS)) < 1e-6
