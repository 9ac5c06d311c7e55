"""compile: a whole train step as one compiled graph, gathers, reductions and update included.

torch.compile(train_step, fullgraph=True)   a unit's backward computes its forward again, from the second gather
T.compile(train_step)                       it does not: the forward's residuals are read from the second gather

    ways 1 and 2   Dynamo reads the step's Python, and guards what it reads
    way 3          a driver decides as it runs, so what runs is traced, once (`_compile.whole_step`)

Which it is a first trace shows: whether the step has called `forward_backward` or `apply`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from functional_fsdp import ScheduleError, SpecError, State
from functional_fsdp._seams import (
    begin_compiled,
    expect,
    keep_residuals,
    outside_inference,
    point_at_second_gathers,
    torch_private,
)

from .code import named, through_inductor
from .startup import finish_start
from .whole_step import Programs

__all__ = ["compile"]

F = TypeVar("F", bound=Callable[..., Any])
BACKENDS = ("inductor", "aot_eager")


def compile(train_step: F, backend: str = "inductor", **config: Any) -> F:
    """Compile `train_step(state, ...)` whole: one graph, no break, no recomputation.

    Args:
        train_step: state first in, state first out, in any of the three ways; it ends with `step`.
        backend: "inductor", or "aot_eager", which runs the graph as it is: to look at, and for tests.
        config: Inductor's settings (`torch._inductor.config`), as `max_autotune=True`.

    Returns:
        the compiled function. The first call compiles; calls with other shapes compile again. It takes any state
        between steps, and gives one: eager and compiled steps may follow each other as you like. The state's buffers
        are updated in place, as by `step`, which consumes the state that went in. Other States may be among its
        arguments, each given once, and may be trained as well.

    Which leaves get no gradient is a part of the graph: those for which `reduce` is given None, or whose unit is not
    reduced, keep their weights and moments (`T.vjp` is torch.func's here, whose zeros are gradients). Ranks cannot ask
    each other in a graph, so None has to stand at the same leaves on every rank that shares them; ranks compare that,
    on the host, when a step is first compiled, and it is an error where they differ.

    Beside `torch.compile(train_step, fullgraph=True)`, which works for the first two ways, this saves the second
    forward that keeping no more than a few units gathered would cost there (`T.vjp` recomputes when it is traced), and
    keeps Inductor from moving a gather to where it is waited for, as it does to save memory: the order is the
    schedule's.

    A step that calls `T.forward_backward` or `T.apply` is traced as it runs, from tensors without values. Its Python
    runs then, and not again: a number that it reads elsewhere than among its arguments, and a step that counts in
    Python, stay what they were. Calls with other shapes, dtypes, structures, numbers, modes of the model, autograd or
    autocast modes are traced anew (a warning says so when they are many; the last 16 are kept). Gathers are issued in
    the order in which units are used, also if the structure of the model does not show it. Random numbers follow from
    (state.rng, state.count, rank, which draw it is), others than eager ones. Buffers, tied weights, activation
    checkpointing that is not reentrant, autograd.Functions and compiled units (as plain ones) work.

    Raises:
        SpecError: an unknown backend. When called: SpecError if no State comes first, or a tensor is sparse;
            StaleStateError for a state that was consumed.
        ScheduleError (when called): a state in the middle of a step; a custom autograd.Function in the first two ways.
            In the third: it asks for a tensor's value or for `state.steps`, or draws random numbers that a graph would
            have once and for all, or others in a recomputation (it names the line); ranks use units in another order;
            `find_nonfinite` or `second_order`. SpecError: a buffer changes that the state does not have;
            an argument that is neither a tensor nor fixed, as an iterator, an array or an object with attributes.

    Collective, when it compiles: an exchange on the host of which leaves have gradients, and of a driven step's
    collectives; when it runs, what the step issues.

    Source: torch.compiler's documentation; custom passes of Inductor (`torch._inductor.config`); `make_fx`.

    Example:
        >>> def train_step(state, batch):  # doctest: +SKIP
        ...     state, loss = forward_backward(state, batch)
        ...     return fsdp.step(state), loss
        >>> train_step = T.compile(train_step)  # doctest: +SKIP
    """
    if backend not in BACKENDS:
        raise SpecError(
            f"compile(backend={backend!r}): expected one of {', '.join(map(repr, BACKENDS))}. Others work with "
            "torch.compile(train_step, fullgraph=True, backend=...), which computes a unit's forward twice."
        )
    expect("compile(train_step)", train_step, Callable, "a function of (state, ...)")
    finish_start()
    programs = Programs(train_step, backend, config)
    inner = _backend(backend, config)

    def with_names(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return named(inner(module, inputs), programs.issued)

    compiled = torch.compile(train_step, fullgraph=True, dynamic=False, backend=with_names)

    @wraps(train_step)
    def run(state: State, *args: Any, **kwargs: Any) -> Any:
        if torch_private.func_interpreter() is not None:
            raise ScheduleError(
                "a compiled train step was called inside a torch.func transform, which cannot see through its "
                "collectives. Use the transform inside the step, between unshard and reduce."
            )
        if not isinstance(state, State):
            raise SpecError(
                f"the compiled train step got a {type(state).__name__} first; expected a State, as in "
                "train_step(state, ...). Other States may follow it. Of a method, give a function that calls it."
            )
        begin_compiled(state)
        program = programs.find(state, args, kwargs)
        if program is not None:
            return program()
        with keep_residuals(True):
            return compiled(state, *args, **kwargs)

    return cast(F, outside_inference(run))


def _backend(name: str, config: dict[str, Any]) -> Callable[..., Any]:
    if name == "aot_eager":

        def plain(module: torch.fx.GraphModule, inputs: Any) -> Any:
            point_at_second_gathers(module.graph)
            module.recompile()
            return module.forward

        return cast(Callable[..., Any], torch_private.dynamo().backends.common.aot_autograd(fw_compiler=plain))

    return lambda module, inputs: through_inductor(module, inputs, config, point_at_second_gathers)
