"""How a checkpoint's folder appears whole, who is writing it, and what dead writers leave."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp._io import background
from functional_fsdp._io.folder import (
    LOCK,
    Claim,
    create,
    inside,
    is_free,
    let_go,
    partial,
    unfinished,
    write_at,
    write_file,
)

ONE, TWO = "0123456789ab", "ba9876543210"


def state_of() -> fsdp.State:
    return fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw())


def made(final: Path, token: str) -> Claim:
    claim = Claim(final, token)
    claim.make()
    return claim


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_exactly_one_of_two_claims_appears(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a", ONE), made(tmp_path / "a", TWO)
    assert names(tmp_path) == [f"a.partial-{ONE}", f"a.partial-{TWO}"]
    (second.path / "x").write_text("two")
    (first.path / "x").write_text("one")
    second.appear()
    with pytest.raises(FileExistsError, match="a exists"):
        first.appear()
    first.drop()
    second.drop()
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["x"]
    assert (tmp_path / "a" / "x").read_text() == "two"


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_a_name_that_is_taken(there: str, tmp_path: Path) -> None:
    claim = made(tmp_path / "a", ONE)
    (claim.path / "x").touch()
    if there == "folder":
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "mine").touch()
    elif there == "file":
        (tmp_path / "a").touch()
    else:
        (tmp_path / "a").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="a exists"):
        claim.appear()
    claim.drop()
    with pytest.raises(FileExistsError, match="a exists"):
        made(tmp_path / "a", TWO)
    assert names(tmp_path) == ["a"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    live = made(tmp_path / "a", ONE)
    dead = partial(tmp_path / "a", TWO)
    others = [tmp_path / "b.partial-0123456789ab", tmp_path / "a.partial-mine", tmp_path / "a.partial"]
    for path in (dead, *others):
        path.mkdir()
        (path / LOCK).touch()
    made(tmp_path / "a", "c" * 12).drop()
    assert not dead.exists()
    assert live.path.exists()
    assert all(path.exists() for path in others)
    live.drop()


def test_without_a_lock_age_tells(tmp_path: Path) -> None:
    """It may be about to be locked, or renamed."""
    young, old = partial(tmp_path / "a", ONE), partial(tmp_path / "a", TWO)
    for path in (young, old):
        path.mkdir()
        (path / "x").touch()
    for path in (old / "x", old):
        os.utime(path, (time.time() - 100,) * 2)
    made(tmp_path / "a", "c" * 12).drop()
    assert names(tmp_path) == [young.name]


def test_where_locks_do_not_work_age_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = made(tmp_path / "a", ONE)
    second = made(tmp_path / "a", TWO)
    assert first.path.exists()
    for path in (first.path / LOCK, first.path):
        os.utime(path, (time.time() - 100_000,) * 2)
    made(tmp_path / "a", "c" * 12).drop()
    assert not first.path.exists()
    second.drop()
    first.drop()


def test_everything_is_on_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def renamed(old: Any, new: Any) -> None:
        events.append(f"{Path(old).name} becomes {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    fsdp.save(state_of(), tmp_path / "new" / "a")
    folder = events[-2].split()[0]
    assert unfinished(Path(folder))
    assert events == [
        tmp_path.name, "lock.new becomes lock", "__0_0.distcp", ".metadata", "layout.json", folder,
        f"{folder} becomes a", "new",
    ]  # fmt: skip
    assert names(tmp_path / "new" / "a") == [".metadata", "__0_0.distcp", "layout.json"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            fsdp.save(state_of(), tmp_path / "a")
    assert names(tmp_path) == []
    fsdp.save(state_of(), tmp_path / "a")


@pytest.mark.parametrize("verb", ["save", "save_safetensors", "save_dcp"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSYS])
def test_what_is_whole_is_not_called_lost_where_the_folder_above_cannot_be_synced(
    verb: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def synced(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    state = state_of()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        getattr(fsdp, verb)(state, tmp_path / "a")
    said = [str(one.message) for one in told if "is written and complete" in str(one.message)]
    assert len(said) == (number == errno.EIO)
    assert all(str(tmp_path / "a") in one and os.strerror(number) in one for one in said)
    found = fsdp.full_params(fsdp.load_weights(state_of(), tmp_path / "a"))
    assert all(torch.equal(one, found[path]) for path, one in fsdp.full_params(state).items())


def test_an_empty_folder_is_in_the_way_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileExistsError, match="Choose another folder, or remove it first"):
        fsdp.save(state_of(), tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    fsdp.load(fsdp.save(state_of(), tmp_path / "a"), like=state_of())
    with pytest.raises(FileExistsError):
        made(tmp_path / "a", ONE)
    (tmp_path / "a" / "pipe").symlink_to("x")
    for name in ("pipe", "nothing", "../a"):
        with pytest.raises(fsdp.CheckpointError), inside(tmp_path / "a", name):
            pass
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("completes", [True, False])
def test_a_folder_that_appears_while_its_lock_is_looked_at_has_no_dead_writer(
    completes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has opened the lock; then the first one's writer is done, and lets it go."""
    claim, final = made(tmp_path / "a", ONE), tmp_path / "a"

    def slowly(path: Path) -> bool:
        with path.open("r+b") as lock:
            if completes:
                claim.appear()
                claim.drop()
            else:  # it dies
                let_go(claim.lock)  # type: ignore[arg-type]
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    assert not is_free(claim.path / LOCK)
    monkeypatch.setattr(background, "is_free", slowly)
    monkeypatch.setattr(background, "read_note", lambda folder: {"save": ONE})
    job = background.SaveJob(final, ONE, 1, [0, 1], "", 0, [], ["", ""], {}, 5.0, None)
    if completes:
        background._appeared(job, claim.path)
        assert names(tmp_path) == ["a"]
    else:
        with pytest.raises(fsdp.CheckpointError, match="the process that writes for rank 0 has ended"):
            background._appeared(job, claim.path)


def test_what_a_later_rank_met_is_told_before_the_first_rank_s(tmp_path: Path) -> None:
    job = background.SaveJob(tmp_path / "a", ONE, 1, [0, 4, 8], "", 0, [], [""] * 3, {}, 5.0, None)
    background._failed(job, tmp_path)  # nobody
    for rank, text in ((0, "rank 8 met it"), (2, "gone")):
        told = [["FileNotFoundError", "OSError"], False, "FileNotFoundError", text, 2]
        (tmp_path / f"__{rank}.failed").write_text(json.dumps(told))
    with pytest.raises(FileNotFoundError, match=r"^async_save: rank 8 met FileNotFoundError: gone$"):
        background._failed(job, tmp_path)


def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    entry = create(tmp_path / "room", {"w": (torch.float32, (9000,))})["w"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(entry.path, "r+b") as file:
        for name, write in {
            "room": lambda: write_at(file.fileno(), entry, 5000, torch.ones(4000)),
            "new": lambda: create(tmp_path / "new", {"w": (torch.float32, (9000,))}),
            "plain": lambda: write_file(tmp_path / "plain", bytes(9000)),
            "told": lambda: background._tell(tmp_path / "told", "x" * 9000),
        }.items():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))  # as a full disk
            try:
                with pytest.raises(OSError, match="File too large") as met:
                    write()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert met.value.filename == str(tmp_path / name)
