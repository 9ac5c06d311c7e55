"""Steps as CUDA graphs: `cuda_graph`, the calls of what it makes, and what one capture is.

`cuda_graph`: a whole train step captured once and replayed, one launch a step.

    first calls    real steps, eagerly, on a stream of its own: libraries load, code is compiled, the schedule settles
    then           the step is captured for this signature (shapes and dtypes of the batch) and replayed
    from then on   vote ─▶ batch copied in ─▶ replay ─▶ results copied out

`Graphed`: the calls of such a function, each of which is one step, by `signature`.

    a signature's first calls   eagerly, recorded
    then                        captured, and replayed
    from then on                replayed; guarded, what no rank may take is taken back, and run eagerly

`CapturedStep`: a graph, the memory that goes with it, and its replay.

The state keeps its tensors: a captured step writes what a step makes anew (buffers, extras) into them at its end.

`answered_as_in_warm_up`: what those are told who ask whether the stream is captured. A library that asks goes another
way in a graph: transformers then makes masks, which cost the fused attention. So while a step warms up or is captured,
callers outside torch and this library are told what is true in warm-up, "no". torch is told the truth: its
SyncBatchNorm goes by it.

How a stream's work gets into a graph is in `capturing`; where the host reads from the device, and what then is
captured, in `host_traffic`.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch

from functional_fsdp import ScheduleError, SpecError, State, TreeError
from functional_fsdp._seams import Capture, NewCounts, Veto, Vetoed, outside_inference, torch_private
from functional_fsdp.extend import Ranks, all_reduce, check_between_steps, lineage_of, ranks_of

from .._compile.startup import waiting
from .._compile.whole_step import exact, kind
from .._seed import again_from, check_draws, reseed
from .capturing import KEPT, GraphBuffers, captured, root_of, stale_streams_followed
from .host_traffic import Answering, Guard, Randoms, Recording, Sides, Steadiness

NAME = "is_current_stream_capturing"
PLACES = torch.cuda, torch.cuda.graphs
truth = torch.cuda.is_current_stream_capturing
_lock = threading.Lock()
_within = 0  # how many steps are under way, of all threads
_before: list[Any] = []  # what stood there


def _answer() -> bool:
    """In the place of torch.cuda.is_current_stream_capturing: one object, so that nothing is compiled twice for it."""
    caller = sys._getframe(1)
    name = caller.f_globals.get("__name__") or ""
    if root_of(caller) not in ("torch", "functional_fsdp") or name.startswith("torch._dynamo"):
        return False
    return truth()


_answer._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result's mark


@contextmanager
def answered_as_in_warm_up() -> Iterator[None]:
    """Within, on all threads, callers outside torch and this library hear that no stream is captured."""
    global _within
    with _lock:
        if not _within:
            _before[:] = [getattr(place, NAME) for place in PLACES]
            for place in PLACES:
                setattr(place, NAME, _answer)
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within:
                for place, found in zip(PLACES, _before, strict=True):
                    setattr(place, NAME, found)


pytree = torch_private.pytree


class Kind:
    """What a captured step takes for granted of a state: equal by spec, layout, optimizer, and which buffers are each
    rank's own."""

    __slots__ = ("key",)

    def __init__(self, state: State) -> None:
        self.key = (state.spec, state.layout, state.optimizer, state.local_buffers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and all(a is b or a == b for a, b in zip(self.key, other.key, strict=True))

    def __hash__(self) -> int:
        return hash(self.key[1].hash)


def structure(state: State) -> Any:
    """Equal for states whose tensors can be copied into each other's."""
    trees = [getattr(state, name) for name in KEPT]
    return Kind(state), pytree.tree_structure(trees)


def _hashable(value: Any) -> bool:
    try:
        hash(exact(value))
    except TypeError:
        return False
    return True


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
        else:
            try:
                hash(one := exact(leaf))
            except TypeError:
                raise TreeError(
                    f"cuda_graph: the batch has a {kind(leaf, _hashable)}, which a captured step would take for the "
                    "one it saw first. Pass it as a tensor, or let the step itself hold what never changes."
                ) from None
            found.append(one)
    counted = getattr(state.optimizer, "counted", None)  # what it counts steps of may become more
    return treedef, tuple(found), Kind(state), counted and counted(state.opt)


class CapturedStep:
    """A graph and the memory that goes with it."""

    def __init__(self, graph: Any, capture: Capture, home: GraphBuffers, guard: Guard | None) -> None:
        self.graph, self.capture, self.home, self.guard = graph, capture, home, guard
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[Any] = []  # what the step returns beside the state, and its structure
        self.structure: Any = None
        self.constants: Any = None  # what the step copies from the host
        self.kind: type = State  # of what the step returns
        self.again: dict[tuple[int, int], torch.Generator] = {}  # what recomputations draw from
        self.draws: dict[tuple[int, int], int] = {}  # and from which offsets on
        self.peak = 0  # bytes that a replay uses at most, beside the state and the batch
        self.reserved = 0  # bytes that stay reserved for it

    def launch(self, state: State, launched: Callable[[], None] = lambda: None) -> None:
        """Replay it from this state's values.

        Args:
            launched: is called when it has been put in motion.

        Raises:
            Vetoed: the host has read something else than before, on some rank.
        """
        self.home.enter(state)
        lanes: Any = self.capture.run.lanes
        if self.guard is not None:
            self.guard.before()
        with lanes.joined():
            self.graph.replay()
        self.home.changed()
        launched()
        if self.guard is not None:
            self.guard.after()

    def results(self, state: State) -> Any:
        """What the step returns, after a replay that has left this state."""
        if self.kind is State:
            return state
        outputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in self.outputs]
        copies = pytree.tree_unflatten(outputs, self.structure)
        named = hasattr(self.kind, "_fields")
        return self.kind(state, *copies) if named else (state, *copies)


