"""Every class of torch.optim on shards beside itself on whole parameters, or refused with its reason."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.presets import PRESETS
from support.problems import largest, mesh_and_placement
from support.ranks import each_rank, launch
from support.tables import FULL
from support.torch_optimizers import ByParameter

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, Spec, SpecError, TreeError
from functional_fsdp import transforms as T
from functional_fsdp._common.record import Collective
from functional_fsdp._optim_extra import from_torch, prove
from functional_fsdp._optim_extra.from_torch import FromTorch
from functional_fsdp._optim_extra.whole import WholeLeaves
from functional_fsdp._runtime.runtime import Runtime

Tree = dict[str, torch.Tensor]
SHAPES = {"a.w": (9, 40), "a.bias": (130,), "a.empty": (0, 2), "b.w": (4, 4), "b.bias": (1,), "norm": (9,), "scale": ()}
LABELS = {"*.bias": "bias"}
STEPS = 7  # RAdam rectifies from the sixth on
CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
REFUSED = {
    "LBFGS": "it keeps a history over all parameters at once, and evaluates the loss anew. Use fsdp.adamw",
    "SparseAdam": "it takes sparse gradients only, and reduced ones are dense",
}
WHOLE = {
    "Muon": r"reads the number of dims .*torch/optim/_muon\.py:\d+: ",
    "Adafactor": r"torch/optim/_adafactor\.py:\d+: ",
}
MORE: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "maximize": True}],
    "Adam": [{"amsgrad": True, "fused": True}, {"foreach": True, "weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
    "Adagrad": [{"initial_accumulator_value": 0.1, "lr_decay": 0.01}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "ASGD": [{"t0": 2.0, "lambd": 0.1}],
}
CASES = [(name, kw) for name in CLASSES if name not in {*REFUSED, *WHOLE} for kw in ({}, *MORE.get(name, []))]


def tree(seed: int) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def stepped(state: fsdp.State, steps: range) -> fsdp.State:
    """All ranks have the same gradients, whose mean over two or four is exact."""
    for step in steps:
        state = fsdp.step(fsdp.reduce(state, tree(step + 1)))
    return state


def by_torch(own: Any, params: Tree, grads: Iterable[Any], rate: Any = None) -> Tree:
    """The weights after the steps of torch's own, by these gradients; `rate` says the learning rate of each step."""
    for step, given in enumerate(grads):
        if rate is not None:
            own.param_groups[0]["lr"] = rate(step)
        for name, p in params.items():
            p.grad = given[name]
        own.step()
    return {name: p.detach() for name, p in params.items()}


def parameters(leaves: Tree) -> dict[str, Any]:
    return {name: torch.nn.Parameter(leaf.clone()) for name, leaf in leaves.items()}


def plainly(cls: Any, steps: int = STEPS, by_label: Any = None, **options: Any) -> tuple[Tree, dict[str, Tree]]:
    """torch's own: the weights, and what it keeps."""
    params = parameters(tree(0))
    groups = [
        {"params": [p for n, p in params.items() if ("bias" in n) == bias], **((by_label or {}) if bias else {})}
        for bias in (False, True)
    ]
    optimizer = cls(groups, **options)
    weights = by_torch(optimizer, params, [tree(step + 1) for step in range(steps)])
    return weights, {name: dict(optimizer.state[p]) for name, p in params.items()}


def alone(optimizer: Any, labels: Any = None) -> fsdp.State:
    return fsdp.shard(tree(0), Spec(fsdp.local_mesh(), labels=labels or {}), optimizer)


def spec(preset: str, units: Any = ("a", ("b", "norm", "scale"))) -> Spec:
    mesh, placement = mesh_and_placement(preset)
    return Spec(mesh, placement, units=list(units), labels=LABELS)


def same(found: Tree, wanted: Tree) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], p) for name, p in wanted.items())


def beside_torch(preset: str, rows: list[tuple[fsdp.Optimizer, Tree, dict[str, Tree]]]) -> list[str]:
    """What is not bit for bit what torch's optimizer does."""
    wrong = []
    for optimizer, weights, kept in rows:
        state = stepped(fsdp.shard(tree(0), spec(preset), optimizer), range(STEPS))
        if not same(fsdp.full_params(state), weights):
            wrong.append(f"{optimizer}: weights")
        found = fsdp.optimizer_state(state)
        tensors = {p: {k: v for k, v in of.items() if v is not None} for p, of in kept.items() if "empty" not in p}
        if not all(same(found[path], of) for path, of in tensors.items() if of):
            wrong.append(f"{optimizer}: what it keeps")
    return wrong


OF_PLACEMENTS = [(ranks, preset, CASES) for ranks in (1, 2, 4) for preset in PRESETS]


@pytest.mark.parametrize(
    ("ranks", "preset", "cases"),
    [(2, "zero3", [*dict(CASES).items()]), *(pytest.param(*row, marks=pytest.mark.large) for row in OF_PLACEMENTS)],
    ids=lambda x: str(x) if not isinstance(x, list) else "",
)
def test_every_elementwise_optimizer_of_torch(ranks: int, preset: str, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Each class, with the last of its options, or with all."""
    made = [fsdp.from_torch(CLASSES[name], **options) for name, options in cases]
    rows = [(one, *plainly(CLASSES[name], **options)) for one, (name, options) in zip(made, cases, strict=True)]
    assert launch(beside_torch, (preset, rows), nprocs=ranks) == [[]] * ranks


def of_other_strides(by: str, cls: Any, options: dict[str, Any]) -> float:
    """How far weights whose gradients and state lie in another order are from those of torch's class, not fused."""

    def gradient(step: int) -> torch.Tensor:
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)

    weight = torch.nn.Parameter(torch.arange(24.0, dtype=torch.float64).view(4, 6).t())
    params = {"w": weight.detach().clone()}
    state = fsdp.shard(params, Spec(*mesh_and_placement("zero3")), fsdp.from_torch(cls, by=by, fused=True, **options))
    optimizer = cls([weight], fused=False, **options)
    for step in range(3):
        weight.grad = gradient(step) if step else gradient(step).t().contiguous().t()
        optimizer.step()
        state = fsdp.step(fsdp.reduce(state, {"w": gradient(step)}))
    return float((fsdp.full_params(state)["w"] - weight.detach()).abs().max())


