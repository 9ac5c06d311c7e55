"""load_weights: weights from files or another framework's tree, each rank its own runs only.

The optimizer's state by leaf path, out and in: for other frameworks' checkpoints, plots, and other optimizers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from .._common.calls import alone, verb
from .._common.device import clone_as
from .._common.errors import ScheduleError, SpecError, TreeError, expect
from .._redistribute import Node, copies, nodes_of, renewed
from .._runtime.agreement import Joint, Topic, agree
from .._runtime.runtime import runtime_of
from .._state.state import State
from .._storage import FlatBuffer, whole_leaves, zeros
from .._verbs import with_counts
from .conversions import Conversions, checked
from .manifest import as_there
from .sources import Partial, Rename, Source, fill, fill_weights, opened, same_source

__all__ = ["load_optimizer_state", "load_weights", "optimizer_state"]


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
        lineage.look(state.version.serial)
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
    with state.version.lineage.looking(state):
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
        lineage.look(state.version.serial)
        lineage.touched()
        there = agree(joint, "the source", look)
        joint(read, "tensors")
    return renewed(state, trees, True, steps)


def _source(state: State, source: Any, rename: Rename | None) -> tuple[Source, int | None]:
    """What there is, and how many steps were taken, where it says so."""
    if rename is not None and isinstance(source, Mapping) and not isinstance(source, Source):
        raise SpecError("load_optimizer_state(rename=): names of a mapping are its own. Rename them there.")
    if (
        isinstance(source, Mapping)
        and not isinstance(source, Source)
        and all(isinstance(one, Mapping) for one in source.values())
    ):
        flat = {f"{name}.{path}" if path else name: t for path, some in source.items() for name, t in some.items()}
        return opened(flat), None
    found = opened(source)
    if not getattr(found, "optimizer", None):
        return found, None  # names as "mean.layers.0.w"
    there: Any = found
    return Source(found.what, _of_checkpoint(state, there, rename)), there.step


def _of_checkpoint(state: State, there: Any, rename: Rename | None) -> dict[str, Any]:
    """What a checkpoint has for this state's optimizer, under its own names.

    Raises:
        TreeError: it has nothing that this optimizer keeps.
    """
    every = with_counts(state, state.layout.trainable)  # "missed", which a state has where a leaf ever missed a step
    names = {n.path: THEIRS.get(n.path, n.path) for n in nodes_of(every.opt) if isinstance(n.value, FlatBuffer)}
    paths = dict(zip(state.layout.paths, state.layout.source, strict=True))
    trained = {leaf.path for name in state.layout.trainable for leaf in state.layout.buckets[name].leaves}
    found: dict[str, Any] = there.moments(names, paths, trained, rename)
    if not found:
        has = sorted({name for some in there.optimizer.values() for name in some})
        raise TreeError(
            f"load_optimizer_state: {there.what} has {', '.join(map(repr, has)) or 'no optimizer state'} for "
            f"{len(there.optimizer)} leaves; this optimizer keeps {', '.join(map(repr, names.values())) or 'nothing'}."
        )
    return found


THEIRS = {"mean": "exp_avg", "square": "exp_avg_sq"}  # what adamw keeps, as torch.optim.AdamW calls it


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
