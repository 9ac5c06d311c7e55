"""stream: weights unit by unit to whoever runs them; delta: only what a step has changed.

    stream    ("blocks.0", {"blocks.0.up.weight": [4 d, d], ...})      whole leaves, as safetensors would have them
    delta     runs of elements that differ from a snapshot, of what this rank holds

What becomes of them is the caller's: shared memory, a process group, a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from .._common.calls import alone, uninterruptible
from .._common.errors import SpecError, TreeError, expect
from .._common.tree import bytes_text, flatten
from .._export import looking, whole_leaves
from .._plan.layout import Unit
from .._plan.route import Replicated
from .._runtime.runtime import runtime_of
from .._state.state import State
from .._storage import FlatBuffer, leaf_shards, stored_as, unpacked_leaves
from .conversions import Conversions, checked, part_of
from .manifest import buffers_of
from .pieces import blocks, pieces

Named = dict[str, torch.Tensor]
BLOCK = 1024  # elements of a leaf that are compared as one
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stream(
    state: State,
    *,
    dtype: torch.dtype | None = None,
    convert: Conversions | None = None,
    rank: int | None = None,
) -> Iterator[tuple[str, Named]]:
    """The weights unit by unit, whole, in the order of the plan: shards [n / ranks] -> leaves of global shapes.

    Names and layouts are those of `save_safetensors`: leaves' paths, or what `convert` says; a tied leaf comes once, by
    its first path. A leaf of the file that is made of several units' leaves comes with the last of them. Buffers come
    at the end, as the unit "".

    Args:
        state: any state that no step has consumed. It is not consumed. A next step may compute meanwhile, between two
            units; its `step` ends the stream, since it changes the weights in place. (See `stream_to` for a lane.)
        dtype: of floating leaves, in which they travel, too; None: that of `Precision.main`.
        convert: as for `save_safetensors`.
        rank: the only one that gets tensors; others take part, and get empty mappings. None: all ranks do.

    Yields:
        (unit, {name: tensor}), tensors of your own on the mesh's device, until you let go of them.

    Memory: a unit, whole, and what you keep; a second time what `convert` puts together.

    Raises:
        SpecError: a dtype that is not floating, experts of which ranks have their own, a conversion that does not fit,
        a rank that is none of the mesh's. StaleStateError, from the iteration: a step has consumed the state.

    Collective: every rank iterates to the end; an all-gather a bucket and sharded axis for each unit.

    Example:
        >>> shared = {}
        >>> for unit, named in fsdp.stream(state, dtype=torch.bfloat16):
        ...     shared |= {name: tensor.clone() for name, tensor in named.items()}
        >>> shared["head.weight"].dtype
        torch.bfloat16
    """
    if not isinstance(state, State):
        raise TypeError(f"stream(state, ...): the first argument is a State, not {type(state).__name__}.")
    state._valid("stream")
    run = runtime_of(state.spec.mesh)
    check_dtype("stream", dtype)
    if rank is not None and rank not in run.ranks:
        raise SpecError(f"stream(rank={rank!r}): expected one of the mesh's ranks, {run.ranks[0]} to {run.ranks[-1]}.")
    cuts = checked(convert, (*state.layout.paths, *flatten(state.buffers)[0]))
    none_apart(state, "stream")
    return _units(state, dtype, cuts, rank is None or run.ranks[run.rank] == rank)


def stream_to(
    put: Callable[[str, Any], Any],
    state: State,
    *,
    gather: bool = True,
    dtype: torch.dtype | None = None,
    convert: Conversions | None = None,
    rank: int | None = None,
) -> Callable[[], None]:
    """Have `stream` give each unit to a function, on a lane of its own: beside what compute is given next.

    Compute may go on with the next step at once. That step's update waits on the device until all was read, as does all
    else that changes the weights; a step that is compiled whole, or in a graph, waits at its beginning. On the CPU the
    lane is the host's present: all has gone by when this returns.

    With `gather=False` each rank gives its own part of each unit, as a `WeightDelta` that has all of it. Ranks of one
    host put theirs into memory that they share, all at once: nothing is sent, each rank's link to the host carries
    1 / ranks, and a step beside it waits for as much less.

    Args:
        put: is called as `put(unit, {name: tensor})`, or `put(unit, part)` with `gather=False`, in the order of the
            plan. On a GPU the lane is then the current stream: copies that are enqueued there (`non_blocking`, to
            pinned memory; `apply_delta`) come in order, and the tensors may go when it returns. An error of its own is
            raised when all units have gone by, so that peers do not wait. With `gather=False` it is called for units of
            which this rank gives something: what several ranks hold the first one gives, as it does buffers.
        state, dtype, convert, rank: as for `stream`. With `gather=False` leaves that are packed are not taken, and no
            `rank`: each has its own.

    Returns:
        a function that blocks the host until all that was enqueued is done.

    Memory: a unit, whole; a second time what `convert` puts together. With `gather=False` this rank's part of it: views
    of one copy of each bucket, so whoever keeps one tensor keeps that.

    Raises:
        Exception: as `stream`, and what `put` raises.

    Collective: as `stream`, all of it in this call; none with `gather=False`.

    Example:
        >>> shared = {name: torch.empty_like(t) for name, t in fsdp.full_params(state).items()}
        >>> arrived = fsdp.stream_to(lambda unit, named: [shared[n].copy_(t) for n, t in named.items()], state)
        >>> arrived = fsdp.stream_to(lambda unit, part: fsdp.apply_delta(shared, part), state, gather=False)
        >>> state = fsdp.step(fsdp.reduce(*fsdp.unshard(state)))
        >>> arrived()
    """
    expect("stream_to(put)", put, Callable, "a function of (unit, {name: tensor})")
    units: Iterator[tuple[str, Any]] = stream(state, dtype=dtype, convert=convert, rank=rank)
    if not gather:
        packed = next((b.leaves[0].path for b in state.layout.buckets.values() if b.packed), None)
        if rank is not None or packed is not None:
            met = f"rank={rank}" if packed is None else f"{packed!r}, which is packed"
            raise SpecError(f"stream_to(gather=False): each rank gives its own part, and got {met}. Leave gather out.")
        units = _own_parts(state, dtype, convert)
    failed: list[Exception] = []
    lanes, lineage = runtime_of(state.spec.mesh).lanes, state.version.lineage

    def job() -> Iterator[Any]:
        for unit, named in units:
            try:
                if not failed:
                    put(unit, named)
            except Exception as error:
                failed.append(error)
            del named
        yield from ()

    read = [buffer.local for buffer in state.main.values()]
    lanes.keep(*read, *(t for t in flatten(state.buffers)[1] if isinstance(t, torch.Tensor)), lanes=("store",))
    try:
        lanes.enqueue("store", job(), after=lanes.mark())
    finally:
        lineage.note_reads(mark := lanes.enqueue("store", iter(())))
    if failed:
        raise failed[0]
    return lambda: None if mark is None else mark.synchronize()


def check_dtype(what: str, dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SpecError(f"{what}(dtype={dtype!r}): expected a floating dtype, or None.")


def none_apart(state: State, what: str) -> None:
    """Refuse leaves of which ranks have others, and a buffer of a leaf's name; parts of the same leaf are fine."""
    if both := {*flatten(state.buffers)[0]} & {*state.layout.paths}:
        raise SpecError(f"{what}: a parameter and a buffer are both called {min(both)!r}. Rename one of them.")
    sizes = runtime_of(state.spec.mesh).sizes
    for bucket in state.layout.buckets.values():
        own = [*bucket.unlike(sizes)]
        if own:
            raise SpecError(
                f"{what}: ranks along {own} have {bucket.leaves[0].path!r} of their own, which has no one value. Save "
                "a checkpoint, which has all of them."
            )


