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
from functools import partial
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
from functional_fsdp._plan.cursor import Cursor, Positions
from functional_fsdp._plan.layout import Layout, LeafInfo, plan_layout
from functional_fsdp._plan.plan import Plan, make_plan
from functional_fsdp.look.tables import Stretch, find_peak
from functional_fsdp.look.timeline import timeline_of

GOLDEN = Path(__file__).with_name("golden.txt")
MOST = 4.6  # times as many calls for four times as much
Work = Callable[[], object]
#: what is made of so many units and leaves before, and what is called with that
Row = tuple[Callable[[int, int], tuple[Any, ...]], Callable[..., object]]


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


def work_of(row: Row) -> Callable[[int, int], Work]:
    prepare, call = row
    return lambda units, leaves: partial(call, *prepare(units, leaves))


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


def names(units: int, form: str = "blocks.{}") -> list[str]:
    return [form.format(i) for i in range(units)]


def leaves_and_spec(units: int, leaves: int, /, **spec: Any) -> tuple[list[LeafInfo], Spec]:
    return infos(units, leaves), Spec({"data": 8}, **spec)


def with_rules(units: int, leaves: int) -> tuple[list[LeafInfo], Spec]:
    rules = {name: f"kind {i % 3}" for i, name in enumerate(names(units))}
    return leaves_and_spec(units, leaves, labels=rules, trainable=dict.fromkeys(rules, True))


def of_a_container(units: int, leaves: int) -> tuple[list[LeafInfo], Spec]:
    some = [LeafInfo(f"0.{one.path}", one.shape, one.dtype) for one in infos(units, leaves)]
    return [*some, LeafInfo("1.weight", (4,), torch.float32)], Spec({"data": 8})


def layout(units: int, leaves: int) -> Layout:
    return plan_layout(*leaves_and_spec(units, leaves))


def layout_and_schedule(units: int, leaves: int, **schedule: Any) -> tuple[Layout, Schedule]:
    return layout(units, leaves), Schedule(**schedule)


def plan(units: int, leaves: int, **schedule: Any) -> tuple[Plan]:
    return (make_plan(*layout_and_schedule(units, leaves, **schedule)),)


def by_names(units: int, leaves: int) -> tuple[Layout, Schedule]:
    ahead = {**dict.fromkeys(names(units), 2), "*": 1}
    return layout_and_schedule(units, leaves, keep=names(units // 2), prefetch=ahead)


def layout_plan_and_start(units: int, leaves: int) -> tuple[Layout, Plan, Cursor]:
    made = layout(units, leaves)
    return made, make_plan(made), Positions(make_plan(made)).start.cursor


def printed(made: Layout, plan: Plan, start: Cursor) -> object:
    return repr(made), made.hash, repr(plan), plan.hash, plan.crowded_gathers, plan.stays, repr(start)


def peaks(made: Layout, plan: Plan, _: Cursor) -> object:
    stretches = [*(Stretch(one.unit, 3) for one in plan.reductions), Stretch("", 3)]
    return [find_peak(made, plan, {"main": 1}, stretches, gpu=gpu) for gpu in (False, True)]


def with_records(units: int, leaves: int) -> tuple[Layout, Plan, Cursor]:
    made = layout_plan_and_start(units, leaves)
    peaks(*made)  # records of buckets are kept
    return made


def timeline(plan: Plan) -> object:
    return timeline_of(plan, gather=1e9, reduce=1e9, compute=dict.fromkeys(plan.by_name, 1e-3))


def owners(made: Layout) -> object:
    found = fsdp.muon(lr=0.1).owners(made.trainable.values())
    return [(repr(one), one.digest, one.plan(tuple(b.name for b in one.buckets), (), (("data", 3),))) for one in found]


PURE: dict[str, Row] = {
    "layout": (leaves_and_spec, plan_layout),
    "layout by names": (lambda u, n: leaves_and_spec(u, n, units=names(u)), plan_layout),
    "layout by patterns": (lambda u, n: leaves_and_spec(u, n, units=names(u, "blocks.{}.*")), plan_layout),
    "layout with rules": (with_rules, plan_layout),
    "layout of a container": (of_a_container, plan_layout),
    "plan": (layout_and_schedule, make_plan),
    "plan ahead": (lambda u, n: layout_and_schedule(u, n, prefetch=3, keep=1 << 12), make_plan),
    "plan that keeps all": (lambda u, n: layout_and_schedule(u, n, keep="all"), make_plan),
    "plan by names": (by_names, make_plan),
    "plan of two forwards": (  # of which the second might be a backward
        lambda u, n: layout_and_schedule(u, n, order=names(u) * 2), lambda *given: make_plan(*given).turn),
    "what is printed": (layout_plan_and_start, printed),
    "positions": (plan, Positions),
    "positions where all is kept": (lambda u, n: plan(u, n, keep="all"), Positions),
    "peak": (with_records, peaks),
    "timeline": (plan, timeline),
    "owners": (lambda u, n: (layout(u, n),), owners),
}  # fmt: skip


@pytest.mark.parametrize("what", PURE)
def test_what_is_pure_grows_with_the_units(what: str) -> None:
    assert grows(work_of(PURE[what]), 64, 2) <= MOST


@pytest.mark.parametrize("what", ["layout", "layout by patterns", "layout with rules", "what is printed", "owners"])
def test_what_is_pure_grows_with_the_leaves(what: str) -> None:
    assert grows(work_of(PURE[what]), 3, 50, by_leaf=True) <= MOST


def test_a_layout_does_not_grow_with_the_ranks() -> None:
    def on(ranks: int) -> Work:
        some, spec = infos(16, 4), Spec({"replica": 2, "shard": ranks}, fsdp.hsdp("replica", "shard"))
        return lambda: make_plan(plan_layout(some, spec))

    on(8)()
    assert calls(on(8192)) == calls(on(8))


# -------------------------------------------------------------------------------- states


def spec() -> Spec:
    return Spec(fsdp.local_mesh())


ADAMW = fsdp.adamw(lr=1e-3)


def params_of(units: int, leaves: int, device: str = "cpu") -> tuple[dict[str, torch.Tensor]]:
    return ({one.path: torch.ones(one.shape, device=device) for one in infos(units, leaves)},)


def state_of(units: int, leaves: int) -> tuple[fsdp.State]:
    return (fsdp.shard(fsdp.functionalize(Net(units * leaves, units))[0], spec(), ADAMW),)


def driven(units: int, leaves: int, change: Any = lambda model: model, **said: Any) -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(Net(units * leaves, units))
    return fsdp.shard(params, Spec(fsdp.local_mesh(), **said), ADAMW), T.forward_backward(change(model), loss_of)


def first_step(state: fsdp.State, forward_backward: Any) -> object:
    return fsdp.step(forward_backward(state, torch.ones(2, 4))[0])


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=ROOT[0]))


