"""Files of a checkpoint: how a folder appears whole, and tensors by name in a file.

Folder: how a checkpoint appears whole, and who is writing it.

    name.partial-3f9c0d12ab7e/   one for each save, with a name of its own
      lock                       held open by the first rank while it lives
      __0_0.distcp, ...
        │  everything is on disk
        ▼  one rename, which an existing folder refuses
    name/

So two savers of one name never mix, exactly one wins, and the next save removes what dead ones left: a folder whose
lock nobody holds. Who reads a checkpoint locks its `layout.json` (shared), so that `prune` leaves it alone.

safetensors: tensors by name in a file, so that a rank reads or writes just the bytes that it wants.

    8 bytes     n, the length of the header, little-endian
    n bytes     JSON: {name: {"dtype": "F32", "shape": [3, 4], "data_offsets": [start, stop]}}, of the rest
    the rest    the tensors' bytes, without gaps

The format is that of https://github.com/huggingface/safetensors; its library writes whole tensors of one process.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, NamedTuple

import torch

from .._common.calls import uninterruptible
from .._common.errors import CheckpointError

locks: Any = None
with suppress(ImportError):  # no Unix: leftovers go by their age
    import fcntl as locks


LOCK = "lock"
NOTE = "layout.json"  # what a checkpoint has, see `manifest`
YOUNG = 60.0  # seconds: without a lock, what is younger may be about to get one, or to be renamed
FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
DEAD = 86400.0  # seconds without a write: where locks do not work


def partial(final: Path, token: str) -> Path:
    """Where the save with this token writes."""
    return final.with_name(f"{final.name}.partial-{token}")


def unfinished(folder: Path) -> bool:
    """Whether this is the folder of a save under way, or of one that died."""
    return re.search(r"\.partial-[0-9a-f]{12}$", folder.name) is not None


class Claim:
    """The folder of a save under way, held by the first rank: `make`, write, `appear`; in the end always `drop`."""

    def __init__(self, final: Path, token: str) -> None:
        self.final, self.path = final, partial(final, token)
        self.lock: IO[bytes] | None = None

    def make(self) -> None:
        """Make the folder, and remove what dead saves of the same name left.

        Raises:
            FileExistsError: `final` exists. OSError: what making it meets.
        """
        final = self.final
        self.refuse()
        missing = [path for path in (final.parent, *final.parent.parents) if not path.exists()]
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(final)) from error
        for path in missing:
            sync(path.parent)
        _sweep(final)
        self.path.mkdir()
        self.lock = hold(self.path / LOCK)

    def refuse(self) -> None:
        if os.path.lexists(self.final):
            raise FileExistsError(f"save: {self.final} exists. Choose another folder, or remove it first.")

    def appear(self) -> None:
        """Give the folder its name, once everything in it is on disk.

        Raises:
            FileExistsError: another save has taken the name meanwhile; its checkpoint is untouched.
        """
        self.refuse()
        for one in (*self.path.glob("__*.done"), *self.path.glob("__*.lock"), self.path / LOCK):
            os.unlink(one)
        sync(self.path)
        try:
            os.rename(self.path, self.final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
                self.refuse()
            raise
        try:
            sync(self.final.parent)
        except OSError as error:  # it is whole, and where it belongs: it is not to be called lost
            warnings.warn(
                f"{self.final} is written and complete, but the disk could not be asked to keep its name ({error}): "
                "should the machine lose its power now, it may be gone.",
                stacklevel=2,
            )

    @uninterruptible
    def drop(self) -> None:
        """Remove what has not appeared, and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            let_go(self.lock)


def hold(path: Path) -> IO[bytes]:
    """A new file that this process has locked, for as long as it lives or until `let_go`. It is locked under another
    name first, so that nobody ever sees it free."""
    early = path.with_name(f"{path.name}.new")
    lock = open(early, "xb")  # noqa: SIM115
    if locks is not None:
        with suppress(OSError):  # the file system has no locks
            locks.flock(lock, locks.LOCK_EX | locks.LOCK_NB)
    os.rename(early, path)
    return lock


def let_go(lock: IO[bytes]) -> None:
    if locks is not None:
        with suppress(OSError):
            locks.flock(lock, locks.LOCK_UN)  # a forked child may have the descriptor, too
    lock.close()


