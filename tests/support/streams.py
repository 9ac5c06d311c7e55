"""GPUs' lanes on the CPU: streams that only remember what comes after what, and every access to memory, checked.

    compute   ── writes a ──┬── mark                                what no wait orders may happen at once on a GPU:
    update                  └── wait ── reads a ──                  `Order.races` has it
    fetch     ── reads a ── (a race with the first)

Work is done at once, in the order of the host, by `StreamLanes` itself. Each stream has a vector clock (Mattern 1989,
"Virtual time and global states of distributed systems"); each access to bytes is held against those before it. Memory
is made on a stream, and goes back to it: another stream's access has to come after the one and before the other, as the
caching allocator wants it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from support.presets import AXES
from support.problems import batch, loss_fn, mesh_and_placement, net
from torch.utils._python_dispatch import TorchDispatchMode

import functional_fsdp as fsdp
from functional_fsdp import _host_memory
from functional_fsdp import transforms as T
from functional_fsdp._common.device import in_host_memory
from functional_fsdp._optim_extra.muon import Muon
from functional_fsdp._runtime import runtime, stream_lanes
from functional_fsdp._runtime.lanes import gloo
from functional_fsdp._runtime.stream_lanes import STREAMS, StreamLanes

Clock = dict[str, int]
What = tuple[Any, ...]  # an operation, and the shape
COMPUTE = "compute"
PLAIN = frozenset((bool, int, float, str, torch.dtype, torch.device))


@lru_cache(10_000)
def accesses_of(func: Any) -> tuple[bool, list[tuple[int, str, bool]], bool, str]:
    """Whether an operation is looked at, each argument that it reads or writes, whether its result is new, its name."""
    schema, name = func._schema, func.overloadpacket.__name__
    returned = [one.alias_info for one in schema.returns]
    views = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
    looks = not (views or func.namespace == "c10d" or name == "set_")
    reads = not (name.startswith("new_") or name.endswith("_like"))  # those look at shapes only
    read = [
        (i, one.name, one.alias_info is not None and one.alias_info.is_write)
        for i, one in enumerate(schema.arguments)
        if reads and "Tensor" in str(one.type)
    ]
    return looks, read, not any(returned), str(func)


def said(what: What) -> str:
    return " ".join(map(str, what))


class Stream:
    device_index, device_type = 0, 1

    def __init__(self, name: str, number: int) -> None:
        self.name, self.stream_id = name, number
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        for name, time in event.clock.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(Event(stream.clock))


class Event:
    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = dict(clock or {})

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        return True


class Memory:
    """What was done to the bytes of one storage, and by which stream it was made."""

    def __init__(self, home: Stream, pinned: bool) -> None:
        self.home, self.pinned = home, pinned
        #: by stream, the bytes from and to, and whether they were written: the last time, and by what
        self.accesses: dict[tuple[str, int, int, bool], tuple[int, What]] = {}
        self.recorded: set[str] = set()  # the streams of which the allocator knows that they use it, too
        self.ref: Any = None


class Order(TorchDispatchMode):
    """Who comes after whom. `races` says what no order holds apart."""

    def __init__(self) -> None:
        super().__init__()
        names = (COMPUTE, *STREAMS)
        self.streams = {name: Stream(name, number) for number, name in enumerate(names)}
        self.now = self.streams[COMPUTE]
        self.known: dict[int, Memory] = {}
        self.freed: list[Memory] = []  # since each one's stream was given something
        self.found: list[str] = []
        self.on = False

    @property
    def races(self) -> list[str]:
        self._check_freed([*self.streams.values()])
        return self.found

    # ---- as torch.cuda

    def current_stream(self, index: Any = None) -> Any:
        return self.now.stream_id, 0, 1

    def set_stream(self, stream_id: int, **_: Any) -> None:
        self.now = [*self.streams.values()][stream_id]

    def _stream(self, names: Iterator[str], stream_id: int | None = None, **_: Any) -> Stream:
        return self.streams[next(names)] if stream_id is None else [*self.streams.values()][stream_id]

    @contextmanager
    def lanes(self) -> Iterator[None]:
        """Meshes that are made within have these streams."""
        names = iter(STREAMS)
        cuda = SimpleNamespace(
            Event=Event, is_initialized=lambda: True, current_stream=lambda device: self.now,
            Stream=lambda *_, **at: self._stream(names, **at),
        )  # fmt: skip
        with (
            mock.patch.object(stream_lanes, "torch", SimpleNamespace(cuda=cuda)),
            mock.patch.object(stream_lanes, "current_stream", self.current_stream),
            mock.patch.object(stream_lanes, "set_stream", self.set_stream),
            mock.patch.object(runtime, "lanes_of", lambda run: Ordered(run, self)),
            mock.patch.dict(runtime._RUNTIMES, clear=True),
            mock.patch.object(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_)),
        ):
            self.on = True
            try:
                yield
            finally:
                self.on = False

    # ---- accesses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        looks, read, fresh, what = accesses_of(func)
        if not (looks and self.on):
            return func(*args, **kwargs)
        for i, name, written in read:
            self.access(args[i] if i < len(args) else kwargs.get(name), written, what)
        out = func(*args, **kwargs)
        self.access(out, fresh, what)
        return out

    def access(self, value: Any, written: bool, what: str) -> None:
        """The current stream reads or writes these tensors."""
        if value is None or type(value) in PLAIN:
            return
        for tensor in [value] if isinstance(value, torch.Tensor) else torch.utils._pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                memory, shape = self._memory(tensor), tuple(tensor.shape)
                size = tensor.element_size()
                begin = int(tensor.storage_offset()) * size
                extent = 1 + sum([(n - 1) * s for n, s in zip(shape, tensor.stride(), strict=True)])
                span = range(begin, begin + (extent * size if 0 not in shape else 0))
                self._note(memory, span, written, (what, shape))

    def _memory(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = Memory(self.now, in_host_memory(tensor))
            found.ref = weakref.ref(storage, lambda _: self._gone(key))
            self._note(found, range(1 << 62), True, ("made",))
        return found

    def _note(self, memory: Memory, span: range, written: bool, what: What) -> None:
        name, clock = self.now.name, self.now.clock
        if self.freed:
            self._check_freed([self.now])
        for (other, start, stop, wrote), (time, by) in [*memory.accesses.items()]:
            before = other == name or clock.get(other, 0) >= time
            if before and written and span.start <= start and stop <= span.stop:
                del memory.accesses[other, start, stop, wrote]  # who comes after this one comes after that one
            elif not before and (written or wrote) and span.start < stop and start < span.stop:
                self._race(f"{said(what)} on {name}, {said(by)} on {other}")
        clock[name] = clock.get(name, 0) + 1
        memory.accesses[name, span.start, span.stop, written] = clock[name], what

    def _gone(self, key: int) -> None:
        memory = self.known.pop(key, None)
        if memory is not None and self.on and not memory.pinned:
            self.freed.append(memory)

    def _check_freed(self, streams: list[Stream]) -> None:
        """What these streams are given next may lie in memory that has gone back to them."""
        freed, self.freed = self.freed, [memory for memory in self.freed if memory.home not in streams]
        for memory in freed:
            for (other, *_), (time, by) in memory.accesses.items() if memory.home in streams else ():
                if other not in (memory.home.name, *memory.recorded) and memory.home.clock.get(other, 0) < time:
                    self._race(f"memory of {memory.home.name} goes, and {said(by)} on {other}")

    def _race(self, text: str) -> None:
        if text not in self.found:
            self.found.append(text)

    def _resizing(self, resize: Any) -> Any:
        def resized(storage: Any, nbytes: int) -> Any:
            memory = self.known.get(storage._cdata)
            if memory is not None and self.on and storage.nbytes() != nbytes:
                before, self.now = self.now, memory.home
                self._note(memory, range(1 << 62), True, (f"resize_({nbytes})",))
                self.now = before
            return resize(storage, nbytes)

        return resized


class Ordered(StreamLanes):
    """The lanes of GPUs, on the streams of an `Order`; collectives by gloo."""

    backend = "gloo"

    def __init__(self, run: Any, order: Order) -> None:
        self.order = order
        super().__init__(run)

    def keep(self, *tensors: torch.Tensor, lanes: tuple[str, ...] = ("reduce", "outer")) -> None:
        for tensor in tensors:
            self.order._memory(tensor).recorded.update(lanes)

    def synchronize(self) -> None:
        pass

    def signalling(self, axis: str) -> None:  # barriers are gloo's, too
        pass

    def collective(self, hop: Any, out: Any, given: Any, group: Any) -> Any:
        if self.skips:
            self.skips -= 1
            return
        self.issues += 1
        if hop.kind != "barrier":
            self.order.access(given, hop.kind in ("reduce_scatter", "all_reduce"), hop.kind)
            self.order.access(out, True, hop.kind)
        yield from gloo(hop, out, given, group)


@contextmanager
def ordered() -> Iterator[Order]:
    """Meshes that are made within have lanes of GPUs, and what they do is checked, as if released memory went."""
    order = Order()
    gone = "functional_fsdp._engine.gathers.keeps_released", "functional_fsdp._storage.keeps_released"
    with order.lanes(), order, mock.patch(gone[0], return_value=False), mock.patch(gone[1], return_value=False):
        yield order


# ---------------------------------------------------------------- steps

WAYS = (
    "", "microbatches", "lacking", "skipping", "clipping", "matrices", "from torch", "exact", "copies", "ahead",
    "looks",
)  # fmt: skip


def part_of(model: Any, data: Any) -> torch.Tensor:
    """Some units get no gradient."""
    return model.tail(model.head(model.blocks[1](model.embed(data[0])))).float().square().mean()


def trained(
    preset: str, kind: Any, overlap: bool, way: str, watched: bool
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights after three steps, in parts of 128 elements, and what raced, if that is watched."""
    small = mock.patch.object(_host_memory, "FILL", 512), mock.patch.object(Muon, "fill", 512)
    with small[0], small[1], ordered() if watched else nullcontext() as order:
        params, model = fsdp.functionalize(net(torch.float32))
        mesh, _ = mesh_and_placement(preset)
        spec = fsdp.Spec(
            mesh,
            getattr(fsdp, preset)(*AXES[preset], memory_kind=kind),
            precision=fsdp.Precision(compute=torch.bfloat16, sum="fp32" if way == "exact" else "native"),
            schedule=fsdp.Schedule(
                prefetch=3 if way == "ahead" else 1, keep=() if way == "ahead" else None, overlap_update=overlap
            ),
            transport="copy_engine" if way == "copies" else "collective",
            labels={"blocks.*.up.weight": "matrix", "blocks.*.down.weight": "matrix"},
        )
        optimizer: Any = fsdp.adamw(lr=1e-2)
        if way == "matrices":
            optimizer = fsdp.partition({"matrix": fsdp.muon(lr=1e-2), "default": optimizer})
        elif way == "from torch":
            optimizer = fsdp.from_torch(torch.optim.RAdam, lr=1e-2)
        state = fsdp.shard(params, spec, optimizer)
        assert isinstance(state._executor.run.lanes, Ordered) == watched
        whole, some = (T.forward_backward(model, fn) for fn in (loss_fn, part_of))
        step = T.skip_nonfinite(fsdp.step) if way == "skipping" else fsdp.step
        micro = 2 if way == "microbatches" else 1
        for i in range(3):
            for k in range(micro):
                call = some if way == "lacking" and i else whole
                state, _ = call(state, batch(i, mesh.get_rank(), k), last_microbatch=k == micro - 1)
            if way == "looks":
                fsdp.stream_to(lambda *_: None, state)
                state, _ = T.norms(state, state.main)
            if way == "clipping":
                state, _ = T.clip_by_global_norm(state, 0.1)
            state = step(state)
        found = {path: leaf.clone() for path, leaf in fsdp.full_params(state).items()}
        return found, [] if order is None else order.races
