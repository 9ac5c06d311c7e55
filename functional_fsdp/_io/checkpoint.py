"""Checkpoints: `save` and `load`, and the save that is under way.

    Saving, pending        the save of a mesh that is written beside the training, one at most
    blank, made_for        a state without values, made from what `layout.json` says and a spec
    with_replicas          what is read by other ranks than wrote it
    save, load

A checkpoint has leaves in the files of torch.distributed.checkpoint, written whole or not at all.

    folder/            appears by one rename, when everything is on disk (see `folder`)
      layout.json      what it is: leaves, and where each one's elements lie (see `manifest`)
      .metadata        the same, for torch's tools
      *.distcp         runs of leaves, one file for each rank that writes any (see `manifest`, `pieces`)

A state belongs to its leaves: any strategy, world, units and dtypes read what any others wrote (see
`manifest`). Whatever goes wrong on one rank is an error on every rank.

Leaves that ranks had of their own when they were saved may be read by ranks that have none, and the other way:

    there                                   here                    with allow=["replicas"]
    main.w of replica 0, of replica 1       main.w                  read from the first, if all hold the same
    main.w                                  main.w of replica 0     every replica reads it
    main.w of replica 0, of replica 1       of replica 0, 1, 2      from the first, if all hold the same
    residual.w of replica 0, of replica 1   residual.w              what all of them owe; by replicas in turn

Replicas that train apart (DiLoCo) hold the same whenever they have been averaged. Experts never do.
"""

from __future__ import annotations

import os
import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from .._common.calls import alone, outside_inference
from .._common.device import empty_as, zeros_as
from .._common.errors import CheckpointError, FsdpError, RestartError, SpecError, TreeError, as_names, as_path
from .._common.torch_names import pytree
from .._common.tree import dotted, flatten
from .._engine.gathers import resolve_transport
from .._optim.optimizer import as_optimizer, initial
from .._plan.layout import LeafInfo
from .._plan.route import Partial
from .._redistribute import nodes_of
from .._runtime.agreement import Joint, Topic, agree
from .._runtime.runtime import Runtime, runtime_of
from .._spec.spec import Spec
from .._state.shard import build, given, needs_spec
from .._state.state import State, Version
from .._storage import FlatBuffer, clear_padding, refresh
from .folder import NOTE, Claim, check_shared, may_keep, partial, reading, unfinished
from .manifest import (
    ALLOWED,
    METADATA,
    SAVED,
    SavedTensor,
    Tensor,
    about_of,
    as_there,
    by_place,
    check_same,
    content,
    file_of,
    fits,
    named,
    names_of,
    own_place,
    parts_of,
    plain_names,
    read_note,
    share_residuals,
    sizes,
    tensors_of,
    unchanged,
    with_residuals,
    without_places,
)
from .pieces import complete, read_recut, read_tensors, recut, write_tensors


class Saving(Future[Path]):
    """A save under way: a Future that knows whether the caller has seen how it ended, and how its rank waits."""

    def __init__(self, medium: Any) -> None:
        super().__init__()
        self.medium = medium
        self.owner = os.getpid()
        self.asked = False
        self.set_running_or_notify_cancel()  # it cannot be cancelled

    def result(self, timeout: float | None = None) -> Path:
        try:
            if timeout is None:
                self.medium.until_done(self)
            return super().result(timeout)
        finally:
            self.asked = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            if timeout is None:
                self.medium.until_done(self)
            return super().exception(timeout)
        finally:
            self.asked = self.done()


_saving: weakref.WeakKeyDictionary[Runtime, Saving] = weakref.WeakKeyDictionary()


def pending(run: Runtime) -> Saving:
    """A new save of a mesh, after `finish`."""
    _saving[run] = saving = Saving(run.medium)
    return saving


def finish(run: Runtime) -> None:
    """Wait for the save under way.

    Raises:
        CheckpointError: it has failed, and nobody has asked.
    """
    saving = _saving.get(run)
    if saving is None or saving.owner != os.getpid():
        return
    run.medium.until_done(saving)
    error = Future.exception(saving)  # an interrupt here changes nothing
    del _saving[run]
    if error is not None and not saving.asked:
        raise CheckpointError(f"the save before this one has failed: {type(error).__name__}: {error}") from error


def settled() -> None:
    """Wait for the saves of all meshes, however they end."""
    for saving in [*_saving.values()]:
        if saving.owner == os.getpid():
            saving.medium.until_done(saving)


