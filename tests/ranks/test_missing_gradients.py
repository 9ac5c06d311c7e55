"""Leaves that get a gradient on no rank keep their weights and moments, as torch.optim's do with `grad=None`."""

from __future__ import annotations

import copy
import math
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from support.presets import PRESETS
from support.problems import largest, mesh_and_placement
from support.ranks import each_rank
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import Optimizer, ScheduleError, Spec
from functional_fsdp import transforms as T
from functional_fsdp._capture import Capture, Fixed
from functional_fsdp._plan.layout import LeafInfo, plan_layout
from functional_fsdp._runtime.agreement import ALL, FULL, LACKS, GradientMask, NewCounts, Seats
from functional_fsdp.transforms._cuda_graph.graphed import signature

Tree = dict[str, Any]
SHAPES = {
    "blocks.0.w": (9, 40), "blocks.0.bias": (130,), "blocks.0.empty": (0, 2), "blocks.0.other": (300,),
    "blocks.1.w": (4, 4), "blocks.1.bias": (1,), "blocks.2.w": (33,), "blocks.2.frozen": (7,),
    "norm": (9,), "scale": (), "tied": (140,), "twin": (140,), "never": (200,),
}  # fmt: skip
LABELS = {"*.bias": "bias", "norm": "norm"}
UNITS = ["blocks.*", "norm", "scale", "never"]
DECAY = {"bias": 0.0, "default": 0.2}
STEPS, MICRO = 6, 2


def has(leaf: str, step: int, rank: int, micro: int, world: int) -> bool:
    """Whether a leaf gets a gradient."""
    if leaf == "never":
        return False
    if leaf == "blocks.0.bias":
        return step in (1, 4)  # first in the second step
    if leaf == "blocks.0.other":
        return step != 2 and micro == 1
    if leaf == "blocks.0.w":
        return step < 5 or rank == world - 1
    if leaf.startswith("blocks.1"):
        return step not in (0, 3) and (rank == 0 or step == 5)  # a whole unit, on one rank most of the time
    if leaf == "scale":
        return rank == step % world and micro == 0
    if leaf == "twin":
        return step > 2  # of the tied leaf, once
    if leaf == "tied":
        return step in (1, 4)
    return leaf != "norm" or step % 2 == 0


def start(name: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=g, dtype=torch.float64)


def gradient(name: str, step: int, rank: int, micro: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * step + 100 * rank + 10 * micro + len(name))
    return torch.randn(SHAPES[name], generator=g, dtype=torch.float64)


def tree() -> Tree:
    found = {name: start(name) for name in SHAPES}
    return found | {"twin": found["tied"]}


def grads_of(step: int, rank: int, micro: int, world: int) -> Tree:
    return {n: gradient(n, step, rank, micro) if has(n, step, rank, micro, world) else None for n in SHAPES}


OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (
        lambda: fsdp.adamw(lr=0.05, weight_decay=DECAY),
        lambda groups: torch.optim.AdamW(groups, lr=0.05),
    ),
    "sgd": (
        lambda: fsdp.sgd(lr=0.05, momentum=0.9, weight_decay=DECAY, nesterov=True),
        lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "nadam": (
        lambda: fsdp.from_torch(torch.optim.NAdam, lr=0.05, weight_decay=DECAY),
        lambda groups: torch.optim.NAdam(groups, lr=0.05),
    ),
    "pair": (lambda: momentum(), lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9)),
}


def momentum() -> Optimizer:
    """SGD with momentum and decay as somebody else's pair, which knows nothing of gradients that did not come."""

    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        new_main, new_opt = {}, {}
        for name, p in main.items():
            flat = torch.zeros_like(p.local)
            for (label, view), (_, weight) in zip(p.but(flat).by_label(), p.by_label(), strict=True):
                view.copy_(DECAY.get(label, DECAY["default"]) * weight)
            moving = 0.9 * opt[name].local + grads[name].local + flat
            new_opt[name] = opt[name].but(moving)
            new_main[name] = p.but(p.local - 0.05 * moving)
        return new_main, new_opt

    return Optimizer(lambda main: pytree.tree_map(torch.zeros_like, main), update)


