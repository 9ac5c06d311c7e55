"""Stages that recompute, whose parts are saved or moved: the same bits as without, whatever the parts return, change or
draw; else an error that says why."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.late_lane import late_lane
from torch.multiprocessing.reductions import StorageWeakRef

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T
from functional_fsdp.transforms import _seed
from functional_fsdp.transforms._remat import parts

WIDTH = 32
Tree = dict[str, torch.Tensor]
Stage = Callable[..., Any]
FATES: dict[str, Callable[[Any], Any]] = {"save": T.saved, "offload": T.offload}
fates = pytest.mark.parametrize("fate", FATES)


@pytest.fixture(autouse=True)
def lane() -> Iterator[Any]:
    """Copies are late, and what is let go too early is found."""
    with late_lane() as found:
        yield found


def weights() -> Tree:
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randn(WIDTH, WIDTH, generator=generator) / 6 for key in "abc"}


def inputs() -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))


def results(stage: Stage, times: int = 1) -> list[torch.Tensor]:
    """Outputs and gradients."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    w, x, seen = weights(), inputs(), []
    for _ in range(times):
        out, pullback = T.vjp(stage, w, x)
        dw, dx = pullback(w, torch.ones_like(out))
        seen += [out, dx, *(grad for grad in dw.values() if grad is not None)]
    return seen


def layer(key: str) -> Stage:
    def apply(w: Tree, h: torch.Tensor) -> torch.Tensor:
        return (h @ w[key]).tanh()

    return apply


def equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def same(stage: Stage, *parts: Stage, fates: tuple[str, ...] = (*FATES,)) -> None:
    """A stage, whose first arguments are these parts, has the same bits where it recomputes and they do not."""
    right = results(partial(stage, *parts), 3)
    for fate in fates:
        assert equal(results(T.remat(partial(stage, *map(FATES[fate], parts))), 3), right), fate


# ---------------------------------------------------------------- what parts return


