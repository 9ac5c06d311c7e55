"""Ranks that were given something different, or fail alone, before there is a State: named on every rank."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.driven import refused
from support.ranks import each_rank, launch

import functional_fsdp as fsdp
from functional_fsdp import SpecError, _init
from functional_fsdp import _redistribute as _replace
from functional_fsdp import transforms as T
from functional_fsdp._state import shard as _shard

Tree = dict[str, torch.Tensor]


def params(**changes: Any) -> Tree:
    tree = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(9.0).view(3, 3), "c": torch.arange(1000)}
    return {path: changes.get(path, value) for path, value in tree.items() if changes.get(path, value) is not None}


def closing(over: Any) -> Any:
    return lambda count: count * over


def warm(count: torch.Tensor, peak: float) -> torch.Tensor:
    return count * peak


class Linear:
    def __init__(self, peak: float, **more: Any) -> None:
        self.peak = peak
        self.__dict__.update(more)

    def at(self, count: torch.Tensor) -> torch.Tensor:
        return count * self.peak


class Told(Linear):
    def __fsdp_settings__(self) -> float:
        return self.peak


def unit_of(rank: int) -> Any:
    return lambda path: f"of {rank}"


def shard(tree: Tree | None = None, optimizer: Any = None, **given: Any) -> fsdp.State:
    more = {name: given.pop(name) for name in ("buffers", "local_buffers", "seed") if name in given}
    spec = fsdp.Spec(fsdp.local_mesh(), given.pop("placement", None), **given)
    return fsdp.shard(params() if tree is None else tree, spec, optimizer or fsdp.sgd(), **more)


#: what each rank does, and what the error says
DIFFER: dict[str, tuple[Callable[[int], Any], str]] = {
    "shape": (lambda r: shard(params(b=torch.ones(3, 3 + r))),
              "TreeError: trees. The first leaf that differs: rank 0 has "
              "b (3, 3) torch.float32, rank 1 has b (3, 4) torch.float32"),
    "a leaf is missing": (lambda r: shard(params(c=None if r else torch.ones(4))),
                          "TreeError: trees. The first leaf that "
                          "differs: rank 0 has c (4,) torch.float32, rank 1 has nothing."),
    "dtype": (lambda r: shard(params(c=torch.ones(4).double() if r else torch.ones(4))), "TreeError: torch.float64"),
    "frozen": (lambda r: shard(params(a=nn.Parameter(torch.ones(2), requires_grad=not r))),
               "TreeError: rank 1 has a (2,) torch.float32 frozen"),
    "tied": (lambda r: shard({"a": (one := torch.ones(2)), "b": one if r else one.clone()}),
             "TreeError: tied to ['b']"),
    "value": (lambda r: shard(params(a=torch.full((2,), 1 + 1e-7 * r))),
              "TreeError: values. The first leaf that differs: rank 0 has a checksum "),
    "order": (lambda r: shard(params(c=torch.randperm(1000, generator=torch.Generator().manual_seed(r)))),
              "TreeError: rank 0 has c checksum "),
    "transposed": (lambda r: shard(params(b=params()["b"].t() if r else params()["b"])),
                   "TreeError: rank 0 has b checksum "),
    "flipped": (lambda r: shard(params(a=params()["a"].flip(0) if r else params()["a"])), "TreeError: has a checksum "),
    "sign of zero": (lambda r: shard(params(a=torch.tensor([-0.0, 0.0] if r else [0.0, -0.0]))),
                     "TreeError: has a checksum "),
    "buffer": (lambda r: shard(buffers={"mean": torch.zeros(2), "count": torch.tensor(r)}),
               "TreeError: buffers. The first one that differs: rank 0 has count () torch.int64 checksum "),
    "a buffer is missing": (lambda r: shard(buffers={"mean": torch.zeros(2)} if r else {}),
                            "TreeError: rank 0 has nothing, rank 1 has mean (2,)"),
    "a local buffer is missing": (
        lambda r: shard(buffers={"mean": torch.zeros(2), **({"n": torch.ones(1)} if r else {})}, local_buffers=["m*"]),
        "TreeError: rank 0 has nothing, rank 1 has n (1,)"),
    "average": (lambda r: shard(average="sum" if r else "mean"),
                "SpecError: settings. The first one that differs: rank 0 has "
                "Spec.average: 'mean', rank 1 has Spec.average: 'sum'."),
    "placement": (lambda r: shard(placement=(fsdp.zero2, fsdp.zero3)[r]("data")), "SpecError: ['weights']: ('data',)"),
    "precision": (lambda r: shard(precision=fsdp.Precision(wire=(None, torch.bfloat16)[r])), "SpecError: .wire: None"),
    "labels": (lambda r: shard(labels={"a": f"label {r}"}), "SpecError: Spec.labels: (('a', 'label 1'),)"),
    "trainable": (lambda r: shard(trainable={"a": bool(r)}), "SpecError: Spec.trainable: (('a', False),)"),
    "units": (lambda r: shard(units=[("a", "b")] if r else None),
              "SpecError: rank 1 has Spec.units: ((None, ('a', 'b')),)"),
    "units by a function": (lambda r: shard(units=unit_of(r)),
                            "SpecError: has Spec.units.rank: 0, rank 1 has Spec.units.rank: 1"),
    "prefetch": (lambda r: shard(schedule=fsdp.Schedule(prefetch=r)), "SpecError: Spec.schedule.prefetch: 0"),
    "order of use": (lambda r: shard(schedule=fsdp.Schedule(order=("a", "b", "c")[:: 1 - 2 * r])),
                     "SpecError: order: ('a', 'b', 'c')"),
    "seed": (lambda r: shard(seed=r), "SpecError: rank 0 has seed: 0, rank 1 has seed: 1"),
    "no optimizer": (lambda r: fsdp.shard(params(), fsdp.Spec(fsdp.local_mesh()), fsdp.sgd() if r else None),
                     "SpecError: rank "
                     "0 has optimizer: None, rank 1 has optimizer: functional_fsdp._optim.sgd.Sgd"),
    "another optimizer": (lambda r: shard(None, fsdp.adamw() if r else fsdp.sgd()), "SpecError: _optim.adamw.AdamW"),
    "lr": (lambda r: shard(None, fsdp.sgd(lr=0.1 + r)),
           "SpecError: rank 0 has optimizer.lr: 0.1, rank 1 has optimizer.lr: 1.1"),
    "lr of a label": (lambda r: shard(None, fsdp.sgd(lr={"n": 0.1 + r, "default": 1}), labels={"a": "n"}),
                      "SpecError: lr['n']: 1.1"),
    "closure": (lambda r: shard(None, fsdp.sgd(lr=closing(0.1 + r))), "SpecError: optimizer.lr.over: 1.1"),
    "closure over a tensor": (lambda r: shard(None, fsdp.sgd(lr=closing(torch.tensor([1.0, r])))),
                              "SpecError: over: tensor (2,) torch.float32 [1.0, 1.0]"),
    "another function": (lambda r: shard(None, fsdp.sgd(lr=closing(1) if r else Linear(1).at)),
                         "SpecError: optimizer.lr: method"),
    "partial": (lambda r: shard(None, fsdp.sgd(lr=functools.partial(warm, peak=r))), "SpecError: keywords['peak']: 1"),
    "method": (lambda r: shard(None, fsdp.sgd(lr=Linear(r).at)), "SpecError: optimizer.lr.__self__.peak: 1"),
    "what an object says": (lambda r: shard(None, fsdp.sgd(lr=Told(r).at)), "SpecError: optimizer.lr.__self__: 1"),
    "an adapted pair": (lambda r: shard(None, fsdp.from_updates(fsdp.Optimizer(closing(r), closing(2)))),
                        "SpecError: over: 1"),
    "init: seed": (lambda r: init(seed=r),
                   "SpecError: init: ranks have different settings. The first one that differs: rank 0 has seed: 0"),
    "init: model": (lambda r: init(width=3 + r),
                    "TreeError: rank 0 has weight (3, 3) torch.float32, rank 1 has weight (4, 4)"),
    "init: values": (lambda r: init(bias=float(r)),
                     "TreeError: values. The first leaf that differs: rank 0 has bias checksum "),
    "init: buffers": (lambda r: init(buffer=float(r)),
                      "TreeError: buffers. The first one that differs: rank 0 has mean (2,)"),
    "init: optimizer": (lambda r: init(optimizer=fsdp.adamw(eps=1e-8 * (r + 1))), "SpecError: optimizer.eps: 2e-08"),
}  # fmt: skip


class Given(nn.Linear):
    def __init__(self, width: int, bias: float, buffer: float) -> None:
        super().__init__(width, width)
        nn.init.constant_(self.bias, bias)
        self.register_buffer("mean", torch.full((2,), buffer))


def init(
    width: int = 3, bias: float = 0.0, buffer: float = 0.0, seed: int = 0, optimizer: Any = None, **more: Any
) -> fsdp.State:
    spec = fsdp.Spec(fsdp.local_mesh())
    return fsdp.init(lambda: Given(width, bias, buffer), spec, optimizer or fsdp.sgd(), seed=seed, **more)[0]


ALIKE: dict[str, Callable[[int], Any]] = {
    "nothing differs": lambda r: shard(None, fsdp.adamw(lr=functools.partial(warm, peak=1.0))),
    "buffers that may": lambda r: shard(
        buffers={"mean": torch.full((2,), r), "n": torch.ones(1)}, local_buffers=["m*"]
    ),
    "init: buffers that may": lambda r: init(buffer=float(r), local_buffers=["*"]),
    "what an object leaves out": lambda r: shard(None, fsdp.sgd(lr=Told(1.0, rank=r).at)),
    "what cannot be compared": lambda r: shard(None, fsdp.sgd(lr=closing(threading.Lock()))),
    "strides": lambda r: shard(params(b=torch.arange(9.0).view(3, 3).t().contiguous().t() if r else params()["b"])),
    "a buffer that is no tensor": lambda r: shard(buffers={"text": "a"}),
}


class Fails:
    """An optimizer that cannot be set up on one rank."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __fsdp_settings__(self) -> None:
        return None

    def init(self, main: Any) -> Any:
        if self.error is not None:
            raise self.error
        return ()

    def update(self, grads: Any, opt: Any, main: Any, count: Any) -> Any:
        return main, opt


