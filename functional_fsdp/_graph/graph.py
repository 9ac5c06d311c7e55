"""graph: a function of a State as a graph of ATen operations and functional collectives, from fake tensors.

    state, args ──fake tensors──▶ fn, run once ──▶ Graph

The verbs are the traced ones (`traced`), autograd's backward is traced as it runs, and nothing is computed. Modules
that are driven (`T.forward_backward`) use units in an order of their own, which is known at the end only: where it is
not the one that gathers were issued by, and the schedule leaves it open, the function is traced once more, by it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

from .._common import torch_names
from .._common.calls import KEEPING, lowering, users_line
from .._common.device import device_of
from .._common.errors import ScheduleError, expect
from .._common.record import LANES, Collective
from .._common.torch_names import Fakes, FakeTensorMode, dynamo, enable_python_dispatcher, pytree
from .._runtime.runtime import runtime_of
from .._spec.spec import Spec
from .._state.lineage import Version
from .._state.state import State
from .traced import GraphPlan, Trace, graph_plan

__all__ = ["RECORD", "Graph", "Imagined", "graph_of", "kind_of", "refuse_values"]

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
RECORD = "functional_fsdp.collective"  # where a node of the graph has the record that it carries out

#: what torch says of a tensor whose value is asked for, or of a shape that hangs on one
VALUES = ("DataDependentOutput", "DynamicOutputShape", "get value out of a tracing tensor", "data-dependent")
#: what it says of a forward-mode derivative that it runs by a script of its own, which fake tensors do not enter
UNTRACED = ("is_inference() INTERNAL ASSERT", "at least two devices, meta and")


class GraphBuild:
    """The making of one graph from a function of a State: what is noted for as long as it lasts.

    issued: the collectives, in order. driven: what each transform that drives a module has for this session, by
    transform. guards: functions of nothing; a graph holds while they return what they returned when it was made.
    lineages: of the States among the function's arguments. orders: in which order units were used, forward and then
    backward, by the first module that was driven with a State, by its layout's hash. rounds: the versions with which
    steps began whose driven round is complete; kept, as a later one might have the id of one that is gone. functions:
    the names of the autograd.Functions that were used, in order. counted: the lines that asked how many steps were
    taken.
    """

    def __init__(self) -> None:
        self.issued: list[Collective] = []
        self.driven: dict[Any, Any] = {}
        self.guards: list[Callable[[], Any]] = []
        self.lineages: list[Any] = []
        self.orders: dict[str, tuple[Any, ...]] = {}
        self.rounds: set[Any] = set()
        self.functions: dict[str, None] = {}
        self.counted: list[str] = []

    def note_count(self) -> None:
        """The user's code, which runs now, asks how many steps were taken."""
        self.counted.append(users_line(traceback.walk_stack(None)))


@contextmanager
def keep_residuals(residuals: bool) -> Iterator[None]:
    """Whether, inside, a traced `T.vjp` keeps residuals and leaves the weights to `regather`; else it recomputes."""
    if residuals:
        KEEPING.append(True)
    try:
        yield
    finally:
        if residuals:
            KEEPING.pop()


