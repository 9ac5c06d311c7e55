"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"), in torch.optim.Muon's words.

    momentum    elementwise, on shards
    there       each matrix's update, in `ns_dtype`, to the rank that owns it: one all-to-all an axis
    owners      Newton-Schulz, equal shapes in one batch
    back        to the shards that it came from: one all-to-all an axis
    weights     w * (1 - lr * weight_decay) - lr * ratio * update, on shards

What is stored stays flat; who owns what is a plan, see `_optim_extra.owners`. Replicas of a shard do the same,
each within its own row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange

from .._common.errors import SpecError, expect
from .._common.torch_names import foreach_add_, foreach_copy_, foreach_lerp, foreach_lerp_, foreach_mul_
from .._common.tree import register
from .._optim.optimizer import (
    Sender,
    Setting,
    Tree,
    UpdatesSome,
    at,
    check_settings,
    fixed,
    labels_in,
    labels_of,
    number,
    numbers,
    portions,
)
from .._plan.layout import Bucket, Leaf
from .._runtime.given import Leaves
from .._storage import summary, zeros
from .owners import Given, Moves, Owners, Part, Pattern, Slices, back, cut, find_owners, ordered, there

Tensors = list[torch.Tensor]
Rates = dict[str, tuple[Any, Any]]  # of each label: learning rate and weight decay
ADJUST = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class MuonState:
    """momentum: as main weights. owners: which rank computes with which matrix. groups: names of buckets that are
    updated at once. The last two are no tensors, so they are not saved."""

    momentum: Tree
    owners: tuple[Owners, ...]
    groups: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return "\n".join(("MuonState", summary({"momentum": self.momentum}), *map(repr, self.owners)))


register(
    MuonState,
    lambda state: ((state.momentum,), (state.owners, state.groups)),
    ("momentum",),
    lambda plan, children: MuonState(children[0], *plan),
)


