"""Ranks that take turns in one process: the same bits as processes, and what only they can do."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS
from support.problems import LOOPS, batch, loss_fn, mesh_and_placement, net
from support.ranks import by_rank
from support.scenario import Scenario, alike, apart, run
from support.tables import FULL, marked
from support.transactions import Boom, taken

import functional_fsdp as fsdp
from functional_fsdp import LaunchError, launch, simulate, workers
from functional_fsdp import transforms as T
from functional_fsdp._common.torch_names import all_gather_single, reduce_scatter_single

Tree = dict[str, torch.Tensor]


def scenario(preset: str, way: str, total: str = "native") -> Scenario:
    """Three steps, by the whole tree, by hand, or driven."""
    spec = {"precision": fsdp.Precision(sum=total)}
    return Scenario(model=lambda: net(torch.float32), preset=preset, loop=way, spec=spec, steps=3)


WAYS = (*LOOPS, "driven")


FEW = [("zero3", "whole"), ("hsdp", "by_unit"), ("zero2", "driven")]


@pytest.mark.parametrize(("preset", "way"), marked([*itertools.product(PRESETS, WAYS)], FEW))
def test_two_ranks_have_the_bits_of_two_processes(preset: str, way: str) -> None:
    """The sum of two is the same in any order."""
    simulated, right = (launch(run, (scenario(preset, way),), nprocs=2, simulate=on) for on in (True, False))
    for seen, want in zip(simulated, right, strict=True):
        alike(seen, want, 0.0)
    assert len(simulated[0].losses) == 3


@pytest.mark.parametrize(
    ("preset", "way"), marked([("zero3", "driven"), ("hsdp", "by_unit"), ("ddp", "whole")], [("hsdp", "by_unit")])
)
def test_exact_sums_have_the_bits_of_processes_in_any_order_of_turns(preset: str, way: str) -> None:
    one = scenario(preset, way, "fp32")
    found = [launch(run, (one,), nprocs=4, simulate=True)]
    for seed in range(3):
        with simulate(data=4, order="random", seed=seed, slow={1: 3}) as ranks:
            found.append(ranks(run, one).get())
    right = launch(run, (one,), nprocs=4)
    for seen in found:
        for mine, want in zip(seen, right, strict=True):
            alike(mine, want, 0.0)


def drawn() -> tuple[int, float, float, list[int]]:
    group = dist.new_group([0, 2])
    mine = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() in (0, 2):
        dist.all_reduce(mine, group=group)
    if dist.get_rank() == 1:
        torch.rand(7), random.random()
    every = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(every, mine)
    told: list[Any] = [None] * 3
    dist.all_gather_object(told, dist.get_rank())
    torch.manual_seed(dist.get_rank())
    dist.barrier()
    return int(os.environ["RANK"]), float(torch.rand(())), sum(float(one) for one in every), told


def test_each_has_its_own_rank_groups_and_random_numbers() -> None:
    before = torch.get_rng_state(), random.getstate(), os.environ.get("RANK")
    with workers(3, simulate=True) as ranks:
        found = by_rank(ranks(drawn))
    for rank, said in enumerate(found):
        assert said == (rank, float(torch.rand((), generator=torch.Generator().manual_seed(rank))), 5.0, [0, 1, 2])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), os.environ.get("RANK")) == before[1:]
    assert not dist.is_initialized() or dist.get_world_size() == 1


def drawn_of_numpy() -> list[float]:
    """No rank draws in every turn; of two normal numbers the second is kept."""
    numpy.random.seed(dist.get_rank())
    found = []
    for draws in (1, 2, 1):
        dist.barrier()
        if dist.get_rank() >= draws:
            found.append(numpy.random.randn())
    return found


def test_each_draws_of_numpys_generator_where_it_left_it() -> None:
    numpy.random.seed(7)
    with workers(3, simulate=True) as ranks:
        found = ranks(drawn_of_numpy).get()
    mine = [numpy.random.RandomState(rank) for rank in range(3)]
    assert found == [[one.randn() for _ in range(count)] for one, count in zip(mine, (0, 2, 3), strict=True)]
    assert numpy.random.rand() == numpy.random.RandomState(7).rand()


def talked() -> list[Any]:
    """What torch's collectives give."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0) + 10 * rank
    found: list[Any] = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        y = x.clone()
        dist.all_reduce(y, op)
        found.append(y)
    y = x.clone()
    dist.broadcast(y, 1)
    found.append(y)
    y = x.clone()
    dist.reduce(y, 1)
    if rank == 1:
        found.append(y)
    out = torch.zeros(4 * n)
    all_gather_single(out, x)
    part = torch.zeros(2)
    reduce_scatter_single(part, x)
    swapped, uneven = torch.zeros(4), torch.zeros(2 if rank == 0 else 6)
    dist.all_to_all_single(swapped, x)
    dist.all_to_all_single(uneven, x, [1 + 2 * rank] * n, [1, 3])
    several = [torch.zeros(2), torch.zeros(2)]
    dist.all_to_all(several, list(x.chunk(2)))
    gathered = [torch.zeros(4) for _ in range(n)] if rank == 0 else None
    dist.gather(x, gathered, 0)
    scattered = torch.zeros(4)
    dist.scatter(scattered, [x, x + 1] if rank == 1 else None, 1)
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(y, 0)
        found.append(y)
    objects = [f"from {rank}"]
    dist.broadcast_object_list(objects, 1)
    return [*found, out, part, swapped, uneven, several, gathered, scattered, objects]


