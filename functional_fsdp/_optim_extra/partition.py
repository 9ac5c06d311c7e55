"""Partition: several optimizers, each of which has the leaves of its labels.

main["blocks.0"]  [ w (matrix) ...... | bias (default) . | w2 (matrix) .... ]
matrix sees       [ w ............... |                  | w2 ............. ]   the same tensor, these leaves
default sees      [                   | bias ........... |                  ]
opt               {"matrix": what matrix keeps, "default": what default keeps}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .._common.calls import traced_as
from .._common.errors import SpecError
from .._common.torch_names import pytree
from .._optim.optimizer import (
    FILL,
    Sender,
    Tree,
    UpdatesSome,
    as_optimizer,
    check,
    in_own_dicts,
    labels_of,
    put,
    tensors_of,
)
from .._runtime.agreement import Leaves
from .._storage import FlatBuffer

Opts = dict[str, Any]
Update = Callable[[], tuple[Tree, Any]]


@dataclass(frozen=True)
class Partition(UpdatesSome):
    """Optimizers by label. See `partition`."""

    members: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash((type(self), *self.members))

    @property
    def by_bucket(self) -> bool:
        return all(getattr(member, "by_bucket", False) for member in self.members.values())

    @property
    def elementwise(self) -> bool:
        return all(getattr(member, "elementwise", False) for member in self.members.values())

    @property
    def communicates(self) -> bool:
        return any(getattr(member, "communicates", False) for member in self.members.values())

    @property
    def arranges(self) -> bool:
        return any(getattr(member, "arranges", False) for member in self.members.values())

    @property
    def fill(self) -> int:
        return max(getattr(member, "fill", FILL) for member in self.members.values())

    def named_labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        yield "partition", [*self.members]
        for member in self.members.values():
            yield from getattr(member, "named_labels", tuple)()

    def member_of(self, label: str) -> str:
        """Under which name the optimizer stands that has the leaves of a label."""
        if label not in self.members and "default" not in self.members:
            raise SpecError(
                f"partition: no optimizer for the label {label!r}; there are some for "
                f"{', '.join(map(repr, self.members))}. Add one under {label!r} or 'default'."
            )
        return label if label in self.members else "default"

    def _own(self, name: str, tree: Tree) -> Tree:
        """What a member sees of a tree."""
        found = {}
        for bucket, buffer in tree.items():
            labels = [leaf.label for leaf in buffer.bucket.leaves if self.member_of(leaf.label) == name]
            if (mine := buffer.only(labels)) is not None:
                found[bucket] = mine
        return found

    def _given(self, name: str, given: Leaves, main: Tree) -> Leaves:
        """Which of a member's leaves got a gradient, of the buckets in which one of them got none."""
        found = {}
        for bucket, some in given.items():
            if bucket in main:
                pairs = zip(main[bucket].bucket.leaves, some, strict=True)
                mine = tuple([one for leaf, one in pairs if self.member_of(leaf.label) == name])
                if not all(mine):
                    found[bucket] = mine
        return found

    def init(self, main: Tree) -> Opts:
        return {name: member.init(self._own(name, main)) for name, member in self.members.items()}

    def for_step(self, count: torch.Tensor, labels: Sequence[str]) -> Partition | None:
        """The same for the step of this count, with what members compute of it. None: one of them has none."""
        found = {}
        for name, member in self.members.items():
            mine = [label for label in labels if self.member_of(label) == name]
            found[name] = member.for_step(count, mine) if hasattr(member, "for_step") else None
        return None if any(member is None for member in found.values()) else Partition(found)

    def placed(self, opt: Opts) -> Opts:
        return {name: m.placed(opt[name]) if hasattr(m, "placed") else opt[name] for name, m in self.members.items()}

    def at_once(self, opt: Opts) -> list[list[str]]:
        """Of members that say it; what two of them have in common joins theirs."""
        found: list[list[str]] = []
        for name, member in self.members.items():
            for some in member.at_once(opt[name]) if hasattr(member, "at_once") else ():
                met = [one for one in found if not {*some}.isdisjoint(one)]
                joined = dict.fromkeys([*(bucket for one in met for bucket in one), *some])
                found = [*(one for one in found if one not in met), [*joined]]
        return found

    def counted(self, opt: Opts) -> tuple[str, ...]:
        found = [m.counted(opt[name]) for name, m in self.members.items() if hasattr(m, "counted")]
        return tuple(dict.fromkeys([bucket for some in found for bucket in some]))

    def counting(self, opt: Opts, main: Tree, names: Iterable[str]) -> Opts:
        chosen = [*names]
        return {
            name: member.counting(opt[name], self._own(name, main), chosen)
            if hasattr(member, "counting")
            else opt[name]
            for name, member in self.members.items()
        }

    def update_some(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: Opts, main: Tree, count: torch.Tensor,
        *sender: Sender,
    ) -> tuple[Tree, Opts]:  # fmt: skip
        """Weights in place, whatever a member does; what members keep as they return it."""
        return self.ready(given, skip, grads, opt, main, count, *sender)()

    def ready(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: Opts, main: Tree, count: torch.Tensor,
        *sender: Sender,
    ) -> Update:  # fmt: skip
        updates: dict[str, Callable[[], Any]] = {}
        for name, member in self.members.items():
            if mine := self._own(name, main):
                to = sender if getattr(member, "communicates", False) else ()
                some = self._given(name, given, main), skip, self._own(name, grads), opt[name], mine, count, *to
                updates[name] = partial(_update, member, _ready(member, *some), *some)
        # first those that take their settings as they write
        order = sorted(updates, key=lambda name: hasattr(self.members[name], "update_some"))

        def update() -> tuple[Tree, Opts]:
            new = dict(opt)
            for name in order:
                new[name] = updates[name]()
            return main, opt if all(new[name] is opt[name] for name in new) else new

        return update