def blank(value: Any) -> Any:
    """Memory like a FlatBuffer's, for what a checkpoint has: zeros in the padding, which none has, and in counts, which
    it may lack. Zeros like other tensors."""
    if not isinstance(value, FlatBuffer):
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
    lacked = value.bucket.by_leaf or any(one is Partial for _, one in value.states)  # residuals
    if lacked or not value.local.is_floating_point():
        return value.but(zeros_as(value.local))
    made = value.but(empty_as(value.local))
    clear_padding([made])
    return made


def made_for(
    joint: Joint, path: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], spec: Spec, optimizer: Any
) -> State:
    """A State of zeros with the leaves, buffers and extras of a checkpoint.

    Raises:
        TreeError: the parameters were another kind of tree, or extras have keys that are no text. SpecError: a spec
        that does not fit the leaves; ranks that gave different ones.

    Collective: exchanges of digests on the host, as `shard`.
    """

    def look() -> tuple[Any, list[Topic]]:
        try:
            infos, paths, treedef = _leaves(path, note)
            buffers = _tree(path, "buffers", note, there)
            local = note["local_buffers"]
            if unknown := sorted({*local} - {*flatten(buffers)[0]}):
                raise ValueError(f"local_buffers {unknown[:3]}")
        except FsdpError:  # some are ValueErrors, too
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path / NOTE} has leaves, buffers or a tree that no save has written "
                f"({type(error).__name__}: {error})."
            ) from error
        layout, topics = given(infos, paths, spec, as_optimizer(optimizer), 0)
        return (infos, paths, treedef, buffers, local, layout), topics

    infos, paths, treedef, buffers, local, layout = agree(joint, "what is given", look)
    spec, layout = resolve_transport(spec, infos, paths, layout)
    state = build(joint, layout, spec, optimizer, treedef, None, buffers, local, 0, src=note["src"])
    return state._evolve(extras=_tree(path, "extras", note, there, state))


def with_extras(path: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], state: State) -> State:
    """The state with extras of the checkpoint's names: its own, and zeros for those that it lacks."""
    if note["extras"] is None or not all(keys for keys, _ in note["extras"]):
        return state
    names = {keys[0] for keys, _ in note["extras"]}
    filled = [name for name, tree in state.extras.items() if any(node.value is not None for node in nodes_of(tree))]
    left = [name for name in filled if name not in names]
    if left:
        warnings.warn(
            f"load: {path} has no {', '.join(f'extras[{name!r}]' for name in left)}, which the given state has. The "
            "state that is loaded has the extras of the checkpoint.",
            stacklevel=2,
        )
    own = {name: value for name, value in state.extras.items() if name not in left}
    return state._evolve(extras={**own, **_tree(path, "extras", note, there, state)})


def _leaves(path: Path, note: Mapping[str, Any]) -> tuple[list[LeafInfo], tuple[str, ...], pytree.TreeSpec]:
    if note["tree"] is None:
        raise TreeError(
            f"load: {path} has parameters in a tree that is not of dicts, lists and tuples. Give a state of that tree: "
            "load(folder, like=state)."
        )
    infos = [
        LeafInfo(name, tuple(one["shape"]), _dtype(one["dtype"]), one["trainable"], tuple(one["ties"]))
        for name, one in note["leaves"].items()
    ]
    paths, _, treedef = flatten(_nested(note["tree"]))
    if [*paths] != note["paths"] or {*paths} != {p for info in infos for p in (info.path, *info.aliases)}:
        raise ValueError(f"paths {paths[:3]} in the tree, {note['paths'][:3]} beside it")
    return infos, paths, treedef


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _nested(tree: Any) -> Any:
    if isinstance(tree, int):
        return tree
    ((kind, items),) = tree.items()
    if kind == "dict":
        return {key: _nested(value) for key, value in items}
    return {"list": list, "tuple": tuple}[kind](map(_nested, items))


