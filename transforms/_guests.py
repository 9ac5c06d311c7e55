"""Guests: what stands in a parameter's place in a driven module while its weight is not there.

Shape, dtype and device are the weight's. Used in an operation outside its entry (a tied head that reads
`self.embed.weight`, a class token), it is the weight: gathered, copied for this use, and released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from functional_fsdp._skeleton import METADATA, Placeholder

from ._entries import Leaf
from ._outputs import map_tensors

if TYPE_CHECKING:
    from ._driver import Driver

__all__ = ["Guest"]

VALUES = ("T", "H", "mT", "mH", "data", "real", "imag")  # attributes that are more than metadata


class Guest(Placeholder):
    """A parameter's place: metadata as it is, and a weight of its own for each operation."""

    home: tuple[Driver, Leaf]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = func.__self__.__name__
            if attribute in ("device", "is_cuda", "is_cpu", "is_meta"):
                with torch._C.DisableTorchFunctionSubclass():
                    device = args[0].home[0].device
                return device if attribute == "device" else attribute == f"is_{device.type}"
            known = attribute not in VALUES
        else:
            known = name in METADATA
        if known:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        def value(t: torch.Tensor) -> torch.Tensor:
            if type(t) is not cls:
                return t
            driver, leaf = t.home
            return driver.leaf(leaf)

        return func(*map_tensors(value, args), **map_tensors(value, kwargs or {}))
