"""Captured steps that update weights where their gradients arrive: the bits of others, on lanes in order, and refusals.

A capture is taken without a device here, so what is captured runs. Graphs: tests/gpu/test_arrivals.py.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.presets import AXES, PRESETS, ranks_of
from support.problems import batch, loss_fn, mesh_and_placement, net
from support.ranks import each_rank, launch
from support.streams import Order, ordered
from support.tables import FULL, marked

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, _capture, extend
from functional_fsdp import transforms as T
from functional_fsdp._capture import Arrival, Gone, Rooms, gone
from functional_fsdp._exact_sums import ordered_sum
from functional_fsdp._runtime.agreement import NewCounts
from functional_fsdp._seams import Capture
from functional_fsdp.extend import lineage_of
from functional_fsdp.transforms._cuda_graph.capturing import GraphBuffers

pytestmark = pytest.mark.usefixtures("few_groups")

DEPTH = 2
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
    params, model = fsdp.functionalize(net(torch.float32, DEPTH))
    mesh, _ = mesh_and_placement(preset)
    schedule = {"overlap_update": True, **schedule}
    spec = fsdp.Spec(
        mesh, getattr(fsdp, preset)(*AXES[preset]), precision=PRECISIONS[precision],
        schedule=fsdp.Schedule(**schedule), labels={"*.bias": "bias"},
        transport="copy_engine" if precision == "copies" else "collective",
    )  # fmt: skip
    return fsdp.shard(params, spec, OPTIMIZERS[optimizer]()), T.forward_backward(model, loss_fn)


@contextmanager
def in_small(watched: bool = True) -> Iterator[Order | None]:
    """Every bucket counts, and has several pieces; lanes are streams in order."""
    with mock.patch.multiple(_capture, LEAST=0, PIECE=1 << 10):
        if not watched:
            yield None
            return
        with ordered() as order:
            yield order


on_processes = each_rank(2, processes=True)  # `ordered` patches what simulated ranks would share


def tensors(state: fsdp.State) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in pytree.tree_leaves((state.main, state.weights, state.opt, state.count))]


def trained(state: fsdp.State, forward_backward: Any, steps: Sequence[int]) -> fsdp.State:
    for i in steps:
        state, _ = forward_backward(state, batch(i, dist.get_rank(), 0))
        state = fsdp.step(state)
    return state


def stepped(preset: str, precision: str, optimizer: str, arrive: bool, watched: bool) -> Any:
    """What a state has after three steps and two captured ones, what raced, and how many buckets arrived in those, and
    were used up beside what came next."""
    with in_small(watched) as order:
        state, forward_backward = made(preset, precision, optimizer)
        state = trained(state, forward_backward, range(3))
        arrived = besides = 0
        for i in (3, 4):
            beside = lineage_of(state).beside_backward if watched else tuple(state.layout.trainable)
            capture = Capture(state, beside if arrive else ())
            with capture.recording():
                state, _ = forward_backward(state, batch(i, dist.get_rank(), 0))
                used = [one for one in state._executor.sink.consumers.values() if one.used]
                arrived += len(used)
                besides += sum(one.beside for one in used)
                state = fsdp.step(state)
            capture.first(lambda: None)
            assert not state._executor.sink.consumers
        assert order is None or not order.races
        return tensors(state), arrived, besides


ALONE = ("exact", "copies", "mixed", "several mains", "mixed in units", "cast once")  # sums in float32, into float32
ROWS = [*itertools.product(PRESETS, PRECISIONS, OPTIMIZERS)]
QUICK = [
    ("zero2", "native", "partition"), ("zero1", "float32", "adamax"),
    ("zero3", "exact, halved", "sgd"), ("ddp", "copies", "adamw"), ("zero3", "mixed in units", "adamw"),
    ("zero3", "cast once", "adamw"), ("zero3", "several mains", "sgd"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "precision", "optimizer"), marked(ROWS, QUICK))
def test_bits_are_those_of_updates_at_the_end(preset: str, precision: str, optimizer: str) -> None:
    def run(arrive: bool, watched: bool) -> Any:
        args = (preset, precision, optimizer, arrive, watched)
        return launch(stepped, args, nprocs=ranks_of(preset), processes=True)

    plain = run(False, False)
    for watched in (False, True) if FULL or preset in ("ddp", "hfsdp") else (True,):
        for (found, arrived, besides), (wanted, none, _) in zip(run(True, watched), plain, strict=True):
            assert not none
            assert all(map(torch.equal, found, wanted))
            overlaps = preset != "ddp" or not watched  # not of main weights that every rank has whole
            assert bool(arrived) == (overlaps and optimizer != "adamax")  # which may count what it is called for
            assert bool(besides) == (bool(arrived) and preset in ("zero1", "zero2", "zero3") and precision in ALONE)


@on_processes
def test_gradients_that_somebody_looks_at_are_kept() -> None:
    for how in ("nobody looks", "not asked", "microbatches", "clipped", "looked at", "whole", "skip"):
        with in_small():
            beside, stays = kept(how)
        assert stays == (how != "nobody looks"), how
        assert not beside if stays else beside > 2, how


def kept(how: str) -> tuple[int, bool]:
    """How many buckets the last of three eager steps lets arrive, and whether a captured step then keeps gradients."""
    state, forward_backward = made("zero3", "native", "adamw", overlap_update=how != "not asked")
    micro = 2 if how == "microbatches" else 1

    def train_step(state: fsdp.State, i: int) -> tuple[fsdp.State, bool]:
        for k in range(micro):
            state, _ = forward_backward(state, batch(i, dist.get_rank(), k), last_microbatch=k == micro - 1)
        if how == "clipped":
            state, _ = T.clip_by_global_norm(state, 0.1)
        elif how == "looked at":
            fsdp.local_shards(state, "grads")
        elif how == "whole":
            state = fsdp.finish_reductions(state)
        stays = not any(isinstance(buffer.local, Gone) for buffer in state.grads.values())
        return fsdp.step(state, skip=torch.zeros((), dtype=torch.bool) if how == "skip" else None), stays

    for i in range(3):
        state, _ = train_step(state, i)
    beside = lineage_of(state).beside_backward
    with Capture(state, beside).recording():
        return len(beside), train_step(state, 3)[1]


# ---------------------------------------------------------------- refusals


UNITS = ("embed.weight", "blocks.0", "blocks.1", "tail")


def by_hand(state: fsdp.State, backward: Sequence[str]) -> fsdp.State:
    """A forward, and these units' part of a backward."""
    for unit in UNITS:
        state = fsdp.release(fsdp.unshard(state, unit)[0], unit)
    return back(state, backward)


