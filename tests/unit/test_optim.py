"""adamw, sgd and hand-written pairs, against torch.optim in float64: the same numbers to 1e-12."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from support.torch_optimizers import ByParameter

import functional_fsdp as fsdp
from functional_fsdp import Optimizer, Spec, SpecError, StaleStateError, TreeError
from functional_fsdp import transforms as T
from functional_fsdp._common.device import as_rate
from functional_fsdp._optim import adamw, sgd
from functional_fsdp._optim_extra.prove import Kept, states_of
from functional_fsdp.transforms._compile.whole_step import CompiledStep

Tree = dict[str, Any]
SHAPES = {
    "blocks.0.w": (7, 3),
    "blocks.0.bias": (5,),
    "blocks.1.w": (4, 4),
    "blocks.1.bias": (1,),
    "norm": (9,),
    "scale": (),
}
LABELS = {"*.bias": "bias", "norm": "norm"}
STEPS = 8


def tree(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def spec(**kwargs: Any) -> Spec:
    return Spec(fsdp.local_mesh(), units=["blocks.*", "norm", "scale"], **kwargs)


def label(name: str) -> str:
    return "bias" if name.endswith("bias") else "norm" if name == "norm" else "default"


def ours(optimizer: Any, steps: int = STEPS, **kwargs: Any) -> fsdp.State:
    state = fsdp.shard(tree(0), spec(labels=LABELS, **kwargs), optimizer)
    for i in range(steps):
        state = fsdp.step(fsdp.reduce(state, tree(i + 1)))
    return state


def small(optimizer: Any, numel: int = 4, **placed: Any) -> fsdp.State:
    """One leaf of ones."""
    return fsdp.shard({"w": torch.ones(numel)}, Spec(fsdp.local_mesh(), **placed), optimizer)


def stepped(state: fsdp.State, *gradients: float) -> fsdp.State:
    for gradient in gradients:
        grads = {path: torch.full_like(w, gradient) for path, w in fsdp.full_params(state).items()}
        state = fsdp.step(fsdp.reduce(state, grads))
    return state


def zeros_like(main: Tree) -> Tree:
    return pytree.tree_map(torch.zeros_like, main)


def theirs(
    make: Callable[..., torch.optim.Optimizer],
    settings: dict[str, dict[str, Any]] | None = None,
    rate: Callable[[int], float] | None = None,
) -> dict[str, torch.Tensor]:
    params = {name: torch.nn.Parameter(p) for name, p in tree(0).items()}
    groups: dict[str, list[torch.nn.Parameter]] = {}
    for name, p in params.items():
        groups.setdefault(label(name), []).append(p)
    optimizer = make([{"params": ps, **(settings or {}).get(which, {})} for which, ps in groups.items()])
    for i in range(STEPS):
        for name, grad in tree(i + 1).items():
            params[name].grad = grad
        for group in optimizer.param_groups if rate else ():
            assert rate is not None
            group["lr"] = rate(i)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def equal(state: fsdp.State, wanted: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    found = fsdp.full_params(state)
    assert found.keys() == wanted.keys()
    for name, p in wanted.items():
        assert found[name].dtype == p.dtype
        torch.testing.assert_close(found[name], p, rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------- adamw


def schedule(i: int) -> float:
    return 1e-2 * min(1.0, (i + 1) / 3) * 0.9**i


def always(number: float) -> Any:
    """A setting that follows the count, and stays."""
    return lambda count: number + 0.0 * count.double()


ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
PLAIN: list[tuple[Any, Any, dict[str, Any]]] = [  # with the same arguments
    *((fsdp.adamw, ADAMW, given) for given in (
        {}, {"lr": 3e-2, "weight_decay": 0.0}, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3})),
    *((fsdp.sgd, SGD, {"lr": 1e-2, **more}) for more in (
        {}, {"weight_decay": 0.1}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.7, "nesterov": True, "weight_decay": 0.1})),
]  # fmt: skip
DECAYED = partial(ADAMW, lr=1e-2, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1)
NORM: dict[str, dict[str, Any]] = {"norm": {"eps": 1e-3, "betas": (0.7, 0.9)}, "bias": {"weight_decay": 0.3}}
MOVED: dict[str, dict[str, Any]] = {"norm": {"momentum": 0.0}, "bias": {"momentum": 0.5, "weight_decay": 0.2}}
MOMENTA: dict[str, Any] = {"norm": 0.0, "bias": 0.5, "default": 0.9}
BETAS: Any = {"norm": (0.7, 0.9), "default": [0.8, 0.95]}
#: optimizers, the class of torch that is theirs, what it has in each group, and its rate by step
EQUAL: dict[str, tuple[list[Any], Any, dict[str, dict[str, Any]], Any]] = {
    **{f"{made.__name__} {given}": ([made(**given)], partial(its, **given), {}, None) for made, its, given in PLAIN},
    "adamw by label": (
        [fsdp.adamw(lr={"norm": 1e-3, "default": 2e-2, "bias": 5e-3}, weight_decay={"bias": 0.0, "default": 0.2})],
        partial(ADAMW, weight_decay=0.2, lr=2e-2),
        {"bias": {"weight_decay": 0.0, "lr": 5e-3}, "norm": {"lr": 1e-3}}, None),
    "a rate that returns a number": ([fsdp.adamw(lr=lambda count: schedule(int(count)))], ADAMW, {}, schedule),  # type: ignore[arg-type]
    "betas by label": (
        [fsdp.adamw(lr=rate, betas=BETAS) for rate in (1e-2, {"norm": 1e-2, "default": 1e-2})],
        partial(ADAMW, lr=1e-2, betas=(0.8, 0.95)), {"norm": {"betas": (0.7, 0.9)}}, None),
    "any number of adamw, by label and by the count": (  # which kernel does it may differ
        [fsdp.adamw(lr=1e-2, betas={"norm": (0.7, always(0.9)), "default": (0.8, 0.95)},
                    eps={"norm": 1e-3, "default": always(1e-5)}, weight_decay={"bias": always(0.3), "default": 0.1}),
         fsdp.adamw(lr=1e-2, betas={"norm": (0.7, 0.9), "default": (0.8, 0.95)}, eps={"norm": 1e-3, "default": 1e-5},
                    weight_decay={"bias": 0.3, "default": 0.1})], DECAYED, NORM, None),
    "any number of sgd, by label and by the count": (
        [fsdp.sgd(lr=1e-2, momentum=MOMENTA, weight_decay={"bias": 0.2, "default": 0.1}),
         fsdp.sgd(lr=1e-2, momentum={**MOMENTA, "bias": always(0.5)},
                  weight_decay={"bias": always(0.2), "default": 0.1})],
        partial(SGD, lr=1e-2, momentum=0.9, weight_decay=0.1), MOVED, None),
    "sgd by label and by the count": (
        [fsdp.sgd(lambda count: 1e-2 * 0.9 ** count.double(), 0.9, weight_decay={"bias": 0.0, "default": 0.2})],
        partial(SGD, lr=1.0, momentum=0.9, weight_decay=0.2), {"bias": {"weight_decay": 0.0}}, lambda i: 1e-2 * 0.9**i),
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL)
def test_the_numbers_are_those_of_torch(case: str) -> None:
    optimizers, make, settings, rate = EQUAL[case]
    wanted = theirs(make, settings, rate)
    for optimizer in optimizers:
        equal(ours(optimizer), wanted)


def test_a_rate_that_is_a_function_of_the_count() -> None:
    seen: list[torch.Tensor] = []

    def rate(count: torch.Tensor) -> torch.Tensor:
        seen.append(count.clone())
        c = count.double()
        return 1e-2 * ((c + 1) / 3).clamp(max=1) * 0.9**c

    equal(ours(fsdp.adamw(lr=rate)), theirs(torch.optim.AdamW, rate=schedule))
    assert {int(c) for c in seen} == set(range(STEPS))
    assert all(c.dtype is torch.int64 and c.shape == () for c in seen)


def test_functions_by_label() -> None:
    rates: dict[str, Any] = {
        "default": lambda count: 1e-2 / (1 + count.double()),
        "bias": 5e-3,
        "norm": lambda count: 0.0 * count.double(),
    }
    state = ours(fsdp.adamw(lr=rates, weight_decay=0.1))
    assert torch.equal(fsdp.full_params(state)["norm"], tree(0)["norm"])

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, weight_decay=0.1)

    constant = theirs(optimizer, {"bias": {"lr": 5e-3}})
    falling = theirs(optimizer, rate=lambda i: 1e-2 / (1 + i))
    norm = {"norm": tree(0)["norm"]}
    equal(state, {name: {"bias": constant, "norm": norm, "default": falling}[label(name)][name] for name in SHAPES})


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (fsdp.adamw(weight_decay={"bias": 0.0, "default": 0.1}, lr={"norm": 1.0}),
         r"lr=\{'norm': 1\.0\}: nothing for the label '(default|bias)'\. Add"),
        (fsdp.sgd(weight_decay={"bias": 0.0}),
         r"weight_decay=\{'bias': 0\.0\}: nothing for the label 'default'\. Add a number"),
        (fsdp.adamw(betas={"norm": (0.7, 0.9)}),
         r"betas=\{'norm': \(0\.7, 0\.9\)\}: nothing for the label '(default|bias)'"),
    ],
)  # fmt: skip
def test_a_label_without_a_setting(optimizer: Any, text: str) -> None:
    """Found at `shard`, on every rank: in `step` some labels would have been updated, and only on some ranks."""
    with pytest.raises(SpecError, match=text):
        fsdp.shard(tree(0), spec(labels=LABELS), optimizer)


def test_a_momentum_that_follows_the_count() -> None:
    """A schedule of a setting other than the rate is read in every step."""
    seen: list[int] = []

    def momentum(count: torch.Tensor) -> torch.Tensor:
        seen.append(int(count))
        return 0.1 * count.double()

    state = stepped(small(fsdp.sgd(1.0, momentum)), 1.0, 1.0, 1.0)  # the moving average: 1, 0.1 + 1, 0.2 × 1.1 + 1
    assert seen == [0, 1, 2]
    assert fsdp.full_params(state)["w"][0].item() == pytest.approx(1 - (1 + 1.1 + 1.22))


DESCENT = Optimizer(
    lambda main: (), lambda grads, opt, main, count: (pytree.tree_map(lambda p, g: p - 0.1 * g, main, grads), opt)
)
NAN = float("nan")


#: optimizers, what they are given, and what is said of it
NUMBERS: list[tuple[Any, dict[str, Any], str]] = [
    *((make, {name: number}, rf"{make.__name__}: {name} is {number!r}; expected a finite number of at least 0")
      for make, names in ((fsdp.adamw, ("lr", "eps", "weight_decay")), (fsdp.sgd, ("lr", "momentum", "weight_decay")))
      for name in names
      for number in (-1e-3, NAN, float("inf"), -float("inf"), True, "fast", None)),
    (fsdp.adamw, {"lr": {"norm": -1.0, "default": 1}}, r"adamw: lr for the label 'norm' is -1\.0; expected a finite"),
    (fsdp.sgd, {"lr": -1}, "sgd: lr is -1; expected"),
    (fsdp.adamw, {"eps": {"norm": -1e-8}}, "adamw: eps for the label 'norm' is -1e-08; expected a finite number"),
    (fsdp.sgd, {"weight_decay": {"default": NAN}}, "sgd: weight_decay for the label 'default' is nan; expected"),
    (fsdp.adamw, {"betas": (0.9, 1.0)}, r"adamw: betas\[1\] is 1\.0; expected a number in \[0, 1\)"),
    (fsdp.adamw, {"betas": (-0.1, 0.9)}, r"adamw: betas\[0\] is -0\.1; expected a number in \[0, 1\)"),
    (fsdp.adamw, {"betas": (NAN, 0.9)}, r"adamw: betas\[0\] is nan"),
    (fsdp.adamw, {"betas": 0.9}, r"adamw: betas is 0\.9; expected a pair of numbers, as \(0\.9, 0\.999\)"),
    (fsdp.adamw, {"betas": (0.9,)}, r"adamw: betas is \(0\.9,\); expected a pair"),
    (fsdp.adamw, {"betas": {"norm": (0.9, 2)}}, r"adamw: betas for the label 'norm'\[1\] is 2; expected a number in"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kwargs", "text"), NUMBERS)
def test_numbers_that_no_optimizer_can_have(make: Any, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make(**kwargs)


def test_numbers_at_the_edge_are_fine() -> None:
    fsdp.adamw(lr=0, betas=(0, 0.0), eps=0.0, weight_decay={"a": 0})
    fsdp.sgd(lr=torch.tensor(0.1), momentum=1.0, weight_decay=0)  # type: ignore[arg-type]


MISSPELT: list[tuple[Any, str, Any]] = [  # an optimizer, its setting, and what that has for labels
    (fsdp.adamw, "lr", 1.0), (fsdp.adamw, "betas", (0.9, 0.9)), (fsdp.adamw, "weight_decay", 0.0),
    (fsdp.adamw, "eps", 0.0), (fsdp.sgd, "momentum", 0.0), (fsdp.sgd, "lr", lambda count: count),
    (fsdp.sgd, "weight_decay", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "value"), MISSPELT)
def test_a_misspelt_label(make: Any, name: str, value: Any) -> None:
    optimizer = make(**{name: {"nrom": value, "default": value}})
    said = (
        f"{make.__name__}({name}): no leaf has the label 'nrom'. The labels are 'bias', 'default', 'norm'; Spec(labels="
    )
    for call in (
        lambda: fsdp.shard(tree(0), spec(labels=LABELS), optimizer),
        lambda: fsdp.init(Labelled, Spec(fsdp.local_mesh(), labels=LABELS), optimizer),
        lambda: fsdp.abstract_state(tree(0), Spec({"data": 2}, labels=LABELS), optimizer),
    ):
        with pytest.raises(SpecError, match=re.escape(said)):
            call()


class Labelled(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.norm, self.sub = torch.nn.LayerNorm(2), torch.nn.Linear(2, 2)


def test_labels_that_only_one_side_names() -> None:
    """No setting names a label of the spec; a setting names one whose leaves are all frozen."""
    fsdp.shard(tree(0), spec(labels=LABELS), fsdp.adamw(lr=1e-3))
    rates = {"norm": 1.0, "default": 1.0}
    fsdp.shard(tree(0), spec(labels=LABELS, trainable={"norm": False}), fsdp.adamw(lr=rates))


# -------------------------------------------------------------------------------- sgd


def test_sgd_without_momentum_keeps_no_state() -> None:
    assert ours(fsdp.sgd(lr=1e-2)).opt == {}
    assert len(pytree.tree_leaves(ours(fsdp.sgd(lr=1e-2, momentum=0.9)).opt)) == 4


# -------------------------------------------------------------------------------- what it touches


def test_frozen_leaves_have_no_state_and_do_not_move() -> None:
    state = ours(fsdp.adamw(lr=1.0, weight_decay=1.0), trainable={"norm": False, "blocks.0": False})
    after, before = fsdp.full_params(state), tree(0)
    for name in SHAPES:
        assert torch.equal(after[name], before[name]) == (name == "norm" or name.startswith("blocks.0"))
    assert set(state.opt.mean) == {"blocks.1", "scale"}


def test_empty_and_scalar_leaves() -> None:
    params = {"u": {"e": torch.empty(0, 3), "s": torch.tensor(2.0), "w": torch.ones(2)}}
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), labels={"*.e": "empty"}), fsdp.sgd(lr=0.5, momentum=0.9))
    state = fsdp.step(fsdp.reduce(state, pytree.tree_map(torch.ones_like, params)))
    after = fsdp.full_params(state)["u"]
    assert (after["e"].shape, after["s"].item(), after["w"].tolist()) == ((0, 3), 1.5, [0.5, 0.5])


def test_padding_stays_zero() -> None:
    state = ours(fsdp.adamw(lr=0.1))
    for name, bucket in state.layout.buckets.items():
        local = state.main[name].local
        assert local.numel() == bucket.numel
        held = sum(local[leaf.offset : leaf.offset + leaf.numel].abs().sum() for leaf in bucket.leaves)
        torch.testing.assert_close(local.abs().sum(), torch.as_tensor(held), rtol=1e-12, atol=0)


def test_addresses_never_change() -> None:
    state = fsdp.shard(tree(0), spec(), fsdp.adamw())
    places = [t.data_ptr() for t in pytree.tree_leaves((state.main, state.opt, state.count))]
    for i in range(3):
        state = fsdp.step(fsdp.reduce(state, tree(i + 1)))
    assert [t.data_ptr() for t in pytree.tree_leaves((state.main, state.opt, state.count))] == places
    assert state.count.item() == 3


# -------------------------------------------------------------------------------- custom pairs


def lion(lr: float = 1e-2, b1: float = 0.9, b2: float = 0.99) -> Optimizer:
    """A pure pair: new trees, nothing in place."""

    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        new = pytree.tree_map(lambda p, g, m: p - lr * torch.sign(b1 * m + (1 - b1) * g), main, grads, opt)
        return new, pytree.tree_map(lambda g, m: b2 * m + (1 - b2) * g, grads, opt)

    return Optimizer(zeros_like, update)


def lion_by_hand() -> dict[str, torch.Tensor]:
    params, momentum = tree(0), {name: torch.zeros_like(p) for name, p in tree(0).items()}
    for i in range(STEPS):
        for name, g in tree(i + 1).items():
            params[name] = params[name] - 1e-2 * torch.sign(0.9 * momentum[name] + (1 - 0.9) * g)
            momentum[name] = 0.99 * momentum[name] + (1 - 0.99) * g
    return params


@pytest.mark.parametrize("form", ["Optimizer", "tuple", "object"])
def test_a_pair_in_any_form(form: str) -> None:
    class Object:
        init, update = (staticmethod(f) for f in lion())

    pair: Any = {"Optimizer": lion(), "tuple": tuple(lion()), "object": Object()}[form]
    equal(ours(pair), lion_by_hand())


def test_a_pair_in_place_is_as_good() -> None:
    def update(grads: Tree, opt: Any, main: Tree, count: torch.Tensor) -> tuple[Tree, Any]:
        return pytree.tree_map(lambda p, g: p.sub_(0.01 * g), main, grads), opt

    in_place = ours(Optimizer(lambda main: (), update))
    equal(in_place, theirs(lambda groups: torch.optim.SGD(groups, lr=0.01)))


def test_a_pair_that_moves_its_history_along() -> None:
    """A pure update may return old tensors in other places: delayed gradients, a ring of past ones."""

    def init(main: Tree) -> tuple[Tree, Tree, Tree]:
        return zeros_like(main), zeros_like(main), zeros_like(main)

    def update(grads: Tree, opt: Any, main: Tree, count: torch.Tensor) -> tuple[Tree, Any]:
        return pytree.tree_map(lambda p, g: p - g, main, opt[2]), (grads, opt[0], opt[1])

    state = stepped(small(Optimizer(init, update)), *(10.0**i for i in range(1, 6)))
    history = [fsdp.full_params(state)["w"][0].item(), *(past["w"].local[0].item() for past in state.opt)]
    assert history == [1 - 110.0, 100000.0, 10000.0, 1000.0]


def test_a_pair_that_swaps_weights_and_state() -> None:
    """As lookahead and schedule-free methods do."""

    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        return opt, main

    state = stepped(small(Optimizer(zeros_like, update), 2), 1.0)
    assert fsdp.full_params(state)["w"].tolist() == [0.0, 0.0]
    assert state.opt["w"].local[:2].tolist() == [1.0, 1.0]


def test_a_pair_sees_trees_over_trainable_buckets() -> None:
    seen: list[Any] = []

    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        seen.append((set(grads), set(main), pytree.tree_structure(grads) == pytree.tree_structure(main), count.item()))
        return main, opt

    ours(Optimizer(lambda main: main, update), steps=2, trainable={"norm": False})
    names = {"blocks.0", "blocks.1", "scale"}
    assert [entry[:2] for entry in seen] == [(names, names)] * 2
    assert [entry[3] for entry in seen] == [0, 1]


def test_labels_of_a_buffer_for_hand_written_pairs() -> None:
    state = fsdp.shard(tree(0), spec(labels=LABELS))
    found = {name: [(which, view.numel()) for which, view in buffer.by_label()] for name, buffer in state.main.items()}
    assert found["blocks.0"] == [("default", 128), ("bias", 128)]
    assert found["norm"] == [("norm", 128)]
    view = state.main["blocks.0"].by_label()[1][1]
    assert torch.equal(view[:5], tree(0)["blocks.0.bias"])
    assert view.untyped_storage().data_ptr() == state.main["blocks.0"].local.untyped_storage().data_ptr()


# -------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("wrong", [3, "adamw", (1, 2), (lambda m: m,), torch.optim.AdamW, {"init": 1}])
def test_something_else_than_a_pair(wrong: Any) -> None:
    with pytest.raises(SpecError, match=r"optimizer: expected a pair \(init, update\), as fsdp\.adamw"):
        small(wrong)


def identity(grads: Tree, opt: Any, main: Tree, count: torch.Tensor) -> tuple[Any, Any]:
    return main, opt


def mapped(change: Callable[[torch.Tensor], Any]) -> Callable[[Tree], Tree]:
    return lambda tree: pytree.tree_map(change, tree)


#: what an update returns of new main weights and of its state, and what is said of that
BAD_UPDATES: dict[str, tuple[Callable[[Tree], Any], Callable[[Tree], Any], str]] = {
    "main structure": (lambda main: [*main.values()], dict, "another structure for main"),
    "main shape": (mapped(lambda p: p[:3]), dict, r"main of shape \(3,\)"),
    "main dtype": (mapped(torch.Tensor.double), dict, "main.* dtype torch.float64; expected"),
    "opt structure": (dict, lambda opt: {"more": opt}, "another structure for opt"),
    "opt shape": (dict, mapped(lambda m: m[:3]), r"opt of shape \(3,\)"),
    "opt dtype": (dict, mapped(torch.Tensor.double), "opt.* dtype torch.float64; expected"),
    "opt type": (dict, mapped(lambda m: 3), "opt"),
}


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_an_update_that_returns_something_else_changes_nothing(case: str) -> None:
    """Everything is validated before anything is written: the state before the step stays good."""
    of_main, of_opt, text = BAD_UPDATES[case]
    broken = [True]

    def update(grads: Tree, opt: Any, main: Tree, count: torch.Tensor) -> tuple[Any, Any]:
        new = pytree.tree_map(lambda p, g: p - g, main, grads)
        return (of_main(new), of_opt(opt)) if broken else (main, opt)

    base = small(Optimizer(zeros_like, update))
    with pytest.raises(TreeError, match=text):
        stepped(base, 1.0)
    broken.clear()
    assert fsdp.full_params(base)["w"].tolist() == [1.0] * 4
    assert stepped(base, 1.0).count.item() == 1


# -------------------------------------------------------------------------------- values


def test_optimizers_are_values() -> None:
    rate = lambda count: 1e-3 * count  # noqa: E731
    for make in (
        lambda: fsdp.adamw(lr=rate, weight_decay={"a": 0.1, "default": 0.0}),
        lambda: fsdp.sgd(lr=0.1, momentum=0.9),
        lambda: fsdp.adamw(betas=BETAS),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
    assert fsdp.adamw(lr=0.1) != fsdp.adamw(lr=0.2)
    assert fsdp.sgd(lr=0.1) != fsdp.sgd(lr=0.1, nesterov=True, momentum=0.1)


BOTH = pytest.mark.parametrize(
    "optimizer", [fsdp.adamw(lr=1e-2), fsdp.sgd(lr=1e-2, momentum=0.9)], ids=["adamw", "sgd"]
)
MIXED = {"blocks.0.*": fsdp.Precision(main=torch.bfloat16), "norm": fsdp.Precision(main=torch.float32)}


@BOTH
@pytest.mark.parametrize("precision", [None, MIXED], ids=["one dtype", "several"])
def test_an_update_by_bucket_is_the_update_of_all(optimizer: Any, precision: Any) -> None:
    assert optimizer.by_bucket
    state = fsdp.shard(tree(0), spec(precision=precision), optimizer)
    apart = fsdp.shard(tree(0), spec(precision=precision), optimizer)
    grads = pytree.tree_map(lambda w: w + 1, state.main)
    optimizer.update(grads, state.opt, state.main, state.count)
    for name in [*apart.main]:
        chosen = {name: apart.main[name]}
        optimizer.update({name: grads[name]}, apart.opt, chosen, apart.count)
    together, one_by_one = (pytree.tree_leaves((one.main, one.opt)) for one in (state, apart))
    assert all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=True))


@BOTH
def test_a_kernel_sees_one_dtype_at_a_time(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs torch's fused kernels refuse lists of several."""
    module, name = (adamw, "fused_adamw_") if isinstance(optimizer, adamw.AdamW) else (sgd, "fused_sgd_")
    kernel, seen = getattr(module, name), []

    def noted(*args: Any, **kwargs: Any) -> None:
        seen.append({t.dtype for some in args[:3] for t in some})
        kernel(*args, **kwargs)

    monkeypatch.setattr(module, name, noted)
    state = fsdp.shard(tree(0), spec(precision=MIXED), optimizer)
    fsdp.step(fsdp.reduce(state, tree(1)))
    assert all(len(dtypes) == 1 for dtypes in seen)
    taken = {torch.float32, torch.float64} | ({torch.bfloat16} if module is adamw else set())
    assert set().union(*seen) == taken
    assert len(seen) == len(taken)


