"""Captured steps that update weights where their gradients arrive: the bits of others, on lanes in order, and refusals.

A capture is taken without a device here, so what is captured runs. Graphs: tests/gpu/test_arrivals.py.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.presets import AXES, PRESETS, ranks_of
from support.problems import batch, loss_fn, mesh_and_placement, net
from support.streams import ordered
from support.tables import FULL, marked

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, extend, launch
from functional_fsdp import transforms as T
from functional_fsdp._capture import arrivals
from functional_fsdp._capture.arrivals import Arrival, Gone, Rooms, gone
from functional_fsdp._exact_sums.ordered_sum import ordered_sum
from functional_fsdp._runtime.given import NewCounts
from functional_fsdp._seams import Capture
from functional_fsdp.extend import lineage_of
from functional_fsdp.transforms._cuda_graph.capturing import GraphBuffers

pytestmark = pytest.mark.usefixtures("few_groups")

EXACT = fsdp.Precision(compute=torch.bfloat16, sum="fp32")
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=lambda count: 1e-2 / (1 + count), weight_decay={"bias": 0.0, "default": 0.1}),
    "sgd": lambda: fsdp.sgd(1e-2, 0.9),
    "partition": lambda: fsdp.partition({"bias": fsdp.sgd(1e-2, 0.9), "default": fsdp.adamw(lr=1e-2)}),
    "adamax": lambda: fsdp.from_torch(torch.optim.Adamax, lr=1e-2),
}
PRECISIONS: dict[str, Any] = {
    "float32": fsdp.Precision(),
    "native": fsdp.Precision(compute=torch.bfloat16),
    "exact": EXACT,
    "exact, halved": fsdp.Precision(compute=torch.bfloat16, sum="fp32", grads=torch.bfloat16),
    "copies": EXACT,
    "cast once": fsdp.Precision(compute=torch.bfloat16, gather=torch.bfloat16, sum="fp32"),
    # what is summed on the update lane and what is cast on the reduce lane, in one room
    "mixed": {
        "embed*": fsdp.Precision(compute=torch.bfloat16),
        "blocks.1.*": fsdp.Precision(compute=torch.bfloat16, sum="fp32", grads=torch.bfloat16),
        "*": EXACT,
    },
    "several mains": {"blocks.1.*": fsdp.Precision(main=torch.bfloat16, compute=torch.bfloat16), "*": EXACT},
    # mixed, of each unit
    "mixed in units": {"*.weight": EXACT, "*": fsdp.Precision(compute=torch.bfloat16)},
}


def made(preset: str, precision: str, optimizer: str, **schedule: Any) -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(net(torch.float32))
    mesh, _ = mesh_and_placement(preset)
    schedule = {"overlap_update": True, **schedule}
    spec = fsdp.Spec(
        mesh, getattr(fsdp, preset)(*AXES[preset]), precision=PRECISIONS[precision],
        schedule=fsdp.Schedule(**schedule), labels={"*.bias": "bias"},
        transport="copy_engine" if precision == "copies" else "collective",
    )  # fmt: skip
    return fsdp.shard(params, spec, OPTIMIZERS[optimizer]()), T.forward_backward(model, loss_fn)


def in_small() -> Any:
    """Every bucket counts, and has several pieces."""
    return mock.patch.multiple(arrivals, LEAST=0, PIECE=1 << 10)


def tensors(state: fsdp.State) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in pytree.tree_leaves((state.main, state.weights, state.opt, state.count))]


def stepped(preset: str, precision: str, optimizer: str, arrive: bool, watched: bool) -> Any:
    """What a state has after three steps and two captured ones, what raced, and how many buckets arrived in those, and
    were used up beside what came next."""
    with in_small(), ordered() if watched else nullcontext() as order:
        state, forward_backward = made(preset, precision, optimizer)
        arrived = besides = 0
        for i in range(5):
            lineage = lineage_of(state)
            beside = (lineage.beside_backward if watched else tuple(state.layout.trainable)) if arrive else ()
            if i < 3:
                state, _ = forward_backward(state, batch(i, dist.get_rank(), 0))
                state = fsdp.step(state)
                continue
            capture = Capture(state, beside)
            with capture.recording():
                state, _ = forward_backward(state, batch(i, dist.get_rank(), 0))
                arrived += sum(one.used for one in state._executor.sink.consumers.values())
                besides += sum(one.used and one.beside for one in state._executor.sink.consumers.values())
                state = fsdp.step(state)
            capture.first(lambda: None)
            assert not state._executor.sink.consumers
        return tensors(state), [] if order is None else order.races, arrived, besides


ALONE = ("exact", "copies", "mixed", "several mains", "mixed in units", "cast once")  # sums in float32, into float32
ROWS = [*itertools.product(PRESETS, PRECISIONS, OPTIMIZERS)]
QUICK = [
    ("zero3", "exact", "adamw"), ("zero2", "native", "partition"), ("zero1", "float32", "adamax"),
    ("zero3", "exact, halved", "sgd"), ("ddp", "copies", "adamw"), ("zero3", "mixed in units", "adamw"),
    ("hfsdp", "cast once", "adamw"), ("zero3", "several mains", "sgd"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "precision", "optimizer"), marked(ROWS, QUICK))
def test_bits_are_those_of_updates_at_the_end(preset: str, precision: str, optimizer: str) -> None:
    plain = launch(stepped, (preset, precision, optimizer, False, False), nprocs=ranks_of(preset))
    for watched in (False, True) if FULL or preset in ("ddp", "hfsdp") else (True,):
        seen = launch(stepped, (preset, precision, optimizer, True, watched), nprocs=ranks_of(preset))
        for (found, races, arrived, besides), (wanted, _, none, _) in zip(seen, plain, strict=True):
            assert not races
            assert not none
            assert all(map(torch.equal, found, wanted))
            overlaps = preset != "ddp" or not watched  # not of main weights that every rank has whole
            assert bool(arrived) == (overlaps and optimizer != "adamax")  # which may count what it is called for
            assert bool(besides) == (bool(arrived) and preset in ("zero1", "zero2", "zero3") and precision in ALONE)


def kept(how: str) -> tuple[int, bool]:
    """How many buckets the last of three eager steps lets arrive, and whether a captured step then keeps gradients."""
    with in_small(), ordered():
        state, forward_backward = made("zero3", "native", "adamw", overlap_update=how != "not asked")
        micro = 2 if how == "microbatches" else 1

        def train_step(state: fsdp.State, i: int) -> fsdp.State:
            for k in range(micro):
                state, _ = forward_backward(state, batch(i, dist.get_rank(), k), last_microbatch=k == micro - 1)
            if how == "clipped":
                state, _ = T.clip_by_global_norm(state, 0.1)
            elif how == "looked at":
                fsdp.local_shards(state, "grads")
            elif how == "whole":
                state = fsdp.finish_reductions(state)
            stays.append(not any(isinstance(buffer.local, Gone) for buffer in state.grads.values()))
            return fsdp.step(state, skip=torch.zeros((), dtype=torch.bool) if how == "skip" else None)

        stays: list[bool] = []
        for i in range(3):
            state = train_step(state, i)
        beside = lineage_of(state).beside_backward
        capture = Capture(state, beside)
        with capture.recording():
            train_step(state, 3)
        return len(beside), stays[-1]


@pytest.mark.parametrize("how", ["not asked", "microbatches", "clipped", "looked at", "whole", "skip"])
def test_gradients_that_somebody_looks_at_are_kept(how: str) -> None:
    assert launch(kept, (how,), nprocs=2) == [(0, True)] * 2


def test_gradients_that_nobody_looks_at_are_not() -> None:
    for beside, stays in launch(kept, ("",), nprocs=2):
        assert beside > 3
        assert not stays


# ---------------------------------------------------------------- refusals


UNITS = ("embed.weight", "blocks.0", "blocks.1", "blocks.2", "tail")


def by_hand(state: fsdp.State, backward: Sequence[str]) -> fsdp.State:
    """A forward, and these units' part of a backward."""
    for unit in UNITS:
        state, _ = fsdp.unshard(state, unit)
        state = fsdp.release(state, unit)
    return back(state, backward)