OF_FUSED = [("all", "AdamW"), ("elementwise", "AdamW"), ("all", "SGD"), ("elementwise", "SGD")]


@pytest.mark.parametrize(
    ("by", "name"), [OF_FUSED[0], *(pytest.param(*row, marks=pytest.mark.large) for row in OF_FUSED[1:])]
)
def test_fused_classes_pair_elements_by_index(by: str, name: str) -> None:
    cls, options = CLASSES[name], {"lr": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    assert max(launch(of_other_strides, (by, cls, options), nprocs=2)) < 1e-12


#: of those that are elementwise `test_every_elementwise_optimizer_of_torch` has each
EACH = [n if n in (*REFUSED, *WHOLE, "Adam") else pytest.param(n, marks=pytest.mark.large) for n in CLASSES]


@pytest.mark.parametrize("name", EACH)
def test_every_class_works_or_is_refused(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(SpecError, match=rf"from_torch\({name}\): .* cannot work on shards.*{REFUSED[name]}"):
            fsdp.from_torch(CLASSES[name])
        return
    optimizer = fsdp.from_torch(CLASSES[name])
    if name in WHOLE:
        assert re.search(rf"from_torch\({name}\): whole leaves at owners, since .*{WHOLE[name]}", str(optimizer))
        with pytest.raises(SpecError, match=rf"{WHOLE[name]}.*Leave by= out: whole leaves then travel to owners"):
            fsdp.from_torch(CLASSES[name], by="elementwise")
    else:
        assert optimizer.by_bucket
        assert str(optimizer) == f"from_torch({name}): elementwise, on flat shards"


# ---------------------------------------------------------------- checkpoints, other worlds


NADAM: dict[str, Any] = {"lr": 0.05, "weight_decay": {"bias": 0.0, "default": 0.1}}


def nadam() -> Any:
    return fsdp.from_torch(torch.optim.NAdam, **NADAM)


def saved(folder: str) -> list[bool]:
    """Saved, and gone on with; from the checkpoint, and by another placement and other units of the same ranks."""
    state = stepped(fsdp.shard(tree(0), spec("zero3"), nadam()), range(3))
    path = fsdp.save(state, f"{folder}/saved")
    kept = fsdp.optimizer_state(state)
    others = [
        fsdp.load(path, like=fsdp.shard(tree(9), spec("zero3"), nadam())),
        fsdp.load(path, spec("ddp", ["*"]), nadam()),
    ]
    moved = fsdp.redistribute(fsdp.load(path, spec("zero3"), nadam()), spec("zero1", ["norm", "a", ["b", "scale"]]))
    found = []
    for other in (*others, moved):
        found.append(all(same(of, kept[name]) for name, of in fsdp.optimizer_state(other).items()))
    straight = fsdp.full_params(stepped(state, range(3, STEPS)))
    return [*found, *(same(fsdp.full_params(stepped(other, range(3, STEPS))), straight) for other in (*others, moved))]


def read(folder: str, preset: str) -> bool:
    state = fsdp.load(f"{folder}/saved", spec(preset), nadam())
    wanted, _ = plainly(torch.optim.NAdam, by_label={"weight_decay": 0.0}, lr=0.05, weight_decay=0.1)
    return same(fsdp.full_params(stepped(state, range(3, STEPS))), wanted)


def test_checkpoints_go_on_to_the_same_bits_in_any_world(tmp_path: Path) -> None:
    assert launch(saved, (str(tmp_path),), nprocs=2) == [[True] * 6] * 2
    if FULL:
        assert launch(read, (str(tmp_path), "hsdp"), nprocs=4) == [True] * 4
    assert launch(read, (str(tmp_path), "zero3"), nprocs=1) == [True]


@each_rank(2)
def test_what_torchs_own_has_kept_is_taken_over() -> None:
    """Under torch's names."""
    weights, kept = plainly(torch.optim.NAdam, steps=3, by_label={"weight_decay": 0.0}, lr=0.05, weight_decay=0.1)
    numbers = {"step": torch.tensor(3.0), "mu_product": kept["a.w"]["mu_product"]}
    full = {
        p: of if of else {**dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros(0, 2)), **numbers}
        for p, of in kept.items()
    }
    state = fsdp.load_optimizer_state(fsdp.shard(weights, spec("zero3"), nadam()), full, steps=3)
    wanted, _ = plainly(torch.optim.NAdam, by_label={"weight_decay": 0.0}, lr=0.05, weight_decay=0.1)
    assert same(fsdp.full_params(stepped(state, range(3, STEPS))), wanted)


# ---------------------------------------------------------------- others' classes


class Counting(torch.optim.Optimizer):
    """A third party's: a Python number, moments that are new tensors in each step, a copy of the weights."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(steps=0, scale=1.0, mean=torch.zeros_like(p))
                    state["slow"] = p.clone()
                state["steps"] += 1
                state["scale"] *= 0.5
                state["mean"] = group["beta"] * state["mean"] + (1 - group["beta"]) * p.grad
                p.add_(state["mean"] / (1 - group["beta"] ** state["steps"]), alpha=-group["lr"])
                state["slow"].lerp_(p, state["scale"])


class ByNorm(ByParameter):
    """Elementwise it is not: a step as long as the weights."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(group["lr"] * g * p.norm() / g.norm())


class ByAll(ByParameter):
    """Nor this: the norm of all gradients."""

    def of_group(self, params: list[Any], group: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(group["lr"] * p.grad / norm)


class InTheGroup(ByParameter):
    """And this keeps a count beside the parameters' state."""

    def of_group(self, params: list[Any], group: Any) -> None:
        group["k"] = group.get("k", 0) + 1
        for p in params:
            p.sub_(group["lr"] * p.grad / group["k"])


@each_rank(2)
def test_a_class_that_keeps_python_numbers_and_copies_of_the_weights() -> None:
    wanted, kept = plainly(Counting, beta=0.5)
    for preset in ("zero3", "zero1"):
        state = stepped(fsdp.shard(tree(0), spec(preset), fsdp.from_torch(Counting, beta=0.5)), range(STEPS))
        assert same(fsdp.full_params(state), wanted)
        mine = fsdp.optimizer_state(state)["a.w"]
        assert torch.equal(mine["slow"], kept["a.w"]["slow"])
        assert (int(mine["steps"]), float(mine["scale"])) == (STEPS, 0.5**STEPS)


class AdamOnGPUs(Counting):
    """Its Python numbers are beside a GPU here, for all that the package knows."""


@pytest.mark.parametrize("options", [{}, {"by": "leaf"}])
def test_rates_that_are_tensors_stay_those_of_their_labels(options: dict[str, Any]) -> None:
    params = {"body": torch.ones(4), "head": torch.ones(4)}
    rates = {"head": torch.tensor(1.0), "default": torch.tensor(0.25)}
    optimizer = fsdp.from_torch(torch.optim.SGD, lr=rates, **options)
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), labels={"head": "head"}), optimizer)
    for count in (1, 2):
        state = fsdp.step(fsdp.reduce(state, {"body": torch.ones(4), "head": torch.ones(4)}))
        found = fsdp.full_params(state)
        assert found["body"].tolist() == [1 - 0.25 * count] * 4
        assert found["head"].tolist() == [1.0 - count] * 4


