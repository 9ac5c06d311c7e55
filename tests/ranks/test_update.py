"""Which updates may run beside the backward, and that they are the same ones. Streams: tests/gpu/test_update.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from support.presets import ranks_of
from support.problems import LOOPS, batch, mesh_and_placement, net
from support.ranks import each_rank, launch
from support.tables import each, product

import functional_fsdp as fsdp
from functional_fsdp import Schedule, TreeError
from functional_fsdp._optim.optimizer import portions
from functional_fsdp._runtime.lanes import HostLanes
from functional_fsdp._verbs import _beside, apply_optimizer, counting, in_place, keep, put_back
from functional_fsdp.extend import Session

PRESETS = ("zero3", "zero2", "zero1", "hsdp", "hfsdp", "ddp")


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 100))
def test_portions_are_runs_that_are_just_full(sizes: list[int], fill: int) -> None:
    named = {f"b{i}": nbytes for i, nbytes in enumerate(sizes)}
    found = portions(named, fill)
    assert [name for some in found for name in some] == list(named)
    assert all(found)
    for some in found:
        assert sum(named[name] for name in some[:-1]) < fill
        assert some is found[-1] or sum(named[name] for name in some) >= fill


# ---------------------------------------------------------------- which


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=1e-2, weight_decay=0.1),
    "nadam": lambda: fsdp.from_torch(torch.optim.NAdam, lr=1e-2),
    "partition": lambda: fsdp.partition(
        {"bias": fsdp.sgd(1e-2, 0.9), "default": fsdp.from_torch(torch.optim.Adamax, lr=1e-2)}
    ),
}


def reduced(preset: str, flags: tuple[bool, ...], optimizer: str = "adamw") -> fsdp.State:
    """A state with all its gradients on their way, whose `step` comes next."""
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float32))
    spec = fsdp.Spec(mesh, placement, schedule=Schedule(overlap_update=True), labels={"*.bias": "bias"})
    state = fsdp.shard(params, spec, OPTIMIZERS[optimizer]())
    for k, last in enumerate(flags):
        state, _ = LOOPS["by_unit"](model, state, batch(0, dist.get_rank(), k), last)
    state._executor.finish(state)
    return state


@pytest.mark.parametrize(("preset", "flags"), each(PRESETS, [(True,), (False, True), (True, True), (False, False)]))
def test_every_gradient_has_a_mark_of_its_own(preset: str, flags: tuple[bool, ...]) -> None:
    launch(waited_for, (preset, flags), nprocs=ranks_of(preset))


def waited_for(preset: str, flags: tuple[bool, ...]) -> None:
    state = reduced(preset, flags)
    assert {*state._executor.sink.untouched} == {*state.layout.trainable}


@pytest.mark.parametrize("how", ["unshard", "full_params", "copy", "finish", "other gradients", "outside"])
@each_rank(2)
def test_whoever_looks_at_weights_or_gradients_comes_before_the_update(how: str) -> None:
    """A unit that is gathered once more, outside of the plan, is updated after that."""
    mesh, placement = mesh_and_placement("zero3")
    params, model = fsdp.functionalize(net(torch.float32))
    spec = fsdp.Spec(mesh, placement, schedule=Schedule(overlap_update=True))
    base = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))
    state, _ = LOOPS["by_unit"](model, base, batch(0, dist.get_rank()), True)
    sink = state._executor.sink
    before = len(sink.untouched)
    if how == "unshard":
        state, _ = fsdp.unshard(state)
    elif how == "outside":
        with pytest.warns(UserWarning, match="not what the schedule expects"):
            state, _ = Session.unshard(state, ("tail",))
    elif how == "full_params":
        fsdp.full_params(state)
    elif how == "copy":
        copy.deepcopy(base)
    elif how == "finish":
        state = fsdp.finish_reductions(state)
    elif how == "other gradients":
        state = state._evolve(grads=pytree.tree_map(lambda g: 2 * g, state.grads))
        state._executor.sink.set_gradients(state.grads)
    after = len(sink.untouched)
    fsdp.step(state)
    assert not sink.untouched
    assert 0 < after < before if how == "outside" else 0 == after < before


# ---------------------------------------------------------------- how


class AtOnce(HostLanes):
    """Of a machine that has no streams: updates go beside the backward as there, and are done when they are given."""

    waits_on_host = False
    jobs = 0

    def enqueue(self, lane: str, job: Any, after: Any = None, mark: Any = None) -> None:
        self.jobs += lane == "update"
        assert [*job] == []


@contextmanager
def as_streams(run: Any) -> Iterator[AtOnce]:
    """Inside, lanes pass for streams."""
    real, run.lanes = run.lanes, AtOnce(run)
    run.lanes.queues = real.queues
    try:
        yield run.lanes
    finally:
        run.lanes = real


def updated(preset: str, flags: tuple[bool, ...], optimizer: str = "adamw") -> None:
    """Whether the lane takes all buckets, or none, and does as `step` does."""
    state, twin = reduced(preset, flags, optimizer), reduced(preset, flags, optimizer)
    twin = fsdp.step(twin)
    with as_streams(state._executor.run):
        main = {name: state.main[name] for name in state.layout.trainable}
        left = _beside(state, main)
    state._executor.settle()
    if left:
        in_place(state, left)
    pairs = zip(*(pytree.tree_leaves((one.main, one.opt)) for one in (state, twin)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(left) == (len(main) if preset == "ddp" else 0)
    assert main


@pytest.mark.parametrize("optimizer", [pytest.param("nadam", marks=pytest.mark.large), "partition"])
def test_an_update_of_others_on_the_lane_is_that_of_a_step(optimizer: str) -> None:
    launch(updated, ("hfsdp", (True,), optimizer), nprocs=4)


@pytest.mark.parametrize(("preset", "flags"), each(PRESETS, [(True,), (False, True)]))
def test_an_update_on_the_lane_is_that_of_a_step(preset: str, flags: tuple[bool, ...]) -> None:
    launch(updated, (preset, flags), nprocs=ranks_of(preset))


class Plain:
    """Gradient descent by bucket, which knows nothing of skipping."""

    by_bucket = True

    def init(self, main: Any) -> Any:
        return ()

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> Any:
        for name, buffer in main.items():
            buffer.local.sub_(grads[name].local)
        return main, opt


@pytest.mark.parametrize(
    ("name", "overlapped", "skip", "lacks"),
    product(["plain", "adamw"], [False, True], [None, False, True], [(), ("u1.b", "u3.a", "u3.b")]),
)
@each_rank(2)
def test_an_update_in_parts_is_that_of_a_step(
    name: str, overlapped: bool, skip: bool | None, lacks: tuple[str, ...]
) -> None:
    """In portions on the lane; leaves without a gradient stay what they were."""
    optimizer: Any = Plain() if name == "plain" else fsdp.adamw(lr=0.1)

    def made() -> fsdp.State:
        spec = fsdp.Spec(fsdp.local_mesh(), units=["u*"], schedule=Schedule(overlap_update=overlapped))
        params = {f"u{i}.{key}": torch.full((300,), i + 1.0) for i in range(4) for key in "ab"}
        state = fsdp.shard(params, spec, optimizer)
        for unit in reversed(state.units):
            grads = {key: None if f"{unit}.{key}" in lacks else torch.ones(300) for key in "ab"}
            state = fsdp.reduce(state, grads, unit)
        return state

    skips = None if skip is None else torch.tensor(skip)
    state, twin = made(), fsdp.step(made(), skip=skips)
    state._executor.finish(state)
    given, run = state._executor.reductions.given, state._executor.run
    lacking = given.agree(run, run.compare(run.vote(0, 0, given.vote())))
    run.confirm()
    state = state._evolve(opt=counting(state, lacking))
    before = keep(state, lacking.given)
    with as_streams(run) as lanes:
        main = {name: state.main[name] for name in state.layout.trainable}
        new, opt = apply_optimizer(state, main, skips, lacking.given)
    put_back(before)
    pairs = zip(*(pytree.tree_leaves(one) for one in ((new, opt), (twin.main, twin.opt))), strict=True)
    shards = fsdp.local_shards(twin)
    assert all(torch.equal(shards[path], torch.full_like(shards[path], int(path[1]) + 1)) for path in lacks)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert (lanes.jobs > 0) == (overlapped and skip is None)


def returned(change: Callable[[Any], Any]) -> str:
    class Elsewhere:
        by_bucket = True

        def init(self, main: Any) -> Any:
            return ()

        def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> Any:
            return pytree.tree_map(change, main), opt

    state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh()), Elsewhere())
    state = fsdp.reduce(state, {"w": torch.ones(4)})
    try:
        in_place(state, dict(state.main))
    except TreeError as error:
        return str(error)
    return ""


def test_an_update_by_bucket_that_is_not_in_place_is_refused() -> None:
    assert "Elsewhere says by_bucket = True, and its update returned other tensors" in returned(lambda p: p + 1)
    assert returned(lambda p: p.add_(1)) == ""
