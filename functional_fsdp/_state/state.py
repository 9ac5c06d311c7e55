"""A State, and what it gives out.

State: everything that training owns, as one frozen pytree. What makes a step a transaction is its `lineage`.

Out again: whole parameters, and zero-copy views of the local shards, by path. None of these consumes the state.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import torch
import torch.nn as nn

from .._common.calls import alone, ordinary, provided, tracing_now
from .._common.device import clone_as
from .._common.errors import ScheduleError, StaleStateError, TreeError
from .._common.torch_names import pytree
from .._common.tree import flatten, register
from .._engine.executor import Executor
from .._nn.skeleton import every_buffer, needs_module
from .._plan.cursor import Cursor, InFlight
from .._plan.layout import Layout
from .._plan.route import Partial, Replicated
from .._runtime.runtime import runtime_of
from .._spec.spec import Spec
from .._storage import FlatBuffer, Stored, at_home, leaf_shards, unpacked_leaves, whole_leaves
from .lineage import Lineage, Version

_state_table = provided("look.state_table")


class Context:
    """The static side of a State's tree: compared by (spec, layout, optimizer); the version rides along."""

    __slots__ = ("key", "layout", "optimizer", "spec", "treedef", "version")

    def __init__(self, state: State) -> None:
        self.spec, self.layout, self.optimizer = state.spec, state.layout, state.optimizer
        self.treedef, self.version = state.treedef, state.version
        self.key = (self.spec, self.layout, self.optimizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.key == other.key

    def __hash__(self) -> int:
        return hash((self.layout.hash, type(self.optimizer)))

    def __repr__(self) -> str:
        return f"Context(layout={self.layout.hash})"


@dataclass(frozen=True, eq=False, repr=False)
class State(Stored):
    """Parameters, gradients and optimizer state, sharded. A pytree; frozen; verbs return a new one.

    Below, b is a bucket's name and n_b its elements, padding included. All tensors are flat local shards. Where there
    is nothing, a dict is empty.

    Attributes:
        main: {b: FlatBuffer}, main weights, [n_b / ranks of main] elements of `Precision.main`.
        weights: {b: FlatBuffer}, compute copies that persist between steps, [n_b / ranks of weights] elements of
            `Precision.compute`, or `gather`; only where the placement needs one, or what is gathered is float8.
        scales: {b: tensor} of buckets that are gathered in float8, float32 [leaves of b]: by what main weights were
            multiplied before they were cast.
        grads: {b: FlatBuffer} of trainable buckets, elements of `Precision.grads`.
        opt: whatever the optimizer's `init` returned; `{}` without one.
        buffers: {path: tensor}, what modules keep beside parameters.
        count: int64 tensor [], steps taken.
        rng: int64 tensor [], the seed that everything random derives from.
        extras: {name: pytree}, what transforms carry along.
        residual: {b: FlatBuffer} of trainable buckets with `Precision(feedback=True)`: what packing has lost of this
            rank's gradients, [n_b] elements of `Precision.compute`, a summand on each rank. Changed by `step` only.
        spec, layout, optimizer, treedef: static.
        version: which state of its lineage this is.

    Printing a State gives a table. Between steps it can be pickled and deep-copied (the copy is a lineage of its own).
    """

    opt: Any
    buffers: dict[str, torch.Tensor]
    count: torch.Tensor
    rng: torch.Tensor
    extras: dict[str, Any]
    residual: dict[str, FlatBuffer]
    spec: Spec = field(metadata={"static": True})
    layout: Layout = field(metadata={"static": True})
    optimizer: Any = field(metadata={"static": True})
    treedef: pytree.TreeSpec = field(metadata={"static": True})
    version: Version = field(metadata={"static": True})

    def _evolve(self, **changes: Any) -> State:
        """A State with some fields replaced, unchecked (dataclasses.replace, without its cost): for packages only."""
        new = object.__new__(State)
        made, own = new.__dict__, self.__dict__
        for name in FIELDS:  # one by one: compilers of torch 2.11 cannot read the whole `__dict__`
            made[name] = changes[name] if name in changes else own[name]
        return new

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, in order of use in a forward."""
        return tuple(unit.name for unit in self.layout.units)

    @property
    def steps(self) -> int:
        """How many steps were taken. Waits for the device after compiled steps, which count there.

        In a step that drives a module and is compiled or lowered it is a ScheduleError: compute with `count`.
        """
        graph = tracing_now()
        if graph is not None:
            graph.note_count()
        return self._steps

    @property
    def _steps(self) -> int:
        """As `steps`; where a graph is made, those that were taken before."""
        if tracing_now() is not None:
            return self._lineage.steps
        return self.version.lineage.recount(self.count)

    @property
    def local_buffers(self) -> frozenset[str]:
        """The paths of buffers that may differ by rank, as `shard(local_buffers=)` said."""
        return self._lineage.local_buffers

    @property
    def _lineage(self) -> Lineage:
        """The lineage, also in the middle of a traced step, where the version has a base."""
        base: Version = getattr(self.version, "base", self.version)
        return base.lineage

    @property
    def _executor(self) -> Executor:
        """What carries out this lineage's schedule."""
        lineage = self.version.lineage
        return lineage.executor or lineage.have_executor(self.layout, self.spec, self.residual)

    def _prepared(self) -> State:
        """This state, with what its ranks share made: for whoever makes it while all are there. Collective."""
        if self.spec.transport.stays:
            self._executor.share()
        return self

    @property
    def shared_bytes(self) -> int:
        """Bytes on this rank that a transport keeps beside the state's own: what other ranks read, or NCCL knows."""
        executor = self.version.lineage.executor
        return executor.carrier.nbytes if executor else 0

    @property
    def cursor(self) -> Cursor:
        """Where the program stood when this state was returned: the plan, the use that is expected next, what is
        issued, live, held and awaited. Printing it gives a table.

        A value: it never changes, nor does looking at it wait for anything, or keep anything alive. That of an old
        state shows what stood then, and does not make that state usable.
        """
        self.version.lineage.follow()
        if self.version.serial == self.version.lineage.head:
            return self._executor.progress.cursor  # peers may have had it start more since
        if self.version.cursor is None:
            self.version.cursor = self._executor.progress.positions.start.cursor
        return self.version.cursor

    @property
    def in_flight(self) -> InFlight:
        """What this lineage's lanes have not done yet: units that are being gathered, and how many reductions. Waits
        for nothing. Of the newest state only; of others nothing is in flight.
        """
        lineage = self.version.lineage
        if lineage.executor is None or self.version.serial != lineage.head:
            return InFlight((), 0)
        return lineage.executor.in_flight

    @property
    def between_steps(self) -> bool:
        """Whether this is a base: nothing gathered, nothing in flight, no gradients."""
        if tracing_now() is not None:  # in the middle of a step its version has a base
            return not (hasattr(self.version, "base") or self.version.spent or self.grads)
        lineage = self.version.lineage
        lineage.follow()
        return self.version.serial == lineage.base and not self.grads

    def _valid(self, what: str) -> None:
        """Raise StaleStateError if a step has consumed this state."""
        self.version.lineage.valid(self.version.serial, what)

    def _resting(self, what: str) -> None:
        """Raise StaleStateError unless this is a valid state between steps, as whoever copies or saves it needs; an
        update comes after what is read from here on."""
        self._valid(what)
        if not self.between_steps:
            raise StaleStateError(
                f"{what}: this State is in the middle of a step. Use the state before the step, or after step()."
            )
        self.version.lineage.touched()

    # ---- copies

    @alone
    def __getstate__(self) -> dict[str, Any]:
        self._resting("pickle")
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "version"}
        example = self.treedef.unflatten(range(self.treedef.num_leaves))  # torch warns when it unpickles a TreeSpec
        plain = {n: b.but(b.local.view(torch.uint8)) if n in self.scales else b for n, b in self.weights.items()}
        return {**kept, "treedef": example, "steps": self.steps, "weights": plain,  # torch pickles no float8
                "local_buffers": self.local_buffers}  # fmt: skip

    def __setstate__(self, kept: dict[str, Any]) -> None:
        spec = kept["spec"]
        steps, local = kept.pop("steps"), kept.pop("local_buffers", ())
        version = Version(Lineage(runtime_of(spec.mesh), kept["layout"], spec, steps, kept["count"], local), 0)
        kept["treedef"] = pytree.tree_structure(kept["treedef"])
        for name in kept["scales"]:
            kept["weights"][name] = (buffer := kept["weights"][name]).but(buffer.local.view(buffer.bucket.gather))
        kept.update(main=at_home(kept["main"]), opt=at_home(kept["opt"]), weights=at_home(kept["weights"], True))
        for name, value in {**kept, "version": version}.items():
            object.__setattr__(self, name, ordinary(value) if name in CHILDREN else value)

    @alone
    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        self._resting("copy")

        def clone(x: Any) -> Any:
            return clone_as(x) if isinstance(x, torch.Tensor) else copy.deepcopy(x, memo)

        trees = {name: pytree.tree_map(clone, getattr(self, name)) for name in CHILDREN}
        lineage = self.version.lineage
        new = lineage.heir(lineage.runtime, self.layout, self.spec, self.steps, trees["count"])
        return self._evolve(**trees, version=Version(new, 0))

    def __copy__(self) -> State:
        return copy.deepcopy(self)  # two lineages must not share buffers: step reuses them

    def __fsdp_settings__(self) -> Any:
        """What counts of it where a setting refers to it (an optimizer that closes over a State, say)."""
        return "State", self.layout.hash

    # ---- pictures

    def _status(self) -> str:
        """Where it is in its step, or why it is of no more use; in a few words."""
        lineage, serial = self.version.lineage, self.version.serial
        lineage.follow()
        if lineage.broken and serial >= lineage.base:
            return f"taken by {lineage.moved_by}()" if lineage.moved_by else "of no more use"
        if self.between_steps:
            return "between steps"
        return "in the middle of a step" if serial == lineage.head else f"consumed by {lineage.consumer(serial)}"

    def __repr__(self) -> str:
        return _state_table(self)


