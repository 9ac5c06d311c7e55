"""Schedules on real ranks: whatever is gathered ahead, kept or skipped, the bits are those of the simplest schedule."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.presets import ranks_of
from support.problems import batch as net_batch
from support.problems import by_unit, full_grads, mesh_and_placement, net
from support.ranks import each_rank, launch
from support.tables import FULL, each, marked
from support.transactions import Boom, taken
from torch import Tensor

import functional_fsdp as fsdp
from functional_fsdp import Schedule, ScheduleError
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers

STEPS, WIDTH, TIMEOUT = 3, 6, 10.0
HIDDEN = (5, 90, 3, 200, 40)  # units of different sizes
UNITS = tuple(f"u{i}" for i in range(len(HIDDEN)))
Tree = dict[str, Tensor]
Skips = tuple[tuple[str, ...], ...]  # by microbatch: the units that are left out
Turn = tuple[str, str, fsdp.State, Tree]  # what comes next, of which unit, and its weights or gradients
Turns = Generator[Turn, fsdp.State | None, tuple[fsdp.State, Tensor]]


# ---------------------------------------------------------------- a chain of residual units: one may be left out


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tree]:
    g = torch.Generator().manual_seed(0)

    def one(hidden: int) -> Tree:
        up, down = torch.randn(WIDTH, hidden, generator=g), torch.randn(hidden, WIDTH, generator=g)
        return {
            "up": (up / WIDTH).to(dtype),
            "down": (down / hidden).to(dtype),
            "bias": torch.zeros(WIDTH, dtype=dtype),
        }

    return {unit: one(hidden) for unit, hidden in zip(UNITS, HIDDEN, strict=True)}


def stage(w: Tree, h: Tensor) -> Tensor:
    return h + torch.tanh(h @ w["up"]) @ w["down"] + w["bias"]


def data(step: int, rank: int, micro: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x, y = torch.randn(2, 3, WIDTH, generator=g)
    return x.to(dtype), y.to(dtype)


def start(
    schedule: Schedule | None = None, preset: str = "zero3", dtype: torch.dtype = torch.float32, **spec: Any
) -> Any:
    mesh, placement = mesh_and_placement(preset)
    given = fsdp.Spec(mesh, placement, units=["u*"], schedule=schedule or Schedule(), **spec)
    return fsdp.shard(parameters(dtype), given, fsdp.adamw(lr=1e-2))


def turns(
    state: fsdp.State, step: int, micro: int = 0, last: bool = True, skip: Iterable[str] = (), late: str = ""
) -> Turns:
    """The loop of the README, but for the units in `skip`, a turn at a time. It goes on with a state that is sent.

    late: gradients are reduced two at a time in the wrong order ("swapped"), or when the backward is over ("in turn",
    "reversed", "shuffled").
    """
    h, y = data(step, dist.get_rank(), micro)
    used = [unit for unit in state.units if unit not in tuple(skip)]
    pullbacks: dict[str, Any] = {}
    kept: list[tuple[str, Tree]] = []
    for unit in used:
        state = (yield "unshard", unit, state, {}) or state
        state, w = fsdp.unshard(state, unit)
        h, y = h.to(w["up"].dtype), y.to(w["up"].dtype)
        yield "forward", unit, state, w
        h, pullbacks[unit] = T.vjp(stage, w, h)
        state = fsdp.release(state, unit)
    loss, dh = (h - y).square().mean(), 2 * (h - y) / h.numel()
    for unit in reversed(used):
        state = (yield "unshard again", unit, state, {}) or state
        state, w = fsdp.unshard(state, unit)
        dw, dh = pullbacks.pop(unit)(w, dh)
        yield "reduce", unit, state, dw
        kept.append((unit, dw))
        if not late or (late == "swapped" and len(kept) == 2):
            while kept:
                name, dw = kept.pop()
                state = fsdp.reduce(state, dw, name, last_microbatch=last)
        yield "release", unit, state, {}
        state = fsdp.release(state, unit)
    orders = {"reversed": kept[::-1], "shuffled": kept[1::2] + kept[::2]}
    for name, dw in orders.get(late, kept):
        state = fsdp.reduce(state, dw, name, last_microbatch=last)
    return state, loss


def chain(
    state: fsdp.State, *args: Any, at: Callable[..., fsdp.State | None] | None = None, **options: Any
) -> tuple[fsdp.State, Tensor]:
    """All turns. at(verb, unit, state, tree) is called before each, and may give a state to go on with."""
    run, sent = turns(state, *args, **options), None
    while True:
        try:
            turn = run.send(sent)
        except StopIteration as end:
            result: tuple[fsdp.State, Tensor] = end.value
            return result
        sent = at(*turn) if at else None


def evaluate(state: fsdp.State, skip: Iterable[str] = ()) -> tuple[fsdp.State, Tensor]:
    h, y = data(77, dist.get_rank(), 0)
    for unit in state.units:
        if unit not in tuple(skip):
            state, w = fsdp.unshard(state, unit)
            h = stage(w, h.to(w["up"].dtype))
            state = fsdp.release(state, unit)
    return state, (h - y).square().mean()


def reference(world: int, skips: dict[int, Skips], micro: int, step: int = 0) -> Tree:
    """Gradients of the plain model in float64, averaged over ranks, summed over microbatches; skipped ones are zero."""
    params = {k: {n: t.requires_grad_() for n, t in w.items()} for k, w in parameters(torch.float64).items()}
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(world):
        for k in range(micro):
            h, y = data(step, rank, k, torch.float64)
            skip = skips.get(rank, ((),) * micro)[k]
            for unit, w in params.items():
                if unit not in skip:
                    h = stage(w, h)
            total = total + (h - y).square().mean() / world
    total.backward()
    return {
        f"{u}.{n}": torch.zeros_like(t) if t.grad is None else t.grad for u, w in params.items() for n, t in w.items()
    }


def flat(params: Any) -> Tree:
    return {f"{u}.{n}": t for u, w in params.items() for n, t in w.items()}


def weights_of(state: fsdp.State) -> Tree:
    return flat(fsdp.full_params(state))


def largest(a: Tree, b: Tree) -> float:
    assert a.keys() == b.keys()
    return max((a[key].double() - b[key].double()).abs().max().item() for key in b)


def equal(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in b)


def jobs(state: fsdp.State) -> list[Any]:
    """What is on the lanes; also of other states, which a failed test may have left there."""
    return [job for queue in state._executor.run.lanes.queues.values() for job in queue]


def idle(state: fsdp.State, before: Sequence[Any] = ()) -> bool:
    """Nothing is in flight: no job on a lane, nothing in the arena, no early gradient."""
    executor = state._executor
    gathers, reductions = executor.gathers, executor.reductions
    return (
        all(any(job is other for other in before) for job in jobs(state))
        and executor.progress.cursor.idle
        and not (reductions.early or gathers.flying or reductions.staging.busy or gathers.unplanned)
    )


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    """Workers of this file's own, since the timeout of process groups is that of the call that made them."""
    stop_workers()
    yield
    stop_workers()


