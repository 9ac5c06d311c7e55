"""predict: seconds of a step on paper, and what they are made of.

model, loss function, batch   ──rehearsal on the meta device──▶  kernels of each use, order of use, bytes alive
spec                          ──layout, plan, records────────▶  gathers, reductions, updates by unit
hardware                      ──────────────────────────────▶  seconds of each; lanes, event by event

Spared: what compiled code keeps less for the backward than eager code does, use by use.

A compiler that sees a unit's forward and backward at once keeps the cheapest tensors from which what the backward reads
can be computed again by elementwise operations and reductions. Of these it computes nothing again that a product or an
attention reads in the backward, since that has to be written anyway. So the bytes that it keeps are a smallest cut of
the forward's tensors, as of torch's partitioner.

Source: the min-cut partitioner of torch's functorch compiler (https://dev-discuss.pytorch.org/t/467).

measure_links: latency and bandwidth along each axis of a mesh, from gathers of two sizes.

measure_compute: seconds of each use of a model's units on this device, measured once and kept.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._common.device import best_device, device_name
from .._common.errors import SpecError
from .._common.record import Collective
from .._common.torch_names import NoTorchFunction, pytree
from .._common.tree import bytes_text, table
from .._graph.graph import abstract_state
from .._nn.skeleton import aliases_of, every_buffer
from .._optim.adamw import adamw
from .._plan.layout import Layout
from .._plan.plan import Plan
from .._runtime.runtime import Runtime, runtime_of
from .._spec.spec import Spec
from .._state.state import State
from ..look.peak import StepMemory
from ..look.sizes import state_bytes
from ..look.timeline import Timeline
from .hardware import Hardware, Link
from .lanes import Costs, Run, Traffic, play
from .operations import Counter, Logged, Work

__all__ = [
    "Prediction", "Rehearsal", "above", "measure_compute", "measure_links", "predict", "predicted", "prepared",
    "rehearsal_of", "rehearsed", "smallest_cut", "spared",
]  # fmt: skip

INFINITE = 1 << 60


def spared(log: Sequence[Logged], forward: int, compiled: Collection[int]) -> list[int]:
    """Bytes that the forward uses of a rehearsal keep more in compiled code than eagerly: negative where it keeps less.

    Args:
        log: of the rehearsal's operations. forward: how many of its uses are the forward. compiled: which of these are
            compiled.
    """
    home: dict[int, int] = {}  # the use that has made a tensor
    size: dict[int, int] = {}
    read: dict[int, set[int]] = {}  # the uses that read it
    whole: set[int] = set()  # what a product or an attention reads in the backward
    for one in log:
        for key in one.inputs:
            read.setdefault(key, set()).add(one.use)
            if one.use >= forward and not one.joined:
                whole.add(key)
        for key, nbytes in one.outputs:
            home.setdefault(key, one.use)
            size.setdefault(key, nbytes)
    found = [0] * forward
    for use in compiled:
        mine = {key for key, where in home.items() if where == use}
        needed = {key for key in mine if any(other >= forward for other in read.get(key, ()))}
        leaves = {key for key in mine if any(use < other < forward for other in read.get(key, ()))}
        forced = (needed & whole) | leaves
        eager = sum(size[key] for key in needed | leaves)
        cut = smallest_cut([one for one in log if one.use == use], size, needed - forced, forced, read, forward)
        found[use] = sum(size[key] for key in forced) + cut - eager
    return found


def smallest_cut(
    ops: Sequence[Logged], size: dict[int, int], wanted: Collection[int], kept: Collection[int],
    read: dict[int, set[int]], forward: int,
) -> int:  # fmt: skip
    """Bytes of the cheapest tensors to keep from which those wanted follow, where some are kept anyway."""
    if not wanted:
        return 0
    capacity: dict[tuple[object, object], int] = {}
    next_to: dict[object, set[object]] = {}

    def edge(a: object, b: object, n: int) -> None:
        capacity[a, b] = capacity.get((a, b), 0) + n
        capacity.setdefault((b, a), 0)
        next_to.setdefault(a, set()).add(b)
        next_to.setdefault(b, set()).add(a)

    made: dict[int, Logged] = {}
    for op in ops:
        for key, _ in op.outputs:
            made.setdefault(key, op)
    there = {key for op in ops for key in (*op.inputs, *(key for key, _ in op.outputs))}
    for key in there:
        free = key in kept or key not in size or (key not in made and any(use >= forward for use in read[key]))
        edge((key, 0), (key, 1), 0 if free else size[key])  # what is free to keep cuts its way at once
        maker = made.get(key)
        if maker is None or not maker.joined:
            edge("source", (key, 0), INFINITE)
        else:
            for given in maker.inputs:
                if given != key:
                    edge((given, 1), (key, 0), INFINITE)
    for key in wanted:
        edge((key, 1), "sink", INFINITE)
    total = 0
    while True:
        before: dict[object, object] = {"source": "source"}
        todo: deque[object] = deque(["source"])
        while todo and "sink" not in before:
            a = todo.popleft()
            for b in next_to.get(a, ()):
                if b not in before and capacity[a, b] > 0:
                    before[b] = a
                    todo.append(b)
        if "sink" not in before:
            return total
        path: list[tuple[object, object]] = []
        at: object = "sink"
        while at != "source":
            path.append((before[at], at))
            at = before[at]
        least = min(capacity[step] for step in path)
        for one, other in path:
            capacity[one, other] -= least
            capacity[other, one] += least
        total += least


def above(module: str = "") -> Any:
    """The transforms, or a module of theirs. They import `functional_fsdp`, which imports this folder."""
    return import_module(f"functional_fsdp.transforms{module and '.'}{module}")


@dataclass(frozen=True)
class Rehearsal:
    """What a model does with a batch, whatever the mesh: `found` of the rehearsal, and the work of each use. compiled:
    `found` where units that come again are compiled, if it was asked for."""

    found: Any
    works: tuple[Work, ...]
    params: Any
    buffers: Mapping[str, Any]
    compiled: Any = None

    def with_seconds(self, compute: Sequence[float]) -> Rehearsal:
        """With measured seconds of each use."""
        if len(compute) != len(self.works):
            raise SpecError(
                f"predict(compute=): {len(compute)} uses were measured, and this model has {len(self.works)}. Measure "
                "it with the same units: fsdp.measure_compute(model, loss_fn, batch, spec)."
            )
        works = tuple(replace(work, measured=s) for work, s in zip(self.works, compute, strict=True))
        return replace(self, works=works)

    def state(self, spec: Spec, optimizer: Any) -> State:
        return abstract_state(self.params, spec, optimizer, buffers=self.buffers)


@dataclass(frozen=True, repr=False)
class Prediction:
    """A step on paper. Printing it gives a table.

    Attributes:
        seconds: of a step, on each rank.
        timeline: what each lane does when, as of `fsdp.timeline`; lanes are "host", "gather", "compute", "reduce",
            "outer" (a second axis), "update" and "copies" (to the host's memory).
        memory: the peak, as `T.step_memory` says it.
        traffic: bytes that a rank receives in a step, by axis.
        flops: operations a rank, recomputation included.
        parts: seconds by what they are: "compute", alone; "slowed", by what moves memory beside it; and what compute
            waited for: "gather", "reduce", "update", "host", "copies".
        bound: where it is bound, in words.
        hardware: on what.
    """

    seconds: float
    timeline: Timeline
    memory: StepMemory
    traffic: Mapping[str, int]
    flops: int
    parts: Mapping[str, float]
    bound: str
    hardware: Hardware
    spec: Spec
    plan: Plan

    @property
    def peak(self) -> int:
        """Bytes on the device at the peak."""
        return self.memory.peak

    @property
    def fits(self) -> bool:
        """Whether 0.94 of the device's memory holds the peak; the rest is the driver's, NCCL's and the allocator's."""
        return self.peak <= 0.94 * self.hardware.memory

    @property
    def utilization(self) -> float:
        """The share of the peak of matrix products in bfloat16 that the step's operations are."""
        return self.flops / self.seconds / self.hardware.peak(torch.bfloat16)

    def __repr__(self) -> str:
        total = sum(self.parts.values()) or 1.0
        rows = [(name, f"{1e3 * s:.1f}", f"{100 * s / total:.0f} %") for name, s in self.parts.items() if s > 0]
        axes = " × ".join(f"{axis} {n}" for axis, n in self.spec.axes.items())
        sent = ", ".join(f"{axis} {bytes_text(n)}" for axis, n in self.traffic.items()) or "nothing"
        fits = "" if self.fits else f", which {self.hardware.name} ({bytes_text(self.hardware.memory)}) does not hold"
        measured = "" if self.hardware.measured else "; nobody has measured this hardware"
        said = f"{1e3 * self.seconds:.1f} ms a step on {self.hardware.name}, mesh {axes}"
        return (
            f"{said}: bound by {self.bound}{measured}\n"
            f"{table(('part', 'ms', 'share'), rows)}\n"
            f"received a rank: {sent}\npeak {bytes_text(self.peak)} a rank, {self.memory.where}{fits}"
        )


def predict(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Any,
    spec: Spec,
    optimizer: Any = None,
    *,
    hardware: str | Hardware = "H100",
    graph: bool = False,
    compiled: bool = False,
    microbatches: int = 1,
    links: Mapping[str, Link] | None = None,
    compute: Sequence[float] | None = None,
) -> Prediction:
    """Predict the seconds of a step of `T.forward_backward` and `step`, on each rank. Needs no GPU and no ranks.

    Args:
        model: with weights or without (built on the meta device); also one of `T.remat` or `T.offload`.
        loss_fn: `loss_fn(model, *batch)`.
        batch: a rank's, of one microbatch: a tensor, or a tuple of arguments; only shapes and dtypes count.
        spec: on a mesh of any size, as `Spec({"replica": 64, "shard": 8}, ...)`. Inner axes are within a host.
        optimizer: as for `shard`. Default: AdamW.
        hardware: "H100", "H200", "A100", "B200", or a `fsdp.Hardware`.
        graph: whether the step is a CUDA graph, which needs no host.
        compiled: whether units that come again are compiled: then these write nothing between elementwise kernels, and
            keep for the backward what the smallest cut keeps.
        microbatches: of a step.
        links: by axis, as `fsdp.measure_links` gives them; for axes left out those of the hardware.
        compute: seconds of each use, as `fsdp.measure_compute` gives them for this model, batch and units.

    Returns:
        a `Prediction`: seconds, a timeline by unit and lane, the peak, bytes by axis, and where it is bound.

    What is counted of compute are kernels by their operations and bytes; of the model's own collectives (experts,
    tensor parallelism) nothing. docs/benchmarks.md has predictions beside measurements. Main gradients are counted
    whole.

    Collective: none.

    Raises:
        ScheduleError: the loss function asks for a tensor's value.
        SpecError: an unknown hardware; `compute` of another number of uses.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, device="meta") for _ in range(4)))
        >>> spec = Spec({"data": 8}, precision=fsdp.Precision(compute=torch.bfloat16))
        >>> batch = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
        >>> found = predict(model, lambda model, x: model(x).square().mean(), batch, spec, hardware="H100", graph=True)
        >>> found.bound, found.traffic == {"data": 939524096}
        ('compute', False)

    Source: the roofline of Williams, Waterman and Patterson 2009 (CACM 52:4), kernel by kernel.
    """
    found = rehearsed(model, loss_fn, batch, spec, optimizer, compiled)
    if compute is not None:
        found = found.with_seconds(compute)
    return predicted(found, spec, optimizer, hardware, graph, compiled, microbatches, links)


def prepared(
    model: nn.Module, loss_fn: Callable[..., Any], batch: Any, spec: Spec, optimizer: Any
) -> tuple[Any, State, tuple[Any, ...]]:
    """A `T.forward_backward`, an abstract state, and arguments."""
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"expected a module, not {getattr(model, '__name__', type(model).__name__)}. Build it where it has no "
            "memory: with torch.device('meta')."
        )
    state = abstract_state(abstract(model), spec, _optimizer(optimizer), buffers=_buffers(model))
    return above().forward_backward(model, loss_fn), state, batch if isinstance(batch, tuple) else (batch,)