def back(state: fsdp.State, units: Sequence[str]) -> fsdp.State:
    for unit in units:
        state, weights = fsdp.unshard(state, unit)
        state = fsdp.reduce(state, {key: torch.ones_like(w) for key, w in weights.items()}, unit)
        state = fsdp.release(state, unit)
    return state


def refused(how: str) -> tuple[str, bool]:
    """What a captured step that does something else than the eager ones says, and whether the state before is good."""
    with in_small(), ordered():
        units = UNITS[::-1]
        state, _ = made("zero3", "float32", "adamw")
        state = fsdp.step(by_hand(state, units))
        said = ""
        capture = Capture(state, tuple(state.layout.trainable))
        try:
            with capture.recording():
                middle = by_hand(state, units[:3])
                name = next(name for name, one in state._executor.sink.consumers.items() if one.used)
                if how == "read":
                    middle.grads[name].local.norm()
                elif how == "changed":
                    middle.grads[name].local.mul_(2)
                elif how == "scaled":
                    middle = pytree.tree_map_only(torch.Tensor, lambda g: g * 2, middle.grads)
                elif how == "weights":
                    fsdp.full_params(middle)
                elif how == "again":
                    fsdp.step(back(back(middle, units[3:]), units))
                else:
                    fsdp.step(back(middle, units[3:]), skip=torch.zeros((), dtype=torch.bool))
        except ScheduleError as error:
            said = str(error)
        capture.abandon()
        assert not state._executor.sink.consumers
        return said, fsdp.step(by_hand(state, units)).between_steps  # the state before is good


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("read", "state.grads['"),
        ("changed", "state.grads['"),
        ("scaled", "state.grads['"),
        ("weights", "weights were read, or gradients replaced, after the gradients of"),
        ("again", "weights were read, or gradients replaced, after the gradients of"),
        ("skip", "step(skip=) was called after the gradients of"),
    ],
)  # fmt: skip
def test_who_looks_all_the_same_is_told(how: str, text: str) -> None:
    for said, good in launch(refused, (how,), nprocs=2):
        assert text in said, said
        assert "overlap_update" in said
        assert good