FIELDS = tuple(f.name for f in fields(State))
CHILDREN = tuple(f.name for f in fields(State) if not f.metadata)


def _unflatten(context: Context, children: tuple[Any, ...]) -> State:
    static = (context.spec, context.layout, context.optimizer, context.treedef, context.version)
    return State(*children, *static)  # type: ignore[call-arg]


register(State, lambda s: (tuple(getattr(s, name) for name in CHILDREN), Context(s)), CHILDREN, _unflatten)


M = TypeVar("M", bound=nn.Module)


@alone
@torch.no_grad()
def full_params(state: State) -> Any:
    """The whole parameters on every rank, in `Precision.main`: shards [n / ranks] -> leaves of global shapes.

    Returns:
        the tree that was sharded, with tensors of your own, of packed leaves `PackedWeight`s; tied leaves are the same
        tensor at each path. When the tree
        came from `functionalize`, `module.load_state_dict` takes it (with strict=False if the module has buffers).

    Raises:
        StaleStateError: a state that `step` has consumed.

    Collective: one all-gather a bucket and sharded axis, on a lane of its own: every rank must call it.

    Example: `torch.save(fsdp.full_params(state), "model.pt")`.
    """
    state._valid("full_params")
    views: dict[str, torch.Tensor] = {}
    with state.version.lineage.looking(state):
        state.version.lineage.touched()
        for name in state.layout.buckets:
            own = {path: leaf.clone() for path, leaf in whole_leaves(state.main[name]).items()}
            views |= unpacked_leaves(state.layout.buckets[name], own)
    return state.treedef.unflatten([views[path] for path in state.layout.source])


