"""What a step takes where it takes most: added up from a plan, and found of a model without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._plan.layout import LeafInfo, plan_layout
from functional_fsdp._plan.plan import make_plan, staging_slots
from functional_fsdp.look.tables import Stretch, find_peak

WIDTH, ROWS = 256, 128
ACTIVATION = ROWS * WIDTH * 4  # bytes
BLOCK = 512  # bytes of a small tensor


def planned(sizes: dict[str, int], **spec: Any) -> tuple[Any, Any]:
    leaves = [LeafInfo(f"{name}.w", (n,), torch.float32) for name, n in sizes.items()]
    layout = plan_layout(leaves, fsdp.Spec({"data": 2}, **spec))
    return layout, make_plan(layout)


def test_the_peak_is_the_largest_sum_of_a_stretch() -> None:
    layout, plan = planned({"a": 1024, "b": 2048, "c": 4096})
    held = [Stretch("c", 10_000), Stretch("b", 20_000), Stretch("a", 2_000), Stretch("", 0)]
    found = find_peak(layout, plan, {"main weights": 100}, held)
    gradients, staging = 4096 * 4 // 2, 4096 * 4  # of c: its shard, and what is sent
    assert found.peak == 100 + plan.arena + 20_000 + gradients + staging
    assert found.parts["main gradients"] == gradients
    assert found.where == "after the gradients of 'c'"
    assert found.pool == found.peak - 100
    assert "exact" not in repr(found)


def test_memory_that_a_transport_keeps_is_there_in_the_forward_too() -> None:
    layout, plan = planned({"a": 1024, "b": 2048}, transport="copy_engine")
    found = find_peak(layout, plan, {}, [Stretch("b", 1 << 20), Stretch("a", 0)], keeps_memory=True)
    assert found.parts == {"arena": plan.arena, "staging": plan.staging, "activations": 1 << 20}
    assert found.pool == 1 << 20
    later = find_peak(layout, plan, {}, [Stretch("b", 0), Stretch("a", 0), Stretch("", 0)], keeps_memory=True)
    assert later.parts["sums"] == plan.received == (1024 + 2048) * 4  # what exact sums receive, two at once


def test_one_reduction_at_a_time_takes_less_staging() -> None:
    layout, plan = planned({"a": 1024, "b": 1024, "c": 1024})
    held = [Stretch("c", 0), Stretch("b", 0), Stretch("a", 0), Stretch("", 0)]
    assert find_peak(layout, plan, {}, held).parts["staging"] == 2 * 4096
    assert find_peak(layout, plan, {}, held, gpu=True).parts["staging"] == 4096
    layout, plan = planned({"a": 1024, "b": 1024, "c": 1024}, precision=fsdp.Precision(sum="fp32"))
    assert find_peak(layout, plan, {}, held, gpu=True).parts["sums"] == 4096  # an exact sum is one collective, too
    leaves = [LeafInfo(f"{name}.w", (1024,), torch.float32) for name in "abc"]
    layout = plan_layout(leaves, fsdp.Spec({"replica": 2, "data": 2}, fsdp.hsdp("replica", "data")))
    assert find_peak(layout, make_plan(layout), {}, held, gpu=True).parts["staging"] == 2 * 4096  # each has two


@pytest.mark.parametrize(("preset", "axes"), [("zero3", ("data",)), ("hsdp", ("replica", "data"))])
def test_staging_that_stays_has_one_slot_where_one_lane_reduces_in_order(preset: str, axes: tuple[str, ...]) -> None:
    spec = fsdp.Spec(dict.fromkeys(axes, 2), getattr(fsdp, preset)(*axes), transport="copy_engine")
    layout = plan_layout([LeafInfo("w", (4096,), torch.float32)], spec)
    here = tuple((axis, 0) for axis in axes)
    one, none = (staging_slots(layout, here, "mean", spec.transport.traits, kept) for kept in (True, False))
    assert (one, none) == (1 if preset == "zero3" else 2, 2)


def test_on_gpus_the_arena_is_as_large_as_what_is_live() -> None:
    layout, plan = planned({"a": 1024, "b": 2048, "c": 4096})
    held = [Stretch("c", 1 << 20), Stretch("b", 0), Stretch("a", 0)]
    live = sum(plan.by_name[name].nbytes for name in plan.live(3))  # where the gradients of "c" are complete
    assert find_peak(layout, plan, {}, held, gpu=True).parts["arena"] == live == (4096 + 2048) * 4
    (forward, backward), (first, *_) = plan.by_name["a"].lives, plan.uses
    assert (forward, backward, first.unit) == ((0, 0), (4, 5), "a")
    assert find_peak(layout, plan, {}, held[2:], gpu=True).parts["arena"] == 1024 * 4
    assert find_peak(layout, plan, {}, held[2:], gpu=True, keeps_memory=True).parts["arena"] == plan.arena


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def made(**spec: Any) -> tuple[fsdp.State, nn.Module]:
    params, model = fsdp.functionalize(Net())
    return fsdp.abstract_state(params, fsdp.Spec({"data": 4}, **spec), fsdp.adamw(lr=1e-3)), model


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out.sum()


def test_activations_are_counted_without_running_the_step() -> None:
    state, model = made()
    found = T.step_memory(T.forward_backward(model, loss_fn), state, torch.empty(ROWS, WIDTH, device="meta"))
    assert [stretch.unit for stretch in found.stretches] == [f"blocks.{i}" for i in reversed(range(6))] + [""]
    # Kept are the outputs of six tanh, each the input of the next layer. In the backward of a layer come the gradients
    # of its product and of its weight (two activations); then its tanh's output is free. Two numbers: loss and scale.
    assert WIDTH * WIDTH * 4 == 2 * ACTIVATION
    assert [one.alive - 2 * BLOCK for one in found.stretches[:6]] == [(6 - i + 1 + 2) * ACTIVATION for i in range(6)]
    assert found.parts["main weights"] == 6 * WIDTH * WIDTH * 4 // 4
    assert found.parts["optimizer state"] == 2 * found.parts["main weights"]


def test_what_was_moved_comes_back_in_the_room_that_main_gradients_leave() -> None:
    """Of 24 blocks each keeps five activations, and leaves main gradients of three: where three blocks are over there
    is room for one that was moved. Fourteen are away where the backward begins; coming back as soon as one block is
    over, they would be there where the sum is largest."""
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), *(nn.Tanh() for _ in range(5))) for _ in range(24)))
    params, model = fsdp.functionalize(deep)
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.adamw(lr=1e-3))
    rows = torch.empty(40, WIDTH, device="meta")
    plain = T.step_memory(T.forward_backward(model, loss_fn), state, rows)
    few = T.offload(T.offload(T.offload(model, "0"), "1"), "2")
    moved = T.step_memory(T.forward_backward(few, loss_fn), state, rows)
    assert plain.peak - moved.peak >= 12 * 40 * WIDTH * 4


def of_wide_blocks(change: Any = lambda model: model) -> Any:
    """Of four blocks with three outputs of tanh each, changed so."""
    wide = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(4)))
    params, model = fsdp.functionalize(wide)
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 4}), fsdp.adamw(lr=1e-3))
    return T.step_memory(T.forward_backward(change(model), loss_fn), state, torch.empty(ROWS, WIDTH, device="meta"))


def test_what_is_computed_again_or_moved_to_the_host_is_not_alive() -> None:
    plain, again = of_wide_blocks(), of_wide_blocks(lambda model: T.remat(model, "*"))
    assert plain.parts["activations"] >= 12 * ACTIVATION
    assert plain.moved == 0
    moved, few = (of_wide_blocks(change) for change in (
        lambda model: T.offload(model, "*"), lambda model: T.offload(T.offload(model, "0"), "1")))  # fmt: skip
    # three outputs a block, the last one the next block's input; the first block's input has no gradient, and stays
    assert 11 * ACTIVATION <= moved.moved <= 15 * ACTIVATION
    assert "of activations there and back" in repr(moved)
    for found, less in ((again, 4), (moved, 3), (few, 3)):  # of those that are moved two blocks' are on their way
        assert plain.parts["activations"] - found.parts["activations"] >= less * ACTIVATION
    # all that two blocks keep, but for what the third one keeps, too, is away where the backward begins
    assert few.moved >= 5 * ACTIVATION
    assert plain.stretches[0].alive - few.stretches[0].alive >= 5 * ACTIVATION - BLOCK


def test_a_loss_that_reads_a_value_is_refused() -> None:
    state, model = made()

    def reads(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = loss_fn(model, x)
        return out * float(out.item() > 0)

    with pytest.raises(fsdp.ScheduleError, match="step_memory"):
        T.step_memory(T.forward_backward(model, reads), state, torch.empty(ROWS, WIDTH, device="meta"))
    second = T.forward_backward(model, loss_fn, second_order=True)
    with pytest.raises(fsdp.ScheduleError, match="second_order"):
        T.step_memory(second, state, torch.empty(ROWS, WIDTH, device="meta"))


def test_the_host_has_what_a_placement_puts_there() -> None:
    state, model = made(placement=fsdp.zero3("data", memory_kind="pinned_host"))
    found = T.step_memory(T.forward_backward(model, loss_fn), state, torch.empty(ROWS, WIDTH, device="meta"))
    assert "main weights" not in found.parts
    assert "main gradients" not in found.parts
    assert found.host >= 3 * 6 * WIDTH * WIDTH * 4 // 4
    assert "in the host's memory" in repr(found)


def test_a_state_and_a_model_are_as_they_were() -> None:
    """A rehearsal, a step, a rehearsal, a step: the same losses as two steps."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    spec = fsdp.Spec(fsdp.local_mesh())

    def losses(rehearses: bool) -> list[float]:
        torch.manual_seed(0)
        params, model = fsdp.functionalize(Net())
        state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))
        forward_backward = T.forward_backward(T.offload(T.remat(model, "blocks.*"), "blocks.*"), loss_fn)
        found = []
        for _ in range(2):
            if rehearses:
                assert T.step_memory(forward_backward, state, x).peak > 0
            state, loss = forward_backward(state, x)
            state = fsdp.step(state)
            found.append(float(loss))
        return found

    assert losses(True) == losses(False)


