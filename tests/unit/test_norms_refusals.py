"""What norms and products refuse, and what they are of a world of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def begin() -> fsdp.State:
    params = {"a": {"w": torch.tensor([3.0, -4.0])}, "b": {"w": torch.tensor([1.0])}, "c": {"w": torch.ones(2)}}
    spec = fsdp.Spec(fsdp.local_mesh(), units=["a", "b", "c"], trainable={"c*": False, "*": True})
    return fsdp.shard(params, spec, fsdp.sgd(lr=0.1))


def with_gradients() -> fsdp.State:
    state, params = fsdp.unshard(begin())
    return fsdp.finish_reductions(fsdp.reduce(state, params))


def test_wrong_trees_and_orders_are_refused() -> None:
    state = with_gradients()
    other = fsdp.shard({"z": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    some: Any = {"a": state.main["a"]}
    for call, said in (
        (lambda: T.global_norm(state, 3), r"global_norm\(ord=3\): expected 1, 2 or math\.inf"),
        (lambda: T.norms(state, ord=0), r"norms\(ord=0\): expected 1, 2 or math\.inf"),
        (lambda: T.clip_by_global_norm(state, 1.0, 3), r"expected 1, 2 or math\.inf"),
        (lambda: T.norms(state, by="bucket"), r"norms\(by='bucket'\): expected 'leaf' or 'unit'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(fsdp.SpecError, match=said):
            call()
    with pytest.raises(fsdp.TreeError, match=r"norms: the tree has the bucket 'z'; the state has 'a', 'b'"):
        T.norms(state, other.main)
    with pytest.raises(fsdp.TreeError, match=r"norms: the tree has None for the .* 'a'; expected \(128,\) elem"):
        T.norms(state, {"a": None})  # type: ignore[dict-item]
    with pytest.raises(fsdp.TreeError, match=r"norms: the tree is \{\}"):
        T.norms(state, {})
    with pytest.raises(fsdp.TreeError, match=r"dot: b is a list; expected \{bucket: FlatBuffer\}"):
        T.dot(state, state.main, [])  # type: ignore[arg-type]
    with pytest.raises(fsdp.TreeError, match=r"dot: a has None for the bucket 'b'; expected \(128,\) elements"):
        T.dot(state, some, state.main)
    with pytest.raises(fsdp.ScheduleError, match="no gradients"):
        T.norms(fsdp.step(state))


def test_an_error_that_names_what_is_not_finite_travels() -> None:
    state = with_gradients()
    state.grads["a"].local[:2] = 1e30  # squares that are too large
    with pytest.raises(T.NonfiniteError, match="no element is, so the norm is too large for its dtype") as caught:
        T.clip_by_global_norm(state, 1.0, error_if_nonfinite=True)
    kind, args = caught.value.__reduce__()
    assert str(kind(*args)) == str(caught.value)
    state, _ = T.clip_by_global_norm(state, 1.0, torch.inf, error_if_nonfinite=True)
    assert state.grads["a"].local.abs().amax() <= 1.0


def test_reading_the_norm_is_refused_in_a_compiled_step() -> None:
    def train_step(state: fsdp.State) -> fsdp.State:
        state, params = fsdp.unshard(state)
        state = fsdp.reduce(state, params)
        return fsdp.step(T.clip_by_global_norm(state, 1.0, error_if_nonfinite=True)[0])

    said = r"error_if_nonfinite=True\) reads the norm on the host, which a compiled step cannot"
    with pytest.raises(fsdp.ScheduleError, match=said):
        T.compile(train_step, "aot_eager")(begin())
    with pytest.raises(fsdp.ScheduleError, match=said):
        torch.compile(train_step, backend="aot_eager", fullgraph=True)(begin())
