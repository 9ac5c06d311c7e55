"""Steps that are compiled whole.

    Draws, Seeded                random numbers of such a step
    StepCall, flat_state         arguments: what a program goes by, and what none can go by
    CompiledStep, Programs       a step that drives a module, traced, compiled, and run again while its guards hold
    compile                      the way to all of them

Random numbers of a compiled step: those of (state.rng, state.count, rank, which draw of the step it is).

    eager      the host seeds a generator for each microbatch (`_seed`): it knows the step's number
    compiled   the graph computes the seeds that Inductor draws from, out of the state's seed and count

So masks differ by step, draw and rank, nothing waits for the device, and a step that is taken again draws the same.
What does not draw from Inductor's seeds (attention's kernels, permutations) would draw from the process's own
generator, and is refused.

Whole steps: a train step that drives a module, traced as it runs, compiled, and run again while its guards hold.

    train_step(state, ...)   run once, from fake tensors             graph of ATen operations, collectives, the update
    graph                    residuals read from the second gather    (`_graph.graph`)
                             compiled by Inductor                     CompiledStep

Python runs when a program is made, and not again. A program is for calls that look as that one did: structures, shapes,
dtypes, numbers and other constants among the arguments, modes of the models, autograd's and autocast's state.

Arguments: Python runs when a program is made, and not again. So what a step reads of its arguments is a tensor, or is
compared by value before the program is used again. What may change without being another value is refused.

`compile`: a whole train step as one compiled graph, gathers, reductions and update included.

torch.compile(train_step, fullgraph=True)   a unit's backward computes its forward again, from the second gather
T.compile(train_step)                       it does not: the forward's residuals are read from the second gather

    ways 1 and 2   Dynamo reads the step's Python, and guards what it reads
    way 3          a driver decides as it runs, so what runs is traced, once (`CompiledStep`)

Which it is a first trace shows: whether the step has called `forward_backward` or `apply`.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import operator
import pathlib
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.fx as fx

from functional_fsdp import FsdpError, ScheduleError, SpecError, State
from functional_fsdp._seams import (
    Graph,
    GraphBuild,
    aliased_by,
    begin_compiled,
    expect,
    graph_of,
    keep_residuals,
    outside_inference,
    point_at_second_gathers,
    refuse_values,
    torch_private,
    users_line,
)
from functional_fsdp.extend import Collective, Ranks, evolve, lineage_of, ranks_of

from .._seed import seeded
from .compile_units import named as named_in_profiles
from .compile_units import through_inductor
from .startup import finish_start, waiting

LARGEST = (1 << 63) - 1
#: what Inductor draws from its seeds
DRAWN = {"bernoulli", "bernoulli_", "native_dropout", "normal_", "rand", "rand_like", "randint", "randint_like",
         "randn", "randn_like", "uniform", "uniform_"}  # fmt: skip
NONE = "set its rate to 0, or run this step eagerly"


@torch.library.custom_op("functional_fsdp::seeds", mutates_args=())
def seeds(rng: torch.Tensor, count: torch.Tensor, n: int, rank: int) -> torch.Tensor:
    """Seeds [n] of int64, from 0, for draws of the step `count` on a rank: splitmix64 of all of them."""
    z = torch.arange(n, device=count.device) * _signed(0x9E3779B97F4A7C15)
    for value in (rng, count, rank):
        z = _mixed(z + value * _signed(0xD1B54A32D192ED03) + _signed(0x8CB92BA72F3D8DD7))
    return z & LARGEST


@seeds.register_fake
def _(rng: torch.Tensor, count: torch.Tensor, n: int, rank: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.int64, device=count.device)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mixed(z: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, as an unsigned number."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def draws(func: Any, args: Sequence[Any] = (), kwargs: Any = None) -> bool:
    """Whether an operation draws random numbers, called with these."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # of attention
            rate = args[i] if i < len(args) else (kwargs or {}).get("dropout_p", argument.default_value)
            return bool(rate)
    return True


