"""Background: saves beside the training.

    the call       ranks agree on the folder (host); what is saved is copied into the pool, on the current stream, so
                   that the next step comes after that
    from then on   this rank's scribe writes what lies in the pool (see `scribe`); the ranks go on training

The pool is memory that a rank shares with its scribe, of the size of what it saves, pinned where there is CUDA. It and
the scribe are made at the first save and stay.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .._common.calls import alone, uninterruptible
from .._common.device import arrival, pin, unpin
from .._common.errors import CheckpointError
from .._plan.layout import aligned
from .._runtime.agreement import Joint
from .._runtime.runtime import Runtime, runtime_of
from .._state.state import State
from . import writer_process as scribe
from .checkpoint import same_folder, told_of
from .folder import partial
from .parts import SavedTensor, own_place, parts_of
from .pending import Saving, pending
from .writer_process import PoolTensor, SaveJob, started

__all__ = ["async_save"]

ALIGN = 64  # bytes: where a tensor begins in the pool


@alone
@torch.no_grad()
def async_save(state: State, folder: str | os.PathLike[str], *, max_to_keep: int | None = None) -> Future[Path]:
    """As `save`, but the files are written while the training goes on. Never consumes the state.

    When it returns, all that is saved lies in host memory, or will before the next step on this stream changes it: the
    state may be given to `step`, compiled steps and graphs at once. A process of this rank's own then writes it.

    One save of a mesh is written at a time: the next one waits for it. At the end of the program Python waits for it.

    Args:
        folder, max_to_keep: as for `save`.

    Returns:
        a Future of the folder: `result()` waits until the checkpoint is there, or raises what this rank met, or one of
        the kind that another met; `done()` only looks. What nobody asked for is raised by the next save.

    Memory: on the host as much as this rank saves, kept for the next save (pinned where there is CUDA).

    Raises:
        as `save`, in the call what shows before anything is written; and CheckpointError: the save before has failed.

    Collective: every rank of the mesh calls it. Three exchanges on the host in the call; none after it, so ranks may
    communicate as they like.

    Example:
        >>> done = fsdp.async_save(state, f"checkpoints/step_{n}", max_to_keep=3)  # doctest: +SKIP
    """
    run = runtime_of(state.spec.mesh)
    background = background_of(run)
    with Joint(run, "async_save") as joint:
        final, token = same_folder(joint, folder, state)
        parts: list[SavedTensor] = []
        about: dict[str, Any] = {}

        def prepare() -> str:
            about.update(told_of(joint, state, final, token, max_to_keep))
            parts.extend(parts_of(state))
            return own_place(state)

        def begin() -> None:
            background.begin(final, token if run.rank == 0 else "")

        def copy() -> None:
            background.join(final, token, run)
            # of plain tensors every rank says what it holds; the first one with the same experts writes them
            copied.append(background.copy([part for part in parts if part.plain or part.writes]))

        copied: list[tuple[list[PoolTensor], Callable[[], None]]] = []
        try:
            places = joint(prepare, "contents")
            joint(begin, "claim")
            joint(copy, "copy")
            pool, nbytes = background.pool.place
            tensors, arrived = copied[0]
            job = SaveJob(
                final, token, run.rank, run.ranks, pool, nbytes, tensors, places, about if run.rank == 0 else {},
                run.timeout.total_seconds() if run.size > 1 else 0.0, max_to_keep,
            )  # fmt: skip
            return background.write(job, arrived, run)
        except BaseException:
            background.give_up()
            raise


class SavePool:
    """Memory that a rank shares with its scribe."""

    def __init__(self) -> None:
        self.place = ("", 0)  # its path, and bytes
        self.bytes: torch.Tensor | None = None
        self.file: Any = None
        self.pinned = False

    def room(self, at: int, like: torch.Tensor) -> torch.Tensor:
        """Where a tensor lies whose bytes begin there."""
        assert self.bytes is not None
        return self.bytes[at : at + like.nbytes].view(like.dtype).view(like.shape)

    def hold(self, nbytes: int) -> None:
        """Have room for so many bytes. What it held is gone if it had not.

        Raises:
            OSError: the host has no room for them.
        """
        if nbytes <= self.place[1]:
            return
        self.close()
        if hasattr(os, "memfd_create"):
            self.file = open(os.memfd_create("functional_fsdp_save"), "r+b")  # noqa: SIM115 # until `close`
            path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        else:
            self.file = tempfile.NamedTemporaryFile()  # noqa: SIM115
            path = self.file.name
        os.ftruncate(self.file.fileno(), nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self.file.fileno(), nbytes), dtype=torch.uint8)
        self.place = (path, nbytes)
        self.pinned = pin(self.bytes)  # else copies wait, and are as right

    def close(self) -> None:
        if self.bytes is not None and self.pinned:
            unpin(self.bytes)
        if self.file is not None:
            self.file.close()
        self.place, self.bytes, self.file, self.pinned = ("", 0), None, None, False


class Background:
    """A rank's scribe, and the memory that it shares with it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.pool = SavePool()
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None
        self.thread = ThreadPoolExecutor(1, "async_save")  # Python waits for it before it ends
        self.lock = threading.RLock()  # held from a request to its answer
        self.begun = False  # whether the scribe takes part in a save that nobody writes yet

    def begin(self, final: Path, token: str) -> None:
        """Have the scribe, and with a token have it make the folder."""
        self._start()
        if token:
            self.begun = True
            self._ask("begin", final, token)

    def join(self, final: Path, token: str, run: Runtime) -> None:
        """Have the scribe take part in a save. CheckpointError: it does not see the folder."""
        self.begun = True
        self._ask("join", partial(final, token), run.ranks, run.rank)

    def copy(self, parts: list[SavedTensor]) -> tuple[list[PoolTensor], Callable[[], None]]:
        """Copy tensors into the pool. Returns where, and a function that waits until they are there."""
        places = [*itertools.accumulate((aligned(part.tensor.nbytes, ALIGN) for part in parts), initial=0)]
        self.pool.hold(places[-1])
        tensors = []
        for part, at in zip(parts, places, strict=False):
            held = part.tensor
            if held.numel():
                self.pool.room(at, held).copy_(held, non_blocking=True)
            tensors.append(PoolTensor(part.name, held.dtype, part.shape, part.start, part.plain, at, tuple(held.shape)))
        return tensors, arrival(part.tensor for part in parts)

    @uninterruptible
    def write(self, job: SaveJob, arrived: Callable[[], None], run: Runtime) -> Saving:
        """Have the scribe write what was copied, once it is in the pool. An interrupt waits: else there would be a save
        that nobody writes."""
        saving = pending(run)

        def work(run: Runtime = run) -> None:  # which holds it, and so this, until it is done
            try:
                arrived()
                self._ask("write", job)
            except BaseException as error:
                saving.set_exception(error)
            else:
                saving.set_result(job.folder)

        self.begun = False
        self.thread.submit(work)
        return saving

    def give_up(self) -> None:
        """A call ends before anything is written."""
        begun, self.begun = self.begun, False
        if begun and self.pipe is not None:
            with contextlib.suppress(CheckpointError):
                self._ask("drop")

    def _start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self.end()
        self.process, ours = started(scribe.__name__)
        self.pipe = Connection(ours.detach())

    def _ask(self, *request: Any) -> None:
        """One request. Raises what the scribe met."""
        with self.lock:
            pipe, process = self.pipe, self.process
            assert pipe is not None
            assert process is not None
            try:
                pipe.send(request)
                error = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError) as lost:
                pipe.close()
                code = process.wait()
                raise CheckpointError(
                    f"async_save: the process that writes has ended, with exit code {code}."
                ) from lost
            except BaseException:  # an interrupt: its answer would be taken for that to the next request
                self.end()
                raise
        if error is not None:
            raise error

    def end(self) -> None:
        """End the scribe, and let go of the pool. A save that it was writing is not there."""
        self.pool.close()
        self.begun = False
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
        if self.process is not None and self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
            self.process = None


_made: weakref.WeakKeyDictionary[Runtime, Background] = weakref.WeakKeyDictionary()


def background_of(run: Runtime) -> Background:
    """What saves the states of a mesh; none has been, if this process was forked since."""
    found = _made.get(run)
    if found is None or found.owner != os.getpid():
        found = _made[run] = Background()
        weakref.finalize(run, found.end)
    return found