@alone
def local_shards(
    state: State, kind: Literal["main", "weights", "grads"] = "main", *, unique: bool = False
) -> dict[str, torch.Tensor]:
    """This rank's part of every leaf, as 1-D views of the state's own buffers: no copy, no communication.

    Args:
        kind: of "grads", reductions that are due are waited for, and no others. A unit whose gradient has come too
            early for its turn is not in it before `finish_reductions`.
        unique: where several ranks hold the same part (ddp, hsdp, compute copies), all but the first of them get empty
            views. Then each element of a leaf is on one rank, and a sum over ranks counts it once. (Experts of which
            ranks have their own are not the same part: each counts.)

    Returns:
        `{path: [elements of this leaf that this rank holds]}`; empty where it holds none. Since a bucket is cut
        whatever the leaf boundaries, a part is a run of the flattened leaf, not whole rows. Tied leaves
        appear once. Frozen leaves have no gradients; placements without compute copies have no "weights". Of leaves
        that are gathered in float8 these are the weights times `state.scales`, in float8. Main weights are to be read:
        compute copies (ddp, zero1, zero2, `Precision(gather=)`) do not follow a write, see `extend.change_weights`.

    Raises:
        StaleStateError: a state that `step` has consumed. ScheduleError: `unique` gradients that are still partial
            (`reduce(..., last_microbatch=False)`), of which each rank holds a summand.

    Example, the norm of the weights:
        >>> mine = fsdp.local_shards(state, unique=True).values()
        >>> state, square = fsdp.psum(state, sum(part.square().sum() for part in mine))
    """
    state._valid("local_shards")
    if kind not in ("main", "weights", "grads"):
        raise TreeError(f"local_shards(state, {kind!r}): expected one of 'main', 'weights', 'grads'.")
    tree, lineage = getattr(state, kind), state.version.lineage
    if kind == "grads" and tree:
        lineage.enter(state.version.serial, "local_shards")
        with lineage:
            state._executor.look(state)
    elif kind != "grads":
        lineage.touched()
    at = runtime_of(state.spec.mesh).coordinate
    found: dict[str, torch.Tensor] = {}
    for name, buffer in (tree or {}).items():
        assert isinstance(buffer, FlatBuffer)
        if unique and any(placed is Partial for _, placed in buffer.states):
            raise ScheduleError(
                f"local_shards(state, {kind!r}, unique=True): the gradients of {name!r} are partial, {buffer!r}: each "
                "rank holds a summand of every element. Call state = fsdp.finish_reductions(state) first."
            )
        same = (axis for axis, placed in buffer.states if placed is Replicated)
        elsewhere = unique and any(at[axis] for axis in (*same, *buffer.bucket.equal))
        for leaf, _, local in leaf_shards(buffer):
            found[leaf.path] = local[:0] if elsewhere else local
    return found


