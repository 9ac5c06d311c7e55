"""The copy_engine transport: gathers and reductions by reading other ranks' memory; here in shared memory.

What other tests say of steps (`laws/test_transport.py`), schedules and restarts holds as well: this file has what is
its own.
"""

from __future__ import annotations

import copy
import gc
import random
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from support.copies import COPIES, copied, gradients, on_two_axes, ones, other_weights
from support.driven import raised
from support.problems import Stack, batch, loss_fn, mesh_and_placement, net, through_the_stack
from support.ranks import each_rank
from support.traffic import issued

import functional_fsdp as fsdp
from functional_fsdp import Precision, Schedule, Spec, launch
from functional_fsdp import transforms as T
from functional_fsdp._common.record import Collective
from functional_fsdp._storage import without
from functional_fsdp._transports.copy_engine import Reading, RemoteRead
from functional_fsdp._transports.peer_memory import PeerMemory

# ---------------------------------------------------------------- what travels


def counted(
    preset: str, precision: Precision | None = None, prefetch: int = 1
) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Collectives of the second step, by kind: in the forward and backward, in `step`; how many units there are, and
    how many gathers."""
    counts: Counter[str] = Counter()
    mesh, placement = mesh_and_placement(preset)
    params, _ = fsdp.functionalize(Stack(32, 4))
    spec = Spec(mesh, placement, precision=precision, schedule=Schedule(prefetch=prefetch), transport="copy_engine")
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))

    def counting(hop: Collective, out: torch.Tensor, given: torch.Tensor) -> None:
        if hop.kind == "barrier" or out.numel() > 64:
            counts[hop.kind] += 1

    with issued(state, counting):
        for _ in range(2):
            counts.clear()
            state, _ = through_the_stack(state, ones(state))
            passes = dict(counts)
            counts.clear()
            state = fsdp.step(state)
    return passes, dict(counts), len(state.units), len(state.cursor.plan.gathers)


@pytest.mark.parametrize(
    ("preset", "passes", "after"),
    [
        ("zero3", {"barrier": 2}, {}),  # for each unit: around its reduction
        ("zero2", {"barrier": 2}, {"all_gather": 1}),
        ("ddp", {"barrier": 2, "all_gather": 1}, {}),  # the sum stays whole
        ("hsdp", {"barrier": 2, "all_reduce": 1}, {}),  # the outer axis by collectives
    ],
)
def test_gathers_are_no_collectives(preset: str, passes: dict[str, int], after: dict[str, int]) -> None:
    for found, later, units, gathers in launch(counted, (preset,), nprocs=4):
        expected = Counter({kind: n * units for kind, n in (Counter(passes) + Counter(after)).items()})
        if preset not in ("zero2", "ddp"):
            assert gathers > units
            expected["barrier"] += gathers + 1  # one in each, and one when a pass begins
        assert Counter(found) + Counter(later) == expected
        assert preset == "ddp" or "all_gather" not in found


def test_sums_may_be_the_backends() -> None:
    for found, _, units, gathers in launch(counted, ("zero3", Precision(sum="native")), nprocs=2):
        assert found == {"barrier": gathers + 1, "reduce_scatter": units}


def test_layers_may_be_read_along_different_axes() -> None:
    both = zip(
        launch(on_two_axes, ("collective",), nprocs=4), launch(on_two_axes, ("copy_engine",), nprocs=4), strict=True
    )
    for (expected, nothing), (found, read) in both:
        assert (nothing, read) == ([], ["a", "b"])
        torch.testing.assert_close(found, expected)


def test_bytes_that_are_filled_again_at_once_take_a_barrier_more() -> None:
    for passes, after, units, gathers in launch(counted, ("zero3", None, 0), nprocs=2):
        found = Counter(passes) + Counter(after)  # lanes go on while the step begins
        assert found.keys() == {"barrier"}
        assert gathers + 1 < found["barrier"] - 2 * units <= 2 * gathers


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from("ab")), max_size=12))
def test_nothing_is_filled_that_others_may_be_reading(gathers: list[tuple[int, int, str]]) -> None:
    """Two ranks: both come to the same barriers, and until one a slow peer reads the own slice of what was gathered."""
    reading = [Reading("ab") for _ in range(2)]
    slow: list[dict[str, set[int]]] = [{axis: set(range(60)) for axis in "ab"} for _ in range(2)]
    last: dict[str, range] = {}  # what was gathered last, of each axis, if that may still be read
    for begin, half, axis in gathers:
        span, taken = range(begin, begin + 2 * half), []
        for rank in range(2):
            own = span[rank * half : (rank + 1) * half]
            before, between = reading[rank].filled([span], [RemoteRead(axis, span, own, [])])
            taken.append(([one.axis for one in before], [one.axis for one in between]))
            for barrier in before:
                slow[rank][barrier.axis] = set()
                assert {*last.get(barrier.axis, range(60))} & {*span}, "a barrier for nothing"
            assert not any(read.intersection(span) for read in slow[rank].values())
            slow[rank][axis] = set(own)
            assert reading[rank].last["ab".replace(axis, "")] is None or own in reading[rank].spans
        assert taken[0] == taken[1]
        assert taken[0][1] == [axis]
        last |= {axis: span} | {one: range(0) for one in taken[0][0] if one != axis}


class Uneven(nn.Module):
    """Layers of these widths."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 32, bias=False) for width in widths)


