"""Steps as graphs: what is noted of one while it is made, and `lower`.

    graph_of                   a function of a State, as a graph
    lower, abstract_state      a train step as a graph, for ranks that need not be there
    point_at_second_gathers    the pass that lets a backward read what it gathers again

`graph_of`: a function of a State as a graph of ATen operations and functional collectives, from fake tensors.

    state, args ──fake tensors──▶ fn, run once ──▶ Graph

The verbs are the traced ones (`traced`), autograd's backward is traced as it runs, and nothing is computed. Modules
that are driven (`T.forward_backward`) use units in an order of their own, which is known at the end only: where it is
not the one that gathers were issued by, and the schedule leaves it open, the function is traced once more, by it.

`lower`: a train step as a graph, without running it, for any number of ranks (as JAX's `jit(f).lower(...)`).

    state, batch ──fake tensors──▶ train_step, traced ──▶ Lowered: graph, collectives, memory, operations

No process group is needed, no GPU and no memory: `abstract_state` makes a state of shapes for a mesh of any size.

`point_at_second_gathers`, a pass over the graph of a traced step:

    forward    w1 = all_gather(shard) ──▶ y = x @ w1          backward as traced     dx = dy @ w1.t()
    backward   w2 = all_gather(shard) ──▶ (nobody)            after the pass         dx = dy @ w2.t()

A step traced whole, with its vjp inside, has no autograd that would save tensors: the backward uses the forward's
weights, which then stay gathered in between. Computing the unit again from the second gather would release them, for
the price of another forward. This pass costs nothing: whatever uses the first gather, or a view of it, after the
mark that `T.vjp` left, uses the second one. The values are the same: main weights do not change within a step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from .._common.calls import KEEPING, lowering, users_line
from .._common.errors import ScheduleError, expect
from .._common.record import LANES, Collective
from .._common.torch_names import FakeTensor, FakeTensorMode, dynamo, pytree
from .._common.tree import bytes_text, table
from .._optim.optimizer import as_optimizer, check_labels
from .._plan.plan import keeps_copy
from .._plan.route import states_of
from .._runtime.runtime import runtime_of
from .._shared import torch_names
from .._shared.device import device_of
from .._shared.torch_names import enable_python_dispatcher, fake_tensors
from .._spec.spec import Spec
from .._state.shard import describe, make_layout, no_residual
from .._state.state import Lineage, State, Version
from .._storage import FlatBuffer, no_scales
from .traced import GraphPlan, Trace, graph_plan

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
RECORD = "functional_fsdp.collective"  # where a node of the graph has the record that it carries out

#: what torch says of a tensor whose value is asked for, of a shape that hangs on one, or of torch.while_loop's rounds
VALUES = (
    "DataDependentOutput", "DynamicOutputShape", "get value out of a tracing tensor", "data-dependent",
    "ignore_fresh_unbacked_symbols",
)  # fmt: skip
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
    """Whether, inside, a traced `T.vjp` keeps residuals and leaves the weights to the pass; else it recomputes."""
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
    mode = fake_tensors()
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


aten = torch.ops.aten
#: what leads from a gathered bucket to a weight as compute sees it
VIEWS = {
    aten.alias.default, aten.as_strided.default, aten.detach.default, aten.expand.default, aten.permute.default,
    aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
    aten.squeeze.dim, aten.squeeze.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    aten.view.default, aten._unsafe_view.default, aten.view.dtype, aten.unbind.int, aten.lift_fresh.default,
    aten.squeeze.dims, aten.diagonal.default, aten.unfold.default, aten.view_as_real.default, aten.narrow.default,
    aten.view_as_complex.default, aten.movedim.int, aten.unsafe_split.Tensor, aten.chunk.default, aten.real.default,
}  # fmt: skip


@torch.library.custom_op("functional_fsdp::again", mutates_args=())
def again(cotangent: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    """A mark in the graph: from here on `second` stands for `first`. Returns the cotangent, copied."""
    return cotangent.clone()


@again.register_fake
def _(cotangent: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(cotangent)


def point_at_second_gathers(graph: fx.Graph) -> int:
    """Carry out what the marks say, in place, and take them out. Returns how many uses were changed."""
    changed = 0
    for mark in [node for node in graph.nodes if node.target is torch.ops.functional_fsdp.again.default]:
        cotangent, first, second = mark.args
        gathers = dict(zip(map(_root, first), map(_root, second), strict=True))
        after = {node: i for i, node in enumerate(graph.nodes)}
        for old, new in gathers.items():
            if old is not new:
                if not _same(old, new):
                    raise ScheduleError(
                        "T.compile: a pullback was given other weights than its forward had; expected the unit's, "
                        "gathered again. torch.compile(train_step, fullgraph=True) runs the function again from any."
                    )
                changed += _replace(graph, old, new, mark, after)
        mark.replace_all_uses_with(cotangent)
        graph.erase_node(mark)
    return changed


def is_view(node: fx.Node) -> bool:
    """Whether a node's value lies in the bytes of its first argument's."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])  # of what was split
    return node.op == "call_function" and node.target in VIEWS