def process_talked() -> list[Any]:
    fsdp.local_mesh()
    return talked()


def test_torchs_collectives_give_what_gloos_do() -> None:
    simulated, right = (launch(process_talked, nprocs=2, simulate=simulated) for simulated in (True, False))
    for mine, expected in zip(simulated, right, strict=True):
        assert mine.pop() == expected.pop() == ["from 1"]
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


# ---------------------------------------------------------------- errors


def mistaken(kind: str) -> None:
    mesh = fsdp.local_mesh()
    state = fsdp.shard({"a": torch.ones(8), "b": torch.ones(8)}, fsdp.Spec(mesh, units=["a", "b"]), fsdp.sgd(lr=0.1))
    rank = mesh.get_rank()
    if kind == "returns" and rank == 2:
        return
    if kind == "raises" and rank == 1:
        raise KeyError("of rank 1")
    if kind == "mine" and rank == 1:
        dist.all_reduce(torch.zeros(4))
    elif kind == "mine":
        dist.broadcast(torch.zeros(4), 0)
    if kind == "order":
        for unit in ("a", "b") if rank else ("b", "a"):
            state, _ = fsdp.unshard(state, unit)
    fsdp.step(fsdp.reduce(*fsdp.unshard(state)))


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def test_a_deadlock_is_known_at_once_with_who_waits_for_what_and_where() -> None:
    with simulate(data=3) as ranks, pytest.raises(LaunchError) as caught:
        ranks(mistaken, "returns")
    said = str(caught.value)
    assert "no rank can go on:" in said
    here = f"{__file__}:{line_of('fsdp.step(fsdp.reduce(*fsdp.un')}"
    for rank in (0, 1):
        assert f"rank {rank} waits for all_gather of 'a' (side lane, 384 float32), at {here}" in said
    assert "rank 2 has ended" in said


def looked(state: fsdp.State) -> float:
    return float(fsdp.full_params(state)["a"].sum())


def test_a_state_that_is_used_outside_of_its_ranks_is_refused_and_they_go_on() -> None:
    def made() -> fsdp.State:
        return fsdp.shard({"a": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))

    with simulate(data=2) as ranks:
        state = ranks(made)
        one = state.get()[0]
        for use in (fsdp.full_params, fsdp.unshard):
            with pytest.raises(
                fsdp.CommError, match=r"of simulated rank 0, .* within a call only. .*ranks\(fn, state\)"
            ):
                use(one)
        assert ranks(looked, state).get() == [3.0, 3.0]


def test_an_error_names_its_rank_and_comes_from_the_ranks_own() -> None:
    with (
        simulate(data=3) as ranks,
        pytest.raises(LaunchError, match="rank 1 of 3 failed: KeyError: 'of rank 1'") as caught,
    ):
        ranks(mistaken, "raises")
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.rank == 1
    assert "Stopped while still running: rank 0, 2." in str(caught.value)


@pytest.mark.parametrize("source", ["raise ValueError('what went wrong')", "it is no code"])
def test_the_first_line_of_an_error_is_the_error_and_not_what_was_noted_on_it(source: str) -> None:
    def noted() -> None:
        try:
            exec(source)
        except Exception as error:
            error.add_note("In the backward of the module 'x'.")
            raise

    with simulate(data=1) as ranks, pytest.raises(LaunchError) as caught:
        ranks(noted)
    first, _, rest = str(caught.value).partition("\n")
    assert first.endswith(("rank 0 of 1 failed: ValueError: what went wrong", "1 failed: SyntaxError: invalid syntax"))
    assert "In the backward of the module 'x'." in rest


