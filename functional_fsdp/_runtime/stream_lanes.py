"""Lanes on GPUs: CUDA streams beside the compute lane, which is whatever stream is current. The control lane stays on
the host.

`torch.cuda.stream` and `torch.cuda.current_stream` take longer than the rest of a verb; here only ids are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from .._common.calls import provided, uninterruptible
from .._common.device import default_generator
from .._common.record import LANES, Collective, Mark, Steps
from .._common.torch_names import all_gather_single, current_stream, is_connected, reduce_scatter_single, set_stream
from .agreement import Agreement
from .lanes import OPS, HostLanes, Job
from .restart import POLL, twin

_signals = provided("transports.Signals")
STREAMS = ("gather", "reduce", "outer", "update", "fetch", "store")


class StreamLanes(HostLanes):
    """A stream for each lane. The host issues all of a job at once, and waits for nothing."""

    backend = "nccl"
    waits_on_host = False
    copies_on_lanes = True
    connects = True

    def __init__(self, run: Agreement) -> None:
        super().__init__(run)
        self.device = run.device
        self.lanes = {name: torch.cuda.Stream(self.device, priority=-1) for name in STREAMS}
        self.generator = default_generator(self.device)  # CUDA has begun by now
        self.known = torch.cuda.current_stream(self.device)
        self.used: set[str] = set()  # lanes that were given something since the last graph
        self.unjoined: set[str] = set()  # lanes that have yet to wait for it
        self.graph = torch.cuda.Event()  # its end
        self.issues = self.skips = 0  # collectives that the job has issued, and that its twin leaves out
        self.signals: dict[str, Any] = {}  # by axis: barriers
        self.connecting: list[tuple[threading.Thread, list[str]]] = []  # and the lanes that each connects

    # ---- streams

    def current(self) -> torch.cuda.Stream:
        found = current_stream(self.device.index)
        if found[0] != self.known.stream_id:
            self.known = torch.cuda.Stream(stream_id=found[0], device_index=found[1], device_type=found[2])
        return self.known

    def set(self, stream: torch.cuda.Stream) -> None:
        self.known = stream
        set_stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What the current stream is given inside comes after all that lanes have, and before what they are given next:
        a graph has parts on lanes, which would else run beside another lineage's. Lanes wait when they are used."""
        home = self.current()
        home.wait_event(self.graph)
        for name in self.used:
            home.wait_stream(self.lanes[name])
        self.used.clear()
        try:
            yield
        finally:
            self.graph.record(home)
            self.unjoined.update(self.lanes)

    def lane(self, name: str) -> torch.cuda.Stream:
        """A lane, to be given something."""
        self.used.add(name)
        stream = self.lanes[name]
        if name in self.unjoined:
            self.unjoined.discard(name)
            stream.wait_event(self.graph)
        return stream

    def catch_up(self) -> None:
        """Have all lanes wait for the last graph now: while another is captured they cannot."""
        for name in list(self.unjoined):
            self.lane(name)

    def join(self, lane: str) -> None:
        self.current().wait_stream(self.lanes[lane])

    def keep(self, *tensors: torch.Tensor, lanes: tuple[str, ...] = ("reduce", "outer")) -> None:
        for tensor in tensors:
            for lane in lanes:
                tensor.record_stream(self.lanes[lane])

    def let_go(self, marks: list[Mark]) -> None:
        for mark in marks:  # what is freed now may still be in use
            if mark is not None and torch.cuda.is_initialized():
                self.wait(mark)

    def synchronize(self) -> None:
        self.connected()
        torch.cuda.synchronize()

    # ---- marks

    def mark(self, mark: Mark = None) -> Mark:
        event = mark or torch.cuda.Event()
        event.record(self.current())
        return event

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, Job):
            super().wait(mark)
        elif mark is not None:
            self.current().wait_event(mark)

    def passed(self, mark: Mark) -> bool:
        return super().passed(mark) if mark is None or isinstance(mark, Job) else bool(mark.query())

    # ---- jobs

    def submit(
        self, lane: str, hops: tuple[Collective, ...], job: Steps, after: Mark = None, single: bool = False,
        ordered: bool = False, mark: Mark = None,
    ) -> Mark:  # fmt: skip
        if lane == "control":
            return super().submit(lane, hops, job, after, single, ordered, mark)
        return self._submit(lane, hops, job, after, mark)

    @uninterruptible
    def _submit(self, lane: str, hops: tuple[Collective, ...], job: Steps, after: Mark, mark: Mark) -> Mark:
        """What is logged is issued, even if an interrupt comes. If the job's own code raises, what it did not issue is
        issued for those who wait."""
        run = self.run
        if self.connecting:  # while a state is made; or its making was left
            self.connected()
        if hops and run.size > 1:
            run.logs[lane].append(hops)
        self.issues = 0
        try:
            return self.enqueue(lane, job, after, mark)
        except BaseException:
            if not run.capturing:
                run.void()
                self.skips = self.issues
                try:
                    self.enqueue(lane, twin(run, hops))
                except BaseException as error:
                    run.lose(f"What peers wait for on the {lane} lane could not be issued: {error}.")
                    raise
                finally:
                    self.skips = 0
            raise

    def enqueue(self, lane: str, job: Steps, after: Mark = None, mark: Mark = None) -> Mark:
        """Issue all of a job on a lane's stream ("side": on the current one). The host waits for nothing."""
        home = stream = self.current()
        event = mark or torch.cuda.Event()
        try:
            if lane in self.lanes:
                stream = self.lane(lane)
                self.set(stream)
            if after is not None:
                stream.wait_event(after)
            for item in job:
                if isinstance(item, str):
                    turn = torch.cuda.Event()
                    turn.record(stream)
                    stream = self.lane(item)
                    self.set(stream)
                    stream.wait_event(turn)
                else:
                    for call in item:
                        call().wait()
            event.record(stream)
        finally:
            self.set(home)
        return event

    # ---- collectives

    def collective(self, hop: Collective, out: Any, given: Any, group: Any) -> Steps:
        """One kernel of NCCL's, on the current stream; barriers by signals of the lane's own. Nothing is yielded."""
        if self.skips:
            self.skips -= 1
            return
        if hop.kind == "barrier":
            self.signals[hop.axis].barrier(LANES.index(hop.lane))
        elif hop.kind == "all_gather":
            if not out.is_floating_point() or out.itemsize == 1:  # integers, booleans and float8 travel as bytes
                out, given = out.view(torch.uint8), given.view(torch.uint8)
            all_gather_single(out, given, group=group)
        elif hop.kind == "reduce_scatter":
            reduce_scatter_single(out, given, op=OPS[hop.op], group=group)
        elif hop.kind == "all_to_all":
            came, sent = map(list, hop.splits or ((), ()))
            dist.all_to_all_single(out, given, came, sent, group=group)
        else:
            dist.all_reduce(out, op=OPS[hop.op], group=group)
        self.issues += 1  # not if it raised: peers wait for it
        yield from ()

    def unconnected(self) -> list[str]:
        """The lanes that each step uses whose ranks NCCL has not connected yet."""
        found = ((lane, self.run.groups[lane, axis]) for axis in self.run.sizes for lane in ("gather", "reduce"))
        return [lane for lane, group in found if not is_connected(group, self.device)]

    @uninterruptible
    def connect(self, lanes: Collection[str]) -> None:
        """Begin to connect the ranks of these lanes, on a thread; not those that are connected, or under way since a
        call that was left. Collective. NCCL does it when the first collective of a kind is issued, and holds up
        whoever issues that, for 0.3 to 0.4 s a lane. These are logged: a rank that has left before issues them where
        ranks meet, and not in their place what it does next.

        One lane after the other, in the same order on all ranks. Two at once could wait for each other: where NCCL has
        several roots, each thread keeps the store while it waits for the others' keys; and a kernel that waits for its
        peers keeps a call that frees memory from ending, and that whatever would issue the peers' next one.
        """
        missing = self.unconnected()
        busy = [lane for thread, some in self.connecting if thread.is_alive() for lane in some]
        new = [lane for lane in lanes if lane in missing and lane not in busy]
        if new:
            firsts = [_first(self.run, lane) for lane in new]
            thread = threading.Thread(target=self._connect, args=(firsts,), daemon=True)
            self.connecting.append((thread, new))
            for first in firsts:
                self.run.logs[first.lane].append((first,))
            thread.start()

    def _connect(self, firsts: Collection[Collective]) -> None:
        """Issue the first collective of each of these lanes."""
        for first in firsts:
            with suppress(Exception), torch.cuda.device(self.device), torch.cuda.stream(self.lanes[first.lane]):
                every, one = (torch.zeros(n, device=self.device) for n in (self.run.size, 1))
                group = self.run.groups[first.lane, first.axis]
                if first.kind == "all_gather":
                    all_gather_single(every, one, group=group)
                else:
                    reduce_scatter_single(one, every, group=group)

    def connected(self) -> None:
        """Wait until all are connected, or a rank has ended. What has failed fails again, and says why, where it is
        used."""
        while self.connecting:
            thread, _ = self.connecting[-1]
            thread.join(POLL.total_seconds())
            if not thread.is_alive() or self.run.gone():
                self.connecting.pop()

    def signalling(self, axis: str) -> None:
        if axis not in self.signals:
            self.signals[axis] = _signals(self.run, axis, len(LANES))

    def traced(self, lane: str) -> str:
        return lane

    def idle(self) -> bool:
        return super().idle() and not self.signals


def _first(run: Agreement, lane: str) -> Collective:
    """A collective of a lane's kind, of a few bytes."""
    (axis,) = run.sizes
    kind, op = ("all_gather", "") if lane == "gather" else ("reduce_scatter", "sum")
    return Collective(kind, axis, run.size, torch.float32, op, lane, "connection")


def lanes_of(run: Agreement) -> HostLanes:
    """The lanes of a mesh: its medium's own; else streams where it has GPUs, else the host's."""
    if run.medium.lanes is not None:
        return run.medium.lanes(run)
    return StreamLanes(run) if run.device.type == "cuda" else HostLanes(run)
