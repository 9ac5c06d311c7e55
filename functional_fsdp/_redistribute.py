"""States made of states that live: of another spec (redistribute, freeze), or with other trees in them (replace).

`redistribute`: a state into another strategy, mesh shape, precision, units, transport or schedule, without files.

for each bucket of the old layout        one whole bucket at a time
    all-gather                           every rank has it whole
    copy the runs of its leaves          into the buckets of the new layout, which are made as they are needed
    let go of the old shard              so that memory stays that of the state and two units

`free_arena` gives back the memory that eager steps keep, where a state goes on by compiled ones.

`freeze`, `unfreeze`: which leaves train, changed on a state that lives.

leaf            main weights    what the optimizer keeps
trains on       same bits       same bits
is frozen       same bits       dropped: no gradient, no update, no memory but for the weights
is unfrozen     same bits       as `optimizer.init` makes it; its count of steps begins at zero

`replace_...`: another tree in a State: other weights in a lineage of its own, other gradients, other extras.

                  the new State                                   the old one
replace_params    buffers of its own, which it may train on       stays as it is, and usable
replace_grads     goes on in the same step                        is consumed
replace_extras    the same state of the same step                 is the same state
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch

from ._axes import cut_of
from ._common.calls import alone, arrive, guard, ordinary, traced_as, uninterruptible, verb
from ._common.device import checksum, clone_as, empty_as, host_memory
from ._common.errors import RestartError, ScheduleError, SpecError, TreeError, as_names, expect
from ._common.torch_names import pytree
from ._common.tree import dotted, flatten, match
from ._engine.gathers import resolve_transport
from ._export import come_to_look, gather_leaves, looking, refuse_blocks, whole_leaves
from ._optim.optimizer import initial
from ._plan.layout import Bucket, Layout, Leaf, LeafInfo
from ._plan.plan import keeps_copy
from ._plan.route import Partial, Replicated, all_axes, states_of
from ._runtime.agreement import Joint, Topic, agree
from ._runtime.runtime import Runtime, runtime_of
from ._spec.spec import Spec
from ._state.shard import given, needs_spec, no_residual, read_sums
from ._state.state import Lineage, State, Version
from ._storage import (
    FlatBuffer,
    LeafShard,
    PackedWeight,
    clear_padding,
    leaf_shards,
    leaves_of,
    no_scales,
    refresh,
    stored_as,
    zeros,
)
from ._verbs import finish_reductions


@alone
def free_arena(state: State) -> State:
    """Give back what eager steps keep between steps: the arena where it stays (on CPUs, and where ranks share it or
    NCCL knows it), staging, and what is known of the order of use. The next eager step makes it again.

    Args:
        state: a state between steps. It stays valid, and is returned.

    On GPUs with "collective" nothing stays between steps, and nothing is to be given back. A window of NCCL's is kept
    for the next state of the mesh.

    Raises:
        StaleStateError: a consumed state, or one in the middle of a step. ScheduleError: a rank does something else.

    Collective: every rank calls it; an exchange on the host.

    Example: `state = fsdp.free_arena(state)`, before compiled steps.
    """
    lineage = state.version.lineage
    state._resting("free_arena")
    lineage.enter(state.version.serial, "free_arena")
    if lineage.executor is not None:
        lineage.executor.settle()
    lineage.runtime.everyone(True, "free_arena")  # nobody reads another's arena any more
    lineage.drop_executor()
    return state


Buffers = dict[str, FlatBuffer]


@alone
@torch.no_grad()
def redistribute(state: State, spec: Spec, *, allow: Collection[str] = ()) -> State:
    """The same state by another spec, on the same ranks: shards [n / ranks] -> shards [n' / ranks']. Consumes `state`.

    Main weights and what the optimizer and extras keep for each leaf have the same bits afterwards, or are converted
    where `Precision.main` is another. Compute copies are made anew.

    Args:
        state: a state between steps. If this is stopped after ranks have agreed, it is lost.
        spec: another strategy, shape of the mesh, precision, units, labels, transport or schedule.
        allow: "average", where that may be another, and so the size of gradients; "replicas", where ranks that had
            leaves of their own, and hold the same, no longer have, or the other way round.

    Returns:
        a State between steps, of its own lineage, with the same number of steps.

    Memory: the state and two units. Views of the old one's shards stay what they are, and keep their memory.

    Raises:
        SpecError: the mesh has other ranks; experts would lie along other axes; another `average`; a leaf that trains
            by one spec only; what `shard` says of a spec. TreeError: the optimizer or the extras keep FlatBuffers
            otherwise than in dicts by bucket. StaleStateError: a consumed state, or one in the middle of a step.
        On every rank, and before anything has changed. RestartError: another rank was stopped in it.

    Collective: every rank calls it. Exchanges on the host, of digests and in the end; an all-gather a bucket and
    sharded axis, for each tree.

    Example:
        >>> state = fsdp.redistribute(state, fsdp.Spec(mesh, fsdp.ddp("data")))  # for evaluation
    """

    def arranged(new: State) -> State:
        mover = Mover(state, new.layout, new.spec, False)
        return new._evolve(opt=_optimizer_state(mover, new, state.opt, {*state.layout.trainable}))

    return moved(state, spec, allow, "redistribute", arranged if _arranges(state) else None)


def _arranges(state: State) -> bool:
    """Whether the optimizer keeps what it keeps in buckets of its own."""
    return getattr(state.optimizer, "arranges", False)


def moved(
    state: State, spec: Spec, allow: Collection[str], verb: str, settled: Callable[[State], State] | None,
    trains: bool = False,
) -> State:  # fmt: skip
    """`redistribute`, or what this verb has of it.

    Args:
        settled: what is left to be done to the state. trains: leaves may train by one spec only; then there is no
            optimizer's state in it.
    """
    state._resting(verb)
    allow = as_names("redistribute(allow)", allow)
    spec, run = needs_spec("redistribute", spec), runtime_of(state.spec.mesh)

    def look() -> tuple[Any, list[Topic]]:
        new = runtime_of(spec.mesh)
        if {*new.ranks} != {*run.ranks}:
            raise SpecError(
                f"redistribute: the spec's mesh has the ranks {new.ranks}, the state's {run.ranks}. Give a mesh of the "
                "same ranks; for others save the state, and load it there."
            )
        if spec.average != state.spec.average and "average" not in allow:
            raise SpecError(
                f"redistribute: the state has average={state.spec.average!r}, the spec average={spec.average!r}: "
                "gradients would be of another size. Where that is meant, say allow=['average']."
            )
        infos = leaf_infos(state.layout, state.spec)
        layout, topics = given(infos, state.layout.paths, spec, state.optimizer, 0)
        return (infos, layout), topics

    with _all_or_none(verb, state.version.lineage) as together, Joint(run, verb) as joint:
        joint(lambda: None, "begun")  # who parted meets here those that are not there to make another mesh's groups
        infos, layout = agree(joint, "what is given", look)
        together(runtime_of(spec.mesh))
        spec, layout = resolve_transport(spec, infos, state.layout.paths, layout)
        mover = Mover(state, layout, spec, "replicas" in allow, trains)
        kept = joint(lambda: (mover.check(), mover.run.parted), "what is kept")
        mover.compare([theirs for theirs, _ in kept])
        if any(parted for _, parted in kept):  # on the new mesh: before anything has changed
            mover.run.restart()
        new = _made(free_arena(state), mover, verb, trains)
        if settled is not None:
            with looking(new):
                new = settled(new)
        mover.run.everyone(True, f"{verb}, done")
        return _over(state, new, f"{verb}, done by all")


@contextmanager
def _all_or_none(verb: str, lineage: Lineage) -> Iterator[Callable[[Runtime], None]]:
    """Within, ranks wait for each other on the lineage's mesh, and on what is given to what this yields. Whoever is
    stopped says so on all: else it would meet its peers on one, while they wait for it on another."""
    runs: list[Runtime] = []

    def together(run: Runtime) -> None:
        if run.size > 1:
            runs.append(run)
            run.stand("moving")

    try:
        together(lineage.runtime)
        yield together
        for run in runs:
            run.stand("")
    except BaseException as error:
        for run in runs:
            run.withdraw(error)
        if isinstance(error, RestartError) and not str(error).startswith(verb):
            raise RestartError(
                f"{verb}: another rank was stopped in it. "
                f"{lineage.broken or 'Nothing is lost: make the same call again on every rank.'}"
            ) from None
        raise


@uninterruptible
def _over(state: State, new: State, what: str) -> State:
    """Every rank has made the new state: the old one is consumed, here as there. An interrupt waits."""
    guard()
    new.version.lineage.runtime.everyone(True, what)
    state.version.lineage.moved_to(new)
    arrive(state.version.lineage.others_begun())
    return new


def _made(state: State, mover: Mover, verb: str, trains: bool) -> State:
    """The state in other buckets. The one that is given has nothing any more."""
    lineage, layout, spec = state.version.lineage, mover.layout, mover.spec
    with looking(state):
        lineage.touched()
        lineage.moves(verb)
        main = mover.move(state.main)
        opt = {} if _arranges(state) else pytree.tree_map(mover.node, state.opt, is_leaf=is_buffers)
        mover.may_leave = False
        extras = pytree.tree_map(mover.node, state.extras, is_leaf=is_buffers)
        mover.may_leave = True
    if hasattr(state.optimizer, "placed") and not trains and not _arranges(state):
        opt = state.optimizer.placed(opt)
    copies = {name: mover.made(bucket.gathered, "weights", bucket.gather) for name, bucket in layout.buckets.items()
              if keeps_copy(bucket)}  # fmt: skip
    scales = {name: no_scales(bucket, mover.run.device) for name, bucket in layout.buckets.items() if bucket.in_float8}
    refresh(main, copies, scales)
    new = state.version.lineage.heir(mover.run, layout, spec, state.steps, state.count)
    new.enroll()
    static = (spec, layout, state.optimizer, state.treedef, Version(new, 0))
    left = _residual(state, layout, spec, mover.run)
    return State(
        main, copies, scales, {}, opt, state.buffers, state.count, state.rng, extras, left, *static
    )._prepared()


def _residual(state: State, layout: Layout, spec: Spec, run: Runtime) -> Buffers:
    """What packing has lost of gradients, where they go by the new layout: ranks stay the same, and so does what their
    residuals add to a step's gradients. Of leaves without feedback there it is dropped; of new ones it is zero.

    Collective: where only a second axis is packed an all-gather a bucket, and a reduction a bucket.
    """
    made = no_residual(layout, spec, run.device)
    mine: dict[str, torch.Tensor] = {}
    for buffer in state.residual.values():
        mine |= _own_summands(buffer, spec.average)
    for buffer in made.values():
        whole = buffer.local
        if buffer.states != all_axes(buffer.bucket, Partial):
            whole = buffer.local.new_zeros(buffer.bucket.numel, dtype=torch.float32)
        every = FlatBuffer(whole, buffer.bucket, all_axes(buffer.bucket, Partial), spec.mesh)
        for leaf, _, local in leaf_shards(every):
            if leaf.path in mine:
                local.copy_(mine[leaf.path].reshape(-1))
        if whole is not buffer.local:
            buffer.local.copy_(every.redistribute(buffer.states, average=spec.average).local)
    return made


def _own_summands(buffer: FlatBuffer, average: str) -> dict[str, torch.Tensor]:
    """What this rank's gradients would have to be larger by, leaf by leaf, for a step's gradients to be as much larger
    as residuals make them."""
    run, done = runtime_of(buffer.mesh), [axis for axis, placed in buffer.states if placed is not Partial]
    whole = buffer.redistribute(tuple((axis, Replicated) for axis in buffer.sharded()))
    if done:  # it counts once
        count = prod(run.sizes[axis] for axis in done) if average == "mean" else 1
        first = not any(run.coordinate[axis] for axis in done)
        whole = whole.but(whole.local * count if first else torch.zeros_like(whole.local))
    return leaves_of(buffer.bucket, whole.local)


def leaf_infos(layout: Layout, spec: Spec) -> list[LeafInfo]:
    """The leaves from which a layout was made, with dtypes that give the same ones again."""
    ties: dict[str, list[str]] = {}
    for path, source in zip(layout.paths, layout.source, strict=True):
        ties.setdefault(source, []).extend([path] if path != source else [])
    at = {leaf.path: (leaf, bucket) for bucket in layout.buckets.values() for leaf in bucket.leaves}
    found = []
    for path in layout.paths:
        if path in at:
            leaf, bucket = at[path]
            precision = spec.precision_of(path, *ties[path])
            own = bucket.compute if (precision.compute or precision.main) is None else bucket.main
            own = own if leaf.form is None else leaf.form.dtype
            found.append(LeafInfo(path, leaf.whole, own, bucket.trainable, tuple(ties[path]), leaf.form))
    return found


def is_buffers(tree: Any) -> bool:
    """Whether this is what an optimizer keeps for each leaf: FlatBuffers by bucket."""
    return (
        isinstance(tree, dict)
        and bool(tree)
        and all(isinstance(b, FlatBuffer) and b.bucket.name == name for name, b in tree.items())
    )


class Mover:
    """From the buckets of one layout to those of another."""

    def __init__(self, state: State, layout: Layout, spec: Spec, replicas: bool, trains: bool = False) -> None:
        self.may_train = trains  # whether leaves may train in one layout only
        self.replicas = replicas  # whether ranks may have leaves of their own along other axes
        self.state, self.old, self.layout, self.spec = state, state.layout, layout, spec
        self.may_leave = True  # whether what is made may lie in the host's memory, as its placement says
        nodes = pytree.tree_leaves((state.main, state.opt, state.extras), is_leaf=lambda x: isinstance(x, FlatBuffer))
        self.often = Counter(id(node) for node in nodes)  # of one that is in two trees
        self.run: Runtime = runtime_of(spec.mesh)
        self.home = {leaf.path: bucket for bucket in layout.buckets.values() for leaf in bucket.leaves}
        self.label = {leaf.path: leaf.label for bucket in layout.buckets.values() for leaf in bucket.leaves}
        cuts = [
            {leaf.path: leaf.cuts for bucket in one.buckets.values() for leaf in bucket.leaves}
            for one in (self.old, layout)
        ]
        #: whether each rank has the same part of each leaf as before, if any leaf is cut along axes of the model's own
        self.stays_cut = not any(some for one in cuts for some in one.values()) or (
            cuts[0] == cuts[1] and state.spec.mesh == spec.mesh
        )

    def check(self) -> dict[str, int]:
        """Refuse what cannot be moved, before anything is. Returns what `compare` goes by."""
        state, before = self.state, runtime_of(self.state.spec.mesh)
        for bucket in self.old.buckets.values():
            for leaf in bucket.leaves:
                new = self.home[leaf.path]
                self._same_member(leaf)
                own = [_own(bucket, before), _own(new, self.run)]
                if own[0] != own[1] and not self.replicas:
                    raise SpecError(
                        f"redistribute: ranks have {leaf.path!r} of their own along {_said(own[0])}, and by the spec "
                        f"along {_said(own[1])}. Give its placement the data axes that leave the same ranks out; or, "
                        "where they are replicas that hold the same, say allow=['replicas']."
                    )
                if new.trainable != bucket.trainable and not self.may_train:
                    raise SpecError(
                        f"redistribute: {leaf.path!r} is {'trained' if bucket.trainable else 'frozen'} in this state, "
                        f"and {'trained' if new.trainable else 'frozen'} by the spec. Call "
                        "fsdp.freeze(state, pattern) or fsdp.unfreeze(state, pattern) first."
                    )
        for field in ("opt", "extras"):
            leaves = pytree.tree_leaves(
                getattr(state, field), is_leaf=lambda x: is_buffers(x) or isinstance(x, FlatBuffer)
            )
            for tree in leaves:
                if isinstance(tree, FlatBuffer):
                    raise TreeError(
                        f"redistribute: State.{field} has the FlatBuffer {tree!r} that lies in no dict by bucket, as "
                        "tree_map over main weights makes them. Leave it out: replace_extras(state, name=None)."
                    )
                if is_buffers(tree):
                    self._whole(field, tree)
        return self._sums()

    def _same_member(self, leaf: Leaf) -> None:
        """Refuse a leaf that another one of several optimizers would have by its new label."""
        whose = getattr(self.state.optimizer, "member_of", None)
        new = self.label[leaf.path]
        if whose is not None and whose(leaf.label) != whose(new):
            raise SpecError(
                f"redistribute: {leaf.path!r} has the label {leaf.label!r} in this state and {new!r} by the spec, and "
                "these have two optimizers (partition). Give the spec the labels that the state has."
            )

    def _sums(self) -> dict[str, int]:
        """What this rank holds of each leaf, as a checksum, by the place of it: ranks of one place share it then."""
        if not self.replicas:
            return {}
        found = {}
        for field in ("main", "opt", "extras"):
            nodes = pytree.tree_leaves(getattr(self.state, field), is_leaf=lambda x: isinstance(x, FlatBuffer))
            for i, node in enumerate(nodes):
                if not isinstance(node, FlatBuffer):
                    continue
                for leaf, first, local in leaf_shards(node):
                    run = f"{first} to {first + local.numel()}"
                    place = f"State.{field}, elements {run} of {leaf.path!r}, tensor {i}"
                    if local.numel():
                        number = int(checksum(local)) % (1 << 64)
                        found[f"{place} [{_own(self.home[leaf.path], self.run)}]"] = number
        return found

    def compare(self, told: list[dict[str, int]]) -> None:
        """Refuse ranks that hold different values in one place, where by the spec they would share them.

        Args:
            told: by rank, what `check` has returned.
        """
        seen: dict[str, tuple[int, int]] = {}
        for rank, sums in zip(runtime_of(self.state.spec.mesh).ranks, told, strict=True):
            for place, number in sums.items():
                first, other = seen.setdefault(place, (rank, number))
                if other != number:
                    raise SpecError(
                        f"redistribute: ranks {first} and {rank} hold different values, which they would share by the "
                        f"spec: {place.rpartition(' [')[0]}. Average the replicas first, or give the placement data "
                        "axes that leave them apart."
                    )

    def _whole(self, field: str, tree: Buffers) -> None:
        """Check that a tree has all leaves of each new bucket, or none; and that it lies as main weights do."""
        homes = self._homes(tree)
        looked: set[str] = set()
        for name, buffer in tree.items():
            if name not in self.old.buckets:  # of the optimizer's own
                continue
            for leaf in () if self.stays_cut else buffer.bucket.leaves:
                if leaf.cuts or self.home[leaf.path].cut:
                    refuse_blocks(buffer.bucket, leaf.path)
            if not buffer.bucket.by_leaf and buffer.states != states_of(self.old.buckets[name], "main"):
                raise TreeError(
                    f"redistribute: State.{field} has {buffer!r}, which is not placed as the main weights are. Make it "
                    "from main weights, or leave it out: replace_extras(state, name=None)."
                )
            first = {homes[leaf.path].name: leaf.path for leaf in reversed(buffer.bucket.leaves)}
            for home, path in () if buffer.bucket.by_leaf else first.items():
                if home in looked:
                    continue
                looked.add(home)
                lacks = next((one.path for one in homes[path].leaves if one.path not in homes), None)
                if lacks is not None:
                    raise TreeError(
                        f"redistribute: by the spec {path!r} and {lacks!r} are in one bucket, and a tree of "
                        f"State.{field} has the first of them only. Give both leaves such values, or other units."
                    )

    def _homes(self, tree: Mapping[str, FlatBuffer]) -> dict[str, Bucket]:
        """By path the new bucket of each leaf in a tree. Where a member of the optimizer keeps it, with the leaves that
        this one sees."""
        paths = [leaf.path for buffer in tree.values() for leaf in buffer.bucket.leaves]
        labels = _seen(self.state.optimizer, {self.label[path] for path in paths}, {*self.label.values()})
        return {path: self.home[path].only(labels) or self.home[path] for path in paths}

    def node(self, node: Any) -> Any:
        return self.move(node) if is_buffers(node) else node

    def move(self, tree: Mapping[str, FlatBuffer], into: Buffers | None = None) -> Buffers:
        """The same values in the new buckets. The old shards are let go.

        Args:
            into: the new buckets; of leaves that are in none of them nothing is kept. Old buckets of the optimizer's
                own are moved into such only.
        """
        found: Buffers = dict(into or {})
        homes = self._homes(tree)
        # by path what of a leaf lies in this rank's part of its new bucket
        mine: dict[str, LeafShard] = {s.leaf.path: s for b in found.values() for s in leaf_shards(b)}
        for name, buffer in tree.items():
            if name not in self.old.buckets:
                _move_stretches(buffer, mine)
                continue
            counts, every, old = buffer.bucket.by_leaf, buffer.bucket.every, self.old.buckets[name]
            values = gather_leaves(buffer) if self.stays_cut else whole_leaves(buffer)
            for leaf in buffer.bucket.leaves:
                bucket = homes[leaf.path]
                if bucket.name not in found and into is not None:
                    continue
                if bucket.name not in found:
                    same = buffer.local.dtype is old.main and not counts and every == 1
                    dtype = bucket.main if same else buffer.local.dtype
                    found[bucket.name] = self.made(bucket.counts if counts else bucket.blocks(every), "main", dtype)
                    mine |= {shard.leaf.path: shard for shard in leaf_shards(found[bucket.name])}
                there, first, local = mine[leaf.path]
                value = values[leaf.path]
                if leaf.form is not None or there.form is not None:
                    value = value if leaf.form is None else PackedWeight(value.reshape(-1), leaf.form)
                    value = stored_as(value, there.form)
                elif not self.stays_cut:
                    value = cut_of(value, there.cuts, self.run.coordinate)
                local.copy_(value.reshape(-1)[first : first + local.numel()])
            self.often[id(buffer)] -= 1
            if not self.often[id(buffer)]:
                buffer.__dict__["local"] = buffer.local.new_empty(0)
        return found if into else {name: found[name] for name in self.layout.buckets if name in found}

    def made(self, bucket: Bucket, kind: str, dtype: torch.dtype) -> FlatBuffer:
        """Zeros for this rank's shard of a bucket."""
        numel, device = bucket.numel // bucket.slices(kind), self.run.device
        stays = (bucket.on_host if kind == "main" else bucket.copy_on_host) and self.may_leave
        local = host_memory(numel, dtype, device) if stays else torch.zeros(numel, dtype=dtype, device=device)
        return FlatBuffer(local, bucket, states_of(bucket, kind), self.spec.mesh)


