"""What a captured step is told: of reads and constants by what warm-up saw, and of whether the stream is captured.

Without a GPU: tensors of float64 stand for those on the device.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # as where a state was made: the modes here go by what it loads
import torch.nn.functional as F

from functional_fsdp import ScheduleError, launch
from functional_fsdp.transforms._cuda_graph import graphed as questions
from functional_fsdp.transforms._cuda_graph.host_traffic import (
    UNKNOWN,
    Answering,
    Guard,
    Randoms,
    Recording,
    Sides,
    Steadiness,
)

HERE = re.escape(__file__)


class Doubles(Sides):
    """float64 lies on the device, everything else on the host."""

    def device(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float64

    def host(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.dtype is not torch.float64

    def goes_to_host(self, source: torch.Tensor, options: dict[str, Any]) -> bool:
        return self.device(source) and options.get("dtype") is torch.float32

    def goes_to_device(self, source: torch.Tensor, options: dict[str, Any]) -> bool:
        return self.host(source) and options.get("dtype") is torch.float64

    def put(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()


SIDES = Doubles(torch.device("cpu"))


def on_device(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def guarded(step: Callable[[torch.Tensor], Any], warm: torch.Tensor, now: torch.Tensor) -> tuple[Any, Any, bool]:
    """What a step gives in warm-up; while it is captured with another tensor; and whether the graph would notice."""
    with Recording(SIDES) as record:
        first = step(warm)
    found: list[torch.Tensor] = []
    with Answering(SIDES, record, found.append) as traffic:
        second = step(now)
    traffic.finished()
    return first, second, any(bool(one) for one in found)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: 1 if (x * 1.0).max() > 2 else 0,  # a bool, which is no double
    "int": lambda x: int(x[0]),
    "format": lambda x: f"{x[0]:.1f}",
    "copy": lambda x: x.to(torch.float32).tolist(),
    "copy into": lambda x: torch.zeros(3).copy_(x).tolist(),
    "equal": lambda x: torch.equal(x, on_device(1, 2, 3)),
    "allclose": lambda x: torch.allclose(x, on_device(1, 2, 3)),
    "other shape": lambda x: torch.equal(x, on_device(1, 2)),
}


@pytest.mark.parametrize("name", [name for name in READS if name != "if"])
def test_a_read_gives_what_warm_up_read_and_is_compared(name: str) -> None:
    step = READS[name]
    same, other = on_device(1, 2, 3), on_device(-7, 9, 11)
    first, second, noticed = guarded(step, same, same.clone())
    assert first == second == step(same)
    assert not noticed
    first, second, noticed = guarded(step, same, other)
    assert first == second == step(same)  # not what there is now
    assert noticed == (step(other) != first)


def test_a_read_is_seen_before_anything_has_imported_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = inspect.unwrap(Recording.__torch_dispatch__)
    again = types.FunctionType(raw.__code__, raw.__globals__)  # nobody has called it yet
    early: Any = type("Early", (Recording,), {"__torch_dispatch__": again})
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    with early(SIDES) as record:
        assert READS["item"](on_device(1, 2)) == 3
    assert [one.given for one in record.reads.values()] == [3]


def test_it_needs_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(tensor: torch.Tensor) -> Any:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", none)
    x = on_device(1, 2)
    assert guarded(lambda x: (x[0] + torch.arange(2.0).double()).sum().item(), x, x)[2] is False
    ranks: Any = types.SimpleNamespace(device=torch.device("cpu"))
    guard = Guard(ranks)
    guard.before()
    assert guard.host.item() == UNKNOWN
    guard.host.fill_(1)  # as a replay does
    assert guard.seen[0] == 1


def test_bits_are_compared_and_not_values() -> None:
    assert guarded(READS["item"], on_device(float("nan")), on_device(float("nan")))[2] is False
    assert guarded(lambda x: x[0].item(), on_device(0.0), on_device(-0.0))[2] is True
    assert guarded(READS["allclose"], on_device(1, 2, 3), on_device(1, 2, 3 + 1e-9))[2] is False


def test_a_read_in_a_backward_is_seen_there() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * grad.sum().item()

    def step(x: torch.Tensor) -> list[float]:
        leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad((Reads.apply(leaf) * x).sum(), leaf)
        return [float(one) for one in grad.float().numpy()]

    with Recording(SIDES) as record:
        step(on_device(1, 2))
    key = next(iter(record.reads))
    assert "grad.sum().item()" in key[1]


def compiled_once() -> int:
    compiled = torch.compile(lambda x: x.sin() + 1, fullgraph=True, backend="eager")
    x = on_device(1, 2)
    with Recording(SIDES):
        assert torch.equal(compiled(x), x.sin() + 1)
    with torch._dynamo.config.patch(error_on_recompile=True), Recording(SIDES):
        compiled(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_compiled_code_runs_as_it_does_without() -> None:
    """In a process of its own: after some tests torch takes no code from its cache while a mode is on."""
    assert launch(compiled_once, nprocs=1) == [1]


def refused(step: Callable[[], Any], warm: Callable[[], Any] | None = None, **options: Any) -> str:
    with Recording(SIDES) as record:
        (warm or step)()
    options = {"differs": None, **options}
    with pytest.raises(ScheduleError) as caught, Answering(SIDES, record, **options) as traffic:  # noqa: PT012
        step()
        traffic.finished()
    return str(caught.value)


def test_without_a_guard_the_line_that_reads_is_named() -> None:
    def a_librarys(x: torch.Tensor) -> float:
        return float(x.sum().item())  # the innermost line

    said = refused(lambda: a_librarys(on_device(1)))
    assert re.search(rf"{HERE}:\d+ \(return float\(x.sum\(\).item\(\)\)  # the innermost line\)", said)
    assert "host reads from the device here" in said
    assert 'host_reads="guard"' in said


def test_what_cannot_be_guarded_says_why() -> None:
    x, nothing = on_device(1, 2), lambda: None
    guard: dict[str, Any] = {"differs": lambda one: None}
    assert "where it did not in warm-up" in refused(lambda: x.sum().item(), nothing, **guard)
    assert "and not in the step that was captured" in refused(nothing, lambda: x.sum().item(), **guard)
    late = refused(lambda: x.sum().item(), differs=lambda one: None, over=lambda: True)
    assert "after step()" in late
    large = torch.zeros(9000, dtype=torch.float64)
    assert "72,000 bytes, more than a replay compares (65,536)" in refused(lambda: large.float(), **guard)
    shapes = iter([on_device(1, 2), on_device(1, 2, 3)])
    assert "float64 (3,), and read torch.float64 (2,) in warm-up" in refused(lambda: next(shapes).float(), **guard)


def test_a_constant_is_a_copy_that_lay_there_before() -> None:
    made = []

    def step(x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(3.0).double()
        into = torch.zeros(3, dtype=torch.float64)
        into.copy_(torch.ones(3))
        made.append(table)
        return table.add_(1).mul_(x) + into  # it is the step's own: it may write to it

    x = on_device(2)
    right = step(x).clone()
    first, second, noticed = guarded(step, x, x)
    assert torch.equal(first, right)
    assert torch.equal(second, right)
    assert not noticed
    with Recording(SIDES) as record:
        step(x)
    answering = Answering(SIDES, record, None)
    with answering:
        step(x)
    assert [one.tolist() for one in answering.there.values()] == [[0, 1, 2], [1, 1, 1]]  # nobody wrote there


def test_a_constant_that_changes_is_refused_with_its_line() -> None:
    numbers = iter([1.0, 2.0])
    said = refused(lambda: torch.tensor([next(numbers)]).double())
    assert re.search(rf"{HERE}:\d+ \(said = refused.*has changed since warm-up: 1.0 then, 2.0 now", said)
    said = refused(lambda: torch.ones(2).double(), lambda: None)
    assert "torch.float32 (2,)) is copied from the host to the device, which was not so in warm-up" in said


@pytest.mark.parametrize(
    "use",
    [
        lambda x, a: x * a,
        lambda x, a: x.clone().mul_(a),
        lambda x, a: torch.where(x > 0, x, a),
        lambda x, a: torch._foreach_mul([x], a),
        lambda x, a: torch._fused_sgd_(
            [x.clone()], [x], [], weight_decay=0.0, momentum=0.0, lr=a, dampening=0.0, nesterov=False, maximize=False,
            is_first_step=False,
        ),
    ],
    ids=["mul", "mul_", "where", "foreach", "rate"],
)  # fmt: skip
def test_a_number_on_the_host_that_takes_part_must_not_change(use: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    numbers = iter([0.5, 0.9])
    said = refused(lambda: use(on_device(1, 2), torch.tensor(next(numbers))))
    assert re.search(
        rf"{HERE}:\d+ .*takes part in what the device computes has changed since warm-up: 0.5 then, 0.", said
    )
    x = on_device(1, 2)
    first, second, noticed = guarded(lambda x: x * torch.tensor(0.5), x, x)
    assert first.tolist() == second.tolist() == [0.5, 1.0]
    assert not noticed


def test_an_index_on_the_host_is_a_constant() -> None:
    x = on_device(1, 2, 3)
    first, second, _ = guarded(lambda x: x[torch.tensor([2, 0])], x, x)
    assert first.tolist() == second.tolist() == [3, 1]


def test_draws_on_the_host_warn_with_the_line() -> None:
    with Recording(SIDES) as record:
        torch.rand(2)
    with Answering(SIDES, record, None) as traffic:
        torch.rand(2)
        torch.randn(2, dtype=torch.float64)  # on the device: not a word of it
        F.dropout(on_device(1, 2))
    with pytest.warns(
        RuntimeWarning, match=rf"draws random numbers on the host at {HERE}:\d+ \(torch.rand\(2\)\)"
    ) as all_:
        traffic.finished()
    assert len(all_) == 1


def test_higher_order_operators_pass() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 4, 4)
    with warnings.catch_warnings(), Recording(SIDES):
        warnings.simplefilter("ignore")  # that it is slow
        out = flex_attention(q, q, q)
    assert torch.isfinite(out).all()


# ---------------------------------------------------------------- whether the stream is captured


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the stream were captured."""
    monkeypatch.setattr(questions, "truth", lambda: True)
    for place in questions.PLACES:
        monkeypatch.setattr(place, questions.NAME, lambda: True)


