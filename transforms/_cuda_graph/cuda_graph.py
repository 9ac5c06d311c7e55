"""cuda_graph: a whole train step captured once and replayed, one launch a step.

    first calls    real steps, eagerly, on a stream of its own: libraries load, code is compiled, the schedule settles
    then           the step is captured for this signature (shapes and dtypes of the batch) and replayed
    from then on   vote ─▶ batch copied in ─▶ replay ─▶ results copied out

The state keeps its tensors: a captured step writes what a step makes anew (buffers, extras) into them at its end.
"""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from functional_fsdp import ScheduleError, SpecError, State, TreeError
from functional_fsdp.extend import (
    Capture,
    NewCounts,
    Ranks,
    check_between_steps,
    lineage_of,
    outside_inference,
    ranks_of,
    torch_private,
)

from .._seed import reseed
from .capturing import KEPT, GraphBuffers, captured, stale_streams_followed

__all__ = ["cuda_graph"]

pytree = torch_private.pytree

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)


def cuda_graph(train_step: F, *, warmup: int = 3, graphs: int = 8, pass_through: bool = False) -> F:
    """Capture `train_step(state, ...)` as one CUDA graph and replay it: gathers, compute, reductions, clipping, update.

    Args:
        train_step: state first in, state first out, with one `step` in it; `state` or `state, results`.
        warmup: real steps, run eagerly, before the one that is captured; at least 1. For each signature.
        graphs: how many signatures are captured; steps of further ones run eagerly, and a warning says so once.
        pass_through: without GPUs run the step as it is, instead of raising.

    Returns:
        a function that is called as `train_step` is. Every call takes one step, the first ones too.

    A signature is the batch's structure, shapes and dtypes, and whatever in it is no tensor. Tensors of the batch are
    copied into memory of the graph's (from the host too, where pinned memory may be overwritten once the step is
    done); what the step returns beside the state are copies. The state stays where it is in memory; a state from
    elsewhere (a checkpoint, a deep copy) is copied in, and the one that was there before cannot be used any more.
    Between replays states can be saved, copied, looked at and stepped eagerly. `.graphs` has the graphs by signature,
    each with `peak`, the bytes that a replay uses beside the state, which torch does not count then, and `reserved`.
    (Capturing resets torch's peak memory statistics.)

    Whatever else Python decides (a branch, a learning rate that is a number) is decided when the step is captured. A
    schedule is a function of the count, `fsdp.adamw(lr=lambda count: ...)`. Random numbers of `T.forward_backward` are
    those of the eager step; those of a step by hand go on in torch's default generator, as they do eagerly. Activation
    checkpointing needs `preserve_rng_state=False` (`T.remat(..., preserve_rng_state=False)`).

    Which leaves got no gradient on any rank, and so keep their weights, is decided then, too. A replay does not ask
    again; if a rank that steps eagerly has gradients for other leaves, all hear of it in the vote, and none steps.

    `T.cuda_graph(T.compile(train_step))` captures a step that was compiled as a whole.

    Ranks vote before each replay, so a step is still a transaction: until all have come, an exception costs nothing.
    (A step that was compiled whole has no votes.) Ranks may have batches of different shapes, and one may step eagerly
    while another replays, if they issue the same collectives.

    Raises:
        SpecError: `warmup` or `graphs` below 1. (When called) ScheduleError: no GPU; a step that cannot be captured,
            with its cause: the host waits for the device, a use outside the plan, memory that moved. The state that
            came in can be used again then.
        TreeError: a result that is not a state first; a state whose structure is another at the end; something in the
            batch that is no tensor and has no hash.
        StaleStateError, RestartError, CommError: as `step`.

    Collective: at a replay two votes on the host, and on the device what was captured.

    Source: torch.cuda.CUDAGraph's documentation.

    Example:
        >>> train_step = T.cuda_graph(train_step)  # doctest: +SKIP
        >>> state, loss = train_step(state, batch)  # doctest: +SKIP
    """
    for name, value in (("warmup", warmup), ("graphs", graphs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"cuda_graph({name}={value!r}): expected a number of at least 1.")
    graphed = Graphed(train_step, warmup, graphs, pass_through)

    @wraps(train_step)
    def run(state: State, *args: Any, **kwargs: Any) -> Any:
        return graphed(state, args, kwargs)

    run.graphs = graphed.captured  # type: ignore[attr-defined]
    return cast(F, run)


class CapturedStep:
    """One signature: how often it was run eagerly, and then its graph and the memory that goes with it."""

    def __init__(self) -> None:
        self.warm = 0
        self.owner: Callable[[], Any] = lambda: None  # whose steps they were
        self.graph: Any = None
        self.capture: Any = None
        self.home: Any = None
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[Any] = []  # what the step returns beside the state, and its structure
        self.structure: Any = None
        self.kind: type = State  # of what the step returns
        self.peak = 0  # bytes that a replay uses at most, beside the state and the batch
        self.reserved = 0  # bytes that stay reserved for it

    def launch(self, state: State) -> None:
        """Replay it from this state's values."""
        self.home.enter(state)
        lanes: Any = self.capture.run.lanes
        with lanes.joined():
            self.graph.replay()
        self.home.changed()


class Graphed:
    """What `cuda_graph` returns. `captured` has the graphs by signature."""

    def __init__(self, train_step: Callable[..., Any], warmup: int, graphs: int, pass_through: bool) -> None:
        self.train_step = train_step
        self.warmup = warmup
        self.limit = graphs
        self.pass_through = pass_through
        self.captured: dict[Any, CapturedStep] = {}
        self.homes: dict[Any, GraphBuffers] = {}
        self.pool: Any = None  # one for all graphs: what one leaves free another uses
        self.stream: Any = None
        self.full = False

    @outside_inference
    def __call__(self, state: State, args: Any, kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise TypeError(f"cuda_graph: the first argument is a State, not {type(state).__name__}.")
        ranks = ranks_of(state)
        if ranks.device.type != "cuda":
            if self.pass_through:
                return self.train_step(state, *args, **kwargs)
            raise ScheduleError(
                f"cuda_graph: this state is on the {ranks.device.type}, and CUDA graphs need a GPU. To run the step as "
                "it is where there is none: T.cuda_graph(train_step, pass_through=True)."
            )
        if self.stream is None:
            self.stream, self.pool = torch.cuda.Stream(ranks.device), torch.cuda.graph_pool_handle()
        leaves, treedef = pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, State))
        graph = self._graph(signature(state, leaves, treedef))
        if graph is not None and graph.graph is None and graph.owner() is not lineage_of(state):
            graph.warm, graph.owner = 0, weakref.ref(lineage_of(state))
        if graph is None or graph.warm < self.warmup:
            out = self._eagerly(ranks, state, *pytree.tree_unflatten(_on(ranks, leaves), treedef))
            if graph is not None:
                graph.warm += 1
            return out
        if graph.graph is None:
            return self._captured(ranks, graph, state, leaves, treedef)
        return self._replayed(graph, state, leaves)

    def _graph(self, key: Any) -> CapturedStep | None:
        found = self.captured.get(key)
        if found is None and len(self.captured) < self.limit:
            found = self.captured[key] = CapturedStep()
        if found is None and not self.full:
            self.full = True
            warnings.warn(
                f"cuda_graph: the batches have more than {self.limit} signatures; steps of further ones run eagerly. "
                "Pad batches to fewer shapes, pass numbers that change as tensors, or give cuda_graph(graphs=).",
                RuntimeWarning,
                stacklevel=5,
            )
        return found

    def _eagerly(self, ranks: Ranks, state: State, args: Any, kwargs: Any) -> Any:
        with self._aside(ranks):
            steps = _commits(state)
            out = self.train_step(state, *args, **kwargs)
        _one_step(_parts(out)[0], steps)
        return out

    @contextmanager
    def _aside(self, ranks: Ranks) -> Iterator[None]:
        """On the stream of its own, which captures too: libraries keep what they need by stream."""
        home = torch.cuda.current_stream(ranks.device)
        self.stream.wait_stream(home)
        try:
            with torch.cuda.stream(self.stream), stale_streams_followed():
                yield
        finally:
            home.wait_stream(self.stream)

    def _captured(self, ranks: Ranks, graph: CapturedStep, state: State, leaves: list[Any], treedef: Any) -> Any:
        """Capture the step, then replay it: this call's step."""
        check_between_steps(state, "cuda_graph")
        key = structure(state)
        home = self.homes.get(key) or GraphBuffers(state)
        home.check(state)
        inputs = _on(ranks, leaves, copy=True)
        args, kwargs = pytree.tree_unflatten(inputs, treedef)
        steps = _commits(state)
        reseed(state)
        gc.collect()
        torch.cuda.synchronize(ranks.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ranks.device)
        before = torch.cuda.memory_allocated(ranks.device), torch.cuda.memory_reserved(ranks.device)
        capture = Capture(state)
        try:
            with self._aside(ranks), captured(ranks, self.pool) as made, capture.recording():
                out = self.train_step(home.state(state), *args, **kwargs)
                new, results = _parts(out)
                _one_step(new, steps)
                home.keep(new)
            graph.graph, graph.home, graph.capture = made, home, capture
            capture.first(lambda: graph.launch(state))
        except BaseException as error:
            graph.graph = graph.home = graph.capture = out = new = None
            capture.abandon()
            if not isinstance(error, NewCounts):
                raise
            log.info("cuda_graph: this step is taken eagerly. %s", error)
        if graph.graph is None:
            return self._eagerly(ranks, state, *pytree.tree_unflatten(_on(ranks, leaves), treedef))
        graph.inputs = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        outputs, graph.structure = pytree.tree_flatten(results)
        graph.outputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]
        graph.kind = type(out)
        graph.peak = torch.cuda.max_memory_allocated(ranks.device) - before[0]
        graph.reserved = torch.cuda.memory_reserved(ranks.device) - before[1]
        self.homes[key] = home
        log.info("cuda_graph: captured a step, graph %d of at most %d", len(self.captured), self.limit)
        assert new is not None
        return self._results(graph, home.state(new))

    def _replayed(self, graph: CapturedStep, state: State, leaves: list[Any]) -> Any:
        graph.home.check(state)

        def launch() -> None:
            reseed(state)
            graph.launch(state)

        with torch.no_grad():
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            for mine, theirs in zip(graph.inputs, given, strict=True):  # before the vote: it may fail
                mine.copy_(theirs, non_blocking=True)
            return self._results(graph, graph.capture.again(state, launch, graph.home.state))

    def _results(self, graph: CapturedStep, state: State) -> Any:
        if graph.kind is State:
            return state
        outputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in graph.outputs]
        copies = pytree.tree_unflatten(outputs, graph.structure)
        named = hasattr(graph.kind, "_fields")
        return graph.kind(state, *copies) if named else (state, *copies)


