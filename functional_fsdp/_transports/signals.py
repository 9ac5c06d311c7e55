"""Signals: barriers of one mesh axis on GPUs, which take no multiprocessor and in which no host takes part.

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

from contextlib import suppress
from typing import Any, NamedTuple

import torch

from .._common.errors import CommError
from .._common.provided import provide
from .._common.torch_names import raw_stream
from .._distributed.peers import Peers
from .cuda_driver import driver
from .peer_memory import PeerMemory

__all__ = ["Operation", "Signals", "operations"]

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

    def __init__(self, run: Peers, axis: str, lanes: int) -> None:
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


provide("transports", Signals)