class Graph(NamedTuple):
    """A function that was traced.

    module: takes those leaves of `(state, args, kwargs)` whose numbers are in `inputs`, and gives the tensors among the
    leaves of `out`, what the function returned. given: for each of these, which of `inputs` it is, or -1. versions: of
    the States among the arguments, in order, as the function was called with them. sizes: of the mesh's axes. session:
    what transforms noted.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    out: Any
    given: tuple[int, ...]
    versions: tuple[Version, ...]
    sizes: Mapping[str, int]
    session: GraphBuild

    @property
    def stepped(self) -> tuple[int, ...]:
        """Which of the States among the arguments took a step, by number."""
        return tuple(k for k, version in enumerate(self.versions) if version.spent)

    @property
    def offsets(self) -> tuple[torch.Tensor | None, ...]:
        """What stands in the graph for `Lineage.offset` of each State."""
        return tuple(version.lineage.offset for version in self.versions)

    def took(self, state: State) -> tuple[int, bool] | None:
        """Which of the States among the arguments, by number, a state that came out is; and whether it is the one after
        a step. None if it is none of them.

        Raises:
            ScheduleError: it is in the middle of the step.
        """
        version: Any = state.version
        trace = isinstance(version, Trace)
        if state.grads or (
            trace and (version.held or version.ready or version.flying or version.pending or version.given)
        ):
            raise ScheduleError(
                "the compiled train step returned a State in the middle of a step. Return it after step()."
            )
        base = version.base if trace else version
        for k, own in enumerate(self.versions):
            if base.lineage is own.lineage:
                return k, base is not own
        return None


class Imagined:
    """In the place of a runtime, where nothing runs."""

    epoch = 0

    def __init__(self, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> None:
        self.sizes, self.coordinate = sizes, coordinate
        self.groups: dict[Any, Any] = {}
        self.users: dict[int, int] = {}
        self.lineages: WeakSet[Any] = WeakSet()


def graph_of(
    fn: Callable[..., Any], state: State, args: Any, kwargs: Any, keep: bool, verb: str = "lower",
    begun: list[GraphBuild] | None = None,
) -> Graph:  # fmt: skip
    """`fn(state, *args, **kwargs)` as a graph.

    Args:
        keep: whether backwards use the forward's residuals, see `keep_residuals`.
        verb: "lower", or "compile" if the graph is to run: then its collectives name the mesh's communicators.
        begun: gets the session as soon as there is one, also if it fails.

    Collective, if it is to run: communicators are made when they are first asked for, and see `GraphPlan.lacking`.
    """
    expect(f"{verb}(fn)", fn, Callable, "a train step, a function of (state, ...)")
    expect(f"{verb}(state)", state, State, "a State", TypeError)._resting(verb)
    graph = _trace(fn, state, args, kwargs, keep, verb, {}, begun)
    orders: dict[str, tuple[Any, ...]] = {}
    for version in graph.versions:
        lineage = version.lineage
        order = graph.session.orders.get(lineage.layout.hash)
        open_ = lineage.spec.schedule.order is None or lineage.spec.schedule.order == "recorded"
        if open_ and order is not None and lineage.graph_plan and _flat(order) != lineage.graph_plan.uses:
            orders[lineage.layout.hash] = order
    return _trace(fn, state, args, kwargs, keep, verb, orders, begun) if orders else graph


def _flat(order: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(unit for use in order for unit in ((use,) if isinstance(use, str) else use))


def _recipes(state: State, spec: Spec, verb: str) -> GraphPlan:
    """What traced verbs go by, with the communicators of the mesh if the graph is to run."""
    mesh, sizes = spec.mesh, spec.axes
    if verb == "compile":
        made = state.version.lineage.graph_plan if spec is state.spec else None
        return made or graph_plan(state.layout, spec, runtime_of(mesh))
    coordinate = runtime_of(mesh).coordinate if isinstance(mesh, DeviceMesh) else dict.fromkeys(sizes, 0)
    groups = {(lane, axis): f"{lane} {axis}" for lane in LANES for axis in sizes}  # of nobody: nothing will run
    return GraphPlan(state.layout, spec, sizes, coordinate, groups)


def _stand_in(state: State, verb: str, order: tuple[Any, ...] | None) -> Version:
    """The version of a State while a function of it is traced: of another lineage, so that its own stays as it is.

    Args:
        order: in which its units are used, if the schedule leaves that open.
    """
    real, spec = state.version, state.spec
    program = _recipes(state, spec if order is None else spec.with_schedule(spec.schedule.ordered(order)), verb)
    run: Any = program.run or Imagined(program.sizes, program.coordinate)
    offset = torch.zeros((), dtype=torch.int64, device=device_of([state.count]))  # the state's own, when it runs
    lineage = real.lineage.stand_in(run, spec, state.steps, program, offset)
    version = Version(lineage, 0, real.origin)
    version.spent = real.spent
    return version


def _stand_ins(call: Any, verb: str, orders: Mapping[str, tuple[Any, ...]]) -> tuple[Any, tuple[Version, ...]]:
    """`(state, args, kwargs)` with stand-ins for the versions of all States in it; and these, in order."""
    made: dict[int, Version] = {}
    found = []

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, State):
            return leaf
        key = id(leaf.version)
        if key not in made:
            made[key] = _stand_in(leaf, verb, orders.get(leaf.layout.hash))
        found.append(made[key])
        return leaf._evolve(version=made[key])

    return pytree.tree_map(put, call, is_leaf=lambda node: isinstance(node, State)), tuple(found)


def _trace(
    fn: Callable[..., Any], state: State, args: Any, kwargs: Any, keep: bool, verb: str,
    orders: Mapping[str, tuple[Any, ...]], begun: list[GraphBuild] | None,
) -> Graph:  # fmt: skip
    call, versions = _stand_ins((state, args, kwargs), verb, orders)
    leaves, treedef = pytree.tree_flatten(call)
    device = device_of(leaves)
    mode = Fakes(allow_non_fake_inputs=True)
    which = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    out: Any = None
    given: tuple[int, ...] = ()

    def flat(*tensors: torch.Tensor) -> Any:
        nonlocal out, given
        full = list(leaves)
        for i, tensor in zip(which, tensors, strict=True):
            full[i] = tensor
        first, rest, named = pytree.tree_unflatten(full, treedef)
        out = fn(first, *rest, **named)
        found = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        given = tuple(places.get(id(leaf), -1) for leaf in found)
        return found

    fakes = [_fake(mode, leaves[i], device) for i in which]
    inner = dynamo().config.patch(error_on_nested_fx_trace=False)  # compiled functions in it are traced as any others
    with (
        torch_names.dispatch_kept(),
        lowering(GraphBuild()) as session,
        keep_residuals(keep),
        _functions(session),
        mode,
        enable_python_dispatcher(),
        inner,
    ):
        session.lineages = [version.lineage for version in versions]
        if begun is not None:
            begun.append(session)
        module = make_fx(flat, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    _materialize_zeros(module)
    if session.driven and session.counted:
        _refuse_count(verb, session.counted[0])
    plans = [version.lineage.graph_plan for version in versions]
    _record(module.graph, session.issued, {name for plan in plans if plan for name in plan.groups.values()})
    sizes = {axis: n for plan in plans[:1] if plan for axis, n in plan.sizes.items()}
    return Graph(module, which, out, given, versions, sizes, session)


def _materialize_zeros(module: fx.GraphModule) -> None:
    """Give zero tangents memory: forward-mode derivatives make them without, and Inductor's kernels read them."""
    zeros = module.graph.find_nodes(op="call_function", target=torch_names.without_memory)
    for node in zeros:
        node.target = torch.ops.aten.zeros.default
    if zeros:  # writing the code of 6,000 nodes anew takes 0.2 s
        module.recompile()


