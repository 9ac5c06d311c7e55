"""Names of torch that are not public, of those that the core uses. A new torch is looked at here, and in
`_shared/torch_names.py`, which has those that only satellites use.

All are there in torch 2.11 to 2.13, but for these:

    torch 2.11, 2.12                        torch 2.13
    dist.all_gather_into_tensor             dist.all_gather_single
    dist.reduce_scatter_tensor              dist.reduce_scatter_single

What takes long to import is a function here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as without_func_levels
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._utils import _unflatten_dense_tensors as unflatten_dense_tensors

# forward_ad has `_current_level`: of dual numbers, -1 outside. profiler has `_is_profiler_enabled`: whether one runs,
# also `emit_nvtx`.
from torch.autograd import forward_ad, profiler
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# ---- tensors, many at once: one kernel, or few
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_zero_ = torch._foreach_zero_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

# ---- what is going on around a call
C: Any = torch._C
CInterpreter: Any = C._functorch.CInterpreter
is_wrapped = C._functorch.is_functorch_wrapped_tensor  # whether a tensor is of a torch.func transform
func_interpreter = torch._C._functorch.peek_interpreter_stack  # of the innermost torch.func transform, or None
autograd_node = torch._C._current_autograd_node  # whose backward runs, or None
set_grad_enabled = torch._C._set_grad_enabled
NoTorchFunction = torch._C.DisableTorchFunctionSubclass  # a context
disabled_torch_function: Any = torch._C._disabled_torch_function_impl  # of a class that has none
make_wrapper: Any = torch.Tensor._make_wrapper_subclass  # a tensor without bytes of its own


def fake_tensors() -> FakeTensorMode:
    """A mode of fake tensors that is not copied with a tensor: it has weak references to storages, and a copy of one
    would free a storage twice. Of torch's own class, by which higher-order operators (flex_attention) know it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    itself = ref(mode)
    vars(mode)["__deepcopy__"] = lambda memo: itself()
    return mode


class TorchDispatchMode(_python_dispatch.TorchDispatchMode):
    """torch's. Its first operation does not import Dynamo, which takes a second: frames are kept from Dynamo once
    something else has imported it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raw = cls.__dict__.get("__torch_dispatch__")

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return raw(*args, **kwargs)  # type: ignore[misc]
            disabled = disable(raw, True, wrapping=False)
            setattr(raw, "__dynamo_disable", disabled)
            return disabled(*args, **kwargs)

        if inspect.isfunction(raw):
            setattr(raw, "__dynamo_disable", dispatch)  # where torch keeps what it calls
        super().__init_subclass__(**kwargs)


AS_IT_IS = nullcontext()


def parametrized_anew() -> AbstractContextManager[None]:
    """Within, `torch.nn.utils.parametrize.cached()`, if it is open, has nothing of before, and after it what it had. It
    keeps values by module, and here a module has other weights from one call to the next."""
    return _put_aside() if parametrize._cache_enabled else AS_IT_IS


@contextmanager
def _put_aside() -> Iterator[None]:
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


# ---- CUDA: None in a build without it
current_stream: Any = getattr(C, "_cuda_getCurrentStream", None)
set_stream: Any = getattr(C, "_cuda_setStream", None)

# ---- operators
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
to_scalar: Any = torch.ops.aten._local_scalar_dense.default  # Tensor.item

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
