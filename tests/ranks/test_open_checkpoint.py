"""open_checkpoint: small checkpoints that other packages have made (tools/peers), read by any number of ranks."""

from __future__ import annotations

import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.peers import DECAY, LR, MORE, STEPS, PeerModel, batch_of, loss_of

import functional_fsdp as fsdp
from functional_fsdp import convert, launch
from functional_fsdp import transforms as T

DATA = Path(__file__).parents[1] / "data" / "peers"
DCP = ("dcp-nested", "dcp-flat", "dcp-top")
WITHOUT_MOMENTS = ("dcp-plain", "hf-dcp")
EXACT = (*DCP, "rank-files")
MADE = (*EXACT, *WITHOUT_MOMENTS)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A copy of a small checkpoint, by its name: {"checkpoint": path, "expected": {name: tensor}}."""
    base = tmp_path_factory.mktemp("peers")

    @lru_cache
    def of(name: str) -> Path:
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(base, filter="data")
        return next(p for p in ((base / name / "checkpoint"), base / name / "checkpoint.ckpt") if p.exists())

    return of


def expected(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path.parent / "expected.safetensors")


@pytest.mark.parametrize("name", MADE)
def test_leaves_and_moments_have_the_bits_that_the_peer_had(name: str, unpacked: Any) -> None:
    path = unpacked(name)
    there, said = fsdp.open_checkpoint(path), expected(path)
    weights = {key.removeprefix("weight/"): value for key, value in said.items() if key.startswith("weight/")}
    assert weights.keys() <= {*there, *there.ties}
    for leaf, value in weights.items():
        assert there[leaf].dtype is value.dtype, leaf
        assert torch.equal(there[leaf], value), leaf
    assert bool(there.optimizer) is (name not in WITHOUT_MOMENTS)
    if there.optimizer:
        assert there.step == STEPS
        assert there.optimizer.keys() == {key.partition("/")[2] for key in said if key.startswith("exp_avg/")}
    assert "seen" in there.buffers


SPELT = {"adamw": lambda: fsdp.adamw(lr=LR, weight_decay=DECAY),
         "from_torch": lambda: fsdp.from_torch(torch.optim.AdamW, lr=LR, weight_decay=DECAY)}  # fmt: skip


def went_on(path: str, way: str, kind: str = "zero3", again: bool = False) -> Any:
    """A running step by two commands: the losses of ten further steps, and what was read."""
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, getattr(fsdp, kind)("data"))
    state, model = fsdp.init(PeerModel, spec, SPELT[way](), weights=path, seed=7)
    weights, buffers = fsdp.full_params(state), dict(fsdp.state_dict(state, model))
    moments: Any = {}
    if again:
        state = fsdp.load_optimizer_state(state, path)
        assert state.steps == STEPS
        moments = fsdp.optimizer_state(state)
    forward_backward = T.forward_backward(model, loss_of)
    losses = []
    world, ranks = mesh.size(), 2
    for step in range(STEPS, STEPS + (MORE if again and world == ranks else 0)):
        state, loss = forward_backward(state, batch_of(step, mesh.get_rank()))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss.item())
    return weights, buffers, moments, losses


@pytest.mark.parametrize("way", ["adamw", "from_torch"])
@pytest.mark.parametrize("name", EXACT)
def test_a_run_goes_on_as_the_peer_itself(name: str, way: str, unpacked: Any) -> None:
    path = unpacked(name)
    said = expected(path)
    for _, _, moments, losses in launch(went_on, (str(path), way, "zero3", True), nprocs=2, simulate=True):
        for key, value in said.items():
            slot, _, leaf = key.partition("/")
            mine = {"exp_avg": "mean", "exp_avg_sq": "square"}.get(slot, "") if way == "adamw" else slot
            if slot in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(moments[leaf][mine], value), key
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), said["losses"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("nprocs", "kind"), [(1, "zero3"), (2, "zero1"), (4, "zero3")])
@pytest.mark.parametrize("name", MADE)
def test_any_ranks_and_strategy_read_the_same(name: str, nprocs: int, kind: str, unpacked: Any) -> None:
    path = unpacked(name)
    said = expected(path)
    for weights, held, _, _ in launch(went_on, (str(path), "adamw", kind), nprocs=nprocs, simulate=True):
        for key, value in said.items():
            if key.startswith("weight/"):
                leaf = key.removeprefix("weight/")
                assert torch.equal((weights if leaf in weights else held)[leaf], value), leaf
        assert weights["head.weight"] is weights["embed.weight"]


@pytest.mark.parametrize("name", MADE)
def test_convert_keeps_ties_buffers_and_moments(name: str, unpacked: Any, tmp_path: Path) -> None:
    path = unpacked(name)
    said = expected(path)
    there = convert.main([str(path)])
    assert repr(there).count("\n") >= len(there)
    assert "embed.weight" in repr(there)
    folder = convert.main([str(path), str(tmp_path / "ours")])
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))
    optimizer = SPELT["adamw"]() if there.optimizer else None
    state = fsdp.load(folder, spec, optimizer)
    held = {**fsdp.full_params(state), **state.buffers}
    for key, value in said.items():
        if key.startswith("weight/"):
            assert torch.equal(held[key.removeprefix("weight/")], value), key
    home = dict(zip(state.layout.paths, state.layout.source, strict=True))
    assert home.get("head.weight", "embed.weight") == "embed.weight"
    assert state.buffers["seen"].dtype is torch.int64
    assert not there.optimizer or state.steps == STEPS
    if there.optimizer:
        assert torch.equal(fsdp.optimizer_state(state)["blocks.0.up.bias"]["mean"], said["exp_avg/blocks.0.up.bias"])
        assert "gate.weight" not in fsdp.optimizer_state(state)
