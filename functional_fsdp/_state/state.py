"""State: everything that training owns, as one frozen pytree. What makes a step a transaction is its `lineage`."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from .._common.calls import alone, ordinary, provided
from .._common.device import clone_as
from .._common.errors import StaleStateError
from .._common.torch_names import pytree
from .._common.tracing import tracing_now
from .._common.tree import register
from .._engine.executor import Executor
from .._plan.cursor import Cursor, InFlight
from .._plan.layout import Layout
from .._runtime.runtime import runtime_of
from .._spec.spec import Spec
from .._storage import FlatBuffer, Stored, at_home
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
