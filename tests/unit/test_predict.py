"""Steps on paper: kernels counted, links chosen, lanes played, settings searched. Nothing here has ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses import FakeTensor

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._predict.hardware import HARDWARE, Counter, Link, Logged, Work
from functional_fsdp._predict.prediction import spared
from functional_fsdp._predict.tune import Candidate, _Search, meshes

WIDTH, ROWS, BLOCKS = 1024, 4096, 5
H100 = HARDWARE["H100"]


class Net(nn.Module):
    def __init__(self, depth: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def rows(n: int = ROWS) -> torch.Tensor:
    return torch.empty(n, WIDTH, dtype=torch.bfloat16, device="meta")


def spec(axes: dict[str, int], placement: Any = None, **more: Any) -> fsdp.Spec:
    precision = fsdp.Precision(compute=torch.bfloat16)
    return fsdp.Spec(axes, placement, precision=precision, schedule=fsdp.Schedule(**more))


def predicted(axes: dict[str, int], placement: Any = None, n: int = ROWS, **more: Any) -> fsdp.Prediction:
    return fsdp.predict(Net(), loss_fn, rows(n), spec(axes, placement), **{"graph": True, **more})


# ---------------------------------------------------------------- kernels


def counted(fn: Any, *args: Any) -> Work:
    counter = Counter()
    with counter:
        fn(*args)
    return counter.lap()


def test_a_product_is_counted_by_its_operations_and_its_bytes() -> None:
    a, b = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    ((kernel, times),) = counted(torch.mm, a, b).kernels
    assert (kernel.kind, kernel.flops, times) == ("product", 2 * 64 * 32 * 16, 1)
    assert kernel.nbytes == kernel.compiled == 4 * (64 * 32 + 32 * 16 + 64 * 16)


def test_views_cost_the_host_only_and_compiled_code_writes_nothing_between() -> None:
    x = torch.empty(1000, device="meta")
    work = counted(lambda: x.view(10, 100).t())
    assert (work.kernels, work.issued, work.seconds(H100)) == ((), 2, 0.0)
    work = counted(lambda: (x.sin().cos() + 1).exp())
    eager = sum(kernel.nbytes * n for kernel, n in work.kernels)
    joined = sum(kernel.compiled * n for kernel, n in work.kernels)
    assert (eager, joined) == (4 * 2 * 4000, 4000)  # read once; what leaves is written where it is read
    assert work.seconds(H100, compiled=True) < work.seconds(H100)


def test_causal_attention_is_half_of_all() -> None:
    q = torch.empty(1, 2, 64, 16, dtype=torch.bfloat16, device="meta")

    def attention(causal: bool) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, causal)

    (whole, _), (half, _) = (counted(attention, causal).kernels[0] for causal in (False, True))
    assert whole.kind == "attention"
    assert whole.flops == 2 * half.flops == 4 * 2 * 64 * 64 * 16


def test_a_kernel_takes_the_longer_of_its_arithmetic_and_its_bytes() -> None:
    thin = counted(torch.mm, torch.empty(1, 8192, device="meta"), torch.empty(8192, 8192, device="meta"))
    slower = replace(H100, bandwidth=H100.bandwidth / 2)
    assert thin.seconds(slower) == pytest.approx(2 * thin.seconds(H100), rel=0.05)
    square = counted(torch.mm, *(torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta") for _ in range(2)))
    assert square.seconds(slower) == square.seconds(H100)


def test_compiled_code_keeps_the_cheapest_tensors_that_the_rest_follows_from() -> None:
    """Of a gated layer: the product, which is half as large as its two elementwise results, and what goes on."""

    def log(*, reads: bool) -> list[Logged]:
        """Tensors: 1 is a product, 2 and 3 follow from it, 4 is a product of 3; the backward reads 1, 2 and 3."""
        forward = [
            Logged(0, False, (), ((1, 100),)), Logged(0, True, (1,), ((2, 200),)), Logged(0, True, (2,), ((3, 200),)),
            Logged(0, False, (3,), ((4, 10),)), Logged(1, False, (4,), ()),
        ]  # fmt: skip
        return [*forward, Logged(2, True, (1, 2, 3), ()), *([Logged(2, False, (3,), ())] if reads else [])]

    assert spared(log(reads=False), 2, [0]) == [-400, 0]  # 1 and 4 are kept
    assert spared(log(reads=True), 2, [0]) == [-200, 0]  # 3, too: a product reads it
    assert spared(log(reads=True), 2, []) == [0, 0]


def test_a_tensor_that_is_dearer_to_make_again_is_kept() -> None:
    log = [Logged(0, False, (), ((1, 300),)), Logged(0, True, (1,), ((2, 200),)), Logged(1, True, (2,), ())]
    assert spared(log, 1, [0]) == [0]  # 2 is smaller than 1, which nobody keeps
    log += [Logged(1, False, (1,), ())]
    assert spared(log, 1, [0]) == [-200]


def test_a_compiled_step_peaks_lower() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False, device="meta")
            self.down = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")

        def forward(self, x: torch.Tensor) -> Any:
            gate, up = self.up(x).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    model = nn.Sequential(*(Gated() for _ in range(8)))
    eager, compiled = (
        fsdp.predict(model, loss_fn, rows(), spec({"data": 2}), graph=True, compiled=one) for one in (False, True)
    )
    # what silu gives, but for the last block, whose backward has begun at the peak
    assert eager.peak - compiled.peak == 7 * ROWS * WIDTH * 2
    assert compiled.seconds < eager.seconds


# ---------------------------------------------------------------- links


def test_a_group_goes_by_the_links_within_a_host_or_by_those_of_all_its_ranks_there() -> None:
    assert H100.link(8, 1) == (H100.inside, 7)
    assert H100.link(2, 4) == (H100.inside, 1)
    across, hops = H100.link(16, 1)
    assert (across.bandwidth, hops) == (min(H100.inside.bandwidth, 8 * H100.outside.bandwidth), 15)
    alone, hops = H100.link(4, 8)  # one rank of each host
    assert (alone.bandwidth, hops) == (H100.outside.bandwidth, 3)
    assert alone.latency == pytest.approx(H100.outside.latency)


def test_unknown_hardware_is_refused() -> None:
    with pytest.raises(fsdp.SpecError, match=r"hardware='abacus': expected one of 'H100', 'H200'"):
        predicted({"data": 2}, hardware="abacus")


# ---------------------------------------------------------------- steps


def test_what_is_received_is_what_the_plan_sends() -> None:
    size = WIDTH * WIDTH * 2 * 3 // 4  # of a unit in bfloat16, of which a rank of four has a quarter
    gathers = sum(unit.gathers for unit in predicted({"data": 4}).plan.units)
    assert gathers == 2 * BLOCKS - 1  # the last one stays
    assert predicted({"data": 4}).traffic == {"data": (gathers + BLOCKS) * size}
    assert predicted({"data": 4}, fsdp.zero2("data")).traffic == {"data": 2 * BLOCKS * size}
    both = predicted({"replica": 2, "shard": 4}, fsdp.hsdp("replica", "shard")).traffic
    assert both["shard"] == (gathers + BLOCKS) * size
    assert both["replica"] == BLOCKS * WIDTH * WIDTH * 2 // 4
    assert predicted({"data": 1}).traffic == {}


def test_operations_are_three_products_for_each_weight() -> None:
    found = predicted({"data": 4})
    assert found.flops == 2 * ROWS * WIDTH * WIDTH * (3 * BLOCKS - 1)  # the first needs no gradient of its input
    assert found.utilization == found.flops / found.seconds / H100.peak(torch.bfloat16)


def test_where_a_step_is_bound() -> None:
    assert predicted({"data": 8}, n=1 << 16).bound == "compute"
    far = predicted({"data": 1024}, n=64)
    assert far.bound == "gathers along 'data'" or far.bound == "reduces along 'data'"
    assert predicted({"data": 8}, graph=False, n=64).bound == "the host"


def test_a_step_is_as_long_as_its_parts_and_no_shorter_than_compute() -> None:
    for n in (64, ROWS):
        for graph in (True, False):
            found = predicted({"data": 8}, n=n, graph=graph)
            assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=0.02)
            assert found.seconds >= found.parts["compute"]


def test_slower_links_and_hosts_make_no_step_faster() -> None:
    base = predicted({"data": 64}, n=512).seconds
    slow = Link(20e-6, 5e9)
    assert predicted({"data": 64}, n=512, links={"data": slow}).seconds > 1.5 * base
    assert predicted({"data": 64}, n=512, graph=False).seconds >= base
    assert predicted({"data": 64}, n=512, hardware=replace(H100, beside=2.0)).seconds >= base


def test_lanes_do_one_thing_at_a_time_and_compute_waits_for_its_gather() -> None:
    found = predicted({"replica": 4, "shard": 8}, fsdp.hsdp("replica", "shard"))
    for lane in ("gather", "compute", "reduce", "outer", "host", "update"):
        spans = sorted(found.timeline.lane(lane), key=lambda span: span.begin)
        assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(spans)), lane
    ready = {(span.unit, span.use): span.end for span in found.timeline.lane("gather")}
    waits = [span for span in found.timeline.lane("compute") if (span.unit, span.use) in ready]
    assert len(waits) == 2 * BLOCKS - 1
    assert all(span.begin >= ready[span.unit, span.use] for span in waits)
    reduced = [span.unit for span in found.timeline.lane("reduce")]
    assert reduced == [f"blocks.{i}" for i in reversed(range(BLOCKS)) for _ in range(2)]  # staged, then sent


def test_microbatches_gather_again_but_for_what_stays() -> None:
    one, four = (predicted({"data": 4}, microbatches=n) for n in (1, 4))
    assert four.traffic["data"] == 4 * one.traffic["data"]
    assert 3 < four.seconds / one.seconds <= 4.01
    kept = spec({"data": 4}, keep="all")
    once, often = (fsdp.predict(Net(), loss_fn, rows(), kept, graph=True, microbatches=n) for n in (1, 4))
    size = WIDTH * WIDTH * 2 * 3 // 4
    assert often.traffic["data"] - once.traffic["data"] == 3 * BLOCKS * size  # reductions only


def test_the_peak_is_that_of_step_memory_but_for_what_gpus_give_back() -> None:
    params, model = fsdp.functionalize(Net())
    state = fsdp.abstract_state(params, spec({"data": 4}), fsdp.adamw(lr=1e-3))
    found = T.step_memory(T.forward_backward(model, loss_fn), state, rows())
    on_paper = predicted({"data": 4}).memory
    assert on_paper.parts["activations"] >= found.parts["activations"]  # gradients wait there for their copy
    assert [one.unit for one in on_paper.stretches] == [one.unit for one in found.stretches]
    assert on_paper.parts["main weights"] == found.parts["main weights"]


def test_a_model_that_asks_for_values_of_all_but_fake_tensors_is_predicted_as_any_other() -> None:
    """As those of transformers, which look for packed sequences: `if not is_fake(x) and (x == 0).all()`."""

    class Looks(nn.Module):
        def __init__(self, always: bool = False) -> None:
            super().__init__()
            self.net, self.always = Net(), always

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (self.always or not isinstance(x, FakeTensor)) and bool(x.detach().view(-1)[0] == 0):
                x = x + 1
            return self.net(x)

    given = spec({"data": 8})
    plain, looks = (fsdp.predict(model, loss_fn, rows(), given, graph=True) for model in (Net(), Looks()))
    assert (looks.seconds, looks.peak, looks.parts) == (plain.seconds, plain.peak, plain.parts)
    with pytest.raises(fsdp.ScheduleError, match=r"predict: the step asks for a tensor's value, at .*test_predict\.py"):
        fsdp.predict(Looks(always=True), loss_fn, rows(), given)


def test_attention_and_norms_keep_what_kernels_of_gpus_keep() -> None:
    """Queries, keys and values, the output and a number a row of attention; the input and a number a row of a norm."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH, device="meta")
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
            return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def alive(n: int) -> int:
        model = nn.Sequential(*(Layer() for _ in range(n)))
        x = torch.empty(2, 512, WIDTH, dtype=torch.bfloat16, device="meta")
        found = fsdp.predict(model, lambda m, x: m(x).sum(), x, spec({"data": 2}))
        return found.memory.stretches[0].alive

    each = (alive(6) - alive(4)) // 2
    row = 2 * 2 * 512 * WIDTH  # bytes of the input
    small = 4 * 2 * 512 + 4 * 2 * 16 * 512
    # the sum that comes next, the norm's output, q, k and v, and attention's output
    assert each == pytest.approx(6 * row + small, abs=4096)