def _units(state: State, dtype: torch.dtype | None, convert: Conversions, keeps: bool) -> Iterator[tuple[str, Named]]:
    parts = _Parts(convert) if convert else None
    for unit in state.layout.units:
        whole = _gathered(state, unit, dtype)
        named: Named = {}
        if keeps:
            named = whole if parts is None else parts.put(whole)
        del whole
        yield unit.name, named
        del named
    held = buffers_of(state)
    if held:
        copies = {path: tensor.detach().clone() for path, tensor in held.items()} if keeps else {}
        yield "", copies if parts is None else parts.put(copies)


@alone
@torch.no_grad()
def _gathered(state: State, unit: Unit, dtype: torch.dtype | None) -> Named:
    """The leaves of a unit, whole."""
    state._valid("stream")
    found: Named = {}
    with looking(state):
        state.version.lineage.touched()
        for bucket in unit.buckets:
            buffer = state.main[bucket.name]
            leaves = whole_leaves(buffer, _travels(buffer.local, dtype))
            if bucket.packed:
                plain = {path: stored_as(leaf, None) for path, leaf in unpacked_leaves(bucket, leaves).items()}
                leaves = {path: leaf.to(_travels(leaf, dtype)) for path, leaf in plain.items()}
            found |= leaves
    return found


