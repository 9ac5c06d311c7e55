"""Objects over torch.distributed on an installation without numpy.

torch sends objects (all_gather_object, its checkpoints' plans) as pickled bytes in a tensor, and turns the tensor back
into bytes with numpy, which is no dependency of torch or of this package. Where it is missing, the bytes are read
directly.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
from typing import Any

import torch

from .._common.torch_names import read_objects_by, unpickler

__all__ = ["without_numpy"]


def without_numpy() -> bool:
    """Have torch's object collectives do without numpy, if there is none. Returns whether there is none."""
    try:
        missing = importlib.util.find_spec("numpy") is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        read_objects_by(_to_object)
    return missing


def _to_object(tensor: torch.Tensor, size: int, group: Any) -> Any:
    """What torch's function of this name does: the object that the first `size` bytes of the tensor are."""
    there = tensor.cpu().contiguous()
    return unpickler(io.BytesIO(ctypes.string_at(there.data_ptr(), int(size)))).load()
