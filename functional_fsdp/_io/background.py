"""Saves beside the training, by a process that writes.

    serve, started           the scribe: the process that writes for a rank, while the rank trains
    async_save, Background   the rank's part

The scribe:

      rank r                                      its scribe
        |---- "begin", folder, token ------------>|  of the first rank: makes the folder, and holds its lock
        |---- "join", folder, ranks, rank ------->|  holds a lock of its own there, so that others see it end
        |<--- None, or an error ------------------|  after each of these
        |---- "write", SaveJob ---------------------->|  what lies in the pool, to disk; then says so in the folder
        |<--- None, or an error ------------------|

Scribes of one save meet in its folder, so that none of them needs a process group:

    name.partial-3f9c0d12ab7e/
      __1.lock         held by rank 1's scribe
      __1_0.distcp     the runs of leaves of rank 1
      __1.done         which they are, in JSON: it is there once they are on disk
      __1.failed       what rank 1 met instead, in JSON: the others raise it, too, and then the folder goes
          │  the first rank's scribe has read all of these, writes `.metadata` and `layout.json`, and removes them
          ▼  one rename
    name/              so the others know that it is complete

A scribe computes nothing and holds nothing: what it writes lies in memory that it shares with its rank. It ends with
its rank.

Scribes are fresh processes, never forks of the caller's.

The rank's part:

    the call       ranks agree on the folder (host); what is saved is copied into the pool, on the current stream, so
                   that the next step comes after that
    from then on   this rank's scribe writes what lies in the pool (as above); the ranks go on training

The pool is memory that a rank shares with its scribe, of the size of what it saves, pinned where there is CUDA. It and
the scribe are made at the first save and stay.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import torch

from .._common import errors
from .._common.calls import alone, uninterruptible
from .._common.errors import CheckpointError
from .._plan.layout import aligned
from .._runtime.agreement import Joint, Met
from .._runtime.runtime import Runtime, runtime_of
from .._shared.device import arrival, pin, unpin
from .._state.state import State
from .checkpoint import Saving, pending, same_folder, told_of
from .folder import LOCK, Claim, check_shared, hold, is_free, let_go, partial, writing
from .manifest import Chunk, SavedTensor, content, file_of, own_place, parts_of, plain_names, read_note
from .pieces import Written, complete, write_tensors

TURN = 0.02  # seconds between two looks into the folder
HEARD = 10.0  # seconds without a change there after which nobody is expected to hear of an error any more


class PoolTensor(NamedTuple):
    """A run of a leaf, or a plain tensor, in the pool: see `parts.SavedTensor`.

    Attributes:
        at: where its bytes begin.
        held: the shape of what lies there.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    plain: bool
    at: int
    held: tuple[int, ...]


class SaveJob(NamedTuple):
    """What a rank has its scribe write.

    Attributes:
        folder, token: of the save.
        rank: among `ranks`, the global numbers of all that save.
        pool, nbytes: the memory in which `tensors` lie.
        places: every rank's place on axes of experts.
        about: of the first rank: what `layout.json` says of the state.
        limit: seconds that it waits for the other scribes.
        keep: how many checkpoints are kept; None: all.
    """

    folder: Path
    token: str
    rank: int
    ranks: list[int]
    pool: str
    nbytes: int
    tensors: list[PoolTensor]
    places: list[str]
    about: dict[str, Any]
    limit: float
    keep: int | None


