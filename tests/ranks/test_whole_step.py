"""T.compile of steps in the third way: traced as they run, compiled whole, equal to the eager step."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import gc
import random
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.models import CASES, Batch, batch_of, made
from support.scenario import Scenario, Seen, alike, case, run
from support.tables import FULL, marked
from support.traced import few, in_order
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, SpecError, launch
from functional_fsdp import transforms as T
from functional_fsdp.extend import lineage_of
from functional_fsdp.transforms._compile import whole_step as _whole_step
from functional_fsdp.transforms._compile.whole_step import exact

Losses = list[float]


def programs_made() -> Any:
    """Counts the programs that are made while it is entered: a mock."""
    return mock.patch.object(_whole_step, "CompiledStep", wraps=_whole_step.CompiledStep)


def if_compiled(step: Callable[..., Any], backend: str) -> Any:
    return T.compile(step, backend) if backend else step


def both_ways(one: Scenario, backend: str) -> tuple[Seen, Seen, int]:
    """What eager steps do, what compiled ones do, and how many programs these took."""
    with programs_made() as programs:
        compiled = run(replace(one, compile=partial(if_compiled, backend=backend)))
    return run(one), compiled, programs.call_count


LARGE_MODELS = [
    pytest.param(name, torch.float32, 1e-5, marks=pytest.mark.large, id=name) for name in ("llama", "qwen2", "vit")
]


@pytest.mark.large  # `test_ways_in_turn` and the law of ways compile smaller ones
@pytest.mark.parametrize(("name", "dtype", "within"), [("loose parameters", torch.float64, 1e-9), *LARGE_MODELS])
def test_twenty_compiled_steps_of_a_model_are_the_eager_ones(name: str, dtype: torch.dtype, within: float) -> None:
    """The large models compute in float32 inside, whatever the dtype of their weights."""

    def data(step: int, rank: int, micro: int) -> Batch:
        batch = batch_of(CASES[name], step, rank, micro)
        return {key: t.to(dtype) if t.is_floating_point() else t for key, t in batch.items()}

    one = case(name, steps=20, model=lambda: made(CASES[name], dtype), data=data)
    for eager, compiled, programs in launch(both_ways, (one, "inductor"), nprocs=2):
        assert programs == 1
        assert compiled.losses == pytest.approx(eager.losses, abs=within)


ROWS = [
    ("loose parameters", "zero3", 1, 1), ("a unit called twice", "zero3", 1, 2), ("a unit called never", "zero2", 2, 1),
    ("checkpoint around a layer", "zero3", 1, 1), ("checkpoint around two", "ddp", 1, 1), ("adapters", "zero3", 1, 2),
    ("other entry points", "zero1", 2, 1), ("resnet", "zero3", 1, 2), ("lstm", "hsdp", 1, 1), ("t5", "zero3", 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "preset", "programs", "micro"), marked(ROWS, [ROWS[2]]))
def test_a_graph_of_any_model_does_what_eager_steps_do(name: str, preset: str, programs: int, micro: int) -> None:
    """In float64. Leaves without a gradient give the optimizer counts of their own, for which it is traced again."""
    one = case(name, preset=preset, micro=micro, steps=3)
    for eager, compiled, count in few(both_ways, one, "aot_eager"):
        assert count == programs
        alike(replace(compiled, grads=[]), eager, 1e-9)


# ---------------------------------------------------------------- the graph

WIDTH, DEPTH = 64, 3
LAYER = 4 * (WIDTH * WIDTH + WIDTH + 192)  # with padding


class Layers(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh, depth: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.between, self.rate = between, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def state_of(module: nn.Module, buffers: Any = (), **spec: Any) -> tuple[fsdp.State, nn.Module]:
    params, model = fsdp.functionalize(module)
    placed = fsdp.Spec(fsdp.local_mesh(), **spec)
    return fsdp.shard(params, placed, fsdp.sgd(lr=0.1), buffers=buffers), model


def step_of(model: nn.Module, loss_fn: Any = lambda model, x: model(x).square().mean(), **options: Any) -> Any:
    forward_backward = T.forward_backward(model, loss_fn, **options)

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    return train_step


@pytest.mark.parametrize("kept", [0, 1])
def test_no_gather_of_the_forward_is_alive_in_the_backward(kept: int) -> None:
    """ZeRO-3: two gathered layers at any time, and no second forward."""
    depth = DEPTH + 1
    with torch.device("meta"):
        params, model = fsdp.functionalize(Layers(depth=depth))
    schedule = fsdp.Schedule(keep={"layers.1"} if kept else None)
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}, schedule=schedule), fsdp.sgd(lr=0.1))
    lowered = fsdp.lower(step_of(model), state, torch.empty(4, WIDTH, device="meta"))
    plan = fsdp.make_plan(state.layout, schedule)
    kinds = [(one.kind, one.lane) for one in lowered.collectives]
    # if one is kept, another is gathered twice
    assert kinds.count(("all_gather", "gather")) == len(plan.gathers) == 2 * depth - 1
    assert kinds.count(("reduce_scatter", "reduce")) == len(plan.reductions) == depth
    assert lowered.memory_analysis().gathered == (2 + kept) * LAYER
    assert lowered.cost_analysis().flops == (3 * depth - 1) * 2 * 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    "name",
    ["loose parameters", *marked([("llama, checkpointed",), ("a unit called twice",), ("t5",)], [])],
)
def test_the_order_is_the_one_that_units_are_used_in(name: str) -> None:
    """Tied weights, units of several calls, encoders beside decoders: two units at a time, the largest at most."""
    case = CASES[name]
    params, model = fsdp.functionalize(made(case, torch.float32))
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1))
    lowered = fsdp.lower(step_of(model, case.loss_fn), state, batch_of(case, 0, 0))
    sizes = sorted(sum(4 * bucket.numel for bucket in unit.buckets) for unit in state.layout.units)
    assert lowered.memory_analysis().gathered <= sum(sizes[-2:])


def carried_out() -> tuple[list[str], list[str]]:
    """What Inductor's code does, in order: collectives and waits by number, products; and the buffers of gathers that
    a backward's products read. Kernels compute nothing: the code is what counts, and a C++ compiler takes long."""
    state, model = state_of(Layers(depth=DEPTH))
    if fsdp.local_mesh().get_rank():  # the first rank's code is looked at; here, the same collectives
        T.compile(step_of(model), "aot_eager")(state, torch.ones(4, WIDTH))
        return [], []
    nothing = mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_: None)
    with torch._inductor.config.patch(fx_graph_cache=False), nothing:
        _, codes = run_and_get_code(T.compile(step_of(model)), state, torch.ones(4, WIDTH))
    return in_order(codes[0])


