"""Capturing: a stream's work into a CUDA graph, what went wrong when it cannot be, and where the state stays meanwhile.

torch leaves its allocator and its generators in the middle of a capture that fails; `captured` ends it for them.

Small memsets of a captured graph are turned into kernels. Matrix products and attention have counters set to zero
before they begin. In a graph a memset is carried out by a copy engine, where it waits for copies between GPUs, and the
product waits for it. A small kernel does not.

Source: CUDA driver API, "Graph Management"; PTX ISA.

Lines: which line of the program, or of a library it uses, does something in the middle of a step.
"""

from __future__ import annotations

import ctypes
import gc
import linecache
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

import torch

from functional_fsdp import FsdpError, ScheduleError, State, TreeError
from functional_fsdp._seams import Veto, cuda_driver, put, torch_private
from functional_fsdp.extend import Ranks, evolve, flatten, lineage_of

PASSED = {"torch", "functional_fsdp", "contextlib", "functools", "threading", "triton"}  # who does it for others
OURS = "functional_fsdp"


def root_of(frame: FrameType) -> str:
    """The package that the frame's code is in; "torch" for what Inductor has written, and for what calls modes as torch
    does."""
    name: str = frame.f_globals.get("__name__") or ""
    if "torchinductor" in frame.f_code.co_filename or name == torch_private.TorchDispatchMode.__module__:
        return "torch"
    return name.partition(".")[0]


def running_line() -> tuple[str, bool]:
    """The innermost line that runs outside torch and this library, "" if there is none; and whether this library is
    between it and torch."""
    frame, ours = sys._getframe(1), False
    found: FrameType | None = frame
    asking = frame.f_globals.get("__name__")
    while found is not None and found.f_globals.get("__name__") == asking:
        found = found.f_back
    while found is not None:
        root = root_of(found)
        if root not in PASSED:
            return _text(found.f_code, found.f_lineno), ours
        ours |= root == OURS
        found = found.f_back
    return "", ours


def line_of_error(error: BaseException) -> str:
    """The innermost line outside torch and this library in an error's traceback, "" if there is none."""
    lines = [one for one in walk_tb(error.__traceback__) if root_of(one[0]) not in PASSED]
    return _text(lines[-1][0].f_code, lines[-1][1]) if lines else ""


def _text(code: CodeType, number: int) -> str:
    return f"{code.co_filename}:{number} ({linecache.getline(code.co_filename, number).strip()})"


log = logging.getLogger(__name__)
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


def cuda_call(name: str, *args: Any) -> Any:
    """Call a function of the CUDA driver. Returns what that gives: nothing, a value, or several.

    Raises:
        ImportError, AttributeError: there is no such module, or none with this function.
        RuntimeError: there is no driver, or it refused; named with its CUresult.
    """
    error, *found = getattr(cuda_driver(), name)(*args)
    if error:
        raise RuntimeError(f"the CUDA driver refused {name}: {error!r}")
    return found[0] if len(found) == 1 else tuple(found) or None


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
    _, count = cuda_call("cuGraphGetNodes", whole)
    for node in cuda_call("cuGraphGetNodes", whole, count)[0]:
        if cuda_call("cuGraphNodeGetType", node) == cuda_driver().CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            memset = cuda_call("cuGraphMemsetNodeGetParams", node)
            if small := words(memset):
                _replace(whole, node, int(memset.dst), *small, fill, edges)


def edge_functions() -> tuple[str, str, str]:
    """What the driver's functions are called that list a node's edges in, its edges out, and add some, each with the
    kinds of the edges: before CUDA 13 they end in "_v2"."""
    names = ("cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes", "cuGraphAddDependencies")
    first, second, third = (f"{name}_v2" if hasattr(cuda_driver(), f"{name}_v2") else name for name in names)
    return first, second, third