@torch.no_grad()
def _own_parts(
    state: State, dtype: torch.dtype | None, convert: Conversions | None
) -> Iterator[tuple[str, WeightDelta]]:
    """This rank's part of each unit, and of the buffers, copied: a bucket at once."""
    cuts, steps = _FileRuns(state, convert), (state.steps, state.steps)
    state._valid("stream")
    state.version.lineage.touched()
    for unit in state.layout.units:
        for buffer in filter(_gives, (state.main[bucket.name] for bucket in unit.buckets)):
            copied = buffer.local.detach().to(_travels(buffer.local, dtype), copy=True)
            for leaf, first, local in leaf_shards(FlatBuffer(copied, buffer.bucket, buffer.states, buffer.mesh)):
                if len(local):
                    cuts.add(leaf.path, first, local, [(0, len(local))])
            del copied, local
        if cuts.runs:
            yield unit.name, cuts.taken(steps, copied=True)
    for path, held in _own_buffers(state):
        cuts.add(path, 0, held.clone(), [(0, len(held))])
    if cuts.runs:
        yield "", cuts.taken(steps, copied=True)


class _FileRuns:
    """Runs of this rank's leaves, as they lie in leaves of files."""

    def __init__(self, state: State, convert: Conversions | None) -> None:
        held = {path: tuple(t.shape) for path, t in buffers_of(state).items()}
        leaves = state.layout.leaves
        at, self.cuts = runtime_of(state.spec.mesh).coordinate, {**checked(convert, (*state.layout.paths, *held))}
        for path, leaf in leaves.items():
            if leaf.cuts:
                self.cuts[path] = part_of(self.cuts.get(path, path), leaf.whole, leaf.cuts, at)
        self.shapes = held | {path: leaf.shape for path, leaf in leaves.items()}
        self.runs: dict[str, list[tuple[int, int]]] = {}
        self.values: dict[str, list[torch.Tensor]] = {}

    def add(self, path: str, first: int, part: torch.Tensor, spans: list[tuple[int, int]]) -> None:
        """Elements [a, b) of a leaf's part, which begins with its element `first`; not copied."""
        said = self.cuts.get(path, path)
        if isinstance(said, str):  # the leaf as it is, under one name
            for a, b in spans:
                self._run(said, first + a, part[a:b])
            return
        for (a, b), piece in product(spans, pieces(path, self.shapes[path], said) if spans else []):
            for one in blocks(piece, first + a, first + b, most=b - a):
                self._run(piece.name, one.file, one.of(part[a:b], first + a).reshape(-1))

    def _run(self, name: str, begin: int, values: torch.Tensor) -> None:
        self.runs.setdefault(name, []).append((begin, len(values)))
        self.values.setdefault(name, []).append(values)

    def taken(self, steps: tuple[int, int], copied: bool) -> WeightDelta:
        """What was added since the last time; `copied`: it may be kept as it is."""
        runs, values, self.runs, self.values = self.runs, self.values, {}, {}
        numbers = {name: torch.tensor(some, dtype=torch.int64, device="cpu") for name, some in runs.items()}
        return WeightDelta(
            numbers,
            {name: some[0] if copied and len(some) == 1 else torch.cat(some) for name, some in values.items()},
            steps,
        )


