"""Traced steps: whole train steps under torch.compile(fullgraph=True) and T.compile, beside the plain module.

`make laws` runs every placement with every way and backend; `make test` a few, of one block. ZeRO-3 by units under
T.compile is in `test_extend`, too, with a transform.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS, ranks_of
from support.problems import LOOPS, net, reference
from support.tables import FULL, marked
from support.traced import BLOCKS, STEPS, trained

import functional_fsdp as fsdp
from functional_fsdp import launch

ROWS = [*product(PRESETS, LOOPS, ("eager", "aot_eager", "inductor", "T.aot_eager", "T.inductor"))]
FEW = [("hsdp", "whole", "eager")]


@pytest.mark.parametrize(("preset", "loop", "way"), marked(ROWS, FEW))
def test_a_compiled_step_is_the_plain_modules(preset: str, loop: str, way: str) -> None:
    world = ranks_of(preset) if FULL else 2  # each traces the same
    # One microbatch is half the code to trace, and no block a quarter less: `test_ways` has one. With two microbatches,
    # and by units, `test_cuda_graph` compiles a step.
    micro, depth = (2, BLOCKS) if FULL else (1, 0)
    expected = list(reference(world, STEPS, micro, depth=depth))
    ranks = launch(trained, (preset, loop, way), kwargs={"micro": micro, "depth": depth}, nprocs=world)
    assert [count for _, count in ranks] == [1] * world
    for i, (loss, _, weights) in enumerate(expected):
        assert ranks[0][0][i][0] == pytest.approx(loss, abs=1e-9)
        for seen, _ in ranks:
            for path, weight in weights.items():
                torch.testing.assert_close(seen[i][1][path], weight, rtol=0, atol=1e-9)


@pytest.mark.large  # `test_ways_in_turn` counts those of twelve
def test_one_compilation_serves_twenty_steps() -> None:
    for seen, count in launch(
        trained, ("zero3", "whole", "eager"), kwargs={"steps": 20, "micro": 1, "depth": 1}, nprocs=1
    ):
        assert count == 1
        assert len({loss for loss, _ in seen}) == 20


def overtaken(way: str) -> list[tuple[int, bool]]:
    """Of each group that gathers or reduces: its threads, and whether a short work overtook a long one."""
    params, _ = fsdp.functionalize(net(torch.float64))
    lineage = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1)).version.lineage
    lineage.for_graphs()
    assert lineage.graph_plan is not None
    lanes = lineage.runtime.groups
    keys = [key for key in lanes if key[0] not in ("side", "traced")]
    names = {lineage.graph_plan.group(*key) if way == "traced" else lanes[key].group_name for key in keys}
    found = []
    for group in [lanes[key] for key in sorted(lanes) if lanes[key].group_name in names]:
        long, short = torch.ones(1 << 23), torch.ones(1)
        overtook = False
        for _ in range(6):  # on a busy machine this thread may come late, when both are over
            dist.barrier()
            works = [dist.all_reduce(one, group=group, async_op=True) for one in (long, short)]
            works[1].wait()
            overtook |= not works[0].is_completed()
            works[0].wait()
        options: Any = group._get_backend(torch.device("cpu")).options
        found.append((options._threads, overtook))
    return found


def test_functional_collectives_have_one_thread_a_group() -> None:
    """Two threads corrupt the heap: each frees the name of the last work, when an all-gather's is too long to be kept
    in place. A work that is over before an earlier one shows the second thread."""
    assert launch(overtaken, ("traced",), nprocs=2) == [[(1, False)]] * 2
    assert launch(overtaken, ("lanes",), nprocs=2) == [[(2, True)] * 3] * 2  # which issue no all-gathers of gloo's


@pytest.mark.large
@pytest.mark.parametrize("total", ["native", "fp32"])
def test_every_stage_has_the_dtype_that_the_spec_says(total: Any) -> None:
    """bfloat16 compute: as with lanes, to the rounding of another order of operations in bfloat16."""
    precision = fsdp.Precision(compute=torch.bfloat16, sum=total)
    runs = [
        launch(
            trained,
            ("zero3", "by_unit", way),
            kwargs={"steps": 1, "micro": 1, "dtype": torch.float32, "precision": precision, "depth": 1},
            nprocs=2,
        )
        for way in ("lanes", "T.aot_eager")
    ]
    for (eager, _), (traced, _) in zip(*runs, strict=True):
        assert eager[0][0] == traced[0][0]
        for path, weight in eager[0][1].items():  # a step of AdamW moves each weight by no more than lr
            assert weight.dtype == traced[0][1][path].dtype == torch.float32 or "nothing" in path
            torch.testing.assert_close(traced[0][1][path], weight, rtol=0, atol=1e-6)