def rehearsed(
    model: nn.Module, loss_fn: Callable[..., Any], batch: Any, spec: Spec, optimizer: Any = None,
    compiled: bool = False,
) -> Rehearsal:  # fmt: skip
    """Run the model once with tensors that have no memory. The mesh, the transport and the placement are of no account;
    units and precision are."""
    forward_backward, state, args = prepared(model, loss_fn, batch, spec, optimizer)
    forward_backward = forward_backward.on_paper(state, args)
    rehearse = above("step_memory").rehearse
    counter = Counter()
    found = rehearse(forward_backward, state, args, {}, "predict", imagined=True, counter=counter)
    again = None
    if compiled:
        forward, repeated = len(found.forward), _repeated(state.layout)
        uses = [i for i, lap in enumerate(found.laps[:forward]) if repeated.issuperset(lap.units)]
        less = spared(counter.log, forward, uses)
        again = found
        if any(less):
            again = rehearse(
                forward_backward, state, args, {}, "predict", imagined=True, counter=Counter(), spared=less
            )
    return replace(rehearsal_of(found, model), compiled=again)


def rehearsal_of(found: Any, model: nn.Module) -> Rehearsal:
    """From what the driver found."""
    return Rehearsal(found, tuple(lap.work for lap in found.laps), abstract(model), _buffers(model))


