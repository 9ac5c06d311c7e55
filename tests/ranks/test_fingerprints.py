"""Fingerprints of runs that are alike, and of runs in which one thing is planted: compare says which."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from support.ranks import each_rank
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._engine.gathers import Gathers
from functional_fsdp._engine.reductions import Staging
from functional_fsdp.look.__main__ import main as look
from functional_fsdp.look.fingerprint import Key, Row, Step, digest

UNITS = ("0", "1", "2")
STEPS = 3
RANKS = 2
PLANTED: dict[int, tuple[str, str, int]] = {}  # by rank, in the forward of the step that runs


class Layer(nn.Module):
    """A linear layer, in which things can be planted."""

    def __init__(self, name: str, dropout: float) -> None:
        super().__init__()
        self.name, self.linear, self.dropout = name, nn.Linear(6, 6), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        me = fsdp.local_mesh().get_rank() if PLANTED else -1
        what, unit, rank = PLANTED.get(me, ("", "", -1))
        mine = unit == self.name and rank in (-1, me)
        if what == "seed" and mine:
            torch.manual_seed(99)
        out = self.linear(x)
        if what == "backward" and mine:
            out = Scaled.apply(out)
        if what == "forward" and mine:
            out = out * (1 + 2**-20)
        return torch.tanh(self.dropout(out))


class Scaled(torch.autograd.Function):
    """A kernel whose backward is another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + 2**-18)


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=drawn), torch.randn(8, 6, generator=drawn)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def whole(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def by_tree(model: Any) -> Callable[..., Any]:
    def step(state: fsdp.State, x: torch.Tensor, y: torch.Tensor, norm: float) -> Any:
        state, params = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda p: whole(fsdp.bind(model, p), x, y))(params)
        state, _ = T.clip_by_global_norm(fsdp.reduce(state, grads), norm)
        return fsdp.step(state), loss

    return step


def by_unit(model: Any) -> Callable[..., Any]:
    def step(state: fsdp.State, x: torch.Tensor, y: torch.Tensor, norm: float) -> Any:
        h, pullbacks = x, {}
        for unit in state.units:
            state, w = fsdp.unshard(state, unit)
            h, pullbacks[unit] = T.vjp(lambda w, h, unit=unit: fsdp.bind(model[int(unit)], w)(h), w, h)
            state = fsdp.release(state, unit)
        dh, loss = torch.func.grad_and_value(lambda h: (h - y).square().mean())(h)
        for unit in reversed(state.units):
            state, w = fsdp.unshard(state, unit)
            grads, dh = pullbacks[unit](w, dh)
            state = fsdp.release(fsdp.reduce(state, grads, unit), unit)
        state, _ = T.clip_by_global_norm(state, norm)
        return fsdp.step(state), loss

    return step


def driven(model: Any) -> Callable[..., Any]:
    forward_backward = T.forward_backward(model, whole)

    def step(state: fsdp.State, x: torch.Tensor, y: torch.Tensor, norm: float) -> Any:
        state, loss = forward_backward(state, x, y)
        state, _ = T.clip_by_global_norm(state, norm)
        return fsdp.step(state), loss

    return step


WAYS = {"by_tree": by_tree, "by_unit": by_unit, "driven": driven}


