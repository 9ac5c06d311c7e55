"""What an optimizer is: an `(init, update)` pair over buckets.

    init(main) -> opt                               trees over trainable buckets: {name: FlatBuffer}
    update(grads, opt, main, count) -> main, opt    new trees, or the same ones changed in place

`main` and `grads` have the same structure, dtype and placement, so `tree_map` works on them elementwise; a rank sees
its own shards only. `count` is an int64 tensor [], the number of steps taken before this one. `FlatBuffer.by_label`
gives views by label, for settings that differ. Results are copied into the state's buffers where they are not already
there, so a pure update is as good as an in-place one.

A leaf that got no gradient on any rank keeps its weights, and what the optimizer keeps of it. `adamw`, `sgd` and
`from_torch` leave such leaves out; for another pair the core puts back what it changed of them.

Settings that users give to optimizers, as a learning rate: one for all leaves, or one for each label; each a number,
or a function of the count.
And views of buckets by label and by leaf, in lists: what a kernel takes that updates many tensors at once.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch

from .._common.calls import refuse, traced_as
from .._common.device import lies_on_host
from .._common.errors import SpecError, TreeError
from .._common.record import Collective, over_each_axis
from .._common.torch_names import foreach_add_, pytree
from .._plan.layout import Bucket
from .._runtime.agreement import Leaves
from .._spec.spec import Spec
from .._storage import FlatBuffer, at_home

Tree = dict[str, FlatBuffer]
FILL = 1 << 25  # bytes of main weights: what an update on the lane takes at least, so that small units share a call


class Optimizer(NamedTuple):
    """A pair of pure functions; any object with these two attributes will do.

    `by_bucket = True` says that an update of some buckets of `main` touches those only, in place: then on GPUs `step`
    calls it several times, on some buckets each, as their gradients come; with `Schedule(overlap_update=True)` on
    another stream. `elementwise = True` says besides that each element is updated by itself: what lies in the host's
    memory it then gets in parts, as FlatBuffers of fewer elements, of which `span`, `by_label` and `by_leaf` tell. What
    it returns anew, of weights or of what it keeps, is refused then. An
    optimizer may have a third function, `update_unless(skip, grads, opt, main, count)`, which changes nothing where the
    bool tensor `skip` [] is true; `step(skip=)` else copies what it may have to put back.

    Where leaves got no gradient, `step` copies the weights of these and the parts of FlatBuffers in the optimizer's
    state before `update`, and puts them back after it. An optimizer may do it itself, with a function
    `update_some(given, skip, grads, opt, main, count)`: `given` is `{bucket: (bool for each of bucket.leaves)}` of the
    buckets in which some leaf got none, `skip` may be None. `FlatBuffer.by_label(given.get(name))` and
    `FlatBuffer.by_leaf` give the views of leaves that got one. If it counts steps by leaf, two more say where:
    `counted(opt)` names the buckets, and `counting(opt, main, names)` is the same state with counts for these buckets,
    zero where there were none (int64 [leaves], as `AdamState.missed`). `step` calls it before `update_some`, `load` to
    fit a template to a checkpoint.

    `communicates = True` says that each of its updates takes one more argument, a `Sender`, by which ranks exchange
    what they have of the buckets, or add it up (`Sender.sum`): every rank calls it for the same buckets. `fill` may
    say how many bytes of main weights one call should have at least, where there are several; or `at_once(opt)`, if
    there is one, the names of buckets that one call shall have together. `placed(opt)`, if there is one, gives the
    same state for the buckets that its FlatBuffers have now: `redistribute` calls it. `arranges = True` says that it
    may keep FlatBuffers of buckets of its own, in which each leaf lies whole in one slice: `redistribute` then has
    `init` make the new ones, and moves leaves into these.

    `for_step(count, labels)`, if there is one, gives the same optimizer for the step of this count and leaves of these
    labels, with what it computes of the count alone, or None. Who has it says that `update` may be called for parts of
    a bucket in one step, and counts no calls: a captured step updates each part where its gradients arrive.

    As one of several (`partition`), an optimizer gets the buckets that have leaves of its labels, and of those these
    leaves only: `buffer.bucket.leaves`, `by_label`, `by_leaf` and `extend.leaf_shards` know no others. `buffer.local`
    is the whole bucket's still, with other leaves between. `named_labels()`, if there is one, gives `(setting, labels)`
    for each setting that is given by label, so that a misspelt label is found.

    An update that raises, having changed weights in place, leaves a state that says so. What is written through
    `tensor.data` or NumPy is not seen: then the state looks as if nothing had happened.

    >>> def update(grads, opt, main, count):  # plain gradient descent
    ...     return pytree.tree_map(lambda p, g: p - 0.1 * g, main, grads), opt
    >>> descent = Optimizer(init=lambda main: {}, update=update)
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, torch.Tensor], tuple[Any, Any]]