class Kind:
    """What a captured step takes for granted of a state: equal by spec, layout and optimizer."""

    __slots__ = ("key",)

    def __init__(self, state: State) -> None:
        self.key = (state.spec, state.layout, state.optimizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and all(a is b or a == b for a, b in zip(self.key, other.key, strict=True))

    def __hash__(self) -> int:
        return hash(self.key[1].hash)


def structure(state: State) -> Any:
    """Equal for states whose tensors can be copied into each other's."""
    trees = [getattr(state, name) for name in KEPT]
    return Kind(state), pytree.tree_structure(trees)


def signature(state: State, leaves: list[Any], treedef: Any) -> Any:
    """Equal for calls that are captured alike: shapes and dtypes of tensors, and everything else as it is; and the
    buckets of which the optimizer counts steps by leaf.

    Raises:
        TreeError: a State, or something without a hash (an array, say), which cannot be told from another.
    """
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, State):
            raise TreeError("cuda_graph: a State among the batch; a captured step has one state, its first argument.")
        elif isinstance(leaf, float):
            found.append(leaf.hex())
        else:
            try:
                hash(leaf)
            except TypeError:
                raise TreeError(
                    f"cuda_graph: the batch has a {type(leaf).__name__}, which a captured step would take for the one "
                    "it saw first. Pass it as a tensor."
                ) from None
            found.append((type(leaf), leaf))
    counted = getattr(state.optimizer, "counted", None)  # what it counts steps of may become more
    return treedef, tuple(found), Kind(state), counted and counted(state.opt)


def _on(ranks: Ranks, leaves: list[Any], copy: bool = False) -> list[Any]:
    """The batch's leaves, tensors on the GPU, as the captured step will see them."""
    return [leaf.to(ranks.device, copy=copy) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _parts(out: Any) -> tuple[State, tuple[Any, ...]]:
    """The state and the rest of what a step returned."""
    parts = out if isinstance(out, tuple) else (out,)
    if not parts or not isinstance(parts[0], State):
        raise TreeError(f"cuda_graph: the step returned a {type(out).__name__}; expected a State, or (State, ...).")
    return parts[0], parts[1:]


def _commits(state: State) -> int:
    """How often its lineage has stepped, as far as the host knows."""
    mine = lineage_of(state)
    mine.follow()
    return mine.commits


def _one_step(new: State, before: int) -> None:
    """Raise unless the function took one step, at its end. (Of compiled steps in a row the host knows one.)"""
    taken = _commits(new) - before
    if taken != 1 or not new.between_steps:
        raise ScheduleError(
            f"cuda_graph: the function took {taken} steps; expected 1, at its end: return fsdp.step(state), as a whole "
            "train step does."
        )
