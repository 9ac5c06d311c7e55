"""Files of leaves that are cut along an axis of the model's own: names, sizes, counts, averages, trees of buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import by_rank
from torch.utils._pytree import tree_map

import functional_fsdp as fsdp
from functional_fsdp import simulate

OWN: dict[str, Any] = {
    "w": ("tp", 0),
    "inner.w": fsdp.Along("tp", 0, parts=2),  # its path ends as another leaf's
    "one": ("tp", 0),  # an element on each of two ranks: as many as its count has
    "none": ("tp", 0),
    "nothing": ("tp", 0),
    "*": "tp",
}
SHAPES: dict[str, tuple[int, ...]] = {
    "w": (4, 3),
    "inner.w": (4, 3),
    "one": (2,),
    "none": (4, 0, 2),
    "nothing": (0, 3),
    "bias": (3,),
}


def made(axes: dict[str, int], filled: bool) -> fsdp.State:
    params: dict[str, Any] = {
        path: torch.arange(float(torch.Size(shape).numel())).view(shape) * filled for path, shape in SHAPES.items()
    }
    params["inner"] = {"w": params.pop("inner.w")}
    spec = fsdp.Spec(fsdp.local_mesh(**axes), own=OWN, units=lambda path: path)
    buffers: Any = {"norm": {"mean": torch.full((3,), 5.0 * filled)}}
    return fsdp.shard(params, spec, fsdp.adamw(lr=0.01), buffers=buffers)


def seen(state: fsdp.State) -> Any:
    average = fsdp.replace_params(state, fsdp.full_params(state))

    def put() -> None:  # in the place of weights, so that it is whole
        for name, buffer in average.main.items():
            buffer.local.copy_(state.extras["average"][name].local)

    if "average" in state.extras:
        average = fsdp.extend.change_weights(average, "put()", put)
    return fsdp.state_dict(state), fsdp.optimizer_state(state), fsdp.state_dict(average)


def written(folder: Path) -> Any:
    state = made({"data": 1, "tp": 2}, True)
    for step in range(3):  # "one" misses two of them
        state, params = fsdp.unshard(state)
        grads = tree_map(torch.ones_like, params)
        state = fsdp.step(fsdp.reduce(state, {**grads, "one": grads["one"] if step == 1 else None}))
        if step == 1:
            state = fsdp.replace_extras(state, average=tree_map(torch.clone, state.main))
    fsdp.save(state, folder / "own")
    fsdp.save_dcp(state, folder / "dcp")
    return seen(state)


def read(folder: Path, how: str) -> Any:
    state = made({"data": 2, "tp": 1}, False)
    if how == "load":
        return seen(fsdp.load(folder / "own", state.spec, state.optimizer))
    if how == "like":
        return seen(fsdp.load(folder / "own", like=state))
    state = fsdp.load_weights(state, folder / how)
    return seen(fsdp.load_optimizer_state(state, folder / how))


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cut")
    with simulate(data=1, tp=2) as ranks:
        return folder, by_rank(ranks(written, folder))[0]


@pytest.mark.parametrize("how", ["load", "like", "own", "dcp"])
def test_all_is_read_where_leaves_are_whole(how: str, there: Any) -> None:
    folder, (weights, moments, average) = there
    assert int(moments["one"]["missed"]) == 2
    with simulate(data=2, tp=1) as ranks:
        for found in by_rank(ranks(read, folder, how)):
            assert found[0].keys() == weights.keys()
            assert all(torch.equal(found[0][path], one) for path, one in weights.items())
            assert found[1].keys() == moments.keys()
            for path, kept in moments.items():
                assert all(torch.equal(found[1][path][name], one) for name, one in kept.items()), path
            if how in ("load", "like"):
                assert all(torch.equal(found[2][path], one) for path, one in average.items())


ALIKE: dict[str, tuple[int, ...]] = {"w": (2, 4), "mean.w": (4, 6), "step.w": (2,), "head of a": (2, 2)}


def alike(optimizer: Any, frozen: bool, whole: bool, folder: Path | None) -> Any:
    """Leaves whose paths begin as what optimizers keep is called, or have the word between a name and its place."""
    params: Any = {
        path: torch.arange(float(torch.Size(shape).numel())).view(shape) * (folder is not None)
        for path, shape in ALIKE.items()
    }
    for path in ("mean", "step"):
        params[path] = {"w": params.pop(f"{path}.w")}
    mesh = fsdp.local_mesh(data=1, tp=1 if whole else 2)
    trainable = {"w": True, "*": not frozen}
    spec = fsdp.Spec(mesh, own={} if whole else {"*": ("tp", 0)}, trainable=trainable)
    state = fsdp.shard(params, spec, optimizer)
    if folder is not None:
        state, params = fsdp.unshard(state)
        grads = tree_map(torch.ones_like, params)
        if frozen:
            grads = {**tree_map(lambda _: None, params), "w": grads["w"]}
        state = fsdp.step(fsdp.reduce(state, grads))
        fsdp.save(state, folder)
    return state


@pytest.mark.parametrize(
    ("optimizer", "frozen"),
    [
        (fsdp.adamw(lr=0.1), False),
        (fsdp.adamw(lr=0.1), True),
        (fsdp.sgd(lr=0.1, momentum=0.9), False),
        (fsdp.from_torch(torch.optim.Adam, lr=0.1), False),
    ],
    ids=["adamw", "adamw beside frozen leaves", "sgd", "Adam"],
)
def test_a_leaf_may_be_called_as_what_an_optimizer_keeps(optimizer: Any, frozen: bool, tmp_path: Path) -> None:
    def write() -> Any:
        state = alike(optimizer, frozen, False, tmp_path / "cut")
        return fsdp.state_dict(state), fsdp.optimizer_state(state)

    with simulate(data=1, tp=2) as ranks:
        weights, moments = by_rank(ranks(write))[0]
    state = fsdp.load_weights(alike(optimizer, frozen, True, None), tmp_path / "cut")
    state = fsdp.load_optimizer_state(state, tmp_path / "cut")
    assert all(torch.equal(fsdp.state_dict(state)[path], one) for path, one in weights.items())
    for path, kept in fsdp.optimizer_state(state).items():
        assert kept.keys() == moments[path].keys()
        assert all(torch.equal(one, moments[path][name]) for name, one in kept.items()), path


@pytest.mark.parametrize(
    ("paths", "missing"),
    [
        (["w", "missed.w"], ["w"]),
        (["w", "missed.w"], ["missed.w"]),
        (["w", "missed.w", "missed.missed.w"], ["w", "missed.w"]),
        (["w", "missed.w", "mean.w", "square.w"], ["w"]),
    ],
)
@pytest.mark.parametrize("member", ["", "missed"])
def test_counts_of_missed_steps_are_found_whatever_leaves_are_called(
    paths: list[str], missing: list[str], member: str, tmp_path: Path
) -> None:
    optimizer: Any = fsdp.adamw(lr=0.1)
    labels = {"*": member} if member else {}
    optimizer = fsdp.partition({member: optimizer}) if member else optimizer
    shapes = {path: (2 + i, 3) for i, path in enumerate(paths)}

    def made(value: float) -> fsdp.State:
        spec = fsdp.Spec(fsdp.local_mesh("cpu"), units=lambda path: path, labels=labels)
        return fsdp.shard({path: torch.full(shape, value) for path, shape in shapes.items()}, spec, optimizer)

    state = made(1.0)
    for step in range(3):
        grads = {
            path: torch.full(shape, 1.0 + step) if path not in missing or step == 1 else None
            for path, shape in shapes.items()
        }
        state = fsdp.step(fsdp.reduce(state, grads))
    fsdp.save(state, tmp_path / "saved")
    found = fsdp.load_optimizer_state(fsdp.load_weights(made(0.0), tmp_path / "saved"), tmp_path / "saved")
    for path, kept in fsdp.optimizer_state(state).items():
        assert int(kept.get(f"{member}.missed".strip("."), 0)) == 2 * (path in missing)
        there = fsdp.optimizer_state(found)[path]
        assert there.keys() == kept.keys()
        assert all(torch.equal(there[name], one) for name, one in kept.items()), path
