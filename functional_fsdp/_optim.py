"""Optimizers as `(init, update)` pairs over buckets, and adamw and sgd on torch's fused kernels.

    init(main) -> opt                               trees over trainable buckets: {name: FlatBuffer}
    update(grads, opt, main, count) -> main, opt    new trees, or the same ones changed in place

`main` and `grads` have the same structure, dtype and placement, so `tree_map` works on them elementwise; a rank sees
its own shards only. `count` is an int64 tensor [], the number of steps taken before this one. `FlatBuffer.by_label`
gives views by label, for settings that differ. Results are copied into the state's buffers where they are not already
there, so a pure update is as good as an in-place one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
import torch.utils._pytree as pytree

from ._errors import SpecError
from ._flat import FlatBuffer, summary, zeros
from ._spec import Spec
from ._tracing import tracing

__all__ = [
    "AdamState",
    "AdamW",
    "Optimizer",
    "Sgd",
    "Updates",
    "adamw",
    "as_optimizer",
    "check_labels",
    "from_updates",
    "sgd",
]

Tree = dict[str, FlatBuffer]
Rate = float | Callable[[torch.Tensor], torch.Tensor]
PerLabel = float | Mapping[str, float]
Betas = tuple[float, float]


class Optimizer(NamedTuple):
    """A pair of pure functions; any object with these two attributes will do.

    `by_bucket = True` says that an update of some buckets of `main` touches those only, in place: then on GPUs `step`
    calls it several times, on some buckets each, as their gradients come; with `Schedule(overlap_update=True)` on
    another stream. An optimizer may have a third function, `update_unless(skip, grads, opt, main,
    count)`, which changes nothing where the bool tensor `skip` [] is true; `step(skip=)` else copies what it may have
    to put back.

    >>> def update(grads, opt, main, count):  # plain gradient descent
    ...     return pytree.tree_map(lambda p, g: p - 0.1 * g, main, grads), opt
    >>> descent = Optimizer(init=lambda main: (), update=update)
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, torch.Tensor], tuple[Any, Any]]


@dataclass(frozen=True)
class Updates:
    """An optax-style pair as an optimizer. A class, so that a State that has one can be pickled."""

    pair: Any

    def init(self, main: Any) -> Any:
        return self.pair.init(main)

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> tuple[Any, Any]:
        updates, opt = self.pair.update(grads, opt, params=main)
        return pytree.tree_map(lambda p, u: p.add_(u), main, updates), opt


def from_updates(pair: Any) -> Updates:
    """Adapt an optax-style pair (TorchOpt's too): its `update(grads, opt, params=)` returns what is to be added.

    Args:
        pair: an object with `init(params) -> opt` and `update(grads, opt, params=) -> updates, opt`.

    What of its state `save` writes: moments that it makes by tree_map over the parameters are FlatBuffers, saved as the
    main weights are. Moments that it keeps as plain tensors (TorchOpt's ready-made optimizers do: lists of tensors) are
    saved only where all ranks hold the same, as with ddp or on one rank; else `save` raises TreeError, since one rank's
    would be given to all.
    """
    return Updates(pair)


