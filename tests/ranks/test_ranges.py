"""Names in profiles, from exported traces: each way to write a step, exceptions, and nothing without a profiler."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.chains import mean_square as loss_of
from support.presets import TWO_AXES
from support.problems import mesh_and_placement
from support.tables import FULL
from torch.profiler import ProfilerActivity, profile

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

X = torch.ones(3, 4)
PRESETS = ("zero3", "zero2", "zero1", "ddp")


def made(preset: str) -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    return fsdp.shard(params, fsdp.Spec(*mesh_and_placement(preset)), fsdp.adamw(lr=0.1)), model


def by_tree(state: fsdp.State, model: Any) -> fsdp.State:
    state, params = fsdp.unshard(state)
    return fsdp.step(fsdp.reduce(state, torch.func.grad(lambda p: loss_of(fsdp.bind(model, p), X))(params)))


def by_unit(state: fsdp.State, model: Any) -> fsdp.State:
    h, pullbacks = X, {}
    for unit in state.units:
        state, weights = fsdp.unshard(state, unit)
        h, pullbacks[unit] = T.vjp(lambda w, h, unit=unit: fsdp.bind(model[int(unit)], w)(h), weights, h)
        state = fsdp.release(state, unit)
    d = torch.ones_like(h)
    for unit in reversed(state.units):
        state, weights = fsdp.unshard(state, unit)
        grads, d = pullbacks[unit](weights, d)
        state = fsdp.release(fsdp.reduce(state, grads, unit), unit)
    return fsdp.step(state)


def driven(state: fsdp.State, model: Any) -> fsdp.State:
    return fsdp.step(T.forward_backward(model, loss_of)(state, X)[0])


def ranges_of(call: Callable[[], Any], folder: Path) -> list[dict[str, Any]]:
    """The package's ranges of a call, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        call()
    found.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    some = [one for one in events if str(one.get("name", "")).startswith("fsdp ")]
    assert all(one["ph"] == "X" and one["cat"] == "user_annotation" for one in some)
    return sorted(some, key=lambda one: (one["ts"], -one["dur"]))


def nested(ranges: list[dict[str, Any]]) -> bool:
    """Whether of any two ranges of a thread one holds the other, or ends before it begins."""
    ends: dict[Any, list[float]] = {}
    for one in ranges:
        stack = ends.setdefault(one["tid"], [])
        while stack and stack[-1] <= one["ts"]:
            stack.pop()
        if stack and one["ts"] + one["dur"] > stack[-1] + 1e-3:
            return False
        stack.append(one["ts"] + one["dur"])
    return True


def on_ranks(folder: Path, presets: tuple[str, ...], ways: Any) -> dict[tuple[str, str], tuple[list[str], bool]]:
    found = {}
    inside = folder / str(fsdp.local_mesh().get_rank())
    inside.mkdir()
    for preset in presets:
        for way in ways:
            state, model = made(preset)
            state = way(state, model)
            ranges = ranges_of(lambda way=way, state=state, model=model: way(state, model), inside)  # type: ignore[misc]
            found[preset, way.__name__] = [one["name"].removeprefix("fsdp ") for one in ranges], nested(ranges)
    return found


WAYS = (by_tree, by_unit, driven)


@pytest.mark.parametrize(
    ("ranks", "presets", "ways"), [(2, PRESETS, WAYS), (4, ("hsdp", "hfsdp"), (driven,))], ids=["2", "4"]
)
def test_a_step_has_the_names_of_its_verbs_units_and_lanes(
    ranks: int, presets: tuple[str, ...], ways: Any, tmp_path: Path
) -> None:
    for found in fsdp.launch(on_ranks, (tmp_path, presets, ways), nprocs=ranks):
        assert len(found) == len(presets) * len(ways)
        for (preset, way), (names, ordered) in found.items():
            assert ordered, (preset, way)
            assert [name for name in names if name in ("step", "vote", "update")] == ["step", "vote", "update"]
            if way == "by_tree":
                assert names[0] == "unshard"
                assert names.count("reduce") == 1
                continue
            assert {"unshard 0", "unshard 2", "release 0", "release 2", "reduce 0", "reduce 2"} <= {*names}
            gathers = {name for name in names if name.startswith("gather ")}
            assert gathers == ({"gather 0", "gather 2"} if preset in ("zero3", *TWO_AXES) else set())
            assert {"reduce gradients of 0", "reduce gradients of 2"} <= {*names}
            if preset in TWO_AXES:
                assert {"wait gather 0", "wait gather 2", "wait reduce 0"} <= {*names}
            if way == "driven":
                passes = [name for name in names if name.startswith(("forward", "backward"))]
                assert passes == ["forward_backward", "forward 0", "forward 2", "backward 2", "backward 0"]