@pytest.mark.parametrize(
    ("widths", "prefetch", "evaluations", "microbatches", "two"),
    [
        pytest.param((16, 64, 256), 1, 1, 1, False, marks=pytest.mark.large),  # a part of the third
        ((64, 16, 64, 8), 0, 0, 1, False), ((16, 64, 32, 32, 256), 1, 2, 1, False),
        ((16, 64, 32, 256), 2, 2, 2, False), ((64, 16, 32, 48, 80), 1, 0, 1, True),
    ],
)  # fmt: skip
@each_rank(4, processes=True)
def test_units_of_many_sizes(
    widths: tuple[int, ...], prefetch: int, evaluations: int, microbatches: int, two: bool
) -> None:
    """Places overlap in part, differently for each rank's slice. Two steps with evaluations before them; peers read
    slowly."""
    params, _ = fsdp.functionalize(Uneven(widths))
    generator = torch.Generator().manual_seed(0)
    params = {path: torch.randn(p.shape, generator=generator) for path, p in params.items()}
    mesh = fsdp.local_mesh(a=2, b=2) if two else fsdp.local_mesh()
    rules = {"layers.[02]*": fsdp.zero3("a"), "*": fsdp.zero3("b")} if two else None
    spec = Spec(mesh, rules, schedule=Schedule(prefetch=prefetch, debug=True), transport="copy_engine")
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.0))
    slow, real = random.Random(dist.get_rank()), RemoteRead.read

    def read(self: RemoteRead) -> None:
        time.sleep(0.01 * (slow.random() < 0.3))
        real(self)

    forward = [(unit, False) for unit in state.units]
    backward = [(unit, True) for unit in reversed(state.units)]
    with mock.patch.object(RemoteRead, "read", read):
        for _ in range(2):
            for unit, trains in forward * evaluations + (forward + backward) * microbatches:
                state, w = fsdp.unshard(state, unit)
                assert all(torch.equal(weight, params[f"{unit}.{key}"]) for key, weight in w.items())
                if trains:
                    state = fsdp.reduce(state, {key: torch.ones_like(weight) for key, weight in w.items()}, unit)
                state = fsdp.release(state, unit)
            state = fsdp.step(state)


@given(st.integers(0, 20), st.integers(1, 20), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=5))
def test_what_is_left_of_a_span(begin: int, size: int, holes: list[tuple[int, int]]) -> None:
    spans = [range(a, a + n) for a, n in holes]
    left = without(range(begin, begin + size), spans)
    assert sorted(i for s in left for i in s) == sorted(set(range(begin, begin + size)).difference(*spans))


def test_sums_are_exact_and_the_same_bits_every_time() -> None:
    exact, copies = launch(gradients, ("collective", 1), nprocs=4), launch(gradients, ("copy_engine", 10), nprocs=4)
    for (expected,), seen in zip(exact, copies, strict=True):
        for found in seen:
            for name, local in expected.items():
                assert local.dtype == torch.float32
                assert torch.equal(found[name], local)


# ---------------------------------------------------------------- what is gathered is what the state has


def test_a_gather_reads_the_weights_that_the_state_has() -> None:
    for seen in launch(other_weights, nprocs=2):
        assert seen == pytest.approx([seen[0]] * len(seen), rel=1e-5)