def _move_stretches(buffer: FlatBuffer, mine: Mapping[str, LeafShard]) -> None:
    """Leaves of a bucket of an optimizer's own, that lie whole in one slice each: a stretch of all slices at a time."""
    bucket, ranks = buffer.bucket, buffer.bucket.slices("main")
    size = bucket.numel // ranks
    for a in range(0, size, room := max(STRETCH // ranks, 1)):
        b = min(a + room, size)
        part = replace(bucket, leaves=(), numel=ranks * (b - a))
        stretch = FlatBuffer(buffer.local[a:b], part, buffer.states, buffer.mesh)
        whole = stretch.gather(buffer.local.new_empty(part.numel)).view(ranks, b - a)
        for leaf in [leaf for leaf in bucket.leaves if leaf.path in mine]:
            owner, at = divmod(leaf.offset, size)
            _, first, local = mine[leaf.path]
            i, j = max(a - at, first), min(b - at, leaf.numel, first + local.numel())
            if i < j:
                local[i - first : j - first].copy_(whole[owner, i + at - a : j + at - a])


def _own(bucket: Bucket, run: Runtime) -> dict[str, tuple[int, int]]:
    """The axes along which ranks have leaves of their own, their sizes, and where this rank is."""
    return {axis: (run.sizes[axis], run.coordinate[axis]) for axis in bucket.unlike(run.sizes)}


def _said(own: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{axis!r} ({size} ranks)" for axis, (size, _) in own.items()) or "no axis"


def _seen(optimizer: Any, labels: set[str], every: set[str]) -> set[str]:
    """The labels, of these, that whoever keeps something for leaves of `labels` sees: all, but in a partition."""
    if not hasattr(optimizer, "member_of"):
        return every
    names = {optimizer.member_of(label) for label in labels}
    mine = {label for label in every if optimizer.member_of(label) in names}
    return _seen(optimizer.members[names.pop()], labels, mine) if len(names) == 1 else mine


STRETCH = 1 << 24  # elements, of all ranks' slices together
Trees = dict[str, dict[str, FlatBuffer]]  # by the path in the optimizer's state, and by bucket


@alone
@torch.no_grad()
def freeze(state: State, *patterns: str) -> State:
    """The same state with these leaves frozen. Consumes `state`.

    Args:
        state: a state between steps. If this is stopped after ranks have agreed, it is lost.
        patterns: shell globs over leaf paths, as `Spec(trainable=)` takes them: "blocks.0.*".

    Returns:
        a State between steps, of its own lineage, with the same number of steps, whose spec says what trains. Weights
        and moments of leaves that train on keep their bits; what the optimizer kept for the frozen ones is dropped.
        Gradients for them are no longer reduced. A checkpoint of it is loaded with the same spec, `state.spec`.

    Memory: the state, two units, and another copy of what the optimizer keeps.

    Raises:
        SpecError: a pattern that matches no leaf, or none given. TreeError: extras that are kept for leaves that train
            only. StaleStateError: a consumed state, or one in the middle of a step. On every rank.

    Collective: as `redistribute`.

    Example, a head first and then everything:
        >>> state = fsdp.freeze(state, "blocks.*")
        >>> state = fsdp.unfreeze(state, "blocks.*")
    """
    return _changed("freeze", state, patterns, False)


@alone
@torch.no_grad()
def unfreeze(state: State, *patterns: str) -> State:
    """The same state with these leaves trained. Consumes `state`. All else is as for `freeze`.

    The optimizer begins with these leaves: their moments are what its `init` makes, and an optimizer that counts steps
    by leaf (`adamw`) corrects their bias from zero steps on. A learning rate goes by the state's count, as ever.

    Example: `state = fsdp.unfreeze(state, "blocks.0.*")`.
    """
    return _changed("unfreeze", state, patterns, True)


def _changed(verb: str, state: State, patterns: tuple[str, ...], trains: bool) -> State:
    state._resting(verb)
    with Joint(runtime_of(state.spec.mesh), verb) as joint:
        joint(partial(_check, verb, state, patterns), "the patterns")
    rules: dict[str, Any] = dict.fromkeys(patterns, trains)
    spec = state.spec.with_trainable({**rules, **{p: on for p, on in state.spec.trainable if p not in rules}})

    def settled(new: State) -> State:
        mover = Mover(state, new.layout, new.spec, False, trains=True)
        return new._evolve(opt=_optimizer_state(mover, new, state.opt, {*state.layout.trainable}))

    return moved(state._evolve(opt={}), spec, (), verb, settled if state.optimizer is not None else None, trains=True)


def _check(verb: str, state: State, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        if not isinstance(pattern, str) or all(match(pattern, path) is None for path in state.layout.paths):
            paths = ", ".join(map(repr, state.layout.paths[:4]))
            raise SpecError(f"{verb}: the pattern {pattern!r} matches no leaf. Paths look like {paths}, ...")
    if not patterns:
        raise SpecError(f"{verb}: expected patterns of leaves, got none. All leaves are '*'.")


def _optimizer_state(mover: Mover, new: State, old: Any, trained: set[str]) -> Any:
    """What the optimizer makes for what trains now, with what it kept for leaves that trained before."""
    main = {name: new.main[name] for name in new.layout.trainable}
    fresh = initial(new.optimizer, main)
    made = _trees(fresh)
    before = {leaf.path for name in trained for leaf in mover.old.buckets[name].leaves}
    if hasattr(new.optimizer, "counting"):
        counted = {leaf.path for name in new.optimizer.counted(old) for leaf in mover.old.buckets[name].leaves}
        names = [
            name for name, buffer in main.items()
            if any(leaf.path in counted or leaf.path not in before for leaf in buffer.bucket.leaves)
        ]  # fmt: skip
        fresh = new.optimizer.counting(fresh, main, names)
    trees, kept = _trees(fresh), _trees(old)
    for buffer in (buffer for path, tree in trees.items() if path not in made for buffer in tree.values()):
        for leaf, _, local in leaf_shards(buffer):  # counts of missed steps: here all so far
            if leaf.path not in before:
                local.copy_(new.count)
    for path, tree in kept.items():
        if path in trees:
            mover.move(tree, into=trees[path])
    plain = {node.keys: node.value for node in nodes_of(old) if not isinstance(node.value, FlatBuffer)}
    leaves, treedef = pytree.tree_flatten(fresh, is_leaf=lambda x: isinstance(x, FlatBuffer))
    nodes = nodes_of(fresh)
    return treedef.unflatten([plain.get(node.keys, leaf) for node, leaf in zip(nodes, leaves, strict=True)])


def _trees(opt: Any) -> Trees:
    found: Trees = {}
    for node in nodes_of(opt):
        if isinstance(node.value, FlatBuffer):
            found.setdefault(node.path, {})[node.value.bucket.name] = node.value
    return found


class Node(NamedTuple):
    """A FlatBuffer or a plain leaf of a State's field.

    Attributes:
        path: dotted; of a FlatBuffer under its bucket's name that of the tree which it belongs to, as "mean".
    """

    keys: tuple[Any, ...]
    path: str
    value: Any


def nodes_of(tree: Any) -> list[Node]:
    """The leaves of a tree, FlatBuffers whole."""
    pairs, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, FlatBuffer))
    found = []
    for (keys, value), path in zip(pairs, dotted([keys for keys, _ in pairs]), strict=True):
        some = tuple(keys)
        if isinstance(value, FlatBuffer) and some and getattr(some[-1], "key", None) == value.bucket.name:
            some = some[:-1]
            path = dotted([some])[0] if some else ""
        found.append(Node(some, path, value))
    return found


Values = dict[str, torch.Tensor]


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ScheduleError(
        "replace_params and replace_grads make buffers, which a compiled step cannot. Call them outside torch.compile."
    )


# ---------------------------------------------------------------- weights


@verb(_refuse)
def replace_params(state: State, params: Any, *, optimizer: bool = True) -> State:
    """A State with other weights, in a lineage of its own: the inverse of `full_params`, and of `local_shards`.

    Args:
        state: any state that no step has consumed. It stays as it is, and is as usable as before.
        params: the tree that `full_params` gives, leaves of global shapes, the same values on every rank; or
            `{path: [n]}`, this rank's parts, as `local_shards` gives; or `{bucket: FlatBuffer}`, like `state.main`. In
            `Precision.main`, on any device. They are copied. Of tied leaves one path is enough.
        optimizer: False leaves out the optimizer and its state: for evaluation. `step` then refuses.

    Returns:
        a State between steps, without gradients. Its compute copies are those of the new weights; optimizer state,
        count, rng, buffers and extras are copies of the old one's: the two share nothing.

    Memory: as another State, less what `optimizer=False` leaves out (with adamw two thirds of main weights and
    optimizer state). Of whole leaves a rank copies its own part only.

    Raises:
        TreeError: another structure, shape or dtype; ranks that gave different values for what they share, or tied
            leaves that differ. On every rank, and before anything has changed. StaleStateError: a consumed state.

    Collective: every rank calls it. Checks on the host; an all-gather a bucket where a placement keeps compute copies.

    Example, an evaluation with averaged weights: `average = fsdp.replace_params(state, state.extras["ema"],
    optimizer=False)`.
    """
    state._valid("replace_params")
    lineage, run = state.version.lineage, runtime_of(state.spec.mesh)
    trees: dict[str, Any] = {}
    whole: Values | None = None

    def prepare() -> bool:
        nonlocal whole
        main = trees["main"] = zeros(state.main)[0]
        whole = _fill(state, params, main)
        trees.update(copies(state, optimizer))
        return whole is not None

    with Joint(run, "replace_params") as joint:
        come_to_look(state)
        lineage.touched()
        everywhere = all(joint(prepare, "what is given"))
        _compare(joint, trees["main"], whole if everywhere else None)
    return renewed(state, trees, optimizer)


def copies(state: State, optimizer: bool) -> dict[str, Any]:
    """Copies of what goes along with other weights, and room for their compute copies."""
    trees = {
        name: pytree.tree_map(_copied, getattr(state, name))
        for name in ("buffers", "count", "rng", "extras", "residual")
    }
    trees["opt"] = pytree.tree_map(_copied, state.opt) if optimizer else {}
    anew = {name: pytree.tree_map(empty_as, getattr(state, name)) for name in ("weights", "scales")}
    return {**trees, **anew}


def renewed(state: State, trees: dict[str, Any], optimizer: bool, steps: int | None = None) -> State:
    """A State of its own lineage with these trees, and so many steps. Collective: as `refresh`."""
    lineage, run = state.version.lineage, runtime_of(state.spec.mesh)
    with looking(state):
        refresh(trees["main"], trees["weights"], trees["scales"])
    steps = state.steps if steps is None else steps
    new = lineage.heir(run, state.layout, state.spec, steps, trees["count"])
    new.enroll()
    changes = {**trees, "grads": {}, "optimizer": state.optimizer if optimizer else None, "version": Version(new, 0)}
    return state._evolve(**changes)._prepared()


def _copied(x: Any) -> Any:
    return clone_as(x) if isinstance(x, torch.Tensor) else copy.deepcopy(x)


def _fill(state: State, params: Any, main: dict[str, FlatBuffer]) -> Values | None:
    """Copy what was given into `main`. Returns the leaves if all are whole."""
    if isinstance(params, Mapping) and params and all(isinstance(b, FlatBuffer) for b in params.values()):
        _fit("replace_params", params, main, {name: b.bucket.main for name, b in main.items()})
        for name, buffer in main.items():
            buffer.local.copy_(params[name].local.detach())
        clear_padding(main.values())  # a program's `tree_map` may have put something there
        return None
    values = _leaves(state, params)
    is_whole, at = True, runtime_of(state.spec.mesh).coordinate
    for buffer in main.values():
        for leaf, first, local in leaf_shards(buffer):
            n = local.numel()
            if isinstance(packed := values[leaf.path], PackedWeight) and leaf.form is not None:
                values[leaf.path] = stored_as(packed, leaf.form)
            value = _fitting(leaf, buffer.bucket, values[leaf.path], n)
            if tuple(value.shape) == _given_shape(leaf):
                mine = cut_of(value.detach(), leaf.cuts, at) if leaf.cuts and n else value.detach()
                value = mine.reshape(-1)[first : first + n] if n else value.new_empty(0)
            else:
                is_whole = False
            local.copy_(value.detach())
    return values if is_whole else None


def _leaves(state: State, params: Any) -> Values:
    """What was given, by the path that holds the leaf: of tied leaves one, which the others equal."""
    paths, leaves, _ = flatten(params)
    home = dict(zip(state.layout.paths, state.layout.source, strict=True))
    found: Values = {}
    at: dict[str, str] = {}
    unknown = [path for path in paths if path not in home]
    missing = dict.fromkeys(source for source in home.values() if all(home.get(path) != source for path in paths))
    if unknown or missing:
        said = [f"{what} {names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
                for what, names in (("lacks", [*missing]), ("has the unknown", unknown)) if names]  # fmt: skip
        raise TreeError(
            f"replace_params: the tree has another structure than the parameters: it {' and '.join(said)} "
            f"({len(paths)} leaves, expected {len(home)}). Give all leaves, as full_params(state) or "
            "local_shards(state) does."
        )
    for path, value in zip(paths, leaves, strict=True):
        if not isinstance(value, torch.Tensor):
            raise TreeError(f"replace_params: the leaf {path!r} is a {type(value).__name__}; expected a tensor.")
        before = found.get(home[path])
        if before is None:
            found[home[path]], at[home[path]] = value, path
        elif before is not value and not (before.shape == value.shape and torch.equal(before, value.to(before.device))):
            raise TreeError(
                f"replace_params: {at[home[path]]!r} and {path!r} are one tied leaf, and were given different values. "
                "Give one of them, or the same at both."
            )
    return found


def _given_shape(leaf: Leaf) -> tuple[int, ...]:
    """Of a whole leaf: of all ranks' parts together; of a packed one its bytes."""
    return leaf.whole if leaf.form is None else leaf.shape


def _fitting(leaf: Leaf, bucket: Bucket, value: torch.Tensor, mine: int) -> torch.Tensor:
    if tuple(value.shape) not in (_given_shape(leaf), (mine,)):
        raise TreeError(
            f"replace_params: the leaf {leaf.path!r} has shape {tuple(value.shape)}; expected its global shape "
            f"{_given_shape(leaf)}, or ({mine},), this rank's part of it."
        )
    if value.dtype is not bucket.main:
        raise TreeError(
            f"replace_params: the leaf {leaf.path!r} is {value.dtype}; expected {bucket.main}, as main weights are. "
            f"Convert it: .to({bucket.main})."
        )
    return value


def _compare(joint: Joint, main: dict[str, FlatBuffer], whole: Values | None) -> None:
    """Raise TreeError unless ranks have the same weights wherever they hold the same, or were given whole leaves."""
    run = joint.run
    values: Values = {}
    owns: list[tuple[str, ...]] = []
    for buffer in main.values():
        parted = () if whole is not None else buffer.sharded()
        own = buffer.bucket.apart(run.sizes) if whole is None else buffer.bucket.unlike(run.sizes)
        apart = tuple(axis for axis in run.sizes if axis in parted or axis in own)
        for leaf, _, local in leaf_shards(buffer):
            values[leaf.path] = local if whole is None else whole[leaf.path].detach()
            owns.append(apart)

    def look() -> tuple[None, list[Topic]]:
        numbers = read_sums([checksum(value) for value in values.values()])
        lines = [f"{path} checksum {n:016x}" for path, n in zip(values, numbers, strict=True)]
        return None, [Topic(lines, TreeError, "values", "leaf", "Give every rank the same.", owns)]

    agree(joint, "values", look)


# ---------------------------------------------------------------- gradients


@verb(_refuse)
def replace_grads(state: State, grads: Any) -> State:
    """Put other gradients in the place of the state's own, for `step` to take: those of another state, say.

    Args:
        state: the newest state of a step, or the state between steps. It is consumed, as by a verb.
        grads: a State of the same layout, whose gradients are finished, and taken, and with them which leaves got one,
            and what packing has lost of them (`Precision(feedback=True)`); or `{bucket: FlatBuffer}`, whole and sharded
            as main weights, in `Precision.grads`, as `T.hvp` returns: then every leaf counts as one that got a
            gradient. They are copied.

    Raises:
        TreeError: buckets that lack or are unknown, of another shape, dtype or sharding. StaleStateError.

    Collective: every rank calls it. What `finish_reductions` issues, if a state has gradients that are not whole.

    Example, gradients taken at other weights (sharpness-aware minimisation):
        >>> there = fsdp.replace_params(state, moved)
        >>> there, loss = forward_backward(there, batch)
        >>> state = fsdp.step(fsdp.replace_grads(state, fsdp.finish_reductions(there)))
    """
    state._valid("replace_grads")
    given: tuple[set[str], dict[str, int]] = set(), {}
    lost: dict[str, torch.Tensor] = {}
    main = {name: state.main[name] for name in state.layout.trainable}
    dtypes = {name: b.bucket.grads for name, b in main.items()}
    if isinstance(grads, State):
        grads._valid("replace_grads")
        theirs = grads._executor.reductions
        if grads.grads or theirs.early:  # what is under way there is not in them yet
            like = {name: grads.main[name] for name in grads.layout.trainable}
            like = {n: b.but(torch.empty_like(b.local, dtype=b.bucket.grads, device="meta")) for n, b in like.items()}
            _fit("replace_grads", like, main, dtypes)  # before they are consumed
            own, grads = grads is state, finish_reductions(grads)
            state = grads if own else state
        given, grads = (set(theirs.given.full), dict(theirs.given.noted)), grads.grads
        lost = theirs.feedback.errors
    _fit("replace_grads", grads, main, dtypes)
    reductions, sink = state._executor.reductions, state._executor.sink
    if state.grads or reductions.early:  # what is under way would be added to the new ones
        state = finish_reductions(state)
    state.version.lineage.enter(state.version.serial, "replace_grads")
    with state.version.lineage:
        sink.set_gradients({name: buffer.but(grads[name].local.detach().clone()) for name, buffer in main.items()})
        reductions.given.resume(given)
        reductions.feedback.resume(lost)
        state = state.version.lineage.advance(state, "replace_grads()", sink.grads)
    state._executor.end_round(True)
    return state


def _fit(what: str, given: Any, main: dict[str, FlatBuffer], dtypes: dict[str, torch.dtype]) -> None:
    """Raise TreeError unless these are buffers of the same buckets, sharded as main weights."""
    if not isinstance(given, Mapping) or given.keys() != main.keys():
        got = ", ".join(map(repr, given)) if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise TreeError(f"{what}: expected {{bucket: FlatBuffer}} for {', '.join(map(repr, main))}; got {got[:500]}.")
    for name, want in main.items():
        buffer, states = given[name], states_of(want.bucket, "main")
        if not isinstance(buffer, FlatBuffer):
            raise TreeError(f"{what}: the bucket {name!r} is a {type(buffer).__name__}; expected a FlatBuffer.")
        have = (buffer.bucket.leaves, buffer.local.shape, buffer.states, buffer.local.dtype)
        if have != (want.bucket.leaves, want.local.shape, states, dtypes[name]):
            raise TreeError(
                f"{what}: the bucket {name!r} is {buffer!r}; expected {want.local.numel():,} elements of "
                f"{dtypes[name]}, {dict(states)}, of the same {len(want.bucket.leaves)} leaves at the same places. "
                "Give buffers of a state of the same layout, gradients after fsdp.finish_reductions(state)."
            )


# ---------------------------------------------------------------- extras


def _with_extras(state: State, /, **named: Any) -> State:
    others = {name: tree for name, tree in state.extras.items() if name not in named}
    kept = {name: tree for name, tree in named.items() if tree is not None}
    return state._evolve(extras={**others, **kept})


@traced_as(_with_extras)  # a graph has no way to look at its tensors
def replace_extras(state: State, /, **named: Any) -> State:
    """The same State with other extras under these names: what a transform carries along, saved with the state.

    Args:
        named: pytrees of tensors; FlatBuffers too (an average of the weights). None takes a name out. Others stay.

    Returns:
        the same state of its step, in the same buffers: nothing is consumed, nothing is copied.

    Raises:
        TreeError: a leaf that is no tensor, or one that requires a gradient, and would keep its graph.

    Example: `state = fsdp.replace_extras(state, seen=torch.zeros((), device=state.count.device))`.
    """
    expect("replace_extras(state)", state, State, "a State", TypeError)
    leaves = [leaf for tree in named.values() if tree is not None for leaf in pytree.tree_leaves(tree)]
    if any(not isinstance(leaf, torch.Tensor) or leaf.requires_grad for leaf in leaves):
        _refuse_extras({name: tree for name, tree in named.items() if tree is not None})
    return _with_extras(state, **(ordinary(named) if any(leaf.is_inference() for leaf in leaves) else named))


def _refuse_extras(named: dict[str, Any]) -> None:
    for path, leaf in zip(*flatten(named)[:2], strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TreeError(
                f"replace_extras: {path!r} is a {type(leaf).__name__}; expected a tensor, as checkpoints can hold. "
                "Make it one: torch.tensor(...)."
            )
        if leaf.requires_grad:
            raise TreeError(f"replace_extras: {path!r} requires a gradient, and would keep its graph. Detach it.")
