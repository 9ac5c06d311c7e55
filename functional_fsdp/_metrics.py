"""Numbers of all ranks: the mean, the sum and the largest of a pytree over the data ranks (JAX's `pmean`, `psum` and
`pmax`), and what they and transforms are made of, `all_reduce`.

    pmean, psum, pmax ──▶ all_reduce ──▶ over_axes ──▶ one all-reduce an axis and dtype, on the side lane
          │                   └── ranks compare what they give, on the host
          └── wire= ──▶ packed_mean ──▶ one all-gather of bytes

In a traced step the collectives are operations of the graph (`_graph/traced.py`), and nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F

from ._common.calls import refuse, traced_as, verb
from ._common.errors import SpecError, TreeError, as_names, expect
from ._common.record import Collective
from ._common.torch_names import pytree
from ._graph import traced
from ._runtime.runtime import runtime_of
from ._spec.precision import START, Codec, Form
from ._state.state import State

Op = Literal["mean", "sum", "max"]
Wire = Codec | Callable[..., Codec] | None
_ADDED = (  # what gloo and NCCL both add up
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)


@overload
def pmean(
    state: State, tree: torch.Tensor | float, axis: str | Iterable[str] | None = None, *, wire: Wire = None
) -> tuple[State, torch.Tensor]: ...
@overload
def pmean(
    state: State, tree: Any, axis: str | Iterable[str] | None = None, *, wire: Wire = None
) -> tuple[State, Any]: ...
@verb(lambda state, tree, axis=None, *, wire=None: _metrics(state, tree, "pmean", "mean", axis, wire))
def pmean(state: State, tree: Any, axis: str | Iterable[str] | None = None, *, wire: Wire = None) -> tuple[State, Any]:
    """Average a pytree of metrics over the data ranks. Numbers become tensors, integers and bools float32 (which has
    integers up to 2 ** 24 exactly). Complex ones stay complex.

    Args:
        state: the newest state of a step, or one between steps; it is not consumed.
        tree: tensors [...] and numbers, of the same structure and shapes on every rank.
        axis: of the mesh, a name or several, in the place of the axes of the data.
        wire: a codec, as `fsdp.int8(64)`, in which each rank packs each tensor for the others along one axis. What
            comes is unpacked and added up in float32 in the order of ranks: all get the same bits. For large tensors
            that are averaged seldom, as in DiLoCo's outer step.

    Raises:
        TreeError: on every rank, where ranks have other shapes, dtypes or another structure; a tensor of float8, which
        backends do not add up. SpecError: no such axis; `wire` that is no codec, or along several axes. ScheduleError:
        `wire` in a step that is compiled whole.

    Collective: one all-reduce an axis and dtype, on a lane of its own, or one all-gather of bytes; before it, on the
    host, ranks compare what they give.

    Example: `state, loss = fsdp.pmean(state, loss)`.
    """
    return _metrics(state, tree, "pmean", "mean", axis, wire)


@overload
def psum(
    state: State, tree: torch.Tensor | float, axis: str | Iterable[str] | None = None
) -> tuple[State, torch.Tensor]: ...
@overload
def psum(state: State, tree: Any, axis: str | Iterable[str] | None = None) -> tuple[State, Any]: ...
@verb(lambda state, tree, axis=None: _metrics(state, tree, "psum", "sum", axis))
def psum(state: State, tree: Any, axis: str | Iterable[str] | None = None) -> tuple[State, Any]:
    """Add up a pytree over the data ranks, as `pmean` averages one.

    Example, of losses that are sums over tokens (`Spec(average="sum")`): `state, n = fsdp.psum(state, tokens)`;
    `state = T.divide(state, n)`.
    """
    return _metrics(state, tree, "psum", "sum", axis)


@overload
def pmax(
    state: State, tree: torch.Tensor | float, axis: str | Iterable[str] | None = None
) -> tuple[State, torch.Tensor]: ...
@overload
def pmax(state: State, tree: Any, axis: str | Iterable[str] | None = None) -> tuple[State, Any]: ...
@verb(lambda state, tree, axis=None: _metrics(state, tree, "pmax", "max", axis))
def pmax(state: State, tree: Any, axis: str | Iterable[str] | None = None) -> tuple[State, Any]:
    """The largest of each element of a pytree over the data ranks, as `pmean` averages one. A NaN of any rank is one.

    Raises:
        TreeError: as `pmean`; a complex tensor or number, which have no order.

    Example, the longest sequence of any rank: `state, longest = fsdp.pmax(state, lengths.max())`.
    """
    return _metrics(state, tree, "pmax", "max", axis)


def _metrics(
    state: State, tree: Any, name: str, op: Op, axis: str | Iterable[str] | None, wire: Wire = None
) -> tuple[State, Any]:
    device = state.count.device
    leaves, treedef = pytree.tree_flatten(tree)
    tensors = [
        _tensor(name, leaf, device).detach()
        if not isinstance(leaf, int | float | complex)  # else made there: nothing waits, and graphs can too
        else torch.full((), leaf, dtype=torch.complex64 if isinstance(leaf, complex) else torch.float32, device=device)
        for leaf in leaves
    ]
    floats = [t if t.is_floating_point() or t.is_complex() else t.float() for t in tensors]
    with _call(state, name):
        if wire is None:
            done = all_reduce(state, floats, op, axis, structure=(name, treedef))
        else:
            done = packed_mean(state, floats, axis, wire, (name, treedef))
    return state, pytree.tree_unflatten(done, treedef)


def _tensor(name: str, leaf: Any, device: torch.device) -> torch.Tensor:
    """A leaf of metrics that is no number of Python's."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device)
    try:
        return torch.as_tensor(leaf, device=device)  # arrays, and what else torch takes
    except (TypeError, ValueError, RuntimeError):
        return expect(f"{name}(tree)", leaf, torch.Tensor, "numbers", TreeError)