def test_inductor_keeps_the_order_of_the_plan_and_both_gathers() -> None:
    (order, read), _ = launch(carried_out, nprocs=2)
    issued = [one for one in order if one[-1].isdigit() and not one.startswith("wait")]
    assert [one for one in issued if "gather" in one] == [f"all_gather {k}" for k in range(2 * DEPTH - 1)]
    assert [one for one in issued if "scatter" in one] == [f"reduce_scatter {k}" for k in range(DEPTH)]
    bare = [one for one in issued if "product" not in order[order.index(one) : order.index(f"wait {one}")]]
    assert bare == ["all_gather 0", f"reduce_scatter {DEPTH - 1}"]
    gathered = [one for one in read if one]  # one of each layer in the forward, one in the backward but the first's
    assert gathered == [f"all_gather {k}" for k in (*range(DEPTH), DEPTH - 1, *range(DEPTH, 2 * DEPTH - 2))]


# ---------------------------------------------------------------- guards


def test_other_shapes_modes_and_numbers_are_traced_anew() -> None:
    state, model = state_of(Layers(lambda x: F.dropout(x, 0.0).tanh()))
    forward_backward = T.forward_backward(model, lambda model, x, scale: model(x).sum() * scale)

    def train_step(state: fsdp.State, x: torch.Tensor, scale: float) -> Any:
        state, loss = forward_backward(state, x, scale)
        return fsdp.step(state), loss

    step = T.compile(train_step, "aot_eager")
    with programs_made() as programs:
        counts = []
        for x, scale, training in [
            (torch.ones(4, WIDTH), 1.0, True), (torch.zeros(4, WIDTH), 1.0, True), (torch.ones(2, WIDTH), 1.0, True),
            (torch.ones(4, WIDTH), 1.0, False), (torch.ones(4, WIDTH), 1.0, True),
        ]:  # fmt: skip
            model.train(training)
            state, _ = step(state, x, scale)
            counts.append(programs.call_count)
        assert counts == [1, 1, 2, 3, 3]
        with torch.autocast("cpu", torch.bfloat16), pytest.warns(RuntimeWarning, match=r"4th time, since autograd's"):
            state, _ = step(state, torch.ones(4, WIDTH), 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state, _ = step(state, torch.zeros(4, WIDTH), 2.0)
        assert programs.call_count == 5
    assert state.steps == 7


def test_what_changes_is_named_when_a_step_is_traced_again_and_again() -> None:
    state, model = state_of(Layers())
    step = T.compile(step_of(model), "aot_eager")
    for n in (1, 2, 3):
        state, _ = step(state, torch.ones(n, WIDTH))
    with pytest.warns(RuntimeWarning, match=r"\[1\] of \(state, \*args\) was \(3, 64\) .* and is \(4, 64\)"):
        step(state, torch.ones(4, WIDTH))


def test_a_setting_of_the_model_that_changes_is_refused_as_in_eager_steps() -> None:
    model = Layers()
    state, _ = state_of(model)
    step = T.compile(step_of(model), "aot_eager")
    state, _ = step(state, torch.ones(2, WIDTH))
    model.rate = 0.5
    with pytest.raises(SpecError, match="the model was changed"):
        step(state, torch.ones(2, WIDTH))


# ---------------------------------------------------------------- what is refused


def decides(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() if x.sum() > 0 else x.sin()


def loops(x: torch.Tensor) -> torch.Tensor:
    return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 1.5), (torch.tensor(0), x))[1]


def recomputes(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: F.dropout(x, 0.5).sin(), x, use_reentrant=False)


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


def twice(model: nn.Module) -> Any:
    forward_backward = T.forward_backward(model, lambda model, x: model(x).sum())
    return lambda state, x: fsdp.step(forward_backward(forward_backward(state, x)[0], x)[0])


def halfway(model: nn.Module) -> Any:
    forward_backward = T.forward_backward(model, lambda model, x: model(x).sum(), buffers="local")
    return lambda state, x: forward_backward(state, x, last_microbatch=False)[0]


def with_option(option: str) -> tuple[Any, ...]:
    said = rf"forward_backward\({option}=True\) was called where a graph is made"
    return Layers, lambda model: step_of(model, **{option: True}), ScheduleError, said