class _Parts:
    """Leaves of files that are put together of leaves in memory, until they have all of them."""

    def __init__(self, convert: Conversions) -> None:
        self.convert = convert
        self.room: dict[str, tuple[torch.Tensor, int]] = {}

    def put(self, whole: Named) -> Named:
        """What is complete with these leaves."""
        done: Named = {}
        for path, leaf in whole.items():
            for piece in pieces(path, leaf.shape, self.convert.get(path, path)):
                if piece.shape == tuple(leaf.shape) and piece.numel == leaf.numel() and len(piece.lines) <= 1:
                    done[piece.name] = leaf  # it is that of the file as it is
                    continue
                at, filled = self.room.pop(piece.name, (None, 0))
                if at is None:
                    at = leaf.new_empty(piece.shape)
                file, flat = at.view(-1), leaf.reshape(-1)
                for block in blocks(piece, 0, flat.numel()):
                    file[block.file : block.file + block.numel].view(block.sizes).copy_(block.of(flat, 0))
                filled += piece.numel
                if filled == at.numel():
                    done[piece.name] = at
                else:
                    self.room[piece.name] = at, filled
        return done


# ---------------------------------------------------------------- what has changed


@dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """This rank's part of each leaf, and buffers, as they were; made by `snapshot`.

    Attributes:
        parts: {path: (first element, tensor [n])}, on the host.
        dtype: of floating leaves, or None for their own.
        steps: how many steps had been taken.
    """

    parts: dict[str, tuple[int, torch.Tensor]]
    dtype: torch.dtype | None
    steps: int

    def __repr__(self) -> str:
        total = sum(part.nbytes for _, part in self.parts.values())
        return f"WeightSnapshot(step {self.steps}, {len(self.parts)} leaves, {bytes_text(total)})"


@dataclass(frozen=True, eq=False)
class WeightDelta:
    """Runs of elements that have changed, of what one rank holds; made by `delta`, or of all by `stream_to`, put in
    place by `apply_delta`.

    It has tensors and texts only: it can be pickled, sent, and saved by torch.save, of any dtype.

    Attributes:
        runs: {name: int64 [k, 2]}, the first element and the number of elements of each run, of leaves of the file.
        values: {name: tensor [sum of the numbers]}.
        steps: (those of the snapshot, those of the state).
    """

    runs: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    steps: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.runs.values(), *self.values.values()))

    def __reduce__(self) -> Any:
        own = {name: t if t.nbytes == t.untyped_storage().nbytes() else t.clone() for name, t in self.values.items()}
        bits = {name: (t.view(torch.uint8), t.dtype) for name, t in own.items()}  # float8 has no pickle
        return _unpickled, (self.runs, bits, self.steps)

    def __repr__(self) -> str:
        runs = sum(len(one) for one in self.runs.values())
        told = f"{len(self.runs)} leaves, {runs} runs, {bytes_text(self.nbytes)}"
        return f"WeightDelta(step {self.steps[0]} to {self.steps[1]}, {told})"


def _unpickled(
    runs: dict[str, torch.Tensor], bits: dict[str, tuple[torch.Tensor, torch.dtype]], steps: tuple[int, int]
) -> WeightDelta:
    return WeightDelta(runs, {name: held.view(dtype) for name, (held, dtype) in bits.items()}, steps)