def test_numbers_on_the_host_are_staged_and_no_graph_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "lies_on_host", lambda tensor: False)
    optimizer: Any = fsdp.from_torch(AdamOnGPUs, lr={"bias": lambda count: 0.1, "default": 0.1})
    state = stepped(fsdp.shard(tree(0), spec("zero3"), optimizer), range(3))
    wanted, _ = plainly(Counting, 3)
    assert same(fsdp.full_params(state), wanted)
    assert all(known.staged for known in optimizer.seen.values())
    monkeypatch.setattr(from_torch, "being_captured", lambda device: True)
    text = r"from_torch\(AdamOnGPUs\): the class needs 'steps', 'scale' on the host in each step, which a CUDA graph"
    with pytest.raises(ScheduleError, match=text):
        stepped(state, range(3, 4))


class ByNumber(torch.optim.SGD):
    """Takes its rate as a number only."""

    def step(self, closure: Any = None) -> Any:
        if isinstance(self.param_groups[0]["lr"], torch.Tensor):
            raise TypeError("a number")
        return super().step(closure)


def test_a_rate_that_changes_comes_as_a_number_where_a_tensor_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer: Any = fsdp.from_torch(ByNumber, lr=lambda count: 0.1 + 0 * count)
    assert [known.rates for known in optimizer.seen.values()] == [False]
    state = stepped(fsdp.shard(tree(0), spec("zero3"), optimizer), range(2))
    assert same(fsdp.full_params(state), plainly(torch.optim.SGD, 2, lr=0.1)[0])
    monkeypatch.setattr(from_torch, "being_captured", lambda device: True)
    with pytest.raises(ScheduleError, match="the class needs a learning rate that changes on the host in each step"):
        stepped(state, range(2, 3))


class ByDims(ByParameter):
    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(group["lr"] * (g - g.mean(dim=1, keepdim=True) if p.dim() == 2 else g))


class BySize(ByParameter):
    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if "m" not in s:
            s["m"] = torch.zeros_like(p) if p.numel() < 200 else torch.zeros_like(p, dtype=torch.float16)
        s["m"].mul_(0.9).add_(g.to(s["m"].dtype))
        p.sub_(group["lr"] * s["m"].to(p.dtype))


class SlowCopy(ByParameter):
    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if not s:
            s["step"], s["slow"] = 0, torch.empty_like(p)
            s["slow"].copy_(p)
        s["step"] += 1
        p.sub_(group["lr"] * g)
        if s["step"] % 5 == 0:
            s["slow"].add_(p - s["slow"], alpha=0.5)
            p.copy_(s["slow"])


class Nested(ByParameter):
    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        inner = s.setdefault(0, {"none": None})
        if "m" not in inner:
            inner["m"], inner["square"] = torch.zeros_like(p), g.new_zeros(3, 2 * p.numel())
        inner["m"].mul_(0.9).add_(g)
        inner["square"].add_(g.norm())
        p.sub_(group["lr"] * inner["m"] / (1 + inner["square"].sum()))


class Rows(ByParameter):
    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        s["rows"] = s.get("rows", 0) + (g.square().mean(-1, keepdim=True) if g.dim() else g.square())
        p.sub_(group["lr"] * g / (1 + s["rows"]).sqrt())


class ReadsValues(ByParameter):
    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(group["lr"] * g * min(1.0, 4.0 / float(g.abs().sum() + 1e-12)))


class Inner(ByParameter):
    """As heavyball's SOAP: a count in a dict of the instance, by which it does something in each third step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.inner = {"turn": 0}

    def of_group(self, params: list[Any], group: Any) -> None:
        self.inner["turn"] += 1
        super().of_group(params, group)

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(group["lr"] * (g.sign() if self.inner["turn"] % 3 == 0 else g))


class ByName(ByParameter):
    """As torch's own, it may be given names: by them it keeps a moment or none."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True):
            if p.grad is not None:
                if name.endswith("w"):
                    p.sub_(self.state[p].setdefault("moment", torch.zeros_like(p)).mul_(0.9).add_(p.grad))
                else:
                    p.sub_(group["lr"] * p.grad)


class ByAName(ByParameter):
    """Looks for a name, and goes by no other."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(group["lr"] * (g / 2 if "head.weight" in group["param_names"] else g))


HABITS: dict[type, str] = {
    Inner: "it keeps 'self.inner' beside the state of parameters",
    ByNorm: "linalg_vector_norm is not elementwise", InTheGroup: "it keeps 'group.k' beside the state of parameters",
    ByDims: "Python reads the number of dims of a leaf", BySize: "Python reads the number of elements of a leaf",
    SlowCopy: "what it keeps begins neither as one number nor", Nested: "Python reads the number of elements of a leaf",
    Rows: "Python reads the number of dims of a leaf", ByName: "Python reads the name of a leaf",
    ByAName: "Python reads the name of a leaf", ReadsValues: "sum is not elementwise",
}  # fmt: skip


class Compiled(ByParameter):
    """Goes down by what is compiled, which rounds otherwise."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(torch.compile(self.scaled, backend=self.rounds, fullgraph=True, dynamic=True)(g))

    @staticmethod
    def scaled(g: Any) -> Any:
        return 0.1 * g

    @staticmethod
    def rounds(graph: Any, _: Any) -> Any:
        return lambda *args: tuple(out * (1 + 1e-12) for out in graph(*args))