HERE = r"at .*test_whole_step.py:"
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    "a value that decides": (lambda: Layers(decides), step_of, ScheduleError,
                             rf"asks for a tensor's value, {HERE}{decides.__code__.co_firstlineno + 1}\."),
    "rounds that hang on a value": (lambda: Layers(loops), step_of, ScheduleError,
                                    rf"asks for a tensor's value, {HERE}{loops.__code__.co_firstlineno + 1}\."),
    "dropout in what is recomputed": (lambda: Layers(recomputes), step_of, ScheduleError,
                                      rf"the backward draws random numbers \(aten.*{HERE}"),
    "Python's random numbers": (lambda: Layers(lambda x: x.tanh() if random.random() < 2 else x), step_of,
                                ScheduleError, "draws from Python's or numpy's random numbers"),
    "what draws by itself": (lambda: Layers(lambda x: x[torch.randperm(4)].tanh()), step_of, ScheduleError,
                             rf"aten.randperm.*, {HERE}\d+, draws by itself"),
    "a buffer that changes": (lambda: nn.Sequential(Layers(), nn.BatchNorm1d(WIDTH, momentum=0.1)), step_of, SpecError,
                              r"changed the buffer '1.running_mean', which is not in the state"),
    "a weight that changes": (lambda: nn.Sequential(Clamped(WIDTH, WIDTH), Layers()), step_of, ScheduleError,
                              "the forward changed"),
    "find_nonfinite": with_option("find_nonfinite"),
    "second_order": with_option("second_order"),
    "a second round": (Layers, twice, ScheduleError, "they would count twice"),
    "a second round of two units": (lambda: Layers(depth=2), twice, ScheduleError, "they would count twice"),
    "the middle of a step": (Layers, halfway, ScheduleError, "in the middle of a step"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_have_is_refused_by_name(what: str) -> None:
    make, steps, error, said = REFUSED[what]
    state, model = state_of(make())
    with pytest.raises(error, match=said):
        T.compile(steps(model), "aot_eager")(state, torch.ones(4, WIDTH))


def test_the_number_of_steps_is_refused_with_the_users_line_and_its_tensor_is_not() -> None:
    state, model = state_of(Layers())
    forward_backward = T.forward_backward(model, lambda model, x: model(x).sum())

    def by_number(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
        return fsdp.step(forward_backward(state, x, scale=1.0 if state.steps else 0.0)[0])

    def by_tensor(state: fsdp.State, x: torch.Tensor) -> Any:
        repr(state)
        count = state.count.clone()
        return fsdp.step(forward_backward(state, x, scale=count > 0)[0]), count

    line = by_number.__code__.co_firstlineno + 1
    for verb, make in (("compile", T.compile(by_number, "aot_eager")), ("lower", partial(fsdp.lower, by_number))):
        with pytest.raises(ScheduleError, match=rf"{verb}: .* state.steps, at .*test_whole_step.py:{line}\."):
            make(state, torch.ones(4, WIDTH))
    step = T.compile(by_tensor, "aot_eager")
    for i in range(3):
        state, count = step(state, torch.ones(4, WIDTH))
        assert count == i


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def get(self) -> torch.Tensor:
        return self.x


class Choice(enum.Enum):
    LARGE = 2.0


@dataclass(frozen=True)
class Options:
    scale: float = 2.0
    names: tuple[str, ...] = ("a", "b")


X = torch.ones(4, WIDTH)
MUTABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor], str]] = {
    "an iterator": (lambda: iter([X, X]), next, "list_iterator"),
    "an object": (lambda: Holder(X), lambda held: held.x, "Holder"),
    "a method of one": (lambda: Holder(X).get, lambda get: get(), "method"),
    "an array": (lambda: np.ones((4, WIDTH), np.float32), torch.from_numpy, "ndarray"),
    "a module": (nn.Flatten, lambda module: module(X), "Flatten"),
}


def test_arguments_whose_contents_may_change_are_refused() -> None:
    state, model = state_of(Layers())
    train_step, taken = step_of(model), 0
    ways = (True, r"\['x'\] of the keyword arguments"), (False, r"\[1\] of \(state, \*args\)")
    for number, (make, read, kind) in enumerate(MUTABLE.values()):
        step = T.compile(lambda state, x=X, read=lambda x: x, held=None: train_step(state, read(x)), "aot_eager")
        for by_name, said in ways if FULL or not number else ways[:1]:  # each call is a trace
            given = make()
            for _ in range(2 if FULL or not number else 1):
                with pytest.raises(SpecError, match=rf"{said} is a {kind}"):
                    step(state, **{"x": given, "read": read}) if by_name else step(state, given, read)
        if FULL or not taken:  # what follows is the same for all of them
            state, _ = step(state, X)
            taken += 1
            for held, _, what in MUTABLE.values():  # at once: it is known what the step does
                with pytest.raises(SpecError, match=rf"\['held'\]\[0\] of .* is a {what}"):
                    step(state, X, held=[held()])
    assert state.steps == taken


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_arguments_are_refused_by_name(layout: torch.layout) -> None:
    """In driven steps and in others: torch compiles neither."""
    state, model = state_of(Layers())
    train = step_of(model)
    x = X.to_sparse(layout=layout)

    def by_hand(state: fsdp.State, given: Any) -> Any:
        state, w = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, w))

    for step in (lambda state, given: train(state, given["x"].to_dense()), by_hand):
        compiled = T.compile(step, "aot_eager")
        with pytest.raises(SpecError, match=r"\[1\]\['x'\] of \(state, \*args\) is a tensor of the layout sparse_c"):
            compiled(state, {"x": x})
        with pytest.raises(SpecError, match=r"\['given'\]\['x'\] of the keyword arguments is a tensor of"):
            compiled(state, given={"x": x})
    compiled = T.compile(train, "aot_eager")
    state, _ = compiled(state, x.to_dense())
    with pytest.raises(SpecError, match=r"\[1\] of \(state, \*args\) is a tensor of the layout sparse_c"):
        compiled(state, x)
    assert state.steps == 1