def a_module(name: str) -> Callable[[], bool]:
    module = types.ModuleType(name)
    exec("import torch\ndef asks():\n    return torch.cuda.is_current_stream_capturing()", module.__dict__)
    return module.asks


@pytest.mark.usefixtures("capturing")
def test_libraries_hear_what_is_true_in_warm_up_and_torch_the_truth() -> None:
    before = torch.cuda.is_current_stream_capturing
    with questions.answered_as_in_warm_up():
        placed = torch.cuda.is_current_stream_capturing
        with questions.answered_as_in_warm_up():
            assert torch.cuda.is_current_stream_capturing is placed is torch.cuda.graphs.is_current_stream_capturing
        assert not a_module("transformers.utils.import_utils")()
        assert not a_module("torchvision.models")()
        assert a_module("torch.nn.modules._functions")()
        assert a_module("torch")()
        assert a_module("functional_fsdp._common.device")()
        asks = torch.compile(
            lambda x: x + 1 if torch.cuda.is_current_stream_capturing() else x, backend="eager", fullgraph=True
        )
        assert asks(torch.ones(1)).item() == 1
    assert torch.cuda.is_current_stream_capturing is before
    assert a_module("transformers")()


def test_transformers_asks_there() -> None:
    """Else this answers nobody."""
    transformers = pytest.importorskip("transformers.utils.import_utils")
    with questions.answered_as_in_warm_up(), pytest.MonkeyPatch.context() as patch:
        assert not transformers.is_cuda_stream_capturing()
        patch.setattr(torch.cuda, questions.NAME, lambda: True)
        assert transformers.is_cuda_stream_capturing()