# ---------------------------------------------------------------- the same bits, whatever the step does


class Keeps:
    """An optimizer of a user's: its rate is in its state, and it counts."""

    by_bucket = elementwise = True

    def init(self, main: Any) -> Any:
        return {"rate": torch.tensor(0.1), "calls": {name: torch.zeros(()) for name in main}}

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> Any:
        for name in main:
            opt["calls"][name] += 1
            main[name].local.sub_(grads[name].local * opt["rate"] / opt["calls"][name])
        return main, opt


class Parts(Keeps):
    """The same without a count, so that it may be called for parts."""

    def init(self, main: Any) -> Any:
        return {"rate": torch.tensor(0.1)}

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> Any:
        for name in main:
            main[name].local.sub_(grads[name].local * opt["rate"])
        return main, opt

    def for_step(self, count: torch.Tensor, labels: Any) -> Any:
        return self


CELL: list[torch.Tensor] = []


def rate(count: torch.Tensor) -> torch.Tensor:
    return CELL[0] / (1 + count)


STEPS: dict[str, Callable[[], Any]] = {
    "a rate is set": lambda: fsdp.sgd(rate),
    "a state is set": Parts,
    "an optimizer is set": lambda: fsdp.sgd(0.1),
    "it counts": Keeps,
    "read after it": lambda: fsdp.adamw(lr=1e-2),
    "changed after it": lambda: fsdp.adamw(lr=1e-2),
    "separate": lambda: fsdp.adamw(lr=1e-2),
    "experts": lambda: fsdp.sgd(0.1),
    "thrown away": lambda: fsdp.sgd(0.1),
}


def one_step(how: str, state: fsdp.State, call: Any, i: int) -> fsdp.State:
    rank = dist.get_rank()
    if how == "a rate is set":
        CELL[0].copy_(torch.tensor(0.1 * (i + 1)))
    elif how == "a state is set":
        state = extend.evolve(state, opt={**state.opt, "rate": torch.tensor(0.1 * (i + 1))})
    elif how == "an optimizer is set":
        state = extend.evolve(state, optimizer=fsdp.sgd(0.1 * (i + 1)))
    elif how == "separate":
        state, _, _ = extend.separate_gradients(state, "penalty", lambda state: call(state, batch(50 + i, rank, 0)))
    elif how == "thrown away":
        call(state, batch(100 + i, rank, 0))
    state, _ = call(state, batch(i, rank, 0))
    state = fsdp.step(state)
    if how == "read after it":
        fsdp.full_params(state)
    elif how == "changed after it":
        main = state.main

        def clamp() -> None:
            for buffer in main.values():
                buffer.local.clamp_(-1, 1)

        state = extend.change_weights(state, "clamp()", clamp)
    return state


def taken(how: str, arrive: bool) -> Any:
    """Weights after a captured step of this kind, how many buckets it was to update on arrival, and what raced."""
    CELL[:] = [torch.tensor(0.1)]
    with in_small(), ordered() if arrive else nullcontext() as order:
        params, model = fsdp.functionalize(net(torch.float32, 2))
        mesh, rules = fsdp.local_mesh(), {"*": fsdp.zero3("data")}
        if how == "experts":
            mesh = fsdp.local_mesh(expert=2, data=2)
            rules = {"blocks.1.*": fsdp.zero3("data"), "*": fsdp.zero3("expert", "data")}
        spec = fsdp.Spec(mesh, rules, precision=PRECISIONS["exact"], schedule=fsdp.Schedule(overlap_update=True))
        state, call = fsdp.shard(params, spec, STEPS[how]()), T.forward_backward(model, loss_fn)
        for i in range(3):
            state = one_step(how, state, call, i)
        capture = Capture(state, lineage_of(state).beside_backward if arrive else ())
        with capture.recording():
            state = one_step(how, state, call, 7)
        capture.first(lambda: None)
        races = [] if order is None else order.races
        return [buffer.local.clone() for buffer in state.main.values()], len(capture.beside), races