def test_what_a_class_compiles_is_observed_as_it_is_written() -> None:
    assert prove.observed(Compiled, prove.hand_over, steps=4).way == "elementwise"
    (bucket,) = fsdp.make_layout({"w": torch.ones(3)}, Spec({"data": 2})).buckets.values()
    assert len(WholeLeaves(Compiled, {}).plan([bucket]).owners) == 1
    state = fsdp.shard({"w": torch.ones(3)}, Spec(fsdp.local_mesh()), FromTorch(Compiled, {}))
    state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(3)}))
    assert torch.allclose(fsdp.full_params(state)["w"], torch.full((3,), 0.9))


@each_rank(2)
def test_classes_that_couple_within_a_leaf_have_whole_leaves_at_owners(tmp_path: Path) -> None:
    """Beside the class itself: a leaf without a gradient in the first steps, a skipped step, and in the middle a
    checkpoint, another placement and other units."""
    late = {"a.bias", "norm"}

    def given(step: int) -> dict[str, Any]:
        return {n: None if step < 2 and n in late else g for n, g in tree(step + 1).items()}

    for cls in [*HABITS][:: 1 if FULL else 2]:
        params, optimizer = parameters(tree(0)), fsdp.from_torch(cls)
        state = fsdp.shard(tree(0), spec("zero3"), optimizer)
        for step in range(6):
            if step == 3:
                state = moved_on(state, tmp_path / cls.__name__, optimizer)
            state = fsdp.step(fsdp.reduce(state, given(step)))
        wanted = by_torch(cls(params.items()), params, [given(step) for step in range(6)])
        assert same(fsdp.full_params(state), wanted), cls


def moved_on(state: fsdp.State, folder: Path, optimizer: Any) -> fsdp.State:
    """From a checkpoint, by other placements and units, after a step that was skipped."""
    state = fsdp.load(fsdp.save(state, folder), spec("zero1", ["*"]), optimizer)
    for preset in ("ddp", "zero3"):
        state = fsdp.redistribute(state, spec(preset, ["norm", "a", ["b", "scale"]]))
    nans = {n: torch.full_like(p, torch.nan) for n, p in fsdp.full_params(state).items()}
    return fsdp.step(fsdp.reduce(state, nans), skip=torch.tensor(True))


def lamb_like() -> Any:
    return fsdp.partition({"bias": fsdp.from_torch(torch.optim.Adam, lr=0.1), "default": fsdp.from_torch(Rows)})


def gone_on(folder: str, presets: tuple[str, ...], first: bool) -> list[bool]:
    """Whole leaves beside an elementwise optimizer, by placements; the second world goes on from the first one's."""
    params, grads, found = parameters(tree(0)), [tree(step + 1) for step in range(6)], []
    bias = {name: p for name, p in params.items() if "bias" in name}
    rest = {name: p for name, p in params.items() if "bias" not in name}
    wanted = by_torch(torch.optim.Adam(bias.values(), lr=0.1), bias, grads) | by_torch(Rows(rest.values()), rest, grads)
    for preset in presets:
        if first:
            state = stepped(fsdp.shard(tree(0), spec(preset), lamb_like()), range(3))
            fsdp.save(state, f"{folder}/{preset}")
        else:
            state = fsdp.load(f"{folder}/zero3", spec(preset), lamb_like())
        state = stepped(state, range(3, 6))
        found.append(same(fsdp.full_params(state), wanted))
    return found


def test_whole_leaves_go_on_in_another_world(tmp_path: Path) -> None:
    first, then = (("zero3", "ddp", "zero1"), ("hsdp", "zero2")) if FULL else (("zero3", "zero1"), ("hsdp",))
    assert launch(gone_on, (str(tmp_path), first, True), nprocs=2) == [[True] * len(first)] * 2
    assert launch(gone_on, (str(tmp_path), then, False), nprocs=4) == [[True] * len(then)] * 4
    assert launch(gone_on, (str(tmp_path), ("zero3",), False), nprocs=1) == [[True]]


class Rooted(torch.optim.SGD):
    """Keeps a square for each row of a matrix and multiplies by it, as preconditioners do; vectors go as they are."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.ndim == 2:
                kept = self.state[p].setdefault("square", torch.zeros(len(p), len(p), dtype=p.dtype))
                kept += p.grad @ p.grad.T
                p.grad = kept @ p.grad
        return super().step(closure)


@each_rank(2)
def test_owners_are_balanced_by_what_is_kept_and_computed() -> None:
    optimizer: Any = fsdp.from_torch(Rooted, lr=0.1)
    state = fsdp.shard(four_leaves(), Spec(fsdp.local_mesh(), units=["*"]), optimizer)
    (owners,) = optimizer.owners([one.bucket for one in state.main.values()])
    matrix, *vectors = [one.owner for one in owners.owned]
    assert matrix not in vectors  # by elements each rank would have two leaves


def four_leaves() -> Tree:
    """Of one size."""
    shapes = {"matrix": (48, 4), "vector": (192,), "other": (192,), "last": (192,)}
    return {name: torch.linspace(-1, 1, 192).view(shape) for name, shape in shapes.items()}


class Factors(ByParameter):
    """As LAMB, with a count of each kind, and a number for each row of a matrix."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if not s:
            s |= {"mean": torch.zeros_like(p), "square": torch.zeros_like(p), "rows": p.new_zeros(len(p))}
            s |= {"step": torch.tensor(0.0), "turns": 0}
        s["step"] += 1
        s["turns"] += 1
        s["mean"].lerp_(g, 0.1)
        s["square"].lerp_(g.square(), 0.01)
        s["rows"].lerp_(g.reshape(len(p), -1).norm(dim=1), 0.1)
        p.sub_(s["mean"] / (1 + s["square"].sqrt()) * (0.1 * p.norm() / s["rows"].norm()))


ISSUED: dict[int, list[Collective]] = {}  # by rank