# -------------------------------------------------------------------------------- skipped steps


@pytest.mark.parametrize("optimizer", [fsdp.adamw(lr=1e-2), fsdp.sgd(lr=1e-2, momentum=0.9), DESCENT])
def test_a_bool_may_say_whether_to_skip(optimizer: Any) -> None:
    found = []
    for skips in ([False, True, False], [torch.tensor(k == 1) for k in range(3)], [None, torch.tensor(True), None]):
        state = fsdp.shard(tree(0), spec(), optimizer)
        for i, skip in enumerate(skips):
            state = fsdp.step(fsdp.reduce(state, tree(i + 1)), skip=skip)
        assert int(state.count) == 2
        found.append(fsdp.full_params(state))
    for other in found[1:]:
        assert all(torch.equal(other[name], p) for name, p in found[0].items())


def test_a_bool_may_say_so_in_a_traced_step() -> None:
    torch._dynamo.reset()
    state = small(fsdp.sgd(lr=1.0), 3)

    def one(state: fsdp.State, grads: Tree, skip: bool) -> fsdp.State:
        return fsdp.step(fsdp.reduce(state, grads), skip=skip)

    step: Any = torch.compile(one, backend="eager", fullgraph=True)
    for skip, weight, count in ((True, 1.0, 0), (False, 0.0, 1)):
        state = step(state, {"w": torch.ones(3)}, skip)
        assert fsdp.full_params(state)["w"].tolist() == [weight] * 3
        assert int(state.count) == count


