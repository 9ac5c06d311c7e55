"""budget: what each block keeps, recomputes or moves, chosen so that a step's peak stays within a number of bytes.

rehearsals   as it is │ all blocks recompute │ all but attn │ all but the products of attn ...    bytes kept, seconds
needs        where the backward comes to a block: what the blocks before it have to free by then
choice       some blocks moved, some one way, the others another, least seconds that free enough
rehearsal    of that choice: its peak, to the byte; another one if it is over the budget, or far below
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple, TypeVar

import torch.nn as nn

from functional_fsdp import Hardware, ScheduleError, SpecError, State
from functional_fsdp.extend import ranks_of

from ._drive.forward_backward import ForwardBackward
from ._modules import copy_of, outermost
from .remat import offload as offloaded
from .remat import remat
from .step_memory import Rehearsed, rehearse

log = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)
TRIES = 6  # exact peaks that are looked at
SHARE = 0.05  # of a block's weights that a part has to have to be chosen apart
HIDDEN = 0.95  # of the forward and the backward, in which copies to the host and back can be hidden
BACKWARD = 2  # times the seconds of the forward


def budget(model: M, nbytes: int, *patterns: str, moves: bool = True, hardware: str | Hardware | None = None) -> M:
    """Have a driven step's peak stay within a number of bytes: blocks keep, recompute or move what they save.

    Args:
        model: as `init` or `functionalize` gave it, for `T.forward_backward`.
        nbytes: the most that a step may take on a rank, as `T.step_memory` counts it.
        patterns: the paths of the modules to choose for (`"blocks.*"`). Default: the largest lists of modules of one
            class.
        moves: whether to consider the host's memory.
        hardware: by whose seconds to choose: "H100", ..., or a `fsdp.Hardware`. Default: the GPU's, by its
            name, else the H100's.

    Returns:
        a copy of the model (a skeleton). The first call of its `forward_backward` chooses, by rehearsals without
        memory, for this state and this batch; later ones follow that. Where everything fits nothing is changed.
        `forward_backward.choice` is then a `BudgetChoice`: printing it gives a table. On paper it is there after
        `T.step_memory(forward_backward, abstract state, batch)`.

    A part of a block is a direct child that is called. For each there are bytes that it keeps and seconds to run it
    again, or to move it; and of its matrix products and attention alone, whose outputs can stay while norms and
    activations run again. Of ways for up to three groups of blocks, one of which moves all it keeps, those are taken
    that free enough in the least time. The peak of the choice is then rehearsed, as `T.step_memory` does, and if it is
    over, the next one is taken. Values and gradients are those of the model as it is, see `T.remat`. The choice is the
    same eagerly and in a captured step (which follows that of its warm-up). With `compile=` blocks recompute and move
    around their compiled code: what that keeps less is not counted, and to keep products alone is the compiler's own
    choice there. Within a unit a recomputation uses the weights that are gathered for its backward anyway.

    The choice is that of each `T.forward_backward`, and of `T.pullback`, which calls one. `T.hvp` keeps all that blocks
    save, whatever the budget; `T.apply` and `T.jvp` keep nothing.

    Collective: in the first call an exchange on the host: all ranks follow the one whose batch takes most. The plan
    of the run says what was chosen (`state.cursor.plan.activations`), and so do its checkpoints: `activations` in their
    `layout.json`, the way of each block by its path.

    Raises:
        SpecError: bytes that are no positive number; no modules to choose for; with `second_order=True`.
        ScheduleError (from the first call, on all ranks): not even the least that blocks can keep fits; in a traced
            step.

    Example:
        >>> model = T.budget(model, 60 * 2**30)
        >>> forward_backward = T.forward_backward(model, loss_fn)
        >>> state, loss = forward_backward(state, batch)
        >>> print(forward_backward.choice)
        budget 60.00 GiB: the model as it is takes 0.00 GiB, which fits; nothing is changed

    Source: Korthikanti et al. 2022 (arXiv:2205.05198) choose parts by bytes for each operation; the choice between
    groups is a multiple-choice knapsack.
    """
    if not isinstance(nbytes, int) or nbytes <= 0:
        raise SpecError(f"budget(nbytes={nbytes!r}): expected bytes, more than 0, as 60 * 2**30.")
    if isinstance(hardware, str):
        Hardware.named(hardware)
    copied = copy_of(model)
    paths = [path for path, _ in outermost("budget", copied, patterns)] if patterns else blocks_of(copied)
    if not paths:
        raise SpecError(
            f"budget: {type(model).__name__} has no list of modules of one class. Name what may recompute, as "
            "budget(model, nbytes, 'encoder')."
        )
    vars(copied)["_budget"] = Budget(nbytes, tuple(paths), moves, hardware)
    return copied


def blocks_of(model: nn.Module) -> list[str]:
    """The paths of modules in lists of two and more of one class, the outermost ones."""
    found: list[str] = []
    for path, part in model.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or any(path.startswith(f"{one}.") for one in found):
            continue
        kinds: dict[type, list[str]] = {}
        for name, child in part.named_children():
            if any(True for _ in child.parameters()):
                kinds.setdefault(type(child), []).append(f"{path}.{name}" if path else name)
        found += [one for some in kinds.values() if len(some) > 1 for one in some]
    return found


class Way(NamedTuple):
    """What becomes of what a block saves: children that are saved or moved while the rest recomputes, or of which the
    outputs of products stay; or all of it."""

    recomputes: bool
    saves: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()  # "" for all of a block that does not recompute
    products: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.recomputes:
            return "moved" if self.moves else "kept"
        fates = ("kept", self.saves), ("moved", self.moves), ("products kept", self.products)
        more = [f"{', '.join(some)} {what}" for what, some in fates if some]
        return f"recomputed{f', but {chr(59).join(more)}' if more else ''}"


KEPT = Way(False)


def but_saved(parts: tuple[str, ...]) -> Way:
    return Way(True, parts)


def but_products(parts: tuple[str, ...]) -> Way:
    return Way(True, products=parts)


class Cost(NamedTuple):
    """Of a block: bytes that are freed, seconds more, bytes that are moved."""

    freed: float
    seconds: float
    moved: float


@dataclass(frozen=True, repr=False)
class BudgetChoice:
    """What `T.budget` chose. Printing it gives a table.

    Attributes:
        nbytes: the budget; before, peak: bytes of a step as the model is, and as it was chosen.
        seconds: of compute that the choice costs, a step.
        ways: by path of a block what becomes of what it saves, in words.
    """

    nbytes: int
    before: int
    peak: int
    seconds: float
    ways: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        groups: dict[str, list[str]] = {}
        for path, way in self.ways.items():
            groups.setdefault(way, []).append(path)
        gib = 2**30
        lines = [f"budget {self.nbytes / gib:.2f} GiB: the model as it is takes {self.before / gib:.2f} GiB"]
        if self.before <= self.nbytes:
            return f"{lines[0]}, which fits; nothing is changed"
        lines += [f"  {len(some):3} blocks  {some[0]} – {some[-1]}: {way}" for way, some in groups.items()]
        return "\n".join([*lines, f"peak {self.peak / gib:.2f} GiB, {1e3 * self.seconds:.1f} ms more a step"])


@dataclass(frozen=True)
class Budget:
    """What a model of `budget` carries until the first call."""

    nbytes: int
    paths: tuple[str, ...]
    moves: bool
    hardware: str | Hardware | None

    def settle(self, of: ForwardBackward[Any], state: State, args: Any, kwargs: Any) -> tuple[nn.Module, BudgetChoice]:
        """The model as all ranks run it, and what was chosen. Collective."""
        trial = Trial(self, of, state, args, kwargs)
        ways, failed = trial.all(KEPT), ""
        choice: Any = None
        try:
            ways = trial.choose()
            choice = trial.described(ways)
        except ScheduleError as error:
            failed = str(error)
        ranks = ranks_of(state)
        every = ranks.everyone((trial.before, failed, ways, choice, trial.keeps(ways)), "budget")
        _, failed, ways, choice, keeps = max(every, key=lambda one: (bool(one[1]), one[0]))
        if failed:
            raise ScheduleError(failed)
        if ranks.index == 0:
            log.info("%r", choice)
        return trial.changed(ways, keeps), choice

    def locally(
        self, of: ForwardBackward[Any], state: State, args: Any, kwargs: Any, imagined: bool
    ) -> tuple[Trial, tuple[Way, ...]]:
        """The rehearsals, of a state that need not have ranks, and what was chosen."""
        trial = Trial(self, of, state, args, kwargs, imagined)
        return trial, trial.choose()


class Trial:
    """The rehearsals of one model, state and batch. compiled: the blocks are, whatever `of` says."""

    def __init__(
        self, budget: Budget, of: ForwardBackward[Any], state: State, args: Any, kwargs: Any, imagined: bool = False,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self.budget, self.of, self.state, self.given, self.imagined = budget, of, state, (args, kwargs), imagined
        self.model, self.compiled = of.plain(), compiled or of.compile is not False
        self.hardware = hardware_for(budget.hardware)
        self.seen: dict[tuple[Way, ...], Rehearsed] = {}
        self.before = self.rehearsed(self.all(KEPT)).memory(state).peak

    def all(self, way: Way) -> tuple[Way, ...]:
        return (way,) * self.count

    def changed(self, ways: Sequence[Way], keeps: dict[Way, float] | None = None) -> nn.Module:
        """A copy of the model, its blocks treated so; keeps: as another rank found it."""
        model, keeps = self.model, self.keeps(ways) if keeps is None else keeps
        for way in dict.fromkeys(ways):
            paths = [path for path, one in zip(self.budget.paths, ways, strict=True) if one == way]
            if way.recomputes:
                model = remat(model, *paths, save=way.saves, offload=way.moves, products=way.products)
            elif way.moves:
                model = offloaded(model, *paths)
            for path in paths if way in keeps else ():
                vars(model.get_submodule(path))["_remat"].keeps = keeps[way]
        return model

    def keeps(self, ways: Sequence[Way]) -> dict[Way, float]:
        """Where some blocks are moved: what those that recompute keep of what these would. By that copies go."""
        some = {way for way in ways if way.recomputes and not way.moves} if any(way.moves for way in ways) else set()
        return {way: 1 - self.costs[way].freed / most_freed(self.costs) for way in some}

    def rehearsed(self, ways: tuple[Way, ...]) -> Rehearsed:
        if ways not in self.seen:
            counter = self.hardware.counter()
            trial = self.of.like(self.changed(ways))
            args, kwargs = self.given
            self.seen[ways] = rehearse(
                trial, self.state, args, kwargs, "budget", imagined=self.imagined, counter=counter
            )
        return self.seen[ways]

    def peak(self, ways: tuple[Way, ...]) -> int:
        return self.rehearsed(ways).memory(self.state).peak

    def seconds(self, ways: tuple[Way, ...]) -> float:
        return float(sum(lap.work.seconds(self.hardware) for lap in self.rehearsed(ways).laps))

    def forward_of(self, ways: tuple[Way, ...]) -> float:
        found = self.rehearsed(ways)
        return float(sum(lap.work.seconds(self.hardware) for lap in found.laps[: len(found.forward)]))

    def in_words(self, ways: tuple[Way, ...]) -> dict[str, str]:
        """By path of a block its way."""
        return dict(zip(self.budget.paths, map(str, ways), strict=True))

    def kept(self, ways: tuple[Way, ...]) -> int:
        """Bytes that are alive where the forward ends."""
        found = self.rehearsed(ways)
        return found.laps[len(found.forward) - 1].alive

    # ---------------------------------------------------------------- the choice

    def choose(self) -> tuple[Way, ...]:
        """The way of each block. Raises ScheduleError if none fits."""
        count, limit = self.count, self.budget.nbytes
        if self.before <= limit:
            return self.all(KEPT)
        found, least, ways = self.fitting(self.before, limit, self.peak)
        if found is None:
            raise ScheduleError(
                f"budget: expected at most {limit:,} bytes, and the least that these {count} blocks can do with is "
                f"{least:,} ({ways[0]}); the model as it is takes {self.before:,}. Take a smaller batch, more "
                "ranks, Placement(memory_kind='pinned_host'), or a larger budget."
            )
        return found

    def fitting(
        self, before: int, limit: int, peak_of: Callable[[tuple[Way, ...]], int]
    ) -> tuple[tuple[Way, ...] | None, int, tuple[Way, ...]]:
        """The ways in which a step that takes `before` bytes fits, or None; the least peak seen, and its ways."""
        seen = {self.all(KEPT): before}

        def peak(ways: tuple[Way, ...]) -> int:
            if ways not in seen:
                seen[ways] = peak_of(ways)
            return seen[ways]

        found, needed = None, float(before - limit)
        low, high = 0.0, math.inf  # bytes that were not enough, and that were
        near = min((cost.freed for cost in self.costs.values() if cost.freed), default=0)
        for _ in range(TRIES):
            ways = self.cheapest(needed)
            if ways is None:
                break
            over = peak(ways) - limit
            if over > 0:
                low = max(needed, self.reach(ways))
                needed = low + max(over, 1 << 16)
            else:
                high, needed, found = needed, needed + over, ways
                if over > -near:
                    break
            if not low < needed < high:
                needed = (low + high) / 2
        if found is None:
            # of those that free as much, one may take more at its peak
            frugal = sorted(map(self.all, self.frugal()), key=self.longer)
            found = next((ways for ways in frugal if peak(ways) <= limit), None)
            few, many = 0, self.count if found else 0  # blocks: too few, and enough; they may leave room
            while found and many - few > 1 and peak(found) <= limit - near:
                some = (few + many) // 2
                ways = *found[:some], *self.all(KEPT)[some:]
                few, many, found = (few, some, ways) if peak(ways) <= limit else (some, many, found)
        least = min(seen, key=lambda ways: seen[ways])
        return found, seen[least], least

    def cheapest(self, needed: float) -> tuple[Way, ...] | None:
        """The ways that free so many bytes of the peak of the model as it is, in the least time."""
        needs = [needed - lower for lower in self.lower]
        return best(self.costs, needs, self.forward, self.hardware, self.gradients)

    def reach(self, ways: Sequence[Way]) -> float:
        """The bytes that these ways are taken to free of that peak."""
        freed = accumulate((self.costs[way].freed for way in ways), initial=0.0)
        return min(map(add, freed, self.lower))

    def frugal(self) -> list[Way]:
        """The ways that free most."""
        most = most_freed(self.costs)
        return [way for way, cost in self.costs.items() if cost.freed == most]

    def longer(self, ways: Sequence[Way]) -> float:
        """Seconds that these ways take more."""
        costs = [self.costs[way] for way in ways]
        late = moving(sum(cost.moved for cost in costs), self.forward, self.hardware, self.returning(ways))
        return sum(cost.seconds for cost in costs) + late

    @cached_property
    def lower(self) -> list[int]:
        """By how many blocks still have to come in the backward: how far a step is then below its peak, as it is."""
        memory = self.rehearsed(self.all(KEPT)).memory(self.state)
        known = {*self.budget.paths}
        blocks = {
            unit.name: {path for leaf in unit.paths for path in accumulate(leaf.split("."), "{}.{}".format)} & known
            for unit in self.state.layout.units
        }
        lower, over = [memory.peak] * (self.count + 1), set[str]()
        for (unit, _), most in zip(memory.stretches, memory.profile, strict=True):
            new = blocks.get(unit, set()) - over
            left = self.count - len(over) - bool(new)  # where the backward is in the first of these
            lower[left] = min(lower[left], memory.peak - most)
            over |= new
        return lower

    @cached_property
    def forward(self) -> float:
        """Seconds of the forward of the model as it is."""
        return self.forward_of(self.all(KEPT))

    @cached_property
    def gradients(self) -> float:
        """Bytes of main gradients that the backward of a block leaves on this rank's device."""
        paths, main = tuple(f"{path}." for path in self.budget.paths), self.state.main
        buckets = [bucket for bucket in self.state.layout.buckets.values() if bucket.leaves[0].path.startswith(paths)]
        some = [b for b in buckets if b.name in self.state.layout.trainable and not b.grads_on_host]
        return sum(main[b.name].local.numel() * b.grads.itemsize for b in some) / len(paths)

    def returning(self, ways: Sequence[Way]) -> float:
        """The share of the backward in which what these ways move can come back."""
        return returning([(1, self.costs[way]) for way in ways], most_freed(self.costs), self.gradients)

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.budget.paths)

    @cached_property
    def costs(self) -> dict[Way, Cost]:
        """Of a block, by way; parts are taken to add up."""
        count, again = self.count, Way(True)
        plain, all_kept, all_again = self.all(KEPT), self.kept(self.all(KEPT)), self.kept(self.all(again))
        base, recomputed = self.seconds(plain), self.seconds(self.all(again))
        freed, more = (all_kept - all_again) / count, (recomputed - base) / count
        found = {KEPT: Cost(0, 0, 0), again: Cost(freed, more, 0)}
        children = self.children()
        for but in (but_saved,) if self.compiled else (but_saved, but_products):
            parts: list[tuple[float, str, float, float]] = []
            for child in children:
                one = self.all(but((child,)))
                kept, spared = (self.kept(one) - all_again) / count, (recomputed - self.seconds(one)) / count
                if spared > 0:
                    parts.append((kept / spared, child, kept, spared))
            kept, spared = 0.0, 0.0
            some: tuple[str, ...] = ()
            for _, child, its_bytes, its_seconds in sorted(parts):
                kept, spared, some = kept + its_bytes, spared + its_seconds, (*some, child)
                found[but(some)] = Cost(freed - kept, more - spared, 0)
                if self.budget.moves and its_bytes > 0 and but is but_saved:
                    found[Way(True, (), (child,))] = Cost(freed, more - its_seconds, its_bytes)
        if self.budget.moves:
            found[Way(False, (), ("",))] = Cost(freed, 0, freed)
        return {way: cost for way, cost in found.items() if cost.freed > 0 or way == KEPT}

    def children(self) -> list[str]:
        """The parts of the first block that have a share of its weights, and which every block has and calls."""
        blocks = [self.model.get_submodule(path) for path in self.budget.paths]
        total = sum(p.numel() for p in blocks[0].parameters())
        return [
            name
            for name, child in blocks[0].named_children()
            if all(_calls(block, name) for block in blocks)
            and sum(p.numel() for p in child.parameters()) >= SHARE * total
        ]

    def described(self, ways: tuple[Way, ...]) -> BudgetChoice:
        if all(way == KEPT for way in ways):
            return BudgetChoice(self.budget.nbytes, self.before, self.before, 0.0)
        late = moving(self.rehearsed(ways).moved, self.forward_of(ways), self.hardware, self.returning(ways))
        more = self.seconds(ways) - self.seconds(self.all(KEPT)) + late
        return BudgetChoice(self.budget.nbytes, self.before, self.peak(ways), more, self.in_words(ways))