log = logging.getLogger(__name__)
WHOLE = (
    'cuda_graph(host_reads="guard"): the host reads from the device, and the step was compiled as a whole, so that it '
    "cannot be taken back. Leave T.compile out. The state before the step is valid."
)


class Warmed:
    """Calls that are captured alike: how often the step ran eagerly, what it read then, and its graphs."""

    def __init__(self, guards: bool) -> None:
        self.warm = 0
        self.owner: Callable[[], Any] = lambda: None  # whose steps they were
        self.reads = Steadiness(compares=guards)
        self.graphs: dict[Any, CapturedStep] = {}  # by what the host reads
        self.beside: tuple[str, ...] = ()  # buckets that the last one updated beside its backward
        self.draws: dict[tuple[int, int], int] = {}  # what the last step drew again, see `_seed.Microbatch`


class Graphed:
    """What `cuda_graph` returns. `captured` has the graphs by signature."""

    def __init__(
        self, train_step: Callable[..., Any], warmup: int, graphs: int, guards: bool, pass_through: bool
    ) -> None:
        self.train_step = train_step
        self.warmup = warmup
        self.limit = graphs
        self.guards = guards
        self.pass_through = pass_through
        self.signatures: dict[Any, Warmed] = {}
        self.captured: dict[Any, CapturedStep] = {}
        self.homes: dict[Any, GraphBuffers] = {}
        self.pool: Any = None  # one for all graphs: what one leaves free another uses
        self.stream: Any = None
        self.sides: Any = None
        self.steps = 0
        self.reading: bool | None = None  # whether the host reads on any rank; None before ranks have said it
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
            self.sides = Sides(ranks.device)
        leaves, treedef = pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, State))
        key = signature(state, leaves, treedef)
        known = self._known(key)
        if self.guards and self.reading is None and self.steps >= self.warmup:  # on every rank in the same step
            mine = any(one.reads.values for one in self.signatures.values())
            self.reading = ranks.any(mine, "whether the host reads from the device")
            if self.reading:  # the communicators of vetoes: they cannot be made while a step is captured
                all_reduce(state, [torch.zeros(1, device=ranks.device)], "max", [*state.spec.axes], "vetoes")
        out = self._step(ranks, key, known, state, leaves, treedef)
        self.steps += 1
        return out

    def _step(self, ranks: Ranks, key: Any, known: Warmed | None, state: State, leaves: Any, treedef: Any) -> Any:
        """Eagerly, captured or replayed."""
        graph, ready = None, False
        if known is not None:
            if not known.graphs and known.owner() is not lineage_of(state):
                known.warm, known.owner = 0, weakref.ref(lineage_of(state))
            known.reads.steps += 1
            graph = known.graphs.get(known.reads.values)
            ready = not known.reads.eager and (graph is not None or (known.warm >= self.warmup and self._fit(known)))
        if self.reading:  # then who steps eagerly may wait for the device in the middle of the step
            lineage_of(state).come(state.version.serial)  # a rank may have abandoned a step before
            ready = not ranks.any(not ready, "a step that is not replayed")
        if known is None or not ready:
            return self._eagerly(ranks, known, state, leaves, treedef)
        if graph is None:
            with waiting():
                return self._captured(ranks, key, known, state, leaves, treedef)
        return self._replayed(ranks, known, graph, state, leaves, treedef)

    def _known(self, key: Any) -> Warmed | None:
        found = self.signatures.get(key)
        if found is None and self._room():
            found = self.signatures[key] = Warmed(self.guards)
        if found is None:
            self._too_many("the batches have", "signatures", "Pad batches to fewer shapes, pass numbers that change as "
                           "tensors, or give")  # fmt: skip
        return found

    def _room(self) -> bool:
        return sum(max(len(one.graphs), 1) for one in self.signatures.values()) < self.limit

    def _too_many(self, who: str, what: str, remedy: str) -> None:
        if not self.full:
            self.full = True
            warnings.warn(
                f"cuda_graph: {who} more than {self.limit} {what}; steps of further ones run eagerly. {remedy} "
                "cuda_graph(graphs=).",
                RuntimeWarning,
                stacklevel=6,
            )

    def _fit(self, known: Warmed) -> bool:
        """Whether a step of this signature, which has warmed up, can be captured now.

        Raises:
            ScheduleError: what the host reads has changed all the time.
        """
        if not known.reads.values:
            return True
        if not self.reading:  # found out after ranks had agreed that nobody reads
            self._too_late(known)
            return False
        if not known.reads.steady:
            if not known.graphs and known.warm >= 2 * self.warmup:
                raise known.reads.unsteady()
            return False
        if known.graphs and not self._room():
            self._too_many("what the host reads has", "graphs", "Keep on the device what changes, or give")
            return False
        return True

    def _too_late(self, known: Warmed) -> None:
        known.reads.eager = True
        line = known.reads.values[0][0][1]
        warnings.warn(
            f"cuda_graph: the host reads from the device at {line}, and no rank did in the first {self.warmup} steps, "
            "so ranks do not compare what they read. Steps of this signature run eagerly. Have the first ones read, "
            "too.",
            RuntimeWarning,
            stacklevel=6,
        )

    def _eagerly(self, ranks: Ranks, known: Warmed | None, state: State, leaves: list[Any], treedef: Any) -> Any:
        """One step, which is recorded where one like it may be captured."""
        record = None if known is None or known.reads.eager or self._compiles(known) else Recording(self.sides)
        args, kwargs = pytree.tree_unflatten(_on(ranks, leaves), treedef)
        with self._aside(ranks), record or nullcontext():
            steps = _commits(state)
            ranks.draws.clear()
            out = self.train_step(state, *args, **kwargs)
        _one_step(_parts(out)[0], steps)
        if known is not None:
            known.warm += 1
            known.draws = dict(ranks.draws)
            known.beside = lineage_of(state).beside_backward
            if record is not None:
                known.reads.ran(record)
        return out

    def _compiles(self, known: Warmed) -> bool:
        """Whether units are compiled in this step, which takes far longer where a mode sees each operation that the
        compilers try out: the first of a signature, if two are left to be recorded."""
        return known.warm == 0 and self.warmup > 2

    @contextmanager
    def _aside(self, ranks: Ranks) -> Iterator[None]:
        """On the stream of its own, which captures too: libraries keep what they need by stream."""
        home = torch.cuda.current_stream(ranks.device)
        self.stream.wait_stream(home)
        try:
            with torch.cuda.stream(self.stream), stale_streams_followed(), answered_as_in_warm_up():
                yield
        finally:
            home.wait_stream(self.stream)

    def _captured(self, ranks: Ranks, key: Any, known: Warmed, state: State, leaves: list[Any], treedef: Any) -> Any:
        """Capture the step, then replay it: this call's step."""
        check_between_steps(state, "cuda_graph")
        place = structure(state)
        home = self.homes.get(place) or GraphBuffers(state)
        home.check(state)
        inputs = _on(ranks, leaves, copy=True)
        args, kwargs = pytree.tree_unflatten(inputs, treedef)
        steps = _commits(state)
        draws, again = known.draws, again_from(known.draws, ranks.device)
        reseed(state, again, draws)
        randoms = Randoms(ranks)
        _make_room(ranks.device)
        torch.cuda.reset_peak_memory_stats(ranks.device)
        before = torch.cuda.memory_allocated(ranks.device), torch.cuda.memory_reserved(ranks.device)
        assert known.reads.latest is not None
        guard = Guard(ranks) if self.reading else None
        veto: Veto | None = guard.veto(state) if guard else None
        traffic = Answering(
            self.sides, known.reads.latest, guard.differs if guard else None, lambda: bool(veto and veto.asked)
        )
        # what a guard may take back must not have begun
        capture, vetoed = Capture(state, () if guard else known.beside), False
        graph: CapturedStep | None = None
        out: Any = None
        new: Any = None
        ranks.again.update(again)
        try:
            with self._aside(ranks), captured(ranks, self.pool) as made, capture.recording():
                if guard is not None:
                    guard.flag.zero_()
                with traffic, veto.holds() if veto else nullcontext():
                    out = self.train_step(home.begin(state), *args, **kwargs)
                traffic.finished()
                new, results = _parts(out)
                _one_step(new, steps)
                if veto is not None and not veto.asked:
                    raise ScheduleError(WHOLE)
                home.keep(new, veto)
            one = graph = CapturedStep(made, capture, home, guard)
            graph.again, graph.draws = again, draws
            graph.inputs = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
            outputs, graph.structure = pytree.tree_flatten(results)
            graph.outputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]
            graph.kind, graph.constants = type(out), (traffic.there, traffic.expected)
            capture.first(lambda: one.launch(state, lambda: check_draws(ranks, draws)))
        except Vetoed:
            vetoed = True
        except BaseException as error:
            graph = out = new = None
            capture.abandon()
            if not isinstance(error, NewCounts):
                raise
            log.info("cuda_graph: this step is taken eagerly. %s", error)
        finally:
            ranks.again.clear()
        if graph is None:
            return self._eagerly(ranks, known, state, leaves, treedef)
        graph.peak = torch.cuda.max_memory_allocated(ranks.device) - before[0]
        graph.reserved = torch.cuda.memory_reserved(ranks.device) - before[1]
        self.homes[place] = home
        values = known.reads.values
        known.graphs[values] = self.captured[(key, values) if values else key] = graph
        for name in randoms.moved():
            warnings.warn(
                f"cuda_graph: the step that was captured drew from {name}, on the host. What was drawn then is what "
                "every replay has. Draw on the device, or pass what was drawn with the batch, as a tensor.",
                RuntimeWarning,
                stacklevel=5,
            )
        log.info("cuda_graph: captured a step, graph %d of at most %d", len(self.captured), self.limit)
        if vetoed:
            randoms.back()
            return self._again(ranks, known, state, leaves, treedef)
        return graph.results(home.state(new))

    def _replayed(
        self, ranks: Ranks, known: Warmed, graph: CapturedStep, state: State, leaves: list[Any], treedef: Any
    ) -> Any:
        graph.home.check(state)
        drawn = ranks.generator.get_state() if graph.guard else None  # the host draws nothing in a replay

        def launch() -> None:
            reseed(state, graph.again, graph.draws)
            graph.launch(state)

        with torch.no_grad():
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            for mine, theirs in zip(graph.inputs, given, strict=True):  # before the vote: it may fail
                mine.copy_(theirs, non_blocking=True)
            try:
                return graph.results(graph.capture.again(state, launch, graph.home.state))
            except Vetoed:
                pass
        ranks.generator.set_state(drawn)
        return self._again(ranks, known, state, leaves, treedef)

    def _again(self, ranks: Ranks, known: Warmed, state: State, leaves: list[Any], treedef: Any) -> Any:
        """A replay was taken back: the step eagerly, which every rank does."""
        values = known.reads.values
        out = self._eagerly(ranks, known, state, leaves, treedef)
        known.reads.missed(values)
        return out