@dataclass(frozen=True)
class Muon(UpdatesSome):
    """See `muon`."""

    lr: Any
    weight_decay: Any
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    ns_dtype: torch.dtype
    matrices: Mapping[str, Pattern]
    by_bucket: ClassVar[bool] = True
    communicates: ClassVar[bool] = True
    fill: ClassVar[int] = 1 << 29  # bytes of main weights that are updated at once: enough for every owner to have some

    def __hash__(self) -> int:
        return hash((type(self), self.momentum, self.ns_steps))

    def named_labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        return labels_in("muon", vars(self))

    def for_step(self, count: torch.Tensor, labels: Sequence[str]) -> Muon:
        """The same for the step of this count, with what it computes of it."""
        return fixed(self, ("lr", "weight_decay"), count, labels)

    # ---- the plan

    def owners(self, buckets: Iterable[Bucket]) -> tuple[Owners, ...]:
        """Which rank computes with which matrix of these buckets, for each set of axes along which some are cut.

        Raises:
            SpecError: a leaf is no matrix.

        Example: `print(*muon().owners(fsdp.make_layout(params, spec).trainable.values()))`.
        """
        some = [*buckets]
        return find_owners(some, self._parts, self._groups(some))

    def _groups(self, buckets: Iterable[Bucket]) -> tuple[tuple[str, ...], ...]:
        """Buckets that are updated at once, by name: the last ones first, as their gradients come."""
        sizes = {bucket.name: bucket.nbytes("main") for bucket in buckets}
        return tuple(map(tuple, portions(dict(reversed(sizes.items())), self.fill)))

    def _parts(self, bucket: Bucket, leaf: Leaf) -> Iterator[Part]:
        """A leaf's matrices, each for itself where they lie one after the other; else the leaf."""
        pattern = self._pattern(leaf.label)
        *batch, m, n = self._shape(leaf, pattern)
        if not leaf.numel:
            return
        if any(one.ranks > 1 for one in leaf.cuts):
            flops = self.ns_steps * (4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3)
            times = math.prod(one.ranks for one in leaf.cuts)
            yield Part((times, *leaf.shape), self._joins(leaf, pattern), 0, (m, n), math.prod(batch) * flops)
            return
        small, large, count = min(m, n), max(m, n), math.prod(batch)
        flops = self.ns_steps * (4 * small * small * large + 2 * small**3)
        if pattern is None or _keeps_order(pattern[0]):
            for k in range(count):
                yield Part((m, n), None, k * m * n, (m, n), flops)
        else:
            yield Part(leaf.shape, pattern, 0, (m, n), count * flops)

    def _joins(self, leaf: Leaf, pattern: Pattern | None) -> Pattern:
        """From the parts [ranks, ...] of a leaf that is cut along an axis of the model's own to its matrices."""
        own = [one for one in leaf.cuts if one.ranks > 1]
        if len(own) > 1 or len({*own[0].sizes}) > 1 or pattern is not None:
            why = "has parts of several sizes" if pattern is None else "has a pattern of matrices"
            why = why if len(own) == 1 else "that is more than one axis"
            raise SpecError(
                f"muon: the leaf {leaf.path!r} is cut along {', '.join(repr(one.axis) for one in own)}, and {why}. "
                "Muon joins matrices that are cut along one axis, in parts of one size: give it to another optimizer "
                "by its label (fsdp.partition), or cut it so."
            )
        (one,) = own
        names = [f"d{i}" for i in range(len(leaf.shape))]
        left, right = list(names), list(names)
        left[one.dim], right[one.dim] = f"(parts d{one.dim})", f"(parts ranks d{one.dim})"
        return f"ranks {' '.join(left)} -> {' '.join(right)}", (("parts", len(one.sizes)), ("ranks", one.ranks))

    def _pattern(self, label: str) -> Pattern | None:
        return self.matrices.get(label, self.matrices.get("default"))

    def _shape(self, leaf: Leaf, pattern: Pattern | None) -> tuple[int, ...]:
        """[..., rows, columns]."""
        shape = leaf.whole
        if pattern is not None:
            try:
                shape = rearrange(torch.empty(shape, device="meta"), pattern[0], **dict(pattern[1])).shape
            except Exception as error:
                raise SpecError(
                    f"muon(matrices=...): {pattern[0]!r} does not fit the leaf {leaf.path!r} of shape "
                    f"{list(shape)}: {str(error).strip().splitlines()[-1]}"
                ) from error
        if len(shape) < 2 or (pattern is None and len(shape) > 2):
            raise SpecError(
                f"muon: the leaf {leaf.path!r} has shape {list(shape)}; expected a matrix [rows, columns]. Give "
                "it to another optimizer by its label (fsdp.partition), or say how it is made of matrices: "
                f"muon(matrices={{{leaf.label!r}: 'e i o -> e i o'}}), where the last two are rows and columns."
            )
        return tuple(shape)

    # ---- a step

    def init(self, main: Tree) -> MuonState:
        check_settings(main, lr=self.lr, weight_decay=self.weight_decay)
        return self.placed(MuonState(zeros(main)[0], (), ()))

    def placed(self, opt: MuonState) -> MuonState:
        buckets = [buffer.bucket for buffer in opt.momentum.values()]
        return MuonState(opt.momentum, self.owners(buckets), self._groups(buckets))

    def at_once(self, opt: MuonState) -> tuple[tuple[str, ...], ...]:
        """Matrices of equal shapes are one batch, and have the same bits wherever they lie if that is the same one."""
        return opt.groups

    def update_some(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: MuonState, main: Tree, count: torch.Tensor,
        sender: Sender,
    ) -> tuple[Tree, MuonState]:  # fmt: skip
        lacking: Given = tuple([(name, tuple(some)) for name, some in given.items()])
        rates = {  # before anything is written: a function may raise
            label: (at("lr", self.lr, label, count), at("weight_decay", self.weight_decay, label, count))
            for label in labels_of(buffer.bucket for buffer in main.values())
        }
        for group in opt.groups:
            names = tuple([name for name in group if name in main])
            for owners in opt.owners if names else ():
                moves = owners.moves(names, lacking, sender.coordinate)
                if moves.some:
                    weights, slopes, kept = (cut(moves, tree) for tree in (main, grads, opt.momentum))
                    self._update(moves, skip, weights, slopes, kept, main[names[0]].local, rates, sender)
        return main, opt

    def _update(
        self, moves: Moves, skip: torch.Tensor | None, weights: Tensors, grads: Tensors, kept: Tensors,
        like: torch.Tensor, rates: Rates, sender: Sender,
    ) -> None:  # fmt: skip
        change = self._moved(skip, grads, kept) if grads else like.new_empty(0, dtype=self.ns_dtype)
        change = there(moves, change, sender, "matrices")
        done = [self._orthogonal(change, *stack) for stack in moves.stacks]
        change = back(moves, done, change, sender, "matrices")
        if weights:
            self._apply(moves, skip, weights, change, rates)

    def _moved(self, skip: torch.Tensor | None, grads: Tensors, kept: Tensors) -> torch.Tensor:
        """Move the momentum on. Returns what is orthogonalized next, one run after the other, in `ns_dtype`."""
        by = 1 - self.momentum
        if skip is None:
            foreach_lerp_(kept, grads, by)
            new = kept
        else:
            new = list(foreach_lerp(kept, grads, by))
            foreach_copy_(kept, [torch.where(skip, old, one) for old, one in zip(kept, new, strict=True)])
        change = foreach_lerp(grads, new, self.momentum) if self.nesterov else new
        return torch.cat(list(change)).to(self.ns_dtype)

    def _orthogonal(
        self, change: torch.Tensor, shape: tuple[int, ...], pattern: Pattern | None, slices: Slices
    ) -> torch.Tensor:
        """Matrices of one shape, flat as they came."""
        stack = ordered(change, slices).view(-1, *shape)
        if pattern is None:
            return orthogonalized(stack, self.ns_coefficients, self.ns_steps, self.eps).reshape(-1)
        left, right = pattern[0].split("->")
        matrices = rearrange(stack, f"stacked {left} -> stacked {right}", **dict(pattern[1]))
        done = orthogonalized(matrices.reshape(-1, *matrices.shape[-2:]), self.ns_coefficients, self.ns_steps, self.eps)
        turned = f"stacked {right} -> stacked {left}"
        return rearrange(done.view(matrices.shape), turned, **dict(pattern[1])).reshape(-1)

    def _apply(
        self, moves: Moves, skip: torch.Tensor | None, weights: Tensors, change: torch.Tensor, rates: Rates
    ) -> None:
        """Weight decay and the change [of all runs], on shards."""
        dtypes = {one.dtype for one in weights}
        if len(dtypes) == 1:
            change = change.to(weights[0].dtype)
        changes: Sequence[torch.Tensor] = change.split([one.numel() for one in weights])
        if len(dtypes) > 1:
            changes = [one.to(weight.dtype) for one, weight in zip(changes, weights, strict=True)]
        groups: dict[tuple[str, float], list[int]] = {}
        for i, (_, _, _, label, matrix) in enumerate(moves.runs):
            groups.setdefault((label, self._ratio(*matrix)), []).append(i)
        for (label, ratio), which in groups.items():
            lr, decay = rates[label]
            old, by = [weights[i] for i in which], [changes[i] for i in which]
            keep, step = 1 - lr * decay, -lr * ratio
            if skip is not None:
                for w, u in zip(old, by, strict=True):
                    w.copy_(torch.where(skip, w, w * keep + u * step))
            else:
                foreach_mul_(old, keep)
                foreach_mul_(by, step)
                foreach_add_(old, by)

    def _ratio(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def _keeps_order(pattern: str) -> bool:
    """Whether the matrices of a pattern lie one after the other."""
    left, right = (side.replace("(", " ").replace(")", " ").split() for side in pattern.split("->"))
    return left == right


def orthogonalized(
    stack: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Matrices [k, rows, columns], each as near to an orthogonal one as a few steps of Newton-Schulz's iteration bring
    it, in the dtype of what is given."""
    a, b, c = coefficients
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon(
    lr: Setting = 1e-3,
    weight_decay: Setting = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    ns_dtype: torch.dtype = torch.bfloat16,
    matrices: str | tuple[str, Mapping[str, int]] | Mapping[str, Any] | None = None,
) -> Muon:
    """Muon: the momentum of each matrix, orthogonalized, as torch.optim.Muon computes it.

    Every trainable leaf must be a matrix: give embeddings, biases and norms to another optimizer by `partition`.
    Weights and momentum stay sharded; each matrix travels to the one rank that computes with it, and its update back.

    Args:
        lr, weight_decay: numbers, functions of the count, or either by label, as for `adamw`.
        momentum, nesterov, ns_coefficients, eps, ns_steps: as torch.optim.Muon's.
        adjust_lr_fn: "original" (None is the same), by which lr is multiplied by sqrt(max(1, rows / columns)); or
            "match_rms_adamw", 0.2 * sqrt(max(rows, columns)).
        ns_dtype: of what travels, and of the iteration. torch's is bfloat16.
        matrices: how a leaf is made of matrices, where it is none: an einops pattern whose last two axes are rows and
            columns, or the pattern and the sizes that it needs, or either by label. Fused projections:
            `("(three rows) columns -> three rows columns", {"three": 3})`; stacked experts: "e rows columns -> e rows
            columns". By default a leaf is one matrix.

    Returns:
        an `(init, update)` pair. Its `owners(buckets)` is the plan, which prints.

    Raises:
        SpecError: a number out of its range. By `shard` and `init`: a leaf that is no matrix, a pattern that does not
            fit, a label without a number.

    Collective: in `step`, two all-to-alls for each axis that shards, for each part of the update.

    Memory: what a rank owns of a part, in `ns_dtype`, about six times, while it computes.

    Example: `fsdp.partition({"matrix": fsdp.muon(lr=0.02), "default": fsdp.adamw(lr=3e-4)})`.
    """
    numbers("muon: lr", lr)
    numbers("muon: weight_decay", weight_decay)
    number("muon: momentum", momentum, 1)
    number("muon: eps", eps)
    ns_coefficients = (*expect("muon(ns_coefficients)", ns_coefficients, Iterable, "three numbers"),)
    if len(ns_coefficients) != 3 or not all(isinstance(one, int | float) for one in ns_coefficients):
        raise SpecError(f"muon: ns_coefficients is {ns_coefficients!r}; expected three numbers.")
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 0 < ns_steps < 100:
        raise SpecError(f"muon: ns_steps is {ns_steps!r}; expected a whole number from 1 to 99.")
    if adjust_lr_fn not in ADJUST:
        raise SpecError(f"muon: adjust_lr_fn is {adjust_lr_fn!r}; expected one of {', '.join(map(repr, ADJUST))}.")
    if not isinstance(ns_dtype, torch.dtype) or not ns_dtype.is_floating_point:
        raise SpecError(f"muon: ns_dtype is {ns_dtype!r}; expected a floating dtype, as torch.bfloat16.")
    a, b, c = map(float, ns_coefficients)
    return Muon(
        lr, weight_decay, momentum, nesterov, (a, b, c), eps, ns_steps, adjust_lr_fn, ns_dtype, _patterns(matrices)
    )


def _patterns(matrices: Any) -> dict[str, Pattern]:
    if matrices is None:
        return {}
    named = matrices if isinstance(matrices, Mapping) else {"default": matrices}
    found = {}
    for label, one in named.items():
        pattern, sizes = one if isinstance(one, tuple | list) and len(one) == 2 else (one, {})
        plain = isinstance(pattern, str) and pattern.count("->") == 1 and "(" not in pattern.split("->")[1]
        if not plain or not isinstance(sizes, Mapping):
            raise SpecError(
                f"muon: matrices is {one!r} for the label {label!r}; expected an einops pattern without parentheses on "
                "its right, as 'e i o -> e i o', or a pattern and its sizes, as ('(k i) o -> k i o', {'k': 3})."
            )
        found[str(label)] = (pattern, tuple((str(axis), int(n)) for axis, n in sizes.items()))
    return found
