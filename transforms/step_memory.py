"""A step rehearsed without computing, and what its largest moment holds.

    Rehearsal         a forward and a backward with tensors that have no memory
    ImaginedKernels   the operations that a GPU would choose, on the meta device
    Clock, clocked    the same on this device, with seconds
    step_memory       the largest moment, part by part

`Rehearsal`: a forward and a backward of a driven model with tensors that have no memory, to see how much they keep.

Torch's fake tensors stand for weights, inputs and everything that is computed. The driver is the one that trains, so
activations live as long as in a step: what is recomputed or moved to the host is so here. Nothing is gathered, reduced
or drawn.

`ImaginedKernels`: within this mode tensors on the meta device go through the operations that a GPU would choose.

Without it attention and RMSNorm on the meta device are what a CPU makes of them: many operations, and more that is kept
for the backward. Of each operation here shapes, dtypes and what is kept for the backward are those of the kernel.

`clocked`: a forward and a backward of a driven model on this device, by one rank, with the seconds of each use.

Weights are random numbers (on zeros a GPU is faster), in the compute dtype. Units whose leaves are alike have the same
ones, so that a model that no device holds can be measured; what it keeps for its backward has to fit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from functional_fsdp import Layout, PackedWeight, Plan, ScheduleError, SpecError, State
from functional_fsdp._seams import (
    HostBuffer,
    StepMemory,
    Stretch,
    find_peak,
    plan_for,
    refuse_values,
    steps_on,
    torch_private,
)
from functional_fsdp.extend import CopyLane, HostBuffers, Loan, every_buffer, evolve, state_bytes

from ._drive.driver import Driver, NoSession
from ._drive.forward_backward import ForwardBackward
from ._drive.unit_uses import Gradients

BLOCK = 512  # bytes: what GPUs' allocators round up to


class Alive(torch_private.OperationMode):
    """Counts the bytes of tensors that operations make, while they live: `now`, and the most since `lap`."""

    def __init__(self, device: torch.device, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.kind = device.type
        self.now = self.most = 0
        self.known = {t.untyped_storage()._cdata for t in known}  # which are not counted

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        for t in torch_private.pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type == self.kind and t.layout is torch.strided:
                storage = t.untyped_storage()
                if storage._cdata not in self.known:
                    size = -(-storage.nbytes() // BLOCK) * BLOCK
                    self.known.add(storage._cdata)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def lap(self) -> int:
        """The most bytes alive since the last lap."""
        most, self.most = self.most, self.now
        return most


class ImaginedBuffers(HostBuffers):
    """Buffers in the host's memory that have no memory."""

    def take(self, nbytes: int, lane: CopyLane) -> HostBuffer:
        self.nbytes += nbytes
        with torch_private.disable_current_modes():
            return HostBuffer(nbytes, 0, torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def give(self, taken: HostBuffer) -> None:
        pass


@contextmanager
def imagined_buffers(model: nn.Module) -> Iterator[ImaginedBuffers]:
    """Within, what parts of the model move to the host goes to `ImaginedBuffers`, whose `nbytes` says how much."""
    imagined = ImaginedBuffers()
    parts = [vars(module).get("_part") for module in model.modules()]
    owners = {id(part.owner): part.owner for part in parts if part is not None}
    before = {key: owner.buffers for key, owner in owners.items()}
    try:
        for owner in owners.values():
            owner.buffers = imagined
        yield imagined
    finally:
        for key, owner in owners.items():
            owner.buffers = before[key]


def moves(model: nn.Module) -> bool:
    """Whether parts of a model move something to the host's memory."""
    parts = [vars(module).get("_part") for module in model.modules()]
    return any(part is not None and part.fate == "offload" for part in parts)


class Lap(NamedTuple):
    """What the model did from one gather to the next: the units of the gather, what the counter gives, and the bytes
    that were alive at its end."""

    units: tuple[str, ...]
    work: Any
    alive: int


class Rehearsal(Driver):
    """A driver of weights that are all there: `note(unit)` is called where the gradients of a unit are complete."""

    def __init__(
        self, model: nn.Module, device: torch.device, weights: dict[str, dict[str, torch.Tensor]], holds: bool
    ) -> None:
        super().__init__(model)
        self.place, self.made, self.holds = device, weights, holds
        self.loans = [Loan(unit, lent) for unit, lent in weights.items()]  # so that nobody takes them for activations
        self.moved = 0  # bytes of activations that went to the host's memory
        self.held: Gradients | None = None  # of the unit before: on GPUs they live until they were copied
        self.completed: Callable[[str], None] = lambda unit: None
        self.counter: Any = None  # has `lap()`, which gives what was done since the last one
        self.laps: list[Lap] = []
        self.alive: Any = None  # an `Alive`
        self.gathered: tuple[str, ...] = ()
        self.spare(())

    @contextmanager
    def running(self, state: State, verb: str, trains: bool = False) -> Iterator[int]:
        self._stop()
        self.attach(state)
        self.device = self.place
        self.debug = False
        try:
            self.state, self.session = state, NoSession()
            with imagined_buffers(self.model) as buffers:
                yield 0
                self.moved = buffers.nbytes
        finally:
            self.held = None
            self._stop()

    def spare(self, nbytes: Sequence[int]) -> None:
        """What uses of the forward keep more than is seen, until their backward."""
        self.spared = nbytes
        self.kept_more: dict[tuple[str, ...], list[int]] = {}

    def fetch(self, units: tuple[str, ...], off_plan: Set[str]) -> None:
        if self.gathered:
            self.lap()
        self.gathered = units
        if self.differentiating and self.kept_more.get(units):
            self.alive.now -= self.kept_more[units].pop()
        self.weights.update({unit: self.made[unit] for unit in units})

    def lap(self) -> None:
        """The use of the units that were gathered last is over."""
        if self.counter is not None:
            if not self.differentiating and len(self.laps) < len(self.spared):
                more = self.spared[len(self.laps)]
                self.alive.now += more
                self.kept_more.setdefault(self.gathered, []).append(more)
            self.laps.append(Lap(self.gathered, self.counter.lap(), self.alive.now if self.alive else 0))

    def release(self, units: tuple[str, ...] | None = None) -> None:
        for unit in tuple(self.weights) if units is None else units:
            del self.weights[unit]

    def _reduce(self, unit: str, grads: Gradients | None) -> None:
        self.completed(unit)
        self.held = grads if self.holds else None


def weights_of(layout: Layout, device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    """Whole weights of every unit in the compute dtype, by name in the unit. Made where fake tensors are."""
    made: dict[str, dict[str, torch.Tensor]] = {}
    for unit in layout.units:
        leaves: dict[str, torch.Tensor] = {}
        for b in unit.buckets:
            for leaf in b.gathered.leaves:
                whole = torch.empty(leaf.shape, dtype=b.gathered.compute, device=device)
                leaves[leaf.path] = whole if leaf.form is None else PackedWeight(whole, leaf.form)
        made[unit.name] = {key: leaves[path] for key, path in zip(unit.keys, unit.paths, strict=True)}
    return made


HALF = (torch.bfloat16, torch.float16)


class ImaginedKernels(TorchFunctionMode):
    """See the top of this file. What is made on no device in particular is on this one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.made = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func in (torch.rms_norm, F.rms_norm):
            return rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        self.made.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            self.made.__exit__(*error)


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Flash attention in half precision, without a mask; else the memory-efficient one."""
    if attn_mask is None and query.dtype in HALF:  # which takes fewer heads of keys and values as they are
        return torch_private.flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    shape = (*query.shape[:-1], key.shape[-2])
    bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(shape)
    keeps = any(t.requires_grad for t in (query, key, value))
    return torch_private.efficient_attention(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]


def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """One kernel, which keeps its input and a number for each row."""
    return Norm.apply(input, weight, len(normalized_shape))


class Norm(torch.autograd.Function):
    """What a fused norm reads, writes and keeps."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, dims: int) -> Any:
        rows = x.new_empty(x.shape[:-dims], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return x * rows[(..., *[None] * dims)].to(x.dtype) if weight is None else x * weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return grad * x, None if weight is None else torch.empty_like(weight), None


WARM = 2  # passes before the clock counts


class Clock:
    """`lap()` gives the seconds since the last one, when the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.probe = torch.zeros((), device=device)
        self.since = perf_counter()

    def lap(self) -> float:
        self.probe.item()
        before, self.since = self.since, perf_counter()
        return self.since - before


def clocked(forward_backward: ForwardBackward[Any], state: State, args: Any, rounds: int) -> tuple[float, ...]:
    """Seconds of each use, the median over rounds."""
    driver = forward_backward.driver
    if not isinstance(driver, Driver):
        raise ScheduleError("measure_compute: of forward_backward(second_order=True) it is not known. Leave that out.")
    where, holds = steps_on(state)
    rehearsal = Rehearsal(driver.bare(), where, _weights(state.layout, where), holds)
    rehearsal.counter = Clock(where)
    for _, held, name in every_buffer(rehearsal.model):
        held[name] = held[name].to(where)
    found: list[list[float]] = []
    for _ in range(WARM + rounds):
        rehearsal.laps, rehearsal.gathered = [], ()
        with rehearsal.running(state, "measure_compute", trains=True):
            rehearsal.counter.lap()
            forward_backward.rehearse(rehearsal, args, {})
            rehearsal.lap()
        found.append([lap.work for lap in rehearsal.laps])
    return tuple(median(some) for some in zip(*found[WARM:], strict=True))


def _weights(layout: Layout, device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    """Random weights of every unit, those of units that are alike the same."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[Any, dict[str, torch.Tensor]] = {}
    found = {}
    for unit in layout.units:
        leaves = {leaf.path: (leaf.shape, b.compute) for b in unit.buckets for leaf in b.leaves}
        alike = tuple((key, *leaves[path]) for key, path in zip(unit.keys, unit.paths, strict=True))
        if alike not in made:
            made[alike] = {
                key: torch.randn(shape, device=device, generator=generator).mul_(max(shape[-1:], default=1) ** -0.5)
                .to(dtype) for key, shape, dtype in alike
            }  # fmt: skip
        found[unit.name] = made[alike]
    return found


pytree = torch_private.pytree


def step_memory(forward_backward: ForwardBackward[Any], state: State, *args: Any, **kwargs: Any) -> StepMemory:
    """Predict the peak of a step on each rank, and what it is made of. Nothing is computed, sent or allocated.

    Args:
        forward_backward: of `T.forward_backward`; its model may be one of `T.remat` or `T.offload`. For `T.accumulate`:
            what it was made of, with one microbatch.
        state: any State between steps; or an `abstract_state` one, of a mesh of any size. Of that the kernels are those
            of the GPU where there is one, else of the CPU, which keep other tensors.
        args, kwargs: a batch, as for `forward_backward`; only shapes and dtypes count.

    Returns:
        `.peak` in bytes, `.parts` by name, `.where`; printing it gives a table. *activations* is all that the model
        keeps and makes: activations, temporaries, and gradients until they are on their way. *sums* is what exact sums
        receive.

    Not counted: what torch's libraries keep for themselves, blocks that the allocator has split badly, what a graph of
    compiled units spares (compiled units are counted as if they were not), the two buffers of an update that streams
    from the host's memory. Of a step of several microbatches it is the first. Main gradients are counted whole, which
    a CUDA graph with `Schedule(overlap_update=True)` need not keep.

    Collective: none.

    Raises:
        ScheduleError: the loss function asks for a tensor's value; with `second_order=True`. SpecError: a function
        that `T.forward_backward` has not made.

    Example: `print(T.step_memory(forward_backward, state, batch))`.

    Source: torch's FakeTensorMode ("Fake tensor" in PyTorch's documentation).
    """
    found = rehearse(forward_backward, state, args, kwargs, "step_memory")
    return found.memory(state)


class Rehearsed(NamedTuple):
    """What a rehearsal of a driven step found.

    Attributes:
        stretches: see `Stretch`.
        forward, backward: the units in order of use.
        moved: bytes of activations that go to the host's memory and come back.
        laps: what each use computed, where there was a counter.
        gpu: whether it was as on GPUs.
    """

    stretches: tuple[Stretch, ...]
    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    moved: int
    laps: tuple[Lap, ...]
    gpu: bool

    def plan(self, state: State) -> tuple[Plan, bool]:
        """The plan of a state's steps, and whether its transport keeps its memory."""
        schedule = state.spec.schedule
        if schedule.order is None or schedule.order == "recorded":
            schedule = schedule.ordered([*self.forward, *self.backward])
        return plan_for(state, schedule, len(self.forward))

    def memory(self, state: State) -> StepMemory:
        """The peak of a step of this state."""
        plan, keeps = self.plan(state)
        on_device, on_host = state_bytes(state)
        return find_peak(
            state.layout, plan, on_device, self.stretches, host=on_host, moved=self.moved,
            keeps_memory=keeps, gpu=self.gpu,
        )  # fmt: skip


def rehearse(
    forward_backward: ForwardBackward[Any], state: State, args: Any, kwargs: Any, verb: str, *, imagined: bool = False,
    counter: Any = None, spared: Sequence[int] = (),
) -> Rehearsed:  # fmt: skip
    """Run a step with tensors that have no memory.

    Args:
        imagined: the kernels are those of a GPU, which need not be there; else those of the device of the state, or of
            the best there is.
        counter: a dispatch mode, which sees the operations, and whose `lap()` is called after each use, and `begin()`
            before the first one.
        spared: by use of the forward, bytes that it keeps more than was seen, until its backward.
    """
    if not isinstance(forward_backward, ForwardBackward):
        raise SpecError(
            f"{verb}: expected what T.forward_backward(model, loss_fn) gives, and got a "
            f"{type(forward_backward).__name__}. Of T.accumulate give the function that it was made of, and one "
            "microbatch."
        )
    driver = forward_backward.driver
    if not isinstance(driver, Driver):
        raise ScheduleError(f"{verb}: of forward_backward(second_order=True) it is not known. Leave that out.")
    if forward_backward.budget is not None:
        trial, ways = forward_backward.budget.locally(forward_backward, state, args, kwargs, imagined)
        forward_backward.choice = trial.described(ways)  # until the first call, in which all ranks choose
        found: Rehearsed = trial.rehearsed(ways)
        return found
    # A model may ask fake tensors alone for no values: transformers looks into all others for packed sequences.
    for fakes in (True,) if not imagined or moves(driver.model) else (False, True):
        try:
            return _rehearse(forward_backward, state, args, kwargs, verb, imagined, fakes, counter, spared)
        except (RuntimeError, AttributeError) as error:
            if fakes or "meta" not in str(error).lower():
                refuse_values(error, verb)
                raise
    raise AssertionError("either way returns or raises")


def _rehearse(
    forward_backward: ForwardBackward[Any], state: State, args: Any, kwargs: Any, verb: str, imagined: bool,
    fakes: bool, counter: Any, spared: Sequence[int],
) -> Rehearsed:  # fmt: skip
    where, gives_back = steps_on(state)
    if imagined:
        where, gives_back = (torch.device("cpu") if fakes else torch.device("meta")), True
    driver, layout = forward_backward.driver, state.layout
    assert isinstance(driver, Driver)
    mode = torch_private.fakes_that_die(not moves(driver.model)) if fakes else nullcontext()
    kernels = ImaginedKernels(where) if imagined else nullcontext()
    with mode:
        weights = weights_of(layout, where)
    rehearsal = Rehearsal(driver.bare(), where, weights, holds=gives_back)
    with torch.compiler.set_stance("force_eager"), mode, kernels:
        own = [(held, name) for _, held, name in every_buffer(rehearsal.model)]
        for held, name in own:
            held[name] = _alike(held[name], where)
        lent = evolve(state, buffers=pytree.tree_map_only(torch.Tensor, lambda t: _alike(t, where), state.buffers))
        given, keywords = pytree.tree_map_only(torch.Tensor, lambda t: _alike(t, where), (args, kwargs))
        known = [*pytree.tree_leaves((given, keywords)), *(w for one in weights.values() for w in one.values())]
        known += [*pytree.tree_leaves(lent.buffers), *(held[name] for held, name in own)]

        def run() -> Rehearsed:
            stretches: list[Stretch] = []
            alive = Alive(where, [t for t in known if isinstance(t, torch.Tensor)])
            rehearsal.completed = lambda unit: stretches.append(Stretch(unit, alive.lap()))
            rehearsal.counter, rehearsal.laps, rehearsal.gathered, rehearsal.alive = counter, [], (), alive
            rehearsal.spare(spared)
            if counter is not None:
                counter.begin()
            with rehearsal.running(lent, verb, trains=True), alive, counter or nullcontext():
                forward_backward.rehearse(rehearsal, given, keywords)
                forward, backward = rehearsal.trace
                rehearsal.lap()
            stretches.append(Stretch("", alive.lap()))
            laps = tuple(rehearsal.laps)
            return Rehearsed(tuple(stretches), (*forward,), (*backward,), rehearsal.moved, laps, gives_back)

        found = run()
        return run() if found.moved else found  # where there is room for it is known from the second step on


def _alike(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