@pytest.mark.parametrize(
    ("skip", "text"),
    [
        (1, "step: skip has 1; expected a bool, or a tensor of shape"),
        ("yes", "step: skip has 'yes'; expected a bool"),
        (torch.ones(()), r"step: skip has shape \(\) and dtype torch\.float32"),
        (torch.tensor([True]), r"step: skip has shape \(1,\) and dtype torch\.bool"),
        (torch.empty((), dtype=torch.bool, device="meta"), "step: skip is on meta; expected the state's device, cpu"),
    ],
)
def test_what_cannot_say_whether_to_skip(skip: Any, text: str) -> None:
    state = fsdp.shard(tree(0), spec(), fsdp.sgd())
    ready = fsdp.reduce(state, tree(1))
    with pytest.raises(TreeError, match=text):
        fsdp.step(ready, skip=skip)
    assert int(fsdp.step(ready, skip=False).count) == 1


def test_what_a_class_keeps_has_its_own_dtype_or_the_parameters() -> None:
    low, high = torch.bfloat16, torch.float64
    kept = {"own": Kept(False, 0.5, high), "theirs": Kept(False, 0.5, None), "weights": Kept(False, None, None)}
    found = states_of(kept, torch.ones(3, dtype=low))
    assert {name: value.dtype for name, value in found.items()} == {"own": high, "theirs": low, "weights": low}
    assert found["own"].tolist() == [0.5] * 3
    assert found["weights"].tolist() == [1.0] * 3