def run(
    preset: str = "zero3", way: str = "driven", plant: tuple[str, str, int] = ("", "", -1), dropout: float = 0.0,
    steps: int = STEPS, wrap: Any = None, **spec: Any,
) -> fsdp.Prints:  # fmt: skip
    """A short training; what is planted is planted from the second step on."""
    what, unit, rank = plant
    mesh = fsdp.local_mesh()
    me, ranks = mesh.get_rank(), mesh.size()
    torch.manual_seed(0)
    net = nn.Sequential(*[Layer(name, dropout) for name in UNITS])
    torch.manual_seed(7 if what == "global seed" and me == rank else 5 + me)
    if what == "weight":
        with torch.no_grad():
            dict(net.named_parameters())[f"{unit}.linear.weight"].view(-1)[3] += 1e-6
    params, model = fsdp.functionalize(net)
    placement = getattr(fsdp, preset)(*(mesh.mesh_dim_names or ()))
    rate = {"rate": 0.0101}.get(what, 0.01)
    optimizer = fsdp.adamw(lr=rate, weight_decay=0.02 if what == "decay" else 0.01)
    if what == "update":
        optimizer = Planted(optimizer, unit)  # type: ignore[assignment]
    seed = 3 if what == "state seed" else 0
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, units=list(UNITS), **spec), optimizer, seed=seed)
    step = WAYS[way](model)
    if wrap is not None:
        step = wrap(step)
    marked = fsdp.fingerprint(step)
    for i in range(steps):
        now = i == 1
        at, of = me, i
        if now and what == "swap" and me in (rank, rank + 1):
            at = 2 * rank + 1 - me
        if now and what == "batch" and me == rank:
            of = 50
        if now and what == "late":
            of = 0
        if now and what:
            PLANTED[me] = plant
        if now and what == "moment":
            _moment(state, unit)
        state, _ = marked(state, *batch(of, at, ranks), 0.01 if now and what == "clip" else 1.0)
        PLANTED.pop(me, None)
    return marked.prints


def _moment(state: fsdp.State, unit: str) -> None:
    for buffer in state.opt.mean.values():
        if buffer.bucket.unit == unit:
            buffer.local.mul_(1.001)


class Planted:
    """An optimizer that changes one unit a little more."""

    def __init__(self, inner: Any, unit: str) -> None:
        self.inner, self.unit, self.steps = inner, unit, 0

    def init(self, main: Any) -> Any:
        return self.inner.init(main)

    def update(self, grads: Any, opt: Any, main: Any, count: Any) -> Any:
        main, opt = self.inner.update(grads, opt, main, count)
        self.steps += 1
        if self.steps == 2:
            for buffer in main.values():
                if buffer.bucket.unit == self.unit:
                    buffer.local.mul_(1 + 2**-20)
        return main, opt


@contextmanager
def planted(what: str, unit: str, rank: int) -> Iterator[None]:
    """In the package itself, for all ranks: a gather that brings something else, a sum that is taken otherwise."""
    lend, of = Gathers.lend, Staging._steps
    seen: list[int] = []

    def lends(self: Any, state: Any, names: Any) -> Any:
        lent = lend(self, state, names)
        if unit in names and self.run.rank == rank and rank in PLANTED:
            seen.append(1)
            if len(seen) == (1 if what == "gather" else 2):
                lent[unit]["linear.weight"].data.view(-1)[2] += 0.5
        return lent

    def reduces(self: Any, way: Any, stage: Any, spare: Any, out: Any, add: Any, *others: Any) -> Any:
        yield from of(self, way, stage, spare, out, add, *others)
        if self.run.rank in PLANTED and way.collectives and way.collectives[0].bucket == unit and out is not None:
            out.mul_(1 + 2**-22 if what == "sum" else 1.01)

    if what in ("gather", "second gather"):
        with mock.patch.object(Gathers, "lend", lends):
            yield
    elif what in ("sum", "reduction"):
        with mock.patch.object(Staging, "_steps", reduces):
            yield
    else:
        yield


@functools.cache
def plain(**settings: Any) -> fsdp.Prints:
    return launched(**settings)


def launched(**settings: Any) -> fsdp.Prints:
    nprocs = settings.pop("nprocs", RANKS)
    with planted(*settings.get("plant", ("", "", -1))):
        found: fsdp.Prints = fsdp.launch(run, (), settings, nprocs=nprocs, simulate=True)[0]
    return found


# ---------------------------------------------------------------- what is planted is found

Case = tuple[tuple[str, str, int], dict[str, Any], tuple[Any, ...]]


