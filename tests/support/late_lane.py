"""A lane that does every copy as late as it may: what a GPU's stream shows now and then, it shows each time.

    copy     is written down, and what it will write to is filled with rubbish
    wait     of a stream for a mark: now all copies up to it are done
    then     whether what it reads from, and writes to, is still there, and was left alone meanwhile

It holds no tensor, so what lets one go too early is found out. Streams are names here; `at` says which computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from functional_fsdp import extend
from functional_fsdp.transforms._drive.unit_uses import USES
from functional_fsdp.transforms._remat import moves

RUBBISH = 0x7F  # as float32 it is 3.4e38


class Bytes(NamedTuple):
    """Where a tensor's bytes are, without holding them."""

    storage: StorageWeakRef
    offset: int
    nbytes: int

    @classmethod
    def of(cls, t: torch.Tensor) -> Bytes:
        return cls(StorageWeakRef(t.untyped_storage()), int(t.storage_offset()), t.nbytes)

    def tensor(self) -> torch.Tensor:
        assert not self.storage.expired(), "let go while the lane still needs it"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.offset, (self.nbytes,), (1,))


class Late(NamedTuple):
    into: Bytes
    source: Bytes
    then: torch.Tensor | None  # what the source had in it; of what other copies write to first, nobody knows yet
    mark: int


class LateLane(extend.CopyLane):
    """Of the CPU.

    Attributes:
        stream_now: the name of the stream that computes. copies: how many there were. lent: what was read elsewhere.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.stream_now = "compute"
        self.left: list[Late] = []
        self.marks = self.copies = 0
        self.waited: dict[str, int] = {}  # by stream, the last mark that it has waited for
        self.joined: set[str] = set()  # streams whose work the last copies have waited for
        self.lent: list[str] = []

    def here(self) -> Any:
        return self.stream_now

    @contextmanager
    def at(self, stream: str) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def copy(self, pairs: Any, made_on: Any = ()) -> int:
        self.joined = {self.stream_now, *made_on}
        self.marks += 1
        written = {late.into.storage for late in self.left}
        for into, source in pairs:
            self.copies += 1
            known = StorageWeakRef(source.untyped_storage()) in written
            self.left.append(Late(Bytes.of(into), Bytes.of(source), None if known else source.clone(), self.marks))
            if source.numel() and self._is_new(into):
                into.fill_(RUBBISH)
        return self.marks

    def _is_new(self, t: torch.Tensor) -> bool:
        """Whether no copy that is left reads from it, so that rubbish hurts nobody."""
        return not any(late.source.storage == StorageWeakRef(t.untyped_storage()) for late in self.left)

    def wait(self, mark: Any, stream: Any = None) -> None:
        if mark is None:
            return
        stream = stream or self.stream_now
        self.waited[stream] = max(mark, self.waited.get(stream, 0))
        while self.left and self.left[0].mark <= mark:
            late = self.left.pop(0)
            source = late.source.tensor()
            assert late.then is None or torch.equal(source, late.then), "written to while the lane still needed it"
            late.into.tensor().copy_(source)

    def lend(self, t: torch.Tensor) -> None:
        self.lent.append(self.stream_now)

    def drop(self, t: torch.Tensor, mark: Any, stream: Any) -> None:
        self.wait(mark, stream)


@contextmanager
def late_lane() -> Iterator[LateLane]:
    """Within, what is moved on the CPU takes this lane."""
    lane = LateLane()
    with mock.patch.object(moves, "copy_lane", return_value=lane), mock.patch.dict(USES, clear=True):
        yield lane
