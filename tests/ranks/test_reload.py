"""A checkpoint is read by any strategy, number of ranks, precision and units, whichever wrote it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.moved import begun, spec_of, trained, whole, wrong_in
from support.presets import PRESETS
from support.problems import net
from support.ranks import launch
from support.tables import FULL, covering

import functional_fsdp as fsdp

WORLDS = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16]
STEPS = 10 if FULL else 2  # the second one's loss is of weights that the optimizer has changed


def write(preset: str, dtype: torch.dtype, folder: str) -> None:
    state = begun(preset, dtype)
    fsdp.save(state, f"{folder}/saved")
    kept = whole(state)
    losses = trained(state, 2, STEPS)[1]
    if dist.get_rank() == 0:
        torch.save((kept, losses), f"{folder}/kept.pt")


def template(spec: fsdp.Spec) -> fsdp.State:
    params, _ = fsdp.functionalize(net(torch.float32))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2), buffers={"seen": torch.zeros(3, dtype=torch.int64)})
    ema = {name: buffer.but(buffer.local.double()) for name, buffer in state.main.items()}
    return fsdp.replace_extras(state, ema=ema, note={"scale": torch.zeros((), dtype=torch.float64)})


def read(preset: str, dtype: torch.dtype, like: bool, folder: str, settings: dict[str, Any]) -> tuple[list[str], float]:
    """What is not the same, and the largest difference of a loss in further steps."""
    kept, losses = torch.load(f"{folder}/kept.pt")
    spec = spec_of(preset, dtype, **settings)
    if like:
        state = fsdp.load(f"{folder}/saved", like=template(spec))
    else:
        state = fsdp.load(f"{folder}/saved", spec, fsdp.adamw(lr=1e-2))
    wrong = wrong_in(state, kept)
    found_losses = trained(state, 2, STEPS)[1]
    return wrong, max(abs(a - b) for a, b in zip(losses, found_losses, strict=True))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints, each written once."""
    folders: dict[Any, str] = {}

    def one(preset: str, world: int, dtype: torch.dtype) -> str:
        key = preset, world, dtype
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("written"))
            launch(write, (preset, dtype, folders[key]), nprocs=world)
        return folders[key]

    return one


COLUMNS = (PRESETS, WORLDS, DTYPES, PRESETS, WORLDS, DTYPES, [False, True])
ROWS = [*itertools.product(*COLUMNS)]


def short(row: Any) -> str:
    return "-".join(str(one).removeprefix("torch.") for one in row)


@pytest.mark.parametrize("row", ROWS if FULL else covering(ROWS[::7])[:4], ids=short)
def test_any_state_reads_what_any_other_wrote(row: Any, written: Any) -> None:
    preset, world, dtype, other, size, compute, like = row
    folder = written(preset, world, dtype)
    for wrong, apart in launch(read, (other, compute, like, folder, {}), nprocs=size):
        assert not wrong
        if dtype is compute and (dtype is torch.float32 or world == size == 1):  # else bfloat16 sums are others
            assert apart < 1e-5


UNITS: list[dict[str, Any]] = [
    {"units": ["blocks.*"]},
    {"units": []},
    {"labels": {"*bias": "bias"}},
    {"schedule": fsdp.Schedule(prefetch=0)},
]


@pytest.mark.parametrize("settings", UNITS, ids=lambda s: "-".join(s))
@pytest.mark.parametrize("like", [False, True])
def test_other_units_and_labels(settings: dict[str, Any], like: bool, written: Any) -> None:
    folder = written("zero3", 3, torch.float32)
    for wrong, apart in launch(read, ("zero3", torch.float32, like, folder, settings), nprocs=2):
        assert not wrong
        assert apart < 1e-5
