"""What is planned stays what it was, and work grows with leaves and units, not with their square."""

from __future__ import annotations

import cProfile
import gc
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from benchmark_scale import Net, loss_of
from support.golden import TREES, line_of

import functional_fsdp as fsdp
import functional_fsdp.transforms as T
from functional_fsdp import Schedule, Spec
from functional_fsdp._plan.cursor import Positions
from functional_fsdp._plan.layout import Layout, LeafInfo, plan_layout
from functional_fsdp._plan.plan import make_plan
from functional_fsdp.look.tables import Stretch, find_peak
from functional_fsdp.look.timeline import timeline_of

GOLDEN = Path(__file__).with_name("golden.txt")
MOST = 4.6  # times as many calls for four times as much
Work = Callable[[], object]


def test_what_is_planned_for_random_trees_is_what_it_was() -> None:
    _, *lines = GOLDEN.read_text().splitlines()
    assert len(lines) == TREES
    found = [line_of(tree) for tree in range(TREES)]
    assert found == lines, "python tests/support/golden.py > tests/unit/golden.txt, if the change is meant"


# -------------------------------------------------------------------------------- counting


def calls(work: Work) -> int:
    """How many calls of Python and C functions it makes."""
    re.purge()  # patterns that another work has compiled would cost one of two sizes only
    profile = cProfile.Profile()
    gc.disable()
    try:
        profile.runcall(work)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


def grows(make: Callable[[int, int], Work], units: int, leaves: int, by_leaf: bool = False) -> float:
    """How many times as many calls it makes for four times as many units; or for as many leaves in each."""
    make(3, 2)()  # what is imported and cached the first time
    small, large = make(units, leaves), make(units if by_leaf else 4 * units, 4 * leaves if by_leaf else leaves)
    return calls(large) / calls(small)


def test_growth_is_seen() -> None:
    def pairs(units: int, leaves: int) -> Work:
        some = [*range(units * leaves)]
        return lambda: [len([i, j]) for i in some for j in some]

    assert grows(pairs, 4, 4) > 10
    assert grows(lambda units, _: lambda: [len([i]) for i in range(100 * units)], 4, 4) < MOST


# -------------------------------------------------------------------------------- what is pure


def infos(units: int, leaves: int) -> list[LeafInfo]:
    return [LeafInfo(f"blocks.{u}.part{k}.w", (4, 4), torch.float32) for u in range(units) for k in range(leaves)]


def layout(units: int, leaves: int) -> Layout:
    return plan_layout(infos(units, leaves), Spec({"data": 8}))


def layouts(count: int, leaves: int, **spec: Any) -> Work:
    some, wanted = infos(count, leaves), Spec({"data": 8}, **spec)
    return lambda: plan_layout(some, wanted)


def names(units: int, form: str = "blocks.{}") -> list[str]:
    return [form.format(i) for i in range(units)]


def with_rules(units: int, leaves: int) -> Work:
    rules = {name: f"kind {i % 3}" for i, name in enumerate(names(units))}
    return layouts(units, leaves, labels=rules, trainable=dict.fromkeys(rules, True))


def of_towers(units: int, leaves: int) -> Work:
    """A container, which is divided."""
    some = [LeafInfo(f"0.{one.path}", one.shape, one.dtype) for one in infos(units, leaves)]
    spec = Spec({"data": 8})
    return lambda: plan_layout([*some, LeafInfo("1.weight", (4,), torch.float32)], spec)


def plans(units: int, leaves: int, **schedule: Any) -> Work:
    made = layout(units, leaves)
    return lambda: make_plan(made, Schedule(**schedule))


