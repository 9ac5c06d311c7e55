"""lower: a train step as a graph, without running it, for any number of ranks (as JAX's `jit(f).lower(...)`).

    state, batch ──fake tensors──▶ train_step, traced ──▶ Lowered: graph, collectives, memory, operations

No process group is needed, no GPU and no memory: `abstract_state` makes a state of shapes for a mesh of any size.

A pass over the graph of a traced step.

    forward    w1 = all_gather(shard) ──▶ y = x @ w1          backward as traced     dx = dy @ w1.t()
    backward   w2 = all_gather(shard) ──▶ (nobody)            after the pass         dx = dy @ w2.t()

A step traced whole, with its vjp inside, has no autograd that would save tensors: the backward uses the forward's
weights, which then stay gathered in between. Computing the unit again from the second gather would release them, for
the price of another forward. This pass costs nothing: whatever uses the first gather, or a view of it, after the
mark that `T.vjp` left, uses the second one. The values are the same: main weights do not change within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from .._common.errors import ScheduleError
from .._common.record import Collective
from .._common.torch_names import FakeTensor, pytree
from .._common.tree import bytes_text, table
from .._optim.optimizer import as_optimizer, check_labels
from .._plan.plan import keeps_copy
from .._plan.route import states_of
from .._spec.spec import Spec
from .._state.lineage import Lineage, Version
from .._state.shard import describe, make_layout, no_residual
from .._state.state import State
from .._storage import FlatBuffer, no_scales
from .graph import RECORD, Imagined, graph_of, kind_of, refuse_values

__all__ = [
    "Collective", "Cost", "Lowered", "Memory", "abstract_state", "again", "is_view", "lower",
    "point_at_second_gathers",
]  # fmt: skip

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
    except RuntimeError as error:
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
