"""Small memsets of a captured graph, turned into kernels.

Matrix products and attention have counters set to zero before they begin. In a graph a memset is carried out by a copy
engine, where it waits for copies between GPUs, and the product waits for it. A small kernel does not.

Source: CUDA driver API, "CapturedStep Management"; PTX ISA.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import torch

from functional_fsdp.extend import cuda_driver

__all__ = ["Memset", "as_kernels", "words"]

log = logging.getLogger(__name__)
call, function = cuda_driver.call, cuda_driver.function
FUNCTIONS = (
    "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphMemsetNodeGetParams", "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetDependentNodes_v2", "cuGraphAddKernelNode_v2", "cuGraphAddDependencies_v2", "cuGraphDestroyNode",
)  # fmt: skip
MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
SMALL = 1 << 16  # bytes: above, a copy engine is not slower
BLOCK = 256  # threads

FILL = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry fill(.param .u64 to, .param .u32 value, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [to];
    ld.param.u32 %r1, [value];
    ld.param.u32 %r2, [count];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r3, %r3, %r4, %r5;
    setp.ge.u32 %p, %r3, %r2;
    @%p bra DONE;
    cvta.to.global.u64 %d1, %d1;
    mul.wide.u32 %d2, %r3, 4;
    add.u64 %d3, %d1, %d2;
    st.global.u32 [%d3], %r1;
DONE:
    ret;
}
\0"""

Handle = ctypes.c_void_p


class Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("size", ctypes.c_uint),  # bytes of an element
        ("width", ctypes.c_size_t),  # elements of a row
        ("height", ctypes.c_size_t),
    )


class Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", Handle),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("parameters", Handle),
        ("extra", Handle),
        ("kernel", Handle),
        ("context", Handle),
    )


def words(memset: Memset) -> tuple[int, int] | None:
    """A memset as (the value of a word, how many words of 4 bytes); None where it is none of whole words, or large."""
    nbytes = memset.width * memset.size
    if memset.height != 1 or not 0 < nbytes <= SMALL or nbytes % 4 or memset.dst % 4:
        return None
    repeated = {1: 0x01010101, 2: 0x00010001, 4: 1}[memset.size]
    return (memset.value & (1 << 8 * memset.size) - 1) * repeated, nbytes // 4


def as_kernels(graph: torch.cuda.CUDAGraph, device: int) -> None:
    """Turn small memsets of a captured graph, made with `keep_graph=True`, into kernels before it is instantiated.

    Where a driver or GPU has no such functions, or takes no such kernel, the graph stays as it is, and the log says so.

    Raises:
        RuntimeError: the driver refuses to change the graph, naming the call.
    """
    try:
        fill = _fill(device)
        for name in FUNCTIONS:
            function(name)
    except (AttributeError, OSError, RuntimeError) as error:
        log.info("cuda_graph: small memsets stay memsets: %s", error)
        return
    whole = Handle(graph.raw_cuda_graph())
    for node in _many("cuGraphGetNodes", whole):
        kind, memset = ctypes.c_int(), Memset()
        call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != MEMSET:
            continue
        call("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
        small = words(memset)
        if small is not None:
            _replace(whole, node, memset.dst, *small, fill)


def _replace(graph: Handle, node: Handle, to: int, value: int, count: int, fill: int) -> None:
    given = (ctypes.c_uint64(to), ctypes.c_uint32(value), ctypes.c_uint32(count))
    parameters = (Handle * len(given))(*(ctypes.addressof(one) for one in given))
    kernel = Kernel(fill, (-(-count // BLOCK), 1, 1), (BLOCK, 1, 1), 0, ctypes.addressof(parameters))
    before, after = (_many(f"cuGraphNodeGet{which}_v2", node, None) for which in ("Dependencies", "DependentNodes"))
    made = Handle()
    call(
        "cuGraphAddKernelNode_v2", ctypes.byref(made), graph, (Handle * len(before))(*before),
        ctypes.c_size_t(len(before)), ctypes.byref(kernel),
    )  # fmt: skip
    mine = (Handle * len(after))(*[made] * len(after))
    call("cuGraphAddDependencies_v2", graph, mine, (Handle * len(after))(*after), None, ctypes.c_size_t(len(after)))
    call("cuGraphDestroyNode", node)


def _many(name: str, of: Handle, *between: Any) -> list[Handle]:
    """The nodes that a function of the driver's lists, which says how many there are first."""
    count = ctypes.c_size_t()
    call(name, of, None, *between, ctypes.byref(count))
    found = (Handle * count.value)()
    if count.value:
        call(name, of, found, *between, ctypes.byref(count))
    return [Handle(one) for one in found]


@cache
def _fill(device: int) -> int:
    """The kernel, as the driver's handle; it stays loaded."""
    module, found = Handle(), Handle()
    with torch.cuda.device(device):
        call("cuModuleLoadData", ctypes.byref(module), FILL)
        call("cuModuleGetFunction", ctypes.byref(found), module, b"fill")
    assert found.value
    return found.value