def cases() -> Iterator[Any]:
    """What is planted, the setting, and (class, kind, unit, lane, leaf, ranks, step)."""

    def case(plant: Any, want: Any, **settings: Any) -> Any:
        return pytest.param(plant, settings, want, id=" ".join(map(str, (*plant, *settings.values()))))

    for rank in (0, 1):
        for way in WAYS:
            yield case(("batch", "", rank), ("inputs", "input", "", "compute", "[0][0]", (rank,), 1), way=way)
    yield case(("swap", "", 0), ("inputs", "input", "", "compute", "[0][0]", (0, 1), 1))
    yield case(("late", "", -1), ("inputs", "input", "", "compute", "[0][0]", (0, 1), 1))
    for unit in UNITS:
        weight, first = f"{unit}.linear.weight", f"{unit}.linear.weight"
        yield case(("weight", unit, -1), ("weights", "main", unit, "update", weight, (), 0))
        for rank in (0, 1):
            yield case(("gather", unit, rank), ("weights", "weight", unit, "gather", weight, (rank,), 1))
            yield case(("forward", unit, rank), ("compute", "output", unit, "compute", "[0]", (rank,), 1))
            yield case(("seed", unit, rank), ("dropout", "output", unit, "compute", "[0]", (rank,), 1), dropout=0.5)
        if unit != "2":  # of the last one the backward comes at once
            yield case(("second gather", unit, 1), ("weights", "weight", unit, "gather", weight, (1,), 1))
        yield case(("backward", unit, -1), ("compute", "gradient", unit, "compute", first, (0, 1), 1))
        yield case(("backward", unit, 1), ("compute", "gradient", unit, "compute", first, (1,), 1), way="by_unit")
        yield case(("sum", unit, -1), ("order of a sum", "reduced", unit, "reduce", weight, (), 1))
        yield case(
            ("reduction", unit, -1), ("order of a sum", "reduced", unit, "reduce", weight, (), 1), preset="zero1"
        )
        yield case(("moment", unit, -1), ("optimizer", "moment", unit, "update", f"{weight} .mean", (), 1))
        yield case(("update", unit, -1), ("optimizer", "update", unit, "update", weight, (), 1))
    for rank in (0, 1):
        for way in ("by_tree", "by_unit"):
            unit = "0" if way == "by_tree" else "2"
            want = ("dropout", "gradient", unit, "compute", f"{unit}.linear.weight", (rank,), 0)
            yield case(("global seed", "", rank), want, way=way, dropout=0.5)
    yield case(("state seed", "", -1), ("dropout", "output", "0", "compute", "[0]", (0, 1), 0), dropout=0.5)
    yield case(("rate", "", -1), ("optimizer", "update", "0", "update", "0.linear.weight", (), 0))
    yield case(("decay", "", -1), ("optimizer", "update", "0", "update", "0.linear.weight", (), 0))
    yield case(("clip", "", -1), ("optimizer", "given", "0", "update", "0.linear.weight", (), 1))


#: one of each kind; together they have both ranks and all units
FEW = ("batch  1 by_tree", "swap  0", "late  -1", "weight 2 -1", "gather 0 1", "forward 1 0", "seed 2 1 0.5",
       "second gather 0 1", "backward 1 -1", "sum 2 -1", "reduction 1 -1 zero1", "moment 1 -1", "update 0 -1",
       "global seed  1 by_tree 0.5", "state seed  -1 0.5", "rate  -1", "decay  -1", "clip  -1")  # fmt: skip
CASES = [one if one.id in FEW else pytest.param(*one.values, id=one.id, marks=pytest.mark.large) for one in cases()]


@pytest.mark.parametrize(("plant", "settings", "want"), CASES)
def test_what_is_planted_is_found(plant: Any, settings: Any, want: Any) -> None:
    found = fsdp.compare(plain(steps=2, **settings), launched(plant=plant, steps=2, **settings))
    first = found.first
    assert first is not None
    assert found.exact
    got = (first.cls, first.kind, first.unit, first.lane, first.leaf, first.ranks, first.step)
    assert got == want, repr(found)
    if first.kind == "weight":
        uses = {"gather": [0, 1, 2], "second gather": [5, 4, 3]}[plant[0]]
        assert first.use == uses[int(first.unit)]
    if plant[0] == "swap":
        assert "has on rank 0 what the first has on rank 1" in first.note
    if plant[0] == "late":
        assert "what the first has in step 1" in first.note


