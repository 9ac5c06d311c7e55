"""compile_report: whether compiled units are faster than eager ones in a step of yours, and where they are not.

    host     of each class that is compiled: what a call of its forward takes on the host, alone
    whole    forward and backward until the devices are done: what counts, since a device may hide what the host does

A call of compiled code begins with Dynamo's guards and goes through AOTAutograd's wrapper. Where a layer is short, and
the host what the device waits for, that may take longer than the kernels that it saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from functional_fsdp import SpecError, State, drop_gradients, finish_reductions
from functional_fsdp.extend import alone, check_between_steps, ranks_of

from ._compile.compile_units import Code, Compiler
from ._compile.startup import Clock
from ._drive.driver import Driver, eager_only
from ._drive.forward_backward import ForwardBackward

MARGIN, LEAST = 1.1, 50e-6  # what counts as slower: by this factor, and by so many seconds
SOME = 2  # graphs of a class that need no explanation: layers often alternate
WHOLE = 1.03  # and of forward and backward, where the clock sees less


@dataclass(frozen=True)
class ClassTimes:
    """What a forward call of a compiled class takes on this rank's host, in seconds: the median over calls and rounds.

    Attributes:
        name: the class. paths: its modules, by path.
        eager: as Python runs it. compiled: as it was compiled.
        graphs: how often it was compiled: in each way for itself, and since modules, inputs or modes differ. differ: in
            what, the last time; "" where they do not.
    """

    name: str
    paths: tuple[str, ...]
    eager: float
    compiled: float
    graphs: int = 1
    differ: str = ""

    @property
    def slower(self) -> bool:
        """Whether the compiled one is slower: 1.1 times as slow, and by 50 µs at least."""
        return self.compiled > MARGIN * self.eager and self.compiled - self.eager > LEAST


@dataclass(frozen=True)
class CompileReport:
    """What `compile_report` found on this rank. `print` shows a table, and what to do.

    Attributes:
        classes: of each class that is compiled, its forward on the host.
        eager: seconds of forward and backward until the devices are done, as Python runs the units: the median over
            rounds. compiled: as they were compiled.
    """

    classes: tuple[ClassTimes, ...]
    eager: float
    compiled: float

    @property
    def slower(self) -> bool:
        """Whether forward and backward are slower with compiled units, by 3 % at least."""
        return self.compiled > WHOLE * self.eager

    def __str__(self) -> str:
        width = max(12, *(len(one.name) for one in self.classes))
        lines = [f"{'class':{width}}  modules  graphs  eager ms  compiled ms   (the host, a forward call)"]
        for one in self.classes:
            times = f"{one.graphs:6}  {1e3 * one.eager:8.3f}  {1e3 * one.compiled:11.3f}"
            lines.append(f"{one.name:{width}}  {len(one.paths):7}  {times}{'   slower' if one.slower else ''}")
        for one in self.classes:
            if one.graphs > SOME and one.differ:
                lines.append(
                    f"{one.name} was compiled {one.graphs} times, since calls differ, the last time in {one.differ}. "
                    "Each is traced alone. Of models of transformers the cache of keys and values is the usual cause: "
                    "use_cache=False."
                )
        both = f"eager {1e3 * self.eager:.1f} ms, compiled {1e3 * self.compiled:.1f} ms"
        return "\n".join([*lines, f"forward and backward, until devices are done: {both}.", self._advice()])

    def _advice(self) -> str:
        names = ", ".join(one.name for one in self.classes if one.slower)
        if self.slower:
            return (
                f"Compiled units make this step slower{f', on the host {names}' if names else ''}. In T.cuda_graph "
                "what the host takes does not count. Else leave compile= out, or name the modules to compile: "
                "T.compile_units(model, 'blocks.*')."
            )
        if names:
            return f"On the host {names} is slower compiled, and the step is not: it waits for other things."
        return "Nothing is slower compiled."


def _report(
    forward_backward: ForwardBackward[Any], state: State, *args: Any, rounds: int = 3, **kwargs: Any
) -> tuple[State, CompileReport]:
    compilers = _compilers(forward_backward)
    check_between_steps(state, "compile_report")
    clock = Clock(ranks_of(state).lanes.synchronize)
    whole: dict[bool, list[float]] = {False: [], True: []}  # by whether it is eager
    host: dict[bool, dict[type, list[float]]] = {False: {}, True: {}}

    def run(eager: bool, seconds: dict[type, list[float]] | None = None) -> tuple[State, float]:
        clock.eager, clock.seconds = eager, seconds
        clock.wait()
        since = perf_counter()
        after, _ = forward_backward(state, *args, **kwargs)
        after = finish_reductions(after)
        clock.wait()
        return drop_gradients(after), perf_counter() - since

    with _timed(compilers, clock):
        for eager in (False, True):  # compiles, and has everything that is made once
            state, _ = run(eager)
        for _ in range(rounds):
            for eager in (False, True):
                state, seconds = run(eager)
                whole[eager].append(seconds)
                state, _ = run(eager, host[eager])
    classes = []
    for cls, calls in host[False].items():
        codes = [code for compiler in compilers for (of, _), code in compiler.codes.items() if of is cls]
        most = max(codes, key=Code.graphs)
        differ = most.why() if most.graphs() > 1 else ""
        paths, graphs = tuple(sorted(clock.paths[cls])), sum(map(Code.graphs, codes))
        classes.append(ClassTimes(cls.__name__, paths, median(host[True][cls]), median(calls), graphs, differ))
    return state, CompileReport(tuple(classes), median(whole[True]), median(whole[False]))


def _compilers(forward_backward: Any) -> list[Compiler]:
    """Those of what is compiled: of the driver's own choice, and of `T.compile_units`."""
    if not isinstance(forward_backward, ForwardBackward):
        raise SpecError(
            f"compile_report: the first argument is a {type(forward_backward).__name__}; expected what "
            "T.forward_backward(model, loss_fn, compile=True) returns."
        )
    driver = forward_backward.driver
    own = driver.compiler if isinstance(driver, Driver) else None
    marks = [vars(part)["_compiled"].compiler for part in driver.model.modules() if "_compiled" in vars(part)]
    found = [*dict.fromkeys([*([own] if own else []), *marks])]
    if not found:
        raise SpecError(
            "compile_report: nothing is compiled here. Give T.forward_backward(model, loss_fn, compile=True), or one "
            "of a model of T.compile_units(model, 'blocks.*')."
        )
    return found


