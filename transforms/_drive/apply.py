"""apply: any module's forward without gradients, gathered and released unit by unit, for evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, overload

import torch
import torch.nn as nn

from functional_fsdp import State
from functional_fsdp._seams import expect
from functional_fsdp.extend import alone, traced_as

from .._compile.compile_units import Options
from .._seed import seeded
from .buffers import Buffers
from .driver import Driver
from .placeholders import values
from .settings import Settings
from .traced_driver import graph_for, traced

Out = TypeVar("Out")  # what a function of a model returns


@overload
def apply(
    model: nn.Module, fn: Callable[..., Out], *, training: bool = False, compile: bool | Options = False
) -> Callable[..., tuple[State, Out]]: ...
@overload
def apply(
    model: nn.Module, fn: None = None, *, training: bool = False, compile: bool | Options = False
) -> Callable[..., tuple[State, Any]]: ...
def apply(
    model: nn.Module, fn: Callable[..., Any] | None = None, *, training: bool = False, compile: bool | Options = False
) -> Callable[..., tuple[State, Any]]:
    """A function that computes with the model: `f(state, *args, **kwargs) -> state, fn(model, *args, **kwargs)`.

    Args:
        model: as for `forward_backward`: copied, never touched.
        fn: what to do with it; by default it is called. It may call the model, or its methods, as often as it likes,
            also inside transforms of torch.func that differentiate by inputs.
        training: False puts the copy into evaluation mode, True follows the modes that the model has.
        compile: as for `forward_backward`. In generation lengths change: leave it out.

    Between steps the state is as good afterwards as before: it is returned as it was, with nothing gathered.

    Every rank must use the same units in the same order: in generation, let all ranks make the same number of tokens
    (in Hugging Face models `generate(..., synced_gpus=True)`, or equal lengths).

    Random numbers are those of (state.rng, step, rank), as in `forward_backward`. So every call on one state draws the
    same, as do states of one seed and step; the caller's own go on as they were. To sample anew, seed in `fn`: see the
    example.

    Collective: as `unshard` for each unit that is used; in the first call on a state of `shard(src=)` an exchange on
    the host, by which ranks compare buffers that are not in the state.

    Example:
        >>> predict = T.apply(model)
        >>> state, logits = predict(state, tokens)
        >>> generate = T.apply(model, lambda model, ids: model.generate(ids, max_new_tokens=20))
        >>> state, ids = generate(state, ids)
        >>> def sample(model, ids, seed):
        ...     torch.manual_seed(seed)  # for as long as `fn` runs
        ...     return model.generate(ids, max_new_tokens=20, do_sample=True)
        >>> state, ids = T.apply(model, sample)(state, ids, extend.seeds(state, "sample")(k, rank))
    """
    expect("apply(fn)", fn, Callable | None, "a function of (model, ...), or None")
    driven = Forward("apply", model, training, compile)

    def compute(model: nn.Module, args: Any, kwargs: Any) -> Any:
        return values(model(*args, **kwargs) if fn is None else fn(model, *args, **kwargs))

    def in_graph(state: State, *args: Any, **kwargs: Any) -> Any:
        """Where a graph is made of the step: on a copy of the model for this graph. What was gathered ahead, and is not
        used if the state goes back to what it was, is no part of the graph."""
        twin = traced(graph_for("apply"), applied, driven.driver, "local", driven.settings)
        with twin.driver.running(state, "apply"), torch.no_grad():
            twin.buffers.lend(state, twin.driver.device)
            try:
                out = compute(twin.driver.model, args, kwargs)
            finally:
                twin.buffers.restore()
            twin.driver.release()
            return state if state.between_steps else twin.driver.state, out

    @traced_as(in_graph)
    def applied(state: State, *args: Any, **kwargs: Any) -> tuple[State, Any]:
        return run(state, torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad, args, kwargs)

    def forward(state: State, mode: Callable[[], AbstractContextManager[Any]], args: Any, kwargs: Any) -> Any:
        """`mode`: in which the model computes; what is kept is made outside it."""
        with driven.running(state) as driver:
            with mode():
                out = compute(driver.model, args, kwargs)
            driver.release()
            session, state = driver.session, driver.state
        return session.rest(state), out

    run = alone(forward, "apply")
    return applied


class Forward:
    """A module that is driven, of whose buffers nothing is kept.

    Args:
        training: the copy follows the model's modes; else it is in evaluation mode.
    """

    def __init__(self, verb: str, model: nn.Module, training: bool = True, compile: bool | Options = False) -> None:
        self.verb, self.driver = verb, Driver(model, compile)
        if not training:
            self.driver.model.eval()
        self.buffers = Buffers(self.driver.model, "local")
        self.settings = Settings(verb, model, self.driver.model, modes=training)

    @contextmanager
    def running(self, state: State) -> Iterator[Driver]:
        """Within, the driver's model has this state's weights and buffers; the driver's state goes on from it."""
        self.settings.follow()
        driver = self.driver
        with driver.running(state, self.verb) as number, seeded(state, number), torch.no_grad():
            self.lend(state)
            try:
                yield driver
            finally:
                self.buffers.restore()

    def lend(self, state: State) -> None:
        """New copies of the state's buffers: within a level of torch.func's, such as may be changed there."""
        self.buffers.lend(state, self.driver.device, collects=False)
