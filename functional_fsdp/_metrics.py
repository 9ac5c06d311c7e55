"""Numbers of all ranks: the mean, the sum and the largest of a pytree over the data ranks (JAX's `pmean`, `psum` and
`pmax`), and what they and transforms are made of, `all_reduce`.

    pmean, psum, pmax ──▶ all_reduce ──▶ over_axes ──▶ one all-reduce an axis and dtype, on the side lane
          │                   └── ranks compare what they give, on the host
          └── wire= ──▶ packed_mean ──▶ one all-gather of bytes

In a traced step the collectives are operations of the graph (`_graph/traced.py`), and nothing is compared.

Forms: the structures of the metrics that ranks reduce, which have to be the same on every rank.

A collective of other sizes on other ranks gives numbers without meaning, or ends the process. So ranks compare forms
before it, by a ballot on the host; but only where the form is not the one that followed last time:

    loss ▸ loss ▸ loss ▸ norm, loss ▸ norm, loss ▸ ...
    !      !             !     !    !                     ballots: what came after what is known from there on

What a rank expects follows from what came before, which was the same on every rank. So where ranks differ, one at least
did not expect its form, and waits in the ballot; the others, which wait in the collective, hear of that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F

from ._common.calls import provide, refuse, traced_as, verb
from ._common.errors import ScheduleError, SpecError, TreeError, as_names, expect
from ._common.record import Collective
from ._common.torch_names import pytree
from ._distributed import Case
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


# ---------------------------------------------------------------- what ranks reduce, compared

MOST = 256  # transitions that are remembered
AROUND = 80  # letters of a long text before the place where it differs


class Forms:
    """The forms that came on one mesh. A restart clears it, on every rank.

    Attributes:
        form: of the metrics that are being reduced, the `count`th since the last meeting; () while none are.
        asking: whether this rank waits for its peers to compare it; presumed: whether it goes ahead without that.
        recorded: while a step is captured, its forms, and after how many votes.
    """

    def __init__(self) -> None:
        self.recorded: list[tuple[Any, int]] | None = None
        self.form: Any = ()
        self.asking = self.presumed = False
        self.clear()

    def clear(self) -> None:
        """Nothing came yet."""
        self.last = -1
        self.count = 0
        self.known: list[Any] = []
        self.next: dict[int, int] = {}  # what came after which, the last time

    def record(self, forms: list[tuple[Any, int]] | None) -> None:
        """Note forms here, while a step is captured; None: no more."""
        self.recorded = forms

    def begin(self, run: Any, form: Any, lineage: Any) -> None:
        """This rank is about to reduce metrics of this form, until `end`.

        Raises:
            TreeError: on every rank, where ranks have different ones. ScheduleError: a rank does something else.
        """
        if self.recorded is not None:
            self.recorded.append((form, run.votes))
        found = self.next.get(self.last, -1)
        expected = found >= 0 and self.known[found] == form
        self.count += 1
        self.form, self.presumed = form, expected
        if not expected:
            text = described(form)
            self._compare(run, zlib.crc32(text.encode()), lineage)
            if len(self.known) > MOST:
                self.last, self.known, self.next = -1, [], {}
            found = self.known.index(form) if form in self.known else len(self.known)
            if found == len(self.known):
                self.known.append(form)
            self.next[self.last] = found
        self.last = found

    @property
    def said(self) -> str:
        """The form of what is being reduced, in words."""
        return described(self.form)

    def end(self) -> None:
        """They are reduced, or will not be."""
        self.form = ()

    def asked_for(self, store: Any, meetings: int) -> bool:
        """Whether a peer waits for this rank to compare the metrics that this rank took for those it knows."""
        key = f"metrics/{meetings}/{self.count}"
        if self.asking:
            store.set(key, "1")
        return bool(self.form) and self.presumed and store.check([key])

    def differ(self, run: Any, forms: list[str]) -> None:
        """Raise TreeError if ranks have metrics of different forms; "": none."""
        said = [(rank, form) for rank, form in zip(run.ranks, forms, strict=True) if form]
        self.end()
        for rank, form in said:
            if form != said[0][1]:
                at = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(form, said[0][1], strict=False)))
                remedy = "Give pmean, psum and pmax the same tree, with the same shapes and dtypes, on every rank."
                raise TreeError(
                    f"ranks have different metrics: rank {said[0][0]} has {_cut(said[0][1], at)}, rank {rank} has "
                    f"{_cut(form, at)}.{_of_buffers(form) or f' {remedy}'}"
                )

    def _compare(self, run: Any, number: int, lineage: Any) -> None:
        """Every rank is about to reduce metrics, of the form with this number. Host, 16 bytes; more where they differ.

        Raises:
            TreeError: forms differ. ScheduleError: a rank is elsewhere.
        """
        self.asking = True
        try:
            most, least = run.tally(run.ballot(Case.METRICS, number, "metrics"))
        finally:
            self.asking = False
        if most == least:
            return
        if not least.case is most.case is Case.METRICS:
            what = _cut(described(self.form))
            raise ScheduleError(
                f"ranks came to {what}, and to something else (a step, a use outside the plan). Make the same "
                f"calls in the same order on every rank.{_of_buffers(self.form)} The state before the step is valid."
            )
        forms = run.everyone(described(self.form), "metrics")
        lineage.unchanged()  # all know
        self.differ(run, forms)


def described(form: Any) -> str:
    """A form in words: the same for equal ones."""
    if not form:
        return ""
    _, structure, tensors, along = form
    where = f" along {', '.join(map(repr, along))}" if along is not None else ""
    kinds = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in tensors]
    if not structure:
        return f"{len(kinds)} tensors: {', '.join(kinds)}{where}"
    name, treedef = structure
    return f"{name}({pytree.tree_unflatten(kinds, treedef)}){where}"


def _cut(text: str, at: int = 0) -> str:
    """Some of a text, around a place in it."""
    start = max(0, at - AROUND) if len(text) > 4 * AROUND else 0
    stop = start + 4 * AROUND
    return f"{'...' * (start > 0)}{text[start:stop]}{'...' * (stop < len(text))}"


def _of_buffers(form: Any) -> str:
    """What to do, where what differs are buffers of driven steps: a form, or one in words."""
    if not (form if isinstance(form, str) else described(form)).startswith("buffers("):
        return ""
    return (
        " These are the buffers that a driven step changed. Every rank must change the same ones: have the model in "
        "the same mode, and let no branch decide. Or keep each rank's own: forward_backward(buffers='local')."
    )


provide("metrics", Forms)