def _tree(
    path: Path, field: str, note: Mapping[str, Any], there: Mapping[str, Tensor], state: State | None = None
) -> dict[str, Any]:
    """Extras or buffers, of zeros; of extras those that the state lacks."""
    if note[field] is None:
        raise TreeError(
            f"load: {path} has {field} whose keys are not all text. Give a state that has them: "
            "load(folder, like=state)."
        )
    made: dict[str, Any] = {}
    placed = by_place(there)
    spelt = dotted([[pytree.MappingKey(key) for key in keys] for keys, _ in note[field]])  # as it was saved
    for (keys, kind), own in zip(note[field], spelt, strict=True):
        if state is not None and keys[0] in state.extras:
            continue
        name = ".".join(filter(None, (field, ".".join(keys) if kind == "leaf" else own)))
        found: Any
        if kind == "leaf":
            assert state is not None
            alike = {b.bucket.name: _optimizer_like(b, name, placed, there) for b in state.main.values()}
            found = {bucket: like for bucket, like in alike.items() if like is not None}
        else:
            one = there[placed[name]]
            found = torch.zeros(one.shape, dtype=one.dtype, device=None if state is None else state.count.device)
        at = made
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = found
    return made


def _optimizer_like(
    main: FlatBuffer, name: str, placed: Mapping[str, str], there: Mapping[str, Tensor]
) -> FlatBuffer | None:
    """Zeros for what a tree of the checkpoint has for a bucket's leaves; None if it has nothing."""
    for leaf in main.bucket.leaves:
        key = placed.get(f"{name}.{leaf.path}")
        if key is not None:
            return main.but(torch.zeros_like(main.local, dtype=there[key].dtype))
    return None