def _calls(block: nn.Module, name: str) -> bool:
    """Whether a block has a part of this name that is called, and is no container."""
    part = block._modules.get(name)
    return part is not None and type(part).forward is not nn.Module.forward


def best(
    costs: dict[Way, Cost], needs: Sequence[float], forward: float, hardware: Hardware, gradients: float = 0
) -> tuple[Way, ...] | None:
    """The first blocks one way, some another, and the others a third, so that enough is freed in the least time: by
    the first i blocks at least needs[i]. Of these only the first are moved, and a way that others beat in bytes and
    seconds is in no group."""
    count, most = len(needs) - 1, most_freed(costs)
    lacks = {  # by way and m: what blocks lack at the most where m or more are to come, if each of all frees so much
        way: [*accumulate((needs[i] - i * cost.freed for i in range(count, -1, -1)), max)][::-1]
        for way, cost in costs.items()
    }
    still = sorted((cost.seconds, -cost.freed, way) for way, cost in costs.items() if not cost.moved)
    pairs = [(way, costs[way]) for i, (_, less, way) in enumerate(still) if all(less < one[1] for one in still[:i])]
    moving_ways = [(way, cost) for way, cost in costs.items() if cost.moved]
    found: tuple[float, int, tuple[Way, ...]] | None = None
    for first, cost in moving_ways or [(KEPT, costs[KEPT])]:
        for m in range(count + 1) if moving_ways else (0,):
            late = m * cost.seconds + moving(m * cost.moved, forward, hardware)
            rest = count - m
            if (found is not None and late > found[0]) or (m and needs[m - 1] > (m - 1) * cost.freed):
                break
            for less, other in pairs:
                short = lacks[less][m] - m * (cost.freed - other.freed)
                for more, one in pairs:
                    gain = one.freed - other.freed
                    if gain < 0 or lacks[more][m] > m * (cost.freed - one.freed):
                        continue
                    k = 0 if short <= 0 else min(rest, -int(-short // gain))
                    share = returning([(m, cost), (k, one), (rest - k, other)], most, gradients)
                    seconds = m * cost.seconds + k * one.seconds + (rest - k) * other.seconds
                    seconds += moving(m * cost.moved, forward, hardware, share)
                    if found is None or (seconds, m + k) < found[:2]:
                        found = seconds, m + k, (first,) * m + (more,) * k + (less,) * (rest - k)
    return found[2] if found else None


def most_freed(costs: dict[Way, Cost]) -> float:
    """The bytes that a block frees in the way that frees most."""
    return max(cost.freed for cost in costs.values())


def returning(groups: Sequence[tuple[int, Cost]], most: float, gradients: float) -> float:
    """The share of the backward in which what is moved can come back: that of the blocks that are moved, which are its
    last, and before them as much as finds room in what the others free, less the main gradients that these leave."""
    count = sum(n for n, _ in groups)
    own, moved = sum(n for n, cost in groups if cost.moved), sum(n * cost.moved for n, cost in groups)
    room = sum(n * (most - cost.freed - gradients) for n, cost in groups if not cost.moved)
    return (own + (count - own) * min(1.0, max(0.0, room / moved))) / count if moved else 1.0


def moving(nbytes: float, forward: float, hardware: Hardware, share: float = 1.0) -> float:
    """Seconds that it takes to move so many bytes to the host and back: what a forward and this share of a backward do
    not hide, and what compute is slowed down by."""
    each = nbytes / hardware.to_host
    late = max(0.0, each - HIDDEN * forward) + max(0.0, each - HIDDEN * BACKWARD * forward * share)
    return late + 2 * nbytes / (hardware.bandwidth * hardware.moves) * hardware.beside


def hardware_for(said: str | Hardware | None) -> Hardware:
    if isinstance(said, Hardware):
        return said
    return Hardware.named(said) if said else Hardware.here()