class Draws(torch_private.OperationMode):
    """Notes what is drawn while a graph is made.

    Attributes:
        ops: {operation: the user's line that drew first}. backward: those that a backward drew. others: those that do
            not draw from Inductor's seeds. python: whether Python's or numpy's generator moved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, str] = {}
        self.backward: dict[str, str] = {}
        self.others: dict[str, str] = {}
        self.python = False

    def __enter__(self) -> Draws:
        self.before = _of_python()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.python = self.before != _of_python()

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if draws(func, args, kwargs):
            where = self.ops if torch_private.autograd_node() is None else self.backward
            where.setdefault(str(func), users_line(_stack()))
            own = any(isinstance(value, torch.Generator) for value in kwargs.values())
            if func._schema.name.split("::")[1] not in DRAWN or own:
                self.others.setdefault(str(func), where[str(func)])
        return func(*args, **kwargs)

    def refuse(self) -> None:
        """Raise for what a graph would draw alike in each step, or not as the forward did."""
        if self.python:
            raise ScheduleError(
                "compile: the step draws from Python's or numpy's random numbers, which a graph would have once and "
                "for all (layer drop, say). Draw with torch, or run this step eagerly."
            )
        for op, line in self.others.items():
            raise ScheduleError(
                f"compile: {op}, at {line}, draws by itself, and random numbers of a compiled step come from the "
                f"state's seed and count. Where it is dropout inside attention, {NONE}, or have attention computed by "
                "plain operations; else draw outside the step, and give it what was drawn."
            )
        for op, line in self.backward.items():
            raise ScheduleError(
                f"compile: the backward draws random numbers ({op}), at {line}. Activation checkpointing runs a "
                f"forward again, which would draw another mask than it had. Where it is dropout, {NONE}; or leave "
                "activation checkpointing out."
            )


def _stack() -> Iterator[tuple[FrameType, int]]:
    """Of the caller's caller, the innermost frame first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _of_python() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()


class Seeded:
    """A pass for Inductor's graphs: its seeds, from the state's.

    Args:
        rng, count: which inputs of the graph these are. inputs: how many it has.
    """

    def __init__(self, rng: int, count: int, inputs: int, rank: int) -> None:
        self.key = (rng, count, inputs, rank)
        self.left: list[str] = []  # operations that draw by themselves

    def __call__(self, graph: fx.Graph) -> None:
        rng, count, inputs, rank = self.key
        given = [node for node in graph.nodes if node.op == "placeholder"]
        for node in [node for node in graph.nodes if node.op == "call_function" and draws(node.target, node.args)]:
            name = str(node.target)
            if "inductor_seeds" not in name or len(given) != inputs:
                self.left.append(name)
                continue
            with graph.inserting_before(node):
                new = graph.call_function(
                    torch.ops.functional_fsdp.seeds.default, (given[rng], given[count], node.args[0], rank)
                )
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)

    def refuse(self, drawn: Mapping[str, str]) -> None:
        """Raise for operations that would draw from the process's own generator."""
        if self.left:
            raise ScheduleError(
                f"compile: {self.left[0]} would draw from the process's own random numbers; those of a compiled step "
                f"come from the state's seed and count. The step draws with {drawn}. Where it is dropout, {NONE}; and "
                "leave fallback_random as it is."
            )


STRIDED = (torch.strided, torch.jagged)
FIXED = (
    type(None), type(Ellipsis), int, float, complex, str, bytes, range, enum.Enum, type, types.FunctionType,
    types.BuiltinFunctionType, types.ModuleType, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    decimal.Decimal, fractions.Fraction, pathlib.PurePath, re.Pattern, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.finfo, torch.iinfo, torch_private.OpOverload, torch_private.OpOverloadPacket,
)  # fmt: skip
#: of these equal ones may print otherwise
SHOWN = (float, complex, decimal.Decimal, range, datetime.date, datetime.time, pathlib.PurePath)