def is_free(path: Path) -> bool:
    """Whether nobody holds a file that `hold` has made. False where that cannot be told."""
    if locks is None:
        return False
    with suppress(OSError), open(path, "r+b") as lock:
        locks.flock(lock, locks.LOCK_EX | locks.LOCK_NB)
        return True
    return False


def _sweep(final: Path) -> None:
    """Remove the folders of dead saves of this name."""
    with suppress(OSError):
        for path in list(final.parent.iterdir()):
            if path.name.startswith(f"{final.name}.partial-") and unfinished(path) and _dead(path):
                shutil.rmtree(path, ignore_errors=True)


def _dead(path: Path) -> bool:
    """Whether no process holds the lock of a save's folder any more."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | FLAGS)
    except OSError:
        return _quiet(path, YOUNG)
    try:
        if locks is None:
            return _quiet(path, DEAD)
        locks.flock(lock, locks.LOCK_EX | locks.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return _quiet(path, DEAD)
    finally:
        os.close(lock)


def _quiet(path: Path, seconds: float) -> bool:
    """Whether nothing was written there for so long."""
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:
        return False
    return time.time() - newest > seconds


def check_shared(what: str, path: Path, ranks: list[int], rank: int) -> None:
    """Check that this rank sees the folder that the first one made.

    Args:
        what: the call, for errors. ranks: the global numbers of all that save; rank: this one's place among them.
    """
    if not (path / LOCK).is_file():
        raise CheckpointError(
            f"{what}: rank {ranks[rank]} does not see {path}, which rank {ranks[0]} made. Save to a folder that all "
            "ranks share."
        )


def _family(name: str) -> str:
    """What names of checkpoints have in common that differ by their last number, as seed1_step_10 and seed1_step_20."""
    return re.sub(r"\d+(?=\D*$)", "#", name)


def may_keep(final: Path, keep: int | None) -> None:
    """Check `max_to_keep`.

    Raises:
        ValueError: it is below 1, or the name has no number by which it differs from others.
    """
    if keep is None:
        return
    if type(keep) is not int or keep < 1:
        raise ValueError(f"max_to_keep is {keep!r}; expected a whole number, at least 1, or None to keep all.")
    if not re.search(r"\d", final.name):
        raise ValueError(
            f"max_to_keep={keep} with the folder {final.name!r}: it counts checkpoints whose names differ by the "
            "last number. Give the folder one, as in 'step_10'."
        )


def prune(final: Path, keep: int) -> None:
    """Remove the oldest checkpoints beside `final` whose names differ from its by the last number, all but `keep`. One
    that is being read stays, and so does what cannot be removed: the next save tries again."""
    found = []
    with suppress(OSError):
        for path in list(final.parent.iterdir()):
            if unfinished(path):
                if _family(path.name.rpartition(".partial-")[0]) == _family(final.name) and _dead(path):
                    shutil.rmtree(path, ignore_errors=True)  # of a prune that was stopped
            elif _family(path.name) == _family(final.name) and (path / NOTE).is_file():
                with suppress(ValueError, KeyError, TypeError, OSError):
                    found.append((int(json.loads((path / NOTE).read_bytes())["step"]), path.name, path))
    found.sort(key=lambda one: (one[2] == final, *one[:2]))  # what was written just now is the newest
    for _, name, path in found[: max(0, len(found) - keep)]:
        with suppress(OSError), open(path / NOTE, "r+b") as note:
            if locks is not None:
                locks.flock(note, locks.LOCK_EX | locks.LOCK_NB)
            gone = partial(path.with_name(name), uuid.uuid4().hex[:12])
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Within, `prune` leaves a checkpoint alone.

    Raises:
        CheckpointError: it has just been removed.
    """
    try:
        file = os.open(folder / NOTE, os.O_RDONLY | FLAGS)
    except OSError:  # there is none: what reads it says so
        yield
        return
    try:
        if locks is not None:
            with suppress(OSError):  # the file system has no locks
                locks.flock(file, locks.LOCK_SH)
        try:
            same = os.path.samestat(os.stat(folder / NOTE), os.fstat(file))
        except OSError:
            same = False
        if not same:
            raise CheckpointError(f"{folder} has just been removed, by a save with max_to_keep. Load another one.")
        yield
    finally:
        os.close(file)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within, an error of the system names the file: that of a write, as on a full disk, does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_file(path: Path, data: bytes) -> None:
    """A new file, to disk."""
    with writing(path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


CANNOT = (
    errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EISDIR, errno.ENOTTY
)  # fmt: skip


def sync(folder: Path) -> None:
    """Have the disk know which files a folder has. Some file systems cannot be asked."""
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in CANNOT:
            raise


@contextmanager
def inside(folder: Path, name: object) -> Iterator[IO[bytes]]:
    """Open a file that lies in `folder` itself: a plain name, a regular file, no link.

    Raises:
        CheckpointError: the name leads elsewhere, or there is no such file.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(f"{folder} names the file {name!r}; expected the name of a file in that folder.")
    try:
        fd = os.open(folder / name, os.O_RDONLY | FLAGS)
    except FileNotFoundError:
        raise CheckpointError(f"{folder / name} is missing. Load another checkpoint.") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError(f"{folder / name} is a link; expected a file in the checkpoint's own folder.") from None
    if not S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{folder / name} is no regular file. Load another checkpoint.")
    with open(fd, "rb") as file:
        yield file


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
PAIRS = "F4"  # two numbers a byte: the format counts numbers, torch counts bytes
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST = 100_000_000  # bytes of a header, as the format's own library has it


class Entry(NamedTuple):
    """A tensor in a file: `nbytes` bytes from `start` on, in C order."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def entries(path: Path) -> dict[str, Entry]:
    """What a file holds; raises as `read_header`."""
    return read_header(path)[0]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """What a file holds, and what else its header says: texts by name.

    Raises:
        CheckpointError: it is no such file, or damaged, or has a dtype that torch has not. OSError: as the disk has it.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        n = int.from_bytes(file.read(8), "little")
        if size < 8 or n > min(size - 8, MOST):
            raise CheckpointError(f"{path} is no safetensors file: its header would have {n} of its {size} bytes.")
        text = file.read(n)
    try:
        header = json.loads(text)
        about = header.pop("__metadata__", None) or {}
        return {name: _entry(path, name, one, 8 + n, size) for name, one in header.items()}, about
    except CheckpointError:  # a ValueError, too
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {type(error).__name__}: {error}") from None


def _entry(path: Path, name: str, about: Mapping[str, Any], base: int, size: int) -> Entry:
    start, stop = about["data_offsets"]
    kind, shape = about["dtype"], tuple(about["shape"])
    if kind not in DTYPES:
        raise CheckpointError(
            f"{path} has {name!r} as {kind}, a dtype that this torch has not, or that is not read. Expected one of "
            f"{', '.join(DTYPES)}."
        )
    if kind == PAIRS:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{about} has no pairs")
        shape = (*shape[:-1], shape[-1] // 2)
    made = Entry(path, DTYPES[kind], shape, base + start)
    if not all(type(n) is int and n >= 0 for n in (*made.shape, start, stop)) or base + stop > size:
        raise ValueError(f"{about} is beyond the file's {size} bytes")
    if stop - start != made.numel * made.dtype.itemsize:
        raise ValueError(f"{about} has {stop - start} bytes")
    return made


def create(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
    """Write a file's header, and make room for its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        n = torch.Size(shape).numel() * dtype.itemsize
        said = [*shape[:-1], 2 * shape[-1]] if NAMES[dtype] == PAIRS and shape else [*shape]
        header[name] = {"dtype": NAMES[dtype], "shape": said, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path), open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return entries(path)


def bytes_of(host: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, for as long as the tensor lives."""
    if not host.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())).cast("B")


def write_at(file: int, entry: Entry, first: int, values: torch.Tensor) -> None:
    """Write elements [first, first + n) of a tensor; `values` [n] are on the host, and of its dtype."""
    view, at = bytes_of(values), entry.start + first * entry.dtype.itemsize
    with writing(entry.path):
        while view:
            n = os.pwrite(file, view, at)
            view, at = view[n:], at + n


def read_into(file: int, entry: Entry, first: int, values: torch.Tensor) -> None:
    """Read elements [first, first + n) of a tensor into `values` [n], on the host and of its dtype.

    Raises:
        CheckpointError: the file ends before.
    """
    view = bytes_of(values)
    done = read_at(file, view, entry.start + first * entry.dtype.itemsize)
    if done < len(view):
        raise CheckpointError(f"{entry.path} ends after {done} of {len(view)} bytes that were wanted there.")


def read_at(file: int, view: memoryview, at: int) -> int:
    """Read as many bytes as the view has, or those that are there, from `at` on. Returns how many. Threads may."""
    done = 0
    while done < len(view) and (n := os.preadv(file, [view[done:]], at + done)):
        done += n
    return done