def _buffers(model: nn.Module) -> dict[str, Any]:
    return {path: held[name] for path, held, name in every_buffer(model)}


def predicted(
    found: Rehearsal, spec: Spec, optimizer: Any = None, hardware: str | Hardware = "H100", graph: bool = False,
    compiled: bool = False, microbatches: int = 1, links: Mapping[str, Link] | None = None,
) -> Prediction:  # fmt: skip
    """Of a rehearsal, for this spec."""
    machine = Hardware.named(hardware)
    state = found.state(spec, _optimizer(optimizer))
    layout = state.layout
    plan, _ = found.found.plan(state)
    traffic = Traffic(layout, spec, machine, links)
    costs = costs_of(found, state, plan, traffic, machine, graph, compiled, microbatches)
    run = play(plan, traffic, costs, machine)
    memory = (found.compiled if compiled and found.compiled is not None else found.found).memory(state)
    flops = microbatches * sum(work.flops for work in found.works)
    compute = microbatches * sum(costs.device)
    parts = {"compute": compute, "slowed": run.slowed, **run.waits}
    rest = run.seconds - sum(parts.values())
    parts["update"] = parts.get("update", 0.0) + max(0.0, rest)
    return Prediction(
        run.seconds, Timeline(tuple(sorted(run.spans, key=lambda s: (s.begin, s.end)))), memory,
        _received(plan, traffic, costs), flops, parts, _bound(run, parts, layout, traffic), machine, spec, plan,
    )  # fmt: skip


