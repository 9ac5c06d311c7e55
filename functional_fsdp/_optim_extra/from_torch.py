"""Classes of torch.optim, and others of that kind: leaf by leaf, or all leaves at once.

`AllLeaves`: optimizers that couple leaves. All of them are whole on every rank, in one instance of the class itself.

    shards    [ w0 w0 | w1 ] [ w1 w2 | w2 ]      weights and gradients; what the class keeps, as `WholeLeaves` has it
    gathered  an all-gather an axis, for each of them
    each rank cls([w0, w1, w2], **options); its state is handed in; `step()`; each rank keeps its own slice

Every rank computes the same, so nothing travels back.

`FromTorch`: the class's own step on flat buffers, leaf by leaf.

    main["blocks.0"]  [ w ....... | bias . | w2 ]         this rank's slice: parts of leaves, views
    opt["exp_avg"]    [ ......... | ...... | .. ]         as main weights: what the class keeps for each element
    opt["step"]       [ 3         | 3      | 3  ]         one number a leaf, the same on every rank

In each step a new instance of the class is given the views as its parameters, what it kept as its state, and gradients;
its `step()` changes them in place. So nothing is kept but what the State has. Leaves of which this rank has no part are
given as tensors of no elements, for their numbers.

Beside it the same step is taken on two small leaves, whose operations are compared (`Scout`):

    scouts    two leaves of six numbers, with the counts and the rate of this step
    proved    sequences of operations that were observed: another one is observed now, or the step is not taken

Python of a proved class sees no value and no shape, so it does with the scouts what it will do with the real leaves.
Where it sees no count either, as the class reads none on the host, and the rate is that of the step before, it can do
nothing new: then the scouts go in one step of `EVERY`, for what a class may keep in globals.

So it is, too, where Python sees a count and a rate, and takes no branch by them. After `PROVES` steps that is looked
for once, by fake tensors: a count is then a symbol without a value, and what branches on it, or takes it out of
torch's arithmetic, raises (`Scout._blind_to_numbers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import count as counter
from itertools import product
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from .._common.calls import traced_as
from .._common.device import as_rate, lies_on_host, zeros_as
from .._common.errors import ScheduleError, SpecError, TreeError
from .._common.record import Collective
from .._common.torch_names import FakeTensorMode, pytree
from .._optim.optimizer import Sender, Tree, UpdatesSome, at, by_label, check_settings, labels_in
from .._plan.layout import Bucket
from .._runtime.agreement import Leaves
from .._shared.device import being_captured
from .._shared.torch_names import TorchDispatchMode
from .._storage import FlatBuffer, leaf_shards, no_counts
from .prove import (
    HOST_READS,
    ORDER,
    Kept,
    Known,
    Observed,
    State,
    Watch,
    driven,
    hand_over,
    learned,
    made,
    name_of,
    numbers_like,
    observed,
    refuse,
    refuse_known,
    states_of,
    uncompiled,
)
from .whole import Form, Job, LeafStates, Rates, Trees, WholeLeaves, first_of

LABEL = "default"


@dataclass(frozen=True)
class AllLeaves(WholeLeaves):
    """A torch.optim class with options, that has all leaves together. See `from_torch(by="all")`."""

    def __hash__(self) -> int:
        return hash((type(self), self.cls))

    def __str__(self) -> str:
        held = f" ({max(self._held):,} bytes)" if self._held else ""
        return f"{name_of(self.cls)}: all leaves together, on one gathered copy a rank{held}, since {self.why}"

    @cached_property
    def _held(self) -> list[int]:
        """Bytes of the copies of States that were begun."""
        return []

    def nbytes(self, opt: Trees, main: Tree) -> int:
        """Bytes of the gathered copy that each rank has in a step: weights, gradients, and all that is kept."""
        buffers = [b for tree in (main, main, *opt.values()) for b in tree.values()]
        return sum(b.bucket.numel * b.local.itemsize for b in buffers)

    # ---- an instance

    def _tried(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, path: str) -> list[Form]:
        """Forms of a leaf alone, and as the first and the second one of two, which begin together or not."""
        found, before = list[Form](), self._moving.setdefault(label, frozenset())
        first: Exception | None = None
        for leaves, place, late in ((1, 0, -1), *((2, place, late) for place in (0, 1) for late in (-1, 0, 1))):
            params = [torch.nn.Parameter(numbers_like(shape, 1 + i).to(dtype)) for i in range(leaves)]
            try:
                names = [path if i == place else f"another {i}" for i in range(leaves)]
                optimizer, fresh = self._made(label, params, [None] * leaves, names)
                for step in range(12 if math.prod(shape) <= 1 << 16 else 4):
                    for i, param in enumerate(params):
                        lacks = step < 3 and i == late
                        hand_over(param, None if lacks else numbers_like(shape, 2 + step + i).to(dtype))
                    optimizer.step()
                    form, _ = self._taken(label, optimizer, params[place], fresh, True)
                    found += [form] if form not in found else []
            except (SpecError, TreeError):
                raise
            except Exception as error:  # without a gradient, say: then a real step says so
                first = first or error
        if not found:
            raise self._refused(path, shape, first) from first
        return found if self._moving[label] == before else self._tried(label, shape, dtype, path)

    def _run(
        self, label: str, shape: tuple[int, ...], dtype: torch.dtype, forms: list[Form] | None, leaves: int = 3,
        late: Sequence[int] = (0, 1, 7),
    ) -> torch.Tensor:  # fmt: skip
        """Of three leaves, one of which gets no gradient in some steps; if the class can have that."""
        try:
            return super()._run(label, shape, dtype, forms, leaves, late)
        except SpecError:
            return super()._run(label, shape, dtype, forms, leaves)

    # ---- what is kept

    def init(self, main: Tree) -> Trees:
        opt = super().init(main)
        self._held.append(self.nbytes(opt, main))
        return opt

    # ---- a step

    def _labels(self, main: Tree) -> list[str]:
        return [LABEL]

    def _updated(
        self, given: Leaves, grads: Tree, opt: Trees, main: Tree, rates: Rates, sender: Sender
    ) -> tuple[Tree, Trees]:
        whole = {id(b): _whole(b, sender) for tree in (main, grads, *opt.values()) for b in tree.values()}
        kept, jobs = LeafStates(opt, whole), list[Job]()
        for name, buffer in main.items():
            for i, leaf in enumerate(buffer.bucket.leaves):
                if leaf.numel:
                    weights, grad = (whole[id(b)][leaf.offset :][: leaf.numel] for b in (buffer, grads[name]))
                    has = name not in given or given[name][i]
                    job = Job(leaf, weights.dtype, weights, grad if has else None, kept.rows.get(leaf.path, {}),
                              kept.numbers[leaf.path])  # fmt: skip
                    jobs.append(job)
        if jobs:  # of leaves without elements there are none
            self._step(LABEL, jobs, rates)
        kept.put_numbers()
        for buffer in (*main.values(), *kept.tensors):
            start, stop = buffer.span()
            buffer.local.copy_(whole[id(buffer)][start:stop])
        return main, opt


def _whole(buffer: FlatBuffer, sender: Sender) -> torch.Tensor:
    """A bucket's elements from all ranks that shard it, [numel]."""
    flat, bucket = buffer.local, buffer.bucket
    for axis in reversed([axis for axis in bucket.placement.order if axis in bucket.placement.main]):
        ranks = bucket.ranks[axis]
        if ranks > 1:
            one = Collective("all_gather", axis, ranks * flat.numel(), flat.dtype, "", "side", "all leaves")
            flat = sender.send(one, flat, ([flat.numel()] * ranks, [flat.numel()] * ranks))
    return flat if flat is not buffer.local else flat.clone()


