"""Peak host memory of a rank while weights go out to files and come in: its shard and two units."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import launch

RANKS, UNITS = 4, 16
UNIT = 64 << 20  # bytes; the model has 1 GiB
SHARD = UNIT * UNITS // RANKS
SPARE = 128 << 20  # what allocators and Python take besides


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10


def grew(do: Callable[[], Any]) -> tuple[int, Any]:
    """By how many bytes this process was larger, at most, while it did something."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    kept = do()
    return status("VmHWM") - before, kept


def make(side: int = int((UNIT // 4) ** 0.5)) -> nn.Module:
    return nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(UNITS)))


def moved(folder: str) -> dict[str, int]:
    spec = fsdp.Spec(fsdp.local_mesh(), units=["*"])
    found: dict[str, int] = {}
    fsdp.init(lambda: make(2), spec)  # what it imports stays
    found["init"], (state, _) = grew(lambda: fsdp.init(make, spec, fsdp.sgd(lr=0.1)))
    assert sum(buffer.local.nbytes for buffer in state.main.values()) == SHARD
    found["save_safetensors"], _ = grew(lambda: fsdp.save_safetensors(state, f"{folder}/st"))
    found["save"], _ = grew(lambda: fsdp.save(state, f"{folder}/dcp"))
    found["load"], loaded = grew(lambda: fsdp.load(f"{folder}/dcp", spec, fsdp.sgd(lr=0.1)))
    del loaded
    found["init(weights=)"], made = grew(lambda: fsdp.init(make, spec, fsdp.sgd(lr=0.1), weights=f"{folder}/st"))
    del made
    found["load_weights"], again = grew(lambda: fsdp.load_weights(state, f"{folder}/st"))
    del again
    found["redistribute"], _ = grew(lambda: fsdp.redistribute(state, fsdp.Spec(fsdp.local_mesh(), units=["0"])))
    return found


@pytest.mark.large
def test_a_rank_needs_its_shard_and_two_units(tmp_path: Path) -> None:
    """Beyond what it held before: nothing but buffers to write, a new shard and two units to read."""
    for found in launch(moved, (str(tmp_path),), nprocs=RANKS):
        for what in ("save_safetensors", "save"):
            assert found[what] <= 2 * UNIT + SPARE, (what, found)
        for what in ("init", "load", "init(weights=)", "load_weights", "redistribute"):
            assert found[what] <= SHARD + 2 * UNIT + SPARE, (what, found)