def costs_of(
    found: Rehearsal, state: State, plan: Plan, traffic: Traffic, hardware: Hardware, graph: bool, compiled: bool,
    microbatches: int,
) -> Costs:  # fmt: skip
    """What the lanes are given."""
    layout, spec = state.layout, state.spec
    again = _repeated(layout) if compiled else frozenset()
    works, groups = found.works, plan.groups
    units = [plan.uses[first].unit for first, _ in groups]
    device = [w.seconds(hardware, unit in again) for w, unit in zip(works, units, strict=True)]
    issued = [0.0] * len(works)
    last = hardware.replay if graph else 0.0
    if not graph:
        one = hardware.use if plan.arena or len(plan.reductions) else 0.0
        issued = [w.host_seconds(hardware, unit in again) + one for w, unit in zip(works, units, strict=True)]
        last = hardware.use * len(layout.trainable) / 4
    near, _ = state_bytes(state)
    main = near.get("main weights", 0)
    ratio = near.get("optimizer state", 0) / main if main else 2.0
    updates = {} if state.optimizer is None else {unit.name: traffic.update(unit, ratio) for unit in layout.units}
    on_host = [b for b in layout.trainable.values() if b.on_host]
    streamed = int(sum(b.nbytes("main") * (1 + ratio) + b.nbytes("grads") for b in on_host))
    return Costs(
        device, issued, updates, spec.schedule.overlap_update, microbatches, plan.stays, found.found.moved,
        streamed, last,
    )  # fmt: skip