def back(state: fsdp.State, units: Sequence[str]) -> fsdp.State:
    for unit in units:
        state, weights = fsdp.unshard(state, unit)
        state = fsdp.reduce(state, {key: torch.ones_like(w) for key, w in weights.items()}, unit)
        state = fsdp.release(state, unit)
    return state


READ = "weights were read, or gradients replaced, after the gradients of"
LOOKS = {
    "read": "state.grads['", "changed": "state.grads['", "scaled": "state.grads['", "weights": READ, "again": READ,
    "streams": READ, "skip": "step(skip=) was called after the gradients of",
    "lacks": "got none in the step that is captured",
}  # fmt: skip


@on_processes
def test_who_looks_all_the_same_is_told() -> None:
    """What a captured step that does something else than the eager ones says; and the state before is good."""
    units = UNITS[::-1]

    def step(state: fsdp.State, how: str) -> None:
        middle = by_hand(state, units[:3])
        name = next(name for name, one in state._executor.sink.consumers.items() if one.used)
        if how == "read":
            middle.grads[name].local.norm()
        elif how == "changed":
            middle.grads[name].local.mul_(2)
        elif how == "scaled":
            pytree.tree_map_only(torch.Tensor, lambda g: g * 2, middle.grads)
        elif how == "weights":
            fsdp.full_params(middle)
        elif how == "streams":
            fsdp.stream_to(lambda *_: None, middle, gather=False)
        elif how == "again":
            fsdp.step(back(back(middle, units[3:]), units))
        elif how == "skip":
            fsdp.step(back(middle, units[3:]), skip=torch.zeros((), dtype=torch.bool))
        else:  # a leaf without a gradient, which is not updated by zeros
            middle, weights = fsdp.unshard(middle, units[3])
            fsdp.step(fsdp.reduce(middle, dict.fromkeys(weights), units[3]))

    for how, text in LOOKS.items():
        with in_small():
            state, _ = made("zero3", "float32", "adamw")
            state = fsdp.step(by_hand(state, units))
            capture = Capture(state, tuple(state.layout.trainable))
            with pytest.raises(NewCounts if how == "lacks" else ScheduleError) as said, capture.recording():
                step(state, how)
            capture.abandon()
            assert text in str(said.value)
            assert how == "lacks" or "overlap_update" in str(said.value)
            assert not state._executor.sink.consumers
            assert fsdp.step(by_hand(state, units)).between_steps


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
    """Weights after a captured step of this kind, and how many buckets it was to update on arrival."""
    CELL[:] = [torch.tensor(0.1)]
    with in_small(arrive) as order:
        params, model = fsdp.functionalize(net(torch.float32, DEPTH))
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
        assert order is None or not order.races
        return [buffer.local.clone() for buffer in state.main.values()], len(capture.beside)


@pytest.mark.parametrize("how", [how for how in STEPS if how != "thrown away"])
def test_a_captured_step_does_what_an_eager_one_does(how: str) -> None:
    ranks = 4 if how == "experts" else 2
    both = (launch(taken, (how, arrive), nprocs=ranks, processes=True) for arrive in (True, False))
    for (found, beside), (wanted, _) in zip(*both, strict=True):
        assert all(map(torch.equal, found, wanted))
        assert bool(beside) == (how != "separate")  # gradients of these come twice a step


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pass_that_is_thrown_away_cannot_be_taken_back(ranks: int) -> None:
    with pytest.raises(fsdp.LaunchError, match="the step was begun anew after the gradients of"):
        launch(taken, ("thrown away", True), nprocs=ranks, processes=True)


