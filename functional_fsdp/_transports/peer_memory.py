"""Slabs: bytes that every rank has, and that each can read of all the others along some axes of the mesh.

    rank 0   [ mine ][ rank 1's ]      GPUs: symmetric memory over NVLink (torch.distributed._symmetric_memory)
    rank 1   [ rank 0's ][ mine ]      CPU: anonymous shared memory, mapped by all processes of the host

Whoever writes and whoever reads keep out of each other's way by barriers, which are collectives like others.

Signals: barriers of one mesh axis on GPUs, which take no multiprocessor and in which no host takes part.

A kernel that waits for other ranks holds a multiprocessor meanwhile, and a matrix product beside it then takes a turn
more. Stream memory operations are carried out where a stream's work is queued: they write and compare words in memory,
of this GPU and of others. Every word has one writer that sets it and one that clears it, so that a barrier is the same
operations every time, eager or in a graph:

    waiting[p] = 0?  waiting[p] := 1      this rank's last signal to p has been taken
                     p.signal[me] := 1    I am here
    signal[p] = 1?   signal[p] := 0       p is here
                     p.waiting[me] := 0   p's signal has been taken

Source: CUDA driver API, "Stream Memory Operations" (cuStreamBatchMemOp).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch

from .._common.calls import provide
from .._common.errors import CommError, SpecError
from .._runtime.runtime import Runtime
from .._shared.device import cuda_driver as driver
from .._shared.torch_names import raw_stream, symmetric_memory

K = TypeVar("K")


class PeerMemory:
    """`mine` [nbytes], uint8, and `peers`: every rank's along each axis, by place; at the own place it is `mine`.

    Making one is collective over the mesh.

    Raises:
        SpecError: on every rank, if the memory of one could not be had or read.
    """

    def __init__(self, run: Runtime, axes: Sequence[str], nbytes: int) -> None:
        self.axes = axes
        self.nbytes = max(nbytes, 1)
        self.mine: torch.Tensor
        self.peers: dict[str, list[torch.Tensor]] = {}
        self.handles: dict[str, Any] = {}  # of symmetric memory
        if run.device.type == "cuda":
            self._symmetric(run)
        else:
            self._shared(run)

    def _symmetric(self, run: Runtime) -> None:
        symmetric = symmetric_memory()

        failed = ""
        try:
            use_backend(run, "CUDA")
            self.mine = symmetric.empty(self.nbytes, dtype=torch.uint8, device=run.device)
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        self._agree(run, failed)
        try:
            for axis in self.axes:
                handle = self.handles[axis] = symmetric.rendezvous(self.mine, run.groups["gather", axis].group_name)
                places = range(run.sizes[axis])
                self.peers[axis] = [handle.get_buffer(place, (self.nbytes,), torch.uint8) for place in places]
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        self._agree(run, failed)

    def _shared(self, run: Runtime) -> None:
        """Memory without a name, which peers find by this process's number: nothing stays behind if it dies."""
        fd = os.memfd_create("functional_fsdp")
        try:
            where, failed = "", ""
            try:
                os.posix_fallocate(fd, 0, self.nbytes)
                where = f"/proc/{os.getpid()}/fd/{fd}"
                self.mine = self._map(where)
            except (OSError, RuntimeError) as error:
                failed = str(error)
            told = run.everyone((where, failed), "memory of a peer memory")
            if not any(why for _, why in told):
                try:
                    for axis in self.axes:
                        paths = [told[i][0] for i in _along(run, axis)]
                        self.peers[axis] = [self.mine if path == where else self._map(path) for path in paths]
                except (OSError, RuntimeError) as error:
                    failed = str(error)
            self._agree(run, failed)
        finally:
            os.close(fd)

    def _agree(self, run: Runtime, failed: str) -> None:
        why = complaint(run, failed)
        if why is not None:
            raise SpecError(
                f"Spec(transport='copy_engine'): {self.nbytes:,} bytes of memory that others can read, along "
                f"{', '.join(map(repr, self.axes))}, could not be had on every rank: {why}. Free memory, or use "
                "transport='collective'."
            )

    def _map(self, path: str) -> torch.Tensor:
        os.close(os.open(path, os.O_RDWR))  # torch would make a file that it does not find
        return torch.from_file(path, shared=True, size=self.nbytes, dtype=torch.uint8)


def _along(run: Runtime, axis: str) -> list[int]:
    """The ranks of this rank's row along an axis, by place, as indices of `run.everyone`."""
    return [run.ranks.index(rank) for rank in run.rows[axis]]


def check_reach(run: Runtime, axes: Iterable[str]) -> None:
    """Raise SpecError, on every rank, unless ranks can read each other's memory along these axes. Collective.

    Raises:
        SpecError: naming what is missing: ranks on several hosts, or GPUs without peer access.
    """
    cuda = run.device.type == "cuda"
    device = torch.cuda.current_device() if cuda else -1
    ranks = run.everyone((socket.gethostname(), device), "hosts and devices")
    wrong = ""
    for axis in axes:
        along = [ranks[i] for i in _along(run, axis)]
        hosts = sorted({host for host, _ in along})
        if len(hosts) > 1:
            wrong = (
                f"ranks must be on one host along each axis whose shards are read; along {axis!r} they are on "
                f"{', '.join(hosts)}. Use an inner axis for each host (hsdp, hfsdp), or transport='collective'."
            )
        elif cuda and not all(d == device or torch.cuda.can_device_access_peer(device, d) for _, d in along):
            wrong = (
                f"GPUs must be able to read each other's memory (NVLink, or PCIe peer access); along {axis!r} some "
                "cannot. Use transport='collective'."
            )
    found = complaint(run, wrong)
    if found:
        raise SpecError(f"Spec(transport='copy_engine'): {found}")