def test_gradients_by_sample_have_the_names_of_forwards(tmp_path: Path) -> None:
    state, model = made("ddp")
    norms = T.per_sample_norms(model, lambda model, x: model(x).square().mean())
    watched = fsdp.fingerprint(lambda state: norms(state, torch.ones(3, 4)))
    names = [one["name"] for one in ranges_of(lambda: watched(state), tmp_path)]
    assert {"fsdp forward 0", "fsdp forward 2"} <= {*names}, names
    assert {key.kind for key in watched.prints.steps[0].rows} >= {"main", "weight", "result"}


COMPILED = [*itertools.product(("zero3", "zero1"), WAYS)] if FULL else [("zero3", driven), ("zero1", by_tree)]


def compiled_on_ranks(folder: Path, backend: str) -> dict[tuple[str, str], tuple[list[str], bool]]:
    found = {}
    inside = folder / str(fsdp.local_mesh().get_rank())
    inside.mkdir()
    for preset, way in COMPILED:
        state, model = made(preset)
        step = driven_once(model) if way is driven else functools.partial(swapped, way, model)
        compiled = T.compile(step, backend=backend)
        state = compiled(compiled(state))
        ranges = ranges_of(lambda state=state, compiled=compiled: compiled(state), inside)  # type: ignore[misc]
        found[preset, way.__name__] = [one["name"].removeprefix("fsdp ") for one in ranges], nested(ranges)
    return found


def swapped(way: Any, model: Any, state: fsdp.State) -> fsdp.State:
    new: fsdp.State = way(state, model)
    return new


def driven_once(model: Any) -> Callable[[fsdp.State], fsdp.State]:
    forward_backward = T.forward_backward(model, loss_of)
    return lambda state: fsdp.step(forward_backward(state, X)[0])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.large)])
def test_a_compiled_step_has_the_names_of_what_it_issues(backend: str, tmp_path: Path) -> None:
    gathers = ["gather 0", "gather 2"]
    reductions = ["reduce gradients of 2", "reduce gradients of 0"]
    for found in fsdp.launch(compiled_on_ranks, (tmp_path, backend), nprocs=2):
        assert len(found) == len(COMPILED)
        for (preset, way), (names, ordered) in found.items():
            assert ordered
            assert names[0] == "compiled step"
            again = ["gather 0"] if (preset, way) != ("zero3", "by_tree") and preset == "zero3" else []
            assert [name for name in names if name.startswith("gather")] == gathers + again
            assert [name for name in names if name.startswith("reduce")] == reductions
            waits = sorted(name for name in names if name.startswith("wait"))
            assert waits == sorted(f"wait {name}" for name in [*gathers, *again, "reduce 2", "reduce 0"])
            assert len(names) == 1 + 2 * len(waits)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranges_end_where_a_unit_raises(where: str, tmp_path: Path) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise ValueError("on purpose")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    class Part(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Fails.apply(super().forward(x))
            return out

    params, model = fsdp.functionalize(nn.Sequential(nn.Linear(4, 4), Part(4, 4), nn.Linear(4, 4)))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    step = T.forward_backward(model, loss_of)

    def call() -> None:
        with pytest.raises(ValueError, match="on purpose"):
            step(state, X)
        fsdp.full_params(fsdp.drop_gradients(state))

    ranges = ranges_of(call, tmp_path)
    assert nested(ranges)
    assert f"fsdp {where} 1" in [one["name"] for one in ranges]
    (last,) = [one for one in ranges if one["name"] == "fsdp full_params"]
    assert all(
        one["ts"] + one["dur"] <= last["ts"] for one in ranges if one["name"].startswith(("fsdp forw", "fsdp backw"))
    )


def test_a_checkpoint_has_its_name(tmp_path: Path) -> None:
    state, _ = made("zero3")
    names = [one["name"] for one in ranges_of(lambda: fsdp.save(state, tmp_path / "saved"), tmp_path)]
    assert names[0] == "fsdp save"


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("functional_fsdp._common.calls.record_function", refused)
    state, model = made("zero3")
    for way in (by_tree, by_unit, driven):
        state = way(state, model)
    assert state.steps == 3