# ---------------------------------------------------------------- which graph is next, and whether it pays


def ran(value: float) -> Recording:
    with Recording(SIDES) as record:
        on_device(value).sum().item()
    return record


def test_two_steps_that_read_the_same_are_steady() -> None:
    reads = Steadiness()
    found = [reads.steady]  # nothing is read
    for value in (1, 2):
        reads.ran(ran(value))
        found.append(reads.steady)
    assert found == [True, False, False]
    assert "changes from step to step (1.0, then 2.0)" in str(reads.unsteady())
    assert "on_device(value).sum().item()" in str(reads.unsteady())
    reads.ran(ran(2))
    assert reads.steady
    assert reads.values == ran(2).values() != ran(1).values()


@pytest.mark.parametrize(("every", "eager"), [(30, False), (25, False), (19, True), (1, True)])
def test_a_line_that_misses_more_than_four_times_in_a_hundred_steps_goes_eager(every: int, eager: bool) -> None:
    reads = Steadiness()
    reads.ran(ran(0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, 401):
            reads.steps += 1
            if step % every == 0 and not reads.eager:
                values = reads.values
                reads.ran(ran(step))
                reads.missed(values)
                reads.missed(reads.values)  # a peer's
    assert reads.eager == eager
    assert len(said) == eager
    if eager:
        assert "has changed 5 times in" in str(said[0].message)


def test_generators_go_back() -> None:
    import random

    import numpy as np

    ranks: Any = types.SimpleNamespace(generator=None)
    randoms = Randoms(ranks)
    assert randoms.moved() == []
    drawn = torch.rand(3), random.random(), np.random.rand()
    assert randoms.moved() == ["random", "numpy.random"]
    randoms.back()
    assert (torch.rand(3), random.random(), np.random.rand())[1:] == drawn[1:]
    randoms.back()
    assert torch.equal(torch.rand(3), drawn[0])