def _refuse_count(verb: str, line: str) -> None:
    raise ScheduleError(
        f"{verb}: the step reads state.steps, at {line}. A graph is made once, for every step: compute with the tensor "
        "state.count, or decide outside the step and give it a number."
    )


def _record(graph: fx.Graph, issued: list[Collective], groups: Set[str]) -> None:
    """Have each collective of a fresh graph, but for the user's own, know its record. They were issued in order."""
    ours = [node for node in graph.nodes if kind_of(node) and node.args[-1] in groups]
    for node, one in zip(ours, issued, strict=True):
        node.meta[RECORD] = one


def kind_of(node: fx.Node) -> str | None:
    """What collective a node is."""
    return KINDS.get(str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2])


@contextmanager
def _functions(session: GraphBuild) -> Iterator[None]:
    """Note which autograd.Functions are used."""
    real = torch.autograd.Function.__dict__["apply"]

    def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        session.functions[cls.__qualname__] = None
        return real.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(noted)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = real  # type: ignore[method-assign]


def _fake(mode: FakeTensorMode, leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    with mode:
        on = device if leaf.device.type == "meta" else leaf.device
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=on)


def refuse_values(error: Exception, verb: str) -> None:
    """Raise what an error means: a tensor's value was asked for, which there is none of while a graph is made; or torch
    cannot trace a derivative."""
    if any(words in str(error) for words in UNTRACED):
        raise ScheduleError(
            f"{verb}: torch {torch.__version__} cannot trace a forward-mode derivative that this step takes (jvp, "
            "jacfwd, hessian), as those of layer_norm, group_norm and batch_norm. It traces rms_norm's and attention's "
            "(by the math backend), and grad, vjp, jacrev and vmap of all of them. Run this step eagerly."
        ) from error
    if any(word in f"{type(error).__name__} {error}" for word in VALUES):
        frames = [*traceback.walk_tb(error.__traceback__)]
        raise ScheduleError(
            f"{verb}: the step asks for a tensor's value, at {users_line(reversed(frames))}. A graph is made once, for "
            "every value: compute with the tensor (torch.where, a mask), or run this step eagerly."
        ) from error
