"""compile_report: what compiled units take beside eager ones, and that asking changes nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.driven import refused
from support.ranks import each_rank, launch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

PAUSE = 0.02  # seconds: more than anything else here takes


class Sluggish(nn.Module):
    """Slower compiled, by the backend below. Draws numbers, and has buffers that move."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> Any:
        return x + F.dropout(self.norm(self.linear(x)), 0.5, self.training)


class Quick(nn.Module):
    """Slower eagerly: what waits there is not in the graph."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.linear, self.pause = nn.Linear(6, 6), pause

    def forward(self, x: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            time.sleep(self.pause)
        return torch.tanh(self.linear(x))


CALLS: list[int] = [0, 0]  # of graphs in this process: how many were made, and how often they ran


def pausing(module: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend whose graphs with a norm in them pause first."""
    slow = any("batch_norm" in str(node.target) for node in module.graph.nodes)
    CALLS[0] += 1

    def run(*args: Any) -> Any:
        CALLS[1] += 1
        if slow:
            time.sleep(PAUSE)
        return module.forward(*args)

    return run


def model(pause: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Sluggish(), Quick(pause), Sluggish(), Quick(pause))


def training(asks: bool, pause: float) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses of three steps and all that they leave; and what was reported before the second."""
    module = model(pause)
    params, skeleton = fsdp.functionalize(module)
    spec = fsdp.Spec(fsdp.local_mesh("cpu", data=-1))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2), buffers=fsdp.buffers(module))
    run = T.forward_backward(skeleton, lambda model, x: model(x).square().mean(), compile={"backend": pausing})
    losses, report = [], None
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        if asks and step == 1:
            before, made, host = state, CALLS[0], torch.get_rng_state()
            state, report = T.compile_report(run, state, x, rounds=2)
            assert state is before
            assert CALLS[0] == made, "asking has compiled"
            assert torch.equal(torch.get_rng_state(), host)
        ran = CALLS[1]
        state, loss = run(state, x)
        assert CALLS[1] == ran + 4, "units are not compiled any more"
        state = fsdp.step(state)
        losses.append(loss.item())
    return losses, {**fsdp.full_params(state), **(state.buffers or {})}, report


def beside_one_that_does_not_ask(pause: float) -> tuple[bool, Any]:
    (losses, left, report), (same, others, _) = training(True, pause), training(False, pause)
    return losses == same and all(torch.equal(left[path], others[path]) for path in others), report


def test_each_class_and_the_whole_are_timed_and_nothing_changes() -> None:
    for same, report in launch(beside_one_that_does_not_ask, (PAUSE / 2,), nprocs=2, processes=True):
        assert same
        sluggish, quick = report.classes
        assert (sluggish.name, sluggish.paths) == ("Sluggish", ("1", "3"))
        assert (quick.name, quick.paths) == ("Quick", ("2", "4"))
        assert sluggish.slower
        assert sluggish.compiled >= PAUSE > sluggish.eager
        assert not quick.slower
        assert quick.eager >= PAUSE / 2 > quick.compiled


@each_rank(1)
def test_named_modules_and_an_exception_in_the_middle() -> None:
    """Of modules that `compile_units` named; after an exception their compiled code runs in the next step."""
    module = model(0.0)
    params, skeleton = fsdp.functionalize(module)
    spec = fsdp.Spec(fsdp.local_mesh("cpu", data=-1))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2), buffers=fsdp.buffers(module))
    fails: list[str] = []

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise KeyError(fails.pop())
        return model(x).square().mean()

    run = T.forward_backward(T.compile_units(skeleton, "2", "4", backend=pausing), loss_fn)
    state, report = T.compile_report(run, state, torch.ones(4, 6), rounds=1)
    assert [(one.name, one.paths) for one in report.classes] == [("Quick", ("2", "4"))]
    fails.append("the loss function's own")
    with pytest.raises(KeyError, match="the loss function's own"):
        T.compile_report(run, state, torch.ones(4, 6), rounds=1)
    state = fsdp.drop_gradients(state)
    ran = CALLS[1]
    fsdp.step(run(state, torch.ones(4, 6))[0])
    assert CALLS[1] == ran + 2


def text(eager: float, compiled: float, *classes: tuple[str, float, float]) -> str:
    times = tuple(T.ClassTimes(name, ("a", "b"), own, other) for name, own, other in classes)
    return str(T.CompileReport(times, eager, compiled))


def test_what_a_report_says() -> None:
    slow, fast = ("Layer", 1e-3, 1.2e-3), ("Head", 1e-3, 0.5e-3)
    found = text(0.109, 0.144, slow, fast).splitlines()
    assert found[1:3] == [
        "Layer               2       1     1.000        1.200   slower",
        "Head                2       1     1.000        0.500",
    ]
    assert found[3] == "forward and backward, until devices are done: eager 109.0 ms, compiled 144.0 ms."
    assert found[4].startswith(
        "Compiled units make this step slower, on the host Layer. In T.cuda_graph what the host "
    )
    assert text(0.1, 0.1, slow).endswith(
        "On the host Layer is slower compiled, and the step is not: it waits for other things."
    )
    assert text(0.1, 0.1, fast, ("Tiny", 1e-5, 4e-5)).endswith("Nothing is slower compiled.")


@each_rank(1)
def test_what_is_not_compiled_is_refused() -> None:
    params, skeleton = fsdp.functionalize(nn.Linear(3, 3))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu", data=-1)), fsdp.sgd(lr=0.1))
    eager, report = T.forward_backward(skeleton, lambda model, x: model(x).sum()), T.compile_report
    said = "compile_report: the first argument is a Linear; expected what T.forward_backward("
    none = "compile_report: nothing is compiled here. Give T.forward_backward(model, loss_fn, compile="
    for given, text in ((skeleton, said), (eager, none)):
        refused((lambda: report(given, state, torch.ones(2, 3)), text))  # type: ignore[arg-type]  # noqa: B023


class Numbered(nn.Module):
    """A layer that goes by its number, as one that has a cache for its keys does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner = number, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, kept: tuple[float, ...]) -> torch.Tensor:
        return self.inner(x) * kept[self.number]