def _as_it_is(member: Any, *some: Any) -> Update | None:
    return partial(member.update_some, *some) if hasattr(member, "update_some") else None


@traced_as(_as_it_is)
def _ready(member: Any, *some: Any) -> Update | None:
    """A member's update, with its settings of this step: before anybody writes, since a function may raise."""
    if hasattr(member, "ready"):
        ready: Update = member.ready(*some)
        return ready
    main, count = some[4:6]
    if hasattr(member, "for_step"):
        member = member.for_step(count, labels_of(buffer.bucket for buffer in main.values())) or member
    return _as_it_is(member, *some)


def _update(
    member: Any, run: Update | None, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: Any, main: Tree,
    *rest: Any,
) -> Any:  # fmt: skip
    """One member's update, of its leaves that got a gradient. Returns what it keeps."""
    if run is not None:
        new, after = run()
    else:  # it may write to all of a tensor: where it shall not, it gets another
        apart = {n: b.bucket.among or n in given or skip is not None for n, b in main.items()}
        trial = {n: b.but(b.local.clone()) if apart[n] else b for n, b in main.items()}
        before = _copied(opt, main) if given or skip is not None else opt
        new, after = in_own_dicts(member.update, grads, opt, trial, *rest)
        check(opt, after, "opt")
        check(main, new, "main")
        if before is not opt:
            mine, kept = tensors_of(opt), tensors_of(_kept(given, skip, before, after, main))
            put([(old, one) for old, one in zip(mine, kept, strict=True) if old is not one], mine)
            after = opt
    check(main, new, "main")
    for name, buffer in main.items():
        if new[name].local is not buffer.local:
            parts = zip(*(one.by_leaf(given.get(name)) for one in (buffer, new[name])), strict=True)
            for (_, mine), (_, value) in parts:
                mine.copy_(value if skip is None else torch.where(skip, mine, value))
    return after


def _copied(opt: Any, main: Tree) -> Any:
    """Copies of what an optimizer keeps, of these buckets: others a lane may be updating."""

    def node(x: Any) -> Any:
        if isinstance(x, FlatBuffer):
            return x.but(x.local.clone()) if x.bucket.name in main else x
        return x.clone() if isinstance(x, torch.Tensor) else x

    return pytree.tree_map(node, opt, is_leaf=lambda x: isinstance(x, FlatBuffer))


def _kept(given: Leaves, skip: torch.Tensor | None, before: Any, after: Any, main: Tree) -> Any:
    """What an optimizer keeps now; and what it kept before, of leaves without a gradient, and where all is skipped."""

    def node(old: Any, new: Any) -> Any:
        if isinstance(new, FlatBuffer) and new.bucket.name not in main:
            return new
        if isinstance(new, FlatBuffer):
            local = node(old.local, new.local)
            some = given.get(new.bucket.name)
            if some is not None and len(some) == len(new.bucket.leaves) and not new.bucket.by_leaf:
                local = local.clone()
                lacks = [not one for one in some]
                for (_, view), (_, was) in zip(new.but(local).by_leaf(lacks), old.by_leaf(lacks), strict=True):
                    view.copy_(was)
            return new.but(local)
        return torch.where(skip, old, new) if isinstance(new, torch.Tensor) and skip is not None else new

    return pytree.tree_map(node, before, after, is_leaf=lambda x: isinstance(x, FlatBuffer))


def partition(members: Mapping[str, Any]) -> Partition:
    """One optimizer for each label of leaves: `fsdp.partition({"norm": fsdp.sgd(0.1), "default": fsdp.adamw()})`.

    Each has the leaves of its label (`Spec(labels={pattern: label})`), "default" those of all others. What they keep is
    `State.opt[label]`, and is saved, redistributed and given by `optimizer_state` leaf by leaf.

    Args:
        members: `{label: optimizer}`: `adamw`, `sgd`, `from_torch`, `from_updates`, or any `(init, update)` pair.

    Returns:
        an `(init, update)` pair. It may be called bucket by bucket, and beside the backward, if all of them may. See
        `Optimizer` for what a member sees.

    Memory: where a bucket has no leaf of a label, that label's optimizer keeps nothing. Where it has leaves of several,
    each keeps tensors of the whole bucket's size: give units, dtypes or placements that part them, if that is much.

    Raises:
        SpecError: what is no optimizer. By `shard` and `init`: a label that no leaf can have, or one that has no
            optimizer.

    Collective: none of its own.

    >>> sorted(fsdp.partition({"norm": fsdp.sgd(lr=0.1), "default": fsdp.adamw(lr=1e-3)}).members)
    ['default', 'norm']
    """
    if not isinstance(members, Mapping) or not members or not all(isinstance(label, str) for label in members):
        raise SpecError(f"partition: expected {{label: optimizer}}, got {members!r}. Labels are texts, as in the Spec.")
    found = {}
    for label, member in members.items():
        if member is None:
            raise SpecError(
                f"partition: the optimizer for the label {label!r} is None. To leave leaves as they are freeze them: "
                "Spec(trainable={pattern: False})."
            )
        found[label] = as_optimizer(member)
    return Partition(found)
