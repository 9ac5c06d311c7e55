"""Replaced buffers: what a bound call puts in the place of a module's buffers stays, or is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from .._common.torch_names import FakeTensor, func_interpreter, is_wrapped
from .._common.tracing import refuse, tracing
from .skeleton import persistent

__all__ = ["Slot", "keep", "refuse_lost", "stays"]

Slot = tuple[dict[str, Any], str]  # a dict of parameters or buffers, and a name in it


def stays(t: torch.Tensor) -> bool:
    """Whether a tensor has values after the call: not one of a torch.func transform, of a graph, or without values."""
    if torch.compiler.is_dynamo_compiling():
        return not _transformed()
    return not (isinstance(t, FakeTensor) or is_wrapped(t) or t.is_meta)


def _transformed() -> bool:
    """Whether a transform of torch.func runs this. Dynamo runs it for real, while it is within one itself."""
    return func_interpreter() is not None


_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result


def keep(module: nn.Module, own: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> None:
    """Of a module's buffers those stay that a call has put in the place of others."""
    lost = []
    for path, buffer in own.items():
        new = now[path]
        if new is not buffer:
            owner, _, name = path.rpartition(".")
            held = module.get_submodule(owner)._buffers
            if stays(new):
                held[name] = new.detach().clone()
            else:
                lost.append((held, name))
    if lost:
        refuse_lost(module, lost)


def refuse_lost(module: nn.Module, lost: list[Slot]) -> None:
    """Raise for buffers that cannot stay; but for caches, and where only shapes are asked for."""
    if not _transformed() and not tracing():
        return
    for path, held, name in persistent(module):
        if any(held is place and name == key for place, key in lost):
            said = (
                f"bind: the forward put another tensor in the place of the buffer {path!r}, under torch.func or where "
                "a graph is made, and it would be lost. Buffers must not change there. Use T.forward_backward, by "
                "which they ride in the state; or return the new value."
            )
            refuse("SpecError", said)
