"""AdamW on torch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, overload

import torch

from .._common.calls import provided, traced_as
from .._common.device import as_rate
from .._common.torch_names import fused_adamw_
from .._runtime.agreement import Leaves
from .._spec.precision import Codec
from .._storage import no_counts, summary, zeros
from .optimizer import (
    Lists,
    Number,
    Setting,
    Tree,
    UpdatesSome,
    at,
    check_settings,
    count_missed,
    fixed,
    groups_of,
    labels_in,
    numbers,
    pair_of,
    tensors,
)

_packed = provided("optim_extra.packed")
Betas = Sequence[Number]
SETTINGS = ("lr", "betas", "eps", "weight_decay")


class AdamState(NamedTuple):
    """First and second moments, as main weights: {bucket: FlatBuffer}, [n / ranks of main], `Precision.main`.

    missed: in how many steps each leaf got no gradient, {bucket: FlatBuffer int64 [leaves]}, the same on every rank
    that shares the leaves; only of buckets in which a leaf ever got none. A leaf's bias is corrected by the steps in
    which it got one, as in torch.optim.AdamW.
    """

    mean: Tree
    square: Tree
    missed: Tree = {}  # noqa: RUF012

    def __repr__(self) -> str:
        return f"AdamState\n{summary(self._asdict())}"


@dataclass(frozen=True)
class AdamW(UpdatesSome):
    """AdamW (Loshchilov and Hutter 2019) on torch's fused kernel: one launch for all buckets of a label and a dtype."""

    lr: Any
    betas: Any  # a pair, or pairs by label
    eps: Any
    weight_decay: Any
    taken: torch.Tensor | None = field(default=None, compare=False, repr=False)  # float32 []: steps, with this one
    by_bucket: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            numbers(f"adamw: {name}", getattr(self, name))
        object.__setattr__(self, "betas", pair_of("adamw: betas", self.betas))

    def for_step(self, count: torch.Tensor, labels: Sequence[str]) -> AdamW:
        """The same for the step of this count, with what it computes of it."""
        found = fixed(self, SETTINGS, count, labels)
        object.__setattr__(found, "taken", (count + 1).float())
        return found

    def named_labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        return labels_in("adamw", vars(self))

    def check(self, main: Tree) -> None:
        """Raise SpecError for settings that a leaf lacks."""
        check_settings(main, **{name: getattr(self, name) for name in SETTINGS})

    def init(self, main: Tree) -> AdamState:
        self.check(main)
        mean, square = zeros(main, 2)
        return AdamState(mean, square, {})

    def counted(self, opt: AdamState) -> tuple[str, ...]:
        return tuple(opt.missed)

    def counting(self, opt: AdamState, main: Tree, names: Iterable[str]) -> AdamState:
        # torch 2.11 compiles `_replace` to a tuple of nothing
        return AdamState(opt.mean, opt.square, self.counts(opt.missed, main, names))

    def counts(self, have: Tree, main: Tree, names: Iterable[str]) -> Tree:
        """`missed` for these buckets: what there was, and zeros."""
        chosen = set(names)
        return {n: have[n] if n in have else no_counts(b) for n, b in main.items() if n in chosen}

    def groups(
        self, given: Leaves, trees: tuple[Tree, ...], missed: Tree, count: torch.Tensor
    ) -> list[tuple[Lists, tuple[Any, ...]]]:
        """What is updated with one setting: views of each tree, the first one of main weights, and the steps that were
        taken with this one; and lr, betas, eps and weight decay."""
        taken, main = (count + 1).float() if self.taken is None else self.taken, trees[0]
        whole = {name: b for name, b in main.items() if name not in missed} if missed else main
        groups = groups_of(given, whole, *trees[1:])
        steps = {group: [taken] * len(lists[0]) for group, lists in groups.items()}
        for name in missed:
            if name in main:  # each leaf for itself
                leaves, some = main[name].bucket.leaves, given.get(name)
                counts = (count + 1 - missed[name].local).float().unbind()
                for parts in zip(*(tree[name].by_leaf(some) for tree in trees), strict=True):
                    i, first = parts[0]
                    group = (leaves[i].label, first.dtype)
                    lists = groups.setdefault(group, [[] for _ in trees])
                    for views, (_, view) in zip(lists, parts, strict=True):
                        views.append(view)
                    steps.setdefault(group, []).append(counts[i])
        found = []
        for (label, dtype), lists in groups.items():
            lr, betas, eps, decay = (at(name, getattr(self, name), label, count) for name in SETTINGS)
            least = torch.finfo(dtype).tiny  # between leaves lie zeros, and 0 / 0 would be NaN
            eps = torch.where(eps == 0, least, eps) if isinstance(eps, torch.Tensor) else eps or least
            found.append(([*lists, steps[label, dtype]], (lr, betas, eps, decay)))
        return found

    def update_some(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: AdamState, main: Tree, count: torch.Tensor
    ) -> tuple[Tree, AdamState]:
        for lists, settings in self.groups(given, (main, grads, opt.mean, opt.square), opt.missed, count):
            self.change(skip, lists, *settings)
        count_missed([(opt.missed[name].local, some) for name, some in given.items() if name in main], skip)
        return main, opt

    def plainly(self, skip: Any, lists: Lists, lr: Any, betas: Any, eps: Any, decay: Any) -> None:
        """In plain operations, which compilers can trace and fuse; in float32 at least, as the kernel."""
        for p, g, m, v, taken in zip(*lists, strict=True):
            wide = torch.promote_types(p.dtype, torch.float32)
            weight, grad, taken = p.to(wide), g.to(wide), taken.to(wide)
            mean = m.to(wide) + (1 - betas[0]) * (grad - m.to(wide))
            square = betas[1] * v.to(wide) + (1 - betas[1]) * grad * grad
            denominator = square.sqrt() / (1 - betas[1] ** taken).sqrt() + eps
            new = weight * (1 - lr * decay) - lr / (1 - betas[0] ** taken) * mean / denominator
            for old, value in ((p, new), (m, mean), (v, square)):
                old.copy_(value if skip is None else torch.where(skip, old.to(wide), value))

    @traced_as(plainly)
    def change(self, skip: Any, lists: Lists, lr: Any, betas: Any, eps: Any, decay: Any) -> None:
        """Update some tensors with one setting, in place: weights, gradients, both moments, and the steps taken."""
        if tensors(betas, eps, decay):  # which the kernel takes as numbers only
            return self.plainly(skip, lists, lr, betas, eps, decay)
        p, g, m, v, taken = lists
        torch.autograd.graph.increment_version([*p, *m, *v])  # the fused kernel does not
        fused_adamw_(
            p, g, m, v, [], taken,
            lr=as_rate(lr) if isinstance(lr, torch.Tensor) else lr, beta1=betas[0], beta2=betas[1], eps=eps,
            weight_decay=decay, amsgrad=False, maximize=False, found_inf=None if skip is None else skip.float(),
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(type(self))


@overload
def adamw(
    lr: Setting = ...,
    betas: Betas | Mapping[str, Betas] = ...,
    eps: Setting = ...,
    weight_decay: Setting = ...,
    moments: None = None,
) -> AdamW: ...
@overload
def adamw(
    lr: Setting = ...,
    betas: Betas | Mapping[str, Betas] = ...,
    eps: Setting = ...,
    weight_decay: Setting = ...,
    *,
    moments: Codec | Callable[..., Codec],
) -> UpdatesSome: ...
def adamw(
    lr: Setting = 1e-3,
    betas: Betas | Mapping[str, Betas] = (0.9, 0.999),
    eps: Setting = 1e-8,
    weight_decay: Setting = 0.01,
    moments: Codec | Callable[..., Codec] | None = None,
) -> Any:
    """AdamW with torch.optim.AdamW's defaults.

    Each setting is one for all leaves, or `{label: setting}` for the labels of `Spec(labels=...)`; "default" covers the
    others. Each is a number, or a function of the count tensor (int64 [], steps taken so far) that returns a tensor [].

    Args:
        lr: at least 0. A function of it costs nothing: the kernel takes a tensor.
        betas: two in [0, 1), each of them a number or a function.
        eps, weight_decay: at least 0. An eps of 0 counts as the smallest normal number of the weights' dtype, so that
            weights whose gradients were all zero only decay, where torch has 0 / 0, NaN. Where these or betas are
            functions, the update is one of several plain kernels a bucket, not the fused one.
        moments: a codec in which both moments are kept between steps, as `fsdp.dynamic8`: 1.03 bytes an element each in
            the place of 4. Its blocks divide 128. The state is a `PackedAdamState`: its planes lie as main weights do.

    Raises:
        SpecError: a number that is negative, not finite or out of its range; moments that are no codec, or whose
            blocks do not divide 128. By `shard` and `init`: a label that no
            leaf can have, or one that has no number. By `step`: a function that gives something else.

    >>> adamw(lr=lambda count: 3e-4 * (count / 100).clamp(max=1), weight_decay={"norm": 0.0, "default": 0.1}).eps
    1e-08
    """
    rule = AdamW(lr, betas, eps, weight_decay)
    return rule if moments is None else _packed(rule, moments)