@contextmanager
def _timed(compilers: list[Compiler], clock: Clock) -> Iterator[None]:
    try:
        for compiler in compilers:
            compiler.clock = clock
        yield
    finally:
        for compiler in compilers:
            compiler.clock = None


run = alone(_report, "compile_report", at=1, traced=eager_only("compile_report"))


def compile_report(
    forward_backward: ForwardBackward[Any], state: State, *args: Any, rounds: int = 3, **kwargs: Any
) -> tuple[State, CompileReport]:
    """Time a step's forward and backward with its units compiled and as Python runs them, on a batch of yours.

    Args:
        forward_backward: what `T.forward_backward(model, loss_fn, compile=True)` returned, or that of a model of
            `T.compile_units`.
        state: a state between steps.
        args, kwargs: as `forward_backward(state, *args, **kwargs)` takes them.
        rounds: how often each is timed, in turn. The model runs `2 + 4 * rounds` times.

    Returns:
        the state, and a `CompileReport` of this rank's times. No step is taken: the state has the values that it had,
        buffers and random numbers included, so a training that asks has the bits of one that does not. What the model
        keeps elsewhere (a list in Python) sees that it runs.

    A unit that is slower on the host does no harm where the device is what a step waits for: `report.slower` goes by
    the whole. Ask outside of `T.cuda_graph`: in a graph the host takes no part, and compiled units win what their
    kernels do.

    Raises:
        SpecError: nothing is compiled. StaleStateError, ScheduleError: the state is not between steps. What
        `forward_backward` raises; then `fsdp.drop_gradients(state)` has the state as it was.

    Collective: as `forward_backward` and `drop_gradients`, so every rank calls it, with the same `rounds`.

    Example:
        >>> state, report = T.compile_report(forward_backward, state, batch)  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
    """
    return run(forward_backward, state, *args, rounds=rounds, **kwargs)
