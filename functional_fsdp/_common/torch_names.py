"""Names of torch that are not public, of those that the core uses. A new torch is looked at here, and in
`_shared/torch_names.py`, which has those that only satellites use.

All are there in torch 2.11 to 2.13, but for these:

    torch 2.11, 2.12                        torch 2.13
    dist.all_gather_into_tensor             dist.all_gather_single
    dist.reduce_scatter_tensor              dist.reduce_scatter_single

What takes long to import is a function here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as without_func_levels
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._utils import _unflatten_dense_tensors as unflatten_dense_tensors

# profiler has `_is_profiler_enabled`: whether one runs, also `emit_nvtx`.
from torch.autograd import profiler

# ---- tensors, many at once: one kernel, or few
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_zero_ = torch._foreach_zero_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

# ---- what is going on around a call
C: Any = torch._C
CInterpreter: Any = C._functorch.CInterpreter
func_interpreter = torch._C._functorch.peek_interpreter_stack  # of the innermost torch.func transform, or None
set_grad_enabled = torch._C._set_grad_enabled
disabled_torch_function: Any = torch._C._disabled_torch_function_impl  # of a class that has none
make_wrapper: Any = torch.Tensor._make_wrapper_subclass  # a tensor without bytes of its own

# ---- CUDA: None in a build without it
current_stream: Any = getattr(C, "_cuda_getCurrentStream", None)
set_stream: Any = getattr(C, "_cuda_setStream", None)

# ---- operators
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

# ---- torch.distributed
c10d: Any = dist.distributed_c10d
default_store: Any = c10d._get_default_store
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_connected(group: Any, device: torch.device) -> bool:
    """Whether NCCL has connected the ranks of a group. A debugging wrapper does not say: True."""
    return bool(getattr(group._get_backend(device), "_is_initialized", lambda: True)())


# ---- the compiler


def dynamo() -> Any:
    """Its front end, with `backends.common`. Takes most of a second to import."""
    import torch._dynamo.backends.common

    return torch._dynamo