def owners_traffic(by: str) -> tuple[int, list[Collective], int, int]:
    """(elements that leave their rank to be whole, what the optimizer issues in the third step, the same in bytes that
    this rank receives, bytes of what is kept here)."""
    weights, optimizer = four_leaves(), fsdp.from_torch(Factors, by=by)
    state = fsdp.shard(weights, Spec(fsdp.local_mesh(), units=["*"]), optimizer)
    rank = state.version.lineage.runtime.rank
    for step in range(3):
        state = fsdp.finish_reductions(fsdp.reduce(state, tree_like(weights, step)))
        ISSUED[rank] = []
        state = fsdp.step(state)
    here = dict(state.version.lineage.runtime.coordinate)
    came = [sum(n for r, n in enumerate(one.splits.at(here)[0]) if r != here["data"]) if one.splits else one.numel // 2
            for one in ISSUED[rank]]  # fmt: skip
    bytes_in = sum(n * one.dtype.itemsize for n, one in zip(came, ISSUED[rank], strict=True))
    kept = [buffer.local for tree in state.opt.values() for buffer in tree.values()]
    return came[0], ISSUED[rank], bytes_in, sum(one.nbytes for one in kept)


def tree_like(weights: Tree, seed: int) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=g) for name, p in weights.items()}


def test_what_a_class_keeps_stays_at_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and gradients travel, and weights back: three all-to-alls, whatever is kept. As much is kept as the class
    keeps; a count is one number."""
    real = Runtime.now

    def counted(self: Any, one: Collective, *args: Any) -> None:
        ISSUED.setdefault(self.rank, []).append(one)
        real(self, one, *args)

    monkeypatch.setattr(Runtime, "now", counted)
    found = launch(owners_traffic, ("leaf",), nprocs=2)
    there = sum(one[0] for one in found)
    assert there == 2 * 192  # of four leaves of one size, two lie at another rank than their owner's
    for _, some, _, kept in found:
        assert [(one.kind, one.dtype) for one in some] == [("all_to_all", torch.float32)] * 3
        assert kept == 4 * (3 * 2 * 256 + 128) + 128 * (8 + 8)  # two leaves, each to a multiple of 128 elements
    assert sum(one[2] for one in found) == 4 * 3 * there
    gathered = launch(owners_traffic, ("all",), nprocs=2)
    assert sum(one[2] for one in gathered) >= 4 * (4 * 4 * 192)  # weights, gradients and two moments, all of them


class Modes(torch.optim.SGD):
    """Has a mode for steps, as schedulefree's classes do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["train_mode"]
        return super().step(closure)


@pytest.mark.parametrize("by", [None, "leaf", "all"])
@each_rank(2)
def test_a_class_with_modes_takes_its_steps_in_the_one_for_steps(by: Any) -> None:
    state = fsdp.shard(tree(0), spec("zero3"), fsdp.from_torch(Modes, lr=0.1, by=by))
    assert same(fsdp.full_params(stepped(state, range(2))), plainly(torch.optim.SGD, 2, lr=0.1)[0])


@pytest.mark.parametrize("by", ["leaf", "all"])
def test_no_graph_has_whole_leaves(by: Any) -> None:
    def train_step(state: fsdp.State, grads: Tree) -> fsdp.State:
        return fsdp.step(fsdp.reduce(state, grads))

    state = alone(fsdp.from_torch(Rows, by=by))
    text = r"from_torch\(Rows\): the class's own Python runs in each step, with whole leaves, which no graph"
    with pytest.raises(Exception, match=text):
        T.compile(train_step)(state, tree(1))


@pytest.mark.parametrize("cls", HABITS)
def test_why_a_class_is_not_elementwise(cls: type) -> None:
    why = rf"{HABITS[cls]}(.*test_from_torch\.py:\d+: .*)?"
    assert re.match(rf"from_torch\({cls.__name__}\): whole leaves at owners, since {why}", str(fsdp.from_torch(cls)))
    with pytest.raises(SpecError, match=rf"from_torch\({cls.__name__}\): .* cannot work on shards.*: {why}"):
        fsdp.from_torch(cls, by="elementwise")


class GrowsAll(ByParameter):
    """As Prodigy: a step size in the group, from a sum over all leaves, which shows after some steps."""

    def of_group(self, params: list[Any], group: Any) -> None:
        group["d"] = max(group.get("d", 1e-6), 1e-9 * sum(float(p.grad.abs().sum()) for p in params))
        for p in params:
            p.sub_(group["d"] * p.grad)


class Grows(ByParameter):
    """The same, for leaves some of which have no gradient."""

    def of_group(self, params: list[Any], group: Any) -> None:
        group["d"] = max(group.get("d", 1e-3), 1e-2 * sum(float(p.grad.abs().sum()) for p in params))
        for p in params:
            p.sub_(group["d"] * p.grad)


class Waits(ByParameter):
    """As heavyball's: no leaf takes a step before the one that came last has had some."""

    def of_group(self, params: list[Any], group: Any) -> None:
        for p in params:
            self.state[p]["n"] = self.state[p].get("n", 0) + 1
        if min(self.state[p]["n"] for p in params) > 2:
            torch._foreach_add_(params, [p.grad for p in params], alpha=-group["lr"])


@pytest.mark.parametrize(("by", "late"), [("all", True), (None, False)])
@each_rank(2)
def test_a_class_that_couples_leaves_has_all_of_them_on_each_rank(by: Any, late: bool, tmp_path: Path) -> None:
    """Beside the class itself: perhaps late leaves; a skipped step, a checkpoint, other placements and units."""

    def given(step: int) -> dict[str, Any]:
        absent = late and step in (0, 1, 2, 8)
        return {n: None if absent and "bias" in n else g.double() for n, g in tree(step + 1).items()}

    doubles = {name: p.double() for name, p in tree(0).items()}
    for cls in (Waits, Grows) if by else (Waits,):
        params, optimizer = parameters(doubles), fsdp.from_torch(cls, by=by)
        state = fsdp.shard(doubles, spec("zero3"), optimizer)
        for step in range(10):
            if step == 5:
                state = moved_on(state, tmp_path / cls.__name__, optimizer)
            state = fsdp.step(fsdp.reduce(state, given(step)))
        wanted = by_torch(cls(params.values()), params, [given(step) for step in range(10)])
        moved = largest(doubles, wanted)
        assert moved >= 1e-2
        assert largest(fsdp.full_params(state), wanted) <= 1e-12 * moved, cls