@pytest.mark.parametrize("how", [how for how in STEPS if how != "thrown away"])
def test_a_captured_step_does_what_an_eager_one_does(how: str) -> None:
    ranks = 4 if how == "experts" else 2
    both = zip(launch(taken, (how, True), nprocs=ranks), launch(taken, (how, False), nprocs=ranks), strict=True)
    for (found, beside, races), (wanted, _, _) in both:
        assert all(map(torch.equal, found, wanted))
        assert not races
        assert bool(beside) == (how != "separate")  # gradients of these come twice a step


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pass_that_is_thrown_away_cannot_be_taken_back(ranks: int) -> None:
    with pytest.raises(fsdp.LaunchError, match="the step was begun anew after the gradients of"):
        launch(taken, ("thrown away", True), nprocs=ranks)


def in_another_s_home(arrive: bool) -> tuple[list[torch.Tensor], bool]:
    """A second signature is captured, from a copy of the state whose tensors graphs write to."""
    with in_small(), ordered():
        first, call = made("zero3", "native", "adamw")

        def train_step(state: fsdp.State, i: int) -> fsdp.State:
            state, _ = call(state, batch(i, dist.get_rank(), 0))
            return fsdp.step(state)

        for i in range(3):
            first = train_step(first, i)
        home, other = GraphBuffers(first), copy.deepcopy(first)
        for i in range(3):
            other = train_step(other, i)
        home.check(other)
        home.enter(other)
        capture = Capture(other, lineage_of(other).beside_backward if arrive else ())
        with capture.recording():
            state = train_step(home.state(other), 9)
            home.keep(state, None)
        capture.first(lambda: None)
        return [b.local.clone() for b in home.state(state).main.values()], bool(capture.beside)


def test_what_is_updated_is_what_the_graph_writes_to() -> None:
    both = zip(launch(in_another_s_home, (True,), nprocs=2), launch(in_another_s_home, (False,), nprocs=2), strict=True)
    for (found, arrives), (wanted, _) in both:
        assert arrives
        assert all(map(torch.equal, found, wanted))


def looks(between: bool) -> tuple[str, bool]:
    """A forward with the weights between reduce and step, of the step that is captured only."""
    with in_small(), ordered():
        params, model = fsdp.functionalize(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
        spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(overlap_update=True))
        state = fsdp.shard(params, spec, fsdp.sgd(0.1))
        loss = lambda m, x: (m(x) - x).square().mean()  # noqa: E731
        call, look = T.forward_backward(model, loss), T.apply(model, loss)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(3):
            state, _ = call(state, x)
            state = fsdp.step(state)
        capture = Capture(state, lineage_of(state).beside_backward)
        try:
            with capture.recording():
                middle, _ = call(state, x)
                if between:
                    middle, _ = look(middle, x)
                fsdp.step(middle)
        except ScheduleError as error:
            capture.abandon()
            return str(error), state._executor.run.capturing
        return "", state._executor.run.capturing


def test_weights_are_not_gathered_after_their_update() -> None:
    for said, capturing in launch(looks, (True,), nprocs=2):
        assert "weights were read" in said
        assert not capturing
    assert launch(looks, (False,), nprocs=2) == [("", False)] * 2


def fails() -> tuple[str, bool, bool, bool]:
    """The rate cannot be computed in the step that is captured."""
    with in_small(), ordered():
        bad = [False]

        def rate(count: torch.Tensor) -> torch.Tensor:
            if bad[0]:
                raise RuntimeError("no rate")
            return 0.1 / (1 + count)

        params, model = fsdp.functionalize(net(torch.float32))
        spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(overlap_update=True))
        state, call = fsdp.shard(params, spec, fsdp.sgd(rate)), T.forward_backward(model, loss_fn)
        for i in range(3):
            state, _ = call(state, batch(i, dist.get_rank(), 0))
            state = fsdp.step(state)
        before = tensors(state)
        capture, said = Capture(state, lineage_of(state).beside_backward), ""
        bad[0] = True
        try:
            with capture.recording():
                call(state, batch(3, dist.get_rank(), 0))
        except RuntimeError as error:
            said = str(error)
        capture.abandon()
        bad[0] = False
        same = all(map(torch.equal, before, tensors(state)))
        run = state._executor.run
        state, _ = call(state, batch(3, dist.get_rank(), 0))
        fsdp.step(state)
        return said, run.capturing, run.logs is run.issued, same


