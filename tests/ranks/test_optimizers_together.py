"""Muon, classes of torch.optim, optax-style pairs and partitions of them, through what may happen to a state: leaves
that freeze and train again, other strategies and units, files, skipped steps. Beside plain torch on whole leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import _unsharded
import pytest
import torch
import torch.utils._pytree as pytree
from support.presets import ranks_of
from support.problems import mesh_and_placement
from support.ranks import each_rank, launch
from support.tables import FULL, marked
from support.torch_optimizers import ByParameter

import functional_fsdp as fsdp
from functional_fsdp import Schedule, Spec, extend
from functional_fsdp import transforms as T
from functional_fsdp._verbs import update

Tree = dict[str, Any]
SHAPES = {"a.w": (9, 40), "a.bias": (130,), "a.v": (20, 3), "b.w": (4, 4), "b.bias": (1,), "c.bias": (7,), "norm": (9,)}
UNITS: dict[str, list[Any]] = {
    "by name": ["a", "b", "c", "norm"],
    "woven": [("a.w", "b.w"), ("a.bias", "b.bias"), "a.v", "c", "norm"],
}
LABELS = {"*.w": "matrix", "*.v": "matrix", "norm": "norm"}
FROZEN = ("a.*", "b.w", "norm")
LR = 0.05


class Momentum:
    """An optax-style pair that keeps a list."""

    def init(self, params: Tree) -> Tree:
        return {"trace": [torch.zeros_like(p) for p in pytree.tree_leaves(params)]}

    def update(self, grads: Tree, opt: Tree, *, params: Tree) -> tuple[Tree, Tree]:
        flat, form = pytree.tree_flatten(grads)
        trace = [0.9 * t + g for t, g in zip(opt["trace"], flat, strict=True)]
        return pytree.tree_unflatten([-LR * t for t in trace], form), {"trace": trace}


def of_ones_own() -> Any:
    """A pair that writes to whole tensors, and makes new ones of what it keeps."""

    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        new = pytree.tree_map(lambda m, g: 0.9 * m + g, opt, grads)
        return pytree.tree_map(lambda p, m: p.sub_(LR * m).add_(0.0), main, new), new

    return fsdp.Optimizer(lambda main: pytree.tree_map(torch.zeros_like, main), update)


class Rooted(ByParameter):
    """As LAMB and Shampoo: moments, a square for each row of a matrix, counts of both kinds; as long as the weights."""

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if not s:
            s |= {"mean": torch.zeros_like(p), "step": torch.tensor(0.0), "turns": 0}
            s |= {"square": p.new_zeros(len(p), len(p))} if p.ndim == 2 else {}
        s["step"] += 1
        s["turns"] += 1
        s["mean"].lerp_(g, 0.1)
        by = s["mean"] / (1 - 0.9 ** s["turns"])
        if p.ndim == 2:
            s["square"] = 0.9 * s["square"] + g @ g.T  # a tensor of its own, not in place
            by = by - 0.01 * s["square"] @ by
        p.sub_(by * (group["lr"] * p.norm() / (by.norm() + s["step"])))


Torchs = Callable[..., torch.optim.Optimizer]
ONES: dict[str, tuple[Callable[[], Any], Torchs]] = {
    "muon": (
        lambda: fsdp.muon(lr=LR, weight_decay=0.1, ns_dtype=torch.float64),
        lambda ps: _unsharded.Muon(ps, lr=LR, weight_decay=0.1),
    ),
    "adamw": (lambda: fsdp.adamw(lr=LR), lambda ps: torch.optim.AdamW(ps, lr=LR)),
    "nadam": (lambda: fsdp.from_torch(torch.optim.NAdam, lr=LR), lambda ps: torch.optim.NAdam(ps, lr=LR)),
    "rooted": (lambda: fsdp.from_torch(Rooted, lr=LR), lambda ps: Rooted(ps, lr=LR)),
    "pair": (lambda: fsdp.from_updates(Momentum()), lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9)),
    "own": (of_ones_own, lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9)),
    "sgd": (lambda: fsdp.sgd(lr=LR, momentum=0.9), lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9)),
}
KINDS = ("muon", "nadam", "pair", "rooted", "rooted adamw", "muon adamw", "muon nadam", "muon pair", "nadam adamw",
         "pair adamw", "own sgd")  # fmt: skip
IN_GRAPHS = [kind for kind in KINDS if "rooted" not in kind]  # owners of whole leaves run the class's Python


def optimizer(kind: str) -> Any:
    """Of two the first has the matrices; "default" is whose name no label needs."""
    first, *second = (ONES[one][0]() for one in kind.split())
    return fsdp.partition({"matrix": first, "default": second[0]}) if second else first


def tree(kind: str, seed: int) -> Tree:
    g = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: p for name, p in made.items() if kind != "muon" or p.dim() == 2}


def freezes(kind: str, path: str) -> bool:
    """Of two optimizers one has nothing left then."""
    return path.startswith("a.") or (path in ("b.w", "norm") and kind != "muon")


def misses(path: str) -> bool:
    """Which leaves get no gradient where some get none."""
    return path in ("a.v", "b.bias", "b.w")


STORY = (
    "train", "skip", "lack", "skip", "train", "freeze", "train", "train", "move", "train", "save", "unfreeze", "train",
    "lack, may skip", "train", "save", "train", "move", "carry", "train", "freeze all", "unfreeze", "train",
)  # fmt: skip


def plainly(kind: str, story: Iterable[str]) -> list[Tree]:
    """Whole leaves, by torch; the weights after each event."""
    params = {name: torch.nn.Parameter(p) for name, p in tree(kind, 0).items()}
    first, *second = (ONES[one][1] for one in kind.split())
    matrices, others = ([p for p in params.values() if (p.dim() == 2) == on or not second] for on in (True, False))
    optimizers = [first(matrices), *[one(others) for one in second]]
    frozen: set[str] = set()
    seen = []
    for step, what in enumerate(story):
        if what in ("freeze", "freeze all"):
            frozen = {name for name in params if what == "freeze all" or freezes(kind, name)}
            for one in optimizers:
                for name in frozen:
                    one.state.pop(params[name], None)
        elif what == "unfreeze":
            frozen = set()
        elif what in ("train", "lack", "lack, may skip"):
            for name, grad in tree(kind, step + 1).items():
                params[name].grad = None if name in frozen or ("lack" in what and misses(name)) else grad
            for one in optimizers:
                one.step()
        seen.append({name: p.detach().clone() for name, p in params.items()})
    return seen


def spec(preset: str, units: str, paths: Iterable[str], **more: Any) -> Spec:
    mesh, placement = mesh_and_placement(preset)
    found = [unit for unit in UNITS[units] if any(p.split(".")[0] in unit or p in unit for p in paths)]
    labels = {pattern: label for pattern, label in LABELS.items() if pattern != "norm" or "norm" in paths}
    return Spec(mesh, placement, units=found, labels=labels, **more)


def played(kind: str, presets: tuple[str, str], story: Iterable[str], folder: str, overlap: bool) -> list[Tree]:
    """The same on ranks."""
    start = tree(kind, 0)
    more = {"schedule": Schedule(overlap_update=overlap)}
    state = fsdp.shard(start, spec(presets[0], "by name", start, **more), optimizer(kind))
    trained = {*start}
    seen, moves = [], 0
    for step, what in enumerate(story):
        if what in ("freeze", "freeze all"):
            chosen = FROZEN if kind != "muon" else FROZEN[:1]
            state = fsdp.freeze(state, *(chosen if what == "freeze" else ["*"]))
            trained = {name for name in start if what == "freeze" and not freezes(kind, name)}
        elif what == "unfreeze":
            state, trained = fsdp.unfreeze(state, "*"), {*start}
        elif what == "move":
            moves += 1
            to = spec(presets[moves % 2], ("by name", "woven")[moves % 2], start, **more)
            state = fsdp.redistribute(state, to.with_trainable(dict(state.spec.trainable)))
        elif what == "save":
            path = fsdp.save(state, f"{folder}/{step}")
            state = fsdp.load(path, state.spec, optimizer(kind))
        elif what == "carry":
            fresh = fsdp.shard(fsdp.full_params(state), state.spec, optimizer(kind))
            state = fsdp.load_optimizer_state(fresh, fsdp.optimizer_state(state), steps=int(state.count))
        else:
            grads = {name: g if name in trained else None for name, g in tree(kind, step + 1).items()}
            if what in ("lack", "lack, may skip", "skip"):
                grads |= {name: None for name in grads if misses(name)}
            if what == "skip":
                grads = {name: None if g is None else torch.full_like(g, torch.nan) for name, g in grads.items()}
            state = (T.skip_nonfinite(fsdp.step) if "skip" in what else fsdp.step)(fsdp.reduce(state, grads))
        assert {path for path in fsdp.optimizer_state(state) if path} == trained
        seen.append(fsdp.full_params(state))
    return seen


def differ(found: Tree, wanted: Tree) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - p).abs().max()) for name, p in wanted.items())


WAYS = [("zero3", "zero1"), ("hfsdp", "zero3"), ("ddp", "hsdp"), ("zero2", "hfsdp")]
ROWS = [(kind, presets, overlap) for kind in KINDS for presets in WAYS for overlap in (False, True)]
QUICK = [
    (kind, WAYS[kind == "nadam adamw"], i % 2 == 0)
    for i, kind in enumerate(("own sgd", "muon pair", "nadam adamw", "rooted"))
]


@pytest.mark.parametrize(("kind", "presets", "overlap"), marked(ROWS, QUICK))
def test_whatever_happens_weights_are_torchs(
    kind: str, presets: tuple[str, str], overlap: bool, tmp_path: Path
) -> None:
    wanted = plainly(kind, STORY)
    ranks = max(map(ranks_of, presets))
    for seen in launch(played, (kind, presets, STORY, str(tmp_path), overlap), nprocs=ranks):
        for i, (mine, right) in enumerate(zip(seen, wanted, strict=True)):
            assert differ(mine, right) < 1e-9, (i, STORY[i])


def begun(kind: str) -> fsdp.State:
    """After one step in which some leaves got no gradient."""
    state = fsdp.shard(tree(kind, 0), spec("zero3", "by name", tree(kind, 0)), optimizer(kind))
    return fsdp.step(fsdp.reduce(state, {name: None if misses(name) else g for name, g in tree(kind, 1).items()}))


def test_counts_of_missed_steps_go_along_and_go_away() -> None:
    def missed(state: fsdp.State) -> dict[str, int]:
        found = {path: some.get("default.missed") for path, some in fsdp.optimizer_state(state).items()}
        return {path: int(n) for path, n in found.items() if n is not None}

    state = begun("muon adamw")
    counts = missed(state)  # of all of adamw's leaves in units in which some leaf, of whichever optimizer, missed one
    assert counts == {"a.bias": 0, "b.bias": 1}
    kept = fsdp.optimizer_state(state)
    fresh = fsdp.shard(tree("muon adamw", 0), state.spec, optimizer("muon adamw"))
    assert missed(fsdp.load_optimizer_state(fresh, kept)) == counts
    without = {path: {n: t for n, t in some.items() if "missed" not in n} for path, some in kept.items()}
    assert missed(fsdp.load_optimizer_state(state, without)) == {}
    assert missed(fsdp.load_optimizer_state(state, without, partial=True)) == counts


def compiled(kind: str) -> float:
    """A compiled step beside an eager one, after leaves were frozen."""
    state = fsdp.freeze(begun(kind), *(FROZEN if kind != "muon" else FROZEN[:1]))
    grads = {name: None if freezes(kind, name) else g for name, g in tree(kind, 2).items()}
    expected = fsdp.full_params(fsdp.step(fsdp.reduce(copy.deepcopy(state), grads)))
    state, _ = T.compile(lambda state, grads: (fsdp.step(fsdp.reduce(state, grads)), ()), "aot_eager")(state, grads)
    return differ(fsdp.full_params(state), expected)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "muon adamw" else pytest.mark.large) for k in IN_GRAPHS]
)
def test_a_compiled_step_goes_on_after_freeze(kind: str) -> None:
    assert max(launch(compiled, (kind,), nprocs=2 if FULL else 1, processes=True)) < 1e-12


BY_BUCKET = [kind for kind in IN_GRAPHS if "pair" not in kind and "own" not in kind]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if " " in k else pytest.mark.large) for k in BY_BUCKET])
@each_rank(2)
def test_an_update_in_parts_is_the_same(kind: str) -> None:
    """Updates of one bucket after the other, as lanes on GPUs have them beside the backward; and one of all."""
    assert optimizer(kind).by_bucket
    state = fsdp.finish_reductions(fsdp.reduce(begun(kind), tree(kind, 2)))
    other = fsdp.finish_reductions(fsdp.reduce(begun(kind), tree(kind, 2)))
    for name in reversed(other.layout.trainable):
        main, opt = update(other, other.grads, {name: other.main[name]}, None)
        assert main[name].local is other.main[name].local
        assert opt is other.opt or not other.optimizer.by_bucket
    found = fsdp.full_params(fsdp.step(state))
    mine = {path: p.clone() for b in other.main.values() for path, p in extend.gather_leaves(b).items()}
    assert differ(mine, found) < 1e-12


# ---------------------------------------------------------------- another world


def written(kind: str, folder: str) -> Tree:
    """Three steps, in which some leaves missed one, and one was skipped."""
    state = fsdp.shard(tree(kind, 0), spec("zero3", "by name", tree(kind, 0)), optimizer(kind))
    for step, lacks in enumerate((False, True, False)):
        grads = {name: None if lacks and misses(name) else g for name, g in tree(kind, step + 1).items()}
        state = fsdp.step(fsdp.reduce(state, grads))
    state = fsdp.step(fsdp.reduce(state, tree(kind, 9)), skip=True)
    fsdp.save(state, folder)
    return fsdp.optimizer_state(state)


def read(kind: str, folder: str, preset: str) -> tuple[Tree, Tree]:
    state = fsdp.load(folder, spec(preset, "woven", tree(kind, 0)), optimizer(kind))
    kept = fsdp.optimizer_state(state)
    return kept, fsdp.full_params(fsdp.step(fsdp.reduce(state, tree(kind, 5))))


WORLDS = [(kind, preset, ranks) for kind in KINDS for preset, ranks in (("zero3", 1), ("hfsdp", 4), ("zero1", 3))]


@pytest.mark.parametrize(("kind", "preset", "ranks"), marked(WORLDS, [("muon adamw", "hfsdp", 4)]))
def test_another_world_reads_it_without_a_template(kind: str, preset: str, ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "x")
    wanted = launch(written, (kind, folder), nprocs=2)[0]
    weights = plainly(kind, ("train", "lack", "train", "nothing", "train"))[-1]
    for kept, found in launch(read, (kind, folder, preset), nprocs=ranks):
        assert differ(found, weights) < 1e-9
        for path, some in wanted.items():
            lacks = {name for name in some if name not in kept[path]}
            assert not any(some[name].any() for name in lacks), (path, lacks)  # counts of steps that none has missed
            assert all(torch.equal(kept[path][name], some[name]) for name in {*some} - lacks), path


class TogetherAtFullRate(ByParameter):
    """All leaves share a norm, but at a rate of one only."""

    def of_group(self, params: list[Any], group: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in params]).norm() if group["lr"] >= 1 else 1.0
        for p in params:
            p.sub_(group["lr"] * p.grad / norm)


def test_a_class_whose_rate_changes_is_observed_at_its_first_rate_too() -> None:
    with pytest.raises(fsdp.SpecError, match="couples leaves: stack takes tensors of several leaves"):
        fsdp.from_torch(TogetherAtFullRate, lr=lambda count: 1.0 / (1.0 + count))


class KeepsRates(ByParameter):
    """Keeps the size of a step by its number in the instance, as RAdam of torch_optimizer does for ten steps: a leaf
    that comes late finds those of a rate that was."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self._sizes: dict[int, float] = {}

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        count = s["step"] = s.get("step", 0) + 1
        p.sub_(g, alpha=self._sizes.setdefault(count, group["lr"] / count))


class MeansRates(ByParameter):
    """Goes by the mean of the last rates, which it keeps in a list of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self._rates: list[float] = []

    def of_group(self, params: list[Any], group: Any) -> None:
        self._rates.append(group["lr"])
        last = self._rates[-4:]
        for p in params:
            p.sub_(p.grad / p.grad.norm(), alpha=sum(last) / len(last))


@pytest.mark.parametrize(("cls", "by"), [(KeepsRates, "all"), (MeansRates, "all"), (MeansRates, "leaf")])
def test_rates_that_an_instance_keeps_from_before_a_change_are_seen(cls: type, by: str) -> None:
    def begun(lr: Any) -> str:
        try:
            fsdp.from_torch(cls, by=by, lr=lr)
        except fsdp.SpecError as error:
            return str(error)
        return "taken"

    assert begun(0.01) == "taken"  # the rate stays: what is kept is what would be computed
    assert f"{cls.__name__}): a new instance that is given" in begun(lambda count: 0.01 / (1 + count))