def with_replicas(
    path: Path, note: Mapping[str, Any], state: State, there: Mapping[str, Tensor], allow: Collection[str]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names that this state has for them.

    Raises:
        SpecError: it has them by other ranks, and that is not allowed; or they differ.
    """
    by_leaf: dict[str, list[str]] = {}
    without_place = without_places(note)
    for name in there:
        by_leaf.setdefault(without_place(name), []).append(name)
    wanted = names_of(state, there)
    lacking = [name for name in wanted if name not in there]
    found = dict(there)
    turns: Counter[str] = Counter()
    for name in lacking:
        alike = by_leaf.get(without_place(name), [])
        if not alike or ("optimizer" in allow and name.startswith("opt.")):
            continue  # it is missing in any case, or not wanted
        if "replicas" not in allow:
            raise SpecError(
                f"load: {path} has {alike[0]!r}{f' and {len(alike) - 1} more' if len(alike) > 1 else ''}, and this "
                f"state wants {name!r}: other ranks have leaves of their own. Where they are replicas that hold the "
                "same, say load(..., allow=['replicas']); else give the mesh the axes with which it was saved."
            )
        other = next((one for one in alike if _content(there[one]) != _content(there[alike[0]])), None)
        source = there[alike[0]]
        if other is not None and name.startswith("residual."):  # each replica has sent gradients of its own
            if name == without_place(name):  # one state goes on for all of them
                source = _end_to_end([there[one] for one in alike])
            else:
                source = there[alike[turns[without_place(name)] % len(alike)]]
                turns[without_place(name)] += 1
        elif other is not None:
            remedy = "Average the replicas before they are saved"
            if name.startswith("opt."):
                remedy = "Begin with a new optimizer state (allow=['replicas', 'optimizer'])"
            raise SpecError(
                f"load: {path} has {alike[0]!r} and {other!r}, which differ, and this state wants {name!r}. {remedy}, "
                "or give the mesh the axes with which it was saved."
            )
        found[name] = source
        for other in alike:
            if other not in wanted:
                found.pop(other, None)
    return found


def _end_to_end(tensors: list[Tensor]) -> Tensor:
    """Several flat tensors as one."""
    at, chunks = 0, []
    for one in tensors:
        chunks += [chunk._replace(start=chunk.start + at, stop=chunk.stop + at) for chunk in one.chunks]
        at += one.numel
    return Tensor(tensors[0].dtype, (at,), chunks)


def _content(tensor: Tensor) -> object:
    """What of a tensor can be compared without reading it: its chunks' places and the sums of their blocks."""
    return tensor.dtype, tensor.shape, [(chunk.start, chunk.stop, chunk.sums[1:]) for chunk in tensor.chunks]


@alone
def save(state: State, folder: str | os.PathLike[str], *, max_to_keep: int | None = None) -> Path:
    """Write a state between steps to `folder`, for any strategy and world to read. Never consumes it.

    The folder appears only when it is complete and on disk; an interrupted save leaves a folder `NAME.partial-...`,
    which the next save of that name removes. Main weights, optimizer state, buffers, count, rng and extras are written,
    each element once; compute copies are not.

    What is sharded is kept in FlatBuffers. A plain tensor in the optimizer state or the extras is written once and
    given to all ranks, so all ranks must hold the same (where each rank has experts of its own: all ranks with the
    same experts).

    Args:
        folder: on a file system that all ranks share.
        max_to_keep: how many checkpoints stay, the newest ones by their steps, of those beside it whose names differ
            from its by the last number in them (step_10, step_20). One that is being read stays, too, and all do on a
            file system without locks. None: all stay.

    Raises:
        ValueError: max_to_keep below 1, or a name without a number. StaleStateError: a state in the middle of a step.
        FileExistsError: the folder exists, or another save has taken the name meanwhile. TreeError: an optimizer state
        or extra that is no tensor, or a plain tensor that differs between ranks. CheckpointError: ranks come with
        different states or folders, or do not see the same; or an `async_save` before this has failed. OSError: what a
        rank met, as a full disk. If one rank raises, all do.

    Collective: every rank of the mesh calls it.

    Example: `fsdp.save(state, f"checkpoints/step_{n}")`.
    """
    with saving("save", state, folder) as one:
        _write(one, state, max_to_keep)
    return as_path("folder", folder)


class OpenSave(NamedTuple):
    """A save under way.

    Attributes:
        path: of the folder that is written. claim: what the first rank holds it by, which has it appear.
    """

    joint: Joint
    final: Path
    token: str
    path: Path
    claim: Claim | None


@contextmanager
def saving(what: str, state: State, folder: str | os.PathLike[str]) -> Iterator[OpenSave]:
    """Within, the ranks of a state write a folder together. In the end what has not appeared is removed.

    Raises:
        CheckpointError: ranks come with different states or folders. If one rank raises, all do.

    Collective: exchanges on the host.
    """
    run = runtime_of(state.spec.mesh)
    with Joint(run, what) as joint:
        final, token = same_folder(joint, folder, state)
        claim = Claim(final, token) if run.rank == 0 else None
        try:
            yield OpenSave(joint, final, token, partial(final, token), claim)
        finally:
            if claim is not None:
                claim.drop()


def _write(one: OpenSave, state: State, keep: int | None) -> None:
    joint, final, token, path, claim = one
    run = joint.run
    parts: list[SavedTensor] = []
    about: dict[str, Any] = {}

    def prepare() -> tuple[str, dict[str, str]]:
        about.update(told_of(joint, state, final, token, keep))
        parts.extend(parts_of(state))
        return own_place(state), {part.name: content(part) for part in parts if part.plain}

    def begin() -> None:
        if claim is not None:
            claim.make()

    def write() -> Any:
        check_shared("save", path, run.ranks, run.rank)
        return write_tensors(path, file_of(run.rank), token, chosen) if chosen else ([], 0)

    def end() -> None:
        if claim is not None:
            complete(claim, about, [one for some, _ in written for one in some], [n for _, n in written], keep)

    plain = plain_names("save", run.ranks, run.rank, joint(prepare, "contents"))
    named_by = [(part, *(plain[part.name] if part.plain else (part.name, part.writes))) for part in parts]
    chosen = [part._replace(name=name) for part, name, writes in named_by if writes]
    joint(begin, "claim")
    written = joint(write, "tensors")
    joint(end, "end")


def told_of(joint: Joint, state: State, final: Path, token: str, keep: int | None) -> dict[str, Any]:
    """What `layout.json` says of a state that is about to be saved, once it may be.

    Raises:
        CheckpointError: the save before has failed. ValueError: `max_to_keep`. StaleStateError: no state between steps.
    """
    finish(joint.run)
    may_keep(final, keep)
    state._resting(joint.what)
    return {**about_of(state), "step": state.steps, "save": token}


@outside_inference
def load(
    folder: str | os.PathLike[str],
    spec: Spec | None = None,
    optimizer: Any = None,
    *,
    like: State | None = None,
    allow: Collection[str] = (),
) -> State:
    """Read what `save` wrote into a new state, whatever strategy, number of ranks, units and dtypes wrote it.

    Each rank reads its runs of the leaves and no more. Files are not trusted: nothing in them is run, and damage is
    found before or while they are read. Compute copies are made anew.

    Args:
        folder: what was given to `save`.
        spec, optimizer: as for `shard`. The parameters are the tree of the checkpoint.
        like: in the place of these a state with the same leaves, as `init` or `shard` gives; it may be one that `step`
            consumed, or that an error left half updated, and is not changed. Numbers of its optimizer (lr, betas) may
            be others than those of the checkpoint. Extras are those of the checkpoint, also where this state has not
            had them yet; it warns of others. Needed where the parameters are no tree of dicts, lists and tuples.
        allow: what may be another than when it was saved: "average"; "optimizer", whose state then begins
            anew; "replicas", which ranks have leaves of their own: those there must hold the same.

    Returns:
        a State of its own lineage, between steps. Main weights and the optimizer's state have the same bits as those
        that were saved; floating ones are converted where `Precision.main` is another.

    Raises:
        FileNotFoundError: no complete checkpoint there. TreeError: other leaves, ties or shapes, buffers of other
        names, or other trees within extras of one name. SpecError: another `average` or kind of optimizer that `allow`
        does not name. CheckpointError: it is damaged (the file is named), or ranks name or see different checkpoints.
        If one rank raises, all do.

    Collective: every rank calls it.

    Example:
        >>> folder = fsdp.save(state, "checkpoints/step_1000")
        >>> state = fsdp.load(fsdp.latest_checkpoint("checkpoints"), fsdp.Spec(mesh), fsdp.adamw(lr=3e-4))
    """
    if isinstance(folder, State):
        raise SpecError("load(folder, like=state): the folder comes first.")
    if (spec is None) == (like is None) or (like is not None and optimizer is not None):
        raise SpecError("load: expected either a spec (and an optimizer), or like=state, which has both.")
    if isinstance(allow, str) or any(what not in ALLOWED for what in as_names("load(allow)", allow)):
        raise SpecError(f"load(allow={allow!r}): expected some of {', '.join(map(repr, ALLOWED))}.")
    if like is not None:
        return _like(like, folder, allow)
    spec = needs_spec("load", cast(Any, spec))
    with _opened(spec, folder) as (joint, path, note, there):
        state = made_for(joint, path, note, there, spec, optimizer)
        return _filled(joint, path, note, there, state, True, allow)


def _load_like(state: State, folder: str | os.PathLike[str], allow: Collection[str]) -> State:
    with _opened(state.spec, folder) as (joint, path, note, there):
        return _filled(joint, path, note, there, state, False, allow)


_like = alone(_load_like, "load")


@contextmanager
def _opened(
    spec: Spec, folder: str | os.PathLike[str]
) -> Iterator[tuple[Joint, Path, dict[str, Any], dict[str, Tensor]]]:
    """A checkpoint that all ranks read jointly, and what its `layout.json` says. Nobody prunes it within."""
    with Joint(runtime_of(spec.mesh), "load") as joint, torch.no_grad(), ExitStack() as held:
        path, _ = same_folder(joint, folder)
        joint(lambda: held.enter_context(reading(path)), "reading")
        yield joint, path, *_looked(joint, path)


def _looked(joint: Joint, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `layout.json` says, the same on all ranks."""
    found: list[Any] = []

    def look() -> str:
        note = read_note(path)
        sizes(path, note)
        unchanged(path, note)
        found.extend((note, tensors_of(path, note)))
        return str(note["digest"])

    run, seen = joint.run, joint(look, "notes")
    other = next((rank for rank, digest in enumerate(seen) if digest != seen[0]), None)
    if other is not None:
        raise CheckpointError(
            f"load: {path} is not the same for all ranks: {NOTE} of rank {run.ranks[0]} has the digest "
            f"{seen[0][:16]}, that of rank {run.ranks[other]} {seen[other][:16]}. Load from a folder that all ranks "
            "share, while nobody replaces it."
        )
    return found[0], found[1]


def _filled(
    joint: Joint,
    path: Path,
    note: dict[str, Any],
    all_there: dict[str, Tensor],
    state: State,
    own: bool,
    allow: Collection[str],
) -> State:
    """A new state of this kind with what the checkpoint has; in the memory of the given one, if it is `own`."""
    made: list[State] = []

    def read() -> None:
        check_same(path, note, state, allow)
        fresh = as_there(state, all_there)
        if not own:
            fresh = with_extras(path, note, all_there, fresh)
        placed, again = recut(path, note, fresh, all_there)
        there = with_replicas(path, note, fresh, placed, allow)
        if not own:
            whole = {"is_leaf": lambda x: isinstance(x, FlatBuffer)}
            fresh = fresh._evolve(**{name: pytree.tree_map(blank, getattr(fresh, name), **whole) for name in SAVED})
        chosen, anew = fits(path, note, there, fresh, named(fresh, there), allow)
        chosen, left = with_residuals(chosen, there)
        read_tensors(path, note, there, [part for part in chosen if part.name not in again])
        cut = [part for part in chosen if part.name in again]
        read_recut(path, note, all_there, again, cut, joint.run.coordinate)
        share_residuals(fresh, left)
        if hasattr(state.optimizer, "placed") and not anew:
            fresh = fresh._evolve(opt=state.optimizer.placed(fresh.opt))
        if anew:
            main = {name: fresh.main[name] for name in state.layout.trainable}
            taken = fresh.count if int(fresh.count) else None
            fresh = fresh._evolve(opt={} if state.optimizer is None else initial(state.optimizer, main, taken))
        made.append(fresh)

    joint(read, "tensors")
    fresh, steps = made[0], int(note["step"])
    weights: dict[str, Any] = {}
    scales: dict[str, Any] = {}
    if state.weights:
        weights, scales = (pytree.tree_map(empty_as, tree) for tree in (state.weights, state.scales))
        refresh(fresh.main, weights, scales)
    lineage = state.version.lineage.heir(joint.run, state.layout, state.spec, steps, fresh.count)
    lineage.enroll()
    return fresh._evolve(weights=weights, scales=scales, grads={}, version=Version(lineage, 0))._prepared()


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint (by its step) among the subfolders of `folder`, or None.

    A damaged one, as far as its `layout.json` and the sizes of its files show, is left out with a warning that names
    it; one that is under way, without.

    Raises:
        CheckpointError: `folder` is a checkpoint itself. NotADirectoryError: a file. SpecError: no path.
    """
    above = as_path("latest_checkpoint(folder)", folder)
    found: list[tuple[int, str, dict[str, Any]]] = []
    if os.path.lexists(above / NOTE):
        raise CheckpointError(f"latest_checkpoint: {above} is a checkpoint itself. Give the folder that it lies in.")
    there = sorted(above.iterdir()) if above.exists() else []
    for path in there:
        if unfinished(path) or not any(os.path.lexists(path / name) for name in (NOTE, METADATA)):
            continue
        try:
            note = read_note(path)
            found.append((note["step"], path.name, note))
        except (CheckpointError, OSError) as error:
            _left_out(path, error)
    for _, name, note in sorted(found, key=lambda item: item[:2], reverse=True):
        try:
            sizes(Path(folder, name), note)
            return Path(folder, name)
        except (CheckpointError, OSError) as error:
            _left_out(Path(folder, name), error)
    return None


def _left_out(path: Path, error: Exception) -> None:
    warnings.warn(f"latest_checkpoint: {path} is left out: {error}", stacklevel=3)


def same_folder(joint: Joint, folder: str | os.PathLike[str], state: State | None = None) -> tuple[Path, str]:
    """The folder that all ranks name, for the state that all save there, and the first one's token. Lanes on which
    ranks stopped apart are drained."""
    run, what, said = joint.run, f"{joint.what}(folder)", "a path"
    if state is not None:
        state.version.lineage.come(state.version.serial)
    number = 0 if state is None else state.version.lineage.identity
    if not folder and joint.what == "load":
        said = "a path (latest_checkpoint gives None where there is no checkpoint)"
    while True:
        counts = {name: log.count for name, log in run.issued.items() if name != "control"}
        token = uuid.uuid4().hex[:12]
        try:
            told = joint(
                lambda: (os.path.abspath(as_path(what, folder, said)), token, counts, number),  # noqa: B023
                "folder",
            )
            break
        except RestartError:  # a peer began anew; nothing of this call has happened
            if joint.known:
                raise
    for rank, (name, *_, theirs) in enumerate(told):
        if theirs != told[0][3]:
            raise CheckpointError(
                f"{joint.what}: rank {run.ranks[0]} and rank {run.ranks[rank]} came with two states, of which each "
                "would be written in part. Save the same one on every rank."
            )
        if name != told[0][0]:
            raise CheckpointError(
                f"{joint.what}: rank {run.ranks[0]} names the folder {told[0][0]}, rank {run.ranks[rank]} names "
                f"{name}. Give every rank the same."
            )
    if any(theirs != told[0][2] for *_, theirs, _ in told):
        run.restart()
    return Path(told[0][0]), told[0][1]