def buffers(module: nn.Module, *, every: bool = False) -> dict[str, torch.Tensor]:
    """Copies of the buffers of a module by path, for `shard(params, spec, optimizer, buffers=buffers(module))`.

    Args:
        every: those that are not persistent, too: what a forward makes of them then comes back in the new state, each
            rank's own, and is in checkpoints. For running counts; masks and tables would be copied in each forward.
    """
    needs_module("buffers(module)", module)
    return {path: held[name].detach().clone() for path, held, name in every_buffer(module, persistent=not every)}


@alone
def state_dict(state: State, module: nn.Module | None = None) -> dict[str, Any]:
    """Whole parameters and the state's buffers by path, on every rank, for `plain.load_state_dict`.

    Args:
        module: the model, or its skeleton. It knows what a state does not, and what `load_state_dict` asks for: the
            versions of its classes (without them one that has changed its format takes new weights for old ones, and
            converts them), what its parts add by `get_extra_state`, and further paths of a module with buffers that
            has several. Leave it out of parameters that are of no module.

    Returns:
        tensors of your own; what is tied, or has several paths, is the same tensor at each. With a module an
        OrderedDict as the module's own `state_dict()` gives, with its `_metadata`.

    Raises:
        TreeError: a parameter and a buffer have one path. Else, and collective: as `full_params`.

    Example: `plain.load_state_dict(fsdp.state_dict(state, model))`.
    """
    both = set(state.layout.paths) & set(flatten(state.buffers)[0])
    if both:
        raise TreeError(
            f"state_dict: a parameter and a buffer are both called {min(both)!r}. Use full_params(state) and "
            "state.buffers, or rename one of them."
        )
    found = dict(zip(state.layout.paths, pytree.tree_leaves(full_params(state)), strict=True))
    found |= {path: value.clone() for path, value in zip(*flatten(state.buffers)[:2], strict=True)}
    return found if module is None else _of_module(module, found)


def _of_module(module: nn.Module, found: dict[str, Any]) -> dict[str, Any]:
    """The same, with what a module knows of it."""
    needs_module("state_dict(module)", module)
    out: Any = OrderedDict(found)
    out._metadata = OrderedDict()
    first: dict[nn.Module, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        out._metadata[path] = {"version": part._version}
        prefix = f"{path}." if path else ""
        source = first.setdefault(part, path)
        for name in part._buffers if source != path else ():
            if f"{source}.{name}" in found:
                out.setdefault(f"{prefix}{name}", found[f"{source}.{name}"])
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            out[f"{prefix}_extra_state"] = part.get_extra_state()
    return out
