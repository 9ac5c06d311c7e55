"""Checkpoints: the same bits back, for every placement; another layout refused; written whole or not at all."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.driven import refused
from support.presets import PRESETS
from support.problems import LOOPS, batch, mesh_and_placement, net
from support.processes import survivors
from support.ranks import each_rank, launch
from support.resumed import start, train
from support.scenario import Scenario, alike, begun, run
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp._io import pieces as _reader
from functional_fsdp._io.folder import read_at
from functional_fsdp._io.pieces import write_tensors


@each_rank(2)
def test_other_leaves_are_refused_by_name(tmp_path: Path) -> None:
    """By another placement; and on another number of ranks everything is the same."""
    fsdp.save(start("zero3")[0], tmp_path / "a")
    mesh, placement = mesh_and_placement("zero2")
    params, _ = fsdp.functionalize(net(torch.float32))

    def load(leaves: dict[str, torch.Tensor]) -> Callable[[], Any]:
        return lambda: fsdp.load(tmp_path / "a", like=fsdp.shard(leaves, fsdp.Spec(mesh, placement), fsdp.adamw()))

    refused(
        (load({**params, "more": torch.ones(3)}), "TreeError", "'more' is missing there"),
        (load({name: leaf for name, leaf in params.items() if "tail" not in name}),
         "'tail.scale' is there, and this state has it not"),
        (load({**params, "tail.pair": torch.ones(3)}), "'tail.pair' is [2] there, [3] here"),
        (load({**params, "head.weight": params["embed.weight"].clone()}), "'head.weight' is tied there only"),
    )  # fmt: skip


def _die(*args: Any, **kwargs: Any) -> None:
    raise OSError("disk full")


@each_rank(2, processes=True)
def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """The save that dies halfway leaves no checkpoint; the next one succeeds in the same place."""
    state, _ = start("zero3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("functional_fsdp._io.checkpoint.write_tensors", _die)
        with pytest.raises(OSError, match="disk full"):
            fsdp.save(state, tmp_path / "one")
    dist.barrier()
    assert fsdp.latest_checkpoint(tmp_path) is None
    assert not list(tmp_path.iterdir())
    dist.barrier()
    fsdp.save(state, tmp_path / "one")
    assert fsdp.latest_checkpoint(tmp_path) == tmp_path / "one"


def test_clear_errors_for_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    state, model = start("zero3")
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        fsdp.load(tmp_path, like=state)
    with pytest.raises(fsdp.SpecError, match=r"load\(folder\): expected a path \(latest_checkpoint gives None"):
        fsdp.load(fsdp.latest_checkpoint(tmp_path), like=state)  # type: ignore[arg-type]
    fsdp.save(state, tmp_path / "x")
    with pytest.raises(FileExistsError, match="exists"):
        fsdp.save(state, tmp_path / "x")
    middle, _ = LOOPS["whole"](model, state, batch(0, 0), True)
    with pytest.raises(fsdp.StaleStateError, match="in the middle of a step"):
        fsdp.save(middle, tmp_path / "y")


def test_what_cannot_be_read_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = fsdp.shard({"w": torch.arange(5.0)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(0.1))
    fsdp.save(state, tmp_path / "x")
    reads, fails = [0], [-1]
    into = read_at

    def read(*args: Any) -> int:
        reads[0] += 1
        if reads[0] == fails[0]:
            raise OSError(5, "Input/output error")
        return into(*args)

    monkeypatch.setattr(_reader, "read_at", read)
    fsdp.load(tmp_path / "x", like=state)
    count = reads[0]
    assert count >= 3
    for fails[0] in range(1, count + 1):
        reads[0] = 0
        with pytest.raises(OSError, match="Input/output error"):
            fsdp.load(tmp_path / "x", like=state)


@each_rank(2)
def test_what_the_first_rank_cannot_write_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw())
    with pytest.raises(NotADirectoryError, match=r"file/saved"):
        fsdp.save(state, tmp_path / "file" / "saved")
    assert int(fsdp.step(fsdp.reduce(*fsdp.unshard(state))).count) == 1


def test_a_number_in_the_optimizer_state_is_refused_not_dropped(tmp_path: Path) -> None:
    optimizer = fsdp.Optimizer(lambda main: {"steps": 3}, lambda grads, opt, main, count: (main, opt))
    state = fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh()), optimizer)
    with pytest.raises(fsdp.TreeError, match=r"State\.opt holds a int at 'steps'"):
        fsdp.save(state, tmp_path / "saved")


# ---------------------------------------------------------------- what one rank meets, all raise


def said(do: Callable[[], Any]) -> str:
    """The error that `do` raises, in words."""
    try:
        do()
    except BaseException as error:
        number = getattr(error, "errno", None)
        return f"{type(error).__name__}{f' {number}' if number else ''}: {error}"
    return "nothing"


def full(*args: Any) -> Any:
    """As `write_tensors` on a full disk: the kernel writes no file of more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        return write_tensors(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Abroad(Exception):
    """Of a kind that other ranks may not know."""


def trouble(folder: str) -> dict[str, str]:
    state, model = start("zero3")
    rank, found = dist.get_rank(), {}
    mine = Path(folder, f"rank{rank}")
    mine.mkdir(parents=True)

    def on_rank(which: int, target: str, error: BaseException) -> str:
        def meet(*args: Any, **kwargs: Any) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            if rank == which:
                patch.setattr(f"functional_fsdp._io.checkpoint.{target}", meet)
            return said(lambda: (fsdp.save if "read" not in target else _load)(state, f"{folder}/a"))

    def _load(state: fsdp.State, path: str) -> fsdp.State:
        return fsdp.load(path, like=state)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("functional_fsdp._io.checkpoint.write_tensors", full)
        found["full"] = said(lambda: fsdp.save(state, f"{folder}/a"))
    dist.barrier()
    found["left"] = str(list(Path(folder).glob("a*")))
    for error in (
        KeyboardInterrupt(),
        MemoryError("none left"),
        ValueError("odd"),
        UnicodeDecodeError("x", b"", 0, 1, "y"),
        Abroad("far"),
    ):
        found[f"first {type(error).__name__}"] = on_rank(0, "Claim.make", error)
    found["second"] = on_rank(1, "write_tensors", KeyboardInterrupt())
    found["names"] = said(lambda: fsdp.save(state, f"{folder}/a{rank}"))
    found["no name"] = said(lambda: fsdp.save(state, None if rank else f"{folder}/a"))  # type: ignore[arg-type]
    middle, _ = LOOPS["whole"](model, state, batch(0, rank), True)
    found["midway"] = said(lambda: fsdp.save(middle if rank else state, f"{folder}/a"))
    os.chdir(mine)
    found["not shared"] = said(lambda: fsdp.save(state, "/proc/self/cwd/a"))
    found["written"] = str([p.name for p in Path(folder).iterdir() if not p.name.startswith("rank")])
    path = fsdp.save(state, f"{folder}/a")
    found["exists"] = said(lambda: fsdp.save(state, f"{folder}/a"))
    found["load names"] = said(lambda: fsdp.load(path if rank else f"{path}/../b", like=state))
    found["load met"] = on_rank(1, "read_tensors", OSError(5, "Input/output error", "x"))
    shutil.copytree(path, mine / "b")
    same = fsdp.load("/proc/self/cwd/b", like=state)  # not the same file system, but the same checkpoint
    found["copies"] = str(
        all(torch.equal(a.local, b.local) for a, b in zip(same.main.values(), state.main.values(), strict=True))
    )
    dist.barrier()
    other = fsdp.save(train(state, model, 0, 1), f"{folder}/c")
    if rank == 1:
        shutil.rmtree(mine / "b")
        shutil.copytree(other, mine / "b")
    found["halves"] = said(lambda: fsdp.load("/proc/self/cwd/b", like=same))
    dist.barrier()
    if rank == 0:  # the shards of two ranks change places
        files = [other / "__0_0.distcp", other / "__1_0.distcp", other / "x"]
        for old, new in ((0, 2), (1, 0), (2, 1)):
            files[old].rename(files[new])
    dist.barrier()
    found["swapped"] = said(lambda: fsdp.load(other, like=same))
    dist.barrier()
    if rank == 0:
        (other / "__0_0.distcp").unlink()
    dist.barrier()
    found["missing"] = said(lambda: fsdp.load(other, like=same))
    found["goes on"] = str(int(train(fsdp.load(path, like=same), model, 0, 1).count))
    os.chdir("/")
    return found


@pytest.fixture(scope="module")
def troubles(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return launch(trouble, (str(tmp_path_factory.mktemp("trouble")),), nprocs=2, processes=True)


def test_a_full_disk_is_its_own_error_on_every_rank(troubles: list[dict[str, str]]) -> None:
    for rank, met in zip(troubles, ("save: rank 1 met OSError: ", ""), strict=True):
        begin, file, _ = rank["full"].split("'")
        assert begin == f"OSError 27: {met}[Errno 27] File too large: "
        assert Path(file).name == "__1_0.distcp"
    assert [rank["left"] for rank in troubles] == ["[]", "[]"]


def test_whatever_one_rank_meets_the_others_name_it(troubles: list[dict[str, str]]) -> None:
    first, second = troubles
    stop = "RestartError: save: rank {} was stopped by KeyboardInterrupt. Nothing is lost: make the same call again"
    assert first["first KeyboardInterrupt"] == "KeyboardInterrupt: "
    assert second["first KeyboardInterrupt"].startswith(stop.format(0))
    assert first["first MemoryError"] == "MemoryError: none left"
    assert second["first MemoryError"] == "MemoryError: save: rank 0 met MemoryError: none left"
    assert first["first ValueError"] == "ValueError: odd"
    assert second["first ValueError"] == "ValueError: save: rank 0 met ValueError: odd"
    assert second["first UnicodeDecodeError"].startswith("UnicodeError: save: rank 0 met UnicodeDecodeError: ")
    assert first["first Abroad"] == "Abroad: far"
    assert second["first Abroad"] == "FsdpError: save: rank 0 met Abroad: far"
    assert first["second"].startswith(stop.format(1))
    assert first["no name"].startswith("SpecError: save: rank 1 met SpecError: ")
    assert second["no name"].startswith("SpecError: ")
    assert first["midway"].startswith("StaleStateError: save: rank 1 met StaleStateError: this State is in the mid")
    assert second["midway"].startswith("StaleStateError: save: this State is in the middle of a step")
    assert first["load met"] == "OSError 5: load: rank 1 met OSError: [Errno 5] Input/output error: 'x'"
    assert all("FileExistsError: save: " in rank["exists"] for rank in troubles)
    assert [rank["written"] for rank in troubles] == ["[]", "[]"]
    assert [rank["goes on"] for rank in troubles] == ["1", "1"]


def test_ranks_that_name_or_see_different_folders(troubles: list[dict[str, str]]) -> None:
    for rank in troubles:
        assert rank["names"].startswith("CheckpointError: save: rank 0 names the folder ")
        assert "/a0, rank 1 names " in rank["names"]
        assert "/a1. Give every rank the same" in rank["names"]
        assert "load: rank 0 names the folder " in rank["load names"]
        assert "/b, rank 1 names " in rank["load names"]
        assert "rank 1 does not see /proc/self/cwd/a.partial-" in rank["not shared"]
        assert rank["copies"] == "True"
        assert "load: /proc/self/cwd/b is not the same for all ranks: layout.json of rank 0 has" in rank["halves"]
        assert "__0_0.distcp" in rank["swapped"]
        assert "__0_0.distcp is missing" in rank["missing"]


@each_rank(2)
def test_ranks_that_come_with_different_states(tmp_path: Path) -> None:
    """Each would be written in part, to one checkpoint."""
    spec = fsdp.Spec(fsdp.local_mesh(data=2))
    states = [fsdp.shard({"w": torch.ones(5)}, spec, fsdp.sgd(lr=0.1)) for _ in range(2)]
    for save in (fsdp.save, fsdp.async_save, fsdp.save_dcp, fsdp.save_safetensors):
        text = said(lambda: save(states[dist.get_rank()], tmp_path / "a"))  # noqa: B023
        assert "rank 0 and rank 1 came with two states" in text
        assert not list(tmp_path.iterdir())
    fsdp.save(states[1], tmp_path / "a")


def dies(where: str, folder: str) -> None:
    """The last rank dies in the middle of a save or load."""
    state, _ = start("zero3")
    path = fsdp.save(state, f"{folder}/a")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(f"functional_fsdp._io.checkpoint.{where}", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        fsdp.load(path, like=state) if where == "read_tensors" else fsdp.save(state, f"{folder}/b")


@pytest.mark.parametrize("where", ["write_tensors", "read_tensors"])
def test_a_rank_that_dies_is_one_error_and_leaves_nothing(where: str, tmp_path: Path) -> None:
    for text in survivors(dies, 2, where, str(tmp_path)):
        assert text.startswith("CommError: ")
        assert "Restart the job from its last checkpoint" in text
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@each_rank(2, processes=True)
def test_whoever_is_stopped_between_the_parts_of_a_save_begins_again(tmp_path: Path) -> None:
    """One rank is stopped between the parts of a save, the other waits for it; both make the call again."""
    state, _ = start("zero3")
    texts = []

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    for where, rank in itertools.product(("plain_names", "Claim.drop", "Path"), (0, 1)):
        path = tmp_path / f"{where}{rank}"
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                patch.setattr(f"functional_fsdp._io.checkpoint.{where}", stop)
            texts.append(said(lambda: fsdp.save(state, path)).split(":")[0])  # noqa: B023
        if not path.exists():
            fsdp.save(state, path)
        dist.barrier()
        fsdp.load(path, like=state)
    assert texts[dist.get_rank()] == "KeyboardInterrupt"
    assert texts[1 - dist.get_rank()] == "RestartError"
    assert not list(tmp_path.glob("*.partial-*"))


# ---------------------------------------------------------------- several savers


@each_rank(4, processes=True)
def test_of_savers_of_one_name_exactly_one_wins(tmp_path: Path) -> None:
    """Two groups of two ranks, each with a mesh of its own, save under one name, again and again."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("who", "data"))
    value = float(mesh.get_local_rank("who") + 1)
    state = fsdp.shard({"w": torch.full((300,), value)}, fsdp.Spec(mesh["data"]), fsdp.adamw())
    every: list[Any] = [None] * 4
    for i in range(4):
        dist.barrier()
        text = said(lambda: fsdp.save(state, tmp_path / str(i))).split(":")[0]  # noqa: B023
        dist.all_gather_object(every, text)
        loaded = fsdp.full_params(fsdp.load(tmp_path / str(i), like=state))["w"]
        assert len(set(loaded.tolist())) == 1
        assert (loaded[0] == value) == (text == "nothing")
        assert every in ([*["nothing"] * 2, *["FileExistsError"] * 2], [*["FileExistsError"] * 2, *["nothing"] * 2])
    assert sorted(p.name for p in tmp_path.iterdir()) == [str(i) for i in range(4)]


# ---------------------------------------------------------------- steps under way on some ranks only


def stopped(state: fsdp.State, unit: str) -> None:
    """A rank begins a step alone, and is stopped while it waits for the others."""

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("functional_fsdp._runtime.lanes.HostLanes._finish", stop)
        assert said(lambda: fsdp.unshard(state, unit)) == "KeyboardInterrupt: "


@each_rank(2, processes=True)
def test_a_step_under_way_on_one_rank_only(tmp_path: Path) -> None:
    state, model = start("zero3")
    rank = dist.get_rank()
    straight = fsdp.full_params(train(copy.deepcopy(state), model, 0, 2))
    if rank == 1:
        stopped(state, state.units[0])
    path = fsdp.save(state, tmp_path / "a")
    if rank == 0:
        stopped(state, state.units[1])
    for fresh in (fsdp.load(path, like=state), fsdp.load(path, like=state), state):
        got = fsdp.full_params(train(fresh, model, 0, 2))
        assert all(torch.equal(got[key], straight[key]) for key in got)


@each_rank(2)
def test_under_inference_mode(tmp_path: Path) -> None:
    state, model = start("zero2")
    straight = fsdp.full_params(train(copy.deepcopy(state), model, 0, 2))
    with torch.inference_mode():
        fresh = fsdp.load(fsdp.save(state, tmp_path / "a"), like=state)
    assert not any(t.is_inference() for t in pytree.tree_leaves(fresh) if isinstance(t, torch.Tensor))
    assert all(torch.equal(got, straight[key]) for key, got in fsdp.full_params(train(fresh, model, 0, 2)).items())


# ---------------------------------------------------------------- optimizers


class Moments(NamedTuple):
    mean: Any
    square: Any


class Adam:
    """Optax-style. `lists`: moments are lists of plain tensors, as those of TorchOpt's ready-made optimizers."""

    def __init__(self, lists: bool) -> None:
        self.lists = lists

    def init(self, params: Any) -> Moments:
        def zeros() -> Any:
            new = pytree.tree_map(torch.zeros_like, params)
            return pytree.tree_leaves(new) if self.lists else new

        return Moments(zeros(), zeros())

    def update(self, grads: Any, opt: Moments, params: Any = None) -> tuple[Any, Moments]:
        treedef = pytree.tree_structure(params)
        g, m, v = (pytree.tree_leaves(tree) for tree in (grads, *opt))
        m = [0.9 * m + 0.1 * g for m, g in zip(m, g, strict=True)]
        v = [0.99 * v + 0.01 * g * g for v, g in zip(v, g, strict=True)]
        updates = [-0.01 * m / (v.sqrt() + 1e-8) for m, v in zip(m, v, strict=True)]
        new = Moments(m, v) if self.lists else Moments(treedef.unflatten(m), treedef.unflatten(v))
        return treedef.unflatten(updates), new


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=1e-2), "trees": lambda: fsdp.from_updates(Adam(False)),
    "lists": lambda: fsdp.from_updates(Adam(True)),
}  # fmt: skip
ROWS = [*itertools.product(["adamw"], [1, 4], PRESETS), *itertools.product(["trees", "lists"], [2], ["ddp", "zero3"])]
QUICK = [("adamw", 1, "zero3"), ("adamw", 4, "hfsdp"), ("trees", 2, "ddp")]  # `test_from_updates` has lists


@pytest.mark.parametrize(("optimizer", "ranks", "preset"), marked(ROWS, QUICK))
@each_rank("ranks")
def test_training_goes_on_to_the_same_bits(optimizer: str, ranks: int, preset: str, tmp_path: Path) -> None:
    """From a checkpoint, a copy and a pickle. To save does not consume the state."""
    one = Scenario(
        model=lambda: net(torch.float32), preset=preset, loop="whole", steps=4, optimizer=(OPTIMIZERS[optimizer], None)
    )

    def loaded(state: fsdp.State) -> fsdp.State:
        path = fsdp.save(state, tmp_path / "step_2")
        assert fsdp.latest_checkpoint(tmp_path) == path
        assert [p.name for p in tmp_path.iterdir()] == ["step_2"]
        found = fsdp.load(path, like=begun(one)[0])
        assert int(found.count) == state.steps == 2
        return found

    def saved(state: fsdp.State) -> fsdp.State:
        fsdp.save(state, tmp_path / "step_3")
        return state

    straight = run(one)
    for again in (loaded, saved, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))):
        before = lambda state, step: again(state) if step == 2 else state  # noqa: B023, E731
        alike(run(replace(one, before=before)), straight, 0)