def _replace(graph: int, node: Any, to: int, value: int, count: int, fill: Any, edges: tuple[str, str, str]) -> None:
    kernel = cuda_driver().CUDA_KERNEL_NODE_PARAMS()
    kernel.func = fill
    kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ = -(-count // BLOCK), 1, 1
    kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ = BLOCK, 1, 1
    kernel.kernelParams = (to, value, count), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    made = cuda_call("cuGraphAddKernelNode", graph, [], 0, kernel)
    before, after, add = edges
    nodes, kinds, n = cuda_call(before, node, cuda_call(before, node)[-1])
    cuda_call(add, graph, nodes, [made] * n, kinds, n)
    nodes, kinds, n = cuda_call(after, node, cuda_call(after, node)[-1])
    cuda_call(add, graph, [made] * n, nodes, kinds, n)
    cuda_call("cuGraphDestroyNode", node)


@cache
def _fill(device: int) -> Any:
    """The kernel, as the driver's handle; it stays loaded."""
    with torch.cuda.device(device):
        return cuda_call("cuModuleGetFunction", cuda_call("cuModuleLoadData", FILL), b"fill")


KEPT = ("main", "weights", "scales", "opt", "buffers", "count", "extras")

WAITS = (
    "the host waits for the device (.item(), .tolist(), .cpu(), print, `if tensor:`, nonzero, a mask as an index). "
    "Keep it on the device, or return it and look at it outside"
)
RANDOM = (
    "random state is read or set on the host, or a generator of its own is drawn from. Draw with torch's default "
    "generator. Activation checkpointing: use T.remat in T.forward_backward, or preserve_rng_state=False"
)
COMPILED = (
    "a part is compiled while it is captured, and that failed. Often it is called with something else than in the "
    "steps before (TORCH_LOGS=recompiles says what)"
)
# what torch and CUDA say, and what it means
CAUSES = (
    ("unless the CPU tensor is pinned", "a tensor is copied between host and device. Make it on the GPU "
     "(torch.full, torch.arange with device=), or pass it with the batch"),
    ("CUDAGeneratorImpl", RANDOM),
    ("generator not in capture mode", RANDOM),
    ("uncaptured work", "a stream waits for work that began before the step. Begin and end it within the step"),
    ("stream is capturing", WAITS),
    ("error during capture", WAITS),
)  # fmt: skip


_lock = threading.Lock()
_before: list[bool] = []  # of each step that is under way, on any thread: what the switch was when it began


@contextmanager
def stale_streams_followed() -> Iterator[None]:
    """Let a backward run on the stream that captures, where torch has a switch for that. Put back afterwards.

    The switch is the whole process's, so the last thread to leave puts it back.
    """
    if torch_private.set_override_stale_capture_stream is None:
        yield
        return
    with _lock:
        _before.append(torch_private.override_stale_capture_stream())
        torch_private.set_override_stale_capture_stream(True)
    try:
        yield
    finally:
        with _lock:
            torch_private.set_override_stale_capture_stream(_before.pop())


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, Python collects no garbage by itself. When a state is collected, the current stream waits for its lanes;
    a stream that is captured cannot wait for work that is not in the graph."""
    collects = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def captured(ranks: Ranks, pool: Any) -> Iterator[Any]:
    """What the current stream is given inside, and lanes that join it, becomes a graph. Gives it, good at the end.

    Raises:
        ScheduleError: it cannot be captured, with the cause. Everything is as it was before.
    """
    ranks.lanes.catch_up()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in (*ranks.generators.values(), *ranks.again.values()):
        graph.register_generator_state(generator)
    with uncollected():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException as error:
            _abandon(ranks, graph, pool)
            _explain(error)
            raise
        try:
            graph.capture_end()
        except RuntimeError as error:
            _abandon(ranks, None, pool)
            _explain(error)
            raise
    try:
        as_kernels(graph, ranks.device.index)
        graph.instantiate()
    except RuntimeError as error:
        raise ScheduleError(
            f"cuda_graph: the step was captured, but is refused as a graph that can be launched: {error}"
        ) from error


def _abandon(ranks: Ranks, graph: Any, pool: Any) -> None:
    """End a capture that failed, and leave torch fit for another."""
    index = ranks.device.index
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is nothing in it
        if graph is not None:
            graph.capture_end()
            return
    with suppress(RuntimeError):
        torch_private.end_allocate_to_pool(index, pool)
    again = torch.cuda.CUDAGraph()  # torch believes that its generators are still captured, until they have been
    for generator in (*ranks.generators.values(), *ranks.again.values()):
        again.register_generator_state(generator)
    byte = torch.zeros(1, dtype=torch.uint8, device=ranks.device)
    again.capture_begin(capture_error_mode="thread_local")
    byte.add_(1)
    again.capture_end()


def _explain(error: BaseException) -> None:
    """If capturing is what is wrong, raise what it means and where."""
    if not isinstance(error, RuntimeError) or isinstance(error, FsdpError):
        return
    dynamo = sys.modules.get("torch._dynamo.exc")
    if dynamo is not None and isinstance(error, dynamo.BackendCompilerFailed):
        said, cause = f"{type(error.inner_exception).__name__}: {error.inner_exception}", COMPILED
    else:
        said = str(error)
        cause = next((cause for words, cause in CAUSES if words in said), "")
    if not cause:
        return
    raise refusal(line_of_error(error), cause, f" torch says: {said.splitlines()[0][:200]}") from error


def refusal(line: str, why: str, more: str = "") -> ScheduleError:
    """The error that a step cannot be captured, for what is at this line ("" if nobody knows where)."""
    at = f" at {line}" if line else ""
    return ScheduleError(
        f"cuda_graph: the step cannot be captured{at}: {why}. The state before the step is valid.{more}"
    )


class GraphBuffers:
    """The tensors in which captured steps find and leave the state: those of the first state that was captured.

    Attributes:
        owner: the lineage of the state whose values are there now.
    """

    def __init__(self, state: State) -> None:
        self.fields = self._fields(state)
        leaves, self.treedef = torch_private.pytree.tree_flatten(self.fields)
        self.leaves = leaves
        self.paths = flatten(dict(zip(KEPT, self.fields, strict=True)))[0]
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.places = [t.data_ptr() for t in self.tensors]
        self.device = state.count.device
        self.owner = lineage_of(state)
        self.on_host: list[tuple[str, torch.Tensor, int]] = []  # what the user keeps there, and as which version

    @staticmethod
    def _fields(state: State) -> tuple[Any, ...]:
        return tuple(getattr(state, name) for name in KEPT)

    def state(self, state: State) -> State:
        """This state, with these tensors as its own."""
        return evolve(state, **dict(zip(KEPT, self.fields, strict=True)))

    def begin(self, state: State) -> State:
        """The same, for a step that is captured next and ends with `keep`."""
        named = [(path, t) for path, t in zip(self.paths, self.leaves, strict=True) if isinstance(t, torch.Tensor)]
        stays = [(path, t) for path, t in named if t.device.type == "cpu" and self.device.type != "cpu"]
        self.on_host = [(path, t, t._version) for path, t in stays if path.startswith(("buffers", "extras"))]
        return self.state(state)

    def check(self, state: State) -> None:
        """Whether a state's values can come here.

        Raises:
            ScheduleError: a tensor here was moved. TreeError: the state is of another structure.
        """
        if [t.data_ptr() for t in self.tensors] != self.places:
            paths = [path for path, leaf in zip(self.paths, self.leaves, strict=True) if isinstance(leaf, torch.Tensor)]
            moved = next(p for p, t, at in zip(paths, self.tensors, self.places, strict=True) if t.data_ptr() != at)
            raise ScheduleError(
                f"cuda_graph: the tensor {moved!r} of the state was moved in memory since the step was captured "
                "(`.data =`, set_, resize_), and a replay would write where it was. Change values in place, with copy_."
            )
        self._others(self._fields(state), "the state that came in")

    def enter(self, state: State) -> None:
        """Have a state's values here, which was checked."""
        self._write(self._fields(state), "the state that came in")
        if lineage_of(state) is not self.owner:
            self.owner.give_up(
                "T.cuda_graph has put another state in this one's memory. Keep a copy.deepcopy of a state that you "
                "want to go back to."
            )
            self.owner = lineage_of(state)

    def keep(self, new: State, veto: Veto | None = None) -> None:
        """At the end of a captured step: what it made anew goes where it was, unless the step is taken back.

        Raises:
            TreeError: that is on the host, where a replay changes nothing.
        """
        there = self._others(self._fields(new), "the state at the end of the step") if self.on_host else []
        anew = {id(mine) for mine, _ in there}
        for path, tensor, version in self.on_host:
            if id(tensor) in anew or tensor._version != version:
                raise TreeError(
                    f"cuda_graph: the step changes {path!r}, which lies on the host, where a replay changes nothing. "
                    "Put it on the device (device=state.count.device), or change it outside the step."
                )
        self._write(self._fields(new), "the state at the end of the step", veto)

    @torch.no_grad()
    def _write(self, fields: tuple[Any, ...], what: str, veto: Veto | None = None) -> None:
        pairs = self._others(fields, what)
        if veto is not None:
            pairs = [(old, veto.kept(old, new)) for old, new in pairs]
        put(pairs, self.tensors)

    def _others(self, fields: tuple[Any, ...], what: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors here, and those in these fields that lie elsewhere."""
        if all(a is b for a, b in zip(fields, self.fields, strict=True)):  # nearly always
            return []
        leaves, treedef = torch_private.pytree.tree_flatten(fields)
        if treedef != self.treedef:
            raise TreeError(
                f"cuda_graph: {what} has another structure than the one that was captured ({treedef}; expected "
                f"{self.treedef}). What a step adds to the state must be there before: have it warm up more."
            )
        found = []
        for path, mine, theirs in zip(self.paths, self.leaves, leaves, strict=True):
            tensors = isinstance(mine, torch.Tensor) + isinstance(theirs, torch.Tensor)
            if tensors == 2 and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
                if mine.data_ptr() != theirs.data_ptr():
                    found.append((mine, theirs))
            elif tensors or not (mine is theirs or _equal(mine, theirs)):
                raise TreeError(
                    f"cuda_graph: {path!r} of {what} is {text_of(theirs)}; expected {text_of(mine)}, as when it was "
                    "captured. What changes from step to step must be a tensor of one shape and dtype."
                )
        return found

    def changed(self) -> None:
        """A replay has written everything."""
        torch.autograd.graph.increment_version(self.tensors)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are known to be equal."""
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError):  # arrays
        return False


def text_of(value: Any) -> str:
    """A value in an error: a tensor's dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