def stopped(error: BaseException) -> Any:
    def unit(path: str) -> str:
        raise error

    return unit


#: what each rank does, the error of the one that fails, and what the other one's says
FAIL: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "a leaf without values": (lambda r: shard(params(a=torch.empty(2, 3, device="meta" if r else None))), "TreeError",
                              "TreeError: shard: rank 1 met TreeError: the leaf 'a' is on the meta device"),
    "a leaf that is no tensor": (lambda r: shard(params(a=3 if r else torch.ones(2))), "TreeError",
                                 "TreeError: rank 1 met TreeError"),
    "a spec that does not fit": (lambda r: shard(units=["nope"] if r else None), "SpecError",
                                 "SpecError: rank 1 met SpecError: Spec(units): the pattern"),
    "a label": (lambda r: shard(None, fsdp.sgd(lr={"nope" if r else "default": 1})), "SpecError",
                "SpecError: no leaf has the label 'nope'"),
    "not enough memory": (lambda r: shard(None, Fails(MemoryError("full") if r else None)), "MemoryError",
                          "MemoryError: rank 1 met MemoryError: full"),
    "an interrupt": (lambda r: shard(None, Fails(KeyboardInterrupt() if r else None)), "KeyboardInterrupt",
                     "RestartError: "
                     "shard: rank 1 was stopped by KeyboardInterrupt. Nothing is lost: make the same call again"),
    "a function of the user's": (lambda r: shard(units=stopped(ZeroDivisionError("by zero")) if r else None),
                                 "ZeroDivisionError", "ZeroDivisionError: rank 1 met ZeroDivisionError: by zero"),
    "init: a model": (lambda r: init(width=-1 if r else 3), "SpecError",
                      "SpecError: init: rank 1 met SpecError: the module could not be"),
    "init: an optimizer": (lambda r: init(optimizer=Fails(OSError(28, "full") if r else None)), "OSError",
                           "OSError: init: rank 1 met OSError"),
}  # fmt: skip


