"""The order of streams that GPUs have, without one, on several ranks: nothing that lanes do races with anything."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.presets import PRESETS, ranks_of
from support.problems import batch, loss_fn, net
from support.ranks import each_rank
from support.streams import WAYS, ordered, trained
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._extend import PlannedCopies

pytestmark = pytest.mark.usefixtures("few_groups")
HOST = "pinned_host"


ROWS = [*itertools.product(PRESETS, ("device", HOST), (True, False), WAYS)]
QUICK = [
    ("hfsdp", HOST, True, ""), ("zero3", HOST, False, "lacking"),  # `test_order_of_streams` has the other ways
    ("zero3", "device", True, "copies"), ("zero3", "device", True, "ahead"), ("zero3", "device", True, "looks"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "kind", "overlap", "way"), marked(ROWS, QUICK))
def test_steps_race_with_nothing_and_have_the_same_bits(preset: str, kind: str, overlap: bool, way: str) -> None:
    seen = launch(trained, (preset, kind, overlap, way, True), nprocs=ranks_of(preset))
    plain = launch(trained, (preset, "device", overlap, way, False), nprocs=ranks_of(preset))
    for (found, races), (wanted, _) in zip(seen, plain, strict=True):
        assert not races
        assert all(torch.equal(found[path], wanted[path]) for path in wanted)


# ---------------------------------------------------------------- by hand


def layers(mesh: Any, placement: Any, **schedule: Any) -> fsdp.State:
    params = {"layers": [{"w": torch.ones(32, 32)} for _ in range(4)]}
    spec = fsdp.Spec(mesh, placement, schedule=fsdp.Schedule(overlap_update=True, **schedule))
    return fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))


def used(state: fsdp.State, unit: str, last: bool = True, released: bool = True) -> fsdp.State:
    state, _ = fsdp.unshard(state, unit)
    if not released:
        state = fsdp.reduce(state, {"w": torch.ones(32, 32)}, unit, last_microbatch=last)
    state = fsdp.release(state, unit)
    return fsdp.reduce(state, {"w": torch.ones(32, 32)}, unit, last_microbatch=last) if released else state


@contextmanager
def nothing_races() -> Iterator[None]:
    with ordered() as order:
        yield
        assert not order.races


def ones() -> Any:
    """Gradients of all layers."""
    return {"layers": [{"w": torch.ones(32, 32)} for _ in range(4)]}


kinds = pytest.mark.parametrize("kind", ["device", HOST])


@kinds
@each_rank(4, processes=True)
def test_zeros_come_after_what_lanes_still_read_there(kind: str) -> None:
    """Gradients stay partial until `step`, where others become zeros, perhaps in the memory of these. On the device the
    partial gradients go, and lanes still have them."""
    with nothing_races():
        mesh = fsdp.local_mesh(replica=2, shard=-1)
        state = layers(mesh, fsdp.hsdp("replica", "shard", memory_kind=kind), order=["layers.0", "layers.1"])
        for _ in range(2):
            for unit in ("layers.1", "layers.0"):
                state = used(state, unit, last=False)
            state = fsdp.step(state)


@pytest.mark.parametrize("released", [False, True])
@kinds
@each_rank(2, processes=True)
def test_an_update_comes_after_gathers_that_nobody_waited_for(kind: str, released: bool) -> None:
    """Only the backward's half of the order of use: units are gathered ahead that nobody waits for."""
    with nothing_races():
        state = layers(fsdp.local_mesh(), fsdp.zero3("data", memory_kind=kind))
        for _ in range(2):
            for last in (False, True):
                for unit in reversed(state.units):
                    state = used(state, unit, last, released)
            state = fsdp.step(state)


@kinds
@each_rank(4, processes=True)
def test_an_update_comes_after_counts_that_are_new(kind: str) -> None:
    """A rank's own leaf gets no gradient, while another rank's does: counts are new on both."""
    with nothing_races():
        mesh = fsdp.local_mesh(expert=2, data=2)
        mine = mesh.get_local_rank("expert")
        rules = {"experts": fsdp.zero3("data", memory_kind=kind), "*": fsdp.zero3("expert", "data", memory_kind=kind)}
        params = {"experts": {"a": torch.ones(300), "b": torch.ones(300)}, "rest": torch.ones(300)}
        spec = fsdp.Spec(mesh, rules, units=["experts", "rest"], schedule=fsdp.Schedule(overlap_update=True))
        state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))
        for i in range(3):
            a = torch.ones(300) if i == 0 or mine else None
            state = fsdp.reduce(state, {"experts": {"a": a, "b": torch.ones(300)}, "rest": torch.ones(300)})
            state = fsdp.step(state)