def kind_of(leaf: Any) -> Any:
    """What has to be equal of a leaf."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    return exact(leaf)


def exact(value: Any) -> Any:
    """Equal for values that no Python can tell apart. `==` says so of more: of 0.0 and -0.0, of ranges that count
    alike, of one moment in two time zones, and, in a frozen dataclass, of 1 and True, and whatever a field holds that
    is not compared. Of two NaNs it does not. Lists, dicts and sets in it are what they hold now.

    Raises:
        SpecError: a value that holds itself.
    """
    try:
        return _exact(value)
    except RecursionError:
        raise SpecError(
            f"compile, cuda_graph: a {type(value).__name__} among the step's arguments holds itself, or is nested more "
            "deeply than Python counts, so it cannot be told from others. Let the step itself hold it."
        ) from None


def _exact(value: Any) -> Any:
    found: Any = value
    if isinstance(value, frozenset) or type(value) is set:
        found = frozenset(map(_exact, value))
    elif isinstance(value, tuple) or type(value) in (list, dict):
        found = (*map(_exact, value.items() if type(value) is dict else value),)
    elif _frozen(value):
        found = tuple((name, _exact(part)) for name, part in _held(value))
    elif isinstance(value, SHOWN) or _of_numpy(value):
        found = repr(value), value if value == value else None  # a class may have a `repr` of its own
    return type(value), found


class StepCall:
    """A call of a step.

    Attributes:
        states: those among its arguments, in order.
        leaves: of all of them, as `resolved`.
        structure: of all of them; it keeps no State alive.
    """

    def __init__(self, *arguments: Any) -> None:
        found, structure = torch_private.pytree.tree_flatten(arguments, is_leaf=is_state)
        self.states: list[State] = []
        self.leaves: list[Any] = []
        structures: list[Any] = [structure]
        for leaf in found:
            if isinstance(leaf, State):
                parts, structure = flat_state(leaf)
                self.states.append(leaf)
                self.leaves += parts
                structures += [structure, leaf.local_buffers]
            else:
                self.leaves.append(resolved(leaf))
        self.structure = tuple(structures)


def resolved(leaf: Any) -> Any:
    """A leaf with the values that it stands for: a graph does not see that a tensor is to be read negated or conjugated
    (`z.conj().imag`)."""
    if isinstance(leaf, torch.Tensor) and (leaf.is_neg() or leaf.is_conj()):
        return leaf.resolve_neg().resolve_conj()
    return leaf


def is_state(node: Any) -> bool:
    return isinstance(node, State)


def flat_state(state: State) -> tuple[list[Any], Any]:
    """A State's leaves, and its structure without its version, which would keep its lineage alive."""
    found: tuple[list[Any], Any] = torch_private.pytree.tree_flatten(evolve(state, version=None))
    return found