@pytest.mark.parametrize("preset", [pytest.param("zero3", marks=pytest.mark.large), "ddp"])
def test_a_wire_in_bfloat16_is_found_though_settings_differ(preset: str) -> None:
    rounded = launched(preset=preset, precision=fsdp.Precision(wire=torch.bfloat16))
    for other in (plain(preset=preset), plain(preset="zero2", nprocs=4), plain(preset="ddp", nprocs=1)):
        found = fsdp.compare(other, rounded)
        assert found.first is not None
        assert (found.first.cls, found.first.kind) == ("order of a sum", "reduced")
        assert "bfloat16" in found.first.note


ELSEWHERE: list[tuple[tuple[str, str, int], Any]] = [
    (("batch", "", 1), ("inputs", "input", "")), (("gather", "2", 1), ("weights", "weight", "2")),
    (("weight", "1", -1), None),  # a thousandth of what rounding makes
    (("reduction", "1", -1), ("order of a sum", "reduced", "1")), (("clip", "", -1), ("optimizer", "given", "0")),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "want"), ELSEWHERE)
def test_it_is_found_on_another_number_of_ranks(plant: Any, want: Any) -> None:
    found = fsdp.compare(plain(preset="ddp", nprocs=1, steps=2), launched(plant=plant, nprocs=4, steps=2))
    got = found.first and (found.first.cls, found.first.kind, found.first.unit)
    assert got == want, repr(found)


# ---------------------------------------------------------------- runs that are alike


@pytest.mark.parametrize("way", WAYS)
def test_equal_runs_have_no_difference(way: str) -> None:
    found = fsdp.compare(plain(way=way), launched(way=way))
    assert found.first is None
    assert found.exact
    assert bool(found)
    assert all(size == 0 for sizes in found.growth.values() for size in sizes)


OTHERS = [("zero3", 1), ("zero2", 2), ("zero1", 4), ("ddp", 2)]


def test_on_processes() -> None:
    """Sums of two have one order, so bits are those of simulated ranks; rank 1's batch is planted, and found there."""
    found = fsdp.compare(plain(), fsdp.launch(run, nprocs=RANKS)[0])
    assert found.exact
    assert found.first is None, repr(found)
    found = fsdp.compare(plain(), fsdp.launch(run, (), {"plant": ("batch", "", 1)}, nprocs=RANKS)[0])
    assert found.first is not None
    assert (found.first.cls, found.first.ranks, found.first.step) == ("inputs", (1,), 1)


@pytest.mark.parametrize(
    ("preset", "ranks", "way"),
    marked(
        [(*one, way) for one in (("zero3", 8), ("ddp", 1), *OTHERS) for way in WAYS],
        [("zero3", 8, "driven"), *(("ddp", 1, way) for way in WAYS)],  # of two ranks all ways are above
    ),
)
def test_strategies_ranks_and_ways_are_alike(preset: str, ranks: int, way: str) -> None:
    found = fsdp.compare(plain(), launched(preset=preset, way=way, nprocs=ranks))
    assert found.first is None, repr(found)
    assert found.steps == [0, 1, 2]


@pytest.mark.parametrize("preset", ["hsdp", "hfsdp"])
def test_on_two_axes(preset: str) -> None:
    with fsdp.simulate(replica=2, shard=2) as ranks:
        every = ranks(run, preset).get()
    assert all(repr(one.steps) == repr(every[0].steps) for one in every)  # the same on every rank
    found = fsdp.compare(plain(), every[0])
    assert found.first is None, repr(found)
    reduced = [rows for key, rows in every[0].steps[0].rows.items() if key.kind == "reduced"]
    assert reduced
    assert all(len(rows) == 1 for rows in reduced)  # replicas have the same


def test_compiled_steps_are_compared_with_eager_ones() -> None:
    wrap = functools.partial(T.compile, backend="aot_eager")
    compiled = launched(wrap=wrap, nprocs=1)
    assert {key.kind for key in compiled.steps[1].rows} == {"input", "main", "moment", "update", "result", "rng"}
    found = fsdp.compare(plain(), compiled)
    assert found.first is None, repr(found)
    assert "gradient of" in found.missing
    found = fsdp.compare(plain(), launched(plant=("rate", "", -1), wrap=wrap, nprocs=1))
    assert found.first is not None
    assert (found.first.cls, found.first.kind) == ("optimizer", "update")