ROOT: list[Path] = []


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Iterator[None]:
    ROOT.append(tmp_path)
    yield
    ROOT.clear()


def saved(units: int, leaves: int) -> tuple[Path]:
    return (fsdp.save(*state_of(units, leaves), folder() / "saved"),)


def redistributed(state: fsdp.State) -> object:
    by_kind = lambda path: re.sub("[0-9]+", "", path)[:7]  # noqa: E731
    return fsdp.redistribute(state, Spec(fsdp.local_mesh(), fsdp.zero1("data"), units=by_kind))


STATES: dict[str, Row] = {
    "functionalize": (lambda u, n: (Net(u * n, u),), fsdp.functionalize),
    "shard": (params_of, lambda params: fsdp.shard(params, spec(), ADAMW)),
    "abstract_state": (
        lambda u, n: params_of(u, n, "meta"), lambda params: fsdp.abstract_state(params, Spec({"data": 16}), ADAMW)),
    "init": (lambda u, n: (u, n), lambda u, n: fsdp.init(lambda: Net(u * n, u), spec(), ADAMW)),
    "first step": (driven, first_step),
    "first step under remat": (lambda u, n: driven(u, n, lambda model: T.remat(model, "blocks.*")), first_step),
    "step_memory": (
        driven, lambda state, forward_backward: T.step_memory(forward_backward, state, torch.ones(2, 4))),
    "save": (state_of, lambda state: fsdp.save(state, folder() / "saved")),
    "load": (lambda u, n: (*saved(u, n), *state_of(u, n)), lambda path, state: fsdp.load(path, like=state)),
    "load by a spec": (saved, lambda path: fsdp.load(path, spec(), ADAMW)),
    "open": (saved, fsdp.open_checkpoint),
    "redistribute": (state_of, redistributed),
    "safetensors": (state_of, lambda state: fsdp.save_safetensors(state, folder() / "saved")),
}  # fmt: skip


@pytest.mark.parametrize("what", STATES)
def test_states_grow_with_the_units(what: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array")
        assert grows(work_of(STATES[what]), 12, 2) <= MOST


@pytest.mark.parametrize(
    "what",
    [
        "shard", "first step", "save", "load", pytest.param("load by a spec", marks=pytest.mark.large), "open",
        "redistribute",
    ],
)  # fmt: skip
def test_states_grow_with_the_leaves(what: str) -> None:
    assert grows(work_of(STATES[what]), 2, 30, by_leaf=True) <= MOST


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
        assert more(work_of(STATES["save"])) <= 0.8 * more(theirs)