@each_rank(2, processes=True)
def test_a_unit_is_copied_to_its_place_after_its_own_gather() -> None:
    """A unit is used more often than the order says: its weights are copied to where the plan is gathering it."""
    with nothing_races():
        params, model = fsdp.functionalize(net(torch.float32, 2))
        uses = ["embed.weight", "blocks.0", "blocks.1", "embed.weight", "tail", "blocks.1", "blocks.0", "embed.weight"]
        spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(uses, prefetch=3, keep=()))
        state, real, seen = fsdp.shard(params, spec, fsdp.sgd(1e-2)), PlannedCopies.put, list[bool]()

        def put(copies: PlannedCopies, gathers: Any, unit: str) -> Any:
            seen.append(unit in gathers.flying)
            return real(copies, gathers, unit)

        forward_backward = T.forward_backward(model, loss_fn)
        with mock.patch.object(PlannedCopies, "put", put), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* nothing is overlapped")
            for k in range(2):
                state, _ = forward_backward(state, batch(0, dist.get_rank(), k), last_microbatch=k > 0)
        assert any(seen)


LOOKS: dict[str, Callable[[fsdp.State], Any]] = {
    "norms": lambda state: T.norms(state, state.main),
    "of what is kept": lambda state: T.norms(state, state.opt[0]),
    "dot": lambda state: T.dot(state, state.main, state.main),
    "gradients": lambda state: T.norms(state, state.grads),
    "shards": lambda state: [local.sum() for local in fsdp.local_shards(state).values()],
    "full": fsdp.full_params,
}


@pytest.mark.parametrize("how", LOOKS)
@each_rank(2, processes=True)
def test_an_update_comes_after_looks_at_what_it_changes(how: str) -> None:
    """Weights, gradients, or what an optimizer keeps are looked at between `reduce` and the update beside it."""
    with nothing_races():
        state = layers(fsdp.local_mesh(), fsdp.zero3("data"))
        for _ in range(2):
            for unit in (*state.units, *state.units[::-1]):
                state = fsdp.release(fsdp.unshard(state, unit)[0], unit)
            state = fsdp.reduce(state, ones())
            LOOKS[how](state)
            state = fsdp.step(state)


@each_rank(2, processes=True)
def test_what_a_lane_reads_is_waited_for_after_a_capture_in_vain() -> None:
    """A lane reads weights, and the step that is captured then never runs: the eager one in its place waits for it."""
    with nothing_races():
        state = layers(fsdp.local_mesh(), fsdp.zero3("data"))
        fsdp.stream_to(lambda unit, named: None, state, gather=False)
        with mock.patch.object(state.version.lineage.runtime, "capturing", True):
            state.version.lineage.end_reads()
        fsdp.step(fsdp.reduce(state, ones()))


@each_rank(2, processes=True)
def test_weights_move_along_gradients_that_are_under_way() -> None:
    with nothing_races():
        params, model = fsdp.functionalize(nn.Linear(16, 16))
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1e-2))
        forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())
        state, _ = forward_backward(state, torch.ones(4, 16))
        T.jvp(model)(state, state.grads, torch.ones(4, 16))


@each_rank(2, processes=True)
def test_gradients_of_another_state_are_finished_before_they_are_taken() -> None:
    """They are taken while they are under way there."""
    with nothing_races():
        state = layers(fsdp.local_mesh(), fsdp.zero3("data"))
        there = fsdp.replace_params(state, fsdp.local_shards(state))
        state = fsdp.step(fsdp.replace_grads(state, fsdp.reduce(there, ones())))
    weights = fsdp.full_params(state)["layers"][0]["w"]
    torch.testing.assert_close(weights, torch.full((32, 32), 0.9899))  # a step of AdamW, with decay 0.01


@each_rank(2, processes=True)
def test_weights_that_go_while_a_lane_streams_them_are_kept_for_it() -> None:
    """Nobody waits for a stream, and its state goes."""
    with nothing_races():
        state = layers(fsdp.local_mesh(), fsdp.zero3("data"))
        fsdp.stream_to(lambda *_: None, state)
        del state
        gc.collect()


ROUND = (True, True)


@pytest.mark.parametrize(("flags", "replicas"), [
    ((True, False), 2), (ROUND, 2), ((False, False), 2), ((True, False), 1),  # one replica sends the same either way
])  # fmt: skip
@each_rank(2, processes=True)
def test_ranks_that_differ_in_last_microbatch_take_no_step(flags: tuple[bool, bool], replicas: int) -> None:
    """With these flags, each rank its own, in the second of three steps. On GPUs, where nobody compares collectives as
    they are issued, sums of other units would be taken for these."""
    with ordered():
        state = layers(fsdp.local_mesh(replica=replicas, shard=-1), fsdp.hsdp("replica", "shard"))
        for lasts in (ROUND, flags, ROUND):
            at = state
            for unit in state.units:
                at = fsdp.release(fsdp.unshard(at, unit)[0], unit)
            for unit in reversed(state.units):
                at = used(at, unit, lasts[dist.get_rank()])
            if replicas > 1 and len({*lasts}) > 1:
                with pytest.raises(fsdp.ScheduleError, match="last_microbatch"):
                    fsdp.step(at)
            else:
                state = fsdp.step(at)