FIXED = [None, 1, 2.0, 3j, "a", b"b", Choice.LARGE, Options(), torch.float32, torch.device("cpu"), torch.strided, len,
         torch.tanh, Layers, partial(sum, start=2), np.float32(2), range(3), frozenset({1})]  # fmt: skip


@dataclass(frozen=True)
class Scale:
    of: float
    name: str = field(default="", compare=False)


#: an argument of one call after the other, and the number of programs after each
ARGUMENTS: dict[str, tuple[list[Any], list[int]]] = {
    "never changes": ([FIXED, FIXED, [*FIXED[:-1], 5]], [1, 1, 2]),
    "equal and not the same": ([Scale(0.0), Scale(-0.0), Scale(0.0, "two")] * 2, [1, 2, 3, 3, 3, 3]),
    "the same and not equal": ([[float("nan"), Scale(float("nan"))] for _ in range(3)], [1, 1, 1]),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_that_never_change_are_compared(what: str) -> None:
    state, model = state_of(Layers())
    train_step = step_of(model)
    step = T.compile(lambda state, x, said, *, choice: train_step(state, x * choice.value), "aot_eager")
    with programs_made() as programs:
        for said, count in zip(*ARGUMENTS[what], strict=True):
            state, _ = step(state, X, said, choice=Choice.LARGE)
            assert programs.call_count == count


@dataclass(frozen=True)
class Table:
    entries: Any = field(default_factory=dict, compare=False)

    def read(self) -> Any:
        return self.entries


class Marked(set[int]):
    """May have more in it than what it holds."""


def test_lists_and_dicts_in_frozen_dataclasses_are_compared_by_what_they_hold() -> None:
    state, model = state_of(Layers())
    train_step = step_of(model)
    step = T.compile(lambda state, x, table: train_step(state, x * table.entries["scale"][0]), "aot_eager")
    table = Table({"scale": [2.0], "names": {"a"}})
    with programs_made() as programs:
        for scale in (2.0, 3.0, 2.0):
            table.entries["scale"][0] = scale
            state, _ = step(state, X, table)
            state, _ = step(state, X, copy.deepcopy(table))
        assert programs.call_count == 2
    held: list[Any] = []
    held.append(Table(held))
    refused = [
        (Table(np.zeros(2)), "is a Table whose field 'entries' is a ndarray, whose contents may change"),
        (Table({"scale": [1.0, np.zeros(2)]}), "whose field 'entries' is a dict with a list with a ndarray, whose"),
        (Table(Marked({1})), "whose field 'entries' is a Marked, whose contents may change"),
        (held[0], "a Table among the step's arguments holds itself"),
        (Table().read, "is a method, whose contents may change"),
    ]
    for given, said in refused:
        with pytest.raises(SpecError, match=said):
            step(state, X, given)


class Named(float):
    def __repr__(self) -> str:
        return "rate"


def test_what_is_exact() -> None:
    east = datetime.timezone(datetime.timedelta(hours=1))
    noon = datetime.datetime(2000, 1, 1, 12, tzinfo=datetime.timezone.utc)
    told = [0.0, -0.0, Named(1), Named(2), range(0, 3, 2), range(0, 4, 2), noon, noon.astimezone(east),
            complex(0.0, -0.0), 0j]  # fmt: skip
    assert len({exact(one) for one in told}) == len(told)
    for nan in (float("nan"), complex("nan"), np.float32("nan"), decimal.Decimal("nan"), Scale(float("nan"))):
        assert exact(nan) == exact(copy.deepcopy(nan)) == exact(type(nan)(float("nan")))
    record = np.zeros(1, [("a", "f4")])[0]  # which can be written to
    with pytest.raises(TypeError, match="unhashable"):
        hash(exact(record))


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_inputs_of_another_dtype_are_refused_before_anything_runs(backend: str) -> None:
    state, model = state_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    step = T.compile(step_of(model), backend)
    x = torch.ones(2, 4)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(SpecError, match=r"the module '0' computes in float32 and was given .* Cast the batch"):
            step(state, x.to(dtype))
        with pytest.raises(SpecError, match="the module '0' computes in float32"):
            fsdp.lower(step_of(model), state, x.to(dtype))
    with pytest.raises(RuntimeError, match="must have the same dtype, but got float32 and int64"):
        step(state, x.long())
    state, _ = step_of(model)(state, x)
    assert state.steps == 1


def test_a_compiled_step_that_is_stopped_before_its_update_can_be_taken_again() -> None:
    """Fake tensors let pass what this norm refuses."""
    state, model = state_of(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
    step = T.compile(step_of(model, lambda model, x: model[1](model[0](x).float()).sum()), "aot_eager")
    with torch.inference_mode():
        batch = torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        step(state, batch)
    state, _ = step(state, batch.float())
    assert state.steps == 1


class Branches(nn.Module):
    """A higher-order operator, whose functions read a buffer."""

    seen: torch.Tensor

    def __init__(self, drop: Callable[[torch.Tensor], torch.Tensor] = torch.sin) -> None:
        super().__init__()
        self.drop, self.inner, self.norm = drop, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inner(x))
        self.seen.copy_(torch.cond(x[0, 0] > 0, lambda x, seen: seen + x[0], lambda x, seen: seen - 1, (x, self.seen)))
        return torch.cond(x[0, 0] > 0, lambda x: self.drop(x @ x.t() @ x), lambda x: x.cos(), (x,))


@pytest.mark.parametrize("how", ["compiled", "products"])
def test_a_higher_order_operator_computes_what_it_does_in_an_eager_step(how: str) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = []
    for now in ("", how):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Sequential(Branches())).double()
        params, model = fsdp.functionalize(module)
        optimizer = fsdp.sgd(lr=0.1, momentum=0.5)
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), optimizer, buffers=fsdp.buffers(module))
        if now == "products":
            model = T.remat(model, "0", products=("0",))
        step = if_compiled(step_of(model), "aot_eager" if now == "compiled" else "")
        for _ in range(2):
            state, _ = step(state, x)
        found.append(fsdp.state_dict(state))
    torch.testing.assert_close(found[1], found[0])


