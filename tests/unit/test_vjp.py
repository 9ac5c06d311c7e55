"""T.vjp: the pullback as a function of the weights, against torch.func.vjp, in eager, compiled and under transforms."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, TreeError
from functional_fsdp import transforms as T
from functional_fsdp._storage import Loan

Tree = Any
reference: Any = torch.func.vjp


class Pair(NamedTuple):
    a: Any
    b: Any


def mlp(w: Tree, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"up": (3, 5), "bias": (5,), "down": (5, 2)}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def randn(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tree, b: Tree) -> None:
    assert pytree.tree_structure(a) == pytree.tree_structure(b)
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        if isinstance(y, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        else:
            assert x == y


class Counted:
    """A function that counts its calls."""

    def __init__(self, fn: Callable[..., Any] = mlp) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.fn(*args)


# -------------------------------------------------------------------------------- values


def pytrees(w: Tree, h: Tree, extra: Tree) -> Tree:
    first = torch.sin(h["x"][0]) * w["bias"] + extra.a
    return {"out": [first, h["x"][1] * extra.b], "sum": Pair(first.sum(), h["x"][0].sum())}


def picked(w: Tree, h: torch.Tensor, batch: Tree) -> torch.Tensor:
    return (h[batch["ids"]] * w["scale"])[batch["mask"]] * batch["factor"]


IDS, TWICE, X = torch.tensor([1, 0, 1]), torch.tensor([2.0, 3.0]), randn(4, 3)
#: a function, its weights and primals, and what of its output has no cotangent: None means zero
VALUES: dict[str, tuple[Callable[..., Any], Tree, tuple[Any, ...], tuple[int, ...]]] = {
    "a layer": (mlp, weights(), (X,), ()),
    "several primals as pytrees": (pytrees, weights(),
        ({"x": (randn(4, 5), randn(4, seed=1))}, Pair(randn(5, seed=2), randn(4, seed=3))), ()),
    "none, integers, booleans and numbers": (picked, {"scale": randn(3), "none": None, "steps": torch.arange(3)},
        (randn(4, 3, seed=1), {"ids": torch.tensor([0, 2, 2]), "mask": torch.tensor([True, False, True]),
                               "factor": 3.0, "none": None}), ()),
    "a primal that is none, as a first unit's": (lambda w, h: w["weight"][IDS], {"weight": randn(2, 3)}, (None,), ()),
    "no primals": (lambda w: w["a"] ** 2, {"a": torch.tensor(3.0)}, (), ()),
    "an output that depends on nothing": (lambda w, x: torch.ones(2), weights(), (X,), ()),
    "an output that is an input": (lambda w, x: (x, x), weights(), (X,), ()),
    "outputs that are no floats": (lambda w, x: (mlp(w, x), x.argmax(), "text", None), weights(), (X,), ()),
    "a cotangent that is none": (lambda w, x: (mlp(w, x), x * 2), weights(), (X,), (0,)),
    "the same tensor twice": (lambda w, x: w["a"] * w["b"] ** 2 * x, {"a": TWICE, "b": TWICE}, (TWICE,), ()),
}  # fmt: skip


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def by_autograd(fn: Callable[..., Any], given: tuple[Any, ...], dout: Tree) -> tuple[Any, Tree]:
    """The output, and a gradient of each tensor of floats that it depends on: None for everything else."""
    leaves, spec = pytree.tree_flatten(given)
    leaves = [leaf.clone().requires_grad_() if is_float(leaf) else leaf for leaf in leaves]
    trained = [leaf for leaf in leaves if is_float(leaf)]
    out = fn(*pytree.tree_unflatten(leaves, spec))
    both = zip(pytree.tree_leaves(out), pytree.tree_leaves(dout), strict=True)
    pairs = [(one, d) for one, d in both if d is not None and one.requires_grad]
    outs, douts = zip(*pairs, strict=True) if pairs else ((), ())
    found = iter(torch.autograd.grad(outs, trained, douts, allow_unused=True) if pairs else [None] * len(trained))
    return out, pytree.tree_unflatten([next(found) if is_float(leaf) else None for leaf in leaves], spec)


@pytest.mark.parametrize("case", VALUES)
def test_the_pullback_is_that_of_autograd(case: str) -> None:
    fn, w, primals, left_out = VALUES[case]
    out, pullback = T.vjp(fn, w, *primals)
    leaves, spec = pytree.tree_flatten(out)
    halves = [
        torch.full_like(one, 0.5) if is_float(one) and i not in left_out else None for i, one in enumerate(leaves)
    ]
    dout = pytree.tree_unflatten(halves, spec)
    want, grads = by_autograd(fn, (w, *primals), dout)
    close(out, pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, want))
    close(pullback(w, dout), grads)


def test_the_output_carries_no_graph() -> None:
    w = {name: p.requires_grad_() for name, p in weights().items()}
    out, pullback = T.vjp(mlp, w, randn(4, 3))
    assert not out.requires_grad
    dw, dx = pullback(w, torch.ones_like(out))
    assert not any(t.requires_grad for t in (*dw.values(), dx))
    assert all(p.grad is None for p in w.values())


def test_an_in_place_change_of_a_primal_is_an_error() -> None:
    """fn is pure: a recomputation must see the primals that the forward saw."""
    x = torch.tensor([1.0, -1.0])
    with pytest.raises(RuntimeError, match="in-place operation"):
        T.vjp(lambda w, x: torch.relu_(x) * w, torch.tensor([2.0, 3.0]), x)
    assert x.tolist() == [1.0, -1.0]
    out, _ = T.vjp(lambda w, x: torch.relu_(x * 1) * w, torch.tensor([2.0, 3.0]), x)  # of its own tensors it may
    assert out.tolist() == [2.0, 0.0]


# -------------------------------------------------------------------------------- residuals


GIVEN: dict[str, tuple[Callable[[Tree], Tree], int]] = {  # the weights of the pullback, and calls of fn
    "the same tensors": (dict, 1),
    "in another order": (lambda w: dict(reversed(w.items())), 1),
    "other objects at the same addresses": (lambda w: {name: p.view(p.shape) for name, p in w.items()}, 2),
    "elsewhere": (lambda w: {name: p.clone() for name, p in w.items()}, 2),
    "one of them elsewhere": (lambda w: {**w, "bias": w["bias"].clone()}, 2),
    "other values": (lambda w: weights(1), 2),
}


@pytest.mark.parametrize("given", GIVEN)
def test_residuals_are_of_the_same_tensors_and_used_once(given: str) -> None:
    """The pullback is a function of the weights that it is given, as in mathematics."""
    fn, w, x = Counted(), weights(), randn(4, 3)
    out, pullback = T.vjp(fn, w, x)
    change, calls = GIVEN[given]
    other = change(w)
    for again, dout in enumerate((torch.ones_like(out), randn(*out.shape, seed=3))):
        (dw, dx), want = pullback(other, dout), reference(mlp, other, x)[1](dout)
        close(({name: dw[name] for name in other}, dx), want)
        assert fn.calls == calls + again  # used up: now it recomputes


def test_units_that_take_turns_at_one_address() -> None:
    """In an arena another unit's weights may lie where the forward's lay, and autograd is not told."""
    place = torch.empty(100, dtype=torch.float64)

    def views() -> dict[str, torch.Tensor]:
        alias = torch.empty(0, dtype=torch.float64).set_(place.untyped_storage(), 0, place.shape, (1,))
        return {"up": alias[:15].view(3, 5), "bias": alias[15:20], "down": alias[20:30].view(5, 2)}

    def fill(of: dict[str, torch.Tensor]) -> None:
        place[:30] = torch.cat([of[name].flatten() for name in ("up", "bias", "down")])

    one, two, x = views(), views(), randn(4, 3)
    fill(weights(1))
    fn = Counted()
    out, pullback = T.vjp(fn, one, x)
    fill(weights(2))
    assert all(one[name].data_ptr() == two[name].data_ptr() for name in one)
    close(pullback(two, torch.ones_like(out)), reference(mlp, weights(2), x)[1](torch.ones_like(out)))
    assert fn.calls == 2
    fill(weights(1))
    close(pullback(one, torch.ones_like(out)), reference(mlp, weights(1), x)[1](torch.ones_like(out)))
    assert fn.calls == 2  # the residuals were still there


def test_a_new_tensor_is_never_taken_for_one_that_is_gone() -> None:
    """An id may be given out again: so the pullback keeps the tensors that it compares with."""
    w = weights()
    gone = [weakref.ref(p) for p in w.values()]
    _, pullback = T.vjp(mlp, w, randn(4, 3))
    del w
    assert all(p() is not None for p in gone)
    del pullback
    assert all(p() is None for p in gone)


def test_a_storage_that_is_gone_is_an_error() -> None:
    w = weights()
    out, pullback = T.vjp(mlp, w, randn(4, 3))
    w["down"].untyped_storage().resize_(0)
    with pytest.raises(ScheduleError, match=r"pullback: these weights were released\. Gather them first"):
        pullback(w, torch.ones_like(out))
    with pytest.raises(ScheduleError, match=r"vjp: these weights were released"):
        T.vjp(mlp, w, randn(4, 3))


# -------------------------------------------------------------------------------- weights on loan


def lend(w: dict[str, torch.Tensor], unit: str = "blocks.0") -> Loan:
    """What stands behind a unit's weights while they are gathered."""
    loan = Loan(unit, w)
    loan.held = True
    return loan