@each_rank(2)
def test_no_bit_of_the_step_changes() -> None:
    found = []
    for fingerprinted in (True, False):
        torch.manual_seed(0)
        params, model = fsdp.functionalize(nn.Sequential(*[Layer(name, 0.5) for name in UNITS]))
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=list(UNITS)), fsdp.adamw(lr=0.01))
        step = fsdp.fingerprint(driven(model)) if fingerprinted else driven(model)
        for i in range(3):
            state, _ = step(state, *batch(i, fsdp.local_mesh().get_rank(), 2), 1.0)
        found.append(fsdp.state_dict(state))
    assert all(torch.equal(found[0][path], bare) for path, bare in found[1].items())


class Net(nn.Module):
    """Experts beside a trunk; a tied head, if wished."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2)])
        self.experts, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        if tied:
            self.head.weight = self.experts.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.trunk:
            x = torch.tanh(part(x))
        return self.head(torch.tanh(self.experts(x)))


def of_many_kinds(name: str, marked: bool) -> list[Any]:
    torch.manual_seed(0)
    mesh = fsdp.local_mesh()
    axes, rank = mesh.mesh_dim_names or (), torch.distributed.get_rank()
    every: dict[str, dict[str, Any]] = {
        "bfloat16": {"precision": fsdp.Precision(compute=torch.bfloat16, inputs=True)},
        "recorded": {"schedule": fsdp.Schedule(order="recorded")},
        "debug": {"schedule": fsdp.Schedule(debug=True)},
        "sum": {"average": "sum"},
        "muon": {"labels": {"*.weight": "matrices"}},
    }
    settings = every.get(name, {})
    optimizer: Any = {
        "muon": fsdp.partition({"matrices": fsdp.muon(lr=0.01), "default": fsdp.sgd(lr=0.1)}),
        "from torch": fsdp.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
    }.get(name, fsdp.adamw(lr=0.01))
    if name == "whole leaves":
        optimizer = fsdp.from_torch(torch.optim.Adagrad, by="leaf", lr=0.1)
    placement: Any = fsdp.zero3(*axes)
    if name == "experts":
        placement = {"*experts*": fsdp.zero3("data"), "*": placement}
    params, model = fsdp.functionalize(Net(name == "tied"))
    if name == "experts":
        params["experts.weight"] = params["experts.weight"] + mesh.get_local_rank("expert")
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, **settings), optimizer)
    if name == "frozen":
        state = fsdp.freeze(state, "trunk.0.*")
    forward_backward = T.forward_backward(model, whole, second_order=name == "second order")
    step = T.skip_nonfinite(fsdp.step) if name == "skip" else fsdp.step

    def train_step(state: fsdp.State, both: Any) -> Any:
        if name == "microbatches":
            state, _ = forward_backward(state, both["x"], both["y"], last_microbatch=False)
        state, loss = forward_backward(state, both["x"], both["y"])
        if name == "no step":
            return fsdp.drop_gradients(state), loss
        return {"state": step(state), "loss": loss}

    fingerprinted: Any = fsdp.fingerprint(train_step) if marked else train_step
    for i in range(2):
        drawn = torch.Generator().manual_seed(10 * i + rank)
        both = {name: torch.randn(4, 8, generator=drawn) for name in "xy"}
        out = fingerprinted(state, both)
        state = out["state"] if isinstance(out, dict) else out[0]
    shards = {path: local.clone() for path, local in fsdp.local_shards(state).items()}
    return [shards, fingerprinted.prints if marked else None]


KINDS = ["bfloat16", "recorded", "debug", "sum", "muon", "from torch", "frozen", "tied", "second order", "skip",
         "microbatches", "no step", "experts", "whole leaves"]  # fmt: skip
OFTEN = ("muon", "tied", "experts")


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.large) for n in KINDS])
def test_programs_of_many_kinds(name: str) -> None:
    """No bit changes, every rank has the same prints, and they come again."""
    with fsdp.simulate(expert=2, data=2) if name == "experts" else fsdp.simulate(data=2) as ranks:
        once, bare, again = (ranks(of_many_kinds, name, on).get() for on in (True, False, True))
    for (shards, prints), (expected, _) in zip(once, bare, strict=True):
        assert all(torch.equal(shards[path], expected[path]) for path in expected)
        assert repr(prints.steps) == repr(once[0][1].steps)
    kinds = {key.kind for key in once[0][1].steps[1].rows}
    assert {"input", "main", "weight", "gradient", "update", "result"} <= kinds
    assert "moment" in kinds or name != "whole leaves"
    for exact in (True, False):
        found = fsdp.compare(once[0][1], again[0][1], exact=exact)
        assert found.first is None, repr(found)
        assert found.missing == ""


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    params, _ = fsdp.functionalize(nn.Sequential(nn.Linear(2, 2)))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=0.01))

    def fails(state: fsdp.State) -> Any:
        fsdp.unshard(state)
        raise ValueError("on purpose")

    marked = fsdp.fingerprint(fails)
    with pytest.raises(ValueError, match="on purpose"):
        marked(state)
    assert marked.prints.steps == []
    assert state.version.lineage.runtime.watcher is None
    with pytest.raises(TypeError, match="the first argument is a State, not int"):
        marked(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- files and pictures


def test_yesterday_is_compared_with_today(tmp_path: Path) -> None:
    path = plain().save(tmp_path / "a.json")
    assert repr(fsdp.Prints.load(path).steps) == repr(plain().steps)
    found = fsdp.compare(path, launched(plant=("forward", "1", 1)))
    assert found.first is not None
    assert found.first.unit == "1"
    assert str(found).splitlines()[0] == (
        "compute: the output (compute lane) '[0]' of unit '1' in step 2, on rank 1; relative difference "
        f"{found.first.size:.1e}"
    )
    found.draw(tmp_path / "growth.svg")
    drawn = (tmp_path / "growth.svg").read_text()
    assert drawn.count("<svg") == 1
    assert found.growth["main"][:2] == [0.0, 0.0]
    assert found.growth["main"][2] > 0
    fsdp.compare(path, path).draw(tmp_path / "none.svg")


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="is no file of fingerprints"):
        fsdp.Prints.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"format": 9}')
    with pytest.raises(ValueError, match="of format 9; this version reads format 1"):
        fsdp.Prints.load(tmp_path / "x.json")
    with pytest.raises(ValueError, match="the first ran on 2 ranks, the second on 1, whose sums have another order"):
        fsdp.compare(plain(), plain(preset="ddp", nprocs=1), exact=True)
    other = fsdp.Prints(steps=[])
    with pytest.raises(ValueError, match="no step in common: the first has steps 0 to 2, the second of no number"):
        fsdp.compare(plain(), other)


# ---------------------------------------------------------------- odd runs, odd tensors, odd files


def by_keyword(way: str) -> fsdp.Prints:
    """Verbs that are called by keywords; NaN in the batch of the second step."""
    mesh = fsdp.local_mesh()
    me, ranks = mesh.get_rank(), mesh.size()

    def make() -> nn.Module:
        return nn.Sequential(*(Layer(name, 0.0) for name in UNITS))

    state, model = fsdp.init(make, fsdp.Spec(mesh, fsdp.zero3("data")), fsdp.adamw(lr=0.1), seed=0)

    def step(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> Any:
        if way == "nan":
            state, loss = T.forward_backward(model, whole)(state, x, y)
            return fsdp.step(state), loss
        state, params = fsdp.unshard(state=state)
        grads, loss = torch.func.grad_and_value(lambda p: whole(fsdp.bind(model, p), x, y))(params)
        return fsdp.step(state=fsdp.reduce(state=state, grads=grads)), loss

    noted = fsdp.fingerprint(step)
    for n in range(STEPS):
        x, y = batch(n, me, ranks)
        state, _ = noted(state, x * (float("nan") if way == "nan" and n == 1 else 1.0), y)
    return noted.prints


def test_verbs_may_be_called_by_keywords() -> None:
    found = fsdp.launch(by_keyword, ("keyword",), nprocs=2, simulate=True)[0]
    kinds = {key.kind for step in found.steps for key in step.rows}
    assert {"weight", "gradient", "reduced", "given", "update"} <= kinds
    assert fsdp.compare(found, fsdp.launch(by_keyword, ("keyword",), nprocs=2, simulate=True)[0])


def test_nan_on_any_number_of_ranks_is_no_difference() -> None:
    one, two = (fsdp.launch(by_keyword, ("nan",), nprocs=n, simulate=True)[0] for n in (1, 2))
    assert fsdp.compare(one, two), fsdp.compare(one, two)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize")
def test_any_tensor_may_be_an_argument() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    parts = [torch.ones(2), torch.full((3,), 2.0)]
    flat = digest(torch.cat(parts))
    for layout in (torch.jagged, torch.strided):
        found = digest(torch.nested.nested_tensor(parts, layout=layout), rows=True)
        assert found[0] == flat[0]
    assert digest(z.conj().imag)[0] == digest(z.imag.neg())[0]
    assert digest(z.conj())[0] == digest(z.conj().resolve_conj())[0]
    whole = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    assert digest(whole)[0] == digest(torch.ones(3))[0]
    pairs = torch.arange(3, dtype=torch.uint8)
    assert digest(pairs.view(torch.float4_e2m1fn_x2))[0] == digest(pairs)[0]


def rows_of(rows: list[Row], ranks: int, setting: str = "") -> fsdp.Prints:
    step = Step(0)
    step.rows[Key("output", "u", "[0]", 0)] = tuple(rows)
    return fsdp.Prints(ranks, setting, steps=[step])


def test_numbers_that_add_up_to_none_are_compared() -> None:
    one = rows_of([Row(7, 1.0, 1.0, 1.0)], 1)
    inf = float("inf")
    for rows in ([Row(1, inf, inf, 1.0), Row(2, inf, -inf, 1.0)], [Row(1, 1e308, 1e308, 1e308)] * 2):
        assert fsdp.compare(rows_of(rows, 2), one).first is not None
    few, more = (rows_of([Row(i, 1.0, 1.0, 1.0) for i in some], 4) for some in ((1, 2), (9, 9, 9, 7)))
    assert fsdp.compare(few, more, exact=True).first is not None


SPOILT: list[tuple[tuple[Any, ...], Any]] = [
    (("steps",), None), (("ranks",), "x"), (("average",), {}), (("steps", 0), 3), (("steps", 0, "number"), 1e400),
    (("steps", 0, "rows", 0, 0), "nowhere"), (("steps", 0, "rows", 0, 1), 1.5), (("steps", 0, "rows", 0, 6), []),
    (("steps", 0, "rows", 0, 6, 0), [1]), (("steps", 0, "rows", 0, 6, 0, 0), None),
]  # fmt: skip
FLIGHT = {"format": 1, "why": "x", "by": 0, "time": "t", "ranks": [{"lanes": {"gather": {"issued": 1, "last": []}}}]}


@pytest.mark.parametrize(("where", "what"), SPOILT)
def test_a_file_of_fingerprints_that_is_damaged_is_named(where: Any, what: Any, tmp_path: Path, capsys: Any) -> None:
    path = rows_of([Row(7, 1.0, 1.0, 1.0)], 1).save(tmp_path / "a.json")
    said = json.loads(path.read_text())
    at = said
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = what
    path.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="is no file of fingerprints: IsADirectoryError"):
        fsdp.compare(tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"a\.json is no file of fingerprints: .*Give one that Prints\.save wrote"):
        fsdp.Prints.load(path)
    assert look([str(path)]) == look([str(path), str(path)]) == 2
    assert "is no file of fingerprints" in capsys.readouterr().err


def test_a_flight_record_that_lacks_something_is_named(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "flight.json"
    path.write_text(json.dumps(FLIGHT))
    assert look([str(path)]) == 2
    assert "the flight record is damaged: KeyError('states')" in capsys.readouterr().err