class Chosen(nn.Module):
    """A branch that reads weights of its unit: as they are, or copies. With `unit` it calls a module."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.inner, self.scale = reads, nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        given = {name: t.clone() if self.reads == "copies" else t for name, t in self.inner.named_parameters()}
        run = self.inner if self.reads == "unit" else lambda x: F.linear(x, **given).tanh()
        return torch.cond(x.sum() > 0, run, lambda x: x.cos(), (x,))


@pytest.mark.parametrize("how", ["eager", "units", "whole"])
def test_branches_read_copies_of_the_weights_of_a_unit(how: str) -> None:
    """Weights of a unit share memory, which torch refuses; and no unit is gathered within a branch."""

    def run(reads: str) -> fsdp.State:
        module = nn.Sequential(Chosen(reads), nn.Linear(WIDTH, 1)).double()
        module.load_state_dict(weights)
        params, model = fsdp.functionalize(module)
        units = ["0.inner", "1"] if reads == "unit" else ["0", "1"]
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=units), fsdp.sgd(lr=1.0))
        if how == "units" and reads != "unit":
            model = T.compile_units(model, "0", backend="aot_eager")
        step = step_of(model, lambda model, x: model(x).square().mean())
        return if_compiled(step, "aot_eager" if how == "whole" else "")(state, x)[0]

    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).abs()
    plain = nn.Sequential(Chosen("copies"), nn.Linear(WIDTH, 1)).double()
    weights = {path: t.clone() for path, t in plain.state_dict().items()}
    plain(x).square().mean().backward()
    expected = {path: weights[path] - p.grad for path, p in plain.named_parameters()}
    torch.testing.assert_close(fsdp.state_dict(run("copies")), expected)
    torch._dynamo.reset()  # of what it has compiled for the copies
    with pytest.raises(SpecError, match=r"the module '0'.* torch.cond, .* share memory.*layer.weight.clone\(\)"):
        run("weights")
    with pytest.raises(ScheduleError, match=r"torch\.cond traces its branches: call units outside"):
        run("unit")


class Fickle(Branches):
    """It draws from Python's numbers, and has a higher-order operator after that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.random())


@pytest.mark.parametrize(
    ("drawing", "said"),
    [(lambda: Branches(F.dropout), r"dropout.*draws by itself"),  # whichever branch runs: both are in the graph
     (lambda: Fickle(nn.Identity()), "draws from Python's or numpy's random numbers")],
    ids=["within", "before"],
)  # fmt: skip
def test_random_numbers_within_a_higher_order_operator_or_before_it_are_refused(drawing: Any, said: str) -> None:
    state, model = state_of(drawing(), fsdp.buffers(Branches()))
    with pytest.raises(ScheduleError, match=said):
        T.compile(step_of(model), "aot_eager")(state, torch.ones(4, WIDTH))


def test_an_argument_that_is_written_shares_its_memory_with_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code would read there what was before. Parts of one tensor that do not meet are no such arguments."""
    monkeypatch.setattr(_whole_step, "through_inductor", lambda module, *rest: module.forward)
    state, model = state_of(Layers())

    def loss_fn(model: Any, x: torch.Tensor, seen: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        seen[1:].add_(1.0)
        torch.add(kept, 1.0, out=kept)
        return model(x).sum() + seen.sum()

    forward_backward = T.forward_backward(model, loss_fn)
    memory = torch.zeros(4, 3)
    refused = r"writes to an argument, and others have its memory, too: float32 \[4, 2\], float32 \[4, 2\]"
    for first in ("met", "apart"):
        step = T.compile(lambda state, *args: fsdp.step(forward_backward(state, *args)[0]))
        if first == "apart":
            state = step(state, X, memory[:, ::2], torch.ones(4, 2))
            state = step(state, X, memory[:, :2], torch.ones(4, 2))
        with pytest.raises(SpecError, match=refused):
            step(state, X, memory[:, :2], memory[:, 1:])
        with pytest.raises(SpecError, match=refused):
            step(state, X, memory[:, 1:], memory[:, :2])
    state = step(state, X, memory[:, :2], torch.ones(4, 2))
    assert state.steps == 3
    assert memory.tolist() == [[0.0] * 3, *[[3.0, 2.0, 1.0]] * 3]


def ranks_apart() -> str:
    """One rank uses its layers in another order."""
    state, model = state_of(Layers(depth=2))
    turn = fsdp.local_mesh().get_rank()

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(model.layers) if turn else model.layers:
            x = layer(x)
        return x.sum()

    step = T.compile(step_of(model, loss_fn), "aot_eager")
    with pytest.raises(ScheduleError) as error:
        step(state, torch.ones(4, WIDTH))
    return str(error.value)


def test_ranks_whose_graphs_have_other_collectives_are_told_so() -> None:
    for said in launch(ranks_apart, nprocs=2):
        assert said.startswith("compile: the step's collectives differ from those of rank ")


# ---------------------------------------------------------------- several States


class Backwards(nn.Module):
    """Uses its units in another order than they stand, and has other names for them than `Layers`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in reversed(self.parts):
            x = torch.tanh(part(x))
        return x


