"""CUDA graphs: a replayed step is the eager one, bit for bit; and what happens around replays."""

from __future__ import annotations

import gc
import os
import statistics
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from gpu.compared import weights_differ
from gpu.machine import deterministic, need_ranks, own_gpus
from gpu.traces import recorded
from support.problems import LOOPS

import functional_fsdp as fsdp
from functional_fsdp import Schedule, ScheduleError, Spec, StaleStateError, launch
from functional_fsdp import transforms as T
from functional_fsdp._runtime.runtime import runtime_of
from functional_fsdp.extend import Ranks, Session
from functional_fsdp.transforms._cuda_graph.capturing import captured
from functional_fsdp.transforms._cuda_graph.capturing import cuda_call as call

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products
pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("fresh_workers")]
RANKS = 2
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def rate(count: torch.Tensor) -> torch.Tensor:
    return 1e-2 * ((count + 1) / 20).clamp(max=1.0)


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True)


def made(transport: Any, **schedule: Any) -> tuple[fsdp.State, Any]:
    precision = fsdp.Precision(compute=torch.float32, wire=torch.bfloat16)
    spec = Spec(fsdp.local_mesh(), precision=precision, schedule=Schedule(**schedule), transport=transport)
    state, model = fsdp.init(Net, spec, fsdp.adamw(lr=rate, weight_decay=0.1), seed=0)
    forward_backward = T.accumulate(T.forward_backward(model, loss_fn), 2)
    step = T.skip_nonfinite(fsdp.step)

    def train_step(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> Any:
        state, loss = forward_backward(state, x, y)
        state, norm = T.clip_by_global_norm(state, 0.5)
        state, mean = fsdp.pmean(state, loss)
        return step(state), loss, {"norm": norm, "mean": mean}

    return state, train_step


def device(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.to("cuda" if torch.cuda.is_available() else "cpu") for t in tensors]


def look(state: fsdp.State) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((state.main, state.opt, state.buffers, state.extras, state.count))
    return [leaf.detach().cpu().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


@deterministic()
def hundred(transport: Any, graph: bool, steps: int, schedule: dict[str, Any]) -> tuple[list[Any], list[torch.Tensor]]:
    state, train_step = made(transport, **schedule)
    if graph:
        train_step = T.cuda_graph(train_step)
    seen = []
    for i in range(steps):
        x, y = device(batch(i))
        if i == 50:
            y = y / 0  # a step that is skipped
        state, loss, rest = train_step(state, x, y)
        seen.append(torch.stack([loss, rest["norm"], rest["mean"]]))
    if graph:
        (captured,) = train_step.graphs.values()
        assert captured.graph is not None
    return [s.cpu() for s in seen], look(state)


def same(transport: Any, steps: int = 100, **schedule: Any) -> None:
    """Losses, norms, weights, moments, statistics and counts, bit for bit."""
    eager, replayed = (launch(hundred, (transport, graph, steps, schedule), nprocs=RANKS) for graph in (False, True))
    for (numbers, leaves), (again, others) in zip(eager, replayed, strict=True):
        assert len({str(n) for n in numbers}) == steps  # something happened
        for a, b in zip(numbers, again, strict=True):
            assert torch.equal(a, b) or bool(a.isnan().any() and b.isnan().any())
        assert all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))


@pytest.mark.parametrize("transport", ["collective", "copy_engine"])
def test_a_hundred_replayed_steps_are_the_eager_ones_bit_for_bit(transport: str) -> None:
    same(transport)


@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("preset", ["zero3", "zero2", "ddp", "hsdp"])
def test_a_replayed_step_is_the_plain_modules(preset: str, loop: str) -> None:
    ranks = 4 if preset == "hsdp" else RANKS
    need_ranks(ranks)
    for way in ("lanes", "graph"):
        for differ, _ in launch(weights_differ, (ranks, preset, loop, way), nprocs=ranks):
            assert differ < 1e-9


@pytest.mark.parametrize("way", ["graph T.aot_eager", "graph T.inductor"])
@pytest.mark.parametrize("loop", list(LOOPS))
def test_a_replayed_step_that_was_compiled_whole_is_the_plain_modules(loop: str, way: str) -> None:
    for differ, _ in launch(weights_differ, (RANKS, "zero3", loop, way), nprocs=RANKS):
        assert differ < 1e-9


# ---------------------------------------------------------------- around replays