def reference(world: int, make: Callable[..., torch.optim.Optimizer], steps: int = STEPS) -> list[Tree]:
    """Weights after each step of torch's own optimizer; those of tied leaves under their first name."""
    params = {name: torch.nn.Parameter(p) for name, p in tree().items() if name != "twin"}
    groups: list[Tree] = [
        {"params": [], "weight_decay": DECAY["bias"]},
        {"params": [], "weight_decay": DECAY["default"]},
    ]
    for name, p in params.items():
        if "frozen" not in name:
            groups["bias" not in name]["params"].append(p)
    optimizer = make(groups)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for micro in range(MICRO):
                for name, grad in grads_of(step, rank, micro, world).items():
                    p = params["tied" if name == "twin" else name]
                    if grad is not None:
                        p.grad = grad / world if p.grad is None else p.grad + grad / world
        optimizer.step()
        seen.append({name: p.detach().clone() for name, p in params.items()})
    return seen


def spec(preset: str, **kwargs: Any) -> Spec:
    mesh, placement = mesh_and_placement(preset)
    return Spec(mesh, placement, units=UNITS, labels=LABELS, trainable={"*.frozen": False}, **kwargs)


def reduced(state: fsdp.State, step: int) -> fsdp.State:
    """A step's gradients, in odd steps unit by unit, without the units that have none on this rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for micro in range(MICRO):
        grads, last = grads_of(step, rank, micro, world), micro == MICRO - 1
        if step % 2 == 0:
            state = fsdp.reduce(state, grads, last_microbatch=last)
            continue
        for unit in reversed(state.layout.units):
            mine = {key: grads[path] for key, path in zip(unit.keys, unit.paths, strict=True)}
            if unit.paths == ("tied",):
                both = [g for g in (grads["tied"], grads["twin"]) if g is not None]
                mine = dict.fromkeys(mine, sum(both) if both else None)
            if any(g is not None for g in mine.values()) or unit.name == "norm":
                state = fsdp.reduce(state, mine, unit.name, last_microbatch=last)
    return state


def by_ranks(rows: list[Any]) -> list[Any]:
    """(ranks, optimizer, presets) of rows with one preset each."""
    found: dict[Any, list[str]] = {}
    for ranks, which, preset in sorted(rows):
        found.setdefault((ranks, which), []).append(preset)
    return [(*key, tuple(presets)) for key, presets in found.items()]


ROWS = [(n, which, p) for n in (1, 2, 4) for which in OPTIMIZERS for p in (PRESETS[:4] if n == 2 else PRESETS)]
FEW = [
    (1, "pair", "zero2"), (1, "nadam", "hsdp"), (2, "adamw", "ddp"), (2, "nadam", "zero3"), (2, "sgd", "zero1"),
    (2, "pair", "zero3"), (4, "adamw", "hfsdp"), (4, "sgd", "hsdp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "which", "presets"),
    marked(by_ranks(FEW) + by_ranks([row for row in ROWS if row not in FEW]), by_ranks(FEW)),
)
@each_rank("ranks")
def test_every_optimizer_leaves_alone_what_torchs_leaves_alone(
    ranks: int, which: str, presets: tuple[str, ...]
) -> None:
    make, torchs = OPTIMIZERS[which]
    expected = reference(ranks, torchs)
    for preset in presets:
        state = fsdp.shard(tree(), spec(preset), make())
        for step, wanted in enumerate(expected):
            state = fsdp.step(reduced(state, step))
            assert largest(fsdp.full_params(state), wanted) < 1e-9, (preset, step)


# ---------------------------------------------------------------- checkpoints


def alike(a: fsdp.State, b: fsdp.State) -> bool:
    """Whether two states have the same bits."""
    pairs = zip(*(pytree.tree_leaves((one.main, one.opt)) for one in (a, b)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("preset", "ranks"), marked([("zero3", 1), ("zero2", 2), ("ddp", 4), ("hfsdp", 4)], [("zero3", 1), ("zero2", 2)])
)
@each_rank("ranks")
def test_counts_of_missed_steps_are_copied_and_saved(preset: str, ranks: int, tmp_path: Path) -> None:
    """Six steps; and the last ones again from copies and from checkpoints, which new and old states read, one of them
    from before any leaf missed a step."""

    def begun() -> fsdp.State:
        return fsdp.shard(tree(), spec(preset), fsdp.adamw(lr=0.05))

    def stepped(state: fsdp.State, *steps: int) -> fsdp.State:
        for step in steps:
            state = fsdp.step(reduced(state, step))
        return state

    state = begun()
    first, state = fsdp.save(state, tmp_path / "first"), stepped(state, 0, 1, 2)
    path = fsdp.save(state, tmp_path / "then")
    others = [copy.deepcopy(state), fsdp.load(path, like=begun())]
    if ranks == 1:
        others.append(pickle.loads(pickle.dumps(state)))
    state = stepped(state, 3, 4, 5)
    before = fsdp.load(first, like=state)  # which has counts
    assert not before.opt.missed
    others += [fsdp.load(path, like=state), stepped(before, 0, 1, 2)]
    for other in others:
        other = stepped(other, 3, 4, 5)
        assert alike(state, other)
        assert [*state.opt.missed] == [*other.opt.missed]
    assert {"blocks.0", "norm", "never"} <= {*state.opt.missed}


# ---------------------------------------------------------------- leaves that ranks have each their own


def expert_grads(step: int, rank: int) -> Tree:
    """The expert of ranks 0 and 1 gets none in steps 1 and 2, that of ranks 2 and 3 none in steps 2 and 3."""
    own = rank // 2
    comes = {"experts": step not in (1 + own, 2 + own) and (rank % 2 == 0 or step == 0), "late": step > own}
    grads = {
        name: torch.full((5,), 0.1 * (step + rank + 1), dtype=torch.float64) for name in ("experts", "late", "rest")
    }
    return {name: g if comes.get(name, rank == 3 or step < 4) else None for name, g in grads.items()}


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("nadam", marks=pytest.mark.large), "pair"])
@each_rank(4)
def test_experts_are_each_ranks_own(optimizer: str, tmp_path: Path) -> None:
    mesh, rank = fsdp.local_mesh(expert=2, data=2), dist.get_rank()
    make, torchs = OPTIMIZERS[optimizer]
    rules = {"rest": fsdp.zero3("expert", "data"), "*": fsdp.zero3("data")}
    mine = torch.full((5,), 1.0 + mesh.get_local_rank("expert"), dtype=torch.float64)
    params = {"experts": mine, "late": mine + 1, "rest": torch.ones(5, dtype=torch.float64)}

    def sharded() -> fsdp.State:
        placed = Spec(mesh, rules, units=[["experts", "late"], "rest"], labels={"late": "bias"})
        return fsdp.shard(params, placed, make())

    plain = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    decayed = {"params": [p for name, p in plain.items() if name != "late"], "weight_decay": DECAY["default"]}
    reference = torchs([decayed, {"params": [plain["late"]], "weight_decay": DECAY["bias"]}])
    state = sharded()
    for step in range(6):
        reference.zero_grad()
        for other in range(4):
            for name, g in expert_grads(step, other).items():
                if g is not None and (name == "rest" or other // 2 == rank // 2):
                    p = plain[name]
                    p.grad = g / 4 if p.grad is None else p.grad + g / 4
        reference.step()
        state = fsdp.step(fsdp.reduce(state, expert_grads(step, rank)))
        assert largest(fsdp.full_params(state), {name: p.detach() for name, p in plain.items()}) < 1e-9
        if step == 3:
            again = fsdp.load(fsdp.save(state, tmp_path / "saved"), like=sharded())
            assert alike(state, again)
            state = again
    if optimizer == "adamw":
        counts: list[Any] = [None] * 4
        missed = state.opt.missed
        dist.all_gather_object(counts, ([*missed], [n for buffer in missed.values() for n in buffer.local.tolist()]))
        assert counts[0] == counts[1]
        assert counts[2] == counts[3]
        assert counts[0][0] == counts[2][0]  # the same structure on every rank
        assert counts[0][1] != counts[2][1]


# ---------------------------------------------------------------- modules


class Routed(nn.Module):
    """A batch says which expert it goes through: some are used on some ranks, or on none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.unused = nn.Linear(6, 6, dtype=torch.float64)
        self.last = nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.last(torch.tanh(self.experts[expert](self.first(x))))