def _root(node: fx.Node) -> fx.Node:
    """The node whose views this one is."""
    while is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _same(a: Any, b: Any) -> bool:
    """Whether two values are made in the same way from the same inputs: one gather, issued twice."""
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return bool(a == b)
    if a is b:
        return True
    called = a.op == b.op == "call_function" and a.target == b.target
    return called and _same(a.args, b.args) and a.kwargs == b.kwargs


def _tree(root: fx.Node) -> Iterable[fx.Node]:
    """A node and all its views."""
    left = [root]
    while left:
        node = left.pop()
        yield node
        left += [user for user in node.users if is_view(user) and user.args[0] is node]


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node, mark: fx.Node, after: dict[fx.Node, int]) -> int:
    """Uses of `old` and its views after the mark: of `new` and its views."""
    twins = {old: new}

    def twin(node: fx.Node) -> fx.Node:
        if node not in twins:
            source: Any = node.args[0]
            base = twin(source)
            with graph.inserting_before(mark):
                copy = graph.node_copy(node, lambda n: base if n is source else n)
            twins[node] = copy
        return twins[node]

    changed = 0
    for node in [node for node in _tree(old) if after[node] < after[mark]]:
        for user in [user for user in node.users if user in after and after[user] > after[mark]]:
            user.replace_input_with(node, twin(node))
            changed += 1
    return changed


class Memory(NamedTuple):
    """Bytes a rank. arguments: the state and the batch; temporaries: the most that is alive beside them at any time;
    gathered: the most of that which are gathered weights; peak: arguments and temporaries."""

    arguments: int
    temporaries: int
    gathered: int
    peak: int


class Cost(NamedTuple):
    """flops: floating-point operations a rank, of matrix products, convolutions and attention. received: bytes that a
    rank receives in collectives."""

    flops: int
    received: int