def named(state: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a call, in order, each with its name."""
    for tree, of in (((state, *args), "(state, *args)"), (kwargs, "the keyword arguments")):
        for path, leaf in torch_private.pytree.tree_flatten_with_path(tree)[0]:
            yield f"{torch_private.pytree.keystr(path)} of {of}", leaf


def refuse_sparse(state: Any, args: Any, kwargs: Any) -> None:
    """Raise a SpecError if a leaf is a tensor without strides."""
    for name, leaf in named(state, args, kwargs):
        if isinstance(leaf, torch.Tensor) and leaf.layout not in STRIDED:
            layout = str(leaf.layout).removeprefix("torch.")
            raise SpecError(
                f"compile: {name} is a tensor of the layout {layout}, which torch does not compile. Give its parts as "
                "tensors, as x.indices() and x.values(), or x.to_dense(); or run this step eagerly."
            )


def refuse_mutable(state: Any, args: Any, kwargs: Any) -> None:
    """Raise a SpecError if a leaf is neither a tensor nor something that never changes."""
    for name, leaf in named(state, args, kwargs):
        if not isinstance(leaf, torch.Tensor) and not _fixed(leaf):
            raise SpecError(
                f"compile: {name} is a {kind(leaf, _fixed)}, whose contents may change. The step's Python runs once, "
                "so a graph would keep what is in it now. Give tensors in tuples, lists or dicts, and numbers or "
                "strings; let the step itself hold what never changes, as a model."
            )


def _fixed(value: Any, seen: bool = True) -> bool:
    """Whether a value never changes. seen: or so that `exact` sees it, which looks into no method and no partial."""
    if isinstance(value, tuple | frozenset) or (seen and type(value) in (list, dict, set)):
        return all(_fixed(part, seen) for part in (value.items() if type(value) is dict else value))
    if isinstance(value, types.MethodType):
        return _fixed(value.__self__, False)
    if isinstance(value, partial):
        return all(_fixed(part, False) for part in (value.func, *value.args, *value.keywords.values()))
    if _frozen(value):
        return all(_fixed(part, seen) for _, part in _held(value))
    return isinstance(value, FIXED) or _of_numpy(value)


def kind(value: Any, fits: Callable[[Any], bool]) -> str:
    """Its class, and the first part that does not fit: of a frozen dataclass a field, of a list and its like what it
    holds."""
    parts: Iterable[tuple[str, Any]] = ()
    if _frozen(value):
        parts = ((f"whose field {name!r} is", part) for name, part in _held(value))
    elif isinstance(value, tuple | list | dict | set | frozenset):
        parts = (("with", part) for part in (*value, *(value.values() if isinstance(value, dict) else ())))
    found = next((f" {how} a {kind(part, fits)}" for how, part in parts if not fits(part)), "")
    return type(value).__name__ + found


def _frozen(value: Any) -> bool:
    """Whether a value is a frozen dataclass."""
    return is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]


def _held(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that are set (one with `init=False` may not be), by name."""
    return [(field.name, getattr(value, field.name)) for field in fields(value) if hasattr(value, field.name)]


def _of_numpy(value: Any) -> bool:
    """Whether a value is a number of NumPy's. (A record of several can be written to.)"""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void)


DEVICES = ("cpu", "cuda")
MOST = 16  # programs that are kept
MANY = 4  # programs after which to say that they are many


