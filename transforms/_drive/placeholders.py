"""Placeholders: what stands in a parameter's place in a driven module while its weight is not there.

Shape, dtype and device are the weight's. Used in an operation outside its unit module (a tied head that reads
`self.embed.weight`, a class token), it is the weight: gathered, copied for this use, and released.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_fsdp.extend import Placeholder, torch_private

from .._modules.outputs import map_tensors
from .._modules.unit_modules import Leaf
from .driven import Driven
from .inputs import refuse_dtypes
from .watch import changed, version

__all__ = ["WeightPlaceholder", "values"]

VALUES = ("T", "H", "mT", "mH", "data", "real", "imag")  # attributes that are more than metadata


class WeightPlaceholder(Placeholder):
    """A parameter's place: metadata as it is, and a weight of its own for each operation."""

    home: tuple[Driven, Leaf]
    path: str

    def value(self) -> torch.Tensor:
        """A copy of the weight, differentiable where it trains."""
        driver, leaf = self.home
        copied = driver.leaf(leaf)
        driver.note(self.path, copied)
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
        if name == "__get__":
            if attribute in ("device", "is_cuda", "is_cpu", "is_meta"):
                with torch_private.NoTorchFunction():
                    device = args[0].home[0].device
                return device if attribute == "device" else attribute == f"is_{device.type}"
            known = attribute not in VALUES
        else:
            known = name in cls.answers
        if name == "__set__" and attribute == "data":
            raise changed([args[0].path], "by .data =")
        if known:
            return super().__torch_function__(func, types, args, kwargs)

        copies: list[tuple[torch.Tensor, int, WeightPlaceholder]] = []

        def value(t: torch.Tensor) -> torch.Tensor:
            if type(t) is not cls:
                return t
            driver, leaf = t.home
            copies.append((copied := driver.leaf(leaf), version(copied), t))
            return copied

        given = map_tensors(value, args), map_tensors(value, kwargs or {})
        try:
            out = func(*given[0], **given[1])
        except RuntimeError as error:
            if copies:
                refuse_dtypes(error, given, (copies[0][0].dtype,), f"the weight {copies[0][2].path!r}")
            raise
        for copied, before, placeholder in copies:
            if version(copied) != before:
                raise changed([placeholder.path], f"in place, by {name}")
            placeholder.home[0].note(placeholder.path, out if attribute == "data" else copied)
        return out


def values(tree: Any) -> Any:
    """The same with copies of weights where placeholders stand."""
    return map_tensors(lambda t: t.value() if type(t) is WeightPlaceholder else t, tree)