class Lowered:
    """A train step as a graph. Printing it gives a table.

    Attributes:
        graph: the torch.fx.GraphModule, of ATen operations and functional collectives; its nodes carry fake values.
        collectives: the records that it carries out, in order of issue.
    """

    def __init__(self, graph: fx.GraphModule, sizes: Mapping[str, int]) -> None:
        self.graph = graph
        self.sizes = dict(sizes)
        issued = (node.meta.get(RECORD) for node in graph.graph.nodes)
        self.collectives: tuple[Collective, ...] = tuple(one for one in issued if one is not None)

    def memory_analysis(self) -> Memory:
        """What is alive when, from the graph: a tensor from the operation that makes it to its last use, or that of a
        view of it; what a collective reads until it is waited for. Compilers may do better (by fusion) or worse."""
        return _memory(self.graph.graph)

    def cost_analysis(self) -> Cost:
        """Operations (torch.utils.flop_counter's formulas) and traffic."""
        flops = 0
        for node in self.graph.graph.nodes:
            count = flop_registry.get(getattr(node.target, "overloadpacket", None))
            if node.op == "call_function" and count is not None:
                args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
                flops += count(*args, **kwargs, out_val=node.meta["val"])
        return Cost(int(flops), sum(one.received(self.sizes[one.axis]) for one in self.collectives))

    def __repr__(self) -> str:
        memory, cost = self.memory_analysis(), self.cost_analysis()
        counts: dict[tuple[str, ...], list[int]] = {}
        for one in self.collectives:
            said = (one.kind, one.lane, one.axis, str(one.dtype).removeprefix("torch."))
            counts.setdefault(said, []).append(one.nbytes)
        rows = [(*said, len(sizes), bytes_text(sum(sizes))) for said, sizes in counts.items()]
        axes = " × ".join(f"{axis} {n}" for axis, n in self.sizes.items())
        return (
            f"a step on mesh {axes}: {len(self.graph.graph.nodes)} operations\n"
            f"{table(('collective', 'lane', 'axis', 'dtype', 'issued', 'bytes in all'), rows)}\n"
            f"memory a rank: arguments {bytes_text(memory.arguments)}, temporaries {bytes_text(memory.temporaries)} "
            f"(gathered weights {bytes_text(memory.gathered)})\n"
            f"{cost.flops:.3g} floating-point operations a rank, {bytes_text(cost.received)} received"
        )