def test_what_recomputes_takes_longer_and_keeps_less() -> None:
    model = nn.Sequential(*(nn.Sequential(Net(2), nn.Tanh()) for _ in range(6)))
    plain, again = (
        fsdp.predict(one, loss_fn, rows(), spec({"data": 2}), graph=True) for one in (model, T.remat(model, "*"))
    )
    assert again.flops > plain.flops
    assert again.seconds > plain.seconds
    assert again.peak < plain.peak


def test_a_prediction_says_that_it_does_not_fit() -> None:
    small = replace(H100, memory=1 << 20)
    assert "which H100 (1.0 MiB) does not hold" in repr(predicted({"data": 2}, hardware=small))
    assert "nobody has measured this hardware" in repr(predicted({"data": 2}, hardware="B200"))
    assert "does not hold" not in repr(predicted({"data": 2}))


def test_compute_is_measured_once_and_goes_into_the_prediction() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    spec, x = fsdp.Spec({"data": 4}), torch.randn(4, 8)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    seconds = fsdp.measure_compute(model, loss, x, spec)
    found = fsdp.predict(model, loss, x, spec, graph=True, compute=seconds)
    assert len(seconds) == len(found.plan.groups)
    assert all(s > 0 for s in seconds)
    assert found.parts["compute"] == pytest.approx(sum(seconds))
    assert fsdp.measure_compute(model, loss, x, spec) is seconds
    with pytest.raises(fsdp.SpecError, match=r"predict\(compute=\): 1 uses were measured, and this model has"):
        fsdp.predict(model, loss, x, spec, compute=[1.0])


