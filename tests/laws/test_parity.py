"""Every placement against the plain module: losses, gradients and weights, different data on each rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.presets import PRESETS
from support.problems import LOOPS, largest, net, reference, sharded
from support.ranks import launch
from support.tables import FULL, each, marked, product

STEPS = 5 if FULL else 2  # AdamW's first one has no history


@pytest.mark.parametrize(("preset", "ranks", "loop", "micro"), product(PRESETS, (1, 2, 4), LOOPS, (1, 3)))
def test_adamw_steps_equal_the_plain_module(preset: str, ranks: int, loop: str, micro: int) -> None:
    # float64: AdamW amplifies rounding on gradients near zero, so weights are compared where there is hardly any
    expected = list(reference(ranks, STEPS, micro))
    ran = launch(sharded, (preset, loop, STEPS, micro), nprocs=ranks, processes=(preset, ranks) == ("hsdp", 2))
    for rank, seen in enumerate(ran):
        for (loss, grads, weights), (ref_loss, ref_grads, ref_weights) in zip(seen, expected, strict=True):
            if rank == 0:
                assert abs(loss - ref_loss) < 1e-12
            assert grads.keys() == ref_grads.keys()
            assert largest(grads, ref_grads) < 1e-12
            assert largest(weights, ref_weights) < 1e-9


OF_FLOAT32 = marked([*itertools.product(PRESETS, LOOPS, (1, 3))], [("zero3", "by_unit", 3), ("ddp", "whole", 1)])


@pytest.mark.parametrize(("preset", "loop", "micro"), OF_FLOAT32)
def test_gradients_and_losses_in_float32(preset: str, loop: str, micro: int) -> None:
    (ref_loss, ref_grads, _) = next(iter(reference(2, 1, micro, torch.float32)))
    loss, grads, _ = launch(sharded, (preset, loop, 1, micro, torch.float32), nprocs=2)[0][0]
    assert abs(loss - ref_loss) < 1e-5
    assert largest(grads, ref_grads) < 1e-5


# sums of two have one order
@pytest.mark.parametrize(("ranks", "loop"), marked([*itertools.product((2, 4), LOOPS)], [(4, "by_unit")]))
def test_zero3_and_ddp_are_equal_bit_for_bit(ranks: int, loop: str) -> None:
    runs = [launch(sharded, (preset, loop, STEPS, 1, torch.float32), nprocs=ranks)[0] for preset in ("zero3", "ddp")]
    for (loss_a, grads_a, weights_a), (loss_b, grads_b, weights_b) in zip(*runs, strict=True):
        assert loss_a == loss_b
        for a, b in ((grads_a, grads_b), (weights_a, weights_b)):
            assert all(torch.equal(a[key], b[key]) for key in a)


FLAGS = ((True, True, True), (False, False, False), (False, True, False), (True, False, True))


@pytest.mark.parametrize(("preset", "loop", "flags"), each(("ddp", "zero1", "hsdp", "hfsdp"), LOOPS, FLAGS))
def test_a_wrong_last_flag_costs_time_only(preset: str, loop: str, flags: tuple[bool, ...]) -> None:
    _, ref_grads, ref_weights = next(iter(reference(2, 1, 3)))
    _, grads, weights = launch(sharded, (preset, loop, 1, 3), kwargs={"flags": flags}, nprocs=2)[1][0]
    assert largest(grads, ref_grads) < 1e-12
    assert largest(weights, ref_weights) < 1e-9


def test_sum_over_ranks_instead_of_mean() -> None:
    _, ref_grads, _ = next(iter(reference(2, 1, 1, average="sum")))
    for preset in ("zero3", "zero1", "hsdp"):
        _, grads, _ = launch(sharded, (preset, "whole", 1, 1), kwargs={"average": "sum"}, nprocs=2)[0][0]
        assert largest(grads, ref_grads) < 1e-12


def test_every_rank_ends_with_the_same_weights_and_the_frozen_leaf_unchanged() -> None:
    for preset in ("ddp", "zero2", "zero3"):
        first, second = launch(sharded, (preset, "whole", 2, 1), nprocs=2)
        assert all(torch.equal(first[-1][2][key], second[-1][2][key]) for key in first[-1][2])
        assert torch.equal(first[-1][2]["tail.shift"], net().tail.shift)
