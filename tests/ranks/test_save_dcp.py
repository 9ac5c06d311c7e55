"""save_dcp: FSDP2 reads what is written here by torch.distributed.checkpoint.load, and goes on with the same losses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.peers import DECAY, LR, PeerModel, batch_of, loss_of
from support.ranks import each_rank
from support.tables import marked
from torch.distributed.checkpoint.filesystem import FileSystemReader

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._io.contents import boxes

STEPS, MORE = 3, 10


def optimizer_of(way: str) -> Any:
    if way == "adamw":
        return fsdp.adamw(lr={"up": LR, "default": lambda count: LR + 0 * count}, weight_decay=DECAY)
    return fsdp.from_torch(torch.optim.AdamW, lr=LR, weight_decay=DECAY)


def written(folder: str, way: str, kind: str, **names: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """A run that saves after some steps, and goes on: its weights then, and the losses after."""
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, getattr(fsdp, kind)("data"), labels={"*.up.*": "up"} if way == "adamw" else {})
    state, model = fsdp.init(PeerModel, spec, optimizer_of(way), seed=3)
    forward_backward = T.forward_backward(model, loss_of)
    losses = []
    for step in range(STEPS + MORE):
        if step == STEPS:
            fsdp.save_dcp(state, folder, **names)
            there = fsdp.state_dict(state)
        state, loss = forward_backward(state, batch_of(step, mesh.get_rank()))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss.item())
    return there, losses[STEPS:]


def read_by_fsdp2(folder: str, flat: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What FSDP2 has of it, and how it goes on."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = fsdp.local_mesh()
    model: Any = PeerModel(seed=9)
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [[p for name, p in trains.items() if (".up." in name) is up] for up in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, kept = get_state_dict(model, optimizer, options=options)
    held: dict[str, Any] = {"model": weights, "optim": kept}
    dcp.load(held, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=held["optim"], options=options)
    found = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
    assert all(group["lr"] == pytest.approx(LR) for group in optimizer.param_groups)
    assert all(kept["step"] == STEPS for kept in optimizer.state.values())
    found = {name: t.clone() for name, t in found.items()}
    losses = []
    for step in range(STEPS, STEPS + MORE):
        loss = loss_of(model, batch_of(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return found, losses


@pytest.mark.parametrize(
    ("way", "kind", "flat"),
    marked([("adamw", "zero3", False), ("from_torch", "zero1", True)], [("from_torch", "zero1", True)]),
)
def test_fsdp2_goes_on_from_what_is_written_here(way: str, kind: str, flat: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "there")
    weights, losses = launch(written, (folder, way, kind), nprocs=2, simulate=True)[0]
    for found, again in launch(read_by_fsdp2, (folder, flat), nprocs=2):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        torch.testing.assert_close(torch.tensor(again), torch.tensor(losses), rtol=0, atol=1e-6)


READ = [(*row, n) for row in (("adamw", "zero3"), ("from_torch", "ddp")) for n in (1, 4)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("way", "kind", "nprocs"), marked(READ, [READ[0], READ[-1]]))
def test_what_is_written_is_read_again(way: str, kind: str, nprocs: int, tmp_path: Path) -> None:
    weights, _ = launch(written, (str(tmp_path / "a"), way, kind), nprocs=nprocs, simulate=True)[0]
    there = fsdp.open_checkpoint(tmp_path / "a")
    assert {*there} == {*weights}
    assert all(torch.equal(there[name], value) for name, value in weights.items())
    assert there.step == STEPS
    assert there.optimizer.keys() == {name for name, p in PeerModel().named_parameters() if p.requires_grad}
    assert there.buffers == {"seen"}  # leaves that lie in one box are no buffers
    whole = dict(weights, **{name: torch.empty_like(t) for name, t in weights.items()})
    dcp.load({"model": whole}, checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[attr-defined]
    assert all(torch.equal(whole[name], value) for name, value in weights.items())


@each_rank(2)
def test_leaves_without_elements(tmp_path: Path) -> None:
    params = {"a": torch.ones(4, 3), "none": torch.ones(0, 3), "b": torch.ones(2), "rows": torch.ones(3, 0)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), buffers={"of_rows": torch.zeros(2)})
    fsdp.save_dcp(state, tmp_path / "there")
    read = fsdp.full_params(fsdp.load_weights(state, tmp_path / "there"))
    assert all(torch.equal(read[name], leaf) for name, leaf in params.items())


def test_names_may_be_torchtitans_and_folders_are_never_written_over(tmp_path: Path) -> None:
    state, _ = fsdp.init(PeerModel, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.adamw(lr=LR), seed=1)
    fsdp.save_dcp(state, tmp_path / "a", model="", optimizer="optimizer")
    there = fsdp.open_checkpoint(tmp_path / "a")
    assert torch.equal(there["gate.weight"], fsdp.full_params(state)["gate.weight"])
    assert "embed.weight" in there.optimizer
    with pytest.raises(FileExistsError, match="exists"):
        fsdp.save_dcp(state, tmp_path / "a")
    fsdp.save_dcp(state, tmp_path / "b", optimizer=None)
    assert not fsdp.open_checkpoint(tmp_path / "b").optimizer
    other, _ = fsdp.init(PeerModel, state.spec, fsdp.sgd(lr=LR, momentum=0.9), seed=1)
    with pytest.raises(fsdp.SpecError, match=r"torch\.optim has no class for the optimizer .* optimizer=None"):
        fsdp.save_dcp(other, tmp_path / "c")
    for model, optimizer in (("model", ""), ("", ""), ("a", "a")):
        with pytest.raises(fsdp.SpecError, match="expected two different keys"):
            fsdp.save_dcp(state, tmp_path / "c", model=model, optimizer=optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 3, 1, 2), (0, 3)])
def test_boxes_are_the_run_one_after_another(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    n = whole.numel()
    for start in range(n + 1):
        for stop in range(start, n + 1):
            found = [whole[tuple(slice(a, a + k) for a, k in zip(o, s, strict=True))].reshape(-1)
                     for o, s in boxes(shape, start, stop)]  # fmt: skip
            assert len(found) <= 2 * max(len(shape), 1) - 1 or len(shape) < 2
            assert torch.equal(torch.cat([*found, torch.empty(0, dtype=torch.int64)]), whole.reshape(-1)[start:stop])
            assert all(a[-1] + 1 == b[0] for a, b in pairwise(one for one in found if len(one)))


def by_leaf(folder: str, name: str) -> dict[str, dict[str, torch.Tensor]]:
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data"))
    tree = {"w": torch.ones(5, 7), "s": torch.ones(()), "e": torch.empty(0, 3)}
    state = fsdp.shard(tree, spec, fsdp.from_torch(getattr(torch.optim, name), lr=0.01))
    state, p = fsdp.unshard(state)
    state = fsdp.step(fsdp.reduce(state, {key: torch.ones_like(t) for key, t in p.items()}))
    fsdp.save_dcp(state, folder)
    return fsdp.optimizer_state(state)


NUMBERS = [(*row, n) for row in (("NAdam", ("mu_product",)), ("ASGD", ("eta", "mu"))) for n in (1, 4)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("name", "slots", "nprocs"), marked(NUMBERS, [NUMBERS[0], NUMBERS[-1]]))
def test_numbers_that_a_class_keeps_for_each_leaf_are_numbers(
    name: str, slots: tuple[str, ...], nprocs: int, tmp_path: Path
) -> None:
    kept = launch(by_leaf, (str(tmp_path / "a"), name), nprocs=nprocs, simulate=True)[0]
    about = FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    said: Any = {key: one for key, one in about.items() if hasattr(one, "properties")}
    there = {key: torch.full(one.size, 9.0, dtype=one.properties.dtype) for key, one in said.items()}
    dcp.load(there, checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[attr-defined]
    for path in ("w", "s", "e"):
        assert {*slots} <= kept[path].keys()
        for slot, value in kept[path].items():
            assert torch.equal(there[f"optim.state.{path}.{slot}"], value), (path, slot)
