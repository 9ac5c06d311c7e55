"""SGD with momentum on torch's fused kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .._common.calls import traced_as
from .._common.device import as_rate, fused_sgd_takes
from .._common.errors import SpecError
from .._common.torch_names import fused_sgd_
from .._runtime.agreement import Leaves
from .._storage import zeros
from .optimizer import Setting, Tree, UpdatesSome, at, check_settings, fixed, groups_of, labels_in, numbers, tensors

SETTINGS = ("lr", "momentum", "weight_decay")


@dataclass(frozen=True)
class Sgd(UpdatesSome):
    """SGD with momentum (torch.optim.SGD's rule) on torch's fused kernel."""

    lr: Any
    momentum: Any
    weight_decay: Any
    nesterov: bool
    by_bucket: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in SETTINGS:
            numbers(f"sgd: {name}", getattr(self, name))

    def for_step(self, count: torch.Tensor, labels: Sequence[str]) -> Sgd:
        """The same for the step of this count, with what it computes of it."""
        return fixed(self, SETTINGS, count, labels)

    def named_labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        return labels_in("sgd", vars(self))

    def init(self, main: Tree) -> Tree:
        check_settings(main, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        return zeros(main)[0] if self.momentum not in (0, {}) else {}

    def update_some(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: Tree, main: Tree,
        count: torch.Tensor,
    ) -> tuple[Tree, Any]:  # fmt: skip
        trees = (main, grads, opt) if opt else (main, grads)
        groups = groups_of(given, *trees)  # all settings before anything is written: a function may raise
        now = [[at(name, getattr(self, name), label, count) for name in SETTINGS] for label, _ in groups]
        for (p, g, *momentum), (lr, factor, decay) in zip(groups.values(), now, strict=True):
            moving = momentum[0] if momentum and (tensors(factor) or factor) else []
            self._change(skip, p, g, moving, lr, factor, decay)
        return main, opt

    def _plainly(
        self, skip: torch.Tensor | None, p: Any, g: Any, moving: Any, lr: Any, factor: Any, decay: Any
    ) -> None:
        """In plain operations: compilers cannot trace the fused kernel, and its path for bfloat16 on the CPU is wrong
        (torch 2.13 at least)."""
        for i, (weight, grad) in enumerate(zip(p, g, strict=True)):
            wide = torch.promote_types(weight.dtype, torch.float32)
            d = grad.to(wide) + decay * weight.to(wide)
            if moving:
                old = moving[i].to(wide)
                new = factor * old + d
                d = d + factor * new if self.nesterov else new
                moving[i].copy_(new if skip is None else torch.where(skip, old, new))
            new = weight.to(wide) - lr * d
            weight.copy_(new if skip is None else torch.where(skip, weight.to(wide), new))

    @traced_as(_plainly)
    def _change(self, skip: torch.Tensor | None, p: Any, g: Any, moving: Any, lr: Any, factor: Any, decay: Any) -> None:
        if tensors(factor, decay) or not fused_sgd_takes(p[0]):
            return self._plainly(skip, p, g, moving, lr, factor, decay)
        torch.autograd.graph.increment_version([*p, *moving])
        fused_sgd_(
            p, g, moving,
            weight_decay=decay, momentum=factor, lr=as_rate(lr) if isinstance(lr, torch.Tensor) else lr,
            dampening=0.0, nesterov=self.nesterov, maximize=False, is_first_step=False,
            found_inf=None if skip is None else skip.float(),
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((type(self), self.nesterov))


def sgd(lr: Setting = 1e-3, momentum: Setting = 0.0, weight_decay: Setting = 0.0, nesterov: bool = False) -> Sgd:
    """SGD as torch.optim.SGD.

    Args:
        lr, momentum, weight_decay: numbers of at least 0, functions of the count, or either by label, as for `adamw`.
            Where momentum is 0 for all leaves, nothing is kept.
        nesterov: whether to look ahead; needs momentum.

    Raises:
        SpecError: as `adamw`. `torch.optim.SGD(dampening=)` is not here.

    Example: `fsdp.sgd(lr=0.1, momentum={"norm": 0.0, "default": 0.9})`.
    """
    if nesterov and (isinstance(momentum, int | float) and not momentum):
        raise SpecError("sgd(nesterov=True) needs momentum: give a positive one, or leave nesterov out.")
    return Sgd(lr, momentum, weight_decay, nesterov)
