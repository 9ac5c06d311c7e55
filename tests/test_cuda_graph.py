"""What of `T.cuda_graph` and of the transports needs no GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from problems import LOOPS, Stack, mesh_and_placement, reference, sharded, through_the_stack
from test_traced import trained

import functional_fsdp as fsdp
from functional_fsdp import Schedule, ScheduleError, Spec, SpecError, StaleStateError, TreeError, launch
from functional_fsdp import _symmetric as symmetric
from functional_fsdp import _transport as transport
from functional_fsdp import transforms as T
from functional_fsdp._capture import Capture
from functional_fsdp._runtime import runtime_of
from functional_fsdp.transforms._capturing import Home
from functional_fsdp.transforms.cuda_graph import signature


def made(**schedule: Any) -> fsdp.State:
    torch.manual_seed(0)
    params, _ = fsdp.functionalize(Stack(16, 3))
    return fsdp.shard(params, Spec(fsdp.local_mesh(), schedule=Schedule(**schedule)), fsdp.adamw(lr=1e-2))


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
    state, loss = through_the_stack(state, x)
    return fsdp.step(state), loss


# ---------------------------------------------------------------- without GPUs


def test_without_a_gpu_it_says_so_or_passes_through() -> None:
    state = made()
    with pytest.raises(ScheduleError, match=r"on the cpu, and CUDA graphs need a GPU.*pass_through=True"):
        T.cuda_graph(train_step)(state, data())
    state, loss = T.cuda_graph(train_step, pass_through=True)(state, data())
    assert state.steps == 1
    assert loss > 0


@pytest.mark.parametrize("loop", list(LOOPS))
def test_one_train_step_every_way(loop: str) -> None:
    """On lanes, compiled, and through cuda_graph, which is `tests/gpu`'s to capture."""
    ways = ["lanes", "graph", "aot_eager", "T.aot_eager"]
    for way in ways:
        for rank, (seen, _) in enumerate(launch(trained, 2, "zero3", loop, way)):
            for (loss, weights), (expected, _, after) in zip(seen, reference(2, 3, 2), strict=True):
                assert rank > 0 or loss == pytest.approx(expected, abs=1e-9)
                for path, weight in after.items():
                    torch.testing.assert_close(weights[path], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [{"warmup": 0}, {"graphs": 0}, {"warmup": 1.5}, {"graphs": True}])
def test_numbers_below_one_are_refused(bad: Any) -> None:
    with pytest.raises(SpecError, match=r"cuda_graph\(.*\): expected a number of at least 1"):
        T.cuda_graph(train_step, **bad)


def test_a_call_without_a_state_is_refused() -> None:
    graphed: Any = T.cuda_graph(train_step)
    with pytest.raises(TypeError, match="the first argument is a State, not Tensor"):
        graphed(data(), made())


def test_a_signature_is_shapes_dtypes_and_what_is_no_tensor() -> None:
    state = made()

    def of(*args: Any) -> Any:
        return signature(state, *pytree.tree_flatten(args, is_leaf=lambda x: isinstance(x, fsdp.State)))

    x = data()
    assert of(x, 1) == of(x + 1, 1)
    assert len({of(x), of(x.double()), of(x[:2]), of(x, 1), of(x, 1.0), of(x, True), of([x]), of({"x": x})}) == 8
    assert of(x, {1, 2}) == of(x, {1, 2})
    with pytest.raises(TreeError, match="one state, its first argument"):
        of(state)


# ---------------------------------------------------------------- the ledger's side


def replayed() -> dict[str, Any]:
    """Capture a step (which runs here), and take it again without its verbs: whatever `launch` does."""
    state = made()
    found: dict[str, Any] = {}
    state, _ = train_step(state, data())
    run = state.token.ledger.runtime
    before = {name: log.count for name, log in run.issued.items()}
    capture = Capture(state)
    with capture.recording():
        new, loss = train_step(state, data(1))
        new, _ = fsdp.pmean(new, loss)
    found["logged"] = {name: log.count - before[name] for name, log in run.issued.items()}
    found["jobs"] = {name: len(jobs) for name, jobs in capture.jobs.items() if name != "control"}
    found["ended"] = capture.ended
    capture.log()
    launched = []
    newer = capture.again(new, lambda: launched.append(1))
    found["steps"] = newer.steps, launched, newer.between_steps
    try:
        capture.again(new, lambda: launched.append(2))
    except StaleStateError as error:
        found["stale"] = str(error)
    middle, _ = fsdp.unshard(newer, "layers.0")
    try:
        capture.again(middle, lambda: launched.append(3))
    except StaleStateError as error:
        found["middle"] = str(error)
    return found


