"""Optimizers that couple the elements of a leaf: each leaf whole at one owner rank, in an instance of the class itself.

    shards    [ w0 w0 | w1 ] [ w1 w2 | w2 ]      weights, gradients, and what the class keeps
    there     one all-to-all an axis, for each of them
    owners    cls([leaf], **options), with its true shape; its state is handed in; `step()`; its state is taken out
    back      weights and state to the shards

So what is stored stays flat, sharded and by leaf, in whatever shape the class keeps it: a tensor of a state lies in the
extent of its leaf, from the beginning, and in a second buffer where it is larger than the leaf.

    opt["exp_avg"]    [ as main weights ]
    opt["row"]        [ r0 . . | r1 . . ]        the first elements of the leaf's extent
    opt["step"]       [ 3      | 3      ]        one number a leaf, the same on every rank
    opt["form"]       [ 1      | 1      ]        what there is of the state: 0 before the first step
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from .._common.device import being_captured, zeros_as
from .._common.errors import ScheduleError, SpecError, TreeError
from .._common.torch_names import pytree
from .._common.tracing import traced_as
from .._optim.optimizer import Sender, Tree, UpdatesSome, at, by_label, check_settings, labels_in, portions
from .._plan.layout import Bucket, Leaf
from .._runtime.given import Leaves
from .._storage.flat import no_counts
from .owners import Given, Moves, Owners, Part, back, cut, find_owners, ordered, there
from .probe import hand_over, made, name_of
from .prove import Work, beside, numbers_like, same

__all__ = ["WholeLeaves", "first_of"]

Trees = dict[str, Tree]
FORM = "form"
PLAIN = (type(None), str, torch.dtype, torch.device, torch.Size)
MOST = 64  # buffers for one tensor of a state
FLOPS = 256  # that cost as much as an element that travels
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
    """What a state of a leaf looks like."""

    structure: Any
    slots: tuple[Slot, ...]


Held = tuple[Form, Sequence[Any]]  # what an instance keeps of a leaf: its form, and the values in that


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
        self._refuse_cut(buckets)
        key = tuple(buckets)
        if key not in self._plans:
            groups = self._groups(buckets)
            self._plans[key] = find_owners(buckets, self._part, groups)
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
    def _plans(self) -> dict[tuple[Bucket, ...], tuple[Owners, ...]]:
        return {}

    def _part(self, bucket: Bucket, leaf: Leaf) -> Iterator[Part]:
        if leaf.numel:
            forms = self.forms(leaf, bucket.main)
            kept = max(sum(math.prod(slot.shape or (0,)) for slot in form.slots) for form in forms)
            work = self._work[leaf.label, leaf.shape, bucket.main] // FLOPS
            yield Part(tuple(leaf.shape), None, 0, (leaf.numel, 1), leaf.numel + kept + work)

    @cached_property
    def _work(self) -> dict[tuple[str, tuple[int, ...], torch.dtype], int]:
        """Floating-point operations in a step with a leaf, but for those by element."""
        return {}

    @cached_property
    def _forms(self) -> dict[Any, list[Form]]:
        return {}

    @cached_property
    def _moving(self) -> dict[str, frozenset[str]]:
        return {}

    def _groups(self, buckets: Sequence[Bucket]) -> list[list[str]]:
        sizes = {bucket.name: bucket.nbytes("main") for bucket in buckets}
        return portions(dict(reversed(sizes.items())), self.fill)

    # ---- an instance

    def _options(self, label: str) -> tuple[dict[str, Any], Any]:
        """The constructor's options for a label, with the first learning rate; and the rate that changes, or None."""
        options = {name: by_label(name, value, label) for name, value in self.options.items()}
        lr = options.get("lr")
        if callable(lr):
            return options | {"lr": first_of(lr)}, lr
        return options, None

    def _made(self, label: str, params: Sequence[torch.Tensor], held: Sequence[Held | None]) -> tuple[Any, Any]:
        """An instance with what it kept of its leaves; and what it has beside, as constructed."""
        optimizer = made(self.cls, params, self._options(label)[0])
        fresh = beside(optimizer)
        for param, one in zip(params, held, strict=True):
            if one is not None:
                self._filled(optimizer, param, *one)
        return optimizer, fresh

    def _one_made(self, label: str, param: torch.Tensor, held: Held | None, lacks: bool) -> tuple[Any, Any]:
        """An instance with one leaf.

        lacks: the leaf has no gradient. Then there is another one, which has: what an instance counts, it counts.
        """
        if not lacks:
            return self._made(label, [param], [held])
        other = torch.nn.Parameter(param.detach().clone())
        hand_over(other, torch.zeros_like(param))
        return self._made(label, [param, other], [held, None])

    def _stepped(self, label: str, optimizer: Any, count: torch.Tensor, what: str) -> None:
        """One step of an instance, at the rate of this count. what: which leaves it has, for an error."""
        if (rate := self._options(label)[1]) is not None:
            for group in optimizer.param_groups:
                group["lr"] = float(at("lr", rate, label, count))
        try:
            optimizer.step()
        except Exception as error:
            raise TreeError(f"{name_of(self.cls)}: raised {type(error).__name__} with {what}: {error}") from error

    def _filled(self, optimizer: Any, param: torch.Tensor, form: Form, values: Sequence[Any]) -> None:
        """Give an instance what it kept of a leaf, and beside."""
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
        self, label: str, optimizer: Any, param: torch.Tensor, fresh: Any, learn: bool
    ) -> tuple[Form, list[Any]]:
        now = beside(optimizer)
        changed = frozenset(k for k, v in now.items() if k not in fresh or not same(fresh[k], v))
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
        return Form(structure, tuple(slots)), values

    def forms(self, leaf: Leaf, dtype: torch.dtype) -> list[Form]:
        """What the class keeps of a leaf, in the order in which it comes to that, from some steps on numbers."""
        key = (leaf.label, leaf.shape, dtype)
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
                    optimizer, fresh = self._one_made(label, param, held, lacks)
                    if not lacks:
                        hand_over(param, numbers_like(shape, 2 + step).to(dtype))
                    with work:
                        optimizer.step()
                    steps += 1
                    held = self._taken(label, optimizer, param, fresh, True)
                    found += [held[0]] if held[0] not in found else []
                if not self._moving[label]:
                    break
        except (SpecError, TreeError):
            raise
        except Exception as error:
            raise SpecError(
                f"{name_of(self.cls)}: the class does not take the leaf {path!r} of shape {list(shape)}: it raised "
                f"{type(error).__name__}: {error}. Give the leaf to another optimizer by its label: fsdp.partition."
            ) from error
        # what it keeps beside is known by the last step only: forms of earlier steps shall have it, too
        if self._moving.get(label, frozenset()) != before:
            return self._tried(label, shape, dtype, path)
        self._work[label, shape, dtype] = work.flops // steps
        return found

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
            if not torch.equal(wanted, self._run(label, shape, dtype, forms)):
                raise SpecError(
                    f"{name_of(self.cls)}: a new instance that is given the class's own state goes on otherwise than "
                    f"the first one, on a leaf of shape {list(shape)}: the class keeps something in another place, or "
                    "draws random numbers, so that no State can hold all of it. Write an (init, update) pair."
                )
        if not ran:
            raise refusal

    def _run(
        self, label: str, shape: tuple[int, ...], dtype: torch.dtype, forms: list[Form] | None, leaves: int = 1,
        late: Sequence[int] = (),
    ) -> torch.Tensor:  # fmt: skip
        """Leaves after thirteen steps: of one instance, or of a new one in each step, with states of these forms.

        late: steps in which the second leaf gets no gradient. A rate that is scheduled changes on the way, since an
        instance may have kept the one from before.
        """
        params: list[torch.Tensor] = [torch.nn.Parameter(numbers_like(shape, 3 + i).to(dtype)) for i in range(leaves)]
        optimizer, fresh = self._made(label, params, [None] * leaves)
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
                optimizer, fresh = self._made(label, params, held)
        return torch.stack([param.detach() for param in params])

    # ---- what is kept

    def init(self, main: Tree) -> Trees:
        check_settings(main, **self.options)
        self._refuse_cut(buffer.bucket for buffer in main.values())
        opt: Trees = {FORM: {}}
        for bucket, buffer in main.items():
            opt[FORM][bucket] = no_counts(buffer)
            dtypes: dict[str, torch.dtype] = {}
            for leaf in buffer.bucket.leaves:
                if not leaf.numel:
                    continue
                for slot in [slot for form in self.forms(leaf, buffer.local.dtype) for slot in form.slots]:
                    if slot.python is not None and bucket not in opt.setdefault(slot.name + "#", {}):
                        opt[slot.name + "#"][bucket] = no_counts(buffer, torch.float64)
                    for name in self._buffers_of(slot, leaf):
                        dtype = _stored(slot.dtype)
                        dtypes[name] = torch.promote_types(dtypes.get(name, dtype), dtype)
            for name, dtype in dtypes.items():
                opt.setdefault(name, {})[bucket] = buffer.but(zeros_as(buffer.local, dtype))
        return opt

    def _buffers_of(self, slot: Slot, leaf: Leaf) -> list[str]:
        """The names of the buffers in which a tensor of a state lies."""
        if slot.shape is None:
            return []
        count = -(-math.prod(slot.shape) // leaf.numel)
        if count > MOST:
            raise SpecError(
                f"{name_of(self.cls)}: it keeps {math.prod(slot.shape):,} elements as {slot.name!r} of the leaf "
                f"{leaf.path!r}, which has {leaf.numel:,}: more than {MOST} times as many. Give the leaf to another "
                "optimizer by its label: fsdp.partition."
            )
        return [slot.name if not k else f"{slot.name}[{k}]" for k in range(count)]

    # ---- a step

    def _in_graph(self, *args: Any) -> tuple[Tree, Trees]:
        raise ScheduleError(self._graph_text())

    def _graph_text(self) -> str:
        return (
            f"{name_of(self.cls)}: owners run the class's own Python in each step, which no graph can hold. Leave the "
            "update out of the graph, or use a class that is elementwise."
        )

    @traced_as(_in_graph)
    def update_some(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: Trees, main: Tree, count: torch.Tensor,
        sender: Sender,
    ) -> tuple[Tree, Trees]:  # fmt: skip
        if not main or self._skipped(skip, main):
            return main, opt
        lacking_one = next(
            (leaf.path for name, some in given.items() if name in main
             for leaf, one in zip(main[name].bucket.leaves, some, strict=True) if not one), None,
        )  # fmt: skip
        if self.late and lacking_one is not None:
            raise TreeError(
                f"{name_of(self.cls)}: the leaf {lacking_one!r} has no gradient in this step, but with this class "
                f"{self.late}. Give it zeros, or by='all'."
            )
        buckets = [buffer.bucket for buffer in main.values()]
        if any(self._moving.values()):  # what an instance counts, it counts for leaves without a gradient, too
            lacks = {(name, i) for name, some in given.items() for i, one in enumerate(some) if not one}
            given = {}
        else:
            lacks = set()
        lacking: Given = tuple([(name, tuple(some)) for name, some in given.items()])
        for owners in self.owners(buckets):
            mine = {bucket.name for bucket in owners.buckets}
            for group in self._groups(buckets):
                names = tuple([name for name in group if name in mine])
                moves = owners.moves(names, lacking, sender.coordinate) if names else None
                if moves is not None and moves.some:
                    self._update(owners, moves, names, given, lacks, grads, opt, main, count, sender)
        return main, opt

    def _skipped(self, skip: torch.Tensor | None, main: Tree) -> bool:
        if being_captured(next(iter(main.values())).local.device):
            raise ScheduleError(self._graph_text())
        return skip is not None and bool(skip)

    def _update(
        self, owners: Owners, moves: Moves, names: Sequence[str], given: Leaves, lacks: set[tuple[str, int]],
        grads: Tree, opt: Trees, main: Tree, count: torch.Tensor, sender: Sender,
    ) -> None:  # fmt: skip
        channels = {"/main": main, "/grads": grads}
        numbers: dict[tuple[str, str], list[float]] = {}
        for what, tree in opt.items():
            some = {name: tree[name] for name in names if name in tree}
            if some and next(iter(some.values())).bucket.by_leaf:
                numbers |= {(what, name): buffer.local.tolist() for name, buffer in some.items()}
            elif some:
                channels[what] = some
        came: dict[str, list[torch.Tensor]] = {}
        for what, tree in channels.items():
            flat = there(moves, self._sent(moves, tree, names, main), sender, "leaves")
            came[what] = [
                row for shape, _, slices in moves.stacks for row in ordered(flat, slices).view(-1, math.prod(shape))
            ]
        which = [owners.owned[i] for members in moves.members for i in members]
        changed = {key: [0.0] * len(values) for key, values in numbers.items()}
        for k, one in enumerate(which):
            leaf = main[one.bucket].bucket.leaves[one.leaf]
            rows = {what: rows[k] for what, rows in came.items() if one.bucket in channels[what]}
            values = {what: v[one.leaf] for (what, bucket), v in numbers.items() if bucket == one.bucket}
            bare = (one.bucket, one.leaf) in lacks
            for what, value in self._one(leaf, main[one.bucket].local.dtype, rows, values, count, bare).items():
                changed[what, one.bucket][one.leaf] = value
        for what, tree in channels.items():
            if what == "/grads":
                continue
            empty = self._sent(moves, tree, names, main)[:0]
            flat = back(moves, came[what], empty, sender, "leaves")
            runs = [end - start for _, start, end, _, _ in moves.runs]
            for (name, start, end, _, _), new in zip(moves.runs, flat.split(runs) if runs else (), strict=True):
                if name in tree:
                    tree[name].local[start:end].copy_(new)
        self._put_numbers(owners, given, opt, numbers, changed, sender)

    def _sent(self, moves: Moves, tree: Tree, names: Sequence[str], main: Tree) -> torch.Tensor:
        """This rank's runs of a tree, one after the other; zeros of a bucket that has none, and of one dtype."""
        dtypes = [tree[name].local.dtype for name in names if name in tree]
        dtype = dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        if all(name in tree for name in names):
            parts = cut(moves, tree)
        else:
            parts = [
                tree[name].local[a:b] if name in tree else zeros_as(main[name].local[a:b], dtype)
                for name, a, b, _, _ in moves.runs
            ]
        if not parts:
            return main[names[0]].local.new_empty(0, dtype=dtype)
        return torch.cat([part.to(dtype) for part in parts])

    def _one(
        self, leaf: Leaf, dtype: torch.dtype, rows: dict[str, torch.Tensor], numbers: dict[str, float],
        count: torch.Tensor, lacks: bool,
    ) -> dict[str, float]:  # fmt: skip
        """One step with one leaf; rows are changed in place. Returns the numbers that are kept of it."""
        forms = self.forms(leaf, dtype)
        held = self._held_by(leaf, forms, rows, numbers)
        param = torch.nn.Parameter(rows["/main"].to(dtype).view(leaf.shape).clone())
        with torch.inference_mode(False):
            optimizer, fresh = self._one_made(leaf.label, param, held, lacks)
            if not lacks:
                hand_over(param, rows["/grads"].to(dtype).view(leaf.shape).clone())
            self._stepped(leaf.label, optimizer, count, f"the leaf {leaf.path!r} of shape {list(leaf.shape)}")
            after, values = self._taken(leaf.label, optimizer, param, fresh, False)
        return self._kept(leaf, param, forms, after, values, rows, numbers)

    def _kept(
        self, leaf: Leaf, param: torch.Tensor, forms: list[Form], after: Form, values: Sequence[Any],
        rows: dict[str, torch.Tensor], numbers: dict[str, float],
    ) -> dict[str, float]:  # fmt: skip
        """Put a leaf and what is kept of it into rows. Returns the numbers."""
        if after not in forms:
            raise TreeError(
                f"{name_of(self.cls)}: what it keeps of the leaf {leaf.path!r} has another structure than it had in "
                f"{len(forms)} forms of its first steps: {[slot.name for slot in after.slots]}. No State can hold "
                "that. Write an (init, update) pair."
            )
        rows["/main"].copy_(param.detach().reshape(-1))
        kept: dict[str, float] = dict.fromkeys(numbers, 0.0)
        kept[FORM] = forms.index(after) + 1
        for slot, value in zip(after.slots, values, strict=True):
            if slot.python is not None:
                kept[slot.name + "#"] = float(value)
            flat = value.detach().reshape(-1) if slot.shape is not None else None
            for k, name in enumerate(self._buffers_of(slot, leaf)):
                assert flat is not None
                part = flat[k * leaf.numel : (k + 1) * leaf.numel]
                rows[name][: part.numel()].copy_(part)
        return kept

    def _held_by(
        self, leaf: Leaf, forms: list[Form], rows: dict[str, torch.Tensor], numbers: Mapping[str, float]
    ) -> Held | None:
        """What is kept of a leaf, as the class has it; None before its first step."""
        which = int(numbers[FORM])
        if not which:
            return None
        form = forms[which - 1]
        return form, [self._value(slot, leaf, rows, numbers) for slot in form.slots]

    def _value(self, slot: Slot, leaf: Leaf, rows: dict[str, torch.Tensor], numbers: Mapping[str, float]) -> Any:
        if slot.python is not None:
            return slot.python(numbers[slot.name + "#"])
        if slot.shape is None:
            return copy.copy(slot.value)
        parts = [rows[name] for name in self._buffers_of(slot, leaf)]
        flat = torch.cat(parts)[: math.prod(slot.shape)] if parts else rows["/main"][:0]
        return flat.to(slot.dtype).view(slot.shape).clone()  # no view, which some modes forbid to write to

    def _put_numbers(
        self, owners: Owners, given: Leaves, opt: Trees, old: dict[tuple[str, str], list[float]],
        changed: dict[tuple[str, str], list[float]], sender: Sender,
    ) -> None:  # fmt: skip
        """Each number from the rank that owns its leaf to all."""
        first = opt[FORM][next(iter(changed))[1]].local
        flat = torch.tensor([v for one in changed.values() for v in one], dtype=torch.float64, device=first.device)
        if owners.axes:
            (flat,) = sender.sum([flat], [tuple(axis for axis, _ in owners.axes)])
        for (what, bucket), new in zip(changed, flat.split([len(v) for v in changed.values()]), strict=True):
            local, some = opt[what][bucket].local, given.get(bucket)
            if some is None:
                local.copy_(new)
            else:
                took = torch.tensor(some, dtype=torch.bool, device=local.device)
                local.copy_(torch.where(took, new.to(local.dtype), local))


def _stored(dtype: torch.dtype | None) -> torch.dtype:
    assert dtype is not None
    return torch.uint8 if dtype is torch.bool else dtype