class CompiledStep:
    """A compiled step.

    Args:
        graph: of the step. drawn: what it draws.
        call, kind: that it was traced from.
    """

    def __init__(
        self, graph: Graph, drawn: Draws, call: StepCall, kind: Any, backend: str, config: dict[str, Any],
    ) -> None:  # fmt: skip
        self.kind = kind
        self.words = [*map(_said, call.leaves)]
        self.guards = [(guard, guard()) for guard in graph.session.guards]
        self.inputs, self.given = graph.inputs, graph.given
        self.out, self.structure = torch_private.pytree.tree_flatten(graph.out, is_leaf=is_state)
        self.states = {}
        for i, leaf in enumerate(self.out):
            if isinstance(leaf, State):
                self.states[i] = (*flat_state(leaf), graph.took(leaf), leaf.version)
        self.stepped = graph.stepped
        module = graph.module
        own = {id(leaf) for state in call.states for leaf in flat_state(state)[0]}
        self.given_tensors = [k for k, i in enumerate(self.inputs) if id(call.leaves[i]) not in own]
        self.written = _written(module.graph).intersection(self.given_tensors) if backend == "inductor" else set()
        self._refuse_shared([call.leaves[i] for i in self.inputs])
        point_at_second_gathers(module.graph)
        self.constants = _lifted(module)
        offsets = {id(offset): k for k, offset in enumerate(graph.offsets)}
        self.offsets = [(i, offsets[id(t)]) for i, t in enumerate(self.constants) if id(t) in offsets]
        output = module.graph.output_node()  # what it was given need not come out again
        (results,) = output.args
        output.args = ([node for node, i in zip(results, self.given, strict=True) if i < 0],)  # type: ignore[arg-type]
        module.graph.eliminate_dead_code()
        module.recompile()
        self.inductor = backend == "inductor"
        self.seeded = bool(drawn.ops) and not self.inductor
        with self._plain():
            run = self._compiled(module, drawn, call, config) if self.inductor else module.forward
        self.run = named_in_profiles(run, graph.session.issued)

    def _compiled(
        self, module: fx.GraphModule, drawn: Draws, call: StepCall, config: dict[str, Any]
    ) -> Callable[..., Any]:
        """By Inductor."""
        examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        state = call.states[0]
        rng, count = (
            next(k for k, i in enumerate(self.inputs) if call.leaves[i] is t) for t in (state.rng, state.count)
        )
        change = Seeded(rng, count, len(examples), ranks_of(state).drawer)
        run = through_inductor(module, examples, config, change, *change.key)
        change.refuse(drawn.ops)
        return run

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """Where the graph's operations are what they say: what autograd and autocast do is in it already."""
        with ExitStack() as off:
            off.enter_context(torch.no_grad())
            for device in DEVICES:
                if torch.is_autocast_enabled(device):
                    off.enter_context(torch.autocast(device, enabled=False))
            yield

    @contextmanager
    def _whole_or_broken(self, states: list[State], inputs: list[torch.Tensor]) -> Iterator[None]:
        """What updates weights and is stopped may have updated some. Inductor's code says nowhere how far it came;
        where the graph's own operations run, versions do."""
        before = [] if self.inductor else [t._version for t in inputs if not t.is_inference()]
        try:
            yield
        except BaseException as error:
            untouched = before and before == [t._version for t in inputs if not t.is_inference()]
            for k in () if untouched else self.stepped:
                lineage_of(states[k]).give_up(
                    f"a compiled step was stopped by {type(error).__name__}, and may have updated some of the weights, "
                    "so this State may be half updated. Load the last checkpoint."
                )
            raise

    def _refuse_shared(self, inputs: list[torch.Tensor]) -> None:
        """Inductor's code reads and writes each argument as if no other had its memory."""
        for k in self.written:
            storage = inputs[k].untyped_storage()._cdata
            both = [i for i in self.given_tensors if inputs[i].untyped_storage()._cdata == storage]
            shared = [both[i] for i in sorted(torch_private.overlapping([inputs[i] for i in both]))]
            if k not in shared:
                continue
            said = ", ".join(f"{str(inputs[k].dtype).removeprefix('torch.')} {[*inputs[k].shape]}" for k in shared)
            raise SpecError(
                f"compile: the step writes to an argument, and others have its memory, too: {said}. Inductor's code "
                "would read what was there before. Give a clone, or say T.compile(step, 'aot_eager')."
            )

    def serves(self, kind: Any) -> bool:
        """Whether it is for such a call."""
        return bool(kind == self.kind) and all(guard() == value for guard, value in self.guards)

    def __call__(self, call: StepCall) -> Any:
        states = call.states
        inputs = [call.leaves[i] for i in self.inputs]
        self._refuse_shared(inputs)
        for i, k in self.offsets:
            self.constants[i] = lineage_of(states[k]).offset  # type: ignore[assignment]  # one that runs has it
        with self._whole_or_broken(states, inputs), self._plain():
            if self.seeded:
                with seeded(states[0], 0, int(states[0].count)):
                    new = iter(self.run(*inputs, *self.constants))
            else:
                new = iter(self.run(*inputs, *self.constants))
        tensors = iter([next(new) if i < 0 else inputs[i] for i in self.given])

        def filled(found: list[Any]) -> list[Any]:
            return [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in found]

        after = {k: lineage_of(states[k]).stepped(states[k].version) for k in self.stepped}
        out = []
        for i, leaf in enumerate(self.out):
            if i in self.states:
                parts, structure, took, version = self.states[i]
                if took is not None:
                    k, taken = took
                    version = after[k] if taken else states[k].version
                out.append(evolve(torch_private.pytree.tree_unflatten(filled(parts), structure), version=version))
            else:
                out += filled([leaf])
        return torch_private.pytree.tree_unflatten(out, self.structure)