def serve(fd: int) -> NoReturn:
    """The life of a scribe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for its rank, which decides what it means
    torch.set_num_threads(1)  # the others are the training's
    scribe, pipe = _Scribe(), Connection(fd)
    asked: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                asked.put(pipe.recv())
        os._exit(0)  # with its rank, whatever is under way: the next save of that name removes it

    threading.Thread(target=read, daemon=True).start()
    while True:
        error: Exception | None = None
        what, *given = asked.get()
        try:
            getattr(scribe, what)(*given)
        except Exception as met:
            error = met
        pipe.send_bytes(_pickled(error))


def _pickled(error: Exception | None) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(CheckpointError(f"{type(error).__name__}: {error}"))


class _Scribe:
    """Carries out what its rank asks for."""

    def __init__(self) -> None:
        self.claim: Claim | None = None
        self.lock: IO[bytes] | None = None
        self.memory: tuple[tuple[str, int], mmap.mmap] | None = None

    def begin(self, folder: Path, token: str) -> None:
        self.drop()
        self.claim = Claim(folder, token)
        try:
            self.claim.make()
        except BaseException:
            self.drop()
            raise

    def join(self, folder: Path, ranks: list[int], rank: int) -> None:
        """Say that this rank's scribe is there, in the folder that the first one's has made."""
        check_shared("async_save", folder, ranks, rank)
        self.lock = hold(folder / f"__{rank}.lock")

    def drop(self) -> None:
        """Whatever has not appeared is removed."""
        if self.lock is not None:
            let_go(self.lock)
            self.lock = None
        if self.claim is not None:
            self.claim.drop()
            self.claim = None

    def write(self, job: SaveJob) -> None:
        folder = partial(job.folder, job.token)
        try:
            try:
                entries, told = self._write(job, folder)
                _tell(folder / f"__{job.rank}.done", json.dumps([entries, told]))
                if self.claim is not None:
                    _complete(job, folder, self.claim)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    (folder / file_of(job.rank)).unlink(missing_ok=True)  # a full disk has room again
                    met = Met.of(error)
                    _tell(folder / f"__{job.rank}.failed", json.dumps([[k.__name__ for k in met.kinds], *met[1:]]))
                    if self.claim is not None:
                        _heard(job, folder)
                raise
            if self.claim is None:
                _appeared(job, folder)
        finally:
            self.drop()

    def _write(self, job: SaveJob, folder: Path) -> tuple[Any, Any]:
        """Write the tensors. Returns where they lie and the file's bytes; the rank's place and plain ones' content."""
        pool = self._pool(job)
        parts = [(one, _part(one, pool)) for one in job.tensors]
        first = job.places.index(job.places[job.rank]) == job.rank  # of those that have the same experts
        chosen = [part for one, part in parts if first or not one.plain]
        written, nbytes = write_tensors(folder, file_of(job.rank), job.token, chosen) if chosen else ([], 0)
        held = {one.name: content(part) for one, part in parts if one.plain}
        entries = [[one.name, str(one.dtype).removeprefix("torch."), one.shape, one.chunk] for one in written]
        return [entries, nbytes], [job.places[job.rank], held]

    def _pool(self, job: SaveJob) -> memoryview:
        place = job.pool, job.nbytes  # a larger one may have the path of the one before
        if self.memory is None or self.memory[0] != place:
            with open(job.pool, "r+b") as file:
                self.memory = (place, mmap.mmap(file.fileno(), job.nbytes))
        return memoryview(self.memory[1])


def _part(one: PoolTensor, pool: memoryview) -> SavedTensor:
    numel = torch.Size(one.held).numel()
    empty = torch.empty(one.held, dtype=one.dtype, device="cpu")
    tensor = torch.frombuffer(pool, dtype=one.dtype, count=numel, offset=one.at).view(one.held) if numel else empty
    return SavedTensor(one.name, tensor, one.shape, one.start)


def _tell(path: Path, text: str) -> None:
    """A file that is there whole, or not."""
    early = path.with_name(f"{path.name}.new")
    with writing(path):
        early.write_text(text, encoding="utf-8")
    os.rename(early, path)


def _failed(job: SaveJob, folder: Path) -> None:
    """Raise what another rank met. The first one is looked at last: it may have met it at a later one."""
    for rank in reversed(range(len(job.ranks))):
        try:
            kinds, *met = json.loads((folder / f"__{rank}.failed").read_text("utf-8"))
        except FileNotFoundError:
            continue
        known = (getattr(builtins, kind, getattr(errors, kind, None)) for kind in kinds)
        raise Met(tuple(filter(None, known)), *met).again("async_save", job.ranks[rank])