def test_a_replay_is_a_transaction_and_is_logged() -> None:
    for found in launch(replayed, 2):
        assert {name: n for name, n in found["logged"].items() if name != "control"} == dict.fromkeys(
            ("gather", "reduce", "side"), 0
        )
        assert found["jobs"] == {"gather": 5, "reduce": 3, "side": 1}
        assert found["ended"] == 1
        assert found["steps"] == (3, [1], True)
        assert "consumed by step() number 3" in found["stale"]
        assert "in the middle of a step" in found["middle"]


def parted() -> tuple[str, list[int], bool]:
    """Ranks replay different steps: one of them with a metric."""
    state, twin = made(), made()
    captures = []
    for with_metric in (False, True):
        capture = Capture(state)
        with capture.recording():
            if with_metric:
                state, _ = fsdp.pmean(state, 1.0)
            state, _ = train_step(state, data(1))
        capture.log()
        captures.append(capture)
        twin, _ = train_step(twin, data(1))
    said, launched = "", list[int]()
    try:
        captures[dist.get_rank()].again(state, lambda: launched.append(1))
    except ScheduleError as error:
        said = str(error)
    state, _ = train_step(state, data(2))  # what was not launched is not taken
    twin, _ = train_step(twin, data(2))
    mine, theirs = fsdp.full_params(state), fsdp.full_params(twin)
    return said, launched, all(torch.equal(mine[path], theirs[path]) for path in mine)


def test_ranks_that_replay_different_steps_hear_of_it_before_anything_is_launched() -> None:
    for said, launched, same in launch(parted, 2):
        assert "ranks issued different collectives" in said
        assert not launched
        assert same


def test_a_use_outside_the_plan_cannot_be_captured() -> None:
    state = made()
    capture = Capture(state)
    with (
        pytest.raises(ScheduleError, match=r"unshard\('layers.1'\) is not what the schedule expects.*captured step"),
        capture.recording(),
    ):
        fsdp.unshard(state, "layers.1", outside=True)
    run = state.token.ledger.runtime
    assert not run.capturing
    assert run.logs is run.issued
    state, _ = train_step(state, data())
    assert state.steps == 1


def test_more_microbatches_than_before_cannot_be_captured() -> None:
    from functional_fsdp.transforms._seed import _standing_in

    run = made().token.ledger.runtime
    run.capturing = True
    try:
        with pytest.raises(ScheduleError, match=r"microbatch 7 .*had fewer"), _standing_in(run, 7, 0):
            pass
    finally:
        run.capturing = False


# ---------------------------------------------------------------- where the state stays


def test_a_home_takes_values_from_elsewhere_and_keeps_its_tensors() -> None:
    state = made()
    home = Home(state)
    assert home.enter(state).main is state.main
    other, _ = train_step(made(), data())
    home.check(other)
    entered = home.enter(other)
    name = next(iter(state.main))
    assert entered.main[name].local is state.main[name].local
    assert torch.equal(entered.main[name].local, other.main[name].local)
    assert entered.token is other.token
    with pytest.raises(StaleStateError, match="put another state in this one's memory"):
        fsdp.unshard(state)


def test_a_home_refuses_what_does_not_fit() -> None:
    state = made()
    home = Home(state)
    with pytest.raises(TreeError, match="the state that came in has another structure"):
        home.check(state.evolve(extras={"ema": torch.ones(3)}))
    state = state.evolve(extras={"ema": torch.ones(3), "n": 1})
    home = Home(state)
    with pytest.raises(TreeError, match=r"'extras.ema' .*is torch.float32 \(4,\); expected torch.float32 \(3,\)"):
        home.check(state.evolve(extras={"ema": torch.ones(4), "n": 1}))
    with pytest.raises(TreeError, match=r"'extras.n' of the state at the end of the step is 2; expected 1"):
        home.keep(state.evolve(extras={"ema": torch.ones(3), "n": 2}))
    local = next(iter(state.main.values())).local
    local.data = local.data.clone()
    with pytest.raises(ScheduleError, match=r"'main\..*local' of the state was moved in memory"):
        home.check(state)