def test_ranks_that_issue_different_collectives_are_told() -> None:
    with simulate(data=2) as ranks:
        with pytest.raises(
            LaunchError, match=r"rank 1 comes to all_reduce \(sum\) of float32 \[4\], where rank 0 came to br"
        ):
            ranks(mistaken, "mine")
        with pytest.raises(LaunchError, match="ScheduleError"):
            ranks(mistaken, "order")


# ---------------------------------------------------------------- interrupts, debuggers


def setup() -> tuple[fsdp.State, Any]:
    mesh = fsdp.local_mesh()
    params, model = fsdp.functionalize(net(torch.float64))
    return fsdp.shard(params, fsdp.Spec(mesh), fsdp.adamw(lr=1e-2)), model


def steps(state: fsdp.State, model: Any, n: int, strike: int = -1) -> tuple[fsdp.State, int]:
    forward_backward = T.forward_backward(model, loss_fn)
    for i in range(n):
        if i == strike and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        state, _ = forward_backward(state, batch(state.steps, dist.get_rank(), 0))
        state = fsdp.step(state)
    return state, state.steps


def test_ctrl_c_stops_the_call_and_keeps_the_last_whole_step() -> None:
    with simulate(data=3) as ranks:
        state, model = ranks(setup)
        with pytest.raises(KeyboardInterrupt, match="all 3 ranks have stopped, and keep what they hold"):
            ranks(steps, state, model, 100_000, 2)
        state, counts = ranks(steps, state, model, 0)
        taken, *others = counts.get()
        assert others == [taken] * 2
        assert 2 <= taken < 100_000
        state, _ = ranks(steps, state, model, 2)
        found = ranks(fsdp.full_params, state).get()
    with simulate(data=3) as ranks:
        state, model = ranks(setup)
        state, _ = ranks(steps, state, model, taken + 2)
        right = ranks(fsdp.full_params, state).get()
    assert all(torch.equal(found[0][key], right[0][key]) for key in right[0])


def runs_forever() -> None:
    if dist.get_rank() == 1:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        while True:
            pass
    dist.barrier()


def test_a_second_ctrl_c_stops_a_rank_that_waits_for_nobody() -> None:
    with simulate(data=2) as ranks:
        with pytest.raises(KeyboardInterrupt, match="all 2 ranks have stopped"):
            ranks(runs_forever)
        assert ranks(dist.get_rank).get() == [0, 1]
        assert repr(ranks) == "simulate(data=2): idle"


def test_eight_ranks_are_ready_at_once() -> None:
    took = []
    for _ in range(5):
        begun = time.process_time()
        with simulate(data=8) as ranks:
            ranks(setup)
        took.append(time.process_time() - begun)
    assert min(took) < 0.2


STOPS = """
import functional_fsdp as fsdp

def stops():
    mesh = fsdp.local_mesh()
    state = fsdp.shard({"w": 1.0 + fsdp.local_mesh().mesh.float()}, fsdp.Spec(mesh), fsdp.sgd(lr=0.1))
    rank = mesh.get_rank()
    if rank == 1:
        breakpoint()
    print("rank", rank, "goes on with", sum(fsdp.full_params(state).values()).sum().item())

fsdp.launch(stops, nprocs=2, simulate=True)
"""


def test_breakpoint_stops_in_one_rank_with_the_others_standing_still() -> None:
    typed = "p 'here is', rank\np mesh.get_coordinate()\nnext\nc\n"
    done = subprocess.run(
        [sys.executable, "-c", STOPS], input=typed, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True,
    )  # fmt: skip
    said = done.stdout
    assert "[rank 1] (Pdb) ('here is', 1)" in said
    assert said.index("('here is', 1)") < said.index("(1,)\n") < said.index("rank 0 goes on with 3.0")
    assert "rank 1 goes on with 3.0" in said


# ---------------------------------------------------------------- faults to order


def test_a_rank_that_is_killed_is_gone_for_the_others_and_the_next_ones_begin_anew() -> None:
    with simulate(data=3, kill={1: "step 3, in reduce of blocks.0"}) as ranks:
        state, model = ranks(setup)
        with pytest.raises(
            LaunchError, match=r"rank 1 of 3 failed: was killed in step 3, in reduce of blocks.0"
        ) as caught:
            ranks(steps, state, model, 5)
        assert "CommError: " in caught.value.reports[0]
        assert "the process of rank 1 has ended" in caught.value.reports[0]
        with pytest.raises(LaunchError, match="a handle of workers that are gone: rank 1 was killed in step 3"):
            ranks(steps, state, model, 5)
        state, model = ranks(setup)
        assert ranks(steps, state, model, 5)[1].get() == [5] * 3