def test_whatever_a_part_returns() -> None:
    with torch.inference_mode():
        mask = torch.ones(WIDTH)

    def odd(w: Tree, h: torch.Tensor) -> Any:
        y = h @ w["a"]
        whole = {"sum": y.sum(), "positive": y > 0, "complex": torch.complex(y, -y), "transposed": y.t()[::2]}
        return y, mask, 3, None, whole, [y.view(-1), y.bfloat16()], h

    def stage(part: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        y, mask, three, nothing, whole, (flat, low), there = part(w, h.sin())
        assert (three, nothing) == (3, None)
        y = (y.sin() * whole.pop("sum")).exp() + mask + whole["positive"] + there.cos()  # which changes the dict
        y = y + (flat.sin().sum() + low.sin().float().sum() + whole["transposed"].sin().sum()).cos()
        return y + whole["complex"].exp().abs()

    same(stage, odd)


@fates
@pytest.mark.parametrize("nothing", [None, 3, "text"])
def test_a_part_that_returns_no_tensor_is_run_once(fate: str, nothing: Any) -> None:
    runs: list[int] = []

    def part(w: Tree, h: torch.Tensor) -> Any:
        runs.append(1)
        return nothing

    wrapped = FATES[fate](part)

    def stage(w: Tree, h: torch.Tensor) -> torch.Tensor:
        assert wrapped(w, h) == nothing
        return (h @ w["a"]).tanh().sin()

    results(T.remat(stage))
    assert len(runs) == 1


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_whatever_is_saved_comes_back_as_it_was(kind: torch.dtype) -> None:
    """Views of one storage, a number, an expanded, a transposed and a conjugated one, of any dtype."""

    def wide(t: torch.Tensor) -> torch.Tensor:
        return t.float() if t.dtype.itemsize == 1 else t  # of which some have no `equal`

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            t = torch.cat([(x * 3).to(kind)] * 4)
            conjugated = t.conj() if kind.is_complex else t
            ctx.save_for_backward(t, t[3:9:2], t[0].expand(5, -1), t[0, 0], t.t(), conjugated)
            before.extend((u.clone(), u.stride(), u.storage_offset()) for u in ctx.to_save)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            for u, (value, *place) in zip(ctx.saved_tensors, before, strict=True):
                assert torch.equal(wide(u), wide(value))
                assert [u.stride(), u.storage_offset()] == place
            return grad

    before: list[Any] = []
    results(T.offload(lambda w, h: Saves.apply(h) @ w["a"]))
    assert len(before) == 6


# ---------------------------------------------------------------- changed in place


@fates
def test_an_output_that_is_changed_in_place_in_each_recomputation(fate: str) -> None:
    """With `retain_graph` there are two; the copy that is kept must be whole for the second."""

    def stage(part: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        y = part(w, h * 1.0)
        y += 1
        return y.sin().exp()

    def twice(stage: Stage) -> list[torch.Tensor]:
        w = {key: t.requires_grad_() for key, t in weights().items()}
        seen: list[torch.Tensor] = []
        for _ in range(3):
            x = inputs().requires_grad_()
            out = stage(w, x).sum()
            for _ in range(2):
                seen += torch.autograd.grad(out, [x, w["a"]], retain_graph=True)
        return seen

    def part(w: Tree, h: torch.Tensor) -> torch.Tensor:
        return h @ w["a"]

    assert equal(twice(partial(stage, part)), twice(T.remat(partial(stage, FATES[fate](part)))))


def test_of_several_outputs_some_are_changed_in_place() -> None:
    def part(w: Tree, h: torch.Tensor) -> Any:
        y = h @ w["a"]
        return y, h @ w["b"], y[:, :3], *(h @ w["c"]).unsafe_chunk(2, -1)

    def stage(part: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        y, z, some, first, second = part(w, h.sin())
        y += 1
        z *= y
        first.mul_(2)
        return (y.sin() + z.cos()) * some.sum().sin() * torch.cat([first.sin(), second.exp()], -1)

    same(stage, part)


def test_a_copy_lies_as_what_it_is_a_copy_of() -> None:
    """Kernels add up in an order that strides and overlaps decide; and outputs that share memory go on sharing it."""
    strides: list[Any] = []

    def part(w: Tree, h: torch.Tensor) -> Any:
        y = h @ w["a"]
        return y[:, 1:17].t(), y

    def stage(part: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        some, y = part(w, h.sin())
        strides.append((some.stride(), some.storage_offset()))
        with torch.no_grad():
            y += 1  # also in `some`
        return y.sin() + some.exp().sum(0).mean()

    same(stage, part)
    assert len({*strides}) == 1


def test_an_output_that_lies_on_the_parts_input() -> None:
    """It changes with the input, which no copy would do; the same part's next output may lie on memory of its own."""

    def part(w: Tree, h: torch.Tensor, own: bool) -> torch.Tensor:
        return (h @ w["b"]).view(-1) if own else h.detach().view(-1)

    def stage(part: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        y = h @ w["a"]
        flat, other = part(w, y, False), part(w, h.sin(), True)
        with torch.no_grad():
            y.mul_(2)
        other += 1
        return y.sin() * flat.view_as(y).cos() + other.view_as(y).exp()

    same(stage, part)


def test_inputs_that_are_changed_before_the_backward_are_an_error() -> None:
    """torch's checkpoint looks after tensors by position only; others it would compute from again as they are now."""

    def stage(w: Tree, h: torch.Tensor, scales: list[torch.Tensor], *, shift: torch.Tensor) -> torch.Tensor:
        return ((h @ w["a"]).tanh() * scales[0] + shift).sin()

    w = weights()
    for which in (0, 1):
        others = [torch.ones(WIDTH), torch.ones(WIDTH)]
        out, pullback = T.vjp(lambda w, h, o=others: T.remat(stage)(w, h, [o[0]], shift=o[1]), w, inputs())
        others[which].add_(1)
        with pytest.raises(fsdp.ScheduleError, match=r"an input of shape \(32,\) was changed in place since the forw"):
            pullback(w, out)


# ---------------------------------------------------------------- another time


@fates
def test_parts_that_come_in_another_order_are_an_error(fate: str) -> None:
    turns = [0]
    first, second = (FATES[fate](layer(key)) for key in "ab")
    named = FATES[fate](lambda w, h: (h @ w["c"]).exp())

    def stage(w: Tree, h: torch.Tensor) -> torch.Tensor:
        turns[0] += 1
        h = h.sin()
        y, z = (named(w, h), second(w, h)) if turns[0] % 2 else (second(w, h), named(w, h))
        return y.sin() + first(w, z).exp() * 3

    with pytest.raises(fsdp.ScheduleError, match=r"the 1th part that was called was apply, and in .*<lambda>"):
        results(T.remat(stage))


def test_a_gradient_inside() -> None:
    """Of what is computed again, through a part that is not: refused. In the part, or beside it: right."""

    def inside(w: Tree, h: torch.Tensor) -> torch.Tensor:
        y = (h @ w["a"]).tanh()
        (grad,) = torch.autograd.grad(y.sum(), h, create_graph=True)
        return (grad @ w["b"]).sin() * y

    same(lambda part, w, h: part(w, h.sin()).cos(), inside)

    def stage(first: Stage, second: Stage, third: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        y = first(w, h).sin()
        (grad,) = torch.autograd.grad(second(w, h).sin().sum(), h, create_graph=True)
        return third(w, grad.exp() + y).cos()

    plain, one, two = layer("b"), layer("a"), layer("c")
    right = results(partial(stage, one, plain, two))
    for fate in FATES.values():
        assert equal(results(T.remat(partial(stage, fate(one), plain, fate(two)))), right)
        with pytest.raises(fsdp.ScheduleError, match=r"a gradient is taken inside of .* again, through a part"):
            results(T.remat(partial(stage, one, fate(plain), two)))


@fates
def test_regions_and_parts_that_lie_in_each_other(fate: str) -> None:
    part = FATES[fate]

    def make(first: Stage, again: Stage, last: Stage) -> Stage:
        def inner(w: Tree, h: torch.Tensor) -> torch.Tensor:
            return F.dropout(first(w, h.sin()), 0.3).cos()

        def stage(w: Tree, h: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                h = first(w, F.dropout(h, 0.2)).exp()
                h = again(inner)(w, h)
                h = last(w, h * 2).sin() * 0.1
            return h

        return again(stage)

    def whole(w: Tree, h: torch.Tensor) -> torch.Tensor:
        return F.dropout((h @ w["a"]).tanh(), 0.5).exp()

    right = results(make(whole, lambda f: f, layer("b")), 2)
    assert equal(results(make(part(whole), T.remat, part(layer("b"))), 2), right)
    around = make(part(T.remat(whole)), T.remat, T.offload(part(layer("b"))))
    assert equal(results(T.offload(around), 2), right)


def test_hooks_of_others_around_a_part() -> None:
    """They have what it saves; it is run once all the same."""
    runs: list[int] = []

    def part(w: Tree, h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (h @ w["a"]).tanh()

    def stage(part: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            y = part(w, h.sin())
        return y.sin().exp()

    same(stage, part)
    assert len(runs) == 9


def test_under_autocast() -> None:
    def stage(first: Stage, second: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = first(w, h)
            out: torch.Tensor = second(w, y.float().sin()).float().cos()
        return out

    same(stage, lambda w, h: F.dropout(h @ w["a"], 0.2), layer("b"))


def test_parts_in_a_torch_func_transform_within_a_stage_are_computed_again() -> None:
    def stage(part: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.vmap(lambda row: part(w, row).sin())(h.cos())
        return y.exp()

    same(stage, layer("a"), fates=("save",))
    with pytest.raises(fsdp.ScheduleError, match=r"torch\.func's transforms .* forbid saved-tensor hooks"):
        same(stage, layer("a"), fates=("offload",))


# ---------------------------------------------------------------- random numbers


def draws_from_python(w: Tree, h: torch.Tensor) -> torch.Tensor:
    return ((h @ w["a"]) * random.random()).tanh() * float(np.random.rand())


def test_numbers_that_python_and_numpy_draw() -> None:
    def stage(part: Stage, w: Tree, h: torch.Tensor) -> torch.Tensor:
        y = part(w, (h * random.random()).sin())
        return (y * random.random() * float(np.random.rand())).sin().exp()

    same(stage, draws_from_python)


def stage_with(h: torch.Tensor, w: Tree, generator: torch.Generator) -> torch.Tensor:
    keep = torch.rand(h.shape, generator=generator) < 0.7
    return (h @ w["a"] * keep).tanh().sin()


class Draws:
    """A stage that is a method, or the object itself."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def stage(self, w: Tree, h: torch.Tensor) -> torch.Tensor:
        return stage_with(h, w, self.generator)

    __call__ = stage


@pytest.mark.parametrize(
    "how", ["argument", "keyword", "partial", "closure", "list", "default", "inner function", "method", "object"]
)
def test_numbers_of_a_generator_that_is_given(how: str) -> None:
    def run(again: Callable[[Any], Any]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        several = {"all": [generator]}

        def inner(w: Tree, h: torch.Tensor) -> torch.Tensor:
            return stage_with(h, w, generator)

        stages: dict[str, Stage] = {
            "argument": lambda w, h: again(stage_with)(h, w, generator),
            "keyword": lambda w, h: again(stage_with)(h, w, generator=generator),
            "partial": lambda w, h: again(partial(stage_with, generator=generator))(h, w),
            "closure": again(lambda w, h: stage_with(h, w, generator)),
            "list": again(lambda w, h: stage_with(h, w, several["all"][0])),
            "default": again(lambda w, h, g=generator: stage_with(h, w, g)),
            "inner function": again(lambda w, h: inner(w, h)),
            "method": again(Draws(generator).stage),
            "object": again(Draws(generator)),
        }
        return [*results(stages[how], 2), generator.get_state()]

    assert equal(run(T.remat), run(lambda f: f))


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (random.Random, lambda g: g.random()),
        (np.random.default_rng, lambda g: float(g.random())),
        (np.random.RandomState, lambda g: float(g.rand())),
    ],
)
def test_numbers_of_generators_of_numpy_and_python(make: Callable[[int], Any], draw: Callable[[Any], float]) -> None:
    def run(again: Callable[[Any], Any]) -> list[torch.Tensor]:
        generator = make(3)

        def stage(w: Tree, h: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = ((h * draw(generator)) @ w["a"]).tanh() * draw(generator)
            return out.sin()

        return [*results(again(stage), 2), torch.tensor(draw(generator))]

    assert equal(run(T.remat), run(lambda f: f))


def test_of_two_functions_with_one_code_the_second_may_draw() -> None:
    def stage(draw: Callable[[], float]) -> Stage:
        return lambda w, h: ((h * draw()) @ w["a"]).tanh().sin()

    T.vjp(T.remat(stage(lambda: 1.0)), weights(), inputs())
    assert equal(results(T.remat(stage(random.random))), results(stage(random.random)))


def test_draws_are_those_of_the_device_whatever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor of a call that computes on a GPU may lie on the host, or all of them, or none."""
    asked: list[torch.device] = []
    monkeypatch.setattr(_seed, "default_generator", asked.append)
    x = torch.ones(3, requires_grad=True)
    T.remat(torch.sum)(x)
    assert asked.pop() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    T.remat(torch.sum)(x)
    T.remat(lambda: x.sum())()
    assert asked == [torch.device("cuda", 1)] * 2
    assert extend.computes_on([x, SimpleNamespace(), "text"]) == torch.device("cuda", 1)


# ---------------------------------------------------------------- memory


@fates
@pytest.mark.parametrize("where", ["in the part", "after it"])
def test_after_an_error_nothing_waits_for_the_garbage_collector(fate: str, where: str) -> None:
    refs: list[StorageWeakRef] = []

    def part(w: Tree, h: torch.Tensor) -> torch.Tensor:
        y = (h @ w["a"]).tanh()
        z = y.sin().cos()
        refs.extend(StorageWeakRef(t.untyped_storage()) for t in (y, z))
        if where == "in the part" and len(refs) % 4 == 0:
            raise ValueError
        return z

    wrapped = FATES[fate](part)

    def stage(w: Tree, h: torch.Tensor) -> torch.Tensor:
        wrapped(w, wrapped(w, h).sin()).sin()
        raise ValueError

    def run(stage: Stage) -> None:
        with pytest.raises(ValueError, match=r"^$"):
            T.vjp(stage, weights(), inputs())

    gc.collect()
    gc.disable()
    try:
        for one in (stage, T.remat(stage)):
            run(one)
            assert len(refs) % 4 == 0
            assert all(ref.expired() for ref in refs)
    finally:
        gc.enable()


def test_a_step_that_is_over_leaves_nothing_for_the_garbage_collector() -> None:
    refs: list[StorageWeakRef] = []

    def part(w: Tree, h: torch.Tensor) -> torch.Tensor:
        y = (h @ w["a"]).tanh()
        z = y.sin()
        refs.extend(StorageWeakRef(t.untyped_storage()) for t in (y, z))
        return z

    stage = T.remat(lambda w, h: T.offload(part)(w, T.saved(part)(w, h.sin()).cos()).cos())
    gc.collect()
    gc.disable()
    try:
        results(stage, 2)
        T.vjp(stage, weights(), inputs())  # whose backward never comes
        assert len(refs) == 12
        assert all(ref.expired() for ref in refs)
    finally:
        gc.enable()


def test_a_function_that_is_wrapped_in_each_call_pins_once() -> None:
    def mlp(w: Tree, h: torch.Tensor) -> torch.Tensor:
        return (h @ w["a"]).tanh().exp()

    def step() -> None:
        w, h = weights(), inputs()
        pullbacks = []
        for _ in range(2):
            h, pullback = T.vjp(T.remat(lambda w, h: T.offload(mlp)(w, h.sin()).cos()), w, h)
            pullbacks.append(pullback)
            h, pullback = T.vjp(T.offload(mlp), w, h)
            pullbacks.append(pullback)
        for pullback in reversed(pullbacks):
            _, h = pullback(w, h)

    step()
    buffers = [parts.part_of(mlp, "offload").owner.buffers, *(
        found["habits"].owner.buffers for found in parts._OF_FUNCTIONS.values() if "habits" in found
    )]  # fmt: skip
    made = [one.made for one in buffers]
    assert sum(made) > 2
    step()
    assert [one.made for one in buffers] == made


@pytest.mark.parametrize("keyword", [False, True])
def test_a_part_that_changes_its_input_in_place_is_run_again(keyword: bool) -> None:
    """What comes after it reads the input, too."""

    def writes(w: Tree, h: torch.Tensor) -> torch.Tensor:
        h.mul_(2).add_(torch.rand(()))
        return (h @ w["a"]).tanh()

    def stage(part: Stage, w: Tree, x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        y = part(w, h=h) if keyword else part(w, h)
        out: torch.Tensor = (y * h.cos() * torch.rand(())) @ w["b"]
        return out.exp()

    same(stage, writes)