class Buffered(Net):
    """Reads a table, counts in place, and has running statistics."""

    table: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(super().forward(x * self.table))


@pytest.mark.parametrize("rides", [True, False])
def test_a_module_may_have_buffers(rides: bool) -> None:
    module = Buffered()
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(
        params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=1e-3), buffers=fsdp.buffers(module) if rides else None
    )
    forward_backward = T.forward_backward(model, loss_fn)
    params, skeleton = fsdp.functionalize(Net())
    bare = fsdp.shard(params, state.spec, fsdp.adamw(lr=1e-3))
    plain = T.step_memory(T.forward_backward(skeleton, loss_fn), bare, torch.ones(ROWS, WIDTH))
    found = T.step_memory(forward_backward, state, torch.ones(ROWS, WIDTH))
    most, least = (max(one.alive for one in memory.stretches) for memory in (found, plain))
    assert most > least
    assert found.parts.get("buffers", 0) == (2 * WIDTH * 4 + 8 + 8 if rides else 0)
    assert model.calls == module.calls == 0
    if rides:
        after, _ = forward_backward(state, torch.ones(ROWS, WIDTH))
        assert [int(one.buffers["calls"]) for one in (state, after)] == [0, 1]


def test_of_an_abstract_state_of_a_module_that_was_built_on_meta() -> None:
    with torch.device("meta"):
        module = Buffered()
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec({"data": 4})
    state = fsdp.abstract_state(params, spec, fsdp.adamw(lr=1e-3), buffers=fsdp.buffers(module))
    found = T.step_memory(T.forward_backward(model, loss_fn), state, torch.empty(ROWS, WIDTH, device="meta"))
    real, where = fsdp.functionalize(Buffered()), fsdp.buffers(Buffered())
    again = fsdp.abstract_state(real[0], spec, fsdp.adamw(lr=1e-3), buffers=where)
    assert found.peak == T.step_memory(T.forward_backward(real[1], loss_fn), again, torch.empty(ROWS, WIDTH)).peak
