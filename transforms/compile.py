"""compile: a whole train step as one compiled graph, gathers, reductions and update included.

torch.compile(train_step, fullgraph=True)   a unit's backward computes its forward again, from the second gather
T.compile(train_step)                       it does not: the forward's residuals are read from the second gather
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from functional_fsdp import FsdpError, ScheduleError, SpecError, State
from functional_fsdp.extend import (
    begin_compiled,
    custom_backwards,
    keeping,
    outside_inference,
    point_at_second_gathers,
    torch_private,
)

__all__ = ["compile"]

F = TypeVar("F", bound=Callable[..., Any])
BACKENDS = ("inductor", "aot_eager")
#: the step's own order is the plan's: gathers one use ahead, reductions waited for when the next one comes
ORDERED = {"reorder_for_peak_memory": False, "reorder_for_locality": False}


def compile(train_step: F, backend: str = "inductor", **config: Any) -> F:
    """Compile `train_step(state, ...)` whole: one graph, no break, no recomputation.

    Args:
        train_step: state first in, state first out, in the first or the second way; it ends with `step`.
        backend: "inductor", or "aot_eager", which runs the graph as it is: to look at, and for tests.
        config: Inductor's settings (`torch._inductor.config`), as `max_autotune=True`.

    Returns:
        the compiled function. The first call compiles; calls with other shapes compile again. It takes any state
        between steps, and gives one: eager and compiled steps may follow each other as you like. The state's buffers
        are updated in place, as by `step`, which consumes the state that went in.

    Which leaves get no gradient is a part of the graph: those for which `reduce` is given None, or whose unit is not
    reduced, keep their weights and moments (`T.vjp` is torch.func's here, whose zeros are gradients). Ranks cannot ask
    each other in a graph, so None has to stand at the same leaves on every rank that shares them; ranks compare that,
    on the host, when a step is first compiled, and it is an error where they differ.

    Beside `torch.compile(train_step, fullgraph=True)`, which works too, this saves the second forward that
    keeping no more than a few units gathered would cost there (`T.vjp` recomputes when it is traced), and keeps
    Inductor from moving a gather to where it is waited for, as it does to save memory: the order is the schedule's.

    Raises:
        SpecError: an unknown backend. When called: SpecError if no State comes first, StaleStateError for a state that
            was consumed, ScheduleError for one in the middle of a step.

    Source: torch.compiler's documentation; custom passes of Inductor (`torch._inductor.config`).

    Example:
        >>> train_step = T.compile(train_step)  # doctest: +SKIP
        >>> state, loss = train_step(state, batch)  # doctest: +SKIP
    """
    if backend not in BACKENDS:
        raise SpecError(
            f"compile(backend={backend!r}): expected one of {', '.join(map(repr, BACKENDS))}. Others work with "
            "torch.compile(train_step, fullgraph=True, backend=...), which computes a unit's forward twice."
        )
    compiled = torch.compile(train_step, fullgraph=True, dynamic=False, backend=_backend(backend, config))
    checked: set[Any] = set()

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
                "train_step(state, ...). A step of several states, or of a method: torch.compile(..., fullgraph=True)."
            )
        begin_compiled(state)
        signature = _signature(args, kwargs)
        if signature not in checked:
            _refuse_custom_backwards(train_step, state, args, kwargs)
            checked.add(signature)
        with keeping(True):
            return compiled(state, *args, **kwargs)

    return cast(F, outside_inference(run))


def _signature(args: Any, kwargs: Any) -> Any:
    """Equal for calls that are traced alike: shapes and dtypes of tensors, and everything else as it prints."""
    leaves, treedef = torch_private.pytree.tree_flatten((args, kwargs))
    return treedef, tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)


def _refuse_custom_backwards(train_step: Callable[..., Any], state: State, args: Any, kwargs: Any) -> None:
    """torch's compiler drops the backward of an autograd.Function under torch.func, without a word: wrong gradients."""
    try:
        found = custom_backwards(train_step, state, *args, **kwargs)
    except FsdpError:  # as the step itself would raise
        raise
    except (RuntimeError, NotImplementedError) as error:  # it reads a tensor's value, say: the compiler may know it
        warnings.warn(
            "compile: the step could not be searched for torch.autograd.Functions, whose backward torch.compile drops "
            f"under torch.func: {str(error)[:200]}",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    if found:
        raise ScheduleError(
            f"compile: the step uses the torch.autograd.Function {', '.join(found)}. Under torch.func, torch.compile "
            "ignores its backward and gives other gradients without an error. Write it with plain operations, or "
            "run this step eagerly."
        )


def _backend(name: str, config: dict[str, Any]) -> Callable[..., Any]:
    if name == "aot_eager":

        def plain(module: torch.fx.GraphModule, inputs: Any) -> Any:
            point_at_second_gathers(module.graph)
            module.recompile()
            return module.forward

        return cast(Callable[..., Any], torch_private.dynamo().backends.common.aot_autograd(fw_compiler=plain))

    def compiled(module: torch.fx.GraphModule, inputs: Any) -> Any:
        settings = ORDERED | config
        settings["post_grad_custom_pre_pass"] = _inductors_pass()
        return torch_private.inductor().compile_fx.compile_fx(module, inputs, config_patches=settings)

    return compiled


def _inductors_pass() -> Any:
    """The pass as Inductor takes one."""
    passes = torch_private.inductor().custom_graph_pass

    class Pass(passes.CustomGraphPass):  # type: ignore[misc, name-defined]
        def __call__(self, graph: torch.fx.Graph) -> None:
            point_at_second_gathers(graph)

        def uuid(self) -> Any:
            return passes.get_hash_for_files((inspect.getfile(point_at_second_gathers),))

    return Pass()