def _written(graph: fx.Graph) -> set[int]:
    """Which inputs of a fresh graph operations write to, by their number."""
    found: set[int] = set()
    of = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder"))}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in of:
            of[node] = of[node.args[0]]
        known = hasattr(node.target, "_schema")
        for one, writes in aliased_by(node.target, node.args, node.kwargs) if known else ():
            if one in of:
                of[node] = of[one]  # a view of it
                if writes:
                    found.add(of[one])
    return found


def _lifted(module: fx.GraphModule) -> list[torch.Tensor]:
    """The graph's constants, which are arguments of it from now on."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    found: dict[str, fx.Node] = {}
    values = []
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if isinstance(getattr(module, name), fx.GraphModule):  # of a higher-order operator
            continue
        if name not in found:
            values.append(getattr(module, name))
            with graph.inserting_after(last):
                found[name] = last = graph.placeholder(f"constant_{len(values)}")
            last.meta = dict(node.meta)
        node.replace_all_uses_with(found[name])
        graph.erase_node(node)
    return values


class Programs:
    """The programs of one train step, the newest last, and which calls drive no module."""

    def __init__(self, fn: Callable[..., Any], backend: str, config: dict[str, Any]) -> None:
        self.fn, self.backend, self.config = fn, backend, config
        self.found: list[CompiledStep] = []
        self.plain: set[Any] = set()
        self.made = 0
        self.agreed: set[tuple[str, ...]] = set()  # collectives that every rank has
        self.issued: tuple[Collective, ...] = ()  # of the newest step that drives no module

    def find(self, state: State, args: Any, kwargs: Any) -> Callable[[], Any] | None:
        """A call of its program, made if there is none; None if the step drives no module: then Dynamo, which follows
        Python, compiles it.

        Collective, if it is made, see `graph_of`.
        """
        if self.plain and _signature(args, kwargs) in self.plain:
            return None
        call = StepCall(state, args, kwargs)
        try:
            kind = (call.structure, _around(), [*map(kind_of, call.leaves)])
        except RuntimeError:  # of a tensor of compressed rows, which has no strides
            refuse_sparse(state, args, kwargs)
            raise
        for program in reversed(self.found):
            if program.serves(kind):
                _begin_others(call.states)
                return partial(program, call)
        with waiting():
            made = self._make(state, args, kwargs, call, kind)
        if made is None:
            self.plain.add(_signature(args, kwargs))
            return None
        self.made += 1
        if self.made == MANY:
            warnings.warn(
                f"compile: the step is traced and compiled for the {MANY}th time, since "
                f"{self._other(state, args, kwargs, kind)}. Give numbers that change as tensors, and batches of few "
                "shapes.",
                RuntimeWarning,
                stacklevel=4,
            )
        self.found = [*self.found[1 - MOST :], made]
        return partial(made, call)

    def _make(self, state: State, args: Any, kwargs: Any, call: StepCall, kind: Any) -> CompiledStep | None:
        begun: list[GraphBuild] = []
        drawn = Draws()

        def step(*args: Any, **kwargs: Any) -> Any:
            with drawn:
                return self.fn(*args, **kwargs)

        refuse_sparse(state, args, kwargs)
        if self.found:  # it drives modules: say it before the step's Python runs
            refuse_mutable(state, args, kwargs)
        args, kwargs = torch_private.pytree.tree_map(resolved, (args, kwargs), is_leaf=is_state)
        try:
            graph = graph_of(step, state, args, kwargs, True, "compile", begun)
        except FsdpError:  # as the step itself would raise
            raise
        except (RuntimeError, AttributeError) as error:
            driven = bool(begun) and begun[-1].driven
            if driven:
                refuse_values(error, "compile")
            if driven or isinstance(error, AttributeError):
                raise
            warnings.warn(  # it reads a tensor's value, say: the compiler may know it
                "compile: the step could not be searched for torch.autograd.Functions, whose backward torch.compile "
                f"drops under torch.func: {str(error)[:200]}",
                RuntimeWarning,
                stacklevel=5,
            )
            return None
        if graph.session.driven:
            refuse_mutable(state, args, kwargs)
            _begin_others(call.states)
            drawn.refuse()
            self._agree(graph, ranks_of(state))
            return CompiledStep(graph, drawn, call, kind, self.backend, self.config)
        self.issued = tuple(graph.session.issued)
        if graph.session.functions:
            raise ScheduleError(
                f"compile: the step uses the torch.autograd.Function {', '.join(graph.session.functions)}. Under "
                "torch.func, torch.compile ignores its backward and gives other gradients without an error. Write it "
                "with plain operations, or run this step eagerly."
            )
        return None

    def _agree(self, graph: Graph, ranks: Ranks) -> None:
        """Ranks that run graphs with other collectives would wait for each other, or take one for another. So they
        compare them, on the host, when one has such as it never had."""
        mine = tuple(map(str, graph.session.issued))
        if mine in self.agreed:
            return
        for rank, theirs in enumerate(ranks.everyone(mine, "collectives of a compiled step")):
            if theirs != mine:
                pairs = zip((*mine, "nothing"), (*theirs, "nothing"), strict=False)
                said = " here and ".join(next(pair for pair in pairs if pair[0] != pair[1]))
                raise ScheduleError(
                    f"compile: the step's collectives differ from those of rank {rank} (the first: {said} there). Have "
                    "every rank use the same units in the same order: a graph cannot ask the others."
                )
        self.agreed.add(mine)

    def _other(self, state: State, args: Any, kwargs: Any, kind: Any) -> str:
        """What the newest program's call had otherwise, in words."""
        before, words = self.found[-1].kind, self.found[-1].words
        if before[0] != kind[0]:
            return "the structure of its arguments changes"
        if before[1] != kind[1]:
            return "autograd's or autocast's modes change"
        for (name, leaf), old, new, said in zip(named(state, args, kwargs), before[2], kind[2], words, strict=True):
            if old != new:
                return f"{name} was {said} and is {_said(leaf)}"
        return "the model's modes change"


