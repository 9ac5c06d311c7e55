"""Small memsets of a captured graph, turned into kernels.

Matrix products and attention have counters set to zero before they begin. In a graph a memset is carried out by a copy
engine, where it waits for copies between GPUs, and the product waits for it. A small kernel does not.

Source: CUDA driver API, "Graph Management"; PTX ISA.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import torch

from functional_fsdp._verbs.seams import cuda_driver

__all__ = ["as_kernels", "edge_functions", "words"]

log = logging.getLogger(__name__)
call, driver = cuda_driver.call, cuda_driver.driver
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


def words(memset: Any) -> tuple[int, int] | None:
    """A memset (CUDA_MEMSET_NODE_PARAMS) as (the value of a word, how many words of 4 bytes); None where it is none of
    whole words, or large."""
    size = memset.elementSize
    nbytes = memset.width * size
    if memset.height != 1 or not 0 < nbytes <= SMALL or nbytes % 4 or int(memset.dst) % 4:
        return None
    repeated = {1: 0x01010101, 2: 0x00010001, 4: 1}[size]
    return (memset.value & (1 << 8 * size) - 1) * repeated, nbytes // 4


def as_kernels(graph: torch.cuda.CUDAGraph, device: int) -> None:
    """Turn small memsets of a captured graph, made with `keep_graph=True`, into kernels before it is instantiated.

    Where a driver or GPU has no such functions, or takes no such kernel, the graph stays as it is, and the log says so.

    Raises:
        RuntimeError: the driver refuses to change the graph, naming the call.
    """
    try:
        edges, fill = edge_functions(), _fill(device)
    except (AttributeError, ImportError, RuntimeError) as error:
        log.info("cuda_graph: small memsets stay memsets: %s", error)
        return
    whole = graph.raw_cuda_graph()
    _, count = call("cuGraphGetNodes", whole)
    for node in call("cuGraphGetNodes", whole, count)[0]:
        if call("cuGraphNodeGetType", node) == driver().CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            memset = call("cuGraphMemsetNodeGetParams", node)
            if small := words(memset):
                _replace(whole, node, int(memset.dst), *small, fill, edges)


def edge_functions() -> tuple[str, str, str]:
    """What the driver's functions are called that list a node's edges in, its edges out, and add some, each with the
    kinds of the edges: before CUDA 13 they end in "_v2"."""
    names = ("cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes", "cuGraphAddDependencies")
    first, second, third = (f"{name}_v2" if hasattr(driver(), f"{name}_v2") else name for name in names)
    return first, second, third


def _replace(graph: int, node: Any, to: int, value: int, count: int, fill: Any, edges: tuple[str, str, str]) -> None:
    kernel = driver().CUDA_KERNEL_NODE_PARAMS()
    kernel.func = fill
    kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ = -(-count // BLOCK), 1, 1
    kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ = BLOCK, 1, 1
    kernel.kernelParams = (to, value, count), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    made = call("cuGraphAddKernelNode", graph, [], 0, kernel)
    before, after, add = edges
    nodes, kinds, n = call(before, node, call(before, node)[-1])
    call(add, graph, nodes, [made] * n, kinds, n)
    nodes, kinds, n = call(after, node, call(after, node)[-1])
    call(add, graph, [made] * n, nodes, kinds, n)
    call("cuGraphDestroyNode", node)


@cache
def _fill(device: int) -> Any:
    """The kernel, as the driver's handle; it stays loaded."""
    with torch.cuda.device(device):
        return call("cuModuleGetFunction", call("cuModuleLoadData", FILL), b"fill")