@pytest.mark.parametrize("text", ["step", "step 5, in step", "5", "step 5 in reduce"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no place in a run\. Say 'step 5'"):
        simulate(data=2, kill={1: text})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no axis"), ({"data": 0}, "data=0 is no size"), ({"data": 2, "order": "fast"}, "order is 'fast'"),
        ({"data": 2, "kill": {2: "step 1"}}, "no rank 2"), ({"data": 2, "slow": {-1: 2}}, "no rank -1"),
        ({"data": 2, "only": []}, "is nobody"), ({"data": 2, "only": [5]}, "no rank 5 of 0 to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulate(**given)


def dropped(who: int) -> tuple[list[str], Tree]:
    """One rank drops a step in the middle; all go on."""
    state, model = setup()

    def take(state: fsdp.State, step: int, met: list[str]) -> fsdp.State:
        middle, _ = fsdp.unshard(state, "embed.weight")
        if step == 1 and not met and dist.get_rank() == who:
            raise Boom
        middle = fsdp.release(middle, "embed.weight")
        return fsdp.step(LOOPS["whole"](model, middle, batch(step, dist.get_rank(), 0), True)[0])

    state, met = taken(state, take, 3)
    return met, fsdp.full_params(state)


def test_ranks_that_parted_meet_and_lose_nothing() -> None:
    with simulate(data=3) as ranks:
        right = by_rank(ranks(dropped, -1))
    for order in ("ranks", "random"):
        with simulate(data=3, order=order) as ranks:
            found = by_rank(ranks(dropped, 1))
        assert [said for said, _ in found] == [["RestartError"], ["Boom"], ["RestartError"]]
        assert all(apart(weights, wanted) == 0.0 for (_, weights), (_, wanted) in zip(found, right, strict=True))


# ---------------------------------------------------------------- checkpoints


def saved(folder: str) -> Tree:
    state, model = setup()
    state, _ = steps(state, model, 2)
    fsdp.save(state, f"{folder}/a")
    if FULL:  # else `test_host_memory` has one
        fsdp.async_save(state, f"{folder}/b").result()
    return fsdp.full_params(state)


def loaded(folder: str) -> tuple[Tree, ...]:
    spec, names = fsdp.Spec(fsdp.local_mesh()), "ab" if FULL else "a"
    return tuple(fsdp.full_params(fsdp.load(f"{folder}/{name}", spec, fsdp.adamw(lr=1e-2))) for name in names)


def test_checkpoints_come_and_go_between_simulated_ranks_and_processes(tmp_path: Path) -> None:
    (right, *_) = launch(saved, (str(tmp_path),), nprocs=2, simulate=True)
    for simulated in (True, False):
        for trees in launch(loaded, (str(tmp_path),), nprocs=4 if simulated else 2, simulate=simulated):
            assert all(torch.equal(tree[key], right[key]) for tree in trees for key in right)


# ---------------------------------------------------------------- counting, and few of many


def counted(preset: str) -> list[tuple[str, str, str, str, int]]:
    """What this rank has issued, as its lanes have logged it: axis, lane, unit, kind, bytes that it receives."""
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float64))
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(lr=1e-2))
    run = state.version.lineage.runtime
    state, _ = LOOPS["by_unit"](model, state, batch(0, dist.get_rank(), 0), True)
    fsdp.step(state)
    hops = [hop for lane, log in run.issued.items() if lane != "control" for job in log.tail for hop in job]
    return [(h.axis, h.lane, h.bucket, h.kind, h.received(run.sizes[h.axis])) for h in hops if run.sizes[h.axis] > 1]


def test_traffic_is_counted_by_axis_lane_unit_and_rank() -> None:
    with simulate(replica=2, shard=2) as ranks:
        every = ranks(counted, "hsdp").get()
        traffic = ranks.traffic
        assert "axis" in repr(traffic).splitlines()[0]
    for rank, hops in enumerate(every):
        assert {h[0] for h in hops} == {"replica", "shard"}
        for axis, lane, unit, kind, _ in {*hops}:
            which = {"axis": axis, "lane": lane, "unit": unit, "kind": kind, "rank": rank}
            same = [h[4] for h in hops if h[:4] == (axis, lane, unit, kind)]
            assert traffic.collectives(**which) == len(same)
            assert traffic.bytes(**which) == sum(same) > 0
    assert traffic.bytes(axis="shard") == sum(h[4] for hops in every for h in hops if h[0] == "shard")
    with pytest.raises(TypeError, match="'ranks' is unknown; expected some of rank, axis, lane, unit, kind"):
        traffic.bytes(ranks=1)