def routed(step: int, rank: int) -> tuple[torch.Tensor, int]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=g, dtype=torch.float64), (step // 2 + rank * (step % 2)) % 3


def loss_fn(model: Any, x: torch.Tensor, expert: int) -> torch.Tensor:
    return model(x, expert).square().mean()


DRIVEN = [("zero3", False, True), ("hsdp", False, False), ("zero1", True, False), ("ddp", False, False)]


@pytest.mark.parametrize(("preset", "second_order", "overlapped"), marked(DRIVEN, DRIVEN[:3]))
@each_rank(4)
def test_experts_that_no_batch_went_through_stay_as_they_are(preset: str, second_order: bool, overlapped: bool) -> None:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(Routed())
    schedule = fsdp.Schedule(overlap_update=overlapped)
    state = fsdp.shard(params, Spec(mesh, placement, schedule=schedule), fsdp.adamw(lr=0.05, weight_decay=0.2))
    forward_backward: Any = T.forward_backward(model, loss_fn, second_order=second_order)
    forward_backward = T.accumulate(forward_backward, 2)
    plain = Routed()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.2)
    for step in range(6):
        optimizer.zero_grad()
        for other in range(4):
            (loss_fn(plain, *routed(step, other)) / 4).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if step != 3:
            optimizer.step()
        state, _ = forward_backward(state, *routed(step, dist.get_rank()))
        state, _ = T.clip_by_global_norm(state, 0.1)
        state = fsdp.step(state, skip=torch.tensor(step == 3))  # a step that counts for nobody
        assert largest(fsdp.full_params(state), {n: p.detach() for n, p in plain.named_parameters()}) < 1e-9


