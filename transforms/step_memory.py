"""step_memory: what a driven step takes where it takes most, part by part, without running it."""

from __future__ import annotations

from typing import Any

import torch

from functional_fsdp import ScheduleError, State
from functional_fsdp._verbs.seams import (
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
from ._drive.rehearsal import Alive, Rehearsal, weights_of

__all__ = ["step_memory"]

pytree = torch_private.pytree


def step_memory(forward_backward: ForwardBackward[Any], state: State, *args: Any, **kwargs: Any) -> StepMemory:
    """Predict the peak of a step on each rank, and what it is made of. Nothing is computed, sent or allocated.

    Args:
        forward_backward: of `T.forward_backward`; its model may be one of `T.remat` or `T.offload`.
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
        ScheduleError: the loss function asks for a tensor's value; with `second_order=True`.

    Example: `print(T.step_memory(forward_backward, state, batch))`.

    Source: torch's FakeTensorMode ("Fake tensor" in PyTorch's documentation).
    """
    driver = forward_backward.driver
    if not isinstance(driver, Driver):
        raise ScheduleError("step_memory: of forward_backward(second_order=True) it is not known. Leave that out.")
    where, gives_back = steps_on(state)
    layout, schedule = state.layout, state.spec.schedule
    mode = torch_private.fakes_that_die()
    with mode:
        weights = weights_of(layout, where)
    rehearsal = Rehearsal(driver.bare(), where, weights, holds=gives_back)
    with torch.compiler.set_stance("force_eager"), mode:
        own = [(held, name) for _, held, name in every_buffer(rehearsal.model)]
        for held, name in own:
            held[name] = _alike(held[name], where)
        lent = evolve(state, buffers=pytree.tree_map_only(torch.Tensor, lambda t: _alike(t, where), state.buffers))
        given, keywords = pytree.tree_map_only(torch.Tensor, lambda t: _alike(t, where), (args, kwargs))
        known = [*pytree.tree_leaves((given, keywords)), *(w for one in weights.values() for w in one.values())]
        known += [*pytree.tree_leaves(lent.buffers), *(held[name] for held, name in own)]

        def rehearse() -> tuple[list[Stretch], tuple[list[Any], list[Any]]]:
            stretches: list[Stretch] = []
            alive = Alive(where, [t for t in known if isinstance(t, torch.Tensor)])
            rehearsal.completed = lambda unit: stretches.append(Stretch(unit, alive.lap()))
            with rehearsal.running(lent, "step_memory", trains=True), alive:
                forward_backward.rehearse(rehearsal, given, keywords)
                trace = rehearsal.trace
            return [*stretches, Stretch("", alive.lap())], trace

        try:
            stretches, (forward, backward) = rehearse()
            if rehearsal.moved:  # where there is room for it is known from the second step on
                stretches, (forward, backward) = rehearse()
        except RuntimeError as error:
            refuse_values(error, "step_memory")
            raise
    if schedule.order is None or schedule.order == "recorded":
        schedule = schedule.ordered([*forward, *backward])
    plan, keeps = plan_for(state, schedule, len(forward))
    on_device, on_host = state_bytes(state)
    return find_peak(
        layout, plan, on_device, stretches, host=on_host, moved=rehearsal.moved,
        keeps_memory=keeps, gpu=gives_back,
    )  # fmt: skip


def _alike(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
