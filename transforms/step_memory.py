"""step_memory: what a driven step takes where it takes most, part by part, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from functional_fsdp import Plan, ScheduleError, SpecError, State
from functional_fsdp._seams import (
    StepMemory,
    Stretch,
    find_peak,
    plan_for,
    refuse_values,
    steps_on,
    torch_private,
)
from functional_fsdp.extend import every_buffer, evolve, state_bytes

from ._drive.driver import Driver
from ._drive.forward_backward import ForwardBackward
from ._drive.rehearsal import Alive, ImaginedKernels, Lap, Rehearsal, moves, weights_of

__all__ = ["Rehearsed", "rehearse", "step_memory"]

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
        except RuntimeError as error:
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