def test_compiled_steps_may_be_skipped_where_a_leaf_has_no_gradient() -> None:
    """Steps that are taken, skipped and taken, beside eager ones: no leaf counts the second."""
    params, model = fsdp.functionalize(Routed())
    forward_backward = T.forward_backward(model, loss_fn)
    x, _ = routed(0, 0)

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = forward_backward(state, x, 1)
        return T.skip_nonfinite(fsdp.step)(state), loss

    found = []
    for step in (train_step, T.compile(train_step, "aot_eager")):
        state = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.adamw(lr=0.05))
        for factor in (1.0, math.nan, 2.0):
            state, _ = step(state, x * factor)
        state, _ = forward_backward(state, x, 2)  # whose first step it is
        state = fsdp.step(state)
        assert int(state.extras["skipped"]) == 1
        found.append(fsdp.full_params(state))
    assert largest(*found) < 1e-12


STAGES: Any = {
    "first": lambda w, h, batch: batch @ w["used"],
    "last": lambda w, h, batch: (h * w["used"]).square().sum(-1),
}


@pytest.mark.parametrize("noise", [0.0, 1.0])
@each_rank(2)
def test_noise_is_a_gradient_of_every_leaf_and_products_with_the_hessian_are_none(noise: float) -> None:
    """Which leaves a step of private gradients moves; at the same time, of a product with the Hessian before it."""
    params = {f"{unit}.{key}": torch.full((3, 3), 0.5) for unit in STAGES for key in ("used", "idle")}
    params["last.used"] = torch.ones(3)
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), units=[*STAGES]), fsdp.sgd(lr=0.1, weight_decay=0.1))
    before = fsdp.full_params(state)
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    state, _ = T.clipped_gradients(STAGES, max_norm=1.0, noise=noise)(state, batch)
    summed = {**STAGES, "last": lambda w, h, batch: STAGES["last"](w, h, batch).sum()}
    with warnings.catch_warnings():  # torch loads torch.jit, which it deprecates, when forward mode is first used
        warnings.simplefilter("ignore", DeprecationWarning)
        state, _ = T.hvp(summed)(state, state.main, batch)
    after = fsdp.full_params(fsdp.step(state))
    moved = {name: not torch.equal(after[name], p) for name, p in before.items()}
    assert moved == {name: noise > 0 or "used" in name for name in params}


# ---------------------------------------------------------------- what ranks tell each other