def test_leaves_that_couple_where_one_has_no_gradient() -> None:
    optimizer = fsdp.from_torch(Waits)
    text = "other leaves, some of which have no gradient in some steps, than alone"
    assert re.search(rf"whole leaves at owners, .*{text}", str(optimizer))
    with pytest.raises(SpecError, match=rf"cannot work on shards.*{text}. Leave by= out"):
        fsdp.from_torch(Waits, by="elementwise")
    state = stepped(fsdp.shard(tree(0), spec("ddp"), optimizer), range(3))
    before = fsdp.full_params(state)
    with pytest.raises(TreeError, match=rf"from_torch\(Waits\): the leaf 'a\.bias' has no gradient .*{text}.*by='all'"):
        fsdp.step(fsdp.reduce(state, {**tree(4), "a.bias": None}))
    assert same(fsdp.full_params(state), before)


def test_all_leaves_together_say_what_they_hold() -> None:
    optimizer = fsdp.from_torch(Grows, by="all")
    alone(optimizer)
    numel = sum(p.numel() for p in tree(0).values())
    held = re.search(r"all leaves together, on one gathered copy a rank \(([\d,]+) bytes\), since .*", str(optimizer))
    assert held is not None
    assert int(held[1].replace(",", "")) >= 2 * 4 * numel
    with pytest.raises(SpecError, match=r"from_torch\(Grows\): by is 'all', but options are given by label, 'bias'"):
        fsdp.from_torch(Grows, by="all", lr={"bias": 0.1, "default": 0.2})


@pytest.mark.parametrize("cls", [torch.optim.Rprop, torch.optim.ASGD])
def test_what_begins_as_the_rate_begins_as_that_of_a_leafs_first_step(cls: Any) -> None:
    leaves = {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([1.0, -2.0, 3.0]).double()}
    grads = [
        {name: torch.sin(leaf * (step + 1)) if step > 1 or name == "a" else None for name, leaf in leaves.items()}
        for step in range(4)
    ]
    optimizer = fsdp.from_torch(cls, lr=lambda count: 0.1 + 0.05 * count.double())
    state = fsdp.shard(leaves, Spec(fsdp.local_mesh()), optimizer)
    for one in grads:
        state = fsdp.step(fsdp.reduce(state, one))
    plain = parameters(leaves)
    wanted = by_torch(cls(plain.values(), lr=0.1), plain, grads, rate=lambda step: 0.1 + 0.05 * step)
    assert largest(fsdp.full_params(state), wanted) < 1e-12


@pytest.mark.parametrize("by", ["elementwise", "leaf", "all"])
def test_leaves_without_elements_alone(by: str) -> None:
    state = fsdp.shard({"w": torch.ones(0, 2)}, Spec(fsdp.local_mesh()), fsdp.from_torch(torch.optim.AdamW, by=by))
    state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(0, 2)}))
    assert fsdp.full_params(state)["w"].shape == (0, 2)


class TurnsLater(ByParameter):
    """Its sign from the thirtieth step on, and normalized in the fortieth."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        s["step"] = s.get("step", 0) + 1
        if s["step"] == 40:
            g = g / g.norm()
        p.sub_(group["lr"] * (g.sign() if s["step"] >= 30 else g))


def test_each_real_step_is_one_that_was_proved() -> None:
    """A count at which nobody looked: what is elementwise there is run, what is not is refused before the step."""
    optimizer = fsdp.from_torch(TurnsLater)
    assert "elementwise" in str(optimizer)
    state = stepped(alone(optimizer), range(39))
    assert same(fsdp.full_params(state), plainly(TurnsLater, 39)[0])
    before = fsdp.full_params(state)
    with pytest.raises(
        TreeError,
        match=r"from_torch\(TurnsLater\): in this step the class does .* linalg_vector_norm is not elementwise "
        r"\(.*test_from_torch\.py:\d+: g = g / g\.norm\(\)\)\. The step was not taken\. Give by='leaf'",
    ):
        stepped(state, range(39, 40))
    assert same(fsdp.full_params(state), before)


class ReadsItsCount(ByParameter):
    """Normalized in the fortieth step, which a tensor counts."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        step = s.setdefault("step", torch.tensor(0.0)).add_(1)
        p.sub_(group["lr"] * (g / g.norm() if step == 40 else g))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """How often the checks of an optimizer go in so many steps."""
    looks: list[int] = []
    real = from_torch._scouts

    def counted(*args: Any) -> Any:
        looks.append(1)
        return real(*args)

    monkeypatch.setattr(from_torch, "_scouts", counted)

    def of(steps: int, cls: Any, **options: Any) -> int:
        looks.clear()
        stepped(alone(fsdp.from_torch(cls, **options)), range(steps))
        return len(looks)

    return of


def falling(count: torch.Tensor) -> torch.Tensor:
    return 0.1 / (1 + count)


def test_what_python_cannot_see_is_checked_now_and_then(looked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_torch, "PROVES", 100)
    assert looked(20, torch.optim.SGD, lr=0.1, momentum=0.9) <= 6  # no count, and one rate
    assert looked(20, torch.optim.RAdam, lr=0.1) >= 20  # reads its count
    assert looked(20, torch.optim.Adagrad, lr=falling) >= 20  # has another rate in each step
    state = stepped(alone(fsdp.from_torch(ReadsItsCount)), range(39))
    with pytest.raises(TreeError, match="The step was not taken"):
        stepped(state, range(39, 40))


class ByAFlag(ByParameter):
    """Goes by what is neither a count nor a rate, for leaves with one label."""

    flag = None

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(group["lr"] * (g / g.norm() if group["lr"] == self.flag else g))


@pytest.mark.parametrize("flag", [0.1, 0.2])
def test_each_label_is_checked_now_and_then(flag: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_torch, "EVERY", 8)
    optimizer = fsdp.from_torch(ByAFlag, lr={"a": 0.1, "default": 0.2})
    state = stepped(alone(optimizer, {"a": "a"}), range(4))
    monkeypatch.setattr(ByAFlag, "flag", flag)
    with pytest.raises(TreeError, match="The step was not taken"):
        stepped(state, range(4, 12))