def _heard(job: SaveJob, folder: Path) -> None:
    """The first rank's, after an error: wait until the others have seen it, as they end."""
    for moved in _looks(folder):
        others = [folder / f"__{rank}.lock" for rank in range(len(job.ranks)) if rank != job.rank]
        if all(map(is_free, others)) or time.monotonic() - moved > min(job.limit, HEARD):
            return


def _complete(job: SaveJob, folder: Path, claim: Claim) -> None:
    """The first rank's: once all have written, the folder appears."""
    found = [json.loads(text) for text in _all(job, folder)]
    told = [(place, held) for _, (place, held) in found]
    written = []
    for rank, ((entries, _), (_, held)) in enumerate(found):
        names = plain_names("async_save", job.ranks, rank, told)
        for name, dtype, shape, chunk in entries:
            name, writes = names[name] if name in held else (name, True)
            if writes:
                place = Chunk._make([*chunk[:-1], tuple(chunk[-1])])
                written.append(Written(name, getattr(torch, dtype), tuple(shape), place))
    complete(claim, job.about, written, [nbytes for (_, nbytes), _ in found], job.keep)


def _all(job: SaveJob, folder: Path) -> list[str]:
    """What every rank's scribe says, once all have written."""
    found: dict[int, str] = {}
    for moved in _looks(folder):
        _failed(job, folder)
        for rank in range(len(job.ranks)):
            failed = folder / f"__{rank}.failed"
            done = folder / f"__{rank}.done"
            if rank not in found and done.exists():
                found[rank] = done.read_text("utf-8")
            if rank not in found and is_free(folder / f"__{rank}.lock") and not (done.exists() or failed.exists()):
                raise CheckpointError(f"async_save: the process that writes for rank {job.ranks[rank]} has ended.")
        if len(found) == len(job.ranks):
            return [found[rank] for rank in range(len(job.ranks))]
        if time.monotonic() - moved > job.limit:
            late = [job.ranks[rank] for rank in range(len(job.ranks)) if rank not in found]
            raise CheckpointError(
                f"async_save: rank(s) {late} have written nothing to {folder} for {job.limit:.0f} s. They died, hang, "
                "or do not see it. Save to a folder that all ranks share."
            )
    raise AssertionError


def _appeared(job: SaveJob, folder: Path) -> None:
    """Another rank's: wait until the first one's scribe has given the folder its name."""
    for moved in _looks(folder):
        _failed(job, folder)
        if not folder.exists():
            break
        if is_free(folder / LOCK) and folder.exists():  # else it has appeared meanwhile, and was let go
            raise CheckpointError(f"async_save: the process that writes for rank {job.ranks[0]} has ended.")
        if time.monotonic() - moved > job.limit:
            raise CheckpointError(
                f"async_save: rank {job.ranks[0]}, which completes {job.folder}, did nothing for {job.limit:.0f} s."
            )
    with contextlib.suppress(OSError, CheckpointError):
        if read_note(job.folder)["save"] == job.token:
            return
    raise CheckpointError(
        f"async_save: rank {job.ranks[0]} has not completed {job.folder}, and says why. The checkpoint is not there."
    )


def _looks(folder: Path) -> Iterator[float]:
    """Look again and again: since when nothing has changed there."""
    seen, moved = None, time.monotonic()
    while True:
        try:
            now = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder))
        except OSError:
            now = []
        if now != seen:
            seen, moved = now, time.monotonic()
        yield moved
        time.sleep(TURN)


CODE = "import sys; sys.path[:] = {path!r}; import {modules}; from {module} import serve; serve({fd})"


def started(module: str, preload: Iterable[str] = ()) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that runs `serve(fd)` of a module, where fd is its end of a socket; and the caller's end.

    Args:
        preload: names of modules that it imports before it serves.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        given: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        flags = [flag for flag in given if not flag.startswith("-W")]
        code = CODE.format(path=sys.path, modules=", ".join([module, *preload]), module=module, fd=theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, *flags, "-W", "ignore", "-c", code],  # the caller has seen what importing warns of
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the caller only, who decides what it means
        )
    return process, ours


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
        self.process, ours = started(__name__)
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