def use_backend(run: Runtime, name: str) -> None:
    """Have symmetric memory by this backend of torch's, of which a process has one.

    Raises:
        RuntimeError: it has another one already.
    """
    symmetric = symmetric_memory()

    have = symmetric.get_backend(run.device)
    if have == name:
        return
    try:
        symmetric.set_backend(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"this process uses torch's symmetric memory with the backend {have!r}, {name!r} is needed, and torch has "
            "one a process (copy_engine and symmetric exclude each other)"
        ) from error


WORD = 4  # bytes
MOST = 240  # operations in one call; the driver takes up to 256
WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
EQUAL, FENCE = 1, 0  # CU_STREAM_WAIT_VALUE_EQ, CU_STREAM_WRITE_VALUE_DEFAULT: after all that was written before


class Operation(NamedTuple):
    """Wait until, or write that, the word of `place` has this value."""

    kind: int
    place: int
    word: int
    value: int


def operations(ranks: int, me: int) -> list[Operation]:
    """A barrier, as the rank at place `me` carries it out. A place's words: `ranks` signals, then `ranks` waiting."""
    others = [(me + k) % ranks for k in range(1, ranks)]
    found = []
    for p in others:
        found += [Operation(WAIT, me, ranks + p, 0), Operation(WRITE, me, ranks + p, 1)]
    found += [Operation(WRITE, p, me, 1) for p in others]
    for p in others:
        found += [Operation(WAIT, me, p, 1), Operation(WRITE, me, p, 0), Operation(WRITE, p, ranks + me, 0)]
    return found


class Signals:
    """The words of an axis, a set for each lane. Making them is collective over the mesh.

    Raises:
        SpecError: on every rank, if GPUs cannot have memory that the others reach.
    """

    def __init__(self, run: Runtime, axis: str, lanes: int) -> None:
        ranks = run.sizes[axis]
        self.axis = axis
        self.peer_memory = PeerMemory(run, [axis], 2 * WORD * ranks * lanes)
        self.device = run.device.index
        self.batches: list[list[list[Any]]] = []  # of each lane
        self.peer_memory.mine.zero_()
        for lane in range(lanes):
            bases = [peer.data_ptr() + 2 * WORD * ranks * lane for peer in self.peer_memory.peers[axis]]
            steps = operations(ranks, run.coordinate[axis])
            self.batches.append([_packed(steps[i : i + MOST], bases) for i in range(0, len(steps), MOST)])
        works = self._works()
        torch.cuda.synchronize()
        # Where a driver lacks the operations, torch's kernel does it on all ranks; and nobody signals before all began.
        self.batched = all(run.everyone(works, "signals"))

    def _works(self) -> bool:
        """Whether the driver takes such operations: one that changes nothing."""
        with suppress(AttributeError, ImportError, RuntimeError):
            return _issue(_packed([Operation(WRITE, 0, 0, 0)], [self.peer_memory.mine.data_ptr()]), self.device) == 0
        return False

    def barrier(self, lane: int) -> None:
        """On the current stream."""
        if not self.batched:
            self.peer_memory.handles[self.axis].barrier(channel=lane)
            return
        for batch in self.batches[lane]:
            error = _issue(batch, self.device)
            if error:
                raise CommError(
                    f"a barrier along the axis {self.axis!r} could not be issued: the CUDA driver refused "
                    f"cuStreamBatchMemOp: {error!r}. Restart the job from its last checkpoint."
                )


def _packed(steps: list[Operation], bases: list[int]) -> list[Any]:
    """The operations as the driver takes them; `bases`: the address of each place's words."""
    kinds = driver().CUstreamBatchMemOpType
    packed = []
    for kind, place, word, value in steps:
        one = driver().CUstreamBatchMemOpParams()
        half = one.waitValue if kind == WAIT else one.writeValue
        one.operation, half.operation = kinds(kind), kinds(kind)
        half.address, half.value = driver().CUdeviceptr(bases[place] + WORD * word), driver().cuuint32_t(value)
        half.flags = EQUAL if kind == WAIT else FENCE
        packed.append(one)
    return packed


def _issue(batch: list[Any], device: int) -> Any:
    """On the current stream. Returns the driver's CUresult, 0 for success."""
    (error,) = driver().cuStreamBatchMemOp(raw_stream(device), len(batch), batch, 0)
    return error


def uneven(run: Runtime, have: Mapping[K, Any], what: str) -> list[K]:
    """The keys of what this rank has and not every rank has, with the same value. Host; waits for all."""
    every = run.everyone(have, what)
    return [key for key, value in have.items() if any(other.get(key) != value for other in every)]


def complaint(run: Runtime, text: str) -> str | None:
    """What the first rank that has something to say says; None if all are content (""). Host; waits for all."""
    return next((said for said in run.everyone(text, "complaint") if said), None)


provide("transports", Signals)