def outcomes() -> dict[str, tuple[str, str]]:
    """What each case raises on this rank: the type's name and the text."""
    rank = fsdp.local_mesh().get_rank()
    cases = {**{k: case[0] for k, case in DIFFER.items()}, **ALIKE, **{k: case[0] for k, case in FAIL.items()}}
    found = {}
    for name, make in cases.items():
        try:
            make(rank)
            found[name] = ("", "")
        except BaseException as error:
            found[name] = (type(error).__name__, str(error))
    state = shard()
    state = fsdp.step(fsdp.reduce(state, params()))  # and the communicators are as good as ever
    found["afterwards"] = ("", str(fsdp.full_params(state)["a"].sum().item()))
    return found


Found = list[dict[str, tuple[str, str]]]


@pytest.fixture(scope="module")
def found() -> Found:
    return launch(outcomes, nprocs=2)


def test_what_differs_is_named_on_every_rank(found: Found) -> None:
    for name, (_, said) in DIFFER.items():
        kind, _, text = said.partition(": ")
        assert [by_rank[name] for by_rank in found] == [(kind, found[0][name][1])] * 2
        assert text in found[0][name][1]
        assert ": ranks have different " in found[0][name][1]


def test_what_may_differ_passes(found: Found) -> None:
    assert {name: [by_rank[name] for by_rank in found] for name in ALIKE} == dict.fromkeys(ALIKE, [("", "")] * 2)