@pytest.mark.parametrize("after", [1, 2])
@each_rank(2, processes=True)
def test_a_rank_that_was_stopped_where_slabs_are_made_has_them_made_with_all_others(after: int) -> None:
    """In a driven model's first step rank 1 is stopped after so many memories: the others may have them all."""
    params, model = fsdp.functionalize(net(torch.float32))
    kinds: list[dict[str, Any]] = [COPIES, {}]
    states = [fsdp.shard(params, Spec(fsdp.local_mesh(), **s), fsdp.sgd(0.1)) for s in kinds]
    step = T.forward_backward(model, loss_fn)
    data, met, left = batch(0, dist.get_rank()), 0, [after]
    peer_memory: Any = PeerMemory.__init__

    def stopped(self: Any, *args: Any) -> None:
        peer_memory(self, *args)
        left[0] -= 1
        if left[0] == 0 and dist.get_rank() == 1:
            raise KeyboardInterrupt

    copies: Any = states[0]._executor.carrier
    copies.stages.clear()
    copies.whole, states[0]._executor.shares = None, None  # all are to be made
    done: list[fsdp.State] = []
    with mock.patch.object(PeerMemory, "__init__", stopped):
        while len(done) < len(states):
            try:
                done.append(fsdp.step(step(states[len(done)], data)[0]))
            except (KeyboardInterrupt, fsdp.RestartError):
                met += 1
    mine, theirs = (fsdp.full_params(state) for state in done)
    assert met == 1
    assert all(torch.allclose(mine[path], theirs[path], atol=1e-6) for path in mine)


def test_copies_and_checkpoints_go_on_alike(tmp_path: Path) -> None:
    for seen in launch(copied, (str(tmp_path / "saved"),), nprocs=2):
        assert seen[0] == seen[1] == seen[2]


class Three(nn.Module):
    """Layers of three parameters."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"u": 64, "v": 2048, "w": 512}
        self.layers = nn.ModuleList(
            nn.ParameterDict({name: nn.Parameter(torch.randn(n)) for name, n in shapes.items()}) for _ in range(5)
        )


@pytest.mark.parametrize("turned", [False, True])
@each_rank(4, processes=True)
def test_a_rank_that_begins_anew_takes_barriers_and_collectives_in_the_order_of_the_others(turned: bool) -> None:
    """Rank 3 comes to one gather, and then begins anew, while the others wait in the second; buckets of a unit have one
    hop by reading, and two by collectives, in the same order of axes or turned."""
    params, _ = fsdp.functionalize(Three())
    if not turned:  # of another dtype: a bucket of its own
        params = {path: p.double() if path.endswith("v") else p for path, p in params.items()}
    rules = {"*.w": fsdp.zero3("a"), "*.u": fsdp.zero3("a", "b"), "*.v": fsdp.zero3(*("ba" if turned else "ab"))}
    spec = Spec(fsdp.local_mesh(a=2, b=2), rules, schedule=Schedule(prefetch=0), transport="copy_engine")
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))

    def forward(units: int) -> None:
        middle = state
        for unit in state.units[:units]:
            middle = fsdp.release(fsdp.unshard(middle, unit)[0], unit)

    met = 0
    if dist.get_rank() == 3:
        forward(1)
        time.sleep(1)
        met += 1
    while True:
        try:
            forward(5)
            break
        except fsdp.RestartError:
            met += 1
    assert met == 1


# ---------------------------------------------------------------- what a machine may lack


@pytest.mark.parametrize(
    ("ranks", "preset", "hosts", "said"),
    [
        (2, "zero3", "host0 host1", "along 'data' they are on host0, host1"),
        (4, "hsdp", "a a b b", ""),  # only axes that are read must be on one host: the outer one goes by collectives
        (4, "hsdp", "a a a b", "along 'shard' they are on a, b"),  # and all ranks hear of it
    ],
)
@each_rank("ranks", processes=True)
def test_ranks_on_several_hosts_are_an_error_that_names_them(ranks: int, preset: str, hosts: str, said: str) -> None:
    host = hosts.split()[fsdp.local_mesh().get_rank()]
    with mock.patch.object(socket, "gethostname", return_value=host):
        mesh, placement = mesh_and_placement(preset)
        text = raised(lambda: fsdp.shard({"w": torch.ones(4)}, Spec(mesh, placement, **COPIES), fsdp.sgd(lr=0.1)))
    assert said in text
    assert bool(text) == bool(said) == ("transport='collective'" in text)


@each_rank(2, processes=True)
def test_one_rank_may_look_at_a_copy() -> None:
    params, _ = fsdp.functionalize(Stack(32, 3))
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), **COPIES), fsdp.sgd(lr=0.1))
    twin = copy.deepcopy(state)
    assert dist.get_rank() or "layers.0" in repr(twin.cursor)


def mapped() -> int:
    """How many pieces of memory that ranks read of each other this process has. They have no name in a folder."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:functional_fsdp (deleted)")


def test_shared_memory_does_not_grow_from_call_to_call() -> None:
    counts = []
    for _ in range(3):
        launch(gradients, ("copy_engine", 1), nprocs=2)
        counts.append(launch(mapped, nprocs=2))
    assert counts[1] == counts[2]
    assert min(counts[2]) > 0


def test_one_rank_needs_nobody() -> None:
    (seen,) = launch(gradients, ("copy_engine", 1), nprocs=1)
    assert all(buffer.isfinite().all() for buffer in seen[0].values())
