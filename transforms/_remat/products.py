"""Products: matrix products and attention kernels of a region that do not run again, while what is between them does.

forward         [x] norm ─▶ product ─▶ gelu ─▶ product     autograd's hooks are the checkpoint's; of each product the
                                │                │         output is kept
its end                       kept            let go       nothing that comes after it is needed
recomputation   [x] norm ─▶ its output ─▶ gelu             below autograd, so what a product's backward needs of its
                                                           inputs is what was computed again

A product whose output is changed in place runs again, and so does one that draws random numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from functional_fsdp import ScheduleError
from functional_fsdp._seams import torch_private

from .._drive.buffers import version
from .._modules.unit_modules import each_leaf
from .moves import storage_of
from .parts import RUNNING, Running

if TYPE_CHECKING:
    from .records import RegionRecord

__all__ = ["KeepProducts", "Product", "ReuseProducts", "in_products"]

pytree = torch_private.pytree


class Product:
    """One product of a forward: which operation, its outputs, and how many tensors had been saved before it."""

    def __init__(self, func: Any, out: Any, packed: int) -> None:
        self.func, self.packed = func, packed
        self.out: Any = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.storages = {*map(storage_of, outputs)}
        self.seen: list[tuple[torch.Tensor, int]] = []  # what a module returned of it, with versions
        self.outputs = [(weakref.ref(t), version(t)) for t in outputs]  # as they leave a module in other ways

    def let_go(self) -> None:
        """It will not be needed, or is not what it was."""
        self.out, self.storages, self.seen, self.outputs = None, set(), [], []

    def again(self) -> Any:
        """The outputs once more; None if they are not there as they were."""
        there = [*self.seen, *((t, before) for ref, before in self.outputs if (t := ref()) is not None)]
        if any(version(t) != before for t, before in there):
            self.let_go()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self.out)


class KeepProducts(torch_private.TorchDispatchMode):
    """Within, products of a region's forward are kept.

    Args:
        call: the forward, which has counted what was saved in it so far: `packed()`.
    """

    def __init__(self, call: Running, region: RegionRecord, packed: Callable[[], int]) -> None:
        super().__init__()
        self.call, self.region, self.packed = call, region, packed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if RUNNING.calls[-1] is self.call:
            if func._schema.is_mutable:
                written = {*_written(func, args, kwargs or {})}
                for one in self.region.products:
                    if one.storages & written:
                        one.let_go()
            elif _is_product(func, args, kwargs or {}):
                self.region.products.append(Product(func, out, self.packed()))
        return out

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:
            out = fn(*args, **kwargs)
        for t in each_leaf(out):
            if isinstance(t, torch.Tensor):
                for one in self.region.products:
                    if storage_of(t) in one.storages:
                        one.seen.append((t.detach(), version(t)))
        return out


class ReuseProducts(torch_private.TorchDispatchMode):
    """Within, products of a region's recomputation are what they were in its forward."""

    def __init__(self, call: Running, region: RegionRecord) -> None:
        super().__init__()
        self.call, self.region, self.at = call, region, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RUNNING.calls[-1] is not self.call or not _is_product(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        products, found = self.region.products, None
        if self.at < len(products):
            product = products[self.at]
            if product.func is not func:
                raise ScheduleError(
                    f"remat: when its module was computed again, product {self.at + 1} was {func}, and in the forward "
                    f"{product.func}. Have the module do the same each time."
                )
            found = product.again()
        self.at += 1
        return func(*args, **(kwargs or {})) if found is None else found

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:
            return fn(*args, **kwargs)


def in_products(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of a module whose products are kept, within what recomputes. Elsewhere it is what it is."""
    call = RUNNING.calls[-1] if RUNNING.calls else None
    if call is None or torch_private.func_interpreter() is not None:
        return fn(*args, **kwargs)
    return call.products.run(fn, args, kwargs)


def _is_product(func: Any, args: Any, kwargs: Any) -> bool:
    product, place = _kind(func)
    if place is None:
        return product
    dropped = kwargs.get("dropout_p", args[place] if place < len(args) else 0.0)
    return product and not dropped


@lru_cache(maxsize=1024)
def _kind(func: Any) -> tuple[bool, int | None]:
    """Whether an operation is a product, and at which place it is given the share that it drops."""
    name = func.__name__
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("dropout_p") if "dropout_p" in names else None
    draws = torch.Tag.nondeterministic_seeded in func.tags and place is None
    if draws or func._schema.is_mutable or "backward" in name:
        return False, None
    return func._overloadpacket in flop_registry or "attention" in name or name.startswith("_grouped_mm"), place


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[int]:
    """The storages that an operation writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)  # by name: out=
            yield from (storage_of(t) for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor))