def several(w: Tree, x: torch.Tensor, y: Any, scale: torch.Tensor) -> Tree:
    out = mlp(w, x) * scale
    return {"out": out, "more": (out.sum(), x.argmax(), None), "y": y}


lent_or_not = pytest.mark.parametrize("lent", [True, False])


@lent_or_not
@pytest.mark.parametrize("grad_mode", [True, False])
def test_lent_weights_give_the_same(grad_mode: bool, lent: bool) -> None:
    w, x, dout = weights(), randn(4, 3), randn(4, 2, seed=8)
    given, fn = lend(w).weights if lent else w, Counted()
    with torch.set_grad_enabled(grad_mode):
        for _ in range(3):
            out, pullback = T.vjp(fn, dict(given), x)
            found = pullback(dict(given), dout)
            want, pull = reference(mlp, w, x)
            close(out, want)
            close(found, pull(dout))
            assert list(found[0]) == list(w)
            assert not any(t.requires_grad for t in (out, found[1], *found[0].values(), *w.values()))
    assert fn.calls == 3
    assert all(p.grad is None for p in w.values())


def test_lent_weights_with_any_output_and_any_primal() -> None:
    w, x, scale = weights(), randn(4, 3), torch.tensor(2.0).double()
    loan = lend(w)
    for y in (None, torch.arange(3), 5, {"z": randn(2)}):
        out, pullback = T.vjp(several, loan.weights, x, y, scale)
        close(out, several(w, x, y, scale))
        dout = pytree.tree_map(lambda t: torch.ones_like(t) if isinstance(t, torch.Tensor) else None, out)
        dw, dx, dy, dscale = pullback(loan.weights, dout)

        def loss(w: Tree, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            out = mlp(w, x) * scale
            return out.sum() * 2

        close((dw, dx, dscale), torch.func.grad(loss, argnums=(0, 1, 2))(w, x, scale))
        close(dy, {"z": torch.ones(2).double()} if isinstance(y, dict) else None)


def test_lent_weights_of_which_some_are_not_used_or_have_no_gradient() -> None:
    w = {"a": randn(3), "unused": randn(2), "ids": torch.tensor([2, 0])}
    loan = lend(w)
    out, pullback = T.vjp(lambda w, x: w["a"][w["ids"]] * x, loan.weights, randn(2, seed=1))
    dw, _ = pullback(w, torch.ones_like(out))
    assert dw["unused"] is dw["ids"] is None
    assert dw["a"][1] == 0
    del w["ids"]
    loan = lend(w, "blocks.1")
    out, pullback = T.vjp(lambda w: w["a"] * 2, loan.weights)
    assert pullback(w, torch.ones(3))[0]["unused"] is None
    out, pullback = T.vjp(lambda w: torch.ones(2), loan.weights)
    assert pullback(w, torch.ones(2)) == ({"a": None, "unused": None},)


def test_lent_weights_and_cotangents_that_do_not_fit() -> None:
    w = weights()
    loan = lend(w)
    out, pullback = T.vjp(mlp, loan.weights, randn(4, 3))
    for wrong in ([torch.ones_like(out)], {"out": torch.ones_like(out)}, 1.0):
        with pytest.raises((TreeError, AttributeError, TypeError)):
            pullback(w, wrong)
    assert pullback(w, None) == ({"up": None, "bias": None, "down": None}, None)  # zero
    with pytest.raises(TreeError, match=r"(?s)pullback: weights of structure .*; the forward had"):
        pullback({"up": w["up"]}, torch.ones_like(out))
    out, pullback = T.vjp(mlp, loan.weights, x := randn(4, 3))
    found = pullback(dict(reversed(w.items())), torch.ones_like(out))
    close(found, reference(mlp, w, x)[1](torch.ones_like(out)))


def test_graphs_of_several_microbatches_at_once() -> None:
    w, fn = weights(), Counted()
    loan = lend(w)
    xs = [randn(4, 3, seed=i) for i in range(3)]
    pullbacks = [T.vjp(fn, loan.weights, x)[1] for x in xs]
    for x, pullback in zip(reversed(xs), reversed(pullbacks), strict=True):
        close(pullback(w, torch.ones(4, 2).double()), reference(mlp, w, x)[1](torch.ones(4, 2).double()))
    assert fn.calls == 3


def test_another_units_weights_recompute() -> None:
    w, other, fn, x = weights(), weights(1), Counted(), randn(4, 3)
    loans = lend(w), lend(other, "blocks.1")
    _, pullback = T.vjp(fn, loans[0].weights, x)
    dout = torch.ones(4, 2).double()
    close(pullback(loans[1].weights, dout), reference(mlp, other, x)[1](dout))
    close(pullback(loans[0].weights, dout), reference(mlp, w, x)[1](dout))
    assert fn.calls == 2


@lent_or_not
def test_weights_changed_in_place_are_an_error_not_a_wrong_gradient(lent: bool) -> None:
    w = weights()
    loan = lend(w)
    out, pullback = T.vjp(mlp, loan.weights if lent else w, randn(4, 3))
    w["down"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pullback(w, torch.ones_like(out))


@lent_or_not
def test_an_error_in_fn_is_the_users_and_does_no_harm(lent: bool) -> None:
    w, x = weights(), randn(4, 3)
    loan = lend(w)

    def boom(w: Tree, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    given = loan.weights if lent else w
    with pytest.raises(RuntimeError, match="mine"):
        T.vjp(boom, given, x)
    dout = torch.ones(4, 2).double()
    close(T.vjp(mlp, given, x)[1](w, dout), reference(mlp, w, x)[1](dout))


SAID = r"the weights of the unit 'tied' were released\. Gather them first: state, w = unshard\(state, 'tied'\)\."


#: a function, and of weights and of a tied one of another unit what it is given
OF_TWO: dict[str, tuple[Callable[..., Any], Callable[[Tree, torch.Tensor], tuple[Any, ...]]]] = {
    "among the weights": (mlp, lambda w, tied: ({**w, "down": tied},)),
    "among the primals": (lambda w, x, t: mlp(w, x) @ t, lambda w, tied: (dict(w), tied)),
    "by units": (lambda w, x: mlp(w["blocks.0"], x) @ w["tied"]["weight"],
                 lambda w, tied: ({"blocks.0": dict(w), "tied": {"weight": tied}},)),
}  # fmt: skip


@pytest.mark.parametrize("how", OF_TWO)
def test_a_tied_weight_is_of_another_unit(how: str) -> None:
    function, arranged = OF_TWO[how]
    shape = (5, 2) if how == "among the weights" else (2, 2)
    w, tied, x, fn = weights(), {"weight": randn(*shape, seed=4)}, randn(4, 3), Counted(function)
    loan, other = lend(w), lend(tied, "tied")

    def given() -> tuple[Any, ...]:
        first, *more = arranged(loan.weights, tied["weight"])
        return first, x, *more

    out, pullback = T.vjp(fn, *given())
    dout = torch.ones_like(out)
    other.held = False
    with pytest.raises(ScheduleError, match="pullback: " + SAID):
        pullback(given()[0], dout)
    with pytest.raises(ScheduleError, match="vjp: " + SAID):
        T.vjp(fn, *given())
    other.held, loan.held = True, False
    with pytest.raises(ScheduleError, match=r"pullback: the weights of the unit 'blocks\.0' were released"):
        pullback(given()[0], dout)
    loan.held = True
    close(pullback(given()[0], dout), reference(function, *given())[1](dout))
    assert fn.calls == 1


def test_released_weights_under_a_transform() -> None:
    tied = {"weight": randn(3)}
    loan = lend(tied, "tied")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return T.vjp(lambda w, x: w["weight"] * x, tied, x)[1](tied, torch.ones(3).double())[1].sum() * x.sum()

    x = randn(3, seed=2)
    close(torch.func.grad(loss)(x), torch.ones(3).double() * tied["weight"].sum())
    loan.held = False
    with pytest.raises(ScheduleError, match="vjp: " + SAID):
        torch.func.grad(loss)(x)


def test_lent_weights_under_a_dispatch_mode() -> None:
    w, x = weights(), randn(4, 3)
    loan = lend(w)
    with FlopCounterMode(display=False) as counter:
        found = T.vjp(mlp, loan.weights, x)[1](w, torch.ones(4, 2).double())
    assert counter.get_total_flops() > 0
    close(found, reference(mlp, w, x)[1](torch.ones(4, 2).double()))


def test_nothing_is_kept_of_a_lease_that_is_gone() -> None:
    w = weights()
    loan = lend(w)
    out, pullback = T.vjp(mlp, loan.weights, randn(4, 3))
    pullback(w, torch.ones_like(out))
    gone = [weakref.ref(t) for t in (loan, *w.values())]
    del w, loan, pullback
    gc.collect()
    assert [r() for r in gone] == [None] * len(gone)


# -------------------------------------------------------------------------------- with a state


def unit_state(dtype: torch.dtype) -> tuple[fsdp.State, dict[str, torch.Tensor]]:
    params = {f"blocks.0.{name}": p for name, p in weights().items()}
    spec = fsdp.Spec(fsdp.local_mesh(), precision=fsdp.Precision(compute=dtype))
    return fsdp.shard(params, spec), weights()


def cast_mlp(w: Tree, x: torch.Tensor) -> torch.Tensor:
    return mlp(w, x.to(w["up"].dtype))


@pytest.mark.parametrize(
    ("dtype", "abandoned"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)]
)
def test_gathered_again_are_the_same_tensors(dtype: torch.dtype, abandoned: bool) -> None:
    """In another dtype weights are gathered even in a world of one: released, and gathered into the same tensors. Or
    the pullback is of an abandoned step, called with weights of the new one."""
    base, plain = unit_state(dtype)
    fn, x = Counted(cast_mlp), randn(4, 3)
    state, w = fsdp.unshard(base, "blocks.0")
    assert w["up"].dtype is dtype
    out, pullback = T.vjp(fn, w, x)
    state = base if abandoned else fsdp.release(state, "blocks.0")
    state, again = fsdp.unshard(state, "blocks.0")
    found = pullback(again, torch.ones_like(out))
    assert abandoned or fn.calls == 1
    want = reference(cast_mlp, {name: p.to(dtype) for name, p in plain.items()}, x)[1](torch.ones_like(out))
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def test_released_weights_are_an_error() -> None:
    state, _ = unit_state(torch.float32)
    state, w = fsdp.unshard(state, "blocks.0")
    out, pullback = T.vjp(cast_mlp, w, randn(4, 3))
    state = fsdp.release(state, "blocks.0")
    said = SAID.replace("tied", r"blocks\.0")
    with pytest.raises(ScheduleError, match="pullback: " + said):
        pullback(w, torch.ones_like(out))
    with pytest.raises(ScheduleError, match="vjp: " + said):
        T.vjp(cast_mlp, w, randn(4, 3))
    state, w = fsdp.unshard(state, "blocks.0")
    assert pullback(w, torch.ones_like(out))[0].keys() == w.keys()  # and nothing is lost


@pytest.mark.parametrize("optimizer", [fsdp.adamw(lr=0.1), fsdp.sgd(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_a_pullback_kept_across_a_step_is_an_error_not_a_wrong_gradient(optimizer: Any) -> None:
    """Where weights are replicated, unshard lends the state's own copy, and step overwrites it."""
    state = fsdp.shard(weights(), fsdp.Spec(fsdp.local_mesh(), fsdp.ddp("data")), optimizer)
    state, w = fsdp.unshard(state)
    out, pullback = T.vjp(mlp, w, randn(4, 3))
    fsdp.step(fsdp.reduce(state, weights(1)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pullback(w, torch.ones_like(out))


# -------------------------------------------------------------------------------- errors


WRONG: list[tuple[Callable[[Tree], Tree], Any, str]] = [  # weights, cotangents
    *((dict, dout, "cotangents of structure .*; the output has") for dout in ([0.0], {"out": 0.0}, (0.0, 0.0))),
    *((change, 0.0, "weights of structure .*; the forward had") for change in (
        lambda w: {"up": w["up"]}, lambda w: {**w, "x": torch.ones(1)}, lambda w: [*w.values()])),
]  # fmt: skip


@pytest.mark.parametrize(("change", "dout", "said"), WRONG)
def test_weights_or_cotangents_of_another_structure(change: Callable[[Tree], Tree], dout: Tree, said: str) -> None:
    w = weights()
    out, pullback = T.vjp(mlp, w, randn(4, 3))
    with pytest.raises(TreeError, match=f"(?s)pullback: {said}"):
        pullback(change(w), pytree.tree_map(lambda _: torch.ones_like(out), dout))
    assert pullback(w, torch.ones_like(out))[1].shape == (4, 3)  # the next call is none the worse


def test_cotangents_of_another_shape() -> None:
    w = weights()
    _, pullback = T.vjp(mlp, w, randn(4, 3))
    with pytest.raises((TreeError, RuntimeError), match=r"[Ss]hape"):
        pullback(w, torch.ones(2, 4))


# -------------------------------------------------------------------------------- transforms


def through(w: Tree, x: torch.Tensor) -> torch.Tensor:
    """A scalar of a first derivative, so that differentiating it is a second one."""
    out, pullback = T.vjp(mlp, w, x)
    dw, dx = pullback(w, torch.ones_like(out))
    return (dx**2).sum() + sum((d**2).sum() for d in dw.values()) + (out**2).sum()


def through_torch(w: Tree, x: torch.Tensor) -> torch.Tensor:
    out, pull = reference(mlp, w, x)
    dw, dx = pull(torch.ones_like(out))
    return (dx**2).sum() + sum((d**2).sum() for d in dw.values()) + (out**2).sum()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(lambda w, xs: f(w, xs[0]), argnums=(0, 1)),
    "vmap": lambda f: torch.vmap(f, in_dims=(None, 0)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f, argnums=1), in_dims=(None, 0)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_under_transforms(transform: str) -> None:
    w, xs = weights(), randn(6, 4, 3)
    close(TRANSFORMS[transform](through)(w, xs), TRANSFORMS[transform](through_torch)(w, xs))


def test_integers_and_none_under_grad() -> None:
    ids = torch.tensor([1, 0, 1])
    seen: list[Any] = []

    def loss(w: Tree) -> torch.Tensor:
        out, pullback = T.vjp(lambda w, h, i: w["weight"][i] ** 3, w, None, ids)
        dw, dh, di = pullback(w, torch.ones_like(out))
        seen.extend([dh, di, dw["steps"]])
        return dw["weight"].sum()

    weight = randn(2, 3)
    found = torch.func.grad(lambda p: loss({"weight": p, "steps": torch.arange(2)}))(weight)
    close(found, 6 * weight * torch.tensor([[1.0], [2.0]]).double())
    assert seen == [None, None, None]


def test_weights_elsewhere_under_grad() -> None:
    w, other, x = weights(), weights(1), randn(4, 3)

    def ours(x: torch.Tensor) -> torch.Tensor:
        out, pullback = T.vjp(mlp, w, x)
        return pullback(other, torch.ones_like(out))[1].pow(2).sum()

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return reference(mlp, other, x)[1](torch.ones(4, 2).double())[1].pow(2).sum()

    close(torch.func.grad(ours)(x), torch.func.grad(theirs)(x))


# -------------------------------------------------------------------------------- units as they are


def test_compiled_functions() -> None:
    torch._dynamo.reset()
    fn = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    w, x, dout = weights(), randn(4, 3), randn(4, 2, seed=8)
    out, pullback = T.vjp(fn, w, x)
    want, pull = reference(mlp, w, x)
    close(out, want)
    close(pullback(w, dout), pull(dout))
    close(pullback({name: p.clone() for name, p in w.items()}, dout), pull(dout))


def test_compiled_as_a_whole() -> None:
    torch._dynamo.reset()
    w, x = weights(), randn(4, 3)
    compiled = torch.compile(through, backend="eager", fullgraph=True)
    close(compiled(w, x), through_torch(w, x))


def test_activation_checkpointing_inside() -> None:
    inner = Counted()

    def fn(w: Tree, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(inner, w, x, use_reentrant=False)
        return out * 2

    w, x = weights(), randn(4, 3)
    out, pullback = T.vjp(fn, w, x)
    want, pull = reference(lambda w, x: mlp(w, x) * 2, w, x)
    close(out, want)
    close(pullback(w, torch.ones_like(out)), pull(torch.ones_like(out)))
    assert inner.calls == 2


def test_modules_with_autograd_functions() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:
            return dout * 3  # not the derivative, so that it shows

    module = nn.Linear(3, 2)
    params, skeleton = fsdp.functionalize(module)
    x = torch.ones(1, 3)
    _, pullback = T.vjp(lambda w, x: Double.apply(fsdp.bind(skeleton, w)(x)), params, x)
    dw, dx = pullback(params, torch.ones(1, 2))
    assert dw["bias"].tolist() == [3.0, 3.0]
    torch.testing.assert_close(dx, 3 * module.weight.sum(0, keepdim=True).detach())


class Opaque:
    """No tree."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


@pytest.mark.parametrize("output", [Opaque, lambda h: (h, Opaque(h)), lambda h: {"h": h.detach(), "more": [Opaque(h)]}])
def test_an_output_that_is_no_tree_is_refused(output: Any) -> None:
    with pytest.raises(TreeError, match=r"returned a Opaque, which is no tree, .*register_pytree_node"):
        T.vjp(lambda w, x: output(mlp(w, x)), weights(), torch.ones(3, dtype=torch.float64))
    _, pullback = T.vjp(lambda w, x: (mlp(w, x), Opaque(x.detach())), weights(), torch.ones(3, dtype=torch.float64))
    dw, _ = pullback(weights(), (torch.ones(2, dtype=torch.float64), None))
    assert dw["down"].abs().sum() > 0


def test_an_autocast_that_stays_open_has_the_weights_of_each_step() -> None:
    """autocast keeps casts by tensor, and a unit's weights are the same tensors in every step."""
    torch.manual_seed(0)
    params, model = fsdp.functionalize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    x = torch.randn(16, 8)

    def losses(opens: int) -> list[float]:
        """With autocast around so many steps at a time."""
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.5))
        found = []
        for number in range(4):
            if number % opens == 0:
                around = torch.autocast("cpu", dtype=torch.bfloat16)
                around.__enter__()
            h, pullbacks = x, {}
            for unit in state.units:
                state, w = fsdp.unshard(state, unit)
                h, pullbacks[unit] = T.vjp(lambda w, h, unit=unit: fsdp.bind(model[int(unit)], w)(h), w, h)
                state = fsdp.release(state, unit)
            found.append(h.float().square().mean().item())
            dh = (2 * h.float() / h.numel()).to(h.dtype)
            for unit in reversed(state.units):
                state, w = fsdp.unshard(state, unit)
                dw, dh = pullbacks.pop(unit)(w, dh)
                state = fsdp.release(fsdp.reduce(state, dw, unit), unit)
            state = fsdp.step(state)
            if number % opens == opens - 1:
                around.__exit__(None, None, None)
        return found

    assert losses(4) == losses(1)
    assert losses(1)[-1] < losses(1)[0]


@pytest.mark.parametrize("lent", [True, False])
def test_inference_mode_is_refused_in_which_every_gradient_would_be_none(lent: bool) -> None:
    state = fsdp.shard({"a": weights()}, fsdp.Spec(fsdp.local_mesh(), units=["a"]), fsdp.sgd(lr=0.1))
    state, w = fsdp.unshard(state, "a")
    x = torch.ones(2, 3, dtype=torch.float64)
    with torch.inference_mode():
        with pytest.raises(ScheduleError, match="inference_mode"):
            T.vjp(mlp, w if lent else weights(), x)
        with torch.inference_mode(False), torch.no_grad():
            out, pullback = T.vjp(mlp, w if lent else weights(), x)
            assert pullback(w if lent else weights(), torch.ones_like(out))[0]["up"].abs().sum() > 0