def two_states(way: str) -> Any:
    """Three steps that train two States each; what each consumed is of no more use."""
    (first, one), (second, other) = state_of(Layers(depth=2).double()), state_of(Backwards().double())
    train_one, train_other = (T.forward_backward(m, lambda model, x: model(x).square().mean()) for m in (one, other))

    def train_step(first: fsdp.State, x: torch.Tensor, *, others: Any) -> Any:
        second, b = train_other(others["second"], x)
        second = fsdp.step(second)
        first, a = train_one(first, x)
        return {"losses": (a, b), "second": second}, fsdp.step(first)

    step = if_compiled(train_step, way)
    losses = []
    for i in range(3):
        before = first, second
        x = torch.full((4, WIDTH), 0.1 * i + fsdp.local_mesh().get_rank(), dtype=torch.float64)
        found, first = step(first, x, others={"second": second})
        second = found["second"]
        losses.append([loss.item() for loss in found["losses"]])
        for old in before:
            with pytest.raises(fsdp.StaleStateError):
                fsdp.full_params(old)
    assert [first.steps, second.steps] == [3, 3]
    return losses, fsdp.full_params(first), fsdp.full_params(second)


def looked_at(way: str) -> Any:
    """Evaluations before, within and after a step, with its own State and with a teacher's, which changes once."""
    (state, model), (teacher, other) = state_of(Layers(depth=2).double()), state_of(Backwards().double())
    evaluate, teach = T.apply(model), T.apply(other)
    train = T.forward_backward(model, lambda model, x, y: (model(x) - y).square().mean())

    def train_step(state: fsdp.State, teacher: fsdp.State, x: torch.Tensor) -> Any:
        teacher, y = teach(teacher, x)
        state, before = evaluate(state, x)
        state, loss = train(state, x, y, last_microbatch=False, scale=0.5)
        state, within = evaluate(state, x)
        state, loss = train(state, x, y, scale=0.5)
        state, after = evaluate(fsdp.step(state), x)
        return state, teacher, [loss, *(out.square().sum() for out in (before, within, after))]

    step, only = if_compiled(train_step, way), if_compiled(lambda state, x: evaluate(state, x), way)
    losses = []
    for i in range(3):
        x = torch.full((4, WIDTH), 0.1 * i + fsdp.local_mesh().get_rank(), dtype=torch.float64)
        state, teacher, found = step(state, teacher, x)
        same, out = only(state, x)
        assert same.between_steps
        assert teacher.between_steps
        losses += [loss.item() for loss in (*found, out.square().sum())]
        if i == 1:
            teacher = fsdp.replace_params(teacher, {k: v / 2 for k, v in fsdp.full_params(teacher).items()})
    return losses, fsdp.full_params(same)


def test_gathers_for_a_use_that_an_evaluation_has_not_are_not_in_the_graph() -> None:
    with torch.device("meta"):
        params, model = fsdp.functionalize(Layers(depth=DEPTH))
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1))
    evaluate, train = T.apply(model), step_of(model)
    x = torch.empty(4, WIDTH, device="meta")
    for around, gathers in (
        (lambda state, x: evaluate(state, x), DEPTH),
        (lambda state, x: train(evaluate(state, x)[0], x), 3 * DEPTH - 1),
        (lambda state, x: evaluate(train(state, x)[0], x), 3 * DEPTH - 1),
    ):
        found = fsdp.lower(around, state, x).collectives
        assert [one.kind for one in found].count("all_gather") == gathers


def test_tracing_consumes_no_state() -> None:
    """Whether it comes to an end or not; nor does a search of a step that drives nothing."""
    (first, one), (second, other) = state_of(Layers()), state_of(Backwards())
    steps, fails = (step_of(one), step_of(other)), [True]

    def driven(first: fsdp.State, second: fsdp.State) -> Any:
        second, first = steps[1](second, X)[0], steps[0](first, X)[0]
        if fails[0]:
            raise ValueError("as it happens")
        return first, second

    def by_hand(state: fsdp.State) -> Any:
        count = state.steps
        state, w = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, w)), count

    compiled = T.compile(driven, "aot_eager")
    with pytest.raises(ValueError, match="as it happens"):
        compiled(first, second)
    fails[0] = False
    first, second = compiled(first, second)
    assert (first.steps, second.steps) == (1, 1)
    torch._dynamo.reset()
    state, step = state_of(nn.Linear(4, 4))[0], T.compile(by_hand, "aot_eager")
    for i in range(3):  # what drives nothing reads how many steps were taken
        state, count = step(state)
        assert (state.steps, count) == (i + 1, i)


