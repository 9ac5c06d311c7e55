"""Captured steps that update weights where their gradients arrive: the bits of others, on lanes in order, and refusals.

A capture is taken without a device here, so what is captured runs. Graphs: tests/gpu/test_arrivals.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.presets import AXES, PRESETS, ranks_of
from support.problems import batch, loss_fn, mesh_and_placement, net
from support.streams import ordered
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, launch
from functional_fsdp import transforms as T
from functional_fsdp._engine.arrival import Gone
from functional_fsdp._runtime.given import NewCounts
from functional_fsdp._state import arrivals
from functional_fsdp.extend import Capture, lineage_of

pytestmark = pytest.mark.usefixtures("few_groups")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=lambda count: 1e-2 / (1 + count), weight_decay={"bias": 0.0, "default": 0.1}),
    "sgd": lambda: fsdp.sgd(1e-2, 0.9),
    "partition": lambda: fsdp.partition({"bias": fsdp.sgd(1e-2, 0.9), "default": fsdp.adamw(lr=1e-2)}),
    "adamax": lambda: fsdp.from_torch(torch.optim.Adamax, lr=1e-2),
}
PRECISIONS = {
    "float32": fsdp.Precision(),
    "native": fsdp.Precision(compute=torch.bfloat16),
    "exact": fsdp.Precision(compute=torch.bfloat16, sum="fp32"),
    "exact, halved": fsdp.Precision(compute=torch.bfloat16, sum="fp32", grads=torch.bfloat16),
}


def made(preset: str, precision: str, optimizer: str, **schedule: Any) -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(net(torch.float32))
    mesh, _ = mesh_and_placement(preset)
    schedule = {"overlap_update": True, **schedule}
    spec = fsdp.Spec(
        mesh, getattr(fsdp, preset)(*AXES[preset]), precision=PRECISIONS[precision],
        schedule=fsdp.Schedule(**schedule), labels={"*.bias": "bias"},
    )  # fmt: skip
    return fsdp.shard(params, spec, OPTIMIZERS[optimizer]()), T.forward_backward(model, loss_fn)


def in_small() -> Any:
    """Every bucket counts, and has several pieces."""
    return mock.patch.multiple(arrivals, LEAST=0, PIECE=1 << 10)


def tensors(state: fsdp.State) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in pytree.tree_leaves((state.main, state.weights, state.opt, state.count))]


def stepped(preset: str, precision: str, optimizer: str, arrive: bool, watched: bool) -> Any:
    """What a state has after three steps and two captured ones, what raced, and how many buckets arrived in those."""
    with in_small(), ordered() if watched else nullcontext() as order:
        state, forward_backward = made(preset, precision, optimizer)
        arrived = 0
        for i in range(5):
            lineage = lineage_of(state)
            beside = (lineage.beside_backward if watched else tuple(state.layout.trainable)) if arrive else ()
            if i < 3:
                state, _ = forward_backward(state, batch(i, dist.get_rank(), 0))
                state = fsdp.step(state)
                continue
            capture = Capture(state, beside)
            with capture.recording():
                state, _ = forward_backward(state, batch(i, dist.get_rank(), 0))
                arrived += sum(one.used for one in state._executor.arrivals.values())
                state = fsdp.step(state)
            capture.first(lambda: None)
            assert not state._executor.arrivals
        return tensors(state), [] if order is None else order.races, arrived


ROWS = [*itertools.product(PRESETS, PRECISIONS, OPTIMIZERS)]
QUICK = [
    ("zero3", "exact", "adamw"), ("zero2", "native", "partition"), ("zero1", "float32", "adamax"),
    ("hsdp", "exact, halved", "sgd"), ("hfsdp", "exact", "adamw"), ("ddp", "native", "adamw"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "precision", "optimizer"), marked(ROWS, QUICK))
def test_bits_are_those_of_updates_at_the_end(preset: str, precision: str, optimizer: str) -> None:
    plain = launch(stepped, (preset, precision, optimizer, False, False), nprocs=ranks_of(preset))
    for watched in (False, True):
        seen = launch(stepped, (preset, precision, optimizer, True, watched), nprocs=ranks_of(preset))
        for (found, races, arrived), (wanted, _, none) in zip(seen, plain, strict=True):
            assert not races
            assert not none
            assert all(map(torch.equal, found, wanted))
            if preset != "ddp" or not watched:  # updates of main weights that every rank has whole do not overlap
                assert arrived


def kept(how: str) -> tuple[int, bool]:
    """How many buckets the last of three eager steps lets arrive, and whether a captured step then keeps gradients."""
    with in_small(), ordered():
        state, forward_backward = made("zero3", "native", "adamw", overlap_update=how != "not asked")
        micro = 2 if how == "microbatches" else 1

        def train_step(state: fsdp.State, i: int) -> fsdp.State:
            for k in range(micro):
                state, _ = forward_backward(state, batch(i, dist.get_rank(), k), last_microbatch=k == micro - 1)
            if how == "clipped":
                state, _ = T.clip_by_global_norm(state, 0.1)
            elif how == "looked at":
                fsdp.local_shards(state, "grads")
            elif how == "whole":
                state = fsdp.finish_reductions(state)
            stays.append(not any(isinstance(buffer.local, Gone) for buffer in state.grads.values()))
            return fsdp.step(state, skip=torch.zeros((), dtype=torch.bool) if how == "skip" else None)

        stays: list[bool] = []
        for i in range(3):
            state = train_step(state, i)
        beside = lineage_of(state).beside_backward
        capture = Capture(state, beside)
        with capture.recording():
            train_step(state, 3)
        return len(beside), stays[-1]


@pytest.mark.parametrize("how", ["not asked", "microbatches", "clipped", "looked at", "whole", "skip"])
def test_gradients_that_somebody_looks_at_are_kept(how: str) -> None:
    assert launch(kept, (how,), nprocs=2) == [(0, True)] * 2


def test_gradients_that_nobody_looks_at_are_not() -> None:
    for beside, stays in launch(kept, ("",), nprocs=2):
        assert beside > 3
        assert not stays


# ---------------------------------------------------------------- refusals


UNITS = ("embed.weight", "blocks.0", "blocks.1", "blocks.2", "tail")


def by_hand(state: fsdp.State, backward: Sequence[str]) -> fsdp.State:
    """A forward, and these units' part of a backward."""
    for unit in UNITS:
        state, _ = fsdp.unshard(state, unit)
        state = fsdp.release(state, unit)
    return back(state, backward)


