"""Names of torch that are not public, of which the core has no use; and, as taken from there, those that it uses
(`_common/torch_names.py`). A new torch is looked at in these two files.

All are there in torch 2.11 to 2.13, but for these:

    torch 2.11, 2.12                        torch 2.13
    (nothing)                               _C._set_override_stale_capture_stream

What takes long to import is a function here.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from types import CodeType
from typing import Any
from weakref import ref

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import eager_transforms as func_transforms  # `JVP_NESTING`: how many jvp are under way
from torch._functorch import predispatch
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters as func_levels
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as without_innermost_level

# forward_ad has `_current_level`: of dual numbers, -1 outside.
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module

# python_dispatch has `_is_in_...`: flags of a process, though modes are a thread's; guards ask for them.
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from .._common.torch_names import *
from .._common.torch_names import C, FakeTensorMode, OpOverload, OpOverloadPacket, c10d, dynamo, pytree

# ---- tensors, many at once: one kernel, or few
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_div_ = torch._foreach_div_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# ---- attention's kernels on GPUs, by name
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention

# ---- what is going on around a call
is_wrapped = C._functorch.is_functorch_wrapped_tensor  # whether a tensor is of a torch.func transform
autograd_node = torch._C._current_autograd_node  # whose backward runs, or None
NoTorchFunction = torch._C.DisableTorchFunctionSubclass  # a context
add_batch_dim = C._functorch._add_batch_dim  # a tensor, as one member of a vmap has it: tensor, dim, level
dual_level_verbs: tuple[tuple[Any, str], ...] = (  # where they are: before torch 2.13 in C++'s module
    ((predispatch, "_enter_dual_level_impl"), (predispatch, "_exit_dual_level_impl"))
    if hasattr(predispatch, "_enter_dual_level_impl")
    else ((torch._C, "_enter_dual_level"), (torch._C, "_exit_dual_level"))
)
FUNCTIONALIZE = C._functorch.TransformType.Functionalize  # the `key()` of a level
GRAD = C._functorch.TransformType.Grad
JVP = C._functorch.TransformType.Jvp
saved_hooks_allowed = C._autograd._saved_tensors_hooks_is_enabled  # not inside of a gradient of torch.func's
unwrap_for_grad = C._functorch._unwrap_for_grad  # a tensor of this level of jvp or grad, as the level below has it
unwrapped = C._functorch.get_unwrapped  # such a tensor, as the level below has it
level_of = C._functorch.maybe_get_level  # of such a tensor; negative where its transform is over
engine_code = run_backward.__code__  # in a traceback: a backward ran
will_execute = torch._C._will_engine_execute_node  # in the backward that runs
lift_on_host = torch._C._set_only_lift_cpu_tensors  # so that modes see the copy to the device that torch.tensor makes
lifts_on_host = torch._C._only_lift_cpu_tensors
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many are active
PROXY = torch._C._TorchDispatchModeKey.PROXY
dispatch_mode_of: Callable[[Any], Any] = torch._C._get_dispatch_mode  # the one of a kind that is active, or None
pre_dispatch_mode_of: Callable[[int], Any] = torch._ops.mode_stack_state_for_pre_dispatch().get  # 0: of PROXY
jit_traces: Callable[[], bool] = torch._C._is_tracing
set_forward_enabled = torch._C._set_fwd_grad_enabled  # for the tangents of dual numbers
uses_of: Callable[[Any], int] = lambda storage: C._storage_Use_Count(storage._cdata)  # noqa: E731
storage_at = torch._C._construct_storage_from_data_pointer  # of bytes that somebody else owns: address, device, bytes
pop_saved_hooks = C._autograd._pop_saved_tensors_default_hooks  # the innermost saved_tensors_hooks
push_saved_hooks = C._autograd._push_saved_tensors_default_hooks
overlapping: Callable[[list[torch.Tensor]], set[int]] = torch._C._dynamo.guards.compute_overlapping_tensors  # places


def base_of(t: torch.Tensor) -> torch.Tensor:
    """The tensor that lies under all levels of torch.func's, whose bytes a tensor of theirs has."""
    while is_wrapped(t):
        t = unwrapped(t)
    return t


def top_saved_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The innermost saved_tensors_hooks that is under way: (pack, unpack)."""
    return C._autograd._top_saved_tensors_default_hooks(True)


def fake_tensors() -> FakeTensorMode:
    """A mode of fake tensors that is not copied with a tensor: it has weak references to storages, and a copy of one
    would free a storage twice. Of torch's own class, by which higher-order operators (flex_attention) know it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    itself = ref(mode)
    vars(mode)["__deepcopy__"] = lambda memo: itself()
    return mode


class TorchDispatchMode(python_dispatch.TorchDispatchMode):
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


class OperationMode(TorchDispatchMode):
    """Has each operation go through `operation`; of a higher-order operator (`torch.cond`) those of its functions."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else functions of such an operator would not be traced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.HigherOrderOperator):
            return self.operation(func, args, kwargs or {})
        args, kwargs = pytree.tree_map(self._within, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _within(self, leaf: Any) -> Any:
        """A function that runs under this mode; as it is what is none, and an operation, of which its kind is asked."""
        if not callable(leaf) or isinstance(leaf, OpOverload):
            return leaf

        def within(*args: Any, **kwargs: Any) -> Any:
            TorchDispatchMode.__enter__(self)  # not `with self`: of a subclass that may begin something
            try:
                return leaf(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)

        return within

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operation gives."""
        raise NotImplementedError