def test_a_state_that_is_given_twice_is_refused() -> None:
    state, model = state_of(Layers())
    train = step_of(model)
    compiled = T.compile(lambda state, again: train(state, X), "aot_eager")
    for _ in range(2):
        with pytest.raises(ScheduleError, match="among the step's arguments twice"):
            compiled(state, {"the same": state})
    state, _ = compiled(state, {})
    assert state.steps == 1


def test_a_compiled_step_keeps_no_state_alive() -> None:
    """Nor another one among the arguments, nor one that it returns."""
    (first, one), (second, other) = state_of(Layers()), state_of(Backwards())
    train, evaluate = step_of(one), T.apply(other)
    compiled = T.compile(lambda state, x, others: (*train(state, x + evaluate(*others, x)[1]), others), "aot_eager")
    first, _ = train(first, X)
    first, _, (second,) = compiled(first, X, (second,))
    alive = [weakref.ref(lineage_of(state)) for state in (first, second)]
    del first, second
    gc.collect()
    assert [lineage() for lineage in alive] == [None, None]
    first, _, _ = compiled(state_of(Layers())[0], X, (state_of(Backwards())[0],))
    assert first.steps == 1


def test_another_state_that_was_consumed_is_refused() -> None:
    (first, one), (second, other) = state_of(Layers()), state_of(Backwards())
    evaluate, train = T.apply(other), step_of(one)
    compiled = T.compile(lambda first, second: train(first, evaluate(second, X)[1])[0], "aot_eager")
    first = compiled(first, second)
    step_of(other)(second, X)
    with pytest.raises(fsdp.StaleStateError, match="a compiled step: this State was consumed by"):
        compiled(first, second)
    assert first.steps == 1


def test_a_state_that_is_no_argument_is_not_trained() -> None:
    (first, one), (second, other) = state_of(Layers()), state_of(Backwards())
    train, hidden = step_of(one), step_of(other)

    def train_step(first: fsdp.State) -> Any:
        return hidden(second, X)[0], train(first, X)[0]

    compiled = T.compile(train_step, "aot_eager")
    for _ in range(2):
        with pytest.raises(ScheduleError, match="step: this State is not among the arguments"):
            compiled(first)
    second, first = train_step(first)
    assert (first.steps, second.steps) == (1, 1)


# ---------------------------------------------------------------- random numbers