def test_what_a_step_makes_anew_goes_home() -> None:
    state = made().evolve(extras={"ema": torch.ones(3)})
    home = Home(state)
    home.keep(state.evolve(extras={"ema": torch.full((3,), 2.0)}))
    assert torch.equal(state.extras["ema"], torch.full((3,), 2.0))


# ---------------------------------------------------------------- transports


@contextmanager
def pretended() -> Iterator[list[int]]:
    """Plain memory in the place of NCCL's."""
    real, asked = symmetric.registered, []

    def registered(run: Any, nbytes: int, groups: Any) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(max(nbytes, 1), dtype=torch.uint8)

    symmetric.registered = registered
    try:
        yield asked
    finally:
        symmetric.registered = real


def in_windows(preset: str, loop: str, average: str) -> tuple[list[Any], list[int]]:
    with pretended() as asked:
        schedule = Schedule(transport="symmetric")
        return sharded(preset, loop, 3, 2, schedule=schedule, average=average), asked


@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"])
def test_steps_in_windows_are_the_plain_modules(preset: str, loop: str) -> None:
    ranks = 4 if preset in ("hsdp", "hfsdp") else 2
    for average in ("mean", "sum") if loop == "whole" else ("mean",):
        for seen, asked in launch(in_windows, ranks, preset, loop, average):
            assert len(asked) == 2  # one arena, one staging, for good
            for (_, mine, _), (_, grads, _) in zip(seen, reference(ranks, 3, 2, average=average), strict=True):
                for path, grad in grads.items():
                    torch.testing.assert_close(mine[path], grad, rtol=1e-12, atol=1e-12)


def lacking() -> str:
    try:
        made(transport="symmetric")
    except SpecError as error:
        return str(error)
    return ""


def test_symmetric_says_what_is_missing() -> None:
    for said in launch(lacking, 2):
        assert "it needs GPUs, and this mesh is on the cpu" in said
        assert "transport='collective'" in said


def open_choice() -> tuple[set[str], list[str], int]:
    """What states of small and of large models get, and what is said."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, handler = logging.getLogger("functional_fsdp._transport"), Handler()
    before = log.level, transport.LARGE
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        runtime_of(fsdp.local_mesh()).chosen.clear()
        states = [made(transport="auto"), made(transport="auto")]
        transport.LARGE = 1000
        states += [made(transport="auto"), made(transport="auto")]
    finally:
        log.removeHandler(handler)
        log.level, transport.LARGE = before
    state, _ = train_step(states[0], data())
    return {state.spec.schedule.transport for state in states}, said, state.steps


def test_auto_takes_what_there_is_and_says_so_once() -> None:
    for taken, said, steps in launch(open_choice, 2):
        assert taken == {"collective"}
        assert said == [
            "Schedule(transport='auto'): collective (there is little to gather)",
            "Schedule(transport='auto'): collective (there are no GPUs)",
        ]
        assert steps == 1


def test_plans_without_ranks_take_auto_for_collective() -> None:
    params, _ = fsdp.functionalize(Stack(16, 3))
    layouts = [fsdp.layout(params, Spec({"data": 8}, schedule=Schedule(transport=t))) for t in ("auto", "collective")]
    assert layouts[0].hash == layouts[1].hash


def test_zero_cta_is_symmetrics() -> None:
    with pytest.raises(SpecError, match=r"zero_cta=True, transport='copy_engine'.*expected transport='symmetric'"):
        Schedule(transport="copy_engine", zero_cta=True)
    assert str(Schedule(transport="symmetric", zero_cta=True)).endswith("symmetric, zero-CTA gathers")
    order = Schedule(transport="symmetric", zero_cta=True).ordered(["a", "a"])
    assert (order.transport, order.zero_cta) == ("symmetric", True)


def hybrid() -> str:
    mesh, placement = mesh_and_placement("hsdp")
    spec = Spec(mesh, placement, schedule=Schedule(transport="auto"))
    return fsdp.shard({"w": torch.ones(64)}, spec, fsdp.sgd(lr=0.1)).spec.schedule.transport


def test_auto_on_two_axes() -> None:
    assert launch(hybrid, 4) == ["collective"] * 4
