"""The gradients of a step are counted once: a round that is whole, starting over, and what adds up as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from support.chains import mean_square as loss_fn
from support.ranks import launch
from support.tables import each

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

WHOLE = (
    r"{}: this State has the gradients of a whole round .* state = fsdp\.drop_gradients\(state\).* "
    r"last_microbatch=False"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def data(k: int = 0) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * rank + k), dtype=torch.float64)


def begin(preset: str = "zero3") -> tuple[fsdp.State, Any]:
    torch.manual_seed(0)
    module = Net().double()
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, preset)("data"))
    return fsdp.shard(params, spec, fsdp.adamw(lr=0.1), buffers=fsdp.buffers(module)), model


def grads(state: fsdp.State) -> list[torch.Tensor]:
    return [*fsdp.local_shards(fsdp.finish_reductions(state), "grads").values()]


def end(state: fsdp.State) -> list[torch.Tensor]:
    return [*fsdp.full_params(state).values(), *state.buffers.values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_a_second_forward_backward_before_the_step_is_refused() -> None:
    state, model = begin()
    forward_backward = T.forward_backward(model, loss_fn)
    middle, _ = forward_backward(state, data())
    once = [g.clone() for g in grads(middle)]
    for again in (forward_backward, T.forward_backward(model, loss_fn), T.accumulate(forward_backward, 2)):
        with pytest.raises(fsdp.ScheduleError, match=WHOLE.format("forward_backward")):
            again(middle, data())
    assert same(grads(middle), once)  # the gradients that are there are as good as before
    after = fsdp.step(middle)
    after, _ = forward_backward(after, data())  # the next step's
    assert after.grads


def test_starting_over_gives_the_gradients_once() -> None:
    state, model = begin()
    forward_backward = T.forward_backward(model, loss_fn)
    expected = end(fsdp.step(forward_backward(copy.deepcopy(state), data())[0]))
    before = state
    state, _ = forward_backward(state, data())
    assert not same([*state.buffers.values()], [*before.buffers.values()])
    dropped = fsdp.drop_gradients(state)
    assert dropped.between_steps
    assert dropped.grads == {}
    assert same([*dropped.buffers.values()], [*before.buffers.values()])
    with pytest.raises(fsdp.StaleStateError, match="consumed by the restart of its step"):
        fsdp.step(state)
    state, _ = forward_backward(dropped, data())
    assert same(end(fsdp.step(state)), expected)


def test_gradients_dropped_from_anywhere_in_a_step() -> None:
    """From a state that a verb has consumed, in the middle of a unit, and between steps."""
    state, _ = begin()
    assert fsdp.drop_gradients(state) is state
    middle, w = fsdp.unshard(state, state.units[0])
    consumed = middle
    middle = fsdp.reduce(middle, pytree.tree_map(torch.ones_like, w), state.units[0])
    assert fsdp.drop_gradients(consumed) is state
    assert fsdp.drop_gradients(middle) is state
    state, params = fsdp.unshard(state)
    middle = fsdp.reduce(state, params)
    after = fsdp.step(middle)
    for old in (middle, state, consumed):
        with pytest.raises(fsdp.StaleStateError, match="consumed by"):
            fsdp.drop_gradients(old)
    assert fsdp.drop_gradients(after) is after


def test_a_verb_that_was_stopped_is_no_obstacle() -> None:
    state, model = begin()

    def stopped(model: Any, x: torch.Tensor) -> torch.Tensor:
        model(x)
        raise KeyboardInterrupt

    middle, _ = T.forward_backward(model, loss_fn)(state, data(), last_microbatch=False)
    with pytest.raises(KeyboardInterrupt):
        T.forward_backward(model, stopped)(middle, data())
    assert fsdp.drop_gradients(middle) is state


def test_microbatches_and_calls_by_hand_add_up_as_before() -> None:
    state, model = begin()
    forward_backward = T.forward_backward(model, loss_fn, buffers="local")
    first, _ = forward_backward(state, data(0))
    one = [g.clone() for g in grads(first)]
    state, _ = forward_backward(fsdp.drop_gradients(first), data(0), last_microbatch=False)
    state, _ = forward_backward(state, data(0), last_microbatch=False)
    state, _ = forward_backward(state, data(0))
    torch.testing.assert_close(grads(state), [3 * g for g in one])
    state = fsdp.drop_gradients(state)
    with_tree = {path: torch.ones_like(p) for path, p in fsdp.full_params(state).items()}
    state, _ = forward_backward(state, data(0), last_microbatch=False)
    state = fsdp.reduce(state, with_tree)
    state = fsdp.reduce(state, with_tree)
    torch.testing.assert_close(grads(state), [g + 2 for g in one])
    state, _ = forward_backward(state, data(0))  # by hand it was not said to be the last
    torch.testing.assert_close(grads(state), [2 * g + 2 for g in one])
    with pytest.raises(fsdp.ScheduleError, match=WHOLE.format("forward_backward")):
        forward_backward(state, data(0))


def stages() -> dict[str, Callable[..., Any]]:
    return {
        "a": lambda w, h, x: torch.tanh(x @ w["w"]),
        "b": lambda w, h, x: (h @ w["w"]).square().sum(),
    }


def test_clipped_gradients_know_rounds_too() -> None:
    params = {"a.w": torch.ones(3, 2), "b.w": torch.ones(2)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=["a", "b"]), fsdp.sgd())
    clipped = T.clipped_gradients(stages(), max_norm=0.5, noise=0.1)
    x = data().float()
    first, _ = clipped(state, x)
    once = [g.clone() for g in grads(first)]
    with pytest.raises(fsdp.ScheduleError, match=WHOLE.format("clipped_gradients")):
        clipped(first, x)
    state = fsdp.drop_gradients(first)
    state, _ = clipped(state, x)
    assert same(grads(state), once)
    state = fsdp.drop_gradients(state)
    for last in (False, True):
        state, _ = clipped(state, x, last_microbatch=last)
    assert fsdp.step(state).steps == 1


def test_second_order_knows_rounds_too() -> None:
    state, model = begin()
    forward_backward = T.forward_backward(model, loss_fn, second_order=True)
    state, _ = forward_backward(state, data())
    with pytest.raises(fsdp.ScheduleError, match=WHOLE.format("forward_backward")):
        forward_backward(state, data())
    state, _ = forward_backward(fsdp.drop_gradients(state), data())


# ---------------------------------------------------------------- several ranks


def started_over(preset: str, who: list[int]) -> tuple[bool, int, int]:
    """In the second of three steps, ranks in `who` start over; the others hear of it, and do so too."""
    state, model = begin(preset)
    plain = copy.deepcopy(state)
    forward_backward = T.forward_backward(model, loss_fn)
    epoch = state.version.lineage.runtime.epoch
    heard = 0
    for step in range(3):
        plain = fsdp.step(forward_backward(plain, data(step))[0])
    for step in range(3):
        state, _ = forward_backward(state, data(step))
        if step == 1:
            if dist.get_rank() in who:
                state = fsdp.drop_gradients(state)
            else:
                try:
                    fsdp.step(state)
                except fsdp.RestartError:
                    heard += 1
                    state = fsdp.drop_gradients(state)
            state, _ = forward_backward(state, data(step))
        state = fsdp.step(state)
    return same(end(state), end(plain)), heard, state.version.lineage.runtime.epoch - epoch


@pytest.mark.parametrize(("preset", "who"), each(["zero3", "zero1", "ddp"], [[0, 1], [0], [1]]))
def test_ranks_that_start_over(preset: str, who: list[int]) -> None:
    for rank, (right, heard, restarts) in enumerate(launch(started_over, (preset, who), nprocs=2)):
        assert right
        assert heard == (rank not in who)
        assert restarts == (len(who) == 1)