def with_names(units: int, leaves: int) -> Work:
    return plans(units, leaves, keep=names(units // 2), prefetch={**dict.fromkeys(names(units), 2), "*": 1})


def without_a_backward(units: int, leaves: int) -> Work:
    """Two forwards, of which the second might be a backward."""
    made, order = layout(units, leaves), Schedule(order=names(units) * 2)
    return lambda: make_plan(made, order).turn


def looks(units: int, leaves: int) -> Work:
    made = layout(units, leaves)
    plan = make_plan(made)
    start = Positions(plan).start.cursor
    return lambda: (repr(made), made.hash, repr(plan), plan.hash, plan.crowded_gathers, plan.stays, repr(start))


def positions(units: int, leaves: int, **schedule: Any) -> Work:
    plan = make_plan(layout(units, leaves), Schedule(**schedule))
    return lambda: Positions(plan)


def peaks(units: int, leaves: int) -> Work:
    made = layout(units, leaves)
    plan = make_plan(made)
    stretches = [*(Stretch(one.unit, 3) for one in plan.reductions), Stretch("", 3)]

    def work() -> None:
        for gpu in (False, True):
            find_peak(made, plan, {"main": 1}, stretches, gpu=gpu)

    work()  # records of buckets are kept
    return work


def timelines(units: int, leaves: int) -> Work:
    plan = make_plan(layout(units, leaves))
    times = dict.fromkeys(names(units), 1e-3)
    return lambda: timeline_of(plan, gather=1e9, reduce=1e9, compute=times)


def owners(units: int, leaves: int) -> Work:
    buckets, muon = layout(units, leaves).trainable.values(), fsdp.muon(lr=0.1)
    here = (("data", 3),)
    return lambda: [
        (repr(one), one.digest, one.plan(tuple(b.name for b in one.buckets), (), here)) for one in muon.owners(buckets)
    ]


PURE: dict[str, Callable[[int, int], Work]] = {
    "layout": layouts,
    "layout by names": lambda u, n: layouts(u, n, units=names(u)),
    "layout by patterns": lambda u, n: layouts(u, n, units=names(u, "blocks.{}.*")),
    "layout with rules": with_rules,
    "layout of a container": of_towers,
    "plan": plans,
    "plan ahead": lambda u, n: plans(u, n, prefetch=3, keep=1 << 12),
    "plan that keeps all": lambda u, n: plans(u, n, keep="all"),
    "plan by names": with_names,
    "plan without a backward": without_a_backward,
    "what is printed": looks,
    "positions": positions,
    "positions where all is kept": lambda u, n: positions(u, n, keep="all"),
    "peak": peaks,
    "timeline": timelines,
    "owners": owners,
}


@pytest.mark.parametrize("what", PURE)
def test_what_is_pure_grows_with_the_units(what: str) -> None:
    assert grows(PURE[what], 64, 2) <= MOST


@pytest.mark.parametrize("what", ["layout", "layout by patterns", "layout with rules", "what is printed", "owners"])
def test_what_is_pure_grows_with_the_leaves(what: str) -> None:
    assert grows(PURE[what], 3, 50, by_leaf=True) <= MOST


def test_a_layout_does_not_grow_with_the_ranks() -> None:
    def on(ranks: int) -> Work:
        some, spec = infos(16, 4), Spec({"replica": 2, "shard": ranks}, fsdp.hsdp("replica", "shard"))
        return lambda: make_plan(plan_layout(some, spec))

    on(8)()
    assert calls(on(8192)) == calls(on(8))


# -------------------------------------------------------------------------------- states


def spec() -> Spec:
    return Spec(fsdp.local_mesh())


def state_of(units: int, leaves: int) -> fsdp.State:
    return fsdp.shard(fsdp.functionalize(Net(units * leaves, units))[0], spec(), fsdp.adamw(lr=1e-3))


def driven(units: int, leaves: int, change: Any = lambda model: model, **said: Any) -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(Net(units * leaves, units))
    placed = Spec(fsdp.local_mesh(), **said)
    return fsdp.shard(params, placed, fsdp.adamw(lr=1e-3)), T.forward_backward(change(model), loss_of)


def first_step(units: int, leaves: int, change: Any = lambda model: model) -> Work:
    state, forward_backward = driven(units, leaves, change)

    def work() -> None:
        after, _ = forward_backward(state, torch.ones(2, 4))
        fsdp.step(after)

    return work


def memory(units: int, leaves: int) -> Work:
    state, forward_backward = driven(units, leaves)
    return lambda: T.step_memory(forward_backward, state, torch.ones(2, 4))


def functionalized(units: int, leaves: int) -> Work:
    model = Net(units * leaves, units)
    return lambda: fsdp.functionalize(model)


def abstract(units: int, leaves: int) -> Work:
    params = {one.path: torch.empty(one.shape, device="meta") for one in infos(units, leaves)}
    return lambda: fsdp.abstract_state(params, Spec({"data": 16}), fsdp.adamw(lr=1e-3))


def sharded(units: int, leaves: int) -> Work:
    params = {one.path: torch.ones(one.shape) for one in infos(units, leaves)}
    return lambda: fsdp.shard(params, spec(), fsdp.adamw(lr=1e-3))


def initialised(units: int, leaves: int) -> Work:
    return lambda: fsdp.init(lambda: Net(units * leaves, units), spec(), fsdp.adamw(lr=1e-3))


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=ROOT[0]))