@alone
@torch.no_grad()
def snapshot(state: State, *, dtype: torch.dtype | None = None) -> WeightSnapshot:
    """What `delta` compares with: a copy of this rank's part of each leaf, and of buffers, on the host. Of what several
    ranks hold the first has it.

    Args:
        dtype: of floating leaves, as the receiver has them; None: that of `Precision.main`.

    Raises:
        StaleStateError: a state in the middle of a step, or one that a step has consumed. SpecError: a dtype that is
        not floating.

    Collective: none.

    Example: `since = fsdp.snapshot(state, dtype=torch.bfloat16)`.
    """
    state._resting("snapshot")
    check_dtype("snapshot", dtype)
    own = _own(state, dtype)
    parts = {path: (first, local.detach().to("cpu", kind, copy=True)) for path, first, local, kind in own}
    return WeightSnapshot(parts, dtype, state.steps)


def _own(state: State, dtype: torch.dtype | None = None) -> Iterator[tuple[str, int, torch.Tensor, torch.dtype]]:
    """This rank's part of each leaf, and buffers, as they are, and the dtype in which it goes."""
    for buffer in filter(_gives, (state.main[bucket.name] for unit in state.layout.units for bucket in unit.buckets)):
        kind = _travels(buffer.local, dtype)
        yield from ((leaf.path, first, local, kind) for leaf, first, local in leaf_shards(buffer) if local.numel())
    yield from ((path, 0, held, held.dtype) for path, held in _own_buffers(state))


def _gives(buffer: FlatBuffer) -> bool:
    """Whether this rank gives its part: of what several ranks hold the first does."""
    at = runtime_of(buffer.mesh).coordinate
    alike = [axis for axis, placed in buffer.states if placed is Replicated]
    return not any(at[axis] for axis in (*alike, *buffer.bucket.equal))


def _own_buffers(state: State) -> list[tuple[str, torch.Tensor]]:
    """Buffers by path, flat, which the first rank gives."""
    if any(runtime_of(state.spec.mesh).coordinate.values()):
        return []
    return [(path, t.reshape(-1)) for path, t in buffers_of(state).items() if t.numel()]