def fakes_that_die(cached: bool = False) -> FakeTensorMode:
    """A mode of fake tensors that keeps none alive. cached: what operations give is looked up where they come again,
    which takes less time; storages that are moved to the host would be taken to stay."""
    mode = fake_tensors()
    mode.cache_enabled = cached
    return mode


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


def dispatch_kept() -> AbstractContextManager[None]:
    """After it this thread's dispatcher is as before, also where torch leaves it changed: a forward-mode derivative
    that cannot be traced does."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return C._ForceDispatchKeyGuard(included, excluded)


# ---- CUDA: None in a build without it, and, the last two, before torch 2.13
raw_stream: Any = getattr(C, "_cuda_getCurrentRawStream", None)
end_allocate_to_pool: Any = getattr(C, "_cuda_endAllocateToPool", None)
override_stale_capture_stream: Any = getattr(C, "_override_stale_capture_stream", None)
set_override_stale_capture_stream: Any = getattr(C, "_set_override_stale_capture_stream", None)

# ---- operators
to_scalar: Any = torch.ops.aten._local_scalar_dense.default  # Tensor.item
functional_collectives: Any = torch.ops._c10d_functional
without_memory: Any = torch.ops.aten._efficientzerotensor.default  # what forward-mode derivatives make of a zero

compile_id: Any = torch._guards.CompileContext.current_compile_id  # None where this thread compiles nothing

# ---- torch.distributed
unpickler: Any = c10d._unpickler  # of objects that ranks send


def gloo_options() -> Any:
    """For groups on CPUs with the timeout of the default one."""
    options = C._distributed_c10d.ProcessGroupGloo._Options()
    options._timeout = c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    return options


def symmetric_memory() -> Any:
    """The module: `empty`, `rendezvous`, `get_backend`, `set_backend`."""
    import torch.distributed._symmetric_memory as found

    return found


def read_objects_by(read: Callable[[torch.Tensor, int, Any], Any]) -> None:
    """Have the object collectives turn bytes [n, uint8] into objects by this function."""
    c10d._tensor_to_object = read


def storage_info() -> Any:
    """Where a checkpoint's file has a tensor, as torch's reader of folders wants it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


# ---- the compiler
def forget_imports() -> None:
    """Have Dynamo keep no module that it has looked up by name; it finds those that are still there again."""
    if symbolic_convert := sys.modules.get("torch._dynamo.symbolic_convert"):
        clear = getattr(getattr(symbolic_convert, "_import_module", None), "cache_clear", None)
        if clear is not None:  # a torch that has another way to look them up keeps none
            clear()


def compilations_of(code: CodeType) -> int:
    """How many there are of a code object, as torch's recompile limit counts them."""
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


def recompile_reason(code: CodeType) -> str:
    """What kept the last call of a code object from taking one of its compilations; "" if nothing did."""
    found = dynamo().utils.guard_failures.get(code)
    said = found[-1].strip().splitlines()[0].partition(": ")[2] if found else ""
    return " ".join(said.partition(" (HINT")[0].split())


def functorch_config() -> Any:
    """Of AOTAutograd, which is between the two."""
    import torch._functorch.config

    return torch._functorch.config


def inductor() -> Any:
    """Its back end, with `compile_fx` and `custom_graph_pass`. Takes as long."""
    import torch._inductor.compile_fx
    import torch._inductor.custom_graph_pass

    return torch._inductor


#: what a first compilation imports as it goes; the first four also where all code is in the cache
LATE = (
    "torch.distributed.tensor.experimental", "torch.export._trace", "torch._dynamo.backends.distributed",
    "torch._inductor.codegen.memory_planning", "sympy.tensor.tensor", "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.misc_patterns", "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.quantization", "torch._inductor.fx_passes.serialized_patterns",
)  # fmt: skip


def import_late() -> None:
    """Import what Inductor's first compilation would import. Of a torch that has something elsewhere, what there is.
    Where its cache has graphs, of a run before, most of that is not needed, and left to whoever does."""
    common, cache = import_module("torch._inductor.codegen.common"), import_module("torch._inductor.codecache")
    getattr(common, "init_backend_registration", lambda: None)()  # code of each kind of device
    getattr(cache, "torch_key", lambda: None)()  # of the cache: a hash of torch's files
    warm = os.path.isdir(os.path.join(cache.cache_dir(), "fxgraph"))
    in_cpp = () if find_spec("triton") else ("sympy.physics.units",)  # code in C++ is simplified by it
    for name in LATE[:4] if warm else (*LATE, *in_cpp):
        with suppress(ImportError):
            import_module(name)
    patterns = () if warm else getattr(sys.modules.get(LATE[-1]), "__path__", ())
    for found in pkgutil.iter_modules(patterns):
        import_module(f"{LATE[-1]}.{found.name}")


def triton_key() -> None:
    """Make the key of Triton's cache, a hash of all its files, which it keeps. Where there is no Triton, or it fails,
    nothing happens: whoever compiles sees why."""
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        with suppress(Exception):
            import_module(name).triton_key()
            break


def start_compilers() -> None:
    """Have Inductor start the processes in which it compiles Triton's kernels, as it does itself when it compiles
    first: they take seconds until they are ready. Once they are there, or without Triton, nothing happens."""
    from torch._inductor import async_compile

    start = getattr(async_compile, "maybe_warm_pool", None)
    if start is not None:
        start()