def of_many() -> tuple[int, list[int], dict[str, Any], int]:
    mesh = fsdp.local_mesh()
    state = fsdp.shard({"w": torch.ones(4096, 3)}, fsdp.Spec(mesh), fsdp.adamw(lr=1e-2))
    for _ in range(2):
        state, w = fsdp.unshard(state)
        state = fsdp.step(fsdp.reduce(state, {"w": w["w"] + 1}))
    shapes = {key: tuple(leaf.shape) for key, leaf in fsdp.full_params(state).items()}
    return mesh.size(), [mesh.get_rank()], shapes, sum(b.local.numel() for b in state.main.values())


def test_a_few_of_a_thousand_ranks() -> None:
    with simulate(data=1024, only=[0, 17]) as ranks:
        found = by_rank(ranks(of_many))
    assert found == [(1024, [rank], {"w": (4096, 3)}, found[0][3]) for rank in (0, 17)]
    assert found[0][3] == 128  # 12, padded


def test_a_function_may_close_over_tensors_handles_and_what_is_not_there_yet() -> None:
    numbers = torch.arange(3.0)
    with fsdp.simulate(data=2) as ranks:
        handle = ranks(lambda: fsdp.local_mesh().get_rank())
        assert ranks(lambda: (numbers + later if numbers is None else numbers + handle).tolist()).get() == [
            [0.0, 1.0, 2.0],
            [1.0, 2.0, 3.0],
        ]
        later = 1


def warned() -> list[str]:
    """Filters of one rank, set while the other has its turn."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always" if dist.get_rank() else "ignore")
        dist.all_reduce(torch.ones(2))
        warnings.warn(f"by {dist.get_rank()}", stacklevel=1)
        dist.all_reduce(torch.ones(2))
    return [str(one.message) for one in found]


def test_each_has_its_own_filters_of_warnings() -> None:
    before = [*warnings.filters]
    for order in ("ranks", "random"):
        with fsdp.simulate(data=2, order=order) as ranks:
            assert ranks(lambda: (fsdp.local_mesh().size(), warned())[1]).get() == [[], ["by 1"]]
            assert ranks(lambda: warnings.filters == before).get() == [True, True]
    assert warnings.filters == before


def in_modes_of_its_own() -> list[Any]:
    fsdp.local_mesh()
    rank, seen = dist.get_rank(), []

    def modes() -> None:
        dist.barrier()
        seen.append(
            (torch.get_default_dtype(), torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled())
        )

    modes()
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    torch.use_deterministic_algorithms(rank == 1)
    with torch.autograd.set_detect_anomaly(rank == 1):
        modes()
    modes()
    return seen


def test_each_has_its_own_modes_of_torch() -> None:
    with fsdp.simulate(data=2) as ranks:
        first, second = ranks(in_modes_of_its_own).get()
    begins, single, double = (torch.float32, False, False), (torch.float32, False, False), (torch.float64, True, True)
    assert first == [begins, single, single]
    assert second == [begins, double, (torch.float64, False, True)]
    assert (torch.get_default_dtype(), torch.is_anomaly_enabled()) == (torch.float32, False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_timeout_is_refused_as_no_clock_is_waited_for() -> None:
    calls: dict[str, Any] = {"launch": lambda **k: fsdp.launch(int, **k), "workers": fsdp.workers}
    for name, call in calls.items():
        said = rf"{name}\(timeout=5, simulate=True\): .* wait for no clock.*Leave timeout out"
        with pytest.raises(ValueError, match=said):
            call(nprocs=2, timeout=5, simulate=True)


def whole_steps(way: str) -> tuple[str, int]:
    """What a compiled step says, and the steps that were taken: that one, eagerly."""
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data"))
    params, model = fsdp.functionalize(net(torch.float32))
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
    driven = T.forward_backward(model, loss_fn)

    def step(state: fsdp.State, data: Any) -> fsdp.State:
        state, _ = driven(state, data) if way != "by hand" else LOOPS["whole"](model, state, data, True)
        return fsdp.step(state)

    compiled = T.compile(step, backend="aot_eager") if way == "T.compile" else torch.compile(step, backend="aot_eager")
    said = ""
    try:
        compiled(state, batch(0, dist.get_rank(), 0))
    except Exception as error:
        said = f"{error}"
    return said, step(state, batch(0, dist.get_rank(), 0)).steps


@pytest.mark.parametrize("way", ["T.compile", "by hand"])
def test_whole_steps_are_not_compiled_and_nothing_is_lost(way: str) -> None:
    for said, steps in launch(whole_steps, (way,), nprocs=2, simulate=True):
        assert "simulated ranks cannot compile a whole step" in said
        assert steps == 1
    compiled = torch.compile(lambda x: x + 1, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]  # torch's own state is as it was