def abstract(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters without values, tied ones the same."""
    params = dict(model.named_parameters(remove_duplicate=False))
    aliases = aliases_of(model)
    made = {
        path: torch.empty(p.size(), dtype=p.dtype, device="meta").requires_grad_(_trains(p))
        for path, p in params.items()
        if path not in aliases
    }
    return {path: made[aliases.get(path, path)] for path in params}


def _trains(p: torch.Tensor) -> bool:
    with NoTorchFunction():  # of a placeholder
        return p.requires_grad


def _optimizer(optimizer: Any) -> Any:
    return adamw(lr=1e-3) if optimizer is None else optimizer


def _repeated(layout: Layout) -> frozenset[str]:
    """Units whose leaves have the shapes of another unit's: what is compiled."""
    shapes = {unit.name: tuple(leaf.shape for b in unit.buckets for leaf in b.leaves) for unit in layout.units}
    times = Counts(shapes.values())
    return frozenset(name for name, one in shapes.items() if times[one] > 1)


def _received(plan: Plan, traffic: Traffic, costs: Costs) -> dict[str, int]:
    found: dict[str, int] = {}
    gathers = [(g.unit, 1 if g.unit in costs.stays else costs.microbatches) for g in plan.gathers]
    transfers = [(traffic.gather(unit), times) for unit, times in gathers]
    transfers += [(traffic.reduce(r.unit), costs.microbatches) for r in plan.reductions]
    for transfer, times in [*transfers, (traffic.refresh, 1)]:
        for axis, n in transfer.received:
            found[axis] = found.get(axis, 0) + n * times
    return found


def _bound(run: Run, parts: Mapping[str, float], layout: Layout, traffic: Traffic) -> str:
    waits = {name: s for name, s in parts.items() if name not in ("compute", "slowed")}
    worst = max(waits, key=lambda name: waits[name], default="")
    if not worst or waits[worst] < 0.15 * run.seconds:
        return "compute"
    if worst in ("gather", "reduce"):
        seconds: dict[str, float] = {}
        for unit in layout.units:
            for _, axis, s in getattr(traffic, worst)(unit.name).legs:
                seconds[axis] = seconds.get(axis, 0.0) + s
        axis = max(seconds, key=lambda name: seconds[name], default="")
        return f"{worst}s along {axis!r}" if axis else f"{worst}s"
    return {"host": "the host", "update": "updates", "copies": "copies to the host's memory"}.get(worst, worst)


SMALL, LARGE, MOST, ROUNDS = 1 << 10, 1 << 24, 1 << 29, 5  # elements: of a rank, of all ranks; and how often
LONGER = 8  # times what the small one takes: then noise of the host is no part of the bandwidth


def measure_links(mesh: DeviceMesh) -> dict[str, Link]:
    """Latency and bandwidth along each axis of a mesh, for `fsdp.predict(links=)`. The same on every rank.

    Args:
        mesh: with named axes, as `fsdp.local_mesh()`.

    Returns:
        a `Link` an axis of more than one rank: seconds a hop, bytes received a second. Each is the middle one of five
        rounds, on the slowest rank: an all-gather of 1024 elements in bfloat16 a rank, and one of 32 MiB in all, or as
        many more, up to 1 GiB, as take 8 times as long.

    Collective: six all-gathers of each size along each axis, on the compute lane, and an exchange on the host.

    Raises:
        SpecError: the mesh is a mapping: it has no ranks.

    Example: `fsdp.predict(model, loss_fn, batch, spec, links=fsdp.measure_links(fsdp.local_mesh()))`.
    """
    run = runtime_of(mesh)
    return {axis: _measured(run, axis, ranks) for axis, ranks in run.sizes.items() if ranks > 1}


def _measured(run: Runtime, axis: str, ranks: int) -> Link:
    short = _slowest(run, axis, ranks, SMALL)
    size = max(LARGE // ranks, SMALL)
    long = _slowest(run, axis, ranks, size)
    while long < LONGER * short and 2 * size * ranks <= MOST:
        size *= 2
        long = _slowest(run, axis, ranks, size)
    received = 2 * (ranks - 1) * (size - SMALL)
    return Link(short / (ranks - 1), received / max(long - short, long / LONGER))


def _slowest(run: Runtime, axis: str, ranks: int, size: int) -> float:
    """What it takes on the slowest rank of the mesh."""
    return max(run.everyone(_seconds(run, axis, ranks, size), "links"))


def _seconds(run: Runtime, axis: str, ranks: int, size: int) -> float:
    """Of an all-gather of so many elements of each rank."""
    whole = torch.zeros(size * ranks, dtype=torch.bfloat16, device=run.device)
    at = run.coordinate[axis]
    own = whole[at * size : (at + 1) * size]
    hop = Collective("all_gather", axis, size * ranks, torch.bfloat16, "", "side", "links")
    found = []
    for _ in range(ROUNDS + 1):
        whole[0].item()  # until the device is idle
        begun = time.perf_counter()
        run.now(hop, whole, own)
        whole[0].item()
        found.append(time.perf_counter() - begun)
    return sorted(found[1:])[ROUNDS // 2]


_KEPT: dict[Any, tuple[float, ...]] = {}


def measure_compute(
    model: nn.Module, loss_fn: Callable[..., Any], batch: Any, spec: Spec, *, rounds: int = 3
) -> tuple[float, ...]:
    """Measure what each use of a unit computes, on this process's GPU, or on the CPU: for `fsdp.predict(compute=)`.

    Args:
        model, loss_fn, spec: as for `fsdp.predict`; the mesh is of no account. Weights are not used: units compute with
            random ones, those that are alike with the same.
        batch: a rank's, with values (tokens are looked up).
        rounds: passes that are measured, after two that are not; of each use the median counts.

    Returns:
        seconds of each use, forward and then backward. They are of eager kernels, each use begun on an idle device: of
        units so small that the host is the slower one, they are the host's. What was measured once in this process is
        given again for the same shapes.

    Memory: one unit of each kind, and what the whole model keeps for its backward.

    Collective: none.

    Raises:
        ScheduleError: nothing to differentiate.

    Example: `seconds = fsdp.measure_compute(model, loss_fn, batch, spec)`; `fsdp.predict(model, loss_fn, batch, spec,
    compute=seconds)`.
    """
    device = best_device()
    args = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), batch if isinstance(batch, tuple) else (batch,))
    forward_backward, state, args = prepared(model, loss_fn, args, spec, None)
    shapes = [(tuple(t.shape), t.dtype) for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    key = device_name(), state.layout.hash, repr(model), str(shapes), rounds
    if key not in _KEPT:
        _KEPT[key] = above("_drive.rehearsal").clocked(forward_backward, state, args, {}, rounds)
    return _KEPT[key]