def layout_of(shapes: Tree, sizes: dict[str, int], rules: Any = None, units: Any = None) -> fsdp.Layout:
    leaves = [LeafInfo(path, shape, torch.float32) for path, shape in shapes.items()]
    return plan_layout(leaves, Spec(sizes, rules, units=units))


def test_a_row_has_a_byte_a_leaf_and_experts_one_for_each_rank() -> None:
    sizes = {"expert": 3, "data": 2}
    rules = {"e*": fsdp.zero3("data"), "*": fsdp.zero3("expert", "data")}
    layout = layout_of({"e1": (2,), "e2": (3,), "w": (4,), "none": (0,)}, sizes, rules, [["e1", "e2"], ["w", "none"]])
    seats = [Seats(layout, sizes, {"expert": i, "data": 0}) for i in range(3)]
    units = seats[0].units
    assert seats[0].own
    assert len(units) == 2
    rows = [seats[i].row({units[0]: 0b10 if i else ALL, units[1]: ALL if i == 2 else 0}) for i in range(3)]
    assert rows == [b"\2\2\0\0\0\0\1\2", b"\0\0\1\2\0\0\1\2", b"\0\0\0\0\1\2\2\2"]  # nothing to update in "none"
    found = [seat.lacking(bytes(map(max, *rows))) for seat in seats]
    assert [one.given for one in found] == [{}, {units[0]: (False, True)}, {units[0]: (False, True)}]
    assert {one.anywhere for one in found} == {(units[0],)}
    assert seats[0].lacking(b"") == seats[0].lacking(bytes([2] * 8)) == ({}, ())
    assert seats[0].parted(rows) == "w"
    assert seats[0].parted([rows[0], rows[1]]) == ""


def test_a_rank_says_whether_it_has_them_all() -> None:
    sizes = {"data": 2}
    given = GradientMask(
        layout_of({"a.w": (2,), "a.b": (3,), "b.w": (4,)}, sizes, units=["a", "b"]), sizes, {"data": 0}
    )
    assert given.vote() == FULL  # gradients that were put there without reduce
    given.note("a", 0b01)
    assert given.vote() == LACKS
    given.full.add("b")
    assert given.vote() == LACKS
    given.note("a", 0b10)  # another microbatch
    assert given.vote() == FULL
    before = given.begin()
    given.full.add("b")
    assert given.vote() == LACKS
    given.resume(before)
    assert given.vote() == FULL
    given.begin()
    given.full.add("b")
    given.fill()
    assert given.vote() == FULL


@each_rank(2)
def test_ranks_ask_only_if_none_has_all() -> None:
    """How many messages ranks send beside the votes, when all have all, when one has, and when none has."""
    state = two_leaves(fsdp.sgd(lr=0.1))
    for who, messages in (((0, 1), 2), ((1,), 2), ((), 3)):
        state, sent = counted(state, lambda state, who=who: partly(state, b=dist.get_rank() in who))
        assert sent == messages, who


def two_leaves(optimizer: Any) -> fsdp.State:
    return fsdp.shard({"a": torch.ones(5), "b": torch.ones(5)}, Spec(fsdp.local_mesh()), optimizer)


def partly(state: fsdp.State, *, a: bool = True, b: bool = True) -> fsdp.State:
    one = torch.ones(5)
    return fsdp.step(fsdp.reduce(state, {"a": one if a else None, "b": one if b else None}))


def counted(state: fsdp.State, call: Callable[..., Any]) -> tuple[Any, int]:
    """What a call gives, and how many votes and other messages it sends."""
    log = state.version.lineage.runtime.issued["control"]
    before = log.count
    result = call(state)
    return result, log.count - before