# -------------------------------------------------------------------------------- what hand-written updates do


def weight_of(state: fsdp.State) -> list[float]:
    return sorted({round(float(one), 4) for w in fsdp.full_params(state).values() for one in w})


def adam(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
    mean = pytree.tree_map(lambda m, g: 0.9 * m + 0.1 * g, opt["mean"], grads)
    square = pytree.tree_map(lambda v, g: 0.99 * v + 0.01 * g * g, opt["square"], grads)
    new = pytree.tree_map(lambda p, m, v: p - 0.1 * m / (v.sqrt() + 1e-8), main, mean, square)
    return new, {"mean": mean, "square": square}


def test_what_init_gives_twice_has_memory_of_its_own() -> None:
    def one_tensor_twice(main: Tree) -> Tree:
        zeros = zeros_like(main)
        return {"mean": zeros, "square": zeros}

    apart = Optimizer(lambda main: {"mean": zeros_like(main), "square": zeros_like(main)}, adam)
    once, twice = (stepped(small(pair), 3.0, 1.0, -2.0) for pair in (apart, Optimizer(one_tensor_twice, adam)))
    assert weight_of(once) == weight_of(twice)


def test_main_weights_in_what_init_gives_are_copied() -> None:
    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        return pytree.tree_map(lambda p, g, a: p - 0.1 * (g + (p - a)), main, grads, opt["anchor"]), opt

    state = small(Optimizer(lambda main: {"anchor": main}, update))
    assert weight_of(stepped(state, 1.0, 1.0)) == [0.81]  # 0.9 - 0.1 * (1 - 0.1)


@pytest.mark.parametrize("whole_step", [False, True])
def test_an_update_may_put_new_buffers_into_its_dicts(whole_step: bool) -> None:
    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        for name in main:
            opt[name] = opt[name].but(opt[name].local + grads[name].local)
            main[name] = main[name].but(main[name].local - 0.1 * opt[name].local)
        return main, opt

    state = small(Optimizer(zeros_like, update))
    places = [leaf.data_ptr() for leaf in pytree.tree_leaves((state.main, state.opt))]

    def step(state: fsdp.State, grad: torch.Tensor) -> fsdp.State:
        return fsdp.step(fsdp.reduce(state, {"w": grad}))

    run = T.compile(step, backend="aot_eager") if whole_step else step
    for _ in range(2):
        state = run(state, torch.ones(4))
    assert weight_of(state) == [0.7]
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves((state.main, state.opt))] == places