class TakesTheRoot(ByParameter):
    """Its count leaves torch's arithmetic, so that nobody knows what it decides."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        step = s.setdefault("step", torch.tensor(0.0)).add_(1)
        p.sub_(group["lr"] * g / math.sqrt(step.item()))


def test_a_class_that_branches_by_no_count_is_checked_now_and_then_after_a_proof(
    looked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_torch, "PROVES", 5)
    for cls in (torch.optim.AdamW, torch.optim.NAdam):
        for lr in (0.1, falling):
            assert looked(12, cls, lr=lr) <= 5 + 1 + 3  # sequences are proved when they are met; a proof
    assert looked(12, torch.optim.Adagrad, lr=falling) <= 9
    rarely = looked(20, torch.optim.AdamW, lr=falling)
    monkeypatch.setattr(from_torch, "EVERY", 4)
    assert looked(20, torch.optim.AdamW, lr=falling) >= rarely + 3  # after the proof, too
    for other in (torch.optim.RAdam, ReadsItsCount, TakesTheRoot, TurnsLater):  # a branch, or nobody knows
        assert looked(12, other, lr=0.1) >= 12


def test_steps_of_two_states_with_one_optimizer_are_checked_in_turn() -> None:
    optimizer = fsdp.from_torch(TurnsLater)
    one, other = (
        fsdp.shard({name: {"w": torch.ones(3)}}, Spec(fsdp.local_mesh(), units=[name]), optimizer) for name in "ab"
    )
    for _ in range(39):
        one = fsdp.step(fsdp.reduce(one, {"a": {"w": torch.ones(3)}}))
        other = fsdp.step(fsdp.reduce(other, {"b": {"w": torch.ones(3)}}))
    for state, name in ((other, "b"), (one, "a")):
        with pytest.raises(TreeError, match="The step was not taken"):
            fsdp.step(fsdp.reduce(state, {name: {"w": torch.ones(3)}}))


class Random(ByParameter):
    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(torch.rand_like(p) * g)


class Hidden(ByParameter):
    """Keeps a list of its own for matrices, which it takes in float32 only."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if p.dim() == 2:
            if p.dtype is torch.float64:
                raise TypeError("float32 only")
            vars(self).setdefault("seen", []).append(1)
            g = g * len(vars(self)["seen"])
        p.sub_(group["lr"] * g)


class OfSmall(ByParameter):
    """Keeps as many numbers as there are weights under a threshold."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if "of" not in s:
            s["of"] = p.abs() < 1e-3
            s["mean"] = torch.zeros_like(p[s["of"]])
        s["mean"].add_(g[s["of"]])
        p[s["of"]] -= group["lr"] * s["mean"]


class Odd(ByParameter):
    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        s["history"] = slice(None)


AT = r".*test_from_torch\.py:\d+: "
COUPLES = r"cannot work on shards: it couples leaves: "
STACKED = COUPLES + "stack takes tensors of several leaves together"
BY_VALUES = r"another structure where weights are small: \['of', 'mean'\]"
NO_CLASS = r"from_torch: expected a class as those of torch\.optim, got .*Give the"
ADAM, SGD = torch.optim.Adam, torch.optim.SGD
WHY_NOT: list[tuple[Any, dict[str, Any], str]] = [
    *((ByAll, {"by": by}, rf"from_torch\(ByAll\): .*{STACKED}{AT}") for by in (None, "leaf", "elementwise")),
    *((GrowsAll, {"by": by}, rf"from_torch\(GrowsAll\): .*{COUPLES}{AT}") for by in (None, "leaf", "elementwise")),
    (Random, {}, rf"shards: rand_like draws random numbers \({AT}p\.sub_"),
    (Hidden, {"by": "all"}, r"a new instance that is given the class's own state goes on .* a leaf of shape \[6, 8\]"),
    (OfSmall, {}, BY_VALUES),
    (OfSmall, {"by": "all"}, BY_VALUES),
    (Odd, {}, r"from_torch\(Odd\): it keeps a slice as 'history', which no State can hold: tensors, numbers"),
    (ADAM, {"lr": -1.0}, "it raised ValueError: Invalid learning rate: -1.0. Give options that"),
    (ADAM, {"betas": {"bias": (2.0, 0.9), "default": (0.9, 0.9)}}, "ValueError: Invalid beta"),
    (ADAM, {"momentum": 0.9}, "it raised TypeError: .*unexpected keyword argument 'momentum'"),
    (SGD([torch.zeros(1)]), {}, NO_CLASS),
    (dict, {}, NO_CLASS),
    ("Adam", {}, NO_CLASS),
    (SGD, {"by": "rows"}, "from_torch: by is 'rows'; expected 'elementwise', 'leaf', 'all', or nothing"),
    (
        SGD,
        {"by": "elementwise", "momentum": 0.9, "dampening": 0.5},
        r"begins neither as one number nor as the weights, as that of SGD\(dampening=\)",
    ),
]


@pytest.mark.parametrize(("cls", "options", "text"), WHY_NOT, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_refused_with_its_reason(cls: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        fsdp.from_torch(cls, **options)


def test_what_shard_refuses_with_its_reason() -> None:
    assert "whole leaves" in str(fsdp.from_torch(SGD, momentum=0.9, dampening=0.5))
    text = r"does not take the leaf 'a\.bias' of shape \[130\]: it raised ValueError: Muon"
    with pytest.raises(SpecError, match=text):
        alone(fsdp.from_torch(torch.optim.Muon))
    with pytest.raises(SpecError, match=r"not torch's Adam\. Give its class: fsdp\.from_torch\(Adam, lr="):
        alone(ADAM)


class EndsBadly(ByParameter):
    """Takes no gradient of a hundred or more."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if s.setdefault("largest", g.abs().amax()) == 100:
            raise RuntimeError("a hundred")
        p.sub_(group["lr"] * g)


def stepped_by(optimizer: Any, grad: float) -> float:
    state = fsdp.shard({"w": torch.ones(2, 2)}, Spec(fsdp.local_mesh()), optimizer)
    return float(fsdp.full_params(fsdp.step(fsdp.reduce(state, {"w": torch.full((2, 2), grad)})))["w"].sum())


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_owner_whose_class_raises_says_what_and_the_next_call_works(ranks: int) -> None:
    optimizer = fsdp.from_torch(EndsBadly)
    text = r"TreeError: from_torch\(EndsBadly\): raised RuntimeError .*: a hundred"
    with pytest.raises(fsdp.LaunchError, match=text):
        fsdp.launch(stepped_by, (optimizer, 100.0), nprocs=ranks, simulate=True)
    assert fsdp.launch(stepped_by, (optimizer, 10.0), nprocs=ranks, simulate=True) == [0.0] * ranks