@pytest.mark.parametrize("which", list(OPTIMIZERS))
def test_not_a_bit_changes(which: str) -> None:
    """A leaf without a gradient keeps the bits of its weights and of the optimizer's state."""

    def tensors() -> list[tuple[torch.Tensor, int]]:
        """Each with how many of its elements belong to the first leaf."""
        nodes = pytree.tree_leaves((state.main, state.opt), is_leaf=lambda x: isinstance(x, fsdp.FlatBuffer))
        floats = [node for node in nodes if node.local.is_floating_point()]
        return [(node.local.clone(), 1 if node.bucket.by_leaf else 300) for node in floats]

    spec = Spec(fsdp.local_mesh(), units=["u"], labels={"u.b": "bias"})
    state = fsdp.shard({"u.a": torch.randn(300), "u.b": torch.randn(7)}, spec, OPTIMIZERS[which][0]())
    state = fsdp.step(fsdp.reduce(state, {"u.a": torch.randn(300), "u.b": torch.randn(7)}))
    before = tensors()
    state = fsdp.step(fsdp.reduce(state, {"u.a": None, "u.b": torch.ones(7)}))
    pairs = zip(before, tensors(), strict=True)
    untouched = [torch.equal(x[:n], y[:n]) and not torch.equal(x, y) for (x, n), (y, _) in pairs]
    assert untouched == [True] * {"adamw": 3, "nadam": 5}.get(which, 2)


def test_a_step_with_all_gradients_counts_nothing() -> None:
    state = fsdp.shard(tree(), spec("zero3"), fsdp.adamw())
    state = fsdp.step(fsdp.reduce(state, {name: gradient(name, 0, 0, 0) for name in SHAPES}))
    assert state.opt.missed == {}


def test_a_pair_that_keeps_plain_tensors_is_warned_of() -> None:
    pair = Optimizer(
        lambda main: [torch.zeros_like(b.local) for b in main.values()], lambda g, opt, main, n: (main, opt)
    )
    state = partly(two_leaves(pair))
    with pytest.warns(UserWarning, match=r"Optimizer keeps a tensor \(128,\) that is no FlatBuffer"):
        partly(state, b=False)


# ---------------------------------------------------------------- steps that were captured


@pytest.mark.parametrize(("b", "messages"), [(True, 2), (False, 3)])  # one number is compared, and no row
@each_rank(2)
def test_a_replay_does_not_ask_again(b: bool, messages: int) -> None:
    """Of a step in which one leaf may have no gradient."""
    other = fsdp.shard({"c": torch.ones(5)}, Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    fsdp.step(fsdp.reduce(other, {"c": torch.ones(5)}))
    state = partly(two_leaves(fsdp.sgd(lr=0.1)))
    capture = Capture(state)
    time.sleep(0.3 * dist.get_rank())  # what one rank captures stands beside what the other issued long before
    with capture.recording():
        state = partly(state, b=b)
    capture.first(lambda: None)
    launched = list[int]()
    _, sent = counted(state, lambda state: capture.again(state, lambda: launched.append(1)))
    assert (launched, sent) == ([1], messages)


@pytest.mark.parametrize(
    ("eager", "same"), [({"b": False}, True), ({"a": False, "b": False}, True), ({}, False), ({"a": False}, False)]
)
@each_rank(2)
def test_a_rank_may_replay_beside_one_that_steps_alike_and_is_refused_on_every_rank_beside_others(
    eager: dict[str, bool], same: bool
) -> None:
    """The first rank votes as a replay of a step without a gradient for b, beside one that steps eagerly."""
    state = partly(two_leaves(fsdp.sgd(lr=0.1)), b=False)
    given = state._executor.reductions.given
    if dist.get_rank() == 0:
        fixed = Fixed.of(given)
        given.vote = lambda: fixed.vote  # type: ignore[method-assign]
        given.agree = lambda run, seen: fixed.again(run, seen) or given.seats.lacking(fixed.agreed)  # type: ignore
    mine = {"b": False} if dist.get_rank() == 0 else eager
    if same:
        assert partly(state, **mine).steps == 2
        return
    with pytest.raises(ScheduleError, match="a step that was captured when other leaves got gradients than now"):
        partly(state, **mine)
    assert state.steps == 1


@each_rank(2)
def test_what_is_counted_grows_outside_of_captures() -> None:
    """A leaf first misses a step in the one that is captured."""
    state = partly(two_leaves(fsdp.adamw(lr=0.1)))
    before = signature(state, [], None)
    with (
        pytest.raises(NewCounts, match=r"the optimizer counts their steps from now on \(in 'b'\)"),
        Capture(state).recording(),
    ):
        partly(state, b=False)
    state = partly(state, b=False)  # nothing was lost
    assert signature(state, [], None) != before
    with Capture(state).recording():
        state = partly(state, b=False)
    assert state.steps == 3