class Odd(Adam):
    """Keeps a tensor for each bucket, of its shape, and one more in the same list."""

    def init(self, params: Any) -> Moments:
        mean, square = super().init(params)
        return Moments([*mean, torch.zeros(3)], square)

    def update(self, grads: Any, opt: Moments, params: Any = None) -> tuple[Any, Moments]:
        updates, new = super().update(grads, Moments(opt.mean[:-1], opt.square), params)
        return updates, Moments([*new.mean, opt.mean[-1]], new.square)


@each_rank(2)
def test_plain_tensors_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    mesh, placement = mesh_and_placement("zero3")
    params, model = fsdp.functionalize(net(torch.float32))
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.from_updates(Odd(True)))
    text = "TreeError: save: State.opt holds a plain tensor at 'mean.0' that differs between ranks: rank 0 has "
    others = "rank 1 has float32 [", "it would be written once and given to all ranks"
    refused((lambda: fsdp.save(train(state, model, 0, 2), tmp_path / "a"), text, *others))
    assert not [*tmp_path.iterdir()]


@each_rank(4)
def test_plain_tensors_beside_experts(tmp_path: Path) -> None:
    mesh = fsdp.local_mesh(expert=2, data=2)
    at, rank = mesh.get_local_rank("expert"), dist.get_rank()
    rules = {"experts": fsdp.zero3("data"), "*": fsdp.zero3("expert", "data")}
    params = {"experts": torch.full((4,), float(at)), "rest": torch.ones(4)}
    state = fsdp.shard(params, fsdp.Spec(mesh, rules), fsdp.adamw())
    mine = {"routed": torch.tensor([10 + at]), "all": torch.tensor(7)}
    empty = state._evolve(extras={key: torch.zeros_like(value) for key, value in mine.items()})
    loaded = fsdp.load(fsdp.save(state._evolve(extras=mine), tmp_path / "a"), like=empty)
    assert {key: int(value) for key, value in loaded.extras.items()} == {"routed": 10 + rank // 2, "all": 7}
    assert torch.equal(fsdp.full_params(loaded)["experts"], params["experts"])
    routed, only = {"routed": torch.tensor([rank])}, {"x": torch.ones(1)} if rank != 2 else {}
    differs = "State.extras holds a plain tensor at '{}' that differs between ranks: {}"
    refused(
        (lambda: fsdp.save(state._evolve(extras=routed), tmp_path / "b"), "rank 1 has int64 [1] ",
         differs.format("routed", "rank 0 has int64 [1] ")),
        (lambda: fsdp.save(state._evolve(extras=only), tmp_path / "b"),
         differs.format("x", "rank 2 has none, rank 3 has float32 [1]")),
    )  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def one(optimizer: Any, **spec: Any) -> fsdp.State:
    return fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh(), **spec), optimizer)