@traced_as(lambda state, name: nullcontext())  # a graph has nothing in flight when it begins
def _call(state: State, name: str) -> AbstractContextManager[None]:
    state.version.lineage.enter(state.version.serial, name)
    return state.version.lineage


def all_reduce(
    state: State,
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    axis: str | Iterable[str] | None = None,
    what: str = "",
    structure: Any = (),
) -> list[torch.Tensor]:
    """Tensors [...] averaged, added up or the largest over mesh axes: shapes and dtypes stay, all ranks get the same.

    What lies elsewhere is brought to the state's device first.

    Args:
        state: the newest state of a step, or one between steps; it is not consumed.
        op: "sum", "mean" or "max". A NaN of any rank is one in all of them.
        axis: of the mesh, a name or several. None: those of the data.
        what: what they are, in a word, for errors and for the vote of `step`.
        structure: what they are, for comparison with the other ranks, by equality.

    Raises:
        TreeError: on every rank, where ranks have other shapes, dtypes or another structure; the largest of complex
        tensors; a dtype that backends do not add up (float8, int16, uint16 to uint64). SpecError: no such axis.

    Collective: one all-reduce an axis and dtype, on a lane of its own; before it, on the host, ranks compare what they
    give. Every rank of the mesh calls it.

    Example: `(total,) = extend.all_reduce(state, [count], "sum", "data")`.
    """
    data, every = axes_of(state)
    over = data if axis is None else as_names("axis of the mesh", axis)
    if wrong := [name for i, name in enumerate(over) if name not in every or name in over[:i]]:
        known = ", ".join(map(repr, every))
        why = "is there twice" if wrong[0] in every else f"is not one of {known}"
        raise SpecError(f"all_reduce: expected distinct axes of the mesh, got axis={axis!r}. {wrong[0]!r} {why}.")
    tensors = [tensor.to(state.count.device) for tensor in tensors]
    done = list(tensors)
    with compared(state, tensors, what or op, structure, None if over == data else over):
        if strange := [t for t in tensors if t.dtype not in _ADDED and not t.dtype.is_complex]:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ADDED)
            refuse(
                "TreeError",
                f"{structure[0] if structure else 'all_reduce'}: a tensor {list(strange[0].shape)} of "
                f"{strange[0].dtype}, which not every backend can add up. Nothing was sent, the state is as it was. "
                f"Expected one of {known}, or complex: give its .float(), say.",
            )
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            which = [i for i, t in enumerate(tensors) if t.dtype is dtype]
            flat = torch.cat([tensors[i].reshape(-1) for i in which])
            if not dtype.is_complex:
                flat = over_axes(state, flat, over, op, what)
            elif op != "max":  # as pairs of numbers, which every backend adds up
                pairs = torch.view_as_real(flat.resolve_conj()).reshape(-1)
                flat = torch.view_as_complex(over_axes(state, pairs, over, op, what).view(-1, 2))
            else:
                refuse(
                    "TreeError",
                    f"{structure[0] if structure else 'all_reduce'}: a tensor of {dtype}, and complex numbers have no "
                    "largest. Expected real ones: give its .abs(), say, or .real and .imag.",
                )
            for i, part in zip(which, flat.split([tensors[i].numel() for i in which]), strict=True):
                done[i] = part.view(tensors[i].shape)
    return done