def run(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`launch`, but ranks that wait for each other fail in seconds."""
    return launch(fn, args, nprocs=ranks, timeout=TIMEOUT)


on_two = each_rank(2, timeout=TIMEOUT)


def undisturbed(schedule: Schedule | None = None, steps: int = 2) -> Tree:
    state = start(schedule or SIMPLEST)
    for step in range(steps):
        state = fsdp.step(chain(state, step)[0])
    return weights_of(state)


@pytest.fixture(scope="module")
def simplest() -> Tree:
    """Weights after two steps that nothing disturbs."""
    return run(undisturbed, 2)[0]


# ---------------------------------------------------------------- every schedule gives the same bits


SIMPLEST = Schedule(prefetch=0, keep=())
CHAIN = (*UNITS, *reversed(UNITS))
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
NET = ("embed.weight", *BLOCKS, ("embed.weight", "tail"), *reversed(BLOCKS), "embed.weight")


def schedules(loop: str, micro: int, few: bool) -> list[Schedule]:
    order, some = (CHAIN, ("u1", "u4")) if loop == "chain" else (NET, ("embed.*", "blocks.1"))
    found = [
        SIMPLEST,
        Schedule(),
        Schedule(prefetch=2),
        Schedule(prefetch=4, keep=some),
        Schedule(keep="all", debug=True),
        Schedule(prefetch=2, keep=(), debug=True),
        Schedule("recorded", prefetch=2),
        Schedule(order, prefetch=1, keep=6000),
    ]
    if few:
        return found
    return [
        *found,
        Schedule(debug=True),
        Schedule(prefetch=1, keep=()),
        Schedule(prefetch=4),
        Schedule(prefetch=4, keep=(), debug=True),
        Schedule(prefetch=0),
        Schedule(prefetch=0, keep="all"),
        Schedule(prefetch=2, keep=some, debug=True),
        Schedule(prefetch=2, keep=2000),
        Schedule(prefetch={"*1": 3, "*2": 0, "*": 1}),
        Schedule(order, prefetch=2),
        Schedule(order * micro, prefetch=2),
        Schedule(order * micro, prefetch=1, keep="all"),
        Schedule("recorded", keep=(), debug=True),
    ]


def trained(loop: str, preset: str, schedule: Schedule, micro: int, **spec: Any) -> tuple[list[Tensor], Tree]:
    """Losses and weights of a few steps."""
    losses = []
    if loop == "chain":
        state = start(schedule, preset, **spec)
    else:
        mesh, placement = mesh_and_placement(preset)
        params, model = fsdp.functionalize(net(torch.float32))
        given = fsdp.Spec(mesh, placement, schedule=schedule, **spec)
        state = fsdp.shard(params, given, fsdp.adamw(lr=1e-2))
    before = jobs(state)
    for step in range(STEPS):
        for k in range(micro):
            last = k == micro - 1
            if loop == "chain":
                state, loss = chain(state, step, k, last)
            else:
                state, loss = by_unit(model, state, net_batch(step, dist.get_rank(), k), last)
            losses.append(loss)
        state = fsdp.step(state)
        assert idle(state, before)
        if schedule.order == "recorded":
            assert state.cursor.plan.schedule.order not in ("recorded", None)
    params = fsdp.full_params(state)
    return losses, flat(params) if loop == "chain" else params


def those_that_differ(preset: str, micro: int, few: bool, half: int | None = None, **spec: Any) -> list[str]:
    """With `half`, 0 or 1, each schedule but the first runs in one of the two loops: in which, changes with it."""
    found = []
    with warnings.catch_warnings():  # in the default order the tied units of `net`, used at once, are no group
        warnings.filterwarnings("ignore", ".*is not what the schedule expects", UserWarning)
        for loop in ("chain", "net"):
            first: Any = None
            for i, schedule in enumerate(schedules(loop, micro, few)):
                if i and half is not None and (i + half) % 2 != (loop == "net"):
                    continue
                losses, weights = trained(loop, preset, schedule, micro, **spec)
                first = first or (losses, weights)
                if not all(map(torch.equal, losses, first[0])) or not equal(weights, first[1]):
                    found.append(f"{loop}: {schedule}")
    return found


SAME = [(preset, micro, half) for preset in ("zero3", "zero2", "hsdp", "hfsdp") for micro in (1, 3) for half in (0, 1)]
SOME = [("zero3", 3, 1), ("zero2", 1, 0), ("hfsdp", 1, 0)]
ON_FOUR = [(preset, half) for preset in ("zero3", "hsdp", "hfsdp") for half in (0, 1)]


@pytest.mark.parametrize(("preset", "micro", "half"), marked(SAME, SOME))
def test_every_schedule_gives_the_same_bits(preset: str, micro: int, half: int) -> None:
    few = preset != "zero3" or not FULL
    assert run(those_that_differ, 2, preset, micro, few, half) == [[], []]


@pytest.mark.parametrize(("preset", "half"), marked(ON_FOUR, []))
def test_every_schedule_gives_the_same_bits_on_4_ranks(preset: str, half: int) -> None:
    assert run(those_that_differ, 4, preset, 2, True, half) == [[]] * 4


def test_every_schedule_gives_the_same_bits_when_weights_are_gathered_in_bfloat16() -> None:
    precision = fsdp.Precision(compute=torch.bfloat16)
    assert run(lambda: those_that_differ("zero3", 2, True, 1, precision=precision), 2) == [[], []]


# ---------------------------------------------------------------- what debug shows, and what is refused


def nan(w: Tree) -> bool:
    return all(bool(t.isnan().all()) for t in w.values())


@on_two
def test_a_weight_used_past_its_release_shows_as_nan() -> None:
    for depth in (0, 1, 2):
        state = start(Schedule(prefetch=depth, debug=True))
        params = fsdp.full_params(state)
        handed: dict[str, Tree] = {}
        for k, unit in enumerate(CHAIN):
            state, w = fsdp.unshard(state, unit)
            assert equal(w, params[unit]), (depth, k)
            again = handed.setdefault(unit, w)
            assert all(a is b for a, b in zip(w.values(), again.values(), strict=True)), (depth, k)
            state = fsdp.release(state, unit)
            kept = state.cursor.plan.uses[k].end > k
            assert nan(w) == (not kept), (depth, k)
    state, w = fsdp.unshard(start(Schedule(debug=True)), "u1")
    fsdp.release(state, "u1")
    assert stage(w, torch.ones(3, WIDTH)).isnan().all()
    state, w = fsdp.unshard(start(Schedule(debug=False)), "u1")
    fsdp.release(state, "u1")
    assert equal(w, params["u1"])  # nothing has touched it yet


@pytest.mark.parametrize("what", ["step", "release outside the plan"])
@on_two
def test_a_weight_used_much_too_late_shows_as_nan_too(what: str) -> None:
    """The process must live to tell."""
    order = tuple(unit for unit in CHAIN if unit != "u3")
    state = start(Schedule(order if what == "release outside the plan" else None, debug=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, w = fsdp.unshard(state, "u3")
        state = fsdp.reduce(state, {key: torch.ones_like(t) for key, t in w.items()}, "u3")
        state = fsdp.release(state, "u3")
        if what == "step":
            fsdp.step(state)
    assert nan(w)


@pytest.mark.parametrize("depth", [1, 2])
@on_two
def test_a_gather_over_a_unit_that_is_held_raises_and_costs_nothing(depth: int, simplest: Tree) -> None:
    """Rank 1 forgets to release, meets the error, makes good for it and goes on. Rank 0 hears nothing of it."""
    state = start(Schedule(prefetch=depth, keep=()))
    params = fsdp.full_params(state)
    texts = []
    for step in range(2):
        if dist.get_rank() == 0:
            state, _ = evaluate(state)
        else:
            held: dict[str, Tree] = {}
            for unit in UNITS:
                before, printed = state.cursor, repr(state)
                try:
                    state, w = fsdp.unshard(state, unit)
                except ScheduleError as error:
                    texts.append(str(error))
                    after = state.cursor
                    assert after == before
                    assert repr(state) == printed
                    assert step or all(equal(held[name], params[name]) for name in held)
                    state = fsdp.release(state, list(held))
                    held.clear()
                    state, w = fsdp.unshard(state, unit)
                held[unit] = w
            state = fsdp.release(state, list(held))
        state = fsdp.step(chain(state, step)[0])
    assert len(texts) >= 2 * dist.get_rank()
    for text in texts:
        assert "gathering 'u" in text
        assert "which was not released" in text
        assert "Call state = release(state, 'u" in text
    assert equal(weights_of(state), simplest)


@pytest.mark.parametrize("depth", [0, 1, 2])
@on_two
def test_units_asked_for_at_once_are_all_there(depth: int) -> None:
    """Those that the plan has one after the other: their weights, while they are held."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for names in (UNITS[:2], UNITS[:3], UNITS[3:], UNITS, ("u0", "u3"), ("u4", "u1")):
            state = start(Schedule(prefetch=depth))
            params = fsdp.full_params(state)
            state, found = fsdp.unshard(state, names)
            assert [unit for unit in names if not equal(found[unit], params[unit])] == [], names
            state = fsdp.release(state, names)
            fsdp.step(chain(state, 0)[0])


@on_two
def test_a_unit_outside_the_plan_asked_for_again_is_released_once() -> None:
    """Two units at once that share bytes (one is outside the plan), one of them once more; then both are released."""
    state = start(SIMPLEST)
    params = fsdp.full_params(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, _ = fsdp.unshard(state, ["u0", "u1"])
        state, w = fsdp.unshard(state, "u0")
        state, v = fsdp.unshard(state, "u1")
    assert equal(w, params["u0"])
    assert equal(v, params["u1"])
    state = fsdp.release(state, ["u0", "u1"])
    for unit in ("u0", "u1"):
        with pytest.raises(ScheduleError, match="is not gathered"):
            fsdp.release(state, unit)
    assert fsdp.step(chain(state, 0)[0]).between_steps


# ---------------------------------------------------------------- ranks that differ


def skipping(
    schedule: Schedule,
    preset: str,
    skips: dict[int, Skips],
    micro: int = 1,
    flags: tuple[bool, ...] = (),
    late: tuple[str, ...] = (),
) -> tuple[Tree, Tree]:
    """Gradients of a step in which ranks leave units out, and the weights after it and another, ordinary one."""
    state = start(schedule, preset, torch.float64)
    rank = dist.get_rank()
    before = jobs(state)
    for k in range(micro):
        last = flags[k] if flags else k == micro - 1
        skip = skips.get(rank, ((),) * micro)[k]
        state, _ = chain(state, 0, k, last, skip, late=late[rank] if late else "")
    state = fsdp.finish_reductions(state)
    grads = full_grads(state)
    state = fsdp.step(state)
    assert idle(state, before)
    state = fsdp.step(chain(state, 1)[0])
    assert idle(state, before)
    return grads, weights_of(state)


def check_skipping(
    ranks: int, schedule: Schedule, preset: str, skips: dict[int, Skips], micro: int = 1, *args: Any
) -> None:
    expected = reference(ranks, skips, micro)
    results = run(skipping, ranks, schedule, preset, skips, micro, *args)
    for grads, weights in results:
        assert largest(grads, expected) < 1e-12
        assert equal(weights, results[0][1])
        assert all(bool(t.isfinite().all()) for t in weights.values())


SCHEDULES = [Schedule(), Schedule(prefetch=0, keep=()), Schedule(prefetch=2, debug=True), Schedule(keep="all")]


ONE_SKIPS: list[dict[int, Skips]] = [
    {1: (("u2",),)},  # in the middle
    {0: (("u0",),)},
    {1: (("u4",),)},  # trailing: nothing of this rank comes after it
    {0: (("u1", "u3"),), 1: (("u0", "u4"),)},
    {1: (("u1", "u2", "u3", "u4"),)},
]


@pytest.mark.parametrize(("schedule", "skips"), each(SCHEDULES, ONE_SKIPS))
def test_a_unit_skipped_by_a_rank_counts_as_zero_there(schedule: Schedule, skips: dict[int, Skips]) -> None:
    check_skipping(2, schedule, "zero3", skips)


@pytest.mark.parametrize(
    ("schedule", "units", "which"), each(SCHEDULES, [("u2",), ("u0",), ("u4",), ("u0", "u1")], range(3))
)
def test_a_unit_skipped_in_one_of_three_microbatches(schedule: Schedule, units: tuple[str, ...], which: int) -> None:
    skips: list[tuple[str, ...]] = [(), (), ()]
    skips[which] = units
    check_skipping(2, schedule, "zero3", {1: tuple(skips)}, 3)


FLAGS = [(False, True), (False, False), (True, True), (True, False)]


@pytest.mark.parametrize(
    ("preset", "flags", "skips"),
    each(("ddp", "zero1", "zero2", "hsdp", "hfsdp"), FLAGS, [(("u0",), ()), (("u2",), ("u0", "u4"))]),
)
def test_a_skipped_unit_where_gradients_stay_partial_between_microbatches(
    preset: str, flags: tuple[bool, ...], skips: Skips
) -> None:
    ranks = ranks_of(preset)
    check_skipping(ranks, Schedule(), preset, {ranks - 1: skips}, 2, flags)


@pytest.mark.parametrize(
    ("preset", "late"),
    each(["zero3", "ddp", "hfsdp"], [("", "swapped"), ("in turn", "reversed"), ("shuffled", "reversed")]),
)
def test_gradients_reduced_in_another_order_on_one_rank(preset: str, late: tuple[str, str]) -> None:
    """A rank must not hold back more than two while its peers go on: they have staging for no more."""
    check_skipping(2, Schedule(), preset, {}, 2, (), late)
    check_skipping(2, Schedule(prefetch=2), preset, {0: (("u1",), ("u3",))}, 2, (), late)


SKIPPED = [[()], [(), ()], [("u2",)], [("u2",), ()], [("u4",), ("u1",)], [("u0",), (), ("u0",)], [("u1", "u2", "u3")]]


@pytest.mark.parametrize(("schedule", "skips"), each(SCHEDULES, SKIPPED))
@on_two
def test_evaluations_in_which_a_rank_skips_units(
    schedule: Schedule, skips: Sequence[Sequence[str]], simplest: Tree
) -> None:
    """Passes in which rank 1 leaves units out, before the first step, between steps, and after the last microbatch."""
    state = start(schedule)
    mine = skips if dist.get_rank() else [()] * len(skips)
    for step in range(2):
        for skip in mine:
            state, loss = evaluate(state, skip)
            assert torch.isfinite(loss)
        state, _ = chain(state, step)
        state, _ = evaluate(state, mine[0])
        state = fsdp.step(state)
    assert equal(weights_of(state), simplest)


@pytest.mark.parametrize("views", [False, True])
@on_two
def test_what_was_given_to_reduce_may_be_released_at_once(views: bool) -> None:
    """What is reduced is what was borrowed, or views of it, long before its turn; then it is given back."""
    state = start(Schedule(debug=True))
    params = weights_of(state)
    for unit in UNITS:
        state, w = fsdp.unshard(state, unit)
        state = fsdp.reduce(state, {key: t.detach() if views else t for key, t in w.items()}, unit)
        state = fsdp.release(state, unit)
    assert equal(full_grads(fsdp.finish_reductions(state)), params)


@pytest.mark.parametrize("depth", [0, 1, 2])
@on_two
def test_gradients_may_be_read_in_the_middle_of_a_step(depth: int) -> None:
    """Somebody reads them in the middle of the second microbatch, after `done` units. Then it goes on."""
    expected = reference(2, {}, 2)
    for done in (2, 5, 6, 8):
        state = start(Schedule(prefetch=depth), dtype=torch.float64)
        state, _ = chain(state, 0, 0, False)
        uses = iter(range(len(CHAIN)))

        def at(verb: str, unit: str, state: fsdp.State, tree: Tree, done: int = done, uses: Any = uses) -> Any:
            return fsdp.finish_reductions(state) if "unshard" in verb and next(uses) == done else None

        grads = full_grads(fsdp.finish_reductions(chain(state, 0, 1, at=at)[0]))
        assert largest(grads, expected) < 1e-12


# ---------------------------------------------------------------- outside the plan


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(prefetch=2, debug=True)], ids=str)
def test_a_unit_outside_the_plan_on_every_rank_is_one_warning_and_right(schedule: Schedule, simplest: Tree) -> None:
    order = tuple(unit for unit in CHAIN if unit != "u3")
    for texts, weights in run(outside_on_every_rank, 2, schedule.ordered(order)):
        (text,) = texts
        assert "'u3'" in text
        assert "is not what the schedule expects here" in text
        assert "Schedule(order=" in text
        assert equal(weights, simplest)


