"""Checkpoints: each rank's shards in the files of torch.distributed.checkpoint, written whole or not at all.

    folder/            appears by one rename, when everything is on disk (see `_folder`)
      layout.json      what wrote it: layout hash, spec, world, step, files (see `_note`)
      .metadata        where each tensor lies
      *.distcp         tensors, one file for each rank that writes any (see `_writer`, `_reader`)

Only the same layout (placement, world size, units, dtypes) is read back for now; another is refused before anything is
read. Whatever goes wrong on one rank is an error on every rank.
"""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch

from ._about import about_of, same_layout
from ._entry import alone
from ._errors import CheckpointError, RestartError
from ._folder import LOCK, Claim, partial, unfinished
from ._joint import Joint
from ._note import METADATA, NOTE, read_note, sizes, write_note
from ._parts import SAVED, content, named, own_place, parts_of, plain_names, shard_name
from ._reader import check, read_metadata, read_tensors
from ._runtime import runtime_of
from ._state import Ledger, State, Token
from ._torch import pytree
from ._update import counted, with_counts
from ._weights import refresh
from ._writer import Entry, write_metadata, write_tensors

__all__ = ["latest", "load", "save"]


@alone
def save(state: State, folder: str | os.PathLike[str]) -> Path:
    """Write a state between steps to `folder`. Never consumes it. Collective: every rank of the mesh calls it.

    The folder appears only when it is complete and on disk; an interrupted save leaves a folder `NAME.partial-...`,
    which the next save of that name removes. Main weights, optimizer state, buffers, count, rng and extras are written,
    each shard once; compute copies are not.

    What is sharded is kept in FlatBuffers. A plain tensor in the optimizer state or the extras is written once and
    given to all ranks, so all ranks must hold the same (where each rank has experts of its own: all ranks with the
    same experts).

    Raises:
        StaleStateError: a state in the middle of a step. FileExistsError: the folder exists, or another save has taken
            the name meanwhile. TreeError: an optimizer state or extra that is no tensor, or a plain tensor that differs
            between ranks. CheckpointError: ranks name different folders, or do not see the same. OSError: what a rank
            met, as a full disk. If one rank raises, all do.

    Example: `fsdp.save(state, f"checkpoints/step_{n}")`.
    """
    run = runtime_of(state.spec.mesh)
    with Joint(run, "save") as joint:
        state.token.ledger.look(state.token.serial)
        _write(joint, state, folder)
    return Path(folder)


def _write(joint: Joint, state: State, folder: str | os.PathLike[str]) -> None:
    run = joint.run
    final, token = _same_folder(joint, folder)
    path, file = partial(final, token), f"__{run.rank}_0.distcp"
    chosen: dict[str, torch.Tensor] = {}
    about: dict[str, Any] = {}
    claim = Claim(final, token) if run.rank == 0 else None

    def prepare() -> tuple[str, dict[str, str]]:
        state.resting("save")
        about.update(about_of(state), step=state.steps, save=token, counted=list(counted(state)))
        return own_place(state), {p.name: content(p) for p in parts_of(state) if p.buffer is None}

    def begin() -> None:
        if claim is not None:
            claim.make()

    def write() -> Any:
        if not (path / LOCK).is_file():
            raise CheckpointError(
                f"save: rank {run.ranks[run.rank]} does not see {path}, which rank {run.ranks[0]} made. Save to a "
                "folder that all ranks share."
            )
        return write_tensors(path, file, token, chosen) if chosen else ([], 0)

    def complete() -> None:
        if claim is not None:
            entries = [entry for some, _ in written for entry in some]
            files = {f"__{rank}_0.distcp": nbytes for rank, (_, nbytes) in enumerate(written) if nbytes}
            nbytes, digest = write_metadata(path, entries)
            write_note(path, {**about, "files": {**files, METADATA: nbytes}, "metadata": digest})
            claim.appear()

    try:
        plain = plain_names(run, joint(prepare, "contents"))
        for part in parts_of(state):
            name, writes = shard_name(state, part) if part.buffer else plain[part.name]
            if writes:
                chosen[name] = part.tensor
        joint(begin, "claim")
        written = joint(write, "tensors")
        joint(complete, "end")
    finally:
        if claim is not None:
            claim.drop()