@traced_as(lambda state, tensors, what, structure, along: nullcontext())  # ranks run the same graph
@contextmanager
def compared(
    state: State, tensors: Sequence[torch.Tensor], what: str, structure: Any, along: tuple[str, ...] | None
) -> Iterator[None]:
    """What ranks communicate within is the same on each of them."""
    run, lineage = runtime_of(state.spec.mesh), state.version.lineage
    try:
        with lineage.off_plan(state):
            if run.size > 1:
                run.forms.begin(run, (what, structure, [(t.shape, t.dtype) for t in tensors], along), lineage)
            yield
    finally:
        run.forms.end()


@traced_as(traced.axes_of)
def axes_of(state: State) -> tuple[tuple[str, ...], dict[str, int]]:
    """The axes of the data, and the ranks along each axis of the mesh."""
    return state.spec.data, state.spec.axes


def over_axes(state: State, flat: torch.Tensor, axes: Iterable[str], op: Op, what: str = "") -> torch.Tensor:
    """A flat tensor averaged, added up or the largest over mesh axes, perhaps in place."""
    if op != "max" or not flat.is_floating_point():
        return _over_axes(state, flat, axes, op, what)
    is_nan = flat.isnan()  # gloo and NCCL may take the other rank's number for larger
    largest, nans = _over_axes(
        state, torch.cat([flat.masked_fill(is_nan, -torch.inf), is_nan.to(flat.dtype)]), axes, op, what
    ).chunk(2)
    return largest.masked_fill(nans > 0, torch.nan)


@traced_as(traced.over_axes)
def _over_axes(state: State, flat: torch.Tensor, axes: Iterable[str], op: Op, what: str) -> torch.Tensor:
    run, lineage = runtime_of(state.spec.mesh), state.version.lineage
    with lineage:  # who is stopped here is out of step with the other ranks
        for axis in axes:
            run.now(Collective("all_reduce", axis, flat.numel(), flat.dtype, op, "side", what), flat, flat)
    return flat


def _no_graph(state: State, tensors: Sequence[torch.Tensor], axis: Any, wire: Wire, structure: Any) -> Any:
    refuse(
        "ScheduleError",
        "pmean(wire=) in a step that is compiled whole: bytes of a codec are gathered by eager steps only. Call it "
        "beside the compiled step, or leave wire out.",
    )


@traced_as(_no_graph)
def packed_mean(
    state: State, tensors: Sequence[torch.Tensor], axis: str | Iterable[str] | None, wire: Wire, structure: Any
) -> list[torch.Tensor]:
    """The mean along one axis of what each rank packs, in float32, in the order of ranks."""
    data, every = axes_of(state)
    over = data if axis is None else as_names("axis of the mesh", axis)
    codec = wire() if callable(wire) else wire
    if not isinstance(codec, Codec):
        raise SpecError(f"pmean(wire={wire!r}): expected a codec, as fsdp.int8(64), or None.")
    if len(over) != 1 or over[0] not in every:
        raise SpecError(
            f"pmean(wire={codec}): expected one axis of the mesh ({', '.join(map(repr, every))}), got axis={axis!r}. "
            "Call it once for each."
        )
    forms = [Form(codec, tuple(tensor.shape), torch.float32) for tensor in tensors]
    run, lineage, ranks = runtime_of(state.spec.mesh), state.version.lineage, every[over[0]]
    with compared(state, tensors, f"mean in {codec}", structure, over), lineage:
        parts = [form.pack(tensor.to(torch.float32)) for form, tensor in zip(forms, tensors, strict=True)]
        mine = (
            torch.cat([F.pad(part, (0, -len(part) % START)) for part in parts]) if parts else state.count.new_empty(0)
        )
        came = mine.new_empty(ranks * len(mine))
        if ranks > 1 and len(mine):
            run.now(Collective("all_gather", over[0], len(came), came.dtype, "", "side", "mean"), came, mine)
        else:
            came.copy_(mine)
    found, at = [], 0
    for form, tensor in zip(forms, tensors, strict=True):
        each = [form.unpack(row[at : at + form.nbytes]) for row in came.view(ranks, -1)]
        total = each[0]
        for summand in each[1:]:
            total = total + summand
        found.append((total / total.new_full((), ranks)).to(tensor.dtype))
        at += form.nbytes + -form.nbytes % START
    return found
