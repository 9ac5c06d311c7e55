"""Optimizers that couple the elements of a leaf: each leaf whole at one owner rank, in an instance of the class itself.

    shards    [ w0 w0 | w1 ] [ w1 w2 | w2 ]      weights and gradients
    there     one all-to-all an axis, for each of the two
    owners    cls(leaves, **options), with their true shapes; their state is handed in; `step()`
    back      weights to the shards, one all-to-all an axis

What the class keeps stays where it is: in the State it lies whole at the owner of its leaf, in the class's own shapes,
in buckets of its own (`owners.homes`). The class changes it in place.

    opt["exp_avg"]    [ m1 m2     ] [ m0         ]
    opt["row"]        [ r1        ] [ r0         ]      of leaves that have one
    opt["step#"]      [ 3  3      ] [ 3          ]      of Python's numbers
    opt["form"]       [ 1  1      ] [ 1          ]      what there is of the state: 0 before the first step
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._common.calls import traced_as
from .._common.device import lies_on_host
from .._common.errors import ScheduleError, SpecError, TreeError
from .._common.torch_names import foreach_copy_, pytree, unflatten_dense_tensors
from .._optim.optimizer import (
    Sender,
    Tree,
    UpdatesSome,
    at,
    by_label,
    check_settings,
    labels_in,
    labels_of,
    put,
)
from .._plan.layout import Bucket, Leaf
from .._runtime.agreement import Leaves
from .._shared.device import being_captured
from .._storage import FlatBuffer
from .muon import Given, Homes, Moves, Owners, Part, at_once, back, cut, find_owners, homes, ordered, there
from .prove import Work, beside, give_names, hand_over, made, name_of, numbers_like, same, uncompiled

Trees = dict[str, Tree]
Rates = Mapping[str, Any]  # learning rates that are functions, as they are in a step
FORM = "form"
PLAIN = (type(None), str, torch.dtype, torch.device, torch.Size)
FLOPS = 256  # that cost as much as an element that travels
SMALL = 1e-5  # of weights that are under a threshold
CHANGES = 6  # the step of a trial from which on a learning rate that is scheduled is another one


def first_of(value: Any) -> float:
    """What a number, a tensor or a function of the count is before the first step, found on the host."""
    with torch.device("cpu"):
        return float(value(torch.zeros((), dtype=torch.int64, device="cpu")) if callable(value) else value)


class Slot(NamedTuple):
    """One value in the state of a leaf. shape, dtype: of a tensor. python: the type of a number. value: another one."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    python: type | None = None
    value: Any = None


class Form(NamedTuple):
    """What a state of a leaf looks like. names: of what it has, in order, if that is all in one dict and of kinds that
    are known by the object; else None."""

    structure: Any
    slots: tuple[Slot, ...]
    names: tuple[Any, ...] | None


Held = tuple[Form, Sequence[Any]]  # what an instance keeps of a leaf: its form, and the values in that


class Job(NamedTuple):
    """A leaf in a step, whole.

    Attributes:
        leaf, dtype: of its main weights.
        weights: its elements, flat. They are changed in place.
        grad: the same of its gradient; None of a leaf that has none.
        rows: by name what the State keeps of it, views. They are changed in place.
        numbers: by name the numbers that the State keeps of it. They are changed in place.
    """

    leaf: Leaf
    dtype: torch.dtype
    weights: torch.Tensor
    grad: torch.Tensor | None
    rows: dict[str, torch.Tensor]
    numbers: dict[str, float]