class Dropped(nn.Module):
    """Its loss is a mean of what its masks leave; so are its gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.first(x), 0.5)
        return F.dropout(self.second(x), 0.25)


def dropped(backend: str) -> list[Any]:
    """(loss, which elements were dropped, whether the gradient is that of these) of steps of two equal states."""
    module = Dropped()
    mean = lambda model, x: (lambda out: (out.mean(), out))(model(x))  # noqa: E731
    params, model = fsdp.functionalize(module)
    forward_backward = T.forward_backward(model, mean, has_aux=True)

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, (loss, out) = forward_backward(state, x)
        return fsdp.step(state), loss, out

    step = T.compile(train_step, backend)
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.ddp("data"))
    seen = []
    for again in range(2):
        state = fsdp.shard(params, spec, fsdp.sgd(lr=1.0))
        torch.manual_seed(again)  # of no account
        for _ in range(3):
            bias = fsdp.full_params(state)["second.bias"].clone()
            state, loss, out = step(state, torch.ones(4, 8))
            moved = bias - fsdp.full_params(state)["second.bias"]
            seen.append((loss.item(), (out == 0).flatten().tolist(), moved))
    return seen


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.large), "aot_eager"])
def test_masks_differ_by_step_and_rank_and_come_again(backend: str) -> None:
    first, second = launch(dropped, (backend,), nprocs=2)
    for seen in (first, second):
        assert [s[:2] for s in seen[:3]] == [s[:2] for s in seen[3:]]
    masks = [tuple(s[1]) for s in (*first[:3], *second[:3])]
    assert len(set(masks)) == 6
    for mine, theirs in zip(
        first, second, strict=True
    ):  # the mean of both ranks' gradients, of the masks that they saw
        left = (2 - torch.tensor([mine[1], theirs[1]]).float().sum(0)).view(4, 8).sum(0) / 0.75 / 32 / 2
        torch.testing.assert_close(mine[2], left)


# ---------------------------------------------------------------- what else a step may have


def cast_automatically(way: str) -> list[Any]:
    """Three steps under autocast, and with weights that compute in bfloat16."""
    seen: list[Any] = []
    for precision in (None, fsdp.Precision(compute=torch.bfloat16, inputs=True)):
        params, model = fsdp.functionalize(Layers())
        spec = fsdp.Spec(fsdp.local_mesh(), precision=precision)
        state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
        step = if_compiled(step_of(model, lambda model, x: model(x).float().square().sum()), way)
        for i in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision is None):
                state, loss = step(state, torch.full((4, WIDTH), 0.1 + i))
            seen.append(loss.item())
        seen.append(fsdp.full_params(state))
    return seen


class Tripled(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        return 3 * dx


def tripled_tanh(x: torch.Tensor) -> torch.Tensor:
    return Tripled.apply(x.tanh())


def test_a_backward_of_ones_own_is_in_the_graph_and_compiled_units_are_as_any() -> None:
    compiled: Any = torch.compile(torch.sum, backend="eager")
    weights = []
    for between, units in ((torch.tanh, False), (tripled_tanh, False), (torch.tanh, True)):
        state, model = state_of(Layers(between, depth=2))
        if units:
            model = T.compile_units(model, "layers.*", backend="eager")
        step = step_of(model, lambda model, x, units=units: (compiled if units else torch.sum)(model(x)))
        state, _ = T.compile(step, "aot_eager")(state, torch.ones(4, WIDTH))
        weights.append(fsdp.full_params(state)["layers.1.bias"])
    before = dict(Layers(depth=2).named_parameters())["layers.1.bias"].detach()
    torch.testing.assert_close(weights[1] - before, 3 * (weights[0] - before))
    assert torch.equal(weights[2], weights[0])


def around(way: str) -> list[Any]:
    """Accumulation, clipping, a skipped step, an evaluation in the middle, means over ranks; losses and weights."""
    params, model = fsdp.functionalize(Layers(depth=2).double())
    spec = fsdp.Spec(fsdp.local_mesh())
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))
    accumulated = T.accumulate(T.forward_backward(model, lambda model, x: model(x).square().mean()), 2)
    evaluate, stepped = T.apply(model), T.skip_nonfinite(fsdp.step)

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, before = evaluate(state, x)
        state, loss = accumulated(state, x)
        state, norm = T.clip_by_global_norm(state, 0.01)
        state, loss = fsdp.pmean(state, loss)
        return stepped(state), (loss, norm, before.sum())

    step = if_compiled(train_step, way)
    seen, counts = [], []
    for i in range(3):
        x = torch.full((4, WIDTH), float("nan") if i == 1 and fsdp.local_mesh().get_rank() else 0.1 * i + 0.1)
        state, found = step(state, x.double())
        seen.append([t.item() for t in found])
        counts.append((int(state.extras["skipped"]), int(state.count), state.steps))
    assert counts == [(0, 1, 1), (1, 1, 2), (1, 2, 3)]
    return [seen, fsdp.full_params(state)]


def taking_turns(way: str) -> Losses:
    """One state, stepped eagerly and compiled; what it consumed on the way is of no more use."""
    params, model = fsdp.functionalize(Layers(depth=2).double())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=1e-2))
    train_step = step_of(model)
    fast = T.compile(train_step, "aot_eager")
    losses = []
    for i, on in enumerate((True, True, False, False, True, False)):
        before = state
        state, loss = (fast if way and on else train_step)(state, torch.full((4, WIDTH), 0.1 * i, dtype=torch.float64))
        losses.append(loss.item())
        for step in (train_step, fast):
            with pytest.raises(fsdp.StaleStateError):
                step(before, torch.ones(4, WIDTH, dtype=torch.float64))
    assert state.steps == 6
    return losses


def alternating(way: str) -> list[Any]:
    """A whole round of one state, between two microbatches of the other."""
    (first, one), (second, other) = state_of(Layers()), state_of(Layers())
    halves, whole = (T.forward_backward(part, lambda model, x: model(x).sum()) for part in (one, other))

    def train_step(first: fsdp.State, second: fsdp.State) -> Any:
        first, _ = halves(first, X, last_microbatch=False, scale=0.5)
        second, _ = whole(second, X)
        return fsdp.step(halves(first, X, scale=0.5)[0]), fsdp.step(second)

    first, second = if_compiled(train_step, way)(first, second)
    torch.testing.assert_close(fsdp.full_params(first), fsdp.full_params(second))
    return [fsdp.full_params(first)]


def by_hand_and_driven(way: str) -> list[Any]:
    """Gradients by hand before a round in the last of several steps. The states between the steps are gone by then, and
    others have their ids."""
    torch.manual_seed(0)
    state, model = state_of(nn.Linear(WIDTH, WIDTH))
    forward_backward = T.forward_backward(model, lambda model, x: model(x).sum())
    ones = {path: torch.ones_like(weight) for path, weight in fsdp.full_params(state).items()}

    def train_step(state: fsdp.State) -> Any:
        for number in range(12):
            if number > 2:
                state = fsdp.reduce(state, ones, last_microbatch=False)
            state = fsdp.step(forward_backward(state, X)[0])
        return state

    return [fsdp.full_params(if_compiled(train_step, way)(state))]


def odd_views(way: str) -> list[Any]:
    """Inputs that are to be read negated or conjugated."""
    z = torch.complex(torch.arange(8.0), torch.arange(8.0) - 3).view(2, 4)
    torch.manual_seed(0)
    state, model = state_of(nn.Linear(4, 4))
    step = step_of(model, lambda model, given: (model(given["x"]) + (given["z"] * 1j).real).sum())
    state, loss = if_compiled(step, way)(state, {"x": z.conj().imag, "z": z.conj()})
    return [loss, fsdp.full_params(state)]


LARGE = pytest.mark.large


@pytest.mark.parametrize(
    ("of", "ranks", "near", "backend"),
    [pytest.param(two_states, 2, 1e-12, "aot_eager", marks=LARGE), (looked_at, 1, 1e-12, "aot_eager"),
     (cast_automatically, 1, 1e-6, "aot_eager"), (around, 2, 1e-12, "aot_eager"), (taking_turns, 1, 1e-12, "aot_eager"),
     (alternating, 1, 1e-6, "aot_eager"), (by_hand_and_driven, 1, 1e-6, "aot_eager"),
     (odd_views, 1, 1e-6, "aot_eager"), pytest.param(odd_views, 1, 1e-6, "inductor", marks=LARGE)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_losses_and_weights_are_those_of_eager_steps(
    of: Callable[[str], Any], ranks: int, near: float, backend: str
) -> None:
    both = [launch(of, (way,), nprocs=2) if ranks > 1 else few(of, way) for way in ("", backend)]
    for eager, compiled in zip(*both, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=near, equal_nan=True)