def outside_on_every_rank(schedule: Schedule) -> tuple[list[str], Tree]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = undisturbed(schedule)
    return [str(one.message) for one in caught], weights


@pytest.mark.parametrize("recorded", [True, False])
@on_two
def test_ranks_that_come_with_different_units_get_an_error_that_names_both(recorded: bool, simplest: Tree) -> None:
    """Ranks come with different units that no plan expects: in the first recorded step, or outside the order."""
    state = start(Schedule("recorded" if recorded else ("u0", "u1", "u4", "u4", "u1", "u0")))
    middle, _ = fsdp.unshard(state, "u0")
    middle = fsdp.release(middle, "u0")
    with pytest.raises(ScheduleError, match=r"(?s)ranks came with 'u2' and 'u3'.*The state before the step is valid\."):
        fsdp.unshard(middle, "u3" if dist.get_rank() else "u2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            state = fsdp.step(chain(state, step)[0])
    assert not recorded or state.cursor.plan.schedule.order == CHAIN
    assert equal(weights_of(state), simplest)


# ---------------------------------------------------------------- the order that is recorded


def test_the_order_of_the_first_step_is_installed_on_every_rank(simplest: Tree) -> None:
    first, other = run(recording, 2, simplest)
    assert first == other


def recording(simplest: Tree) -> Any:
    state = start(Schedule("recorded", prefetch=2))
    assert "nothing is begun" in repr(state.cursor)
    fsdp.unshard(state, "u3")  # given up: not part of the order
    state, _ = chain(state, 0)
    base = state = fsdp.step(state)
    plan = state.cursor.plan
    assert plan.schedule.order == CHAIN
    assert "u4" in repr(state.cursor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = fsdp.step(chain(state, 1)[0])
    assert state.cursor.plan.hash == plan.hash
    assert equal(weights_of(state), simplest)
    with pytest.raises(fsdp.StaleStateError):
        fsdp.unshard(base, "u0")
    params, model = fsdp.functionalize(net(torch.float32))
    given = fsdp.Spec(fsdp.local_mesh(), schedule=Schedule("recorded"))
    other = fsdp.shard(params, given, fsdp.adamw(lr=1e-2))
    for k in range(2):
        other, _ = by_unit(model, other, net_batch(0, dist.get_rank(), k), k == 1)
    assert fsdp.step(other).cursor.plan.schedule.order == NET * 2
    return plan.hash


# ---------------------------------------------------------------- a step is a transaction


PLACES = [
    ("unshard", "u0"),
    ("forward", "u0"),
    ("unshard", "u2"),
    ("forward", "u4"),
    ("unshard again", "u4"),
    ("reduce", "u4"),
    ("release", "u3"),
    ("unshard again", "u1"),
    ("reduce", "u0"),
    ("release", "u0"),
]


@pytest.mark.parametrize(
    ("ranks", "who", "error", "preset"),
    [
        (2, (1,), Boom, "zero3"),
        (2, (0,), KeyboardInterrupt, "zero3"),
        pytest.param(2, (0, 1), Boom, "zero3", marks=pytest.mark.large),
        pytest.param(2, (1,), Boom, "hfsdp", marks=pytest.mark.large),
        pytest.param(4, (2,), Boom, "hsdp", marks=pytest.mark.large),
    ],
)
@each_rank("ranks", timeout=TIMEOUT)
def test_an_exception_with_prefetches_in_flight_costs_nothing(
    ranks: int, who: tuple[int, ...], error: type[BaseException], preset: str
) -> None:
    """At each place in turn `who` raise, in the second of three steps. All go on from the state before that."""
    expected: Tree = {}
    for place in [None, *(PLACES if FULL or (error is Boom and preset == "zero3") else PLACES[1::2])]:

        def take(state: fsdp.State, step: int, met: list[str], place: Any = place) -> fsdp.State:
            def at(verb: str, unit: str, *_: Any) -> None:
                if step == 1 and dist.get_rank() in who and not met and (verb, unit) == place:
                    raise error

            middle, _ = chain(state, step, 0, False, at=at)
            return fsdp.step(chain(middle, step, 1)[0])

        state, met = taken(start(Schedule(prefetch=2), preset), take, 3)
        if place is None:
            expected = weights_of(state)
            continue
        assert equal(weights_of(state), expected), place
        allowed = [[error.__name__]] if dist.get_rank() in who else [["RestartError"]]
        if place == PLACES[0] or len(who) == ranks:
            allowed.append([])  # nothing was begun, or all stopped at one place: nobody has to hear of it
        assert met in allowed, place


@on_two
def test_an_exception_while_an_order_is_recorded_costs_nothing(simplest: Tree) -> None:
    def take(state: fsdp.State, step: int, met: list[str]) -> fsdp.State:
        def at(verb: str, unit: str, *_: Any) -> None:
            if not met and dist.get_rank() == 1 and (verb, unit) == ("reduce", "u2"):
                raise Boom

        return fsdp.step(chain(state, step, at=at)[0])

    state, met = taken(start(Schedule("recorded", prefetch=2)), take, 2)
    assert len(met) == 1
    assert state.cursor.plan.schedule.order == CHAIN
    assert equal(weights_of(state), simplest)


def stopping(lanes: Any, name: str) -> None:
    """The next call of this method is stopped, once."""

    def stop(*args: Any, **kwargs: Any) -> None:
        delattr(lanes, name)
        raise KeyboardInterrupt

    setattr(lanes, name, stop)


@pytest.mark.parametrize("when", ["waiting", "submitting", "whole tree"])
@on_two
def test_a_rank_stopped_inside_the_first_verb_of_a_step_begins_it_anew(when: str, simplest: Tree) -> None:
    """Rank 1 is stopped inside the first unshard of a step: when it has started gathers, or before.

    Or it stops in a gather of the whole tree, and rank 0 hears of it in its own first unshard.
    """
    state = fsdp.step(chain(start(Schedule(prefetch=2)), 0)[0])
    if dist.get_rank() == 1:
        stopping(state._executor.run.lanes, "submit" if when == "submitting" else "wait")
        if when == "whole tree":
            time.sleep(0.3)
            with pytest.raises(KeyboardInterrupt):
                fsdp.unshard(state)
    state, met = taken(state, lambda state, *_: fsdp.step(chain(state, 1)[0]), 1)
    if dist.get_rank() == 1:
        assert met == (["KeyboardInterrupt"] if when != "whole tree" else [])
    else:
        assert met in ([], ["RestartError"])
    assert equal(weights_of(state), simplest)


@pytest.mark.parametrize(
    ("where", "name"), [("unshard again", "wait"), ("unshard again", "submit"), ("reduce", "submit")]
)
@on_two
def test_a_line_that_was_stopped_may_be_run_again_or_says_that_it_may_not(
    where: str, name: str, simplest: Tree
) -> None:
    """Rank 1 is stopped inside a verb in the middle of a step, and runs that line again, as one does in a notebook."""
    state = fsdp.step(chain(start(Schedule(prefetch=2)), 0)[0])
    lanes = state._executor.run.lanes
    again = dist.get_rank() == 1

    def at(verb: str, unit: str, state: fsdp.State, grads: Tree) -> None:
        nonlocal again
        if again and (verb, unit) == (where, "u2"):
            again = False
            stopping(lanes, name)
            with pytest.raises(KeyboardInterrupt):
                fsdp.reduce(state, grads, unit) if grads else fsdp.unshard(state, unit)

    state, _ = taken(state, lambda state, *_: fsdp.step(chain(state, 1, at=at)[0]), 1, fsdp.StaleStateError)
    assert equal(weights_of(state), simplest)


# ---------------------------------------------------------------- state.cursor


@on_two
def test_a_cursor_is_a_value_of_its_state_and_can_be_printed_at_any_time() -> None:
    state = start(Schedule(prefetch=2))
    base, between = state, state.cursor
    assert between.idle
    assert "nothing is begun" in repr(between)
    assert repr(between).count("released") == 5
    looks: list[tuple[fsdp.State, str, Any]] = []

    def at(verb: str, unit: str, state: fsdp.State, tree: Tree) -> None:
        if tree:  # it was gathered just now
            looks.append((state, repr(state.cursor), dataclasses.replace(state.cursor)))
            assert set(state.in_flight.gathers) <= set(state.cursor.live)

    state, _ = chain(state, 0, at=at)
    assert len(looks) == len(CHAIN)
    for old, text, cursor in looks:
        assert repr(old.cursor) == text, "what stood then"
        assert old.cursor == cursor
        assert old.in_flight == ((), 0), "of the newest state only"
    assert base.cursor == between
    assert len({cursor for *_, cursor in looks}) == len(looks)
    inside = looks[0][0].cursor
    assert inside.held == {"u0"}
    assert set(inside.live) == {"u0", "u1", "u2"}
    assert inside.at == 1
    rows = {line.split()[0]: line for line in repr(inside).splitlines() if line.startswith("u")}
    assert rows["u0"].endswith("live, held")
    assert rows["u1"].endswith("live")
    assert rows["u4"].endswith("released")
    assert "use 1 of 10 comes next (u1)" in repr(inside)
    through = repr(state.cursor)
    assert "the program is through" in through
    assert "5 of 5 reductions" in through or "0 of 5 reductions" in through
    state = fsdp.step(state)
    assert state.cursor.plan is between.plan
    assert repr(state.cursor) == repr(between)
    assert "10 uses" in repr(between.plan)
    assert "prefetch 2" in repr(between.plan)


# ---------------------------------------------------------------- memory and copies


@pytest.mark.parametrize("when", ["between steps", "in a step", "in flight"])
@on_two
def test_a_deleted_state_frees_everything_at_once(when: str) -> None:
    """Nothing is still there when the last name of a state is gone, without the garbage collector."""
    state = start(Schedule(prefetch=2))
    for step in range(2):
        state = fsdp.step(chain(state, step)[0])
    if when == "in a step":
        state, _ = chain(state, 2)
    elif when == "in flight":
        state = fsdp.unshard(state, "u0")[0]
    dist.barrier()  # every rank has begun what this one waits for,
    time.sleep(0.1)  # and it is done; only nobody has looked
    executor = state._executor
    alive: dict[str, Any] = {"lineage": weakref.ref(state.version.lineage), "executor": weakref.ref(executor)}
    alive["arena"], alive["staging"] = weakref.ref(executor.gathers.arena), weakref.ref(executor.reductions.staging)
    for name, place in executor.gathers.arena.places.items():
        alive[f"weights of {name}"] = weakref.ref(next(iter(place.loan.weights.values())))
        alive[f"place of {name}"] = weakref.ref(place.parts[0].whole)
    for name, buffer in state.main.items():
        alive[f"main {name}"] = weakref.ref(buffer.local)
    for name, buffer in (state.grads or {}).items():
        alive[f"grads {name}"] = weakref.ref(buffer.local)
    gc.collect()
    gc.disable()
    try:
        del state, executor, place, buffer
        assert [name for name, one in alive.items() if one() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@on_two
def test_copies_have_an_executor_of_their_own(how: str) -> None:
    """A copy has lanes' work of its own: two lineages take turns, unit by unit, and neither disturbs the other."""
    state = start(Schedule(prefetch=2))
    state = fsdp.step(chain(state, 0)[0])
    looked = state._executor
    twin = copy.deepcopy(state) if how == "deepcopy" else pickle.loads(pickle.dumps(state))
    assert twin._executor is not looked
    assert twin._executor.gathers.arena is not looked.gathers.arena
    for step in range(1, 3):
        both, ends = [turns(state, step), turns(twin, step)], list[fsdp.State]()
        while not ends:
            seen = []
            for one in both:
                try:
                    seen.append(next(one)[-1])
                except StopIteration as end:
                    ends.append(fsdp.step(end.value[0]))
            assert all(x is not z for x, z in zip(*(tree.values() for tree in seen), strict=True)) or ends
        state, twin = ends
    expected = undisturbed(steps=3)
    assert equal(weights_of(state), expected)
    assert equal(weights_of(twin), expected)


# ---------------------------------------------------------------- other lanes


def looked_at(folder: str, schedule: Schedule) -> tuple[bool, list[str]]:
    """Metrics, exports, shards and checkpoints, in the middle of a step and between steps."""
    state = start(schedule)
    seen: list[Tree] = []
    averages: list[Tensor] = []
    for step in range(2):
        base = state

        def at(verb: str, unit: str, *_: Any, base: fsdp.State = base, step: int = step) -> None:
            if unit == "u2" and verb in ("forward", "reduce"):
                seen.append(flat(fsdp.full_params(base)))
                fsdp.save(base, f"{folder}/{step} {verb}")
                repr(base)
                repr(base.cursor)

        state, loss = chain(state, step, 0, False, at=at)
        state, mean = fsdp.pmean(state, {"loss": loss, "rank": dist.get_rank()})
        averages += mean.values()
        fsdp.local_shards(state, "grads")
        seen.append(weights_of(state))
        h = data(step, dist.get_rank(), 1)[0]
        for unit in UNITS:
            state, w = fsdp.unshard(state, unit)
            h = stage(w, h)
            state, mean = fsdp.pmean(state, h.mean())
            state = fsdp.release(state, unit)
        state = fsdp.step(state)
        seen.append(weights_of(state))
    ok = all(equal(one, seen[0]) for one in seen[:3]) and all(equal(one, seen[3]) for one in seen[4:7])
    loaded = [flat(fsdp.full_params(fsdp.load(path, like=state))) for path in sorted(Path(folder).iterdir())]
    ok = ok and [equal(a, b) for a, b in zip(loaded, [seen[0]] * 2 + [seen[4]] * 2, strict=True)] == [True] * 4
    expected = start(SIMPLEST)
    for step in range(2):
        expected = fsdp.step(chain(expected, step, 0)[0])
    ok = ok and equal(weights_of(state), flat(fsdp.full_params(expected)))
    return ok, [str(t.tolist()) for t in averages]


@pytest.mark.parametrize("depth", [0, 2])
def test_looking_at_a_state_disturbs_nothing_that_is_in_flight(depth: int, tmp_path: Path) -> None:
    (ok, first), (ok_too, second) = run(looked_at, 2, str(tmp_path), Schedule(prefetch=depth))
    assert ok
    assert ok_too
    assert first == second
    assert first[1::2] == ["0.5", "0.5"]