def as_optimizer(value: Any) -> Any:
    """Check what the user gave as an optimizer: an `(init, update)` pair, or an object with those attributes."""
    if value is None or (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(map(callable, value)):
        return Optimizer(*value)
    raise SpecError(
        f"optimizer: expected a pair (init, update), as fsdp.adamw(lr=3e-4), not {type(value).__name__}. For an "
        "optax-style pair use fsdp.from_updates(pair)."
    )


def _by_label(name: str, value: Any, label: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if label not in value and "default" not in value:
        keys = " or ".join(dict.fromkeys((repr(label), "'default'")))
        raise SpecError(f"{name}={dict(value)}: nothing for the label {label!r}. Add a number under {keys}.")
    return value[label] if label in value else value["default"]


def _number(where: str, value: Any, below: float = math.inf) -> None:
    """Refuse what is no finite number in [0, below)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        least = "a number in [0, 1)" if below == 1 else "a finite number of at least 0"
        raise SpecError(f"{where} is {value!r}; expected {least}.")


def _numbers(where: str, value: Any, rates: bool = False) -> None:
    """The same of a setting that may be given by label. `rates`: of functions and tensors, too, which may change."""
    if isinstance(value, Mapping):
        for label, one in value.items():
            _numbers(f"{where} for the label {label!r}", one, rates)
    elif not (rates and (callable(value) or (isinstance(value, torch.Tensor) and not value.dim()))):
        _number(where, value)


def _pairs(where: str, value: Any) -> Any:
    """Betas as a tuple, or as tuples by label."""
    if isinstance(value, Mapping):
        return {label: _pairs(f"{where} for the label {label!r}", one) for label, one in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise SpecError(f"{where} is {value!r}; expected a pair of numbers, as (0.9, 0.999).")
    for k, beta in enumerate(value):
        _number(f"{where}[{k}]", beta, 1)
    return tuple(value)


def check_labels(optimizer: Any, spec: Spec) -> None:
    """Refuse settings for a label that the spec gives no leaf, as a misspelt one."""
    if not isinstance(optimizer, AdamW | Sgd):
        return
    known = {"default", *(str(label) for _, label in spec.labels)}
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        for label in value if isinstance(value, Mapping) else ():
            if label not in known:
                name, labels = type(optimizer).__name__.lower(), ", ".join(map(repr, sorted(known)))
                raise SpecError(
                    f"{name}({field.name}): no leaf has the label {label!r}. The labels are {labels}; "
                    "Spec(labels={pattern: label}) gives them."
                )


def _check_labels(main: Tree, **settings: Any) -> None:
    """Refuse settings that say nothing for a label, on every rank and before any weight has changed."""
    for label in dict.fromkeys(label for buffer in main.values() for label, _, _ in buffer.bucket.labels):
        for name, value in settings.items():
            _by_label(name, value, label)


def _groups(*trees: Tree) -> dict[str, list[list[torch.Tensor]]]:
    """{label: [views of tree 0, views of tree 1, ...]} over all buckets; empty views left out."""
    groups: dict[str, list[list[torch.Tensor]]] = {}
    for name in trees[0]:
        for labelled in zip(*(tree[name].by_label() for tree in trees), strict=True):
            if labelled[0][1].numel():
                lists = groups.setdefault(labelled[0][0], [[] for _ in trees])
                for views, (_, view) in zip(lists, labelled, strict=True):
                    views.append(view)
    return groups


def _rate(lr: Rate | Mapping[str, Rate], label: str, count: torch.Tensor) -> Any:
    rate = _by_label("lr", lr, label)
    return rate(count) if callable(rate) else rate


class AdamState(NamedTuple):
    """First and second moments, as main weights: {bucket: FlatBuffer}, [n / ranks of main], `Precision.main`."""

    mean: Tree
    square: Tree

    def __repr__(self) -> str:
        return f"AdamState\n{summary(self._asdict())}"


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) on torch's fused kernel: one launch a label, for all buckets of a call."""

    lr: Any
    betas: Any  # a pair, or pairs by label
    eps: float
    weight_decay: Any
    by_bucket: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _numbers("adamw: lr", self.lr, rates=True)
        _number("adamw: eps", self.eps)
        _numbers("adamw: weight_decay", self.weight_decay)
        object.__setattr__(self, "betas", _pairs("adamw: betas", self.betas))

    def init(self, main: Tree) -> AdamState:
        _check_labels(main, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
        return AdamState(*zeros(main, 2))

    def update(self, grads: Tree, opt: AdamState, main: Tree, count: torch.Tensor) -> tuple[Tree, AdamState]:
        return self.update_unless(None, grads, opt, main, count)

    def update_unless(
        self, skip: torch.Tensor | None, grads: Tree, opt: AdamState, main: Tree, count: torch.Tensor
    ) -> tuple[Tree, AdamState]:
        taken = (count + 1).float()
        for label, (p, g, m, v) in _groups(main, grads, opt.mean, opt.square).items():
            lr, decay = _rate(self.lr, label, count), _by_label("weight_decay", self.weight_decay, label)
            betas = _by_label("betas", self.betas, label)
            if tracing():
                for one in zip(p, g, m, v, strict=True):
                    self._plainly(skip, *one, taken, lr, betas, decay)
                continue
            torch.autograd.graph.increment_version([*p, *m, *v])  # the fused kernel does not
            torch._fused_adamw_(
                p, g, m, v, [], [taken] * len(p),
                lr=lr, beta1=betas[0], beta2=betas[1], eps=self.eps, weight_decay=decay, amsgrad=False,
                maximize=False, found_inf=None if skip is None else skip.float(),
            )  # fmt: skip
        return main, opt

    def _plainly(
        self, skip: Any, p: Any, g: Any, m: Any, v: Any, taken: Any, lr: Any, betas: Betas, decay: float
    ) -> None:
        """In plain operations, which compilers can trace and fuse; in float32 at least, as the kernel."""
        wide = torch.promote_types(p.dtype, torch.float32)
        weight, grad = p.to(wide), g.to(wide)
        mean = m.to(wide) + (1 - betas[0]) * (grad - m.to(wide))
        square = betas[1] * v.to(wide) + (1 - betas[1]) * grad * grad
        taken = taken.to(wide)
        denominator = square.sqrt() / (1 - betas[1] ** taken).sqrt() + self.eps
        new = weight * (1 - lr * decay) - lr / (1 - betas[0] ** taken) * mean / denominator
        for old, value in ((p, new), (m, mean), (v, square)):
            old.copy_(value if skip is None else torch.where(skip, old.to(wide), value))

    def __hash__(self) -> int:
        return hash((type(self), self.eps))


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum (torch.optim.SGD's rule) on torch's fused kernel."""

    lr: Any
    momentum: float
    weight_decay: Any
    nesterov: bool
    by_bucket: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _numbers("sgd: lr", self.lr, rates=True)
        _number("sgd: momentum", self.momentum)
        _numbers("sgd: weight_decay", self.weight_decay)

    def init(self, main: Tree) -> Tree | tuple[()]:
        _check_labels(main, lr=self.lr, weight_decay=self.weight_decay)
        return zeros(main)[0] if self.momentum else ()

    def update(self, grads: Tree, opt: Tree | tuple[()], main: Tree, count: torch.Tensor) -> tuple[Tree, Any]:
        return self.update_unless(None, grads, opt, main, count)

    def update_unless(
        self, skip: torch.Tensor | None, grads: Tree, opt: Tree | tuple[()], main: Tree, count: torch.Tensor
    ) -> tuple[Tree, Any]:
        trees = (main, grads, opt) if opt else (main, grads)
        for label, (p, g, *momentum) in _groups(*trees).items():
            lr, decay = _rate(self.lr, label, count), _by_label("weight_decay", self.weight_decay, label)
            if tracing() or (p[0].device.type == "cpu" and any(t.dtype is torch.bfloat16 for t in p)):
                self._plainly(skip, p, g, momentum[0] if momentum else [], lr, decay)
                continue
            torch.autograd.graph.increment_version([*p, *(momentum[0] if momentum else ())])
            torch._fused_sgd_(
                p, g, momentum[0] if momentum else [],
                weight_decay=decay, momentum=self.momentum, lr=lr, dampening=0.0, nesterov=self.nesterov,
                maximize=False, is_first_step=False, found_inf=None if skip is None else skip.float(),
            )  # fmt: skip
        return main, opt

    def _plainly(self, skip: torch.Tensor | None, p: Any, g: Any, momentum: Any, lr: Any, decay: float) -> None:
        """In plain operations: compilers cannot trace the fused kernel, and its path for bfloat16 on the CPU is wrong
        (torch 2.13 at least)."""
        for i, (weight, grad) in enumerate(zip(p, g, strict=True)):
            wide = torch.promote_types(weight.dtype, torch.float32)
            d = grad.to(wide) + decay * weight.to(wide)
            if momentum:
                moving = self.momentum * momentum[i].to(wide) + d
                d = d + self.momentum * moving if self.nesterov else moving
                momentum[i].copy_(moving if skip is None else torch.where(skip, momentum[i].to(wide), moving))
            new = weight.to(wide) - lr * d
            weight.copy_(new if skip is None else torch.where(skip, weight.to(wide), new))

    def __hash__(self) -> int:
        return hash((type(self), self.momentum, self.nesterov))


def adamw(
    lr: Rate | Mapping[str, Rate] = 1e-3,
    betas: Betas | Mapping[str, Sequence[float]] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: PerLabel = 0.01,
) -> AdamW:
    """AdamW with torch.optim.AdamW's defaults.

    Args:
        lr: a number, or a function of the count tensor (int64 [], steps taken so far) that returns a tensor []; or
            either by label.
        betas: two numbers in [0, 1), or `{label: (number, number)}`.
        weight_decay: a number, or `{label: number}` for the labels of `Spec(labels=...)`; "default" covers the others.

    Raises:
        SpecError: a number that is negative, not finite or out of its range. By `shard` and `init`: a label that no
            leaf can have, or one that has no number.

    >>> adamw(lr=lambda count: 3e-4 * (count / 100).clamp(max=1), weight_decay={"norm": 0.0, "default": 0.1}).eps
    1e-08
    """
    return AdamW(lr, betas, eps, weight_decay)


def sgd(
    lr: Rate | Mapping[str, Rate] = 1e-3, momentum: float = 0.0, weight_decay: PerLabel = 0.0, nesterov: bool = False
) -> Sgd:
    """SGD as torch.optim.SGD; arguments as for `adamw`."""
    if nesterov and not momentum:
        raise SpecError("sgd(nesterov=True) needs momentum: give a positive one, or leave nesterov out.")
    return Sgd(lr, momentum, weight_decay, nesterov)