def test_an_error_on_one_rank_is_one_on_every_rank(found: Found) -> None:
    for name, (_, kind, said) in FAIL.items():
        elsewhere, _, text = said.partition(": ")
        assert found[1][name][0] == kind
        assert " met " not in found[1][name][1]
        assert found[0][name][0] == elsewhere
        assert text in found[0][name][1]


def test_nothing_is_broken_afterwards(found: Found) -> None:
    assert len({by_rank["afterwards"] for by_rank in found}) == 1


@pytest.mark.parametrize(
    ("differ", "said"),
    [("nothing", ()), ("experts", ("rank 0 has experts checksum ", ", rank 2 has experts checksum ")),
     ("rest", ("rank 0 has rest checksum ", ", rank 1 has rest checksum "))],
)  # fmt: skip
@each_rank(4)
def test_experts_may_differ_along_their_axis_only(differ: str, said: tuple[str, ...]) -> None:
    mesh = fsdp.local_mesh(data=2, expert=2)
    rank, expert = mesh.get_rank(), mesh.get_local_rank("expert")
    spec = fsdp.Spec(mesh, {"experts": fsdp.zero3("data"), "*": fsdp.zero3("data", "expert")})
    number = rank if differ == "experts" else expert
    tree = {"experts": torch.full((3,), number), "rest": torch.full((3,), expert if differ == "rest" else 0)}
    if said:
        refused((lambda: fsdp.shard(tree, spec), "TreeError", "values. The first leaf that differs: ", *said))
    else:
        assert fsdp.full_params(fsdp.shard(tree, spec))["experts"].tolist() == [expert] * 3


def test_one_pattern_of_buffers_is_one_pattern() -> None:
    state = shard(buffers={"mean": torch.ones(2), "ean": torch.ones(1)}, local_buffers="mean")
    assert state.local_buffers == {"mean"}


def test_one_rank_alone_is_told_what_is_wrong() -> None:
    text = r"shard\(local_buffers\): the pattern 'nope' matches nothing. There are 1 buffers"
    with pytest.raises(SpecError, match=text):
        shard(buffers={"mean": torch.ones(2)}, local_buffers=["nope"])
    with pytest.raises(SpecError, match=r"shard\(spec\): expected a Spec, .*, and got a dict"):
        fsdp.shard(params(), {"data": 2})  # type: ignore[arg-type]