class LeafStates:
    """What a State keeps, on this rank: of each leaf, by its path, tensors and numbers."""

    def __init__(self, opt: Trees, whole: Mapping[int, torch.Tensor] | None = None) -> None:
        """whole: all ranks' slices, by the id of the FlatBuffer; None: this rank's own are meant."""
        self.tensors = [one for what, tree in opt.items() if not is_number(what) for one in tree.values()]
        self.rows: dict[str, dict[str, torch.Tensor]] = {}
        self.numbers: dict[str, dict[str, float]] = {}
        self._read: list[tuple[str, torch.Tensor, slice, tuple[Place, ...], list[float]]] = []
        for what, tree in opt.items():
            for buffer in tree.values():
                start, stop = buffer.span()
                own, flat = slice(0, stop - start), buffer.local
                if whole is not None:
                    own, flat, start = slice(start, stop), whole[id(buffer)], 0
                templates, places = _pieces(buffer.bucket, start, start + flat.numel())
                if is_number(what):
                    values = _on_host(buffer.local, flat)
                    self._read.append((what, buffer.local, own, places, values))
                    for path, _, i in places:
                        self.numbers.setdefault(path, {})[what] = values[i]
                else:
                    views = unflatten_dense_tensors(flat, templates)
                    for path, i, _ in places:
                        self.rows.setdefault(path, {})[what] = views[i].detach()

    def put_numbers(self) -> None:
        """Numbers that have changed go to the State."""
        for what, local, own, places, values in self._read:
            new = list(values)
            for path, _, i in places:
                new[i] = self.numbers[path][what]
            if new != values:
                there = torch.tensor(new[own], dtype=local.dtype, device="cpu", pin_memory=not lies_on_host(local))
                local.copy_(there, non_blocking=True)
            if not local.is_inference():
                NUMBERS[local] = local._version, new


NUMBERS = WeakTensorKeyDictionary()  # of States, that this process read or wrote, with the version of the tensor


def _on_host(local: torch.Tensor, flat: torch.Tensor) -> list[float]:
    """The numbers in a tensor, of which `local` is this rank's part. The host waits for those that it does not know."""
    known: tuple[int, list[float]] | None = None if local.is_inference() else NUMBERS.get(local)
    if known is not None and known[0] == local._version and len(known[1]) == len(flat):
        return known[1]
    return flat.tolist()


def is_number(what: str) -> bool:
    """Whether it is the name of numbers."""
    return what == FORM or what.endswith("#")


Place = tuple[str, int, int]  # of a leaf its path, which piece it is, and where it begins


@lru_cache(maxsize=4096)
def _pieces(bucket: Bucket, start: int, stop: int) -> tuple[tuple[torch.Tensor, ...], tuple[Place, ...]]:
    """Shapes that tile elements [start, stop) of a bucket, and the leaves there, which lie whole."""
    shapes, places, end = list[tuple[int, ...]](), [], start
    for leaf in bucket.leaves:
        if start <= leaf.offset < stop:
            shapes += [(leaf.offset - end,), leaf.shape]
            places.append((leaf.path, len(shapes) - 1, leaf.offset - start))
            end = leaf.offset + leaf.numel
    shapes.append((stop - end,))
    return tuple(torch.empty(shape, device="meta") for shape in shapes), tuple(places)


class Plan(NamedTuple):
    """Who owns what of some buckets, which are updated at once, and where what is kept lies."""

    owners: tuple[Owners, ...]
    groups: list[list[str]]
    homes: Homes