def _begin_others(states: list[State]) -> None:
    """The other States of a call: each may begin a step, and is another."""
    if len(states) > 1:
        for state in states[1:]:
            begin_compiled(state)
        if len({id(lineage_of(state)) for state in states}) < len(states):
            raise ScheduleError(
                "compile: a State is among the step's arguments twice. The graph would take it for two. Give it once."
            )


def _said(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _around() -> Any:
    """What torch has been told beside the arguments."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        [torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in DEVICES],
    )


def _signature(args: Any, kwargs: Any) -> Any:
    """Equal for calls that are searched alike: shapes and dtypes of tensors, and everything else as it prints."""
    call = StepCall(args, kwargs)
    return call.structure, tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in call.leaves)


F = TypeVar("F", bound=Callable[..., Any])
BACKENDS = ("inductor", "aot_eager")


def compile(train_step: F, backend: str = "inductor", **config: Any) -> F:
    """Compile `train_step(state, ...)` whole: one graph, no break, no recomputation.

    Args:
        train_step: state first in, state first out, in any of the three ways; it ends with `step`.
        backend: "inductor", or "aot_eager", which runs the graph as it is: to look at, and for tests.
        config: Inductor's settings (`torch._inductor.config`), as `max_autotune=True`.

    Returns:
        the compiled function. The first call compiles; calls with other shapes compile again. It takes any state
        between steps, and gives one: eager and compiled steps may follow each other as you like. The state's buffers
        are updated in place, as by `step`, which consumes the state that went in. Other States may be among its
        arguments, each given once, and may be trained as well.

    Which leaves get no gradient is a part of the graph: those for which `reduce` is given None, or whose unit is not
    reduced, keep their weights and moments (`T.vjp` is torch.func's here, whose zeros are gradients). Ranks cannot ask
    each other in a graph, so None has to stand at the same leaves on every rank that shares them; ranks compare that,
    on the host, when a step is first compiled, and it is an error where they differ.

    Beside `torch.compile(train_step, fullgraph=True)`, which works for the first two ways, this saves the second
    forward that keeping no more than a few units gathered would cost there (`T.vjp` recomputes when it is traced), and
    keeps Inductor from moving a gather to where it is waited for, as it does to save memory: the order is the
    schedule's.

    A step that calls `T.forward_backward` or `T.apply` is traced as it runs, from tensors without values. Its Python
    runs then, and not again: a number that it reads elsewhere than among its arguments, and a step that counts in
    Python, stay what they were. Calls with other shapes, dtypes, structures, numbers, modes of the model, autograd or
    autocast modes are traced anew (a warning says so when they are many; the last 16 are kept). Gathers are issued in
    the order in which units are used, also if the structure of the model does not show it. Random numbers follow from
    (state.rng, state.count, rank, which draw it is), others than eager ones. Buffers, tied weights, activation
    checkpointing that is not reentrant, autograd.Functions and compiled units (as plain ones) work.

    Raises:
        SpecError: an unknown backend. When called: SpecError if no State comes first, or a tensor is sparse;
            StaleStateError for a state that was consumed.
        ScheduleError (when called): a state in the middle of a step; a custom autograd.Function in the first two ways.
            In the third: it asks for a tensor's value or for `state.steps`, or draws random numbers that a graph would
            have once and for all, or others in a recomputation (it names the line); ranks use units in another order;
            `find_nonfinite` or `second_order`. SpecError: a buffer changes that the state does not have;
            an argument that is neither a tensor nor fixed, as an iterator, an array or an object with attributes.

    Collective, when it compiles: an exchange on the host of which leaves have gradients, and of a driven step's
    collectives; when it runs, what the step issues.

    Source: torch.compiler's documentation; custom passes of Inductor (`torch._inductor.config`); `make_fx`.

    Example:
        >>> def train_step(state, batch):  # doctest: +SKIP
        ...     state, loss = forward_backward(state, batch)
        ...     return fsdp.step(state), loss
        >>> train_step = T.compile(train_step)  # doctest: +SKIP
    """
    if backend not in BACKENDS:
        raise SpecError(
            f"compile(backend={backend!r}): expected one of {', '.join(map(repr, BACKENDS))}. Others work with "
            "torch.compile(train_step, fullgraph=True, backend=...), which computes a unit's forward twice."
        )
    expect("compile(train_step)", train_step, Callable, "a function of (state, ...)")
    finish_start()
    programs = Programs(train_step, backend, config)
    inner = _backend(backend, config)

    def with_names(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return named_in_profiles(inner(module, inputs), programs.issued)

    compiled = torch.compile(train_step, fullgraph=True, dynamic=False, backend=with_names)

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
                "train_step(state, ...). Other States may follow it. Of a method, give a function that calls it."
            )
        begin_compiled(state)
        program = programs.find(state, args, kwargs)
        if program is not None:
            return program()
        with keep_residuals(True):
            return compiled(state, *args, **kwargs)

    return cast(F, outside_inference(run))


def _backend(name: str, config: dict[str, Any]) -> Callable[..., Any]:
    if name == "aot_eager":

        def plain(module: torch.fx.GraphModule, inputs: Any) -> Any:
            point_at_second_gathers(module.graph)
            module.recompile()
            return module.forward

        return cast(Callable[..., Any], torch_private.dynamo().backends.common.aot_autograd(fw_compiler=plain))

    return lambda module, inputs: through_inductor(module, inputs, config, point_at_second_gathers)