@on_processes
def test_what_is_updated_is_what_the_graph_writes_to() -> None:
    """A second signature is captured, from a copy of the state whose tensors graphs write to."""
    found = []
    for arrive in (True, False):
        with in_small():
            first, call = made("zero3", "native", "adamw")
            first = trained(first, call, range(3))
            home, other = GraphBuffers(first), copy.deepcopy(first)
            other = trained(other, call, range(3))
            home.check(other)
            home.enter(other)
            beside = lineage_of(other).beside_backward if arrive else ()
            capture = Capture(other, beside)
            with capture.recording():
                state = trained(home.state(other), call, [9])
                home.keep(state, None)
            capture.first(lambda: None)
            assert bool(beside) is arrive
            found.append([b.local.clone() for b in home.state(state).main.values()])
    assert all(map(torch.equal, *found))


@on_processes
def test_weights_are_not_gathered_after_their_update() -> None:
    """A forward with the weights between reduce and step, of the step that is captured only."""
    loss = lambda m, x: (m(x) - x).square().mean()  # noqa: E731
    for between in (True, False):
        with in_small():
            params, model = fsdp.functionalize(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
            spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(overlap_update=True))
            state = fsdp.shard(params, spec, fsdp.sgd(0.1))
            call, look = T.forward_backward(model, loss), T.apply(model, loss)
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
            for _ in range(3):
                state = fsdp.step(call(state, x)[0])
            capture, said = Capture(state, lineage_of(state).beside_backward), ""
            try:
                with capture.recording():
                    middle, _ = call(state, x)
                    fsdp.step(look(middle, x)[0] if between else middle)
            except ScheduleError as error:
                capture.abandon()
                said = str(error)
            assert ("weights were read" in said) is between
            assert not state._executor.run.capturing


@on_processes
def test_an_error_before_the_first_update_leaves_nothing_behind() -> None:
    """The rate cannot be computed in the step that is captured."""
    bad = [False]

    def rate(count: torch.Tensor) -> torch.Tensor:
        if bad[0]:
            raise RuntimeError("no rate")
        return 0.1 / (1 + count)

    with in_small():
        params, model = fsdp.functionalize(net(torch.float32, DEPTH))
        spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(overlap_update=True))
        call = T.forward_backward(model, loss_fn)
        state = trained(fsdp.shard(params, spec, fsdp.sgd(rate)), call, range(3))
        before = tensors(state)
        capture = Capture(state, lineage_of(state).beside_backward)
        bad[0] = True
        with pytest.raises(RuntimeError, match="no rate"), capture.recording():
            call(state, batch(3, dist.get_rank(), 0))
        capture.abandon()
        bad[0] = False
        assert all(map(torch.equal, before, tensors(state)))
        run = state._executor.run
        trained(state, call, [3])
        assert not run.capturing
        assert run.logs is run.issued


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts, self.out = (torch.nn.Linear(16, 16) for _ in range(3))


@each_rank(4, processes=True)
def test_ranks_whose_experts_get_no_gradient_go_back_together() -> None:
    """In the step that is captured, experts of some ranks get no gradient: all of the ranks go back."""
    with in_small():
        torch.manual_seed(0)
        params, _ = fsdp.functionalize(Experts())
        mesh = fsdp.local_mesh(expert=2, data=2)
        rules = {"experts*": fsdp.zero3("data"), "*": fsdp.zero3("expert", "data")}
        schedule, units = fsdp.Schedule(overlap_update=True), ["dense", "experts", "out"]
        spec = fsdp.Spec(mesh, rules, schedule=schedule, units=units)
        state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))

        def train_step(state: fsdp.State, lacks: bool) -> fsdp.State:
            for unit in state.units:
                state = fsdp.release(fsdp.unshard(state, unit)[0], unit)
            for unit in state.units[::-1]:
                state, weights = fsdp.unshard(state, unit)
                none = lacks and unit == "experts" and mesh.get_local_rank("expert") == 1
                grads = {key: None if none else torch.ones_like(w) for key, w in weights.items()}
                state = fsdp.release(fsdp.reduce(state, grads, unit), unit)
            return fsdp.step(state)

        for lacks in (False, False, True, False):  # the optimizer has counts from the third on
            state = train_step(state, lacks)
        capture = Capture(state, lineage_of(state).beside_backward)
        text = r"(?s)'experts'.*got none in the step that is captured"
        with pytest.raises(NewCounts, match=text), capture.recording():
            train_step(state, True)


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


def test_what_stands_for_gradients_says_what_it_is() -> None:
    one = gone("blocks.0", 1024, torch.float32, torch.device("cpu"))
    assert repr(one) == "Gone('blocks.0', 1,024 elements, torch.float32)"
    assert (one.shape, one.nbytes) == ((1024,), 4096)
    with pytest.raises(ScheduleError, match=r"state\.grads\['blocks\.0'\] was read or changed"):
        torch.add(torch.ones(1024), one)