def back(state: fsdp.State, units: Sequence[str]) -> fsdp.State:
    for unit in units:
        state, weights = fsdp.unshard(state, unit)
        state = fsdp.reduce(state, {key: torch.ones_like(w) for key, w in weights.items()}, unit)
        state = fsdp.release(state, unit)
    return state


def refused(how: str) -> tuple[str, bool]:
    """What a captured step that does something else than the eager ones says, and whether the state before is good."""
    with in_small(), ordered():
        units = UNITS[::-1]
        state, _ = made("zero3", "float32", "adamw")
        state = fsdp.step(by_hand(state, units))
        before = tensors(state)
        said = ""
        capture = Capture(state, tuple(state.layout.trainable))
        try:
            with capture.recording():
                middle = by_hand(state, units[:3])
                name = next(name for name, one in state._executor.arrivals.items() if one.used)
                if how == "read":
                    middle.grads[name].local.norm()
                elif how == "changed":
                    middle.grads[name].local.mul_(2)
                elif how == "scaled":
                    middle = pytree.tree_map_only(torch.Tensor, lambda g: g * 2, middle.grads)
                elif how == "weights":
                    fsdp.full_params(middle)
                elif how == "again":
                    fsdp.step(back(back(middle, units[3:]), units))
                else:
                    fsdp.step(back(middle, units[3:]), skip=torch.zeros((), dtype=torch.bool))
        except ScheduleError as error:
            said = str(error)
        capture.abandon()
        same = len(before) == len(tensors(state))
        return said, same


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("read", "state.grads['"), ("changed", "state.grads['"), ("scaled", "state.grads['"),
        ("weights", "weights were read, or gradients replaced, after the gradients of"),
        ("again", "state.grads['"), ("skip", "step(skip=) was called after the gradients of"),
    ],
)  # fmt: skip
def test_who_looks_all_the_same_is_told(how: str, text: str) -> None:
    for said, same in launch(refused, (how,), nprocs=2):
        assert text in said, said
        assert "overlap_update" in said
        assert same


def lacking() -> str:
    with in_small(), ordered():
        units = UNITS[::-1]
        state, _ = made("zero3", "float32", "adamw")
        state = fsdp.step(by_hand(state, units))
        capture = Capture(state, tuple(state.layout.trainable))
        try:
            with capture.recording():
                middle = by_hand(state, units[:4])
                middle, weights = fsdp.unshard(middle, units[4])
                fsdp.step(fsdp.reduce(middle, dict.fromkeys(weights), units[4]))
        except NewCounts as error:
            return str(error)
        return ""


def test_a_leaf_without_a_gradient_is_not_updated_by_zeros() -> None:
    for said in launch(lacking, nprocs=2):
        assert "got none in the step that is captured" in said


def test_what_stands_for_gradients_says_what_it_is() -> None:
    from functional_fsdp._engine.arrival import gone

    one = gone("blocks.0", 1024, torch.float32, torch.device("cpu"))
    assert repr(one) == "Gone('blocks.0', 1,024 elements, torch.float32)"
    assert (one.shape, one.nbytes) == ((1024,), 4096)
    with pytest.raises(ScheduleError, match=r"state\.grads\['blocks\.0'\] was read or changed"):
        torch.add(torch.ones(1024), one)
