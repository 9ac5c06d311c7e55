"""Settings as lines: equal ones give equal lines in every process, and what differs shows where it does."""

from __future__ import annotations

import functools
import math
import threading
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import functional_fsdp as fsdp
from functional_fsdp._common.device import ROW, _odd, checksum
from functional_fsdp._spec.settings import LONG, describe_settings, opaque_settings

PEAK = 0.1


def warm(count: torch.Tensor, peak: float = 1.0, *, length: int = 10) -> torch.Tensor:
    return peak * PEAK * (count / length).clamp(max=1)


def closing(over: Any) -> Any:
    return lambda count: count * over


def later(over: Any) -> Any:
    return lambda count: over * count


def with_constant(text: str) -> Any:
    scope: dict[str, Any] = {"__name__": "somewhere"}
    exec(f"def f(count):\n    return count * {text}", scope)
    return scope["f"]


class Rate:
    def __init__(self, peak: float) -> None:
        self.peak, self.me = peak, self

    def at(self, count: torch.Tensor) -> torch.Tensor:
        return count * self.peak


class Slotted:
    __slots__ = ("peak",)

    def __init__(self, peak: float) -> None:
        self.peak = peak


class Colour(Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Known:
    lr: Any
    note: str = field(default="", compare=False)

    @functools.cached_property
    def worked_out(self) -> int:
        return id(self)


class Picky:
    """Says itself what counts."""

    def __init__(self, peak: float, rank: int) -> None:
        self.peak, self.rank = peak, rank

    def __fsdp_settings__(self) -> Any:
        return {"peak": self.peak}


def cyclic(end: int) -> list[Any]:
    loop: list[Any] = [[]]
    loop[0].append((loop, end))
    return loop


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "number": (0.1, 0.2, "x: 0.2"),
    "nan": (math.nan, 1.0, "x: 1.0"),
    "a bool is no number": (1, True, "x: True"),
    "text": ("a", "b", "x: 'b'"),
    "long text": ("a" * 500 + "b", "a" * 500 + "c", "503 characters"),
    "bytes": (b"a", b"b", "x: b'b'"),
    "list": ([1, 2, 3], [1, 3, 2], "x: (1, 3, 2)"),
    "long list": ([*range(999), 1], [*range(999), 2], "characters"),
    "nested": ([1, [2, {}]], [1, [2, {"a": 1}]], "x[1][1]: dict of 1"),
    "set": ({1, 2}, {1, 3}, "x: set {1, 3}"),
    "dict": ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "x['b']: 3"),
    "keys of two types": ({0: 1}, {"0": 1}, "x['0']: 1"),
    "ordered": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), "x['b']: 2"),
    "named tuple": (Pair(1, 2), Pair(1, 3), "x.second: 3"),
    "dataclass": (Known(1), Known(2), "x.lr: 2"),
    "enum": (Colour.RED, Colour.BLUE, "Colour.BLUE"),
    "dtype": (torch.float32, torch.float64, "dtype torch.float64"),
    "path": (Path("a"), Path("b"), "'b'"),
    "array": (np.array([1.0, 2.0]), np.array([2.0, 1.0]), "numpy.ndarray (2,) float64"),
    "tensor": (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), "tensor (2,) torch.float32 [2.0, 1.0]"),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2), "tensor (3, 2)"),
    "class": (Rate, Slotted, "type test_settings.Slotted"),
    "attributes": (Rate(1.0), Rate(2.0), "x.peak: 2.0"),
    "slots": (Slotted(1.0), Slotted(2.0), "x.peak: 2.0"),
    "method": (Rate(1.0).at, Rate(2.0).at, "x.__self__.peak: 2.0"),
    "builtin": (math.sin, math.cos, "builtin math.cos"),
    "method of a list": ([1].append, [2].append, "x.__self__: (2,)"),
    "function": (warm, closing, "function test_settings.closing"),
    "code": (closing(2), later(2), "later.<locals>.<lambda>"),
    "constant": (with_constant("2"), with_constant("3"), "x.code"),
    "closure": (closing(2), closing(3), "x.over: 3"),
    "closure over a closure": (closing(closing(2)), closing(closing(3)), "x.over.over: 3"),
    "closure over a tensor": (closing(torch.ones(2)), closing(torch.zeros(2)), "x.over: tensor (2,)"),
    "default": (warm, types.FunctionType(warm.__code__, globals(), "warm", (2.0,)), "x.peak: 2.0"),
    "global": (warm, types.FunctionType(warm.__code__, {**globals(), "PEAK": 0.2}, "warm", (1.0,)), "x.PEAK: 0.2"),
    "partial": (functools.partial(warm, peak=1.0), functools.partial(warm, peak=2.0), "x.keywords['peak']: 2.0"),
    "wrapped": (torch.no_grad()(closing(2)), torch.no_grad()(closing(3)), "x.func.over: 3"),
    "cache": (functools.lru_cache(closing(2)), functools.lru_cache(closing(3)), "x.over: 3"),
    "compiled": (torch.compile(closing(2)), torch.compile(closing(3)), "x.over: 3"),
    "cycle": (cyclic(1), cyclic(2), "x[0][0][1]: 2"),
    "optimizer": (fsdp.adamw(lr=0.1), fsdp.adamw(lr=0.2), "x.lr: 0.2"),
    "kind of optimizer": (fsdp.adamw(), fsdp.sgd(), "x: functional_fsdp._optim.sgd.Sgd"),
    "adapted optimizer": (
        fsdp.from_updates(fsdp.Optimizer(len, closing(2))),
        fsdp.from_updates(fsdp.Optimizer(len, closing(3))),
        "pair.update.over: 3",
    ),
    "schedule": (fsdp.Schedule(), fsdp.Schedule(prefetch=2), "x.prefetch: 2"),
    "average": (fsdp.Spec({"d": 2}), fsdp.Spec({"d": 2}, average="sum"), "x.average: 'sum'"),
    "labels": (
        fsdp.Spec({"d": 2}, labels={"a": "b"}),
        fsdp.Spec({"d": 2}, labels={"a": "c"}),
        "x.labels: (('a', 'c'),)",
    ),
    "said by itself": (Picky(1.0, 0), Picky(2.0, 0), "x['peak']: 2.0"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_shows_where_it_does(name: str) -> None:
    one, other, expected = DIFFERENT[name]
    mine, theirs = describe_settings(one, "x"), describe_settings(other, "x")
    assert mine == describe_settings(one, "x")
    assert mine != theirs
    first = next(k for k, line in enumerate(theirs) if mine[k : k + 1] != [line])
    assert any(expected in line for line in theirs[first:])


SAME: dict[str, tuple[Any, Any]] = {
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "order of a set": ({"a", "b", "c"}, {"c", "b", "a"}),
    "nan": (math.nan, float("nan")),
    "closures": (closing(2), closing(2)),
    "methods": (Rate(1.0).at, Rate(1.0).at),
    "tensors of other strides": (torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous()),
    "cycles": (cyclic(1), cyclic(1)),
    "devices": (torch.device("cuda", 0), torch.device("cuda", 1)),
    "what it says does not count": (Picky(1.0, 0), Picky(1.0, 1)),
    "specs": (fsdp.Spec({"d": 2}), fsdp.Spec({"d": 2}, fsdp.Placement(("d",), ("d",), ("d",)))),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_settings_give_equal_lines(name: str) -> None:
    one, other = SAME[name]
    assert describe_settings(one, "x") == describe_settings(other, "x")


def test_what_was_worked_out_from_the_rest_is_left_out() -> None:
    one, other = Known(1), Known(1)
    assert one.worked_out != other.worked_out
    assert describe_settings(one) == describe_settings(other)


def test_every_line_of_an_optimizer() -> None:
    assert describe_settings(fsdp.sgd(lr={"norm": 0.1, "default": 0.2}), "sgd") == [
        "sgd: functional_fsdp._optim.sgd.Sgd",
        "sgd.lr: dict of 2",
        "sgd.lr['default']: 0.2",
        "sgd.lr['norm']: 0.1",
        "sgd.momentum: 0.0",
        "sgd.weight_decay: 0.0",
        "sgd.nesterov: False",
    ]


def test_what_cannot_be_looked_into_is_listed() -> None:
    held = {"lock": threading.Lock(), "generator": torch.Generator(), "meta": torch.empty(2, device="meta"), "n": 1}
    assert opaque_settings(held, "x") == [
        "x['generator']: torch._C.Generator",
        "x['lock']: _thread.lock",
        "x['meta']: tensor (2,) torch.float32 of type torch.Tensor on meta",
    ]
    assert all(line in describe_settings(held, "x") for line in opaque_settings(held, "x"))
    assert opaque_settings(closing(held["lock"]), "lr") == ["lr.over: _thread.lock"]
    assert opaque_settings(fsdp.adamw(lr=warm), "x") == []


def test_deep_and_large_values_come_to_an_end() -> None:
    deep: list[Any] = [1, []]
    for _ in range(5000):
        deep = [deep, []]
    assert "levels deep" in opaque_settings(deep, "x")[0]
    many = [{"a": i} for i in range(20_000)]
    assert "10000 settings" in opaque_settings(many, "x")[-1]
    assert all(len(line) < 4 * LONG for line in describe_settings(many, "x"))


def every_line() -> list[str]:
    return [line for name, (*two, _) in DIFFERENT.items() for one in two for line in describe_settings(one, name)]


def test_other_processes_say_the_same() -> None:
    """Whatever order they hash in, and wherever their objects lie."""
    assert fsdp.launch(every_line, nprocs=2) == [every_line()] * 2


# ---------------------------------------------------------------- checksums


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_is_of_the_bits_in_their_order(dtype: torch.dtype) -> None:
    a = torch.arange(35).view(5, 7)
    a = (a % 3 == 0) if dtype is torch.bool else a.to(dtype)
    assert checksum(a) == checksum(a.clone()) == checksum(a.t().contiguous().t()) == checksum(torch.stack([a, a])[1])
    for other in (a.flip(0), a.flip(1), a.t(), a.roll(1), a.roll(1, 0), ~a if dtype is torch.bool else a + 1):
        assert checksum(a) != checksum(other)


def test_weights_of_words_are_splitmix64s() -> None:
    """The first numbers of its authors' program for the seed 0, made odd."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [n % (1 << 64) for n in _odd(torch.arange(4)).tolist()] == [n | 1 for n in first]


def test_a_checksum_of_one_element_with_any_stride() -> None:
    one = torch.arange(4.0)[1:2].as_strided((1,), (2,))
    assert int(checksum(one)) == int(checksum(torch.tensor([1.0])))


def test_a_checksum_sees_signs_and_pairs() -> None:
    """Changes that sums, and weights in a row, do not see."""
    for before, after in (
        ([1.0, -1.0], [-1.0, 1.0]),
        ([0.0, -0.0], [-0.0, 0.0]),
        ([1.0, 2.0, 2.0, 1.0], [2.0, 1.0, 1.0, 2.0]),
        ([1.0, 0.0], [1.0, -0.0]),
    ):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert checksum(torch.tensor(before, dtype=dtype)) != checksum(torch.tensor(after, dtype=dtype))


def test_checksums_of_many_rows() -> None:
    """Tensors larger than a row, than what is done at once, and with a rest."""
    for numel in (0, 1, 3, 4 * ROW, 4 * ROW + 1, 40 * ROW + 7):
        a = torch.randint(0, 255, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(numel))
        assert checksum(a) == checksum(a.clone())
        for at in range(0, numel, max(numel // 7, 1)):
            b = a.clone()
            b[at] ^= 1
            assert checksum(a) != checksum(b)
    a = torch.arange(3 * ROW)
    assert checksum(a) != checksum(a.roll(ROW))


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=2, max_size=20), st.randoms())
def test_a_permutation_changes_the_checksum(values: list[int], random: Any) -> None:
    other = values[:]
    random.shuffle(other)
    a, b = (torch.tensor(x, dtype=torch.int32) for x in (values, other))
    assert bool(checksum(a) == checksum(b)) == (values == other)


def test_a_checksum_needs_no_alignment() -> None:
    a = torch.arange(64, dtype=torch.uint8)
    assert checksum(a[1:13]) == checksum(a[1:13].clone())
