"""Weights from files or another framework's tree.

load_weights: weights from files or another framework's tree, each rank its own runs only.

The optimizer's state by leaf path, out and in: for other frameworks' checkpoints, plots, and other optimizers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .._axes import Cuts, whole_shape
from .._common.calls import alone, verb
from .._common.device import clone_as
from .._common.errors import ScheduleError, SpecError, TreeError, as_names, expect
from .._common.tree import PathIndex, flatten
from .._export import come_to_look, looking, whole_leaves
from .._redistribute import Node, copies, nodes_of, renewed
from .._runtime.agreement import Joint, Topic, agree
from .._runtime.runtime import runtime_of
from .._state.state import State
from .._storage import FlatBuffer, coordinate_of, leaf_shards, zeros
from .._verbs import with_counts
from .contents import THEIRS
from .conversions import Conversions, checked, part_of, same_conversions
from .foreign import Checkpoint, Rename, Source, opened, renamed
from .manifest import as_there
from .pieces import Piece, pieces

Leaves = dict[str, tuple[tuple[int, ...], torch.dtype, Cuts]]  # shape, dtype, and how it is cut, by path
Partial = bool | str | Sequence[str]  # which leaves may be missing: all, none, or those of patterns


def same_source(source: Source, convert: Conversions) -> tuple[Source, list[Topic]]:
    """A source, and what ranks compare of it: names, shapes and dtypes, and what is said of other leaves in memory."""
    lines = [f"{name} {list(one.shape)} {one.dtype}" for name, one in source.tensors.items()]
    remedy = "Give every rank the same weights; a folder must be one that all ranks see."
    return source, [Topic(lines, TreeError, "weights in their sources", "one", remedy), same_conversions(convert)]


Fill = Callable[[Mapping[str, FlatBuffer], Mapping[str, torch.Tensor], Mapping[str, str]], None]


def weights_given(
    weights: Any, convert: Conversions | None, rename: Rename | None, partial: Partial
) -> tuple[Fill, list[Topic]]:
    """What `init(weights=)` was given: a function that fills main weights and buffers from there, of these and of tied
    leaves; and what ranks compare of it. See `fill_weights`."""
    cuts = checked(convert)
    source, topics = same_source(opened(weights), cuts)
    return lambda main, buffers, aliases: fill_weights(main, buffers, source, rename, cuts, partial, aliases), topics


def fill_weights(
    main: Mapping[str, FlatBuffer],
    buffers: Mapping[str, torch.Tensor],
    source: Source,
    rename: Rename | None,
    convert: Conversions,
    partial: Partial,
    aliases: Mapping[str, str],
) -> None:
    """As `fill`; and TreeError where the source has none of the leaves, whatever may be missing."""
    found = fill(main, buffers, source, rename, convert, partial, aliases)
    if partial and not found:
        path = next((leaf.path for buffer in main.values() for leaf in buffer.bucket.leaves), "")
        raise TreeError(
            f"weights: no name in {source.what} is one of the model's ({path!r} and others), so nothing would be "
            "loaded. Say how names differ: rename=."
        )


def _optional(partial: Partial, paths: Sequence[str], aliases: Mapping[str, str]) -> set[str]:
    """The paths of leaves that may be missing in a source."""
    if isinstance(partial, bool):
        return {*paths} if partial else set()
    index, found = PathIndex(paths), set()
    for pattern in as_names("partial", partial):
        hits = index.hits(pattern)
        if not hits:
            raise SpecError(
                f"partial: the pattern {pattern!r} matches nothing. Paths look like {', '.join(paths[:4])}, ..."
            )
        found |= {aliases.get(paths[i], paths[i]) for i in hits}
    return found


def fill(
    main: Mapping[str, FlatBuffer],
    buffers: Mapping[str, torch.Tensor],
    source: Source,
    rename: Rename | None,
    convert: Conversions,
    partial: Partial,
    aliases: Mapping[str, str],
) -> set[str]:
    """Read this rank's runs of the leaves into main weights, and buffers whole. Nothing else of the source is read.

    Args:
        rename: from a leaf's path to its name in the source, a function or a mapping of those that differ.
        convert: from a leaf's path to the leaves there that hold it, in the place of `rename`.
        partial: True where leaves may be missing there, and others be there; or patterns of those that may be missing.
            What is missing stays as it is.
        aliases: of further paths of tied leaves the one that holds the leaf.

    Returns:
        the paths that were read.

    Raises:
        TreeError: leaves that are missing, unexpected or of another shape, by name, before anything is read.
        SpecError: a conversion that does not fit its leaf, a pattern that matches nothing.
    """
    said = "a function from a leaf's path to its name there, or {path: name}"
    expect("rename", rename, (Mapping, Callable, type(None)), said)

    def there(path: str) -> list[Piece]:
        named = renamed(path, rename, theirs, ours)
        shape, _, cuts = leaves[aliases.get(path, path)]
        said = part_of(convert.get(path, source.held_as(named)), whole_shape(shape, cuts), cuts, at)
        return pieces(path, shape, said)

    buffers = dict(zip(*flatten(buffers)[:2], strict=True))  # which may be a tree
    at = coordinate_of(next(iter(main.values())).mesh) if main else {}
    leaves: Leaves = {
        leaf.path: (leaf.seen_shape, leaf.form.dtype if leaf.form is not None else buffer.local.dtype, leaf.cuts)
        for buffer in main.values()
        for leaf in buffer.bucket.leaves
    }
    leaves |= {path: (tuple(tensor.shape), tensor.dtype, ()) for path, tensor in buffers.items()}
    checked(convert, None if partial is True else (*leaves, *aliases))
    optional = _optional(partial, (*leaves, *aliases), aliases)
    theirs, ours = ("", "") if rename or convert else source.prefix_for((*leaves, *aliases))
    wanted = {path: there(path) for path in (*leaves, *aliases)}
    found: dict[str, list[Piece]] = {}
    again: dict[str, list[list[Piece]]] = {}  # of tied leaves what is there under another name, too
    for path, some in wanted.items():
        if all(piece.name in source.tensors for piece in some):
            chosen = found.setdefault(aliases.get(path, path), some)
            if [piece.name for piece in chosen] != [piece.name for piece in some]:
                again.setdefault(aliases.get(path, path), []).append(some)
    _complain(source, leaves, wanted, found, optional, partial is True)
    for buffer in main.values():
        for leaf, first, local in leaf_shards(buffer):
            if local.numel() and leaf.path in found and leaf.form is not None:  # all of it, to pack
                whole = torch.empty(leaf.form.numel, dtype=leaf.form.dtype, device=local.device)
                source.read(found[leaf.path], 0, whole)
                local.copy_(leaf.form.pack(whole)[first : first + local.numel()])
            elif local.numel() and leaf.path in found:
                source.read(found[leaf.path], first, local)
                for other in again.get(leaf.path, ()):
                    _same_there(source, leaf.path, found[leaf.path], other, first, local)
    for path, tensor in buffers.items():
        if path in found and tensor.numel():
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            source.read(found[path], 0, flat)
            tensor.copy_(flat.view(tensor.shape))
    return {*found}


def _same_there(
    source: Source, path: str, mine: list[Piece], other: list[Piece], first: int, local: torch.Tensor
) -> None:
    """Raise TreeError unless a tied leaf has the same values under its other name."""
    names = " and ".join(repr(some[0].name) for some in (mine, other))
    shapes = [[source.shape(piece.name) for piece in some] for some in (mine, other)]
    theirs = torch.empty_like(local)
    if shapes[0] == shapes[1]:
        source.read(other, first, theirs)
    same = torch.equal(theirs, local) or torch.equal(theirs.view(torch.uint8), local.view(torch.uint8))  # NaN, too
    if shapes[0] != shapes[1] or not same:
        raise TreeError(
            f"weights: {names} in {source.what} are one leaf of the model, {path!r}, which is tied, and they have "
            "other values. Untie the model's leaves, or leave one out of the source."
        )


def _complain(
    source: Source,
    leaves: Leaves,
    wanted: Mapping[str, list[Piece]],
    found: Mapping[str, list[Piece]],
    optional: set[str],
    partial: bool,
) -> None:
    """Raise TreeError unless what a source has is what leaves want of it."""
    tensors = source.tensors
    names = {path: dict.fromkeys(piece.name for piece in some) for path, some in wanted.items()}
    lost = [path for path in leaves if path not in found]
    cut = [path for path in lost if path not in optional or any(n in tensors for n in names[path])]
    missing = [*dict.fromkeys(name for path in cut for name in names[path] if name not in tensors)]
    known = {name for some in names.values() for name in some}
    more = [] if partial else [name for name in tensors if name not in known]
    odd = {one.name: one.shape for some in found.values() for one in some if source.shape(one.name) != one.shape}
    kinds = {one.name: leaves[path][1] for path, some in found.items() for one in some}
    other = [n for n, dtype in kinds.items() if not _holds(dtype, tensors[n].dtype)]
    taken: dict[str, list[Piece]] = {}  # what is taken twice counts once
    for piece in (piece for some in found.values() for piece in some if piece.name not in odd):
        before = taken.setdefault(piece.name, [])
        if not any(map(piece.meets, before)):
            before.append(piece)
    in_parts = {piece.name for path, some in found.items() if leaves[path][2] for piece in some}  # others have the rest
    filled = {name: sum(piece.numel for piece in some) for name, some in taken.items() if name not in in_parts}
    whole = {name: torch.Size(source.shape(name)).numel() for name in filled}
    left = [] if partial or missing or odd else [name for name in filled if filled[name] < whole[name]]
    said = [f"lacks {_some(missing)}"] if missing else []
    said += [f"has {_some(more)}, which the model has not"] if more else []
    said += [f"has {n!r} as {list(source.shape(n))}, the model {list(odd[n])}" for n in [*odd][:3]]
    said += [f"has {n!r} as {tensors[n].dtype}, the model {kinds[n]}" for n in other[:3]]
    said += [f"has {n!r} with {whole[n]} elements, the model {filled[n]} of them" for n in left[:3]]
    if said:
        raise TreeError(
            f"weights: {source.what} {'; it '.join(said)}. Give names by rename=, and by convert= leaves that files "
            "cut otherwise. Leaves that may be missing are named by patterns, as partial='*lora_*'; with partial=True "
            "any may be, and others be there."
        )


UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
PAIRS = torch.float4_e2m1fn_x2  # two numbers in an element, which nothing converts


def _holds(mine: torch.dtype, theirs: torch.dtype) -> bool:
    """Whether a leaf can have these values: floating ones may be rounded, others must stay."""
    if mine is theirs:
        return True
    if PAIRS in (mine, theirs) or mine.is_complex or theirs.is_complex:
        return mine.is_complex and theirs.is_complex
    if mine.is_floating_point or theirs.is_floating_point:
        return mine.is_floating_point and theirs.is_floating_point
    if torch.bool in (mine, theirs):
        return theirs is torch.bool
    if (theirs in UNSIGNED) is not (mine in UNSIGNED):
        return theirs in UNSIGNED and mine.itemsize > theirs.itemsize
    return mine.itemsize >= theirs.itemsize


def _some(names: list[str]) -> str:
    return f"{names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ScheduleError("load_weights reads files, which a compiled step cannot. Call it outside torch.compile.")


@verb(_refuse)
def load_weights(
    state: State,
    source: str | os.PathLike[str] | Source | Mapping[str, torch.Tensor],
    *,
    rename: Rename | None = None,
    convert: Conversions | None = None,
    partial: Partial = False,
    optimizer: bool = True,
) -> State:
    """A State with other weights, in a lineage of its own: leaves of global shapes in files -> shards [n / ranks].

    Each rank reads the runs of the leaves that it holds and nothing else; numbers are converted to `Precision.main`.
    Buffers of the state are read by their paths, too.

    Args:
        state: any state that no step has consumed. It stays as it is, and is as usable as before.
        source: a folder or file of any format that `open_checkpoint` knows, of whatever package, nothing of which is
            run; what `open_checkpoint` gives; or {name: tensor}.
        rename: from a leaf's path to its name in the source: a function, or a mapping of those that differ. None: as
            they are, or with one beginning ("model.") that all names there have and the leaves have not.
        convert: {path: what holds the leaf in the source} where that is not one leaf: parts that are `Stacked` or
            `Concatenated`, one `Transposed`, or a slice of one (`Sliced`); or its name. `conversions_of(model)` makes
            that of a Hugging Face model. Of a transposed leaf a rank reads a run for each row of the source.
        partial: patterns of leaves that may be missing there, which keep their values, as "*lora_*"; True: any may be,
            and others may be there.
        optimizer: False leaves out the optimizer and its state: for evaluation. `step` then refuses.

    Returns:
        a State between steps, without gradients. Optimizer state, count, rng and extras are copies of the old one's.

    Memory: as another State; on the host 16 Mi elements.

    Raises:
        TreeError: leaves that are missing, unexpected or of another shape, by name, before anything is read.
        SpecError: a conversion of no leaf, or one that does not fit its leaf; ranks that were given different ones.
        FileNotFoundError, CheckpointError: no weights there, or damaged ones. If one rank raises, all do.

    Collective: every rank calls it. Checks on the host; an all-gather a bucket where a placement keeps compute copies.

    Example:
        >>> state = fsdp.load_weights(state, "llama/", rename=lambda path: f"model.{path}")  # doctest: +SKIP
        >>> state = fsdp.load_weights(state, "mixtral/", convert=fsdp.conversions_of(model))  # doctest: +SKIP
    """
    state._valid("load_weights")
    lineage, run = state.version.lineage, runtime_of(state.spec.mesh)
    trees: dict[str, Any] = {}
    tied = {p: source for p, source in zip(state.layout.paths, state.layout.source, strict=True) if p != source}

    def read() -> None:
        trees.update(copies(state, optimizer), main=zeros(state.main)[0])
        if partial:
            for name, buffer in trees["main"].items():
                buffer.local.copy_(state.main[name].local)
        fill_weights(trees["main"], trees["buffers"], there, rename, cuts, partial, tied)

    def look() -> tuple[tuple[Source, Conversions], list[Topic]]:
        cuts = checked(convert)
        found, topics = same_source(opened(source), cuts)
        return (found, cuts), topics

    with Joint(run, "load_weights") as joint:
        come_to_look(state)
        lineage.touched()
        there, cuts = agree(joint, "the source", look)
        joint(read, "weights")
    return renewed(state, trees, optimizer)


Nested = Mapping[str, Mapping[str, torch.Tensor]]


@alone
@torch.no_grad()
def optimizer_state(state: State) -> dict[str, dict[str, torch.Tensor]]:
    """What the optimizer keeps for each leaf, whole on every rank: shards [n / ranks] -> leaves of global shapes.

    Returns:
        `{path: {name: tensor}}`, as `{"layers.0.w": {"mean": ..., "square": ...}}`, of the shapes of the leaves; what
        belongs to no leaf is under the path "". Names are those in `State.opt`, joined by dots.

    Raises:
        StaleStateError: a state that `step` has consumed.

    Collective: an all-gather a bucket, sharded axis and name: every rank must call it.

    Example: `fsdp.optimizer_state(state)["layers.0.w"]["mean"].norm()`.
    """
    state._valid("optimizer_state")
    found: dict[str, dict[str, torch.Tensor]] = {}
    with looking(state):
        state.version.lineage.touched()
        for node in nodes_of(state.opt):
            if isinstance(node.value, FlatBuffer):
                for path, leaf in whole_leaves(node.value).items():
                    found.setdefault(path, {})[node.path] = leaf.clone()
            elif isinstance(node.value, torch.Tensor):
                found.setdefault("", {})[node.path] = node.value.clone()
    return found


def _refuse_traced(*args: Any, **kwargs: Any) -> NoReturn:
    raise ScheduleError("load_optimizer_state is nothing for a compiled step. Call it outside torch.compile.")


@verb(_refuse_traced)
def load_optimizer_state(
    state: State,
    source: str | os.PathLike[str] | Source | Nested,
    *,
    steps: int | None = None,
    partial: bool = False,
    rename: Rename | None = None,
) -> State:
    """A State whose optimizer goes on from what another one kept: leaves of global shapes -> shards [n / ranks].

    Args:
        state: any state that no step has consumed. It stays as it is, and is as usable as before.
        source: what `open_checkpoint` gives, or its path: moments and counts of steps of AdamW, as other packages keep
            them, for `adamw` and `from_torch`; or `{path: {name: tensor}}` as `optimizer_state` gives it; or a file or
            folder with names as "mean.layers.0.w". What `torch.optim.AdamW` calls "exp_avg" is "mean" here, and
            "exp_avg_sq" is "square". Counts of steps that leaves have missed ("missed" of `adamw`) may be there or not:
            without them every leaf has had every step.
        steps: how many steps were taken, for what follows the count (bias corrections, schedules). None: as the
            checkpoint says, or else as `state`.
        partial: True where some may be missing, which stay as they are, and others be there.
        rename: of another package's checkpoint: from a leaf's path to its name there, as for `load_weights`.

    Returns:
        a State between steps, without gradients. Weights, rng and extras are copies of the old one's.

    Memory: as another State. Each rank reads its runs only.

    Raises:
        TreeError: tensors that are missing, unexpected or of another shape, by name.
        SpecError: the state has no optimizer. FileNotFoundError, CheckpointError: nothing there, or it is damaged.
        If one rank raises, all do.

    Collective: every rank calls it. Checks on the host; an all-gather a bucket where a placement keeps compute copies.

    Example:
        >>> # old: {path: adam.state[p] for path, p in module.named_parameters()}, of a torch.optim.AdamW
        >>> kept = {path: {"mean": s["exp_avg"], "square": s["exp_avg_sq"]} for path, s in old.items()}
        >>> state = fsdp.load_optimizer_state(state, kept, steps=1000)
    """
    state._valid("load_optimizer_state")
    if state.optimizer is None:
        raise SpecError("load_optimizer_state: this state has no optimizer. Give shard or init one.")
    lineage, run = state.version.lineage, runtime_of(state.spec.mesh)
    trees: dict[str, Any] = {}

    def look() -> tuple[Source, list[Topic]]:
        nonlocal steps
        expect("load_optimizer_state(partial)", partial, bool, "True or False")
        if steps is not None and (type(steps) is not int or steps < 0):
            raise SpecError(f"load_optimizer_state(steps={steps!r}): expected a whole number, 0 or more, or None.")
        given, taken = _source(state, source, rename)
        steps = taken if steps is None else steps
        found, topics = same_source(given, {})
        return found, [*topics, Topic([f"steps: {steps}"], SpecError, "numbers", "one", "Give every rank the same.")]

    def read() -> None:
        names = {f"opt.{name}" for name in there.tensors}
        if partial:
            kept = [node for node in nodes_of(state.opt) if isinstance(node.value, FlatBuffer)]
            mine = {f"{n.path}.{leaf.path}": n.value.bucket.by_leaf for n in kept for leaf in n.value.bucket.leaves}
            names |= {f"opt.{name}" for name in mine}
            lacking = [name for name, counts in mine.items() if name not in there.tensors and not counts]
            if lacking and steps is not None:
                raise TreeError(
                    f"load_optimizer_state(steps={steps}, partial=True): {lacking[0]!r} and {len(lacking) - 1} others "
                    "are not there and would stay as they are, but for the count, which is that of all leaves. Give "
                    "all leaves, or leave steps out."
                )
        main = {name: b.but(clone_as(b.local)) for name, b in state.main.items()}
        trees.update(copies(as_there(state, names), True), main=main)
        _read(nodes_of(trees["opt"]), there, partial)
        if steps is not None:
            trees["count"].fill_(steps)

    with Joint(run, "load_optimizer_state") as joint:
        come_to_look(state)
        lineage.touched()
        there = agree(joint, "the source", look)
        joint(read, "tensors")
    return renewed(state, trees, True, steps)


def _source(state: State, source: Any, rename: Rename | None) -> tuple[Source, int | None]:
    """What there is, and how many steps were taken, where it says so."""
    plain = isinstance(source, Mapping) and not isinstance(source, Source)
    if plain and rename is not None:
        raise SpecError("load_optimizer_state(rename=): names of a mapping are its own. Rename them there.")
    if plain and all(isinstance(one, Mapping) for one in source.values()):
        flat = {f"{name}.{path}" if path else name: t for path, some in source.items() for name, t in some.items()}
        return opened(flat), None
    found = opened(source)
    if not isinstance(found, Checkpoint) or not found.optimizer:
        return found, None  # names as "mean.layers.0.w"
    return Source(found.what, _of_checkpoint(state, found, rename)), found.step


def _of_checkpoint(state: State, there: Checkpoint, rename: Rename | None) -> dict[str, Any]:
    """What a checkpoint has for this state's optimizer, under its own names.

    Raises:
        TreeError: it has nothing that this optimizer keeps.
    """
    every = with_counts(state, state.layout.trainable)  # "missed", which a state has where a leaf ever missed a step
    names = {n.path: THEIRS.get(n.path, n.path) for n in nodes_of(every.opt) if isinstance(n.value, FlatBuffer)}
    paths = dict(zip(state.layout.paths, state.layout.source, strict=True))
    trained = {leaf.path for name in state.layout.trainable for leaf in state.layout.buckets[name].leaves}
    found = there.moments(names, paths, trained, rename)
    if not found:
        has = sorted({name for some in there.optimizer.values() for name in some})
        raise TreeError(
            f"load_optimizer_state: {there.what} has {', '.join(map(repr, has)) or 'no optimizer state'} for "
            f"{len(there.optimizer)} leaves; this optimizer keeps {', '.join(map(repr, names.values())) or 'nothing'}."
        )
    return found


def _read(nodes: list[Node], there: Source, partial: bool) -> None:
    """Fill what the optimizer keeps."""
    names = {node.path for node in nodes}
    known: set[str] = set()
    jobs = []
    for name in sorted(names):
        buffers = {n.value.bucket.name: n.value for n in nodes if n.path == name and isinstance(n.value, FlatBuffer)}
        plain = {n.path: n.value for n in nodes if n.path == name and isinstance(n.value, torch.Tensor)}
        mine = {f"{name}.{leaf.path}" for buffer in buffers.values() for leaf in buffer.bucket.leaves} | {*plain}
        known |= mine
        part = Source(there.what, {key: tensor for key, tensor in there.tensors.items() if key in mine})
        rename = {leaf.path: f"{name}.{leaf.path}" for buffer in buffers.values() for leaf in buffer.bucket.leaves}
        jobs.append((buffers, plain, part, rename))
    more = [name for name in there.tensors if name not in known]
    if more and not partial:
        several = f" and {len(more) - 1} more" if len(more) > 1 else ""
        raise TreeError(
            f"load_optimizer_state: {there.what} has {more[0]!r}{several}; "
            f"this optimizer keeps {', '.join(sorted(names)) or 'nothing'}, for each leaf by its path. Rename them, or "
            "leave them out by partial=True."
        )
    for buffers, plain, part, rename in jobs:
        missed = [b.local for b in buffers.values() if b.bucket.by_leaf and not b.local.is_floating_point()]
        if missed and not partial:  # of leaves that have had every step there need be none
            for local in missed:
                local.zero_()
        fill(buffers, plain, part, rename, {}, partial or bool(missed), {})