class UpdatesSome:
    """The base of optimizers that have `update_some`: the other two updates are that one with no leaf left out. Who has
    `ready`, with the same arguments, does there what may raise, and returns what writes: the rest of `update_some`."""

    def update_some(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def update(self, *args: Any) -> tuple[Any, Any]:
        return self.update_some({}, None, *args)

    def update_unless(self, skip: torch.Tensor | None, *args: Any) -> tuple[Any, Any]:
        return self.update_some({}, skip, *args)


class Sender(NamedTuple):
    """What an optimizer that says `communicates = True` gets as the last argument of its updates.

    coordinate: this rank's place on each axis of the mesh. sizes: the ranks along each axis. send: carries out a
    collective: of this tensor, for the splits of an all-to-all (elements that come, and that go, by rank along the
    axis), None for an all-reduce; compute waits for it, and the tensor that was given stays as it is.
    """

    coordinate: tuple[tuple[str, int], ...]
    sizes: Mapping[str, int]
    send: Callable[[Collective, torch.Tensor, tuple[Sequence[int], Sequence[int]] | None], torch.Tensor]

    def sum(self, tensors: Sequence[torch.Tensor], along: Sequence[tuple[str, ...]]) -> list[torch.Tensor]:
        """Tensors [...] of one dtype, each added up along mesh axes of its own; all ranks along these get the same.

        Args:
            tensors: of the same shapes on every rank.
            along: the axes for each: `buffer.sharded()` of what is found of a leaf's shards in that buffer.

        Collective: one all-reduce for each axis that is named, of all tensors together. Nothing waits for the device.

        Example, the squared norm of each bucket: `sender.sum([b.local.square().sum() for b in main.values()],
        [b.sharded() for b in main.values()])`.
        """

        def reduced(axis: str, flat: torch.Tensor) -> torch.Tensor:
            one = Collective("all_reduce", axis, flat.numel(), flat.dtype, "sum", "side", "the optimizer's sums")
            return self.send(one, flat, None)

        return over_each_axis(tensors, along, [axis for axis, ranks in self.sizes.items() if ranks > 1], reduced)


def as_optimizer(value: Any) -> Any:
    """Check what the user gave as an optimizer: an `(init, update)` pair, or an object with those attributes."""
    if value is None or (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        if value is not None and _gives_updates(value.update):
            raise SpecError(
                f"optimizer: the update of this {type(value).__name__} takes params=None, as those of optax do, "
                "and returns what is to be added. Expected update(grads, opt, main), which writes into main. Give "
                "fsdp.from_updates(pair)."
            )
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(map(callable, value)):
        return Optimizer(*value)
    given = type(value).__name__
    remedy = "For an optax-style pair use fsdp.from_updates(pair)"
    if isinstance(value, torch.optim.Optimizer) or (
        isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    ):
        cls = value if isinstance(value, type) else type(value)
        given, remedy = f"torch's {cls.__name__}", f"Give its class: fsdp.from_torch({cls.__name__}, lr=...)"
    raise SpecError(f"optimizer: expected a pair (init, update), as fsdp.adamw(lr=3e-4), not {given}. {remedy}.")


def _gives_updates(update: Any) -> bool:
    """Whether an update is of an optax-style pair: `update(updates, state, params=None)`."""
    try:
        found = inspect.signature(update).parameters.get("params")
    except (TypeError, ValueError):  # of C, say
        return False
    return found is not None and found.default is None


def initial(optimizer: Any, main: Tree, count: torch.Tensor | None = None) -> Any:
    """What an optimizer keeps before the first step, where its placement says. Each tensor has memory of its own, since
    results are written there: one that `init` gave twice, or that is of the main weights, is copied.

    count: the steps that were taken before, in which these leaves had no part: so says who counts by leaf.
    """
    taken: dict[int, list[range]] = {}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta" or not tensor.numel():
            return tensor
        storage, span = tensor.untyped_storage()._cdata, _span(tensor)
        spans = taken.setdefault(storage, [])
        if any(span.start < other.stop and other.start < span.stop for other in spans):
            return apart(tensor.clone())
        spans.append(span)
        return tensor

    def node(x: Any) -> Any:
        if isinstance(x, FlatBuffer):
            local = apart(x.local)
            return x if local is x.local else x.but(local)
        return apart(x) if isinstance(x, torch.Tensor) else x

    for buffer in main.values():
        apart(buffer.local)
    opt = at_home(pytree.tree_map(node, optimizer.init(main), is_leaf=_whole))
    if count is None or not hasattr(optimizer, "counting"):
        return opt
    before = {id(tensor) for tensor in tensors_of(opt)}
    opt = optimizer.counting(opt, main, [*main])
    for missed in [tensor for tensor in tensors_of(opt) if id(tensor) not in before]:
        missed.copy_(count)
    return opt


def _span(tensor: torch.Tensor) -> range:
    """The elements of its storage from the first to the last one."""
    begin = int(tensor.storage_offset())
    return range(begin, begin + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))


def _whole(x: Any) -> bool:
    return isinstance(x, FlatBuffer)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree, those of FlatBuffers without a look inside."""
    nodes = pytree.tree_leaves(tree, is_leaf=_whole)
    leaves = [node.local if isinstance(node, FlatBuffer) else node for node in nodes]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def in_own_dicts(update: Callable[..., tuple[Any, Any]], grads: Tree, opt: Any, main: Tree, *rest: Any) -> Any:
    """Call an update that somebody wrote. It has dicts of its own: what it puts into them, others see by its result
    only. Returns (main, opt), which are what was given if nothing was put there.

    Only values are compared by identity: torch 2.11 does not trace `is` of two dicts."""
    leaves, structure = pytree.tree_flatten(opt, is_leaf=_whole)
    given = dict(main), pytree.tree_unflatten(leaves, structure)
    new, after = update(grads, given[1], given[0], *rest)
    if isinstance(new, dict) and list(new) == list(main) and all(map(is_, new.values(), main.values())):
        new = main
    left, same = pytree.tree_flatten(after, is_leaf=_whole)
    if same == structure and all(map(is_, left, leaves)):
        after = opt
    return new, after


def put(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], owned: Iterable[torch.Tensor]) -> None:
    """Copy the second tensor of each pair into the first, which is one of `owned`, and so may the second be (a history
    that moves along): then it is read before any is written."""
    storages = {tensor.untyped_storage()._cdata for tensor in owned} if pairs else ()
    read = [new.clone() if new.untyped_storage()._cdata in storages else new for _, new in pairs]
    for (old, _), new in zip(pairs, read, strict=True):
        old.copy_(new)


def portions(sizes: Mapping[str, int], fill: int) -> list[list[str]]:
    """Names in a row, divided into runs of `fill` bytes at least, but for the last one.

    >>> portions({"a": 3, "b": 1, "c": 2, "d": 1}, 3)
    [['a'], ['b', 'c'], ['d']]
    """
    found: list[list[str]] = []
    room = 0
    for name, nbytes in sizes.items():
        if room <= 0:
            found.append([])
            room = fill
        found[-1].append(name)
        room -= nbytes
    return found


def runs(optimizer: Any, opt: Any, sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in a row, divided into what one update has: as the optimizer says, else by bytes of main weights."""
    together = optimizer.at_once(opt) if hasattr(optimizer, "at_once") else ()
    own = [[name for name in some if name in sizes] for some in together]
    taken = {name for some in own for name in some}
    left = {name: nbytes for name, nbytes in sizes.items() if name not in taken}
    return [*filter(None, own), *portions(left, getattr(optimizer, "fill", FILL))]


def check_labels(optimizer: Any, spec: Spec) -> None:
    """Refuse settings for a label that the spec gives no leaf, as a misspelt one."""
    known = {"default", *(str(label) for _, label in spec.labels)}
    for where, labels in getattr(optimizer, "named_labels", tuple)():
        for label in labels:
            if label not in known:
                raise SpecError(
                    f"{where}: no leaf has the label {label!r}. The labels are {', '.join(map(repr, sorted(known)))}; "
                    "Spec(labels={pattern: label}) gives them."
                )


def check(old: Any, new: Any, what: str) -> None:
    """Refuse an optimizer's result that does not fit, before anything is written."""
    old_leaves, old_def = pytree.tree_flatten(old)
    new_leaves, new_def = pytree.tree_flatten(new)
    if old_def != new_def:
        raise TreeError(
            f"step: the optimizer's update returned another structure for {what}: {new_def}; expected {old_def}."
        )
    for a, b in zip(old_leaves, new_leaves, strict=True):
        if isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            raise TreeError(f"step: the optimizer's update returned a {type(b).__name__} in {what}; expected a tensor.")
        if isinstance(a, torch.Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
            raise TreeError(
                f"step: the optimizer's update returned {what} of shape {tuple(b.shape)} and dtype {b.dtype}; "
                f"expected {tuple(a.shape)} and {a.dtype}."
            )


Lists = list[list[torch.Tensor]]
Group = tuple[str, torch.dtype]  # a label, and the dtype of main weights: fused kernels take one at a time


def groups_of(given: Leaves, *trees: Tree) -> dict[Group, Lists]:
    """{group: [views of tree 0, views of tree 1, ...]} over all buckets, of leaves that got a gradient; empty views
    left out. The dtype is that of tree 0."""
    groups: dict[Group, Lists] = {}
    for name in trees[0]:
        some = given.get(name)
        for labelled in zip(*[tree[name].by_label(some) for tree in trees], strict=True):
            label, first = labelled[0]
            if first.numel():
                lists = groups.setdefault((label, first.dtype), [[] for _ in trees])
                for views, (_, view) in zip(lists, labelled, strict=True):
                    views.append(view)
    return groups


def count_missed(counts: list[tuple[torch.Tensor, Sequence[bool]]], skip: torch.Tensor | None) -> None:
    """One more step for each leaf that got no gradient in it, unless the step is skipped."""
    edges = [(local, i, j) for local, given in counts for i, j in _runs(given)]
    if edges:
        by: Any = 1 if skip is None else (~skip).to(edges[0][0].dtype)
        _add([local[i:j] for local, i, j in edges], by)


def _one_by_one(tensors: list[torch.Tensor], by: Any) -> None:
    for one in tensors:
        one.add_(by)


@traced_as(_one_by_one)  # of a fake tensor that is added to many at once torch asks for the value
def _add(tensors: list[torch.Tensor], by: Any) -> None:
    foreach_add_(tensors, by)


def _runs(given: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs [i, j) of False."""
    begins = [i for i, on in enumerate(given) if not on and (i == 0 or given[i - 1])]
    ends = [i + 1 for i, on in enumerate(given) if not on and (i + 1 == len(given) or given[i + 1])]
    return [*zip(begins, ends, strict=True)]


R = TypeVar("R")
Number = float | Callable[[torch.Tensor], torch.Tensor]
Setting = Number | Mapping[str, Number]


def by_label(name: str, value: Any, label: str) -> Any:
    """The value for a label, where there are several."""
    if not isinstance(value, Mapping):
        return value
    if label not in value and "default" not in value:
        keys = " or ".join(dict.fromkeys((repr(label), "'default'")))
        raise SpecError(f"{name}={dict(value)}: nothing for the label {label!r}. Add a number under {keys}.")
    return value[label] if label in value else value["default"]


def at(name: str, value: Any, label: str, count: torch.Tensor) -> Any:
    """The number for a label at this step; of a pair both."""
    found = by_label(name, value, label)
    if isinstance(found, tuple):
        return tuple([_now(name, one, count) for one in found])
    return _now(name, found, count)


def _now(name: str, value: Any, count: torch.Tensor) -> Any:
    """What a setting is at this count. A function gives a finite number, or a tensor [], which is not read."""
    if not callable(value):
        return value
    now = value(count)
    if not isinstance(now, torch.Tensor):
        number(f"{name}: what its function gave for the count", now)
    elif now.numel() != 1 or now.is_complex() or (now.device != count.device and not lies_on_host(now)):
        said = f"gave a tensor {list(now.shape)} of {now.dtype} on {now.device}; expected a number, or a real tensor []"
        refuse("SpecError", f"{name}: its function {said} on {count.device}, made of the count that it is given.")
    elif now.dim():
        now = now.reshape(())
    return now


def fixed(rules: R, names: Sequence[str], count: torch.Tensor, labels: Iterable[str]) -> R:
    """The same rules, where settings with these names have what their functions say of this count, by label."""
    found = copy.copy(rules)
    for name in names:
        value = getattr(rules, name)
        each = isinstance(value, Mapping)
        now = {label: at(name, value, label, count) for label in labels} if each else at(name, value, "", count)
        object.__setattr__(found, name, now)  # they are frozen
    return found


def tensors(*found: Any) -> bool:
    """Whether some of these numbers, or of pairs of them, are tensors: what kernels want as numbers, then, they get
    by a wait for the device, or not at all."""
    flat = [one for value in found for one in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(one, torch.Tensor) for one in flat)


def number(where: str, value: Any, below: float = math.inf) -> None:
    """Refuse what is no finite number in [0, below)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        least = "a number in [0, 1)" if below == 1 else "a finite number of at least 0"
        raise SpecError(f"{where} is {value!r}; expected {least}.")


def _changes(value: Any) -> bool:
    """Whether it may be another in each step: a function, or a tensor []."""
    return callable(value) or (isinstance(value, torch.Tensor) and not value.dim())


def numbers(where: str, value: Any) -> None:
    """The same of a setting that may be given by label, and by functions and tensors, which may change."""
    if isinstance(value, Mapping):
        for label, one in value.items():
            numbers(f"{where} for the label {label!r}", one)
    elif not _changes(value):
        number(where, value)


def pair_of(where: str, value: Any) -> Any:
    """Betas as a tuple, or as tuples by label."""
    if isinstance(value, Mapping):
        return {label: pair_of(f"{where} for the label {label!r}", one) for label, one in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise SpecError(f"{where} is {value!r}; expected a pair of numbers, as (0.9, 0.999).")
    for k, beta in enumerate(value):
        if not _changes(beta):
            number(f"{where}[{k}]", beta, 1)
    return tuple(value)


def labels_of(buckets: Iterable[Bucket]) -> list[str]:
    """The labels of leaves there, each once."""
    return [*dict.fromkeys(label for bucket in buckets for label, _, _ in bucket.labels)]


def check_settings(main: Tree, **settings: Any) -> None:
    """Refuse settings that say nothing for a label, on every rank and before any weight has changed."""
    for label in labels_of(buffer.bucket for buffer in main.values()):
        for name, value in settings.items():
            by_label(name, value, label)


def labels_in(name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """(setting, labels) of an optimizer's settings that are given by label."""
    for setting, value in settings.items():
        if isinstance(value, Mapping):
            yield f"{name}({setting})", [*value]