class FromFirstRate(ByParameter):
    """Takes the first rate in its constructor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.first = lr

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.mul_(1 - 0.1 * group["lr"] / self.first).sub_(group["lr"] * g)


@pytest.mark.parametrize("labels", [{}, {"*": "some"}])
@pytest.mark.parametrize("by", [None, "leaf", "all"])
def test_a_rate_that_changes_changes_groups_only(by: Any, labels: Any) -> None:
    optimizer = fsdp.from_torch(FromFirstRate, lr=lambda count: 0.5 / (1 + count), by=by)
    state, params = stepped(alone(optimizer, labels), range(4)), tree(0)
    own = FromFirstRate([*params.values()], lr=0.5)
    wanted = by_torch(own, params, [tree(step + 1) for step in range(4)], rate=lambda step: 0.5 / (1 + step))
    assert largest(fsdp.full_params(state), wanted) < 1e-6


# ---------------------------------------------------------------- settings, skipped steps, graphs


def test_options_by_label_and_a_rate_by_the_count() -> None:
    rates = {"bias": lambda count: 0.5 / (1 + count), "default": 0.01}
    found = fsdp.full_params(stepped(alone(fsdp.from_torch(SGD, lr=rates), LABELS), range(3)))
    params, grads = tree(0), [tree(step + 1) for step in range(3)]
    bias = {name: p for name, p in params.items() if "bias" in name}
    assert same(
        {n: p for n, p in found.items() if n not in bias},
        {n: p for n, p in plainly(SGD, 3, lr=0.01)[0].items() if n not in bias},
    )
    wanted = by_torch(SGD(bias.values()), bias, grads, rate=lambda step: 0.5 / (1 + step))
    torch.testing.assert_close({n: found[n] for n in bias}, wanted)
    with pytest.raises(SpecError, match=r"from_torch\(SGD\)\(lr\): no leaf has the label 'nrom'"):
        alone(fsdp.from_torch(torch.optim.SGD, lr={"nrom": 1.0, "default": 0.1}), LABELS)
    with pytest.raises(SpecError, match=r"lr=\{'bias': 1\.0\}: nothing for the label 'default'"):
        alone(fsdp.from_torch(torch.optim.SGD, lr={"bias": 1.0}), LABELS)


@each_rank(2)
def test_an_option_by_label_that_keeps_more(tmp_path: Path) -> None:
    """An option that some labels have more state for, than others."""

    def adam() -> Any:
        return fsdp.from_torch(torch.optim.Adam, amsgrad={"bias": True, "default": False}, lr=0.1)

    wanted, kept = plainly(torch.optim.Adam, by_label={"amsgrad": True}, lr=0.1)
    state = stepped(fsdp.shard(tree(0), spec("zero3"), adam()), range(3))
    moved = fsdp.redistribute(fsdp.load(fsdp.save(state, tmp_path / "a"), spec("zero2"), adam()), spec("zero1"))
    found = fsdp.optimizer_state(stepped(state, range(3, STEPS)))["a.bias"]["max_exp_avg_sq"]
    assert same(fsdp.full_params(stepped(moved, range(3, STEPS))), wanted)
    assert torch.equal(found, kept["a.bias"]["max_exp_avg_sq"])


def test_a_first_rate_is_the_one_that_state_begins_with() -> None:
    """Rprop's steps begin as long as the rate."""
    rprop = fsdp.from_torch(torch.optim.Rprop, lr=lambda count: 0.25 + count)
    assert fsdp.optimizer_state(alone(rprop))["a.bias"]["step_size"].tolist() == [0.25] * 130


@pytest.mark.parametrize("name", ["NAdam", "SGD"])
def test_a_skipped_step_changes_nothing(name: str) -> None:
    found = []
    for skips in ([False, False], [False, True, False]):
        state, taken = alone(fsdp.from_torch(CLASSES[name], lr=0.1)), 0
        for skip in skips:
            grads = {n: torch.full_like(g, torch.nan) if skip else g for n, g in tree(taken + 1).items()}
            state = fsdp.step(fsdp.reduce(state, grads), skip=torch.tensor(skip))
            taken += not skip
        found.append((fsdp.full_params(state), fsdp.optimizer_state(state)))
    assert same(found[0][0], found[1][0])
    assert all(same(of, found[1][1][path]) for path, of in found[0][1].items())


def test_it_is_a_value() -> None:
    import copy
    import pickle

    a, b = nadam(), nadam()
    assert a == b
    assert hash(a) == hash(b)
    assert a != fsdp.from_torch(torch.optim.NAdam, lr=0.1)
    assert pickle.loads(pickle.dumps(a)) == copy.deepcopy(a) == a
    state = fsdp.abstract_state(tree(0), Spec({"data": 4}, labels=LABELS), a)
    assert state.opt["exp_avg"]["a"].local.device.type == "meta"


def compiled(preset: str, way: str) -> float:
    wanted, _ = plainly(torch.optim.NAdam, 3, by_label={"weight_decay": 0.0}, lr=0.05, weight_decay=0.1)

    def train_step(state: fsdp.State, grads: Tree) -> fsdp.State:
        return fsdp.step(fsdp.reduce(state, grads))

    torch._dynamo.reset()
    step: Any = torch.compile(train_step, backend=way, fullgraph=True)
    state = fsdp.shard(tree(0), spec(preset), nadam())
    for i in range(3):
        state = step(state, tree(i + 1))
    assert max(state.optimizer.scout.turns.values()) >= 3  # scouts go before each compiled step, too
    assert state.optimizer is from_torch.IN_GRAPHS[state.optimizer.number]  # which outlives the State with the graph
    found = fsdp.full_params(state)
    return largest(found, wanted)


@pytest.mark.large  # Inductor
def test_inductor_takes_it_in_a_driven_step() -> None:
    params, model = fsdp.functionalize(torch.nn.Linear(3, 2))
    forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    found = []
    for step in (train_step, T.compile(train_step)):
        state = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.from_torch(torch.optim.NAdam, lr=0.05))
        for _ in range(2):
            state, _ = step(state, torch.ones(4, 3))
        found.append(fsdp.full_params(state))
    assert all(torch.allclose(found[0][name], leaf) for name, leaf in found[1].items())


@pytest.mark.parametrize("way", ["eager", pytest.param("inductor", marks=pytest.mark.large)])
def test_a_compiled_step_has_it_as_an_operator(way: str) -> None:
    assert max(launch(compiled, ("zero3", way), nprocs=2 if FULL else 1)) < 1e-6
