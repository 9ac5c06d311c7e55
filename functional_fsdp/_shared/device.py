"""What hangs on the kind of device, and only satellites ask. (What the core asks, too, is in `_common/device.py`.)

`triton` and `tl` are None on machines without Triton.

The CUDA driver, for the few things that torch has no function for: by `cuda.bindings`, which torch's CUDA builds
bring along. In the thread's current context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch

from .._common.device import current_device, lies_on_host

try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
except ImportError:  # torch for the CPU comes without
    triton = tl = None


def device_of(leaves: Iterable[Any]) -> torch.device:
    """Where tensors on the meta device are thought to be: where the others are, a GPU if one of them is."""
    found = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"}
    return max(found, key=lambda device: device.type != "cpu", default=torch.device("cpu"))


def best_device() -> torch.device:
    """A GPU where there is one, else the CPU."""
    return current_device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """What this process's GPU is called; "" where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def forks_after_inductor() -> bool:
    """Whether a process that has imported Inductor may fork those that compute. Where there are GPUs the import asks
    them what they can do, and CUDA cannot be used in a fork of a process that has used it."""
    return not torch.cuda.device_count()


# ---- memory


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the host's memory: itself, or a copy."""
    return tensor.detach().cpu() if tensor.is_cuda else tensor


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory [nbytes], uint8, from which copies to this device are fast: pinned where it is a GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def pin(host: torch.Tensor) -> bool:
    """Pin host memory that torch has not allocated, where there is CUDA, so that copies to it wait for nobody. Returns
    whether it is pinned: `unpin` it before it goes."""
    return (
        torch.cuda.is_initialized() and int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0
    )


def unpin(host: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def arrival(sources: Iterable[torch.Tensor]) -> Callable[[], None]:
    """A function that waits until copies of these to the host, begun on the current stream, are there."""
    if all(lies_on_host(source) for source in sources):
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def count_peak(device: torch.device) -> bool:
    """Count the peak of its memory from now on, when it has done what it was given. Returns whether it is counted."""
    if device.type != "cuda":
        return False
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return True


def peak_of(device: torch.device) -> int | None:
    """Bytes at the peak since `count_peak`, when it has done what it was given; None where nothing counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


# ---- random numbers


def random_state() -> Any:
    """Where the default generators of the host and of the current GPU are, for `set_random_state`."""
    return torch.default_generator.get_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_random_state(state: Any) -> None:
    host, gpu = state
    torch.default_generator.set_state(host)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)


def forked_random(device: torch.device) -> Any:
    """A context, after which the default generators of the host and of this device are where they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def seed_generators(seed: int) -> None:
    """`torch.manual_seed` for the host and for GPUs. torch's own keeps a stack, in words, for each kind of device that
    has not been used so far, and does so once more in each call: a quarter of the time in which a model is made."""
    torch.default_generator.manual_seed(seed)
    if torch.backends.cuda.is_built():
        torch.cuda.manual_seed_all(seed)


# ---- kernels


def being_captured(device: torch.device) -> bool:
    """Whether what is done now goes into a CUDA graph, and the host cannot wait for it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels take this tensor."""
    return tensor.is_cuda


@lru_cache(maxsize=16)
def _rounds_once(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)  # 8.9 goes by float16


def casts_float8(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels take this tensor, and make the same float8 of it as torch."""
    return tensor.is_cuda and _rounds_once(tensor.device)


@cache
def cuda_driver() -> Any:
    """The module `cuda.bindings.driver`, whose names are those of the driver's own documentation.

    Raises:
        ImportError: it is not installed.
    """
    return import_module("cuda.bindings.driver")