def test_an_error_before_the_first_update_leaves_nothing_behind() -> None:
    for said, capturing, logs, same in launch(fails, nprocs=2):
        assert "no rate" in said
        assert not capturing
        assert logs
        assert same


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts, self.out = (torch.nn.Linear(16, 16) for _ in range(3))


def experts_lack() -> str:
    """In the step that is captured, experts of some ranks get no gradient: all of the ranks go back."""
    with in_small(), ordered():
        torch.manual_seed(0)
        params, _ = fsdp.functionalize(Experts())
        mesh = fsdp.local_mesh(expert=2, data=2)
        rules = {"experts*": fsdp.zero3("data"), "*": fsdp.zero3("expert", "data")}
        schedule, units = fsdp.Schedule(overlap_update=True), ["dense", "experts", "out"]
        spec = fsdp.Spec(mesh, rules, schedule=schedule, units=units)
        state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))

        def train_step(state: fsdp.State, lacks: bool) -> fsdp.State:
            for unit in state.units:
                state, _ = fsdp.unshard(state, unit)
                state = fsdp.release(state, unit)
            for unit in state.units[::-1]:
                state, weights = fsdp.unshard(state, unit)
                none = lacks and unit == "experts" and mesh.get_local_rank("expert") == 1
                grads = {key: None if none else torch.ones_like(w) for key, w in weights.items()}
                state = fsdp.release(fsdp.reduce(state, grads, unit), unit)
            return fsdp.step(state)

        for lacks in (False, False, True, False):  # the optimizer has counts from the third on
            state = train_step(state, lacks)
        capture = Capture(state, lineage_of(state).beside_backward)
        try:
            with capture.recording():
                train_step(state, True)
        except NewCounts as error:
            capture.abandon()
            return str(error)
        return ""


def test_ranks_whose_experts_get_no_gradient_go_back_together() -> None:
    for said in launch(experts_lack, nprocs=4):
        assert "'experts'" in said
        assert "got none in the step that is captured" in said


@pytest.mark.parametrize("own", [False, True])
def test_a_part_of_a_sum_is_that_part(own: bool) -> None:
    came = torch.randn(3 * 40, generator=torch.Generator().manual_seed(0))
    apart = (1, came[40:80].clone()) if own else None
    whole = torch.empty(40)
    ordered_sum(came, 3, whole, True)
    if own:
        came[40:80] = float("nan")
    part = torch.empty(7)
    ordered_sum(came, 3, part, True, apart, 11)
    assert torch.equal(part, whole[11:18])


@pytest.mark.parametrize("points", [1, 3])
def test_a_transport_says_of_each_portion_that_it_is_there(points: int) -> None:
    one = Arrival("w", torch.float32, [(0, 4), (4, 8)], Rooms(torch.device("cpu")), lambda start, stop, grad: None)
    one.begin("reduce", True, True)
    lanes: Any = SimpleNamespace(wait=lambda mark: None, mark=lambda: None)
    with pytest.raises(ScheduleError, match=rf"portions.there has {points} points, and portions.cuts has 2 portions"):
        one.add_up(torch.zeros(8), 1, False, None, lanes, [None] * points)
    one.add_up(torch.zeros(8), 1, False, None, lanes, [None] * 2)


def lacking() -> str:
    with in_small(), ordered():
        units = UNITS[::-1]
        state, _ = made("zero3", "float32", "adamw")
        state = fsdp.step(by_hand(state, units))
        capture = Capture(state, tuple(state.layout.trainable))
        try:
            with capture.recording():
                middle = by_hand(state, units[:4])
                middle, weights = fsdp.unshard(middle, units[4])
                fsdp.step(fsdp.reduce(middle, dict.fromkeys(weights), units[4]))
        except NewCounts as error:
            return str(error)
        return ""


def test_a_leaf_without_a_gradient_is_not_updated_by_zeros() -> None:
    for said in launch(lacking, nprocs=2):
        assert "got none in the step that is captured" in said


def test_what_stands_for_gradients_says_what_it_is() -> None:
    one = gone("blocks.0", 1024, torch.float32, torch.device("cpu"))
    assert repr(one) == "Gone('blocks.0', 1,024 elements, torch.float32)"
    assert (one.shape, one.nbytes) == ((1024,), 4096)
    with pytest.raises(ScheduleError, match=r"state\.grads\['blocks\.0'\] was read or changed"):
        torch.add(torch.ones(1024), one)