def test_numbers_of_the_optimizer_may_change_its_kind_may_not(tmp_path: Path) -> None:
    path = fsdp.save(one(fsdp.adamw(lr=1.0)), tmp_path / "a")
    assert fsdp.load(path, like=one(fsdp.adamw(lr=0.5, betas=(0.8, 0.9)))).optimizer.lr == 0.5
    with pytest.raises(fsdp.SpecError, match=r"another optimizer: AdamW there, Sgd here; 'opt.mean.w' is there only"):
        fsdp.load(path, like=one(fsdp.sgd()))
    with pytest.raises(fsdp.SpecError, match=r"AdamW there, Updates\(Adam\) here; .*its numbers may be others"):
        fsdp.load(path, like=one(fsdp.from_updates(Adam(True))))
    other = fsdp.from_torch(torch.optim.Adam, amsgrad=True)
    kept = fsdp.save(one(other), tmp_path / "kept")
    with pytest.raises(
        fsdp.SpecError, match=r"with a from_torch\(Adam\) that keeps .*; 'opt.max_.*.w' is there only. Give"
    ):
        fsdp.load(kept, like=one(fsdp.from_torch(torch.optim.Adam)))
    frozen = fsdp.save(one(None, trainable={"w": False}), tmp_path / "frozen")
    with pytest.raises(
        fsdp.SpecError, match=r"If it is what trains that differs, load it with its own Spec\(trainable="
    ):
        fsdp.load(frozen, like=one(fsdp.adamw()))
    anew = fsdp.load(path, like=one(fsdp.sgd(momentum=0.5)), allow=["optimizer"])
    assert anew.opt["w"].local[:5].tolist() == [0] * 5
    assert anew.main["w"].local[:5].tolist() == [1] * 5
    assert fsdp.load(path, anew.spec, allow=["optimizer"]).opt == {}
    path = fsdp.save(one(fsdp.sgd(momentum=0.9)), tmp_path / "b")
    alike = fsdp.Optimizer(lambda main: dict(main), lambda grads, opt, main, count: (main, opt))
    with pytest.warns(UserWarning, match="written with the optimizer Sgd, and this state has .*lambda.* same names"):
        fsdp.load(path, like=one(alike))