class Stack(nn.Module):
    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)  # the input of all layers has a gradient
        self.layers = nn.ModuleList(Numbered(number) for number in numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, (1.0, 2.0, 3.0, 4.0))
        return x


@each_rank(1)
def test_layers_that_are_compiled_one_by_one_are_named() -> None:
    """And in what they differ."""
    said = []
    for numbers in ((0, 0, 0, 0), (0, 1, 2, 3)):
        params, skeleton = fsdp.functionalize(Stack(numbers))
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu", data=-1)), fsdp.adamw(lr=1e-2))
        run = T.forward_backward(skeleton, lambda model, x: model(x).sum(), compile={"backend": "aot_eager"})
        report = T.compile_report(run, state, torch.ones(4, 6), rounds=1)[1]
        (one,) = report.classes
        said.append((one.graphs, one.differ.partition(" #")[0], "Numbered was compiled 4 times" in str(report)))
    assert said == [(1, "", False), (4, "what.number == 0", True)], said


class Both(Stack):
    """A layer that is called, and one whose forward is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1].forward(self.layers[0](self.first(x), (1.0,)), (1.0,))


@each_rank(1)
def test_all_compilations_of_a_class_are_counted() -> None:
    """By two templates, and by three `compile_units`; and no calls differ."""
    for model, several in ((Both((0, 0)), False), (Stack((0, 0, 0)), True)):
        params, skeleton = fsdp.functionalize(model)
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu", data=-1)), fsdp.adamw(lr=1e-2))
        made = CALLS[0]
        for path in ("layers.0", "layers.1", "layers.2") if several else ():
            skeleton = T.compile_units(skeleton, path, backend=pausing)
        options: Any = {} if several else {"compile": {"backend": pausing}}
        run = T.forward_backward(skeleton, lambda model, x: model(x).sum(), **options)
        report = T.compile_report(run, state, torch.ones(4, 6), rounds=1)[1]
        (one,) = report.classes
        assert one.graphs == CALLS[0] - made == 2 + several
        assert (one.differ, "calls differ" in str(report)) == ("", False)