def around(folder: str) -> dict[str, Any]:
    state, eager_step = made("collective")
    train_step = T.cuda_graph(eager_step, warmup=2)
    found: dict[str, Any] = {}
    for i in range(4):
        state, loss, _ = train_step(state, *device(batch(i)))
    tensors = [*state.main.values(), *state.opt.mean.values()]
    places = [t.local.data_ptr() for t in tensors]
    kept = loss.clone()

    fsdp.save(state, folder)
    twin = state.__deepcopy__({})
    for i in range(4, 7):
        state, loss_later, _ = train_step(state, *device(batch(i)))
    found["moved"] = places != [t.local.data_ptr() for t in tensors]
    found["copies"] = torch.equal(kept, loss) and not torch.equal(loss, loss_later)
    expected = look(state)

    loaded = fsdp.load(folder, like=state)  # from elsewhere: copied in
    for i in range(4, 7):
        loaded, _, _ = train_step(loaded, *batch(i))  # a batch on the host: copied too
    found["loaded"] = all(torch.equal(a, b) for a, b in zip(look(loaded), expected, strict=True))
    try:
        train_step(state, *device(batch(7)))
    except StaleStateError as error:
        found["stale"] = str(error)
    for i in range(4, 7):  # some eagerly, some replayed
        twin, _, _ = (eager_step if i == 5 else train_step)(twin, *device(batch(i)))
    found["mixed"] = max(
        float((a.double() - b.double()).abs().max()) for a, b in zip(look(twin), expected, strict=True) if a.numel()
    )
    found["steps"] = twin.steps, int(twin.count)

    small = T.cuda_graph(eager_step, warmup=1, graphs=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            for rows in (4, 8, 12):
                twin, _, _ = small(twin, *device(batch(0, rows)))
    found["graphs"] = len(small.graphs)
    found["said"] = [str(w.message)[:60] for w in said if "signatures" in str(w.message)]
    return found


def test_states_from_elsewhere_shapes_checkpoints_and_eager_steps_between(tmp_path: Path) -> None:
    for found in launch(around, (str(tmp_path / "saved"),), nprocs=RANKS):
        assert not found["moved"]
        assert found["copies"]
        assert found["loaded"]
        assert "put another state in this one's memory" in found["stale"]
        assert found["mixed"] < 1e-6
        assert found["steps"] == (7, 7)
        assert found["graphs"] == 2
        assert len(found["said"]) == 1


def refused() -> dict[str, str]:
    state, eager_step = made("collective")
    found: dict[str, str] = {}

    def looks(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = eager_step(state, x, y)
        loss = out[1]
        loss.item()
        return out

    def looks_early(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> Any:
        assert x.sum().item() != 0
        return eager_step(state, x, y)

    def outside(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> Any:
        state, _ = Session.unshard(state, ("head",))
        state = fsdp.release(state, "head")
        return eager_step(state, x, y)

    sent = iter(range(100))

    def sends(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> Any:
        return eager_step(state, x + torch.full((WIDTH,), float(next(sent))).to(x.device), y)

    def picks(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> Any:
        return eager_step(state, x, y[y < 1e9].reshape(y.shape))

    def looks_back(graph: Any, inputs: Any) -> Any:
        torch.zeros((), device="cuda").item()  # as Inductor does with constants
        return graph.forward

    @partial(torch.compile, backend=looks_back)
    def changed(x: torch.Tensor, captured: bool) -> torch.Tensor:
        return x * 2 if captured else x + 0

    def compiles(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> Any:
        return eager_step(state, changed(x, torch._C._cuda_isCurrentStreamCapturing()), y)

    for step in (looks, looks_early, outside, sends, picks, compiles):
        graphed = T.cuda_graph(step, warmup=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the use outside the plan
            state = graphed(state, *device(batch(0)))[0]
        before = look(state)
        try:
            graphed(state, *device(batch(1)))
        except ScheduleError as error:
            found[step.__name__] = str(error)
        assert all(torch.equal(a, b) for a, b in zip(look(state), before, strict=True))
        state = eager_step(state, *device(batch(2)))[0]  # it goes on, random numbers too
        torch.randn(3, device="cuda")

    graphed = T.cuda_graph(eager_step, warmup=1)
    for i in range(3):
        state = graphed(state, *device(batch(i)))[0]
    local = next(iter(state.main.values())).local
    local.data = local.data.clone()
    try:
        graphed(state, *device(batch(0)))
    except ScheduleError as error:
        found["moved"] = str(error)
    return found


def test_what_cannot_be_captured_is_an_error_with_its_cause() -> None:
    for found in launch(refused, nprocs=RANKS):
        assert "test_graph.py" in found["looks"]
        assert "loss.item()" in found["looks"]
        for name in ("looks", "looks_early"):
            assert "the host reads from the device here" in found[name]
        assert "the host waits for the device" in found["picks"]
        assert "y[y < 1e9]" in found["picks"]
        assert "not what the schedule expects" in found["outside"]
        assert (
            "has changed since warm-up: [0.0, 0.0, 0.0, 0.0] ... then, [1.0, 1.0, 1.0, 1.0] ... now" in found["sends"]
        )
        assert "torch.full((WIDTH,), float(next(sent)))" in found["sends"]
        assert "a part is compiled while it is captured" in found["compiles"]
        assert "was moved in memory" in found["moved"]


def parted() -> tuple[list[str], bool]:
    """Ranks that come late, or abandon a step: the others wait in the vote, or hear of it there, and all go on."""
    state, eager_step = made("collective")
    train_step = T.cuda_graph(eager_step, warmup=1)
    for i in range(3):
        state = train_step(state, *device(batch(i)))[0]
    twin = state.__deepcopy__({})
    if dist.get_rank() == 1:
        time.sleep(0.5)  # it looks for better data, say
    state = train_step(state, *device(batch(3)))[0]
    said: list[str] = []
    data = device(batch(4))  # before: a copy waits for the device, and the device for the other rank
    for _ in range(2):
        try:
            if dist.get_rank() == 1 and not said:
                fsdp.unshard(state, "head")
                raise ValueError("bad data")
            state = train_step(state, *data)[0]
            break
        except (ValueError, fsdp.RestartError) as error:
            said.append(type(error).__name__)
    for i in (3, 4):
        twin = eager_step(twin, *device(batch(i)))[0]
    close = [torch.allclose(a.double(), b.double(), atol=1e-6) for a, b in zip(look(state), look(twin), strict=True)]
    return said, all(close)


def test_ranks_that_parted_before_a_replay_meet_again() -> None:
    assert launch(parted, nprocs=RANKS) == [(["RestartError"], True), (["ValueError"], True)]


def host_time() -> float:
    state, eager_step = made("collective")
    train_step = T.cuda_graph(eager_step)
    data = device(batch(0))
    times = []
    for i in range(60):
        torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        state = train_step(state, *data)[0]
        if i >= 10:
            times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


@own_gpus
def test_the_host_launches_a_replay_within_a_millisecond() -> None:
    assert max(launch(host_time, nprocs=RANKS)) < 1.0


def zeroed() -> tuple[int, bool]:
    """A graph of memsets, small and large, of whole words and not: how many became kernels, and what a replay did."""
    run = runtime_of(fsdp.local_mesh())
    spans = [(0, 4), (8, 1024), (2048, 3), (4096, 16384), (1 << 20, 1 << 19)]  # bytes: from, how many
    memory = torch.zeros(1 << 21, dtype=torch.uint8, device=run.device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), captured(Ranks(run), torch.cuda.graph_pool_handle()) as graph:
        for value, (begin, size) in enumerate(spans):
            call("cuMemsetD8Async", memory.data_ptr() + begin, value, size, stream.cuda_stream)
        memory[-1:].add_(1)
    memory.fill_(7)
    expected = memory.clone()
    for value, (begin, size) in enumerate(spans):
        expected[begin : begin + size] = value
    expected[-1] = 8
    torch.cuda.synchronize()
    with recorded() as traces:
        graph.replay()
    return sum(kernel.name == "fill" for kernel in traces[0].kernels), torch.equal(memory, expected)


def test_small_memsets_of_a_graph_are_kernels() -> None:
    """All but the one of three bytes and the one of half a megabyte."""
    assert launch(zeroed, nprocs=RANKS) == [(3, True)] * RANKS


def beside_garbage() -> tuple[bool, bool]:
    """A capture after a state became garbage, whose gather nobody waited for: whether it was there to the end of the
    capture, while Python would have collected it, and whether it is gone afterwards."""
    ranks, before = Ranks(runtime_of(fsdp.local_mesh())), gc.get_threshold()
    gc.collect()
    gc.freeze()
    try:
        state, _ = made("collective")
        state, _ = fsdp.unshard(state, state.units[0])
        ring: list[Any] = [state]
        ring.append(ring)
        gone = weakref.ref(state._executor)
        gc.collect()  # they are of the oldest generation, and not garbage yet
        del state, _, ring
        torch.cuda.synchronize()
        memory, stream = torch.zeros(1, device=ranks.device), torch.cuda.Stream()
        gc.set_threshold(1, 1, 1)
        with torch.cuda.stream(stream), captured(ranks, torch.cuda.graph_pool_handle()):
            memory.add_(1)
            kept = [[i] for i in range(20000)]
            there = gone() is not None and len(kept) > 0
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    gc.collect()
    return there, gone() is None


def test_a_state_that_is_garbage_does_not_end_a_capture() -> None:
    assert launch(beside_garbage, nprocs=RANKS) == [(True, True)] * RANKS