def test_what_ranks_cannot_compare_is_said_when_a_state_is_printed() -> None:
    assert "cannot compare" not in str(shard(None, fsdp.adamw(lr=functools.partial(warm, peak=1.0))))
    state = shard(None, fsdp.sgd(lr=closing(threading.Lock())))
    assert str(state).endswith("\nranks cannot compare optimizer.lr.over: _thread.lock")
    for count, more in ((2, ""), (3, " and 1 more"), (5, " and 3 more")):
        state = shard(None, fsdp.sgd(lr=closing([threading.Lock() for _ in range(count)])))
        assert str(state).endswith(f"optimizer.lr.over[0]: _thread.lock, optimizer.lr.over[1]: _thread.lock{more}")


CHANGES: dict[str, Callable[[fsdp.State, int], fsdp.State]] = {
    "one clips": lambda state, rank: T.clip_by_global_norm(state, 1.0)[0] if rank else state,
    "another norm": lambda state, rank: T.clip_by_global_norm(state, 1.0 + rank)[0],
    "another value": lambda state, rank: T.clip_by_value(state, 1.0 + rank),
    "another divisor": lambda state, rank: T.divide(state, 1.0 + rank),
}


@each_rank(2)
def test_ranks_that_change_gradients_in_other_ways_hear_of_it() -> None:
    """Where no collective would tell."""
    mesh = fsdp.local_mesh()
    for change in CHANGES.values():
        state = fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(mesh, fsdp.ddp("data")), fsdp.sgd(lr=0.1))
        state, w = fsdp.unshard(state)
        state = change(fsdp.finish_reductions(fsdp.reduce(state, w)), dist.get_rank())
        with pytest.raises(fsdp.ScheduleError, match="clipping to another norm"):
            fsdp.step(state)


@pytest.mark.parametrize("placement", ["zero2", "zero3"])
@each_rank(2)
def test_ranks_that_change_gradients_after_other_microbatches_hear_of_it(placement: str) -> None:
    """Rank 1 has one microbatch less. So its peers' last reduction comes after its change, as zeros of its own."""
    order = fsdp.Schedule(order=["w"])
    spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, placement)("data"), schedule=order)
    for change in (lambda state: T.divide(state, 2.0), lambda state: T.clip_by_value(state, 0.5)):
        state = fsdp.shard({"w": torch.ones(5)}, spec, fsdp.sgd(lr=0.1))
        state, w = fsdp.unshard(state)
        for _ in range(2 - dist.get_rank()):
            state = fsdp.reduce(state, w)
        state, _ = fsdp.psum(change(fsdp.finish_reductions(state)), torch.ones(()))
        with pytest.raises(fsdp.ScheduleError, match="after another number of microbatches"):
            fsdp.step(state)


@each_rank(2)
def test_ranks_that_skip_apart_hear_of_it() -> None:
    """Rank 1 alone says skip=True; then both do, and then nobody."""
    state = fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh(), fsdp.ddp("data")), fsdp.sgd(lr=0.1))

    def ready() -> fsdp.State:
        return fsdp.reduce(state, {"w": torch.ones(5)})

    with pytest.raises(fsdp.ScheduleError, match="or with another skip="):
        fsdp.step(ready(), skip=bool(dist.get_rank()))
    for skip, weight in ((True, 1.0), (False, 0.9)):
        state = fsdp.step(ready(), skip=skip)
        assert fsdp.full_params(state)["w"][0].item() == pytest.approx(weight)


# ---------------------------------------------------------------- stopped between the parts of a call


def make_small() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.mark.parametrize("call", ["shard", "init", "replace_params"])
@each_rank(2, processes=True)
def test_a_rank_that_is_stopped_between_the_parts_of_a_call_is_met(call: str) -> None:
    """Rank 1 runs out of memory once what was given has been compared; both make the call again."""
    state = shard()
    whole = fsdp.full_params(state)
    calls: dict[str, tuple[Any, str, Callable[[], Any]]] = {
        "shard": (_shard, "resolve_transport", shard),
        "init": (_init, "resolve_transport", lambda: fsdp.init(make_small, fsdp.Spec(fsdp.local_mesh()))),
        "replace_params": (_replace, "_compare", lambda: fsdp.replace_params(state, whole)),
    }
    module, name, do = calls[call]
    if dist.get_rank():
        with mock.patch.object(module, name, side_effect=MemoryError), pytest.raises(MemoryError):
            do()
    else:
        with pytest.raises(fsdp.RestartError):
            do()
    do()