@alone
def load(state: State, folder: str | os.PathLike[str]) -> State:
    """Read what `save` wrote, into a new state of the same spec. `state` is the template; it is not changed.

    Files are not trusted: nothing in them is run, and damage is found before or while they are read.

    Args:
        state: a state of the same placement, world size and units, as `init` or `shard` gives; also one that `step`
            consumed, or that an error left half updated. Numbers of its optimizer (lr, betas) may be others.
        folder: what was given to `save`.

    Returns:
        a new State (of its own lineage) with the same bits as the one that was saved.

    Raises:
        FileNotFoundError: no complete checkpoint there.
        SpecError: it was written with another layout (placement, world size, units, dtypes), `average`, or kind of
            optimizer: both are named.
        CheckpointError: it is damaged (the file is named), or ranks name or see different checkpoints.
        If one rank raises, all do.

    Collective: every rank calls it.
    """
    run = runtime_of(state.spec.mesh)
    with Joint(run, "load") as joint, torch.no_grad():
        fresh, steps = _read(joint, state, folder)
        weights: Any = ()
        if state.weights:
            weights = pytree.tree_map(torch.empty_like, state.weights)
            for name, copy in weights.items():
                refresh(fresh.main[name], copy)
        ledger = Ledger(run, state.layout, state.spec, steps, fresh.count)
        ledger.enroll()
        return fresh._evolve(weights=weights, grads=(), token=Token(ledger, 0)).prepared()


def _read(joint: Joint, state: State, folder: str | os.PathLike[str]) -> tuple[State, int]:
    """The state, but for what follows from it, and its steps."""
    run = joint.run
    path, _ = _same_folder(joint, folder)
    note: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    made: list[State] = []

    def look() -> str:
        nonlocal state
        note.update(read_note(path))
        same_layout(path, note, about_of(state))
        state = with_counts(state, note["counted"])  # as there, whatever this one missed
        sizes(path, note)
        entries.update(read_metadata(path, note))
        check(path, entries, named(state, entries))
        return str(note["digest"])

    def read() -> None:
        trees = {name: pytree.tree_map_only(torch.Tensor, torch.empty_like, getattr(state, name)) for name in SAVED}
        made.append(state._evolve(**trees))
        read_tensors(path, note, entries, named(made[0], entries))

    seen = joint(look, "notes")
    other = next((rank for rank, digest in enumerate(seen) if digest != seen[0]), None)
    if other is not None:
        raise CheckpointError(
            f"load: {path} is not the same for all ranks: {NOTE} of rank {run.ranks[0]} has the digest "
            f"{seen[0][:16]}, that of rank {run.ranks[other]} {seen[other][:16]}. Load from a folder that all ranks "
            "share, while nobody replaces it."
        )
    joint(read, "tensors")
    return made[0], int(note["step"])


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint (by its step) among the subfolders of `folder`, or None.

    A damaged one, as far as its `layout.json` and the sizes of its files show, is left out with a warning that names
    it; one that is under way, without.
    """
    found: list[tuple[int, str, dict[str, Any]]] = []
    there = sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []
    for path in there:
        if unfinished(path) or not any(os.path.lexists(path / name) for name in (NOTE, METADATA)):
            continue
        try:
            note = read_note(path)
            found.append((note["step"], path.name, note))
        except (CheckpointError, OSError) as error:
            _left_out(path, error)
    for _, name, note in sorted(found, key=lambda item: item[:2], reverse=True):
        try:
            sizes(Path(folder, name), note)
            return Path(folder, name)
        except (CheckpointError, OSError) as error:
            _left_out(Path(folder, name), error)
    return None


def _left_out(path: Path, error: Exception) -> None:
    warnings.warn(f"latest: {path} is left out: {error}", stacklevel=3)


def _same_folder(joint: Joint, folder: str | os.PathLike[str]) -> tuple[Path, str]:
    """The folder that all ranks name, and the first one's token. Lanes on which ranks stopped apart are drained."""
    run = joint.run
    while True:
        counts = {name: log.count for name, log in run.issued.items() if name != "control"}
        token = uuid.uuid4().hex[:12]
        try:
            told = joint(lambda: (os.path.abspath(os.fsdecode(folder)), token, counts), "folder")  # noqa: B023
            break
        except RestartError:  # a peer began anew; nothing of this call has happened
            if joint.known:
                raise
    for rank, (name, _, _) in enumerate(told):
        if name != told[0][0]:
            raise CheckpointError(
                f"{joint.what}: rank {run.ranks[0]} names the folder {told[0][0]}, rank {run.ranks[rank]} names "
                f"{name}. Give every rank the same."
            )
    if any(theirs != told[0][2] for _, _, theirs in told):
        run.restart()
    return Path(told[0][0]), told[0][1]