def lower(fn: Callable[..., Any], state: State, *args: Any, recompute: bool = False, **kwargs: Any) -> Lowered:
    """Trace `fn(state, *args, **kwargs)` without running it.

    Args:
        fn: a train step, in any of the three ways. Its collectives are the graph's, whatever the state's transport.
        state: any State between steps, or an `abstract_state` one.
        args, kwargs: as for `fn`; only shapes and dtypes count, and tensors may be on the meta device.
        recompute: whether a unit's backward runs its forward again, as under plain torch.compile, or, as under
            `T.compile`, uses the forward's residuals with the second gather.

    Raises:
        StaleStateError: a consumed state. ScheduleError: the step asks for a tensor's value; it names the line.

    Example:
        >>> from functional_fsdp import Spec, reduce, sgd, step, unshard
        >>> state = abstract_state({"w": torch.empty(1024, 1024, device="meta")}, Spec({"data": 4096}), sgd(lr=0.1))
        >>> def train_step(state, x):
        ...     state, w = unshard(state)
        ...     grads = torch.func.grad(lambda w: (x @ w["w"]).sum())(w)
        ...     return step(reduce(state, grads))
        >>> lower(train_step, state, torch.empty(8, 1024)).collectives[0].kind
        'all_gather'
    """
    try:
        found = graph_of(fn, state, args, kwargs, keep=not recompute)
    except (RuntimeError, AttributeError) as error:
        refuse_values(error, "lower")
        raise
    module = found.module
    point_at_second_gathers(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return Lowered(module, found.sizes)


def abstract_state(
    params: Any, spec: Spec, optimizer: Any = None, *, buffers: Mapping[str, torch.Tensor] | None = None
) -> State:
    """A State of shapes only, for `lower` and `T.step_memory`: no process group, no memory, any mesh.

    Args:
        params: a pytree of tensors, on the meta device or not.
        spec: on a mesh that is a mapping of axis sizes (`Spec({"data": 4096})`), or a DeviceMesh.
        optimizer, buffers: as for `shard`.

    Returns:
        a State whose tensors are on the meta device. It can be printed, lowered and given to `T.step_memory`, and
        nothing else.

    Example:
        >>> abstract_state({"w": torch.empty(8, 8, device="meta")}, Spec({"data": 2})).main["w"].local.device
        device(type='meta')
    """
    _, _, treedef = describe(params)
    layout = make_layout(params, spec)
    optimizer = as_optimizer(optimizer)
    check_labels(optimizer, spec)
    main, weights = {}, {}
    with torch.no_grad(), torch.device("meta"):
        for name, bucket in layout.buckets.items():
            local = torch.empty(bucket.numel // bucket.slices("main"), dtype=bucket.main, device="meta")
            main[name] = FlatBuffer(local, bucket, states_of(bucket, "main"), spec.mesh)
            if keeps_copy(bucket):
                bucket = bucket.gathered
                copy = torch.empty(bucket.numel // bucket.slices("weights"), dtype=bucket.gather, device="meta")
                weights[name] = FlatBuffer(copy, bucket, states_of(bucket, "weights"), spec.mesh)
        scales = {n: no_scales(b, torch.device("meta")) for n, b in layout.buckets.items() if b.in_float8}
        opt = optimizer.init({name: main[name] for name in layout.trainable}) if optimizer else {}
        kept = pytree.tree_map_only(torch.Tensor, torch.empty_like, dict(buffers or {}))
    run = Imagined(spec.axes, dict.fromkeys(spec.axes, 0))
    lineage = Lineage(run, layout, spec)  # type: ignore[arg-type]
    count, rng = (torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2))
    version, left = Version(lineage, 0), no_residual(layout, spec, torch.device("meta"))
    return State(main, weights, scales, {}, opt, kept, count, rng, {}, left, spec, layout, optimizer, treedef, version)


# ---------------------------------------------------------------- analysis


def _memory(graph: fx.Graph) -> Memory:
    nodes = list(graph.nodes)
    owner: dict[fx.Node, tuple[int, ...]] = {}  # the storages that a node's value lies in
    sizes: dict[int, int] = {}
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    gathered: set[int] = set()
    same: dict[int, int] = {}
    given: set[int] = set()
    reads: dict[int, tuple[int, ...]] = {}  # a collective's result -> what it reads, until it is waited for
    for i, node in enumerate(nodes):
        inputs = [owner[n] for n in node.all_input_nodes]
        used = {s for storages in inputs for s in storages}
        waits = "wait_tensor" in str(node.target)
        if waits or is_view(node):
            owner[node] = inputs[0]
            for t in pytree.tree_leaves(node.meta.get("val")):  # a waited-for value has a storage of its own, if fake
                if isinstance(t, FakeTensor) and len(inputs[0]) == 1:
                    same[t.untyped_storage()._cdata] = inputs[0][0]
        if waits:
            used |= {s for r in inputs[0] for s in reads.get(r, ())}
        elif node not in owner:
            found = [t.untyped_storage() for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, FakeTensor)]
            keys = tuple(same.get(storage._cdata, storage._cdata) for storage in found)
            for key, storage in zip(keys, found, strict=True):
                if key not in sizes:
                    sizes[key], begin[key] = storage.nbytes(), i
                    if node.op in ("placeholder", "get_attr"):
                        given.add(key)
                    if kind_of(node) == "all_gather":
                        gathered.add(key)
            owner[node] = keys
            if kind_of(node):
                reads |= {key: tuple(used) for key in keys}
        for key in (*used, *owner[node]):
            end[key] = i
    changes = [0] * (len(nodes) + 1)
    of_gathers = [0] * (len(nodes) + 1)
    for key, size in sizes.items():
        if key not in given:
            for delta in (changes, of_gathers) if key in gathered else (changes,):
                delta[begin[key]] += size
                delta[end[key] + 1] -= size
    arguments = sum(sizes[key] for key in given)
    temporaries, held = _highest(changes), _highest(of_gathers)
    return Memory(arguments, temporaries, held, arguments + temporaries)


def _highest(changes: list[int]) -> int:
    at = top = 0
    for change in changes:
        at += change
        top = max(top, at)
    return top