SIZE = 6
EVERY = 64
PROVES = 32  # checks, which take about as long as that proof, but for the first one in a process
ANY = "any rate"
Sequences = set[tuple[str, ...]]
Tensors = list[torch.Tensor]


class Names(TorchDispatchMode):
    """The names of the operations, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


class Scout:
    """For one class with options."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.proved: dict[Any, Sequences] = {}
        self.blind: dict[Any, Any] = {}  # where Python sees no count, or goes by none: the rate that it saw last
        self.looks: dict[Any, int] = {}  # since something new was seen
        self.buckets: dict[str, set[str]] = {}
        self.count: Any = None
        self.turns: dict[Any, int] = {}  # of each place its own: with two labels one would have the odd ones

    @traced_as(lambda *args: True)
    def due(self, label: str, bucket: str, count: torch.Tensor) -> bool:
        """Whether a step begins with this call: of another State, which has its own count, or its first bucket came
        before."""
        if count is not self.count:
            self.count = count
            self.buckets.clear()
        seen = self.buckets.setdefault(label, set())
        begins = not seen or bucket in seen
        if begins:
            seen.clear()
        seen.add(bucket)
        return begins

    def look(
        self, label: str, known: Known, options: Mapping[str, Any], like: torch.Tensor, states: Sequence[State], lr: Any
    ) -> None:
        """Take the step on scouts.

        Args:
            like: a parameter, for its dtype and device.
            states: of the real leaves; two of them have their numbers here, by turns.

        Raises:
            TreeError: the class does what is not elementwise. Nothing was changed.
        """
        place = label, like.device.type, like.dtype
        turn = self.turns[place] = self.turns.get(place, 0) + 1
        rate = None if isinstance(lr, torch.Tensor) else lr
        if turn % EVERY and self.blind.get(place) in ((rate, len(states)), (ANY, len(states))):
            return
        chosen = [states[(turn + i) % len(states)] for i in range(min(2, len(states)))]
        with torch.inference_mode(False), torch.no_grad(), uncompiled():
            names = Names()
            driven(self.cls, options, *_scouts(known, like, chosen), lr, names)
            proved = self.proved.setdefault(place, set())
            if (sequence := tuple(names.names)) in proved:
                self.looks[place] = looks = self.looks.get(place, 0) + 1
                if any(one.python or one.host for one in known.kept.values()):
                    return
                if looks == PROVES and self._blind_to_numbers(known, options, like, chosen, rate, sequence):
                    self.blind[place] = ANY, len(states)
                elif HOST_READS.isdisjoint(sequence) and self.blind.get(place, ("",))[0] != ANY:
                    self.blind[place] = rate, len(states)
                return
            watch = Watch([SIZE] * len(chosen))
            params, grads, given = _scouts(known, like, chosen)
            for i, (param, grad, own) in enumerate(zip(params, grads, given, strict=True)):
                for tensor in (param, grad, *(own[name] for name, one in known.kept.items() if not one.number)):
                    watch.touch(tensor, i)
            driven(self.cls, options, params, grads, given, lr, watch.and_reads())
        if found := [*watch.findings.values()]:
            raise TreeError(
                f"{name_of(self.cls)}: in this step the class does what it had not done when it was proved "
                f"elementwise, and what is not: {found[0]}. The step was not taken. Give by='leaf'."
            )
        proved.add(sequence)
        self.blind.pop(place, None)
        self.looks.pop(place, None)

    def _blind_to_numbers(
        self, known: Known, options: Mapping[str, Any], like: torch.Tensor, states: Sequence[State], rate: float | None,
        sequence: tuple[str, ...],
    ) -> bool:  # fmt: skip
        """Whether Python takes these operations whatever counts and the rate are. Nothing is computed."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # loads SymPy

        names, ended = Names(), list[bool]()
        scouts = _scouts(known, like, states)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode, suppress(Exception):
            flat, structure = pytree.tree_flatten(scouts)
            fakes = [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in flat]
            symbol = None if rate is None else torch.empty((), dtype=torch.float64, device=HOST).item()
            params, grads, given = pytree.tree_unflatten(fakes, structure)
            driven(self.cls, options, params, grads, given, symbol, _to_the_end(names, ended))
        return bool(ended) and tuple(names.names) == sequence


def _scouts(known: Known, like: torch.Tensor, states: Sequence[State]) -> tuple[Tensors, Tensors, list[State]]:
    """Two small leaves, their gradients, and what is kept of them, with the numbers of these states."""
    params, grads = (
        [_numbers(seed + i, like.device, like.dtype).clone() for i in range(len(states))] for seed in (1, 5)
    )
    given = []
    for param, real in zip(params, states, strict=True):
        own = states_of(known.kept, param)
        for name, value in real.items():
            if known.kept[name].number:
                own[name] = value.clone() if isinstance(value, torch.Tensor) else value
        given.append(own)
    return params, grads, given


@lru_cache(maxsize=256)
def _numbers(seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return numbers_like((SIZE,), seed).to(device, dtype)


@contextmanager
def _to_the_end(names: Names, ended: list[bool]) -> Iterator[None]:
    """So far and no further: what follows a step looks for the memory of tensors, which fakes have not."""
    with names:
        yield
    ended.append(True)
    raise RuntimeError("this is all")


HOST = torch.device("cpu")
NUMBER = counter()
LIVE: WeakValueDictionary[int, FromTorch] = WeakValueDictionary()  # by what a graph calls them
IN_GRAPHS: dict[int, FromTorch] = {}  # those that a graph has: it may be used for a State whose optimizer is equal


@dataclass(frozen=True)
class FromTorch(UpdatesSome):
    """A torch.optim class with options, as an optimizer of flat buffers. See `from_torch`."""

    cls: Any
    options: Mapping[str, Any]
    number: int = field(init=False, compare=False, repr=False)
    scout: Scout = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", next(NUMBER))
        object.__setattr__(self, "scout", Scout(self.cls))
        LIVE[self.number] = self
        for label in _labels(self.options):
            self.known(label, HOST)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cls, self.options)  # a copy has a number of its own

    def __fsdp_settings__(self) -> Any:
        return self.cls, self.options

    def __hash__(self) -> int:
        return hash((type(self), self.cls))

    def __str__(self) -> str:
        return f"{name_of(self.cls)}: elementwise, on flat shards"

    @cached_property
    def seen(self) -> dict[tuple[str, str], Known]:
        return {}

    def known(self, label: str, device: torch.device) -> Known:
        """What is known of the class with the options for a label; found once."""
        device = HOST if device.type == "meta" else device
        if (label, device.type) not in self.seen:
            options = {name: by_label(name, value, label) for name, value in self.options.items()}
            rate = None
            if callable(options.get("lr")) or isinstance(options.get("lr"), torch.Tensor):
                rate = first_of(options.pop("lr"))
            self.seen[label, device.type] = learned(self.cls, options, device, rate)
        return self.seen[label, device.type]

    @property
    def by_bucket(self) -> bool:
        """Not where numbers cross to the host, which would wait for each part."""
        there = [known for (_, kind), known in self.seen.items() if kind != HOST.type]
        return not any(known.staged or not known.rates for known in there)

    elementwise: ClassVar[bool] = True

    def named_labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        return labels_in(name_of(self.cls), self.options)

    # ---- what is kept

    def init(self, main: Tree) -> Trees:
        check_settings(main, **self.options)
        opt: Trees = {}
        for name, buffer in main.items():
            kept = [self.known(leaf.label, buffer.local.device).kept for leaf in buffer.bucket.leaves]
            for what in dict.fromkeys(what for of in kept for what in of):
                first = next(of[what] for of in kept if what in of)
                if first.number:
                    new = no_counts(buffer, first.dtype or torch.float32)
                else:
                    new = buffer.but(zeros_as(buffer.local, first.dtype))
                opt.setdefault(what, {})[name] = new
                if new.local.is_meta:
                    continue
                weights_of, parts = _columns([buffer, new], buffer.span())
                for part, weights, of in zip(parts, weights_of, kept, strict=False):
                    value = of[what].value if what in of else 0.0
                    part.copy_(weights) if value is None else part.fill_(value)
        return opt

    # ---- a step

    def update_some(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: Trees, main: Tree, count: torch.Tensor
    ) -> tuple[Tree, Trees]:
        return self.ready(given, skip, grads, opt, main, count)()

    def ready(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: Trees, main: Tree, count: torch.Tensor
    ) -> Callable[[], tuple[Tree, Trees]]:
        """By label, since options may differ, and by what is kept, which may differ by bucket."""
        calls: dict[tuple[str, tuple[str, ...]], list[Tensors]] = {}
        for name, buffer in main.items():
            names = tuple([what for what, tree in opt.items() if name in tree])
            numbers = any(opt[what][name].bucket.by_leaf for what in names)
            some = given.get(name)
            span = buffer.span()
            views = _columns([buffer, grads[name], *[opt[what][name] for what in names]], span)
            for label, which in _taking(buffer.bucket, *span, numbers, some and tuple(some)):
                lists = calls.setdefault((label, names), [[] for _ in views])
                for tensors, column in zip(lists, views, strict=True):
                    tensors += column if len(which) == len(column) else [column[i] for i in which]
        due = {label: self.scout.due(label, next(iter(main)), count) for label, _ in calls}
        rates = {label: self._rates(label, count) for label, _ in calls}
        steps = []
        for (label, names), (params, gradients, *kept) in calls.items():
            flat = [t for one in kept for t in one]
            steps.append(self._step(label, ",".join(names), rates[label], params, gradients, flat, skip, due[label]))

        def update() -> tuple[Tree, Trees]:
            for step in steps:
                step()
            return main, opt

        return update

    def _rates(self, label: str, count: torch.Tensor) -> list[Any]:
        """Of this step, where the rate is a function or a tensor."""
        lr = by_label("lr", self.options.get("lr"), label)
        return [at("lr", lr, label, count)] if callable(lr) or isinstance(lr, torch.Tensor) else []

    def _as_one(
        self, label: str, names: str, rates: list[Any], params: Tensors, grads: Tensors, kept: Tensors, skip: Any,
        due: bool = True,
    ) -> Callable[[], None]:  # fmt: skip
        """One operator in a graph: the class runs in it as it does eagerly."""
        tensors = [
            rate if isinstance(rate, torch.Tensor) else torch.full((), rate, dtype=torch.float64, device=HOST)
            for rate in rates
        ]
        return partial(torch_optimizer, self.number, label, names, tensors, params, grads, kept, skip)

    @traced_as(_as_one)
    def _step(
        self, label: str, names: str, rates: list[Any], params: Tensors, grads: Tensors, kept: Tensors, skip: Any,
        due: bool = True,
    ) -> Callable[[], None]:  # fmt: skip
        """All that may refuse a step. Returns what takes it. due: whether the scouts go ahead; in a graph's operator
        they do each time."""
        known = self.known(label, params[0].device)
        options = dict(known.options)
        host = known.staged or not (known.rates and options.get("capturable", True))
        if being_captured(params[0].device) and (known.staged or (rates and host)):
            hosted = [repr(name) for name, one in known.kept.items() if one.host]
            what = ", ".join(hosted) or "a learning rate that changes"
            raise ScheduleError(
                f"{name_of(self.cls)}: the class needs {what} on the host in each step, which a CUDA graph cannot "
                "give it. Use a class that takes capturable=True, as torch.optim.Adam, or leave T.cuda_graph out."
            )
        now: Any = None
        for rate in rates:
            number = not isinstance(rate, torch.Tensor) or host or lies_on_host(rate)
            now = float(rate) if number else as_rate(rate)
        n, had = len(params), names.split(",")
        if lacks := [name for name in known.kept if name not in had]:
            raise TreeError(
                f"{name_of(self.cls)}: State.opt has no {lacks[0]!r} for leaves with the label {label!r}, which the "
                "class keeps with the options for it. Begin a new state: shard(full_params(state), spec, optimizer)."
            )
        columns = {name: kept[i * n : i * n + n] for i, name in enumerate(had) if name in known.kept}
        given = {name: _given(known.kept[name], column) for name, column in columns.items()}
        states = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)] or [{}] * n
        if due and not being_captured(params[0].device):
            self.scout.look(label, known, options, params[0], states, now)

        def step() -> None:
            before = [tensor.clone() for tensor in (*params, *kept)] if skip is not None else []
            torch.autograd.graph.increment_version([*params, *kept])  # fused kernels do not, nor who writes to `.data`
            for name, state in product(known.rated, states):  # in a leaf's first step, which may be a later one
                state[name].copy_(torch.where(state["step"] == 0, now, state[name]))
            after = driven(self.cls, options, params, grads, states, now)
            for name, column in columns.items():
                _put(known.kept[name], column, [state[name] for state in after])
            for tensor, old in zip((*params, *kept), before, strict=False):
                tensor.copy_(torch.where(skip, old, tensor))

        return step


def _which(
    bucket: Bucket, start: int, stop: int, numbers: bool, given: tuple[bool, ...] | None
) -> list[tuple[str, list[int]]]:
    """Which leaves take part, by label: those with a part in this slice, or all where there are numbers of them."""
    found: dict[str, list[int]] = {}
    for i, leaf in enumerate(bucket.leaves):
        a, b = leaf.within(start, stop)
        if leaf.numel and (numbers or a < b) and (given is None or given[i]):
            found.setdefault(leaf.label, []).append(i)
    return [*found.items()]


_taking = traced_as(_which)(lru_cache(maxsize=65536)(_which))  # the same, found once


def _views(buffers: Sequence[FlatBuffer], span: tuple[int, int]) -> list[Sequence[torch.Tensor]]:
    return [
        one.local.unbind() if one.bucket.by_leaf else [local for _, _, local in leaf_shards(one)] for one in buffers
    ]


@traced_as(_views)
def _columns(buffers: Sequence[FlatBuffer], span: tuple[int, int]) -> list[Sequence[torch.Tensor]]:
    """Of buffers that hold the same elements of a bucket: this rank's part of each leaf, flat, by one call for each
    buffer. Of numbers each leaf's.

    span: the elements of the first one, of leaves.
    """
    sizes, which = _cuts(buffers[0].bucket, *span)
    found: list[Sequence[torch.Tensor]] = []
    for one in buffers:
        if one.bucket.by_leaf:
            found.append(one.local.unbind())
        else:
            pieces = one.local.split_with_sizes(sizes)
            found.append([pieces[i] for i in which])
    return found


@lru_cache(maxsize=65536)
def _cuts(bucket: Bucket, start: int, stop: int) -> tuple[list[int], list[int]]:
    """Sizes that tile a slice of a bucket, and which of these pieces each leaf has; the first one is empty."""
    sizes, which, end = [0], [], start
    for leaf in bucket.leaves:
        a, b = leaf.within(start, stop)
        which.append(len(sizes) + 1 if a < b else 0)
        if a < b:
            sizes += [a - end, b - a]
            end = b
    return [*sizes, stop - end], which


def _given(one: Kept, column: Tensors) -> list[Any]:
    """What a State keeps under one name, as the class wants it: of each parameter a tensor, or a number."""
    if not one.number or not (one.python or one.host or one.shape):
        return [*column]
    if not (one.python or one.host):
        return [tensor.view(one.shape) for tensor in column]
    numbers = torch.stack(column).tolist()  # the host waits, once
    if one.python:
        return [one.python(number) for number in numbers]
    return [torch.full(one.shape, number, dtype=one.dtype, device=HOST) for number in numbers]


def _put(one: Kept, column: Tensors, values: list[Any]) -> None:
    """What the class keeps now goes where the State has it, if it is not there."""
    if one.python or one.host:
        numbers = [float(v) if isinstance(v, torch.Tensor) else v for v in values]
        new = torch.tensor(numbers, dtype=one.dtype, device=HOST)
        values = [*new.to(column[0].device).unbind()]
    for mine, value in zip(column, values, strict=True):
        if value is not mine and value.data_ptr() != mine.data_ptr():
            mine.copy_(value.view(mine.shape))


@torch.library.custom_op(
    "functional_fsdp::torch_optimizer", mutates_args=("params", "kept"),
    schema="(int number, str label, str names, Tensor[] rates, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] kept, "
    "Tensor? skip) -> ()",
)  # fmt: skip
def torch_optimizer(
    number: int, label: str, names: str, rates: Tensors, params: Tensors, grads: Tensors, kept: Tensors, skip: Any
) -> None:
    LIVE[number]._step(label, names, rates, params, [grad.clone() for grad in grads], kept, skip)()


@torch_optimizer.register_fake
def _(number: int, *args: Any) -> None:
    """Runs where a graph is made."""
    IN_GRAPHS[number] = LIVE[number]


WAYS = (None, "elementwise", "leaf", "all")
RATES = {0: 0.1, 1: 0.05, 2: 0.01}  # by step: of a learning rate that changes, where a class is observed
SEEN: dict[tuple[Any, str], Observed] = {}


def from_torch(cls: type, *, by: str | None = None, **options: Any) -> FromTorch | WholeLeaves:
    """An optimizer of torch.optim, or one of others in that form, on shards: exactly what the class does.

    There are three ways. *Elementwise*: the class takes its steps on this rank's parts of the leaves, flat, with its
    own kernels. *Leaf*: each leaf travels, with its gradient, to the one rank that owns it; there an instance of the
    class has it whole, with its true shape, and what the class keeps of it lies there; and it travels back. *All*,
    where you say so: each rank gathers all leaves, and an instance of the class has all of them. In both `param_groups`
    have the paths of leaves as "param_names", as torch's own given named parameters. `print` says which way an
    optimizer goes, and which line of the class decided.

    What is proved, here: the class takes 24 steps on leaves of six shapes, with gradients of scales from 1e-4 to 1e4,
    which some leaves lack in some steps, and every tensor operation is observed. It is elementwise if each operation on
    a weight, a gradient or what came of them is pointwise (by torch's own tag), a copy, a fill, a cast, or a view that
    keeps elements in order; if its Python reads no such value, and no shape, size, dim, name or requires_grad; and if
    it keeps its state by parameter, as tensors and numbers. Such Python takes the same branches for all leaves and all
    pieces. Counts of steps in the state are then set to 99, 999, 9,999 and 99,999, for two steps each. With a rate that
    changes, all this is done at the first rate and at others. A class that has tensors of two leaves in one operation,
    or treats a leaf otherwise beside other leaves than alone, couples leaves: it is refused, unless it goes the third
    way. Of whole leaves a new instance, given the old one's state, is seen to go on to the same bits.

    What is checked as it runs. Elementwise: before each step the class takes it on two leaves of six numbers, with
    the real counts, rate, dtype and device. A sequence of operations that was not met before is observed as above; if
    it is not elementwise the step is refused, and nothing has changed. This costs 0.3 to 0.8 ms of a CPU. It is done
    in one step of 64 where Python reads no count, and the rate stays; and, after 32 steps, where it takes no branch by
    counts and rates, as AdamW. That is proved once, with symbols in the place of these numbers: what compares one, or
    takes it out of torch's arithmetic (`math.sqrt`), is not proved, and is checked in each step. Replays of
    a CUDA graph run no Python, so nothing is checked there; in a compiled step it is. The other ways: that the state
    has a structure that was seen before. A class that couples leaves only where one of them has no gradient, as
    heavyball's do while leaves begin, is refused in the step in which one has none.

    Each step has a new instance of the class, which is given what the State keeps. So an older State may be stepped
    again, and checkpoints, skipped steps and `redistribute` need nothing of it. It costs a constructor. By whole leaves
    an owner has one instance for its leaves of one label; or one for each leaf, of a class that counts something beside
    the state of parameters, or whose leaves feel each other where one has no gradient.

    What the class keeps has the names that it gives them: `State.opt["exp_avg"]`, sharded as main weights,
    [n / ranks]; and one number a leaf where it keeps one, as "step", the same on every rank. By whole and by all
    leaves, each tensor lies whole, in the class's shape, at the owner of its leaf, and numbers beside: FlatBuffers of
    buckets of their own, [elements of the fullest owner]. All are in checkpoints, `optimizer_state` and `redistribute`,
    by leaf, for any number of ranks. `load_optimizer_state` takes what torch's own has kept, for elementwise classes.

    Args:
        cls: a class with the constructor and the `step()` of torch.optim.Optimizer.
        by: "elementwise" insists on the flat way, "leaf" on whole leaves, "all" on all of them on each rank. By default
            a class that is proved elementwise goes the flat way, another one by leaf.
        options: its constructor's. Each may be given by label, `{label: value}`, with "default" for the others. `lr`
            may be a function of the count tensor (int64 [], steps taken so far); the constructor gets its first value,
            and param_groups those after it; what a leaf keeps of the rate (Rprop) begins in its first step. On GPUs
            `capturable` is True unless it is given, so that counts stay there.

    Returns:
        an `(init, update)` pair for `shard` and `init`. Leaves that got no gradient stay as they are, with their
        counts. A compiled step has an elementwise one as one operator, which is not fused with others.

    Raises:
        SpecError: a class that couples leaves, or none of whose ways is exact, with the reason and the line; or one
            that refuses the options; options by label with by="all". TreeError, in a step: what was not proved.
            ScheduleError, in a step: a CUDA graph of a class that needs numbers on the host, or any graph of whole
            leaves.

    Waits: an elementwise class that keeps Python numbers, or tensors on the host beside a GPU, makes the host wait in
    each step. By whole leaves a rate that is a function of the count does so, a step with `skip`, the first step of a
    State that was made or loaded, and what the class itself reads.

    Memory, by whole leaves: what a rank owns of half a gigabyte of main weights and of gradients, twice, while it
    computes; and of what is kept the same on each rank, as much as on the fullest one. By all leaves: all weights,
    gradients and state, on each rank in each step, about twice; `print` says how many bytes they are.

    Collective: none if elementwise. By whole leaves three all-to-alls an axis, for half a gigabyte of main weights:
    weights and gradients there, and weights back. By all leaves one all-gather an axis, for each bucket of weights,
    of gradients, and of each tensor that is kept.

    >>> from_torch(torch.optim.NAdam, lr={"norm": 1e-4, "default": 1e-3}, weight_decay=0.1).cls.__name__
    'NAdam'
    """
    if not isinstance(cls, type) or not callable(getattr(cls, "step", None)):
        given = f"an instance of {type(cls).__name__}" if not isinstance(cls, type) else cls.__name__
        raise SpecError(f"from_torch: expected a class as those of torch.optim, got {given}. Give the class.")
    if by not in WAYS:
        raise SpecError(f"from_torch: by is {by!r}; expected 'elementwise', 'leaf', 'all', or nothing.")
    refuse_known(cls)
    found = [
        (label, _observed(cls, {name: by_label(name, v, label) for name, v in options.items()}))
        for label in _labels(options)
    ]
    for _, one in found:
        if one.way == "random":
            refuse(cls, f"{one.finding}, which no other placement and no checkpoint repeats", "Use one without", "")
        if one.way == "all" and by != "all":
            remedy = "Give by='all', which gathers all leaves on each rank, or use an optimizer without that"
            refuse(cls, f"it couples leaves: {one.finding}", remedy, "")
    if by == "all":
        if labels := [label for value in options.values() if isinstance(value, Mapping) for label in value]:
            text = "expected the same for all leaves, since it has all of them in one group"
            raise SpecError(f"{name_of(cls)}: by is 'all', but options are given by label, {labels[0]!r}: {text}.")
        return _checked(AllLeaves(cls, dict(options), str(found[0][1].finding or "by='all' was given")), found)
    late = next((str(one.late) for _, one in found if one.late is not None), "")
    decided = next((one.finding for _, one in found if one.way == "leaf"), None)
    if by == "elementwise" and (decided is not None or late):
        refuse(cls, str(decided or late), "Leave by= out: whole leaves then travel to owners")
    why = str(decided) if decided else late or "by='leaf' was given"
    if decided is None and by != "leaf" and not late:
        try:
            return FromTorch(cls, dict(options))
        except SpecError as error:
            if by == "elementwise":
                raise
            why = (str(error).partition("parameters: ")[2] or str(error)).partition(". Use ")[0]
    return _checked(WholeLeaves(cls, dict(options), why, late), found)


def _labels(options: Mapping[str, Any]) -> list[str]:
    """The labels by which options are given, and "default", for which there are all of them."""
    by_name = [value for value in options.values() if isinstance(value, Mapping)]
    every = dict.fromkeys((*(label for value in by_name for label in value), "default"))
    return [label for label in every if all(label in value or "default" in value for value in by_name)]


def _checked(whole: WholeLeaves, found: list[tuple[str, Observed]]) -> WholeLeaves:
    for label, _ in found:
        whole.check(label)
    return whole


def _observed(cls: Any, options: dict[str, Any]) -> Observed:
    both: list[Any] = [None]  # at low rates leaves may hardly feel each other: at the first one, too
    if "capturable" in options:
        options["capturable"] = False  # on the host, where it is observed
    if callable(options.get("lr")) or isinstance(options.get("lr"), torch.Tensor):
        lr = options.pop("lr")
        options["lr"] = first_of(lr)
        both += [RATES] if callable(lr) else []
    key = cls, repr((sorted(options.items(), key=lambda item: item[0]), both))
    if key not in SEEN:
        try:
            with torch.device("cpu"), torch.inference_mode(False):
                tries = [observed(lambda params: made(cls, params, options), hand_over, rates=one) for one in both]
                SEEN[key] = max(tries, key=lambda one: (ORDER.index(one.way), one.late is not None))
        except Exception as error:
            refuse(cls, f"it raised {type(error).__name__}: {error}", "Give options that it takes, for all labels")
    return SEEN[key]