class Counted(nn.Module):
    calls = 0  # with values

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += type(x) is torch.Tensor and not x.is_meta
        out: torch.Tensor = self.down(self.up(x).tanh())
        return out


@pytest.mark.parametrize("kind", ["closure", "partial", "without a hash"])
def test_compute_of_another_loss_function_is_measured(kind: str) -> None:
    """Also where its code is the same; and of the same one once."""
    calls: list[float] = []

    @dataclass
    class Loss:
        scale: float

        def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            calls.append(self.scale)
            return self.scale * cast(torch.Tensor, model(x)).sum()

    def made(scale: float) -> Callable[..., torch.Tensor]:
        loss = Loss(scale)
        if kind == "closure":
            return lambda model, x: loss(model, x)
        return partial(loss) if kind == "partial" else loss

    model, spec = nn.Sequential(nn.Linear(8, 8)), fsdp.Spec({"data": 2})
    one, two = made(1.0), made(2.0)
    for loss in (one, two, one):
        fsdp.measure_compute(model, loss, torch.ones(4, 8), spec, rounds=1)
    assert {1.0, 2.0} == {*calls}
    assert calls.count(2.0) * (2 if kind == "without a hash" else 1) == calls.count(1.0)


def test_what_recomputes_is_measured_as_it_does() -> None:
    """By `T.remat`, and by what a budget chooses: not what was measured of the model without them."""
    model, optimizer = nn.Sequential(*(Counted() for _ in range(2))), fsdp.sgd(lr=0.1)
    spec, x = fsdp.Spec({"data": 2}), torch.randn(512, 8)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    plain, again = (fsdp.predict(one, loss, x, spec, optimizer).peak for one in (model, T.remat(model, "*")))
    forwards = []
    for one in (model, T.remat(model, "*"), T.budget(model, int(plain + again) // 2, "*", moves=False)):
        before = Counted.calls
        fsdp.measure_compute(one, loss, x, spec, optimizer, rounds=1)
        forwards.append(Counted.calls - before)
    assert forwards[1] == 2 * forwards[0]
    assert forwards[0] < forwards[2] <= forwards[1]


# ---------------------------------------------------------------- settings


def test_meshes_have_one_axis_or_shards_of_whole_hosts() -> None:
    assert meshes(8) == [{"data": 8}]
    assert {"replica": 8, "shard": 8} in meshes(64)
    assert all(one.get("data", 0) == 64 or one["replica"] * one["shard"] == 64 for one in meshes(64))


def test_the_best_beats_all_others_and_fits() -> None:
    found = fsdp.tune(Net(), loss_fn, rows(), gpus=16)
    every = [*found.front, *found.others]
    assert found.best is min(every, key=lambda one: (round(one.seconds, 6), one.peak))
    assert found.best in found.front
    assert found.tried >= 8
    assert all(one.peak <= found.budget for one in every)
    assert all(one.why for one in found.others)
    again = fsdp.predict(found.model, loss_fn, rows(), found.spec, graph=True)
    assert again.seconds == pytest.approx(found.prediction.seconds)
    assert f"{found.tried} candidates in" in repr(found)


def test_what_does_not_fit_recomputes() -> None:
    model = nn.Sequential(*(nn.Sequential(Net(2), nn.Tanh()) for _ in range(4)))
    tune = partial(fsdp.tune, model, loss_fn, rows(), mesh={"data": 4}, moves=False)
    free = tune()
    tight = tune(budget=int(0.8 * free.best.peak))
    assert tight.best.peak <= tight.budget < free.best.peak
    assert not tight.best.estimated
    assert tight.best.seconds >= free.best.seconds
    with pytest.raises(fsdp.SpecError, match=r"tune: nothing fits in 1.0 MiB a rank; the least that was found is"):
        tune(budget=1 << 20)


def test_settings_that_there_was_no_time_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_fsdp._predict.tune.LIMIT", 0.0)
    model = nn.Sequential(*(nn.Sequential(Net(1), nn.Tanh()) for _ in range(2)))
    with pytest.raises(fsdp.SpecError, match=r"nothing fits in .*, and \d+ settings were not rehearsed within 0 s"):
        fsdp.tune(model, loss_fn, rows(), mesh={"data": 4}, moves=False, budget=1 << 20)


def test_settings_that_were_found_run() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x = torch.randn(4, 8)
    plain = lambda model, x: model(x).square().mean()  # noqa: E731
    found = fsdp.tune(blocks, plain, x, gpus=1, precision=fsdp.Precision())
    params, _ = fsdp.functionalize(blocks)
    state = fsdp.shard(params, found.on(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    state, loss = T.forward_backward(found.model, plain)(state, x)
    torch.testing.assert_close(loss, plain(blocks, x).detach())
    fsdp.step(state)
    two = fsdp.tune(blocks, plain, x, gpus=2, precision=fsdp.Precision())
    with pytest.raises(fsdp.SpecError, match=r"on\(mesh\): these settings are for a mesh of \{'data': 2\}"):
        two.on(fsdp.local_mesh())


def test_other_goals() -> None:
    whole = fsdp.tune(Net(), loss_fn, rows(), gpus=1).best.peak
    fewest = fsdp.tune(Net(), loss_fn, rows(), gpus=16, goal="gpus", budget=int(0.9 * whole), moves=False)
    assert 1 <= fewest.prediction.spec.axes["data"] <= 2 or fewest.best.ways
    more = fsdp.tune(Net(), loss_fn, rows(256), gpus=2, goal="tokens", budget=1 << 30, moves=False)
    assert more.best.batch > 1
    largest = fsdp.tune(Net, loss_fn, rows(64), gpus=2, goal="model", budget=1 << 27, moves=False)
    assert largest.depth is not None
    assert largest.depth > 8
    assert largest.best.peak <= 1 << 27


def test_either_a_mesh_or_a_number_of_gpus() -> None:
    with pytest.raises(fsdp.SpecError, match=r"tune: expected mesh=\{axis: ranks\} or gpus=, one of them"):
        fsdp.tune(Net(), loss_fn, rows())
    with pytest.raises(fsdp.SpecError, match=r"tune: expected a module, not function; a function is for"):
        fsdp.tune(lambda depth: Net(depth), loss_fn, rows(), gpus=2)


def test_slower_settings_are_tried_where_the_fastest_do_not_fit() -> None:
    """Of five only the slowest fits as it is rehearsed, of which the estimate has said that it does not."""
    one = fsdp.predict(Net(), loss_fn, rows(), spec({"data": 2}))
    tried: list[int] = []

    class Trial:
        def fitting(self, before: int, limit: int, peak_of: Any) -> Any:
            tried.append(before)
            return ("way",) if len(tried) == 5 else None, before, ("way",)

        def in_words(self, ways: Any) -> dict[str, str]:
            return {"blocks.0": "way"}

    class Search(_Search):
        def __init__(self) -> None:
            self.asked: Any = SimpleNamespace(budget=one.peak, microbatches=1)
            self.unlikely, self.least = [Candidate(one.spec, replace(one, seconds=5.0), {}, freed=1)], None

        def trial(self, times: int) -> Any:
            return Trial()

        def predicted(self, spec: Any, times: int, ways: Any) -> Any:
            return one

    found = [Candidate(one.spec, replace(one, seconds=float(i)), {}, freed=1) for i in range(4)]
    best = Search().verified(found)
    assert best is not None
    assert best.ways == {"blocks.0": "way"}
    assert found == [best]