@dataclass(frozen=True)
class WholeLeaves(UpdatesSome):
    """A torch.optim class with options, that has whole leaves at owners. See `from_torch(by="leaf")`.

    why: what decided that its leaves stay whole. late: why every leaf needs a gradient in each step; "": none does.
    """

    cls: Any
    options: Mapping[str, Any]
    why: str = field(default="", compare=False)
    late: str = field(default="", compare=False)
    by_bucket: ClassVar[bool] = False
    communicates: ClassVar[bool] = True
    arranges: ClassVar[bool] = True
    fill: ClassVar[int] = 1 << 29

    def __hash__(self) -> int:
        return hash((type(self), self.cls))

    def __fsdp_settings__(self) -> Any:
        return self.cls, self.options

    def __str__(self) -> str:
        late = f". Each leaf needs a gradient in each step: {self.late}" if self.late else ""
        return f"{name_of(self.cls)}: whole leaves at owners, since {self.why}{late}"

    def named_labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        return labels_in(name_of(self.cls), self.options)

    def owners(self, buckets: Sequence[Bucket]) -> tuple[Owners, ...]:
        """Which rank owns which leaf of these buckets. It prints.

        Ranks are balanced by what they move and compute, in one number: the elements of a leaf and of all that is kept
        of it, and one more for each 256 floating-point operations of a step, as the trial counts them.
        """
        return self.plan(buckets).owners

    def plan(self, buckets: Sequence[Bucket]) -> Plan:
        """The same, with where what is kept lies. Found once for the same buckets."""
        key = tuple(buckets)
        if key not in self._plans:
            self._refuse_cut(buckets)
            groups = at_once(buckets, self.fill)
            owners = find_owners(buckets, self._part, groups)
            self._plans[key] = Plan(owners, groups, homes(owners, self._kinds))
        return self._plans[key]

    def _refuse_cut(self, buckets: Iterable[Bucket]) -> None:
        for leaf in (leaf for bucket in buckets for leaf in bucket.leaves):
            if axes := [one.axis for one in leaf.cuts if one.ranks > 1]:
                raise SpecError(
                    f"{name_of(self.cls)}: it wants whole leaves ({self.why}), and {leaf.path!r} is cut along "
                    f"{axes[0]!r}, an axis of the model's own: each rank has its part only. Give such leaves to an "
                    "optimizer of elements, as adamw, by their label (fsdp.partition)."
                )

    @cached_property
    def _plans(self) -> dict[tuple[Bucket, ...], Plan]:
        return {}

    def _part(self, bucket: Bucket, leaf: Leaf) -> Iterator[Part]:
        if leaf.numel:
            forms = self.forms(leaf, bucket.main)
            kept = max(sum(math.prod(slot.shape or (0,)) for slot in form.slots) for form in forms)
            work = self._work.get((leaf.label, leaf.shape, bucket.main), 0) // FLOPS
            yield Part(tuple(leaf.shape), None, 0, (leaf.numel, 1), leaf.numel + kept + work)

    @cached_property
    def _work(self) -> dict[tuple[str, tuple[int, ...], torch.dtype], int]:
        """Floating-point operations in a step with a leaf, but for those by element."""
        return {}

    @cached_property
    def _forms(self) -> dict[Any, list[Form]]:
        return {}

    @cached_property
    def _by_name(self) -> set[str]:
        """Labels of leaves whose names the class reads."""
        return set()

    @cached_property
    def _moving(self) -> dict[str, frozenset[str]]:
        return {}

    # ---- an instance

    def _options(self, label: str) -> tuple[dict[str, Any], Any]:
        """The constructor's options for a label, with the first learning rate; and the rate that changes, or None."""
        options = {name: by_label(name, value, label) for name, value in self.options.items()}
        lr = options.get("lr")
        if callable(lr):
            return options | {"lr": first_of(lr)}, lr
        return options, None

    def _made(
        self, label: str, params: Sequence[torch.Tensor], held: Sequence[Held | None], names: Sequence[str]
    ) -> tuple[Any, Any]:
        """An instance with what it kept of its leaves; and what it has beside, as constructed."""
        optimizer = made(self.cls, params, self._options(label)[0])
        give_names(optimizer, names, lambda: self._by_name.add(label))
        fresh = beside(optimizer)
        for param, one in zip(params, held, strict=True):
            if one is not None:
                self._filled(optimizer, param, *one)
        return optimizer, fresh

    def _one_made(self, label: str, param: torch.Tensor, held: Held | None, name: str, lacks: bool) -> tuple[Any, Any]:
        """An instance with one leaf.

        lacks: the leaf has no gradient. Then there is another one, which has: what an instance counts, it counts.
        """
        if not lacks:
            return self._made(label, [param], [held], [name])
        other = torch.nn.Parameter(param.detach().clone())
        hand_over(other, torch.zeros_like(param))
        return self._made(label, [param, other], [held, None], [name, "another"])

    def _labels(self, main: Tree) -> list[str]:
        """By which a step makes its instances."""
        return labels_of(buffer.bucket for buffer in main.values())

    def _rates(self, main: Tree, count: torch.Tensor) -> Rates:
        """By label the rates of this count, where it is a function that says them."""
        rates = {label: by_label("lr", self.options.get("lr"), label) for label in self._labels(main)}
        return {label: at("lr", rate, label, count) for label, rate in rates.items() if callable(rate)}

    def _stepped(self, label: str, optimizer: Any, rates: Rates, what: str) -> None:
        """One step of an instance. what: which leaves it has, for an error."""
        if label in rates:
            for group in optimizer.param_groups:
                group["lr"] = float(rates[label])
        try:
            optimizer.step()
        except Exception as error:
            raise TreeError(f"{name_of(self.cls)}: raised {type(error).__name__} with {what}: {error}") from error

    def _filled(self, optimizer: Any, param: torch.Tensor, form: Form, values: Sequence[Any]) -> None:
        """Give an instance what it kept of a leaf, and beside."""
        if form.names is not None:
            if form.names:
                optimizer.state[param] = dict(zip(form.names, values, strict=True))
            return
        tree = pytree.tree_unflatten(list(values), form.structure)
        if tree["state"]:
            optimizer.state[param] = tree["state"]
        for key, value in tree["beside"].items():
            where, name = key.split(".", 1)
            if where == "group":
                optimizer.param_groups[0][name] = value
            elif where == "self" and type(value) is dict and type(vars(optimizer).get(name)) is dict:
                vars(optimizer)[name].clear()  # which others of the instance may have, too
                vars(optimizer)[name].update(value)
            elif where == "self":
                vars(optimizer)[name] = value
            else:
                optimizer.state[name] = value

    def _taken(
        self, label: str, optimizer: Any, param: torch.Tensor, fresh: Any, learn: bool, now: Any = None
    ) -> tuple[Form, list[Any]]:
        """What an instance keeps of a leaf, and beside (`now`)."""
        now = beside(optimizer) if now is None else now
        changed = _changed(fresh, now)
        known = self._moving.get(label, frozenset())
        if learn:
            known = self._moving[label] = known | changed
        if changed - known:
            raise TreeError(
                f"{name_of(self.cls)}: the class changed {sorted(changed - known)[0]!r} of itself, which it had not in "
                "its first steps, so that no State holds it. Write an (init, update) pair."
            )
        tree = {"state": dict(optimizer.state.get(param, {})), "beside": {k: now[k] for k in sorted(known) if k in now}}
        pairs, structure = pytree.tree_flatten_with_path(tree)
        slots, values = [], []
        for path, value in pairs:
            name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])
            if isinstance(value, torch.Tensor):
                if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_complex():
                    raise SpecError(
                        f"{name_of(self.cls)}: it keeps a {type(value).__name__} of {value.dtype} as {name!r}; a State "
                        "has plain tensors of real numbers only."
                    )
                slots.append(Slot(name, tuple(value.shape), value.dtype))
            elif isinstance(value, bool | int | float):
                slots.append(Slot(name, python=type(value)))
            elif isinstance(value, PLAIN) or (
                isinstance(value, set) and all(isinstance(one, str | int | float) for one in value)
            ):
                slots.append(Slot(name, value=copy.copy(value)))
            else:
                raise SpecError(
                    f"{name_of(self.cls)}: it keeps a {type(value).__name__} as {name!r}, which no State can hold: "
                    "tensors, numbers, None, texts and sets of them, in dicts and lists, can be saved. Write an (init, "
                    "update) pair."
                )
            values.append(value)
        plain = not tree["beside"] and len(tree["state"]) == len(slots) and all(len(path) == 2 for path, _ in pairs)
        names = tuple(tree["state"]) if plain and not any(isinstance(slot.value, set) for slot in slots) else None
        return Form(structure, tuple(slots), names), values

    def forms(self, leaf: Leaf, dtype: torch.dtype) -> list[Form]:
        """What the class keeps of a leaf, in the order in which it comes to that, from some steps on numbers."""
        key = (leaf.label, leaf.shape, dtype, leaf.path if leaf.label in self._by_name else "")
        if key not in self._forms:
            with torch.device("cpu"), torch.inference_mode(False):
                self._forms[key] = self._tried(leaf.label, leaf.shape, dtype, leaf.path)
        return self._forms[key]

    def _tried(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, path: str) -> list[Form]:
        found, before = list[Form](), self._moving.get(label, frozenset())
        work, steps = Work(), 0
        try:
            for late in (0, 2):  # a leaf that gets its first gradients later
                param = torch.nn.Parameter(numbers_like(shape, 1).to(dtype))
                held: Held | None = None
                for step in range(12 if param.numel() <= 1 << 16 else 4):
                    lacks = step < late
                    optimizer, fresh = self._one_made(label, param, held, path, lacks)
                    if not lacks:
                        hand_over(param, numbers_like(shape, 2 + step).to(dtype))
                    with uncompiled(), work:
                        optimizer.step()
                    steps += 1
                    held = self._taken(label, optimizer, param, fresh, True)
                    found += [held[0]] if held[0] not in found else []
                if not self._moving[label]:
                    break
        except (SpecError, TreeError):
            raise
        except Exception as error:
            raise self._refused(path, shape, error) from error
        # what it keeps beside is known by the last step only: forms of earlier steps shall have it, too
        if self._moving.get(label, frozenset()) != before:
            return self._tried(label, shape, dtype, path)
        self._work[label, shape, dtype] = work.flops // steps
        return found

    def _refused(self, path: str, shape: tuple[int, ...], error: Exception | None) -> SpecError:
        """The error for a leaf that the class does not take."""
        return SpecError(
            f"{name_of(self.cls)}: the class does not take the leaf {path!r} of shape {list(shape)}: it raised "
            f"{type(error).__name__}: {error}. Give the leaf to another optimizer by its label: fsdp.partition."
        )

    def check(self, label: str) -> None:
        """Refuse a class of which a new instance that is given the state does not go on as the old one would."""
        ran, refusal = False, SpecError("")
        tried = [(shape, dtype) for shape in ((6, 8), (7,), (4, 3, 2, 2)) for dtype in (torch.float64, torch.float32)]
        done: set[tuple[int, ...]] = set()
        for shape, dtype in tried:  # float32 for a shape that it does not take in float64
            if shape in done:
                continue
            try:
                forms = self._tried(label, shape, dtype, "a leaf")
                wanted = self._run(label, shape, dtype, None)
            except SpecError as error:
                refusal = error
                continue
            ran = True
            done.add(shape)
            self._refuse_by_values(label, shape, dtype, forms)
            if not torch.equal(wanted, self._run(label, shape, dtype, forms)):
                raise SpecError(
                    f"{name_of(self.cls)}: a new instance that is given the class's own state goes on otherwise than "
                    f"the first one, on a leaf of shape {list(shape)}: the class keeps something in another place, or "
                    "draws random numbers, so that no State can hold all of it. Write an (init, update) pair."
                )
        if not ran:
            raise refusal

    def _refuse_by_values(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, forms: list[Form]) -> None:
        """Refuse a class that keeps more, or less, of a leaf by the values in it, as those under a threshold."""
        param = torch.nn.Parameter(SMALL * numbers_like(shape, 1).to(dtype))
        optimizer, fresh = self._made(label, [param], [None], ["a leaf"])
        for step in range(3):
            hand_over(param, numbers_like(shape, 2 + step).to(dtype))
            try:
                optimizer.step()
            except Exception:
                return  # a real step says so
            form, _ = self._taken(label, optimizer, param, fresh, False)
            if form not in forms:
                raise SpecError(
                    f"{name_of(self.cls)}: what it keeps of a leaf of shape {list(shape)} has another structure where "
                    f"weights are small: {[slot.name for slot in form.slots]}. What a State has goes by the shape, not "
                    "by values. Write an (init, update) pair."
                )

    def _run(
        self, label: str, shape: tuple[int, ...], dtype: torch.dtype, forms: list[Form] | None, leaves: int = 1,
        late: Sequence[int] = (),
    ) -> torch.Tensor:  # fmt: skip
        """Leaves after thirteen steps: of one instance, or of a new one in each step, with states of these forms.

        late: steps in which the second leaf gets no gradient. A rate that is scheduled changes on the way, since an
        instance may have kept the one from before.
        """
        params: list[torch.Tensor] = [torch.nn.Parameter(numbers_like(shape, 3 + i).to(dtype)) for i in range(leaves)]
        names = ["a leaf", *map(str, range(1, leaves))]
        optimizer, fresh = self._made(label, params, [None] * leaves, names)
        options, rate = self._options(label)
        for step in range(13):
            if rate is not None and step >= CHANGES:
                for group in optimizer.param_groups:
                    group["lr"] = options["lr"] / 4
            for i, param in enumerate(params):
                scale = (1e-3, 1.0, 40.0)[(step + i) % 3]
                lacks = i == 1 and step in late
                hand_over(param, None if lacks else numbers_like(shape, 50 + step + 20 * i).to(dtype) * scale)
            try:
                optimizer.step()
            except Exception as error:
                whose = "an instance" if forms is None else "a new instance that is given the state of the old one"
                raise SpecError(
                    f"{name_of(self.cls)}: in step {step + 1}, with {'leaves' if leaves > 1 else 'a leaf'} of shape "
                    f"{list(shape)} and {dtype}, {whose} of the class raised {type(error).__name__}: {error}"
                ) from error
            held = [self._taken(label, optimizer, param, fresh, False) for param in params]
            if forms is not None:
                if any(form not in forms for form, _ in held):
                    break
                params = [torch.nn.Parameter(param.detach().clone()) for param in params]
                optimizer, fresh = self._made(label, params, held, names)
        return torch.stack([param.detach() for param in params])

    # ---- what is kept

    def init(self, main: Tree) -> Trees:
        check_settings(main, **self.options)
        if not main:
            return {}
        like, opt = {buffer.bucket.placement: buffer for buffer in main.values()}, Trees()
        for what, some in self.plan([buffer.bucket for buffer in main.values()]).homes.items():
            for name, (bucket, dtype) in some.items():
                near, numel = like[bucket.placement], bucket.numel // bucket.slices("main")
                local = near.local.new_zeros(numel, dtype=dtype)
                opt.setdefault(what, {})[name] = FlatBuffer(local, bucket, near.states, near.mesh)
        return opt

    def _kinds(self, bucket: Bucket, leaf: Leaf) -> dict[tuple[str, torch.dtype], tuple[int, ...]]:
        """What is kept of a leaf in all its forms: names and dtypes, and shapes."""
        found: dict[tuple[str, torch.dtype], tuple[int, ...]] = {(FORM, torch.int64): ()}
        tensors: dict[str, list[Slot]] = {}
        for slot in [slot for form in self.forms(leaf, bucket.main) for slot in form.slots]:
            if slot.python is not None:
                found[slot.name + "#", torch.float64] = ()
            elif slot.shape is not None and 0 not in slot.shape:
                tensors.setdefault(slot.name, []).append(slot)
        for name, some in tensors.items():
            dtype, shapes = _stored(some[0].dtype), [slot.shape or () for slot in some]
            for slot in some[1:]:
                dtype = torch.promote_types(dtype, _stored(slot.dtype))
            largest = max(math.prod(shape) for shape in shapes)
            found[name, dtype] = shapes[0] if all(shape == shapes[0] for shape in shapes) else (largest,)
        return found

    # ---- a step

    def _in_graph(self, *args: Any) -> tuple[Tree, Trees]:
        raise ScheduleError(self._graph_text())

    def _graph_text(self) -> str:
        return (
            f"{name_of(self.cls)}: the class's own Python runs in each step, with whole leaves, which no graph can "
            "hold. Leave the update out of the graph, or use a class that is elementwise."
        )

    @traced_as(_in_graph)
    def update_some(self, *some: Any) -> tuple[Tree, Trees]:
        return self.ready(*some)()

    def ready(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: Trees, main: Tree, count: torch.Tensor,
        sender: Sender,
    ) -> Callable[[], tuple[Tree, Trees]]:  # fmt: skip
        if not main or self._skipped(skip, main):
            return lambda: (main, opt)
        lacking_one = next(
            (leaf.path for name, some in given.items() if name in main
             for leaf, one in zip(main[name].bucket.leaves, some, strict=True) if not one), None,
        )  # fmt: skip
        if self.late and lacking_one is not None:
            raise TreeError(
                f"{name_of(self.cls)}: the leaf {lacking_one!r} has no gradient in this step, but with this class "
                f"{self.late}. Give it zeros, or by='all'."
            )
        return partial(self._updated, given, grads, opt, main, self._rates(main, count), sender)

    def _updated(
        self, given: Leaves, grads: Tree, opt: Trees, main: Tree, rates: Rates, sender: Sender
    ) -> tuple[Tree, Trees]:
        plan = self.plan([buffer.bucket for buffer in main.values()])
        if any(self._moving.values()):  # what an instance counts, it counts for leaves without a gradient, too
            lacks = {(name, i) for name, some in given.items() for i, one in enumerate(some) if not one}
            given = {}
        else:
            lacks = set()
        lacking: Given = tuple([(name, tuple(some)) for name, some in given.items()])
        kept = LeafStates(opt)
        torch.autograd.graph.increment_version([one.local for one in kept.tensors])  # who writes to `.data` does not
        for owners in plan.owners:
            mine = {bucket.name for bucket in owners.buckets}
            for group in plan.groups:
                names = tuple([name for name in group if name in mine])
                moves = owners.moves(names, lacking, sender.coordinate) if names else None
                if moves is not None and moves.some:
                    self._update(owners, moves, names, lacks, grads, kept, main, rates, sender)
        kept.put_numbers()
        return main, opt

    def _skipped(self, skip: torch.Tensor | None, main: Tree) -> bool:
        if being_captured(next(iter(main.values())).local.device):
            raise ScheduleError(self._graph_text())
        return skip is not None and bool(skip)

    def _update(
        self, owners: Owners, moves: Moves, names: Sequence[str], lacks: set[tuple[str, int]], grads: Tree,
        kept: LeafStates, main: Tree, rates: Rates, sender: Sender,
    ) -> None:  # fmt: skip
        which = [owners.owned[i] for members in moves.members for i in members]
        order = tuple([piece for _, _, slices in moves.stacks for piece in slices])
        came = [ordered(there(moves, _sent(moves, tree, names), sender, "leaves"), order) for tree in (main, grads)]
        sizes = [math.prod(one.part.shape) for one in which]
        jobs: dict[str, list[Job]] = {}
        for one, weights, grad in zip(which, *(flat.split(sizes) for flat in came), strict=True):
            buffer = main[one.bucket]
            leaf, bare = buffer.bucket.leaves[one.leaf], (one.bucket, one.leaf) in lacks
            if bare and not self._moving.get(one.label):
                continue
            job = Job(leaf, buffer.local.dtype, weights, None if bare else grad, kept.rows.get(one.path, {}),
                      kept.numbers[one.path])  # fmt: skip
            jobs.setdefault(one.label, []).append(job)
        for label, some in jobs.items():
            alone = bool(self._moving.get(label)) or bool(self.late)
            for part in [[job] for job in some] if alone else [some]:
                self._step(label, part, rates, alone)
        flat = back(moves, came[:1] if which else [], came[0][:0], sender, "leaves")
        runs = [end - start for _, start, end, _, _ in moves.runs]
        if runs:
            foreach_copy_(cut(moves, main), list(flat.split(runs)))

    def _step(self, label: str, jobs: Sequence[Job], rates: Rates, alone: bool = False) -> None:
        """One step of one instance, with these leaves. alone: others have instances of their own."""
        first = jobs[0].leaf
        what = f"the leaf {first.path!r} of shape {list(first.shape)}" if len(jobs) == 1 else f"{len(jobs)} leaves"
        with torch.inference_mode(False), torch.no_grad():
            own = [job.weights.to(job.dtype).view(job.leaf.shape) for job in jobs]
            params = [torch.nn.Parameter(one) for one in own]
            held = [self._held_by(job) for job in jobs]
        with torch.inference_mode(False):
            if alone:
                optimizer, fresh = self._one_made(label, params[0], held[0], first.path, jobs[0].grad is None)
            else:
                optimizer, fresh = self._made(label, params, held, [job.leaf.path for job in jobs])
            for job, param in zip(jobs, params, strict=True):
                if job.grad is not None:
                    hand_over(param, job.grad.to(job.dtype).view(job.leaf.shape))
            self._stepped(label, optimizer, rates, what)
        with torch.no_grad():
            now, pairs = beside(optimizer), list[tuple[torch.Tensor, torch.Tensor]]()
            moved = bool(_changed(fresh, now))
            for job, param, before, mine in zip(jobs, params, held, own, strict=True):
                values = None if moved or before is None else _as_before(optimizer, param, *before)
                if values is None or before is None:
                    form, values = self._taken(label, optimizer, param, fresh, False, now)
                    self._put_form(job, form)
                else:
                    form = before[0]
                if param.data_ptr() != mine.data_ptr():  # it was given other data
                    mine.copy_(param.detach())
                if mine.data_ptr() != job.weights.data_ptr():
                    job.weights.copy_(mine.reshape(-1))
                pairs += self._put(job, form, values)
            put(pairs, [old for old, _ in pairs])

    def _put_form(self, job: Job, form: Form) -> None:
        """Put the number of a form into a job, and zeros for numbers."""
        forms = self.forms(job.leaf, job.dtype)
        if form not in forms:
            raise TreeError(
                f"{name_of(self.cls)}: what it keeps of the leaf {job.leaf.path!r} has another structure than it had "
                f"in {len(forms)} forms of its first steps: {[slot.name for slot in form.slots]}. No State can hold "
                "that. Write an (init, update) pair."
            )
        job.numbers.update(dict.fromkeys(job.numbers, 0.0))
        job.numbers[FORM] = forms.index(form) + 1

    def _put(self, job: Job, form: Form, values: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Put numbers that are kept of a leaf into a job. Returns rows, and what is to be copied into them."""
        pairs = []
        for slot, value in zip(form.slots, values, strict=True):
            if slot.python is not None:
                job.numbers[slot.name + "#"] = float(value)
            elif slot.shape is not None and slot.name in job.rows:
                row = job.rows[slot.name]
                if value.data_ptr() != row.data_ptr() or value.dtype is not row.dtype or not value.is_contiguous():
                    pairs.append((row.view(-1)[: value.numel()], value.detach().reshape(-1)))
        return pairs

    def _held_by(self, job: Job) -> Held | None:
        """What is kept of a leaf, as the class has it; None before its first step."""
        which = int(job.numbers[FORM])
        if not which:
            return None
        form = self.forms(job.leaf, job.dtype)[which - 1]
        return form, [self._value(slot, job) for slot in form.slots]

    def _value(self, slot: Slot, job: Job) -> Any:
        if slot.python is not None:
            return slot.python(job.numbers[slot.name + "#"])
        if slot.shape is None:
            return copy.copy(slot.value)
        if slot.name not in job.rows:
            return job.weights.new_empty(slot.shape, dtype=slot.dtype)
        row = job.rows[slot.name]
        if row.shape != slot.shape:
            row = row.view(-1)[: math.prod(slot.shape)].view(slot.shape)
        return row if row.dtype is slot.dtype else row.to(slot.dtype)


def _changed(fresh: Any, now: Any) -> frozenset[str]:
    """What an instance has beside the state of parameters that is not as it was when it was made."""
    return frozenset(name for name, value in now.items() if name not in fresh or not same(fresh[name], value))


def _as_before(optimizer: Any, param: torch.Tensor, form: Form, before: Sequence[Any]) -> Sequence[Any] | None:
    """What an instance keeps of a leaf, where that has the form that it had, without a long look. None: not known."""
    state = optimizer.state.get(param, {})
    if form.names is None or tuple(state) != form.names:
        return None
    values = [*state.values()]
    for slot, old, new in zip(form.slots, before, values, strict=True):
        if type(new) is not type(old) or (slot.python is None and slot.shape is None and new is not old):
            return None
        if slot.shape is not None and (new.shape != slot.shape or new.dtype is not slot.dtype):
            return None
    return values


def _sent(moves: Moves, tree: Tree, names: Sequence[str]) -> torch.Tensor:
    """This rank's runs of a tree, one after the other, of one dtype on all ranks."""
    dtype = tree[names[0]].local.dtype
    for name in names[1:]:
        dtype = torch.promote_types(dtype, tree[name].local.dtype)
    parts = cut(moves, tree)
    return torch.cat([part.to(dtype) for part in parts]) if parts else tree[names[0]].local.new_empty(0, dtype=dtype)


def _stored(dtype: torch.dtype | None) -> torch.dtype:
    assert dtype is not None
    return torch.uint8 if dtype is torch.bool else dtype