ROOT: list[Path] = []


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Iterator[None]:
    ROOT.append(tmp_path)
    yield
    ROOT.clear()


def saved(units: int, leaves: int) -> Work:
    state, path = state_of(units, leaves), folder()
    return lambda: fsdp.save(state, path / "saved")


def loaded(units: int, leaves: int) -> Work:
    state, path = state_of(units, leaves), folder()
    fsdp.save(state, path / "saved")
    return lambda: fsdp.load(path / "saved", like=state)


def loaded_by_spec(units: int, leaves: int) -> Work:
    path = folder()
    fsdp.save(state_of(units, leaves), path / "saved")
    return lambda: fsdp.load(path / "saved", spec(), fsdp.adamw(lr=1e-3))


def opened(units: int, leaves: int) -> Work:
    path = folder() / "saved"
    fsdp.save(state_of(units, leaves), path)
    return lambda: fsdp.open_checkpoint(path)


def redistributed(units: int, leaves: int) -> Work:
    state = state_of(units, leaves)
    other = Spec(fsdp.local_mesh(), fsdp.zero1("data"), units=lambda path: re.sub("[0-9]+", "", path)[:7])
    return lambda: fsdp.redistribute(state, other)


def exported(units: int, leaves: int) -> Work:
    state, path = state_of(units, leaves), folder()
    return lambda: fsdp.save_safetensors(state, path / "saved")


STATES: dict[str, Callable[[int, int], Work]] = {
    "functionalize": functionalized,
    "shard": sharded,
    "abstract_state": abstract,
    "init": initialised,
    "first step": first_step,
    "first step under remat": lambda u, n: first_step(u, n, lambda model: T.remat(model, "blocks.*")),
    "step_memory": memory,
    "save": saved,
    "load": loaded,
    "load by a spec": loaded_by_spec,
    "open": opened,
    "redistribute": redistributed,
    "safetensors": exported,
}


@pytest.mark.parametrize("what", STATES)
def test_states_grow_with_the_units(what: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array")
        assert grows(STATES[what], 12, 2) <= MOST


@pytest.mark.parametrize(
    "what",
    [
        "shard", "first step", "save", "load", pytest.param("load by a spec", marks=pytest.mark.large), "open",
        "redistribute",
    ],
)  # fmt: skip
def test_states_grow_with_the_leaves(what: str) -> None:
    assert grows(STATES[what], 2, 30, by_leaf=True) <= MOST


def bytecodes(work: Work, folder: str) -> Counter[str]:
    """How many bytecodes each function in this folder runs: what loops without a call is seen, too."""
    found = Counter[str]()

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        found[f"{frame.f_code.co_name} {frame.f_code.co_firstlineno}"] += event == "opcode"
        return in_function

    def trace(frame: FrameType, *_: Any) -> Any:
        frame.f_trace_opcodes = folder in frame.f_code.co_filename
        return in_function if frame.f_trace_opcodes else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


def test_uses_beside_the_plan_do_not_look_through_those_before_them() -> None:
    def work(units: int) -> Work:
        order = Schedule(order=[*reversed(names(units)), *names(units)])
        state, forward_backward = driven(units, 2, schedule=order)
        return lambda: forward_backward(state, torch.ones(2, 4))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="unshard.* is not what the schedule expects here")
        work(3)()
        small, large = (bytecodes(work(units), "_drive") for units in (6, 24))
    assert any(name.startswith("had_off_plan") for name in small)
    assert [name for name, n in large.items() if n > 6 * small[name]] == []  # the first two of a pass are by the plan


def test_a_save_is_less_work_a_tensor_than_that_of_torchs_checkpoints() -> None:
    def theirs(_: int, leaves: int) -> Work:
        there, path = {f"{kind}.{k}": torch.ones(16) for kind in "abc" for k in range(leaves)}, folder()
        checkpoint: Any = dcp
        return lambda: checkpoint.save(there, checkpoint_id=path / "saved", no_dist=True)

    def more(make: Callable[[int, int], Work]) -> int:
        make(1, 2)()
        return calls(make(1, 42)) - calls(make(1, 2))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        assert more(saved) <= 0.8 * more(theirs)