def _travels(part: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and part.dtype.is_floating_point else part.dtype


@partial(alone, at=1)
@torch.no_grad()
def delta(
    since: WeightSnapshot, state: State, *, convert: Conversions | None = None, block: int = BLOCK
) -> WeightDelta:
    """What has changed since a snapshot, bit by bit: lossless, and on each rank of what it holds.

    The receiver puts every rank's part in place, in any order. The snapshot is brought up to date, for the next one.

    Args:
        since: of this state, before the steps that count. Its values become those of `state`.
        convert: as for `save_safetensors`: names and layouts of the receiver's leaves.
        block: 1 or more elements that are compared as one, and sent together where one of them has changed.

    Raises:
        TreeError: a snapshot of other leaves, or of another layout; it stays as it is. SpecError: experts of which
        ranks have their own, a conversion that does not fit, a block of no elements. StaleStateError: a state in the
        middle of a step, or one that was consumed.

    Memory: on the host a leaf's part, and what has changed.

    Collective: none.

    Example:
        >>> since, weights = fsdp.snapshot(state), fsdp.full_params(state)
        >>> state = fsdp.step(fsdp.reduce(*fsdp.unshard(state)))
        >>> weights = fsdp.apply_delta(weights, fsdp.delta(since, state))
        >>> bool((weights["head.weight"] == fsdp.full_params(state)["head.weight"]).all())
        True
    """
    expect("delta(since, state)", since, WeightSnapshot, "what snapshot gave", TypeError)
    state._resting("delta")
    none_apart(state, "delta")
    if type(block) is not int or block < 1:
        raise SpecError(f"delta(block={block!r}): expected a whole number of elements, 1 or more.")
    cuts = _FileRuns(state, convert)
    own = {path: (first, local) for path, first, local, _ in _own(state)}
    if own.keys() != since.parts.keys():
        odd = sorted(own.keys() ^ since.parts.keys())[0]
        raise TreeError(
            f"delta: the snapshot is of other leaves: {odd!r} is in {'the state' if odd in own else 'it'} only. Take a "
            "snapshot of a state of the same layout, on each rank."
        )
    for path, (first, local) in own.items():
        start, before = since.parts[path]
        if (start, before.shape) != (first, local.shape):
            raise TreeError(
                f"delta: the snapshot has elements {start} to {start + len(before)} of {path!r}, the state {first} to "
                f"{first + len(local)} on this rank. Take a snapshot of a state of the same layout."
            )
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    for path, (first, local) in own.items():
        _, before = since.parts[path]
        now = local.detach().to("cpu", before.dtype)
        cuts.add(path, first, now, changed := _changed(before, now, block))
        if changed:
            moved.append((before, local))
    found = cuts.taken((since.steps, state.steps), copied=False)
    _bring_up(since, moved, state.steps)
    return found


@uninterruptible
def _bring_up(since: WeightSnapshot, moved: list[tuple[torch.Tensor, torch.Tensor]], steps: int) -> None:
    """The snapshot gets these values at last: what a call that failed had found would never be sent."""
    for before, local in moved:
        before.copy_(local.detach())
    object.__setattr__(since, "steps", steps)


def _changed(before: torch.Tensor, now: torch.Tensor, block: int) -> list[tuple[int, int]]:
    """Runs [a, b) of elements, of whole blocks, in which a bit is another."""
    kind = BITS.get(before.dtype.itemsize, torch.int64)
    differs, n = before.view(kind) != now.view(kind), len(before)
    differs = differs if len(differs) == n else differs.view(n, -1).any(1)  # of complex128
    full = n // block * block
    some = differs[:full].view(-1, block).any(1)
    if full < n:
        some = torch.cat([some, differs[full:].any().view(1)])
    edges = torch.nn.functional.pad(some.to(torch.int8), (1, 1)).diff().nonzero().view(-1, 2)
    return [(a * block, min(b * block, n)) for a, b in edges.tolist()]


@torch.inference_mode()  # in which tensors that were made in it may be changed, too
def apply_delta(weights: Mapping[str, torch.Tensor], changed: WeightDelta) -> Mapping[str, torch.Tensor]:
    """Put what has changed in place, in the tensors that are given. It needs no ranks and no State.

    Args:
        weights: {name: tensor} of whole leaves, contiguous, on any device, as `stream` gave them; they are changed.
            Between a GPU and pinned memory the copies are enqueued on the current stream: wait for it before you read.
        changed: of one rank. All ranks' are put in place one after another.

    Returns:
        the same mapping.

    Raises:
        TreeError: a leaf that is missing, or whose dtype, layout or number of elements does not fit. Nothing has
        changed.

    Collective: none.

    Example:
        >>> since, weights = fsdp.snapshot(state), fsdp.full_params(state)
        >>> changed = fsdp.delta(since, fsdp.step(fsdp.reduce(*fsdp.unshard(state))))
        >>> weights = fsdp.apply_delta(weights, changed)  # that of each rank, one after the other
    """
    if not isinstance(weights, Mapping) or not isinstance(changed, WeightDelta):
        raise TypeError(
            f"apply_delta: got a {type(weights).__name__} and a {type(changed).__name__}; expected {{name: tensor}}, "
            "and what delta gave."
        )
    spans = {name: runs.tolist() for name, runs in changed.runs.items()}
    for name, runs in spans.items():
        one: Any = weights.get(name)
        end = max(first + n for first, n in runs)
        dense = isinstance(one, torch.Tensor) and not one.is_meta and one.is_contiguous()
        if not dense or one.dtype is not changed.values[name].dtype or one.numel() < end:
            met = type(one).__name__
            if isinstance(one, torch.Tensor):
                where = " on the meta device" if one.is_meta else ""
                met = f"{one.dtype} {[*one.shape]}{where}, {'' if one.is_contiguous() else 'not '}contiguous"
            raise TreeError(
                f"apply_delta: {name!r} is {met}; the delta has {changed.values[name].dtype} up to element {end}. Give "
                "the leaves that stream gave, with its dtype and convert."
            )
    for name, runs in spans.items():
        flat, values, at = weights[name].view(-1), changed.values[name], 0
        for first, n in runs:
            flat[first : first + n].copy_(values[at : at + n], non_blocking=True)
            at += n
    return weights