def test_another_average_is_refused_another_schedule_is_not(tmp_path: Path) -> None:
    path = fsdp.save(one(fsdp.adamw()), tmp_path / "a")
    with pytest.raises(fsdp.SpecError, match="with average='mean', and this state has average='sum'"):
        fsdp.load(path, like=one(fsdp.adamw(), average="sum"))
    assert fsdp.load(path, like=one(fsdp.adamw(), schedule=fsdp.Schedule(prefetch=2))).steps == 0
    assert fsdp.load(path, like=one(fsdp.adamw(), average="sum"), allow=["average"]).spec.average == "sum"


def test_extras_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """An average, a count and a tree, into a state that has none of them, and the other way round."""
    state = one(fsdp.adamw())
    average = {name: buffer.but(buffer.local * 3) for name, buffer in state.main.items()}
    mine = {"average": average, "seen": torch.tensor(7), "tree": {"a": torch.ones(2), "b": torch.tensor(2.0)}}
    full = fsdp.save(fsdp.replace_extras(state, **mine), tmp_path / "full")
    for like in (state, fsdp.replace_extras(state, seen=torch.tensor(0))):
        loaded = fsdp.load(full, like=like)
        assert loaded.extras.keys() == mine.keys()
        assert int(loaded.extras["seen"]) == 7
        assert loaded.extras["tree"]["a"].tolist() == [1, 1]
        assert float(loaded.extras["tree"]["b"]) == 2
        assert torch.equal(loaded.extras["average"]["w"].local, average["w"].local)
    empty = fsdp.save(state, tmp_path / "empty")
    with pytest.warns(UserWarning, match=r"has no extras\['average'\], extras\['seen'\], extras\['tree'\], which the"):
        assert fsdp.load(empty, like=fsdp.replace_extras(state, **mine)).extras == {}
    apart = fsdp.replace_extras(state, tree={"a": torch.ones(2)})
    with pytest.raises(fsdp.TreeError, match=r"'extras\.tree\.b' is there only\. Give the state"):
        fsdp.load(full, like=apart)


