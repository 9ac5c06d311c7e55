"""What a compiled step says when it is wrong: the package's own error, with any way of compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tables import each

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def begin() -> fsdp.State:
    params = {"a.w": torch.ones(3), "b.w": torch.ones(2)}
    return fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd())


def right(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
    state, p = fsdp.unshard(state)
    return fsdp.step(fsdp.reduce(state, torch.func.grad(lambda p: (p["a.w"] * x).sum() + p["b.w"].sum())(p)))


def wrong_shape(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
    state, w = fsdp.unshard(state, "a")
    return fsdp.reduce(state, {"w": w["w"][:1]}, "a")


def a_key_too_many(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
    state, w = fsdp.unshard(state, "a")
    return fsdp.reduce(state, {"w": w["w"], "v": x}, "a")


PRODUCT = T.hvp({"a": lambda w, h, x: x, "b": lambda w, h, x: h})


HOW: dict[str, Callable[[Any], Any]] = {
    "T.compile": lambda step: T.compile(step, "aot_eager"),
    "fullgraph": lambda step: torch.compile(step, fullgraph=True, backend="aot_eager"),
    "plain": lambda step: torch.compile(step, backend="aot_eager"),
}
CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown unit": (
        lambda state, x: fsdp.unshard(state, "nothing")[0], fsdp.ScheduleError,
        "unshard: there is no unit 'nothing'"),
    "not gathered": (
        lambda state, x: fsdp.release(state, "a"), fsdp.ScheduleError, "release: the unit 'a' is not gathered"),
    "wrong shape": (wrong_shape, fsdp.TreeError, r"the gradient of 'w' has shape \(1,\)"),
    "a key too many": (a_key_too_many, fsdp.TreeError, r"reduce\(state, grads, 'a'\): .* with the keys \('w',\)"),
    "no gradients": (
        lambda state, x: fsdp.step(fsdp.unshard(state)[0]), fsdp.ScheduleError, "step: this state has no gradients"),
    "inside grad": (
        lambda state, x: torch.func.grad(lambda x: fsdp.unshard(state)[1]["a.w"].sum() * x.sum())(x),
        fsdp.ScheduleError, r"unshard was called inside a torch\.func transform"),
    "driven": (
        lambda state, x: PRODUCT(state, state.main, x), fsdp.ScheduleError, "hvp drives the schedule from Python"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "how"), each(CASES, HOW))
def test_an_error_inside_a_compiled_step_reaches_the_user_as_itself(case: str, how: str) -> None:
    torch._dynamo.reset()
    step, kind, said = CASES[case]
    compiled, state = HOW[how](step), begin()
    for _ in range(2):  # the second time, too
        with pytest.raises(kind, match=said) as error:
            compiled(state, torch.ones(3))
        assert type(error.value).__name__ == kind.__name__
    assert fsdp.full_params(state)["a.w"].sum() == 3


def test_a_compiled_step_in_inference_mode_trains_as_outside_it() -> None:
    torch._dynamo.reset()
    seen = []
    for mode in (torch.no_grad, torch.inference_mode):
        state, step = begin(), T.compile(right, "aot_eager")
        for _ in range(2):
            with mode():
                state = step(state, torch.arange(3.0))
        seen.append(fsdp.full_params(step(state, torch.arange(3.0))))
    assert all(torch.equal(seen[0][path], seen[1][path]) for path in seen[0])
    assert seen[0]["a.w"][2] < seen[0]["a.w"][1] < 1