class Momentum:
    """In place, bucket by bucket."""

    by_bucket = elementwise = True

    def init(self, main: Tree) -> Tree:
        return {name: b.but(torch.zeros_like(b.local)) for name, b in main.items()}

    def update(self, grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        for name in main:
            opt[name].local.mul_(0.9).add_(grads[name].local)
            main[name].local.add_(opt[name].local, alpha=-0.05)
        return main, opt


class Anew(Momentum):
    """Its state anew, which does not go with `by_bucket`."""

    def update(self, grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        new = {name: opt[name].but(0.9 * opt[name].local + grads[name].local) for name in main}
        for name in main:
            main[name].local.add_(new[name].local, alpha=-0.05)
        return main, {**opt, **new}


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_who_updates_by_bucket_changes_its_state_in_place(kind: str) -> None:
    with pytest.raises(TreeError, match="by_bucket = True, and its update returned other tensors in opt"):
        stepped(small(Anew(), placement=fsdp.zero3("data", memory_kind=kind)), 1.0)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("case", ["skip", "missing"])
def test_members_keep_what_they_had_of_what_is_left_out(kind: str, case: str) -> None:
    placed = Spec(fsdp.local_mesh(), fsdp.zero3("data", memory_kind=kind), units={"a": ["w", "v"]})
    params = {"w": torch.ones(4), "v": torch.ones(4)}
    state = stepped(fsdp.shard(params, placed, fsdp.partition({"default": Momentum()})), 1.0)
    grads = {"w": torch.ones(4), "v": None if case == "missing" else torch.ones(4)}
    state = fsdp.step(fsdp.reduce(state, grads), skip=torch.tensor(True) if case == "skip" else None)
    kept = {path: float(next(iter(found.values()))[0]) for path, found in fsdp.optimizer_state(state).items()}
    moved = case == "missing"
    assert [round(kept[path], 4) for path in ("w", "v")] == [1.9 if moved else 1.0, 1.0]
    assert [round(float(w[0]), 4) for w in fsdp.full_params(state).values()] == [0.855 if moved else 0.95, 0.95]


def test_a_step_whose_update_changed_gradients_and_raised_begins_anew() -> None:
    raises = [True]

    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        for name in main:
            grads[name].local.mul_(0.5)
        if raises[0]:
            raise ValueError("once")
        return pytree.tree_map(lambda p, g: p - g, main, grads), opt

    base = small(Optimizer(lambda main: {}, update))
    state = fsdp.reduce(base, {"w": torch.ones(4)})
    with pytest.raises(ValueError, match="once"):
        fsdp.step(state)
    raises[0] = False
    with pytest.raises(StaleStateError, match="begin again from the state before the step"):
        fsdp.step(state)
    assert weight_of(stepped(base, 1.0)) == [0.5]


def test_a_class_of_torch_that_writes_to_data_and_raises_leaves_a_state_that_says_so() -> None:
    calls = [-1]  # after which it raises: those of the step before this one, which is taken on two small leaves

    class ByData(ByParameter):
        def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
            p.data.add_(g, alpha=-group["lr"])
            calls[0] -= 1
            if calls[0] == 0:
                raise ValueError("half-way")

    state = stepped(small(fsdp.from_torch(ByData, lr=0.1)), 1.0)  # its operations are known from here on
    calls[0] = 2
    with pytest.raises(ValueError, match="half-way"):
        stepped(state, 1.0)
    with pytest.raises(StaleStateError, match="half updated"):
        fsdp.full_params(state)


def test_a_compiled_step_that_is_stopped_leaves_a_state_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    state, model = fsdp.init(lambda: torch.nn.Linear(4, 4), Spec(fsdp.local_mesh()), fsdp.sgd(0.1))
    forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())
    step = T.compile(lambda state, x: fsdp.step(forward_backward(state, x)[0]), backend="aot_eager")
    state = step(state, torch.ones(2, 4))

    @contextmanager
    def stopped(compiled: Any) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(CompiledStep, "_plain", stopped)
    with pytest.raises(KeyboardInterrupt):
        step(state, torch.ones(2, 4))
    with pytest.raises(StaleStateError, match="a compiled step was stopped by KeyboardInterrupt"):
        fsdp.full_params(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_rates_for_kernels_on_gpus_are_float32(dtype: torch.dtype) -> None:
    assert as_rate(torch.ones((), dtype=dtype, device="meta")).dtype is torch.float32
    assert as_rate(torch.ones((), dtype=dtype)).dtype is dtype  # on the CPU a kernel takes each
    assert as_rate(0.1) == 0.1


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_muon_rounds_each_change_to_the_dtype_of_its_own_weights(order: str) -> None:
    shapes = {f"{unit}.w": torch.randn(16, 8, generator=torch.Generator().manual_seed(ord(unit))) for unit in order}
    grads = {path: w.flip(0) for path, w in shapes.items()}

    def after(*narrow: str) -> dict[str, torch.Tensor]:
        precision = {**{f"{unit}.*": fsdp.Precision(main=torch.bfloat16) for unit in narrow}, "*": fsdp.Precision()}
        built = Spec(fsdp.local_mesh(), units=[*order], precision=precision)
        optimizer = fsdp.muon(lr=0.1, ns_dtype=torch.float32)
        state = fsdp.shard(shapes, built, optimizer)
        lent = {path: grad.to(fsdp.local_shards(state)[path].dtype) for path, grad in grads.items()}
        return fsdp.full_params(fsdp.step(fsdp.reduce(state, lent)))

    torch.testing.assert_close(after("a")["b.w"], after()["b.w"], rtol=1e-5, atol=1e-6)
    assert after("a")["a.w"].dtype is torch.bfloat16


def test_a_pair_that_gives_updates_is_refused_where_it_is_given() -> None:
    """As TorchOpt's and optax's, which would fail in the first step only."""

    class Pair(NamedTuple):
        init: Any
        update: Any

    pairs = [Pair(dict, lambda updates, state, *, params=None, inplace=True: (updates, state)),
             Pair(dict, lambda updates, state, params=None: (updates, state))]  # fmt: skip
    for pair in pairs:
        with pytest.raises(fsdp.SpecError, match=r"update of this Pair takes params=None.*fsdp.from_updates\(pair\)"):
            small(pair)
        small(fsdp.from_updates(pair))