@pytest.mark.parametrize("tree", [{"": 1.0}, {"a.b": 1.0, "a": {"b": 2.0}}], ids=["no text", "alike"])
def test_extras_and_buffers_by_keys_that_read_alike_or_like_nothing(tree: dict[str, Any], tmp_path: Path) -> None:
    """With a spec, and into a state that has some of them."""
    held = pytree.tree_map(torch.tensor, tree)
    spec = fsdp.Spec(fsdp.local_mesh())
    state = fsdp.replace_extras(fsdp.shard({"w": torch.ones(5)}, spec, fsdp.sgd(), buffers=held), **held)
    path = fsdp.save(state, tmp_path / "there")
    some = fsdp.shard({"w": torch.ones(5)}, spec, fsdp.sgd(), buffers=held)
    some = fsdp.replace_extras(some, **dict([*held.items()][1:]))
    for loaded in (fsdp.load(path, spec, fsdp.sgd()), fsdp.load(path, like=some)):
        assert pytree.tree_map(float, dict(loaded.extras)) == tree
        assert pytree.tree_map(float, dict(loaded.buffers)) == tree


def test_leaves_that_cannot_be_written(tmp_path: Path) -> None:
    for extra, kind in ((torch.ones(2).to_sparse(), "layout torch.sparse_coo"), ("text", "holds a str")):
        with pytest.raises(fsdp.TreeError, match=f"State.extras holds a .*{kind.split()[-1]}.* at 'x'"):
            fsdp.save(one(None)._evolve(extras={"x": extra}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the newest


def test_damaged_siblings_are_left_out_by_name(tmp_path: Path) -> None:
    state, good = one(fsdp.adamw()), []
    for i in range(1, 6):
        state = fsdp.step(fsdp.reduce(*fsdp.unshard(state)))
        good.append(fsdp.save(state, tmp_path / f"step_{i}"))
    under_way = shutil.copytree(good[4], tmp_path / "step_6.partial-0123456789ab")
    (tmp_path / "logs").mkdir()
    (tmp_path / "file").touch()
    assert fsdp.latest_checkpoint(tmp_path) == good[4]
    (good[4] / "layout.json").write_text("{")
    os.truncate(good[3] / "__0_0.distcp", 5)
    note = json.loads((good[2] / "layout.json").read_text())
    (good[2] / "layout.json").write_text(json.dumps({**note, "step": 9}))
    (good[0] / "layout.json").unlink()
    with pytest.warns(UserWarning, match="is left out") as seen:
        assert fsdp.latest_checkpoint(tmp_path) == good[1]
    texts = [str(warning.message) for warning in seen]
    assert len(texts) == 4
    for path, why in ((good[4], "no JSON"), (good[3], "has 5 bytes"), (good[2], "digest"), (good[0], "no layout.json")):
        assert any(f"latest_checkpoint: {path} is left out" in text and why in text for text in texts)
    assert under_way.exists()
    assert fsdp.latest_checkpoint(tmp_path / "nowhere") is None
    assert fsdp.latest_checkpoint(tmp_path / "logs") is None


@each_rank(2)
def test_summands_of_ranks_are_no_replicas(tmp_path: Path) -> None:
    mesh = fsdp.local_mesh()
    state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(mesh, fsdp.zero1("data")), fsdp.adamw())
    partial = fsdp.reduce(state, {"w": torch.full((4,), 1.0 + mesh.get_rank())}, last_microbatch=False).grads
    kept = {name: buffer.but(buffer.local.clone()) for name, buffer in partial.items()}
    with pytest.raises(fsdp.TreeError, match=r"State\.extras\.kept is not added up over 'data' yet"):
        fsdp.save(fsdp.replace_extras(state, kept=kept), tmp_path / "there")


@pytest.mark.parametrize("kind", ["adamw", "from_torch"])
@each_rank(2)
def test_replicas_bring_their_numbers_by_leaf(kind: str, tmp_path: Path) -> None:
    mesh = fsdp.local_mesh(replica=2, shard=1)
    optimizer: Any = fsdp.adamw(lr=0.1) if kind == "adamw" else fsdp.from_torch(torch.optim.AdamW, lr=0.1)
    specs = {"apart": fsdp.Spec(mesh, fsdp.zero3("shard")), "together": fsdp.Spec(mesh, fsdp.hsdp("replica", "shard"))}

    def stepped(state: fsdp.State, grads: dict[str, float | None]) -> fsdp.State:
        some = {path: None if g is None else torch.full((4,), g) for path, g in grads.items()}
        return fsdp.step(fsdp.reduce(state, some))

    for name, other in (("apart", "together"), ("together", "apart")):
        state = fsdp.shard({"u": torch.ones(4), "v": torch.ones(4)}, specs[name], optimizer)
        state = stepped(stepped(state, {"u": 1.0, "v": None}), {"u": 1.0, "v": 2.0})
        loaded = fsdp.load(fsdp.save(state, tmp_path / name), specs[other], optimizer, allow=["replicas"])
        state, loaded = (stepped(one, {"u": 2.0, "v": 1.0}) for one in (state, loaded))
        assert all(torch.equal(w, fsdp.full_params(loaded)[path]) for path, w in fsdp.full_params(state).items())