def _make_room(device: torch.device) -> None:
    """Give memory back that a graph may need. A whole garbage collection takes longer than the capture: there is one
    only where less memory is free than the process had at its peak."""
    gc.collect(1)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(device)[0] < torch.cuda.max_memory_allocated(device):
        gc.collect()
        torch.cuda.empty_cache()


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


F = TypeVar("F", bound=Callable[..., Any])


def cuda_graph(
    train_step: F,
    *,
    warmup: int = 3,
    graphs: int = 8,
    host_reads: Literal["error", "guard"] = "error",
    pass_through: bool = False,
) -> F:
    """Capture `train_step(state, ...)` as one CUDA graph and replay it: gathers, compute, reductions, clipping, update.

    Args:
        train_step: state first in, state first out, with one `step` in it; `state` or `state, results`.
        warmup: real steps, run eagerly, before the one that is captured; at least 1. For each signature.
        graphs: how many are captured, by signature (and by what the host reads); further steps run eagerly, and a
            warning says so once.
        host_reads: what happens where the host reads from the device within the step, see below. "guard" needs a warmup
            of at least 2.
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
    those of the eager step, also in what `T.remat` computes again; those of a step by hand go on in torch's default
    generator, as they do eagerly. There, and with torch's own activation checkpointing, nothing is drawn again:
    `preserve_rng_state=False`. What is drawn on the host is what it was when the step was captured, and a warning says
    so.

    While it is captured a step goes the way it went in warm-up. Libraries that ask whether the stream is captured hear
    "no" (torch hears the truth). A tensor that is made on the host and copied to the device is a constant: it must be
    what it was in warm-up, and lies on the device from then on.

    Where the host reads from the device (`.item()`, `if tensor:`, torch.equal, a copy of at most 64 KiB), "error"
    raises, naming the line. "guard" goes on with what the last two steps read there, and the graph compares, bit by
    bit: where one rank would have read something else, no rank takes the step, and all take it again, eagerly. So every
    step of such a function costs an all-reduce of 4 bytes and a wait for its result, and updates do not overlap the
    backward (`Schedule(overlap_update=)`); where no rank reads anything nothing is added. Graphs are kept by what was
    read. A line whose value changes more than 4 times in 100 steps has its steps run eagerly, with a warning. Reads
    after `step` are errors, and so is what reads within a kernel (nonzero, a mask as an index). A replay whose read has
    changed computes with the old value until the comparison is heard: with a size that is too small now, an index may
    lie outside, and a kernel that checks it ends the process. All ranks step by the same such function.

    Which leaves got no gradient on any rank, and so keep their weights, is decided then, too. A replay does not ask
    again; if a rank that steps eagerly has gradients for other leaves, all hear of it in the vote, and none steps.

    `T.cuda_graph(T.compile(train_step))` captures a step that was compiled as a whole.

    Ranks vote before each replay, so a step is still a transaction: until all have come, an exception costs nothing.
    (A step that was compiled whole has no votes.) Ranks may have batches of different shapes, and one may step eagerly
    while another replays, if they issue the same collectives and the eager step does not wait for the device.

    Raises:
        SpecError: `warmup` or `graphs` below 1; another `host_reads`. (When called) ScheduleError: no GPU; a step that
            cannot be captured, with its cause and line: the host waits for the device, what it reads changes from step
            to step, a use outside the plan, memory that moved. The state that came in can be used again then.
        TreeError: a result that is not a state first; a state whose structure is another at the end; something in the
            batch that is no tensor and has no hash.
        StaleStateError, RestartError, CommError: as `step`.

    Collective: at a replay two votes on the host, and on the device what was captured; guarded, a
    third vote on the host, and an all-reduce of 4 bytes an axis.

    Source: torch.cuda.CUDAGraph's documentation.

    Example:
        >>> train_step = T.cuda_graph(train_step)  # doctest: +SKIP
        >>> state, loss = train_step(state, batch)  # doctest: +SKIP
    """
    for name, value in (("warmup", warmup), ("graphs", graphs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"cuda_graph({name}={value!r}): expected a number of at least 1.")
    if host_reads not in ("error", "guard") or (host_reads == "guard" and warmup < 2):
        raise SpecError(
            f'cuda_graph(host_reads={host_reads!r}, warmup={warmup}): expected "error", or "guard" with a warmup of at '
            "least 2, which read the same."
        )
    graphed = Graphed(train_step, warmup, graphs, host_reads == "guard", pass_through)

    @wraps(train_step)
    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        return graphed(state, args, kwargs)

    call.graphs = graphed.captured  # type: ignore[attr-defined]
    return cast(F, call)
