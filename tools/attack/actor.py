"""Actor: a state and its oracle, and the operations of a program on both."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .oracle import Oracle
from .trees import build, find, laid_out, paths_of
from .verdict import Refused, Wrong, documented

Op = dict[str, Any]


class Actor:
    """One state, its oracle, and what is done to both."""

    def __init__(self, model: dict[str, Any], state: fsdp.State, oracle: Oracle, rank: int, folder: str) -> None:
        self.leaves, self.paths = model["leaves"], paths_of(model["leaves"])
        self.state, self.oracle, self.rank, self.folder = state, oracle, rank, folder
        self.middle: fsdp.State | None = None  # the newest state of a step under way
        self.micros = self.saved = 0
        self.varied = False  # ranks left out other units in each microbatch of this step
        self.looked = False  # units were used in it that the schedule does not have there
        self.apart = False  # ranks do different things in it
        self.strayed = False  # units were used in it in another order than the plan's
        self.unvoted: Wrong | None = None  # gradients of it that its `step` may not take
        layout = state.layout
        self.unit_of = {path: unit.name for unit in layout.units for path in unit.paths}
        self.home = {  # of tied leaves, the place whose path the unit has
            path: next((p for p in oracle.owner[path].paths if p in self.unit_of), "") for path in self.paths
        }
        for path, home in self.home.items():
            if not home:
                raise Wrong(f"the layout has no unit for the leaf {path!r}")

    def play(self, ops: list[Op]) -> Iterator[None]:
        """One operation at a time."""
        for op in ops:
            self.varied = self.varied or bool(op.get("varied"))
            self.looked = self.looked or (op["op"] == "eval" and op["way"] == "unit")
            self.apart = self.apart or "skip" in op or len(set(op.get("late", {}).values())) > 1
            try:
                getattr(self, f"do_{op['op']}")(op)
            except fsdp.ScheduleError as error:
                if self.unclear:
                    raise Refused(error) from error
                raise
            except Wrong as wrong:
                if not self.unclear or op["op"] == "step":
                    raise
                self.unvoted = wrong  # only `step` compares what ranks issued
            yield

    # ---- gradients

    @property
    def unclear(self) -> bool:
        """Whether ranks cannot know where a microbatch of this step ends: its `step` may be refused."""
        return self.varied or (self.apart and (self.looked or self.strayed))

    @property
    def now(self) -> fsdp.State:
        return self.state if self.middle is None else self.middle

    def do_micro(self, op: Op) -> None:
        when = (self.oracle.steps, self.micros)
        self.micros += 1
        self.middle = (self._tree if op["way"] == "tree" else self._units)(self.now, op, when)
        self._reduced(op, when)

    def _reduced(self, op: Op, when: tuple[int, ...]) -> None:
        """What all ranks gave, for the oracle."""
        for rank in range(len(self.oracle.ranks)):
            skipped = self._skipped(op, rank)
            for path in self.paths:
                if op["way"] == "unit" and (path != self.home[path] or self.unit_of[path] in skipped):
                    continue
                if not self._absent(op, path):
                    self.oracle.reduced(path, rank, when)

    def _absent(self, op: Op, path: str) -> bool:
        """Whether the leaf has no gradient in this step; the first that trains always has one."""
        if op.get("absent") is None or not self.oracle.owner[path].trains:
            return False
        home = self.home[path]
        return home != self._always() and Random(f"{op['absent']} {home}").random() < 0.4

    def _skipped(self, op: Op, rank: int) -> set[str]:
        """Units that a rank does not use, by the luck of their names; it uses one that trains."""
        share = op.get("skip", {}).get(str(rank))
        if not share:
            return set()
        kept = self.unit_of[self._always()]
        return {u for u in self.state.units if u != kept and Random(f"{share[0]} {u}").random() < share[1]}

    def _always(self) -> str:
        """The first leaf that trains: it has a gradient in every microbatch."""
        return next(self.home[path] for path, leaf in self.oracle.leaves.items() if leaf.trains and leaf.numel)

    def _gradient(self, op: Op, path: str, when: tuple[int, ...], like: torch.Tensor) -> torch.Tensor | None:
        if self._absent(op, path):
            return None
        if not self.oracle.owner[path].trains:
            return None
        grad = self.oracle.gradient(path, self.rank, when).to(like.dtype)
        return laid_out(grad, {"t": "transposed", "c": "slice"}.get(op["form"], "plain"))

    def _tree(self, state: fsdp.State, op: Op, when: tuple[int, ...]) -> fsdp.State:
        state, tree = fsdp.unshard(state)
        grads = []
        for leaf, path in zip(self.leaves, self.paths, strict=True):
            got = find(tree, leaf, self.leaves)
            self.oracle.expect(path, self.rank, got, "compute", "unshard()")
            grads.append(self._gradient(op, path, when, got))
        return fsdp.reduce(state, build(self.leaves, grads), last_microbatch=op["last"])

    def _units(self, state: fsdp.State, op: Op, when: tuple[int, ...]) -> fsdp.State:
        order = list(state.units)
        schedule = self.state.spec.schedule.order
        if isinstance(schedule, tuple):
            flat = [u for one in schedule for u in ((one,) if isinstance(one, str) else one)]
            order = list(dict.fromkeys(flat)) + [u for u in order if u not in flat]
        if "shuffle" in op:
            Random(op["shuffle"]).shuffle(order)
        skipped = self._skipped(op, self.rank)
        used = [unit for unit in order if unit not in skipped]
        step = 2 if op.get("pairs") else 1
        groups = [used[i : i + step] for i in range(0, len(used), step)]
        if state.cursor is not None and not self._skipped(op, self.rank):
            uses = [unit for group in groups for unit in group]
            self.strayed = self.strayed or [use.unit for use in state.cursor.plan.uses] != [*uses, *reversed(uses)]
        late, held = op.get("late", {}).get(str(self.rank), 0), []
        for group in groups:
            state, _ = self._weights(state, group, op)
            state = fsdp.release(state, group)
        for group in reversed(groups):
            state, weights = self._weights(state, group, op)
            for unit in reversed(group):
                paths = state.layout.by_name[unit].paths
                grads = {
                    key: self._gradient(op, path, when, w)
                    for (key, w), path in zip(weights[unit].items(), paths, strict=True)
                }
                held.append((unit, grads))
                if not late:
                    state = fsdp.reduce(state, held.pop()[1], unit, last_microbatch=op["last"])
            state = fsdp.release(state, group)
            while len(held) > late:
                unit, grads = held.pop(0)
                state = fsdp.reduce(state, grads, unit, last_microbatch=op["last"])
        for unit, grads in held:
            state = fsdp.reduce(state, grads, unit, last_microbatch=op["last"])
        return state

    def _weights(self, state: fsdp.State, group: list[str], op: Op) -> tuple[fsdp.State, dict[str, Any]]:
        if len(group) > 1:
            state, weights = fsdp.unshard(state, group)
        else:
            state, one = fsdp.unshard(state, group[0])
            weights = {group[0]: one}
        for unit in group:
            paths = state.layout.by_name[unit].paths
            if len(paths) != len(weights[unit]):
                raise Wrong(f"unshard({unit!r}) gave {list(weights[unit])}, the unit's leaves are {list(paths)}")
            for path, got in zip(paths, weights[unit].values(), strict=True):
                self.oracle.expect(path, self.rank, got, "compute", f"unshard({unit!r})")
        return state, weights

    def do_finish(self, op: Op) -> None:
        self.middle = fsdp.finish_reductions(self.now)
        self._check_grads(self.middle)

    def _check_grads(self, state: fsdp.State) -> None:
        for buffer in state.grads.values():
            start, stop = buffer.span()
            for leaf in buffer.bucket.leaves:
                a, b = min(max(leaf.offset, start), stop), min(leaf.offset + leaf.numel, stop)
                part = slice(a - leaf.offset, max(a, b) - leaf.offset)
                got = buffer.local[a - start : max(a, b) - start]
                if leaf.numel and got.numel():
                    self.oracle.expect(leaf.path, self.rank, got, "grads", "finish", part)

    def do_norm(self, op: Op) -> None:
        self.middle, norm = T.global_norm(self.now)
        self._near(float(norm), self.oracle.norm(self.rank), "global_norm")

    def do_clip(self, op: Op) -> None:
        self.middle, norm = T.clip_by_global_norm(self.now, op["limit"])
        self._near(float(norm), self.oracle.norm(self.rank), "clip_by_global_norm")
        self.oracle.clip(op["limit"])

    def _near(self, got: float, want: float, what: str) -> None:
        if not abs(got - want) <= (1e-5 if self.oracle.exact else 1e-2) * abs(want) + 1e-6:
            raise Wrong(f"{what}: {got}, expected {want}")

    def do_step(self, op: Op) -> None:
        if op.get("skip") is None:
            self.state = fsdp.step(self.now)
        else:
            self.state = fsdp.step(self.now, skip=torch.tensor(op["skip"]))
        if self.unvoted is not None:
            raise self.unvoted
        self.middle = None
        self.micros, self.varied, self.apart, self.strayed = 0, False, False, False
        self.looked = self.looked and self.state.spec.schedule.order == "recorded"  # the schedule has it from now on
        self.oracle.step(bool(op.get("skip")))
        if int(self.state.count) != self.oracle.steps:
            raise Wrong(f"step: count is {int(self.state.count)}, expected {self.oracle.steps}")

    # ---- looks

    def do_full(self, op: Op) -> None:
        tree = fsdp.full_params(self.now)
        for leaf, path in zip(self.leaves, self.paths, strict=True):
            self.oracle.expect(path, self.rank, find(tree, leaf, self.leaves), "main", "full_params")

    def do_shards(self, op: Op) -> None:
        found = fsdp.local_shards(self.now)
        for buffer in self.now.main.values():
            start, stop = buffer.span()
            for leaf in buffer.bucket.leaves:
                a = min(max(leaf.offset, start), stop)
                b = max(min(leaf.offset + leaf.numel, stop), a)
                got = found[leaf.path]
                if got.numel() != b - a:
                    raise Wrong(f"local_shards: {leaf.path!r} has {got.numel()} elements here, expected {b - a}")
                if got.numel():
                    part = slice(a - leaf.offset, b - leaf.offset)
                    self.oracle.expect(leaf.path, self.rank, got, "main", "local_shards", part)

    def do_pmean(self, op: Op) -> None:
        oracle = self.oracle
        here = [oracle.ranks[self.rank][i] for i, axis in enumerate(oracle.axes) if axis not in oracle.data]
        group = [
            rank for rank, at in enumerate(oracle.ranks)
            if [at[i] for i, axis in enumerate(oracle.axes) if axis not in oracle.data] == here
        ]  # fmt: skip
        shape = ((), (3,), (2, 2))[op["seed"] % 3]

        def tree(rank: int) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(100 * op["seed"] + rank)
            made = torch.randint(-9, 9, shape, generator=generator)
            return {"a": made.float(), "b": [made.double() * 3, made], "c": int(made.sum())}

        verb = fsdp.psum if op["sum"] else fsdp.pmean
        new, got = verb(self.now, tree(self.rank))
        if self.middle is None:
            self.state = new
        else:
            self.middle = new
        every = [torch.utils._pytree.tree_leaves(tree(rank)) for rank in group]
        for i, value in enumerate(torch.utils._pytree.tree_leaves(got)):
            want = torch.stack([torch.as_tensor(leaves[i]).double() for leaves in every]).sum(0)
            want = want if op["sum"] else want / len(group)
            if not torch.allclose(value.double(), want, rtol=1e-5, atol=1e-6):
                raise Wrong(f"{verb.__name__}: {value.tolist()}, expected {want.tolist()}")

    def do_eval(self, op: Op) -> None:
        """Weights for a look only. Between steps the look may be dropped; in the middle the step goes on."""
        state = self.now
        op = {"form": "p", **op}
        try:
            with torch.inference_mode(bool(op.get("inference"))):
                if op["way"] == "tree":
                    state, tree = fsdp.unshard(state)
                    for leaf, path in zip(self.leaves, self.paths, strict=True):
                        got = find(tree, leaf, self.leaves)
                        self.oracle.expect(path, self.rank, got, "compute", "unshard() in evaluation")
                else:
                    for unit in state.units:
                        state, _ = self._weights(state, [unit], op)
                        state = fsdp.release(state, unit)
        except Exception as error:
            if op.get("inference") and documented(error):
                raise Refused(error) from error
            if not (op["on"] == "between" and isinstance(error, fsdp.RestartError)):
                raise  # else a peer is done looking and has begun the step
        if self.middle is not None or op["on"] == "middle":
            self.middle = state

    def do_base(self, op: Op) -> None:
        """Looks at weights, and goes back to the state between steps."""
        with suppress(fsdp.RestartError):
            fsdp.unshard(self.state)

    def do_abandon(self, op: Op) -> None:
        """A microbatch that all ranks give up."""
        with suppress(fsdp.RestartError):  # of a peer that is done with it and has begun anew
            self.do_micro(op["micro"])
        self.middle, self.micros, self.unvoted = None, 0, None
        self.oracle.forget()

    def do_drop(self, op: Op) -> None:
        drop = getattr(fsdp, "drop_gradients", None)
        if drop is not None:
            state, _ = fsdp.unshard(self.state)
            self.state = drop(state)

    # ---- other states

    def do_copy(self, op: Op) -> None:
        old, self.state = self.state, copy.deepcopy(self.state)
        del old

    def do_saveload(self, op: Op) -> None:
        self.saved += 1
        folder = os.path.join(self.folder, f"saved{self.saved}")
        fsdp.save(self.state, folder)
        fresh = fsdp.load(folder, like=self.state)
        dist.barrier() if len(self.oracle.ranks) > 1 else None
        before, after = fsdp.local_shards(self.state), fsdp.local_shards(fresh)
        if not all(torch.equal(before[path], after[path]) for path in before):
            raise Wrong("load gave other bits than save was given")
        self.state = fresh

    def do_replace(self, op: Op) -> None:
        """Half of every weight that trains, put in place of it."""
        replace = getattr(fsdp, "replace_params", None)
        if replace is not None:
            tree = fsdp.full_params(self.state)
            halves = []
            for leaf, path in zip(self.leaves, self.paths, strict=True):
                whole = find(tree, leaf, self.leaves)
                halves.append(whole / 2 if self.oracle.owner[path].trains else whole)
            self.state = replace(self.state, build(self.leaves, halves))
        else:
            trainable = self.state.layout.trainable
            main = {
                name: torch.utils._pytree.tree_map(lambda t: t / 2, buffer) if name in trainable else buffer
                for name, buffer in self.state.main.items()
            }
            try:
                self.state = self.state._evolve(main=main)
            except Exception as error:
                if documented(error):
                    raise Refused(error) from error
                raise
        for leaf in self.oracle.leaves.values():
            if leaf.trains:
                leaf.value = {group: leaf.rounded(value / 2, leaf.main) for group, value in leaf.value.items()}
