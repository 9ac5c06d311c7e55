"""The pure planner: lives by simulation, addresses by packing. No process group, no device; tensors only as dtypes."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import time
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_fsdp as fsdp
from functional_fsdp import Layout, Precision, ScheduleError, Spec, SpecError
from functional_fsdp._plan.layout import LeafInfo, plan_layout
from functional_fsdp._plan.plan import ALIGN, Gather, Plan, PlannedUnit, Reduction, make_plan, pack
from functional_fsdp._spec.spec import Schedule
from functional_fsdp.look.draw import Panel
from functional_fsdp.look.timeline import Timeline, _lives, timeline_of

MIB = 1 << 20
BF16, FP32 = torch.bfloat16, torch.float32
sizes_of_units = st.lists(st.integers(1, 60), min_size=1, max_size=12)  # KiB
relaxed = settings(deadline=None, max_examples=60)


def stack(kibs: Sequence[int], spec: Spec | None = None, prefix: str = "u") -> Layout:
    """A layout of one float32 leaf a unit: u0, u1, ... of so many KiB."""
    leaves = [LeafInfo(f"{prefix}{i}.w", (256 * kib,), FP32) for i, kib in enumerate(kibs)]
    return plan_layout(leaves, spec or Spec({"data": 2}))


def hybrid() -> Layout:
    """A large embedding and head around 45 layers: Mamba (80 MiB), MoE (400), attention (60), all slightly uneven."""
    kinds = {"m": 80 * MIB, "e": 400 * MIB, "a": 60 * MIB}
    sizes = [600 * MIB, *(kinds[c] + i % 3 * 4096 for i, c in enumerate("memememaeme" * 4 + "m")), 600 * MIB]
    names = ["embed", *(f"layer{i}" for i in range(45)), "head"]
    leaves = [LeafInfo(f"{n}.w", (size // 2,), BF16) for n, size in zip(names, sizes, strict=True)]
    leaves.insert(-1, LeafInfo("norm.w", (4096,), BF16))
    return plan_layout(leaves, Spec({"data": 8}, {"norm": fsdp.ddp("data"), "*": fsdp.zero3("data")}))


def check(p: Plan) -> None:
    """What holds for every plan, whatever its schedule."""
    for a, b in combinations([u for u in p.units if u.nbytes], 2):
        if any(s <= e2 and s2 <= e for s, e in a.lives for s2, e2 in b.lives):
            assert a.address + a.nbytes <= b.address or b.address + b.nbytes <= a.address, (a, b)
    for i, (r, q) in enumerate(pairwise(p.reductions)):
        assert r.use <= q.use
        assert r.until == (p.reductions[i + 2].use if i + 2 < len(p.reductions) else len(p.uses))
        if r.nbytes and q.nbytes:
            assert r.address + r.nbytes <= q.address or q.address + q.nbytes <= r.address, (r, q)
    owners: list[PlannedUnit | Reduction] = [*p.units, *p.reductions]
    for owner in owners:
        assert owner.address % ALIGN == 0
        assert all(part.address % ALIGN == 0 for part in owner.parts)
        ends = [part.address + part.nbytes for part in owner.parts]
        assert all(end <= part.address for end, part in zip(ends, owner.parts[1:], strict=False))
        if owner.parts:
            assert owner.parts[0].address == owner.address
            assert ends[-1] <= owner.address + owner.nbytes
    live = [sum(p.by_name[name].nbytes for name in p.live(k)) for k in range(len(p.uses))]
    assert p.bound == max(live) <= p.arena
    assert p.arena == max((u.address + u.nbytes for u in p.units), default=0)
    assert p.staging == max((r.address + r.nbytes for r in p.reductions), default=0)
    for k, use in enumerate(p.uses):
        unit = p.by_name[use.unit]
        lives = [life for life in unit.lives if life[0] <= k <= life[1]]
        assert len(lives) == (1 if unit.parts else 0)
        assert use.end == (lives[0][1] if lives else k)
        assert use.start is None or use.start == lives[0][0] <= k
        assert k in unit.uses
        assert use.reduces == any((r.unit, r.use) == (use.unit, k) for r in p.reductions)
        first, last = use.group
        assert first <= k <= last
        assert all(p.uses[j].group == use.group for j in range(first, last + 1))
        assert {p.uses[j].unit for j in range(first, last + 1) if p.by_name[p.uses[j].unit].parts} <= set(p.live(k))
    assert sorted(g.first for g in p.gathers) == [k for k, use in enumerate(p.uses) if use.start is not None]
    assert sorted((g.start, g.last) for g in p.gathers) == sorted(life for u in p.units for life in u.lives)
    assert p.due == tuple(sum(g.start <= k for g in p.gathers) for k in range(len(p.uses)))
    run(p)
    for unit in p.units:
        assert len([k for k in unit.uses if p.uses[k].start is not None]) == unit.gathers
        assert all(first[1] < second[0] for first, second in pairwise(unit.lives)), "gathered over its own bytes"


def run(p: Plan) -> None:
    """Gathers in order of issue, releases at the planned ends: nothing is ever gathered over bytes in use."""
    live: dict[str, int] = {}  # until which use
    issued = 0
    for k, use in enumerate(p.uses):
        for gather in p.gathers[issued : p.due[k]]:
            mine = p.by_name[gather.unit]
            assert gather.unit not in live, "gathered over its own bytes"
            for other in map(p.by_name.__getitem__, live):
                assert other.address + other.nbytes <= mine.address or mine.address + mine.nbytes <= other.address
            live[gather.unit] = gather.last
        issued = p.due[k]
        assert use.unit in live or not p.by_name[use.unit].parts, "gathered in time"
        live = {name: last for name, last in live.items() if last > k}
    assert issued == len(p.gathers)
    assert not live


# -------------------------------------------------------------------------------- packing


@relaxed
@given(st.lists(st.tuples(st.integers(0, 50), st.lists(st.integers(0, 12), min_size=1, max_size=6)), max_size=14))
def test_packing_never_lays_two_live_things_over_each_other(things: list[tuple[int, list[int]]]) -> None:
    sizes = [size for size, _ in things]
    lives = [[(a, b - 1) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b] for cuts in map(_cuts, things)]
    kept = [i for i, (_, cuts) in enumerate(things) if len(cuts) == 6]
    packing = pack(sizes, lives, kept)
    for i, j in combinations(range(len(sizes)), 2):
        if sizes[i] and sizes[j] and any(a <= d and c <= b for a, b in lives[i] for c, d in lives[j]):
            low, high = sorted((i, j), key=lambda k: packing.addresses[k])
            assert packing.addresses[low] + sizes[low] <= packing.addresses[high]
    at_once = [
        sum(s for s, life in zip(sizes, lives, strict=True) if any(a <= t <= b for a, b in life)) for t in range(13)
    ]
    assert packing.bound == max(at_once)
    assert packing == pack(sizes, lives, kept), "every rank finds the same"


def _cuts(thing: tuple[int, list[int]]) -> list[int]:
    return sorted(set(thing[1]))


# -------------------------------------------------------------------------------- memory


@relaxed
@given(sizes_of_units, st.integers(0, 5), st.data())
def test_every_plan_is_sound_and_within_depth_plus_one_slots_plus_kept(kibs: list[int], depth: int, data: Any) -> None:
    layout = stack(kibs)
    names = list(layout.by_name)
    keep = data.draw(st.one_of(st.none(), st.just("all"), st.integers(0, 200 << 10), st.sets(st.sampled_from(names))))
    p = make_plan(layout, Schedule(prefetch=depth, keep=keep))
    check(p)
    chosen = names if keep == "all" else keep if isinstance(keep, set) else ()
    kept = keep if isinstance(keep, int) else sum(p.by_name[name].nbytes for name in chosen)
    assert p.arena <= (depth + 1) * max(u.nbytes for u in p.units) + kept


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_slots_bound_the_arena_whatever_the_search_finds(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """With a search that lays everything end to end."""
    end_to_end = "functional_fsdp._plan.plan._search"
    monkeypatch.setattr(end_to_end, lambda sizes, *_: [sum(sizes[:i]) for i in range(len(sizes))])
    p = make_plan(stack([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 3), Schedule(prefetch=depth, keep=("u5", "u1[0-3]")))
    check(p)
    assert p.rule == "slots, kept above"
    assert p.arena <= ((depth + 1) * 9 + 9 + 5 + 3 + 1 + 4) << 10


@relaxed
@given(sizes_of_units, st.sampled_from([None, ()]))
def test_chains_at_depth_0_and_1_meet_the_lower_bound_exactly(kibs: list[int], keep: Any) -> None:
    for depth in (0, 1):
        p = make_plan(stack(kibs), Schedule(prefetch=depth, keep=keep))
        neighbours = [sum(kibs[i : i + depth + 1]) << 10 for i in range(len(kibs))]
        assert p.arena == p.bound == max(neighbours)


def max_pool(units: Sequence[dict[torch.dtype, list[int]]], from_largest: bool) -> int:
    """Bytes of Megatron-FSDP's max-pool double buffering: per dtype the fewest, smallest buckets that hold any unit.

    A unit's buckets are assigned in order of size, to the pool's largest (`from_largest`) or to its smallest buckets.
    """
    pools: dict[torch.dtype, list[int]] = {}
    for unit in units:
        for dtype, buckets in unit.items():
            need, pool = sorted(buckets, reverse=from_largest), pools.setdefault(dtype, [])
            pool += [0] * (len(need) - len(pool))
            pool.sort(reverse=from_largest)
            for i, size in enumerate(need):
                pool[i] = max(pool[i], size)
    return 2 * sum(map(sum, pools.values()))


buckets_of_units = st.lists(
    st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e"]), st.integers(1, 40), min_size=1), min_size=1, max_size=10
)


@relaxed
@given(buckets_of_units)
def test_never_more_than_max_pool_double_buffering(units: list[dict[str, int]]) -> None:
    """Five kinds of buckets: bf16 and float32, trainable and frozen, and one more of bf16 by its placement."""
    leaves = []
    for i, unit in enumerate(units):
        for kind, size in unit.items():
            dtype = BF16 if kind in "abc" else FP32
            leaves.append(LeafInfo(f"u{i}.{kind}", (size * 512,), dtype, kind not in "bd"))
    rule = {"*.c": fsdp.hsdp("x", "y")} if any("c" in unit for unit in units) else {}
    spec = Spec({"x": 2, "y": 2}, rule | {"*": fsdp.zero3("x", "y")})
    p = make_plan(plan_layout(leaves, spec))
    check(p)
    pools: list[dict[torch.dtype, list[int]]] = []
    for layout_unit in plan_layout(leaves, spec).units:
        pools.append({})
        for b in layout_unit.buckets:
            pools[-1].setdefault(b.compute, []).append(-(-b.numel * b.compute.itemsize // ALIGN) * ALIGN)
    assert p.arena == p.bound
    assert p.arena <= min(max_pool(pools, True), max_pool(pools, False))


@pytest.mark.parametrize("keep", [None, "all", 3_000_000_000, ("layer1*",)])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_hybrid_stack_is_packed_within_5_percent(depth: int, keep: Any) -> None:
    p = make_plan(hybrid(), Schedule(prefetch=depth, keep=keep))
    check(p)
    assert p.arena <= 1.05 * p.bound
    if depth == 1 and keep is None:
        assert p.arena == p.bound
        assert p.arena < 0.6 * max_pool([{BF16: [u.nbytes]} for u in p.units], True)  # 680 MiB against 1200


@pytest.mark.parametrize(
    "schedule",
    [Schedule(), Schedule(prefetch=4), Schedule(keep="all"), Schedule(keep=500 * MIB), Schedule(prefetch=2, keep=())],
    ids=["default", "depth 4", "all kept", "budget", "none kept"],
)
def test_1000_units_take_less_than_a_second(schedule: Schedule) -> None:
    layout = stack([1 + i * 7919 % 1009 for i in range(1000)])
    begun = time.process_time()
    p = make_plan(layout, schedule)
    assert time.process_time() - begun < 1
    assert p.bound <= p.arena


def test_planning_is_for_any_number_of_ranks() -> None:
    p = make_plan(stack([64] * 4, Spec({"data": 16384})))
    assert p.by_name["u0"].nbytes == 16384 * 128 * 4  # padded to 128 elements a rank


# -------------------------------------------------------------------------------- the program


def test_the_drawing() -> None:
    p = make_plan(stack([1, 2, 3]))
    assert [(u.name, u.lives) for u in p.units] == [
        ("u0", ((0, 0), (4, 5))),
        ("u1", ((0, 1), (3, 4))),
        ("u2", ((1, 3),)),
    ]
    assert p.turn == 3
    assert p.gathers == (("u0", 0, 0, 0), ("u1", 0, 1, 1), ("u2", 1, 2, 3), ("u1", 3, 4, 4), ("u0", 4, 5, 5))
    assert p.gathers[2] == Gather(unit="u2", start=1, first=2, last=3)
    assert p.due == (2, 3, 3, 4, 5, 5)
    assert [(use.unit, use.start, use.end, use.reduces) for use in p.uses] == [
        ("u0", 0, 0, False),
        ("u1", 0, 1, False),
        ("u2", 1, 3, False),
        ("u2", None, 3, True),
        ("u1", 3, 4, True),
        ("u0", 4, 5, True),
    ]
    assert [(u.gathers, u.kept) for u in p.units] == [(2, False), (2, False), (1, True)]
    assert [{a, b} for a, b in combinations(p.by_name, 2) if p.overlap(a, b)] == [{"u0", "u2"}]
    assert p.crowded == {"u0", "u2"}
    assert p.live(4) == ("u0", "u1")


@relaxed
@given(st.integers(1, 10), st.integers(0, 6))
def test_a_gather_starts_as_many_uses_ahead_as_the_depth_says(n: int, depth: int) -> None:
    """Never while the unit's own bytes are in use, never before the step."""
    p = make_plan(stack([1] * n), Schedule(prefetch=depth, keep=()))
    for k, use in enumerate(p.uses):
        before = max((j for j in p.by_name[use.unit].uses if j < k), default=-1)
        assert use.start == max(0, k - depth, before + 1)
    assert sum(u.gathers for u in p.units) == 2 * n


def test_by_default_what_would_occupy_its_bytes_anyway_stays_gathered() -> None:
    for depth in range(5):
        default, none = (make_plan(stack([3, 1, 4, 1, 5]), Schedule(prefetch=depth, keep=keep)) for keep in (None, ()))
        last = {f"u{i}" for i in range(4 - depth // 2, 5)}
        assert {u.name for u in default.units if u.kept} == last
        assert default.arena == default.bound == none.bound, "it costs nothing"
    assert all(u.gathers == 1 for u in make_plan(stack([1, 2, 3]), Schedule(keep="all")).units)
    some = make_plan(stack([1, 2, 3, 4]), Schedule(keep=["u0", "u2"]))
    assert {u.name: u.gathers for u in some.units} == {"u0": 1, "u1": 2, "u2": 1, "u3": 2}
    assert some.by_name["u0"].lives == ((0, 7),)


def test_depth_may_differ_by_unit_and_takes_patterns() -> None:
    schedule = Schedule(prefetch={"u2": 0, "u[34]": 3}, keep=())
    assert [schedule.depth(f"u{i}") for i in range(5)] == [1, 1, 0, 3, 3]
    p = make_plan(stack([1] * 5), schedule)
    assert [use.start for use in p.uses[:5]] == [0, 0, 2, 0, 1]
    assert [g.first for g in p.gathers[: p.due[0]]] == [0, 1, 3]
    check(p)


orders = st.lists(st.sampled_from(["u0", "u1", "u2", "u3", "u4"]), min_size=1, max_size=14)


@relaxed
@given(st.lists(st.integers(1, 40), min_size=5, max_size=5), orders, st.integers(0, 3), st.integers(0, 150))
def test_a_budget_keeps_the_set_that_saves_the_most_gathers(
    kibs: list[int], order: list[str], depth: int, kib: int
) -> None:
    layout, budget = stack(kibs), kib << 10
    default = make_plan(layout, Schedule(order, depth))
    p = make_plan(layout, Schedule(order, depth, keep=budget))
    check(p)
    candidates = [u for u in default.units if u.gathers > 1]
    best = (0, 0)  # gathers saved, bytes not needed
    for n in range(len(candidates) + 1):
        for chosen in combinations(candidates, n):
            spent = sum(u.nbytes for u in chosen)
            if spent <= budget:
                best = max(best, (sum(u.gathers - 1 for u in chosen), -spent))
    kept = [u for u in default.units if p.by_name[u.name].gathers < u.gathers]
    assert all(p.by_name[u.name].gathers == 1 for u in kept)
    assert (sum(u.gathers - 1 for u in kept), -sum(u.nbytes for u in kept)) == best


def test_a_budget_prefers_short_lives_among_equals_and_nothing_costs_nothing() -> None:
    layout = stack([4] * 6)
    p = make_plan(layout, Schedule(keep=9 << 10))
    assert [u.name for u in p.units if u.kept] == ["u3", "u4", "u5"]
    assert p.arena == p.bound == (4 + 4 + 4) << 10
    assert make_plan(layout, Schedule(keep=0)).units == make_plan(layout).units
    assert all(u.kept for u in make_plan(layout, Schedule(keep=1 << 40)).units)


def test_a_budget_takes_the_cheaper_way_to_save_as_many_gathers() -> None:
    """Keeping `u0` saves two gathers for 10 KiB, keeping `u1` and `u2` one each for 4 KiB together."""
    order, layout = ("u0", "u1", "u2", "u0", "u2", "u1", "u0"), stack([10, 2, 2])
    kept = [
        {u.name for u in make_plan(layout, Schedule(order, prefetch=0, keep=kib << 10)).units if u.kept}
        for kib in (1, 3, 11, 12, 14)
    ]
    assert kept == [set(), {"u2"}, {"u1", "u2"}, {"u0", "u2"}, {"u0", "u1", "u2"}]


#: orders (a group in brackets), and after which uses which units are reduced
REDUCED: dict[str, str] = {
    "aa": "a1", "abab": "a2 b3", "aaaa": "a1 a3", "abba": "b2 a3",  # two passes, or one
    "[ab]a[ab]a": "b1 a2 b4 a5",
    "abcaacba": "c5 b6 a7",  # `a` is used at both ends, and complete at its last use
    "ab[ca]ba": "c2 b4 a5",  # the turn is not inside a group
    # what is used in the forward only is reduced when the backward is through, the last first
    "abcddcb": "d4 c5 b6 a6", "acbdedc": "e4 d5 b5 c6 a6", "abc": "c2 b2 a2",
}  # fmt: skip


def calls_of(order: str) -> list[tuple[str, ...]]:
    return [tuple(f"u{'abcde'.index(c)}" for c in g) for g in re.findall(r"(?<=\[)\w+|\w", order)]


@pytest.mark.parametrize("order", REDUCED)
def test_a_gradient_is_reduced_where_it_is_complete(order: str) -> None:
    calls = calls_of(order)
    p = make_plan(stack(range(1, 1 + len({*order} - {*"[]"}))), Schedule(calls))
    check(p)
    assert tuple(use.unit for use in p.uses) == tuple(name for call in calls for name in call)
    assert [f"{'abcde'[int(r.unit[1])]}{r.use}" for r in p.reductions] == REDUCED[order].split()
    if order == "abcaacba":
        assert p.by_name["u0"].lives == ((0, 0), (2, 4), (6, 7))  # gathered again for each run of uses
    if order == "abc":
        assert p.staging == (3 + 2) << 10  # the largest two that come one after the other


def test_three_microbatches_written_out_prefetch_across_and_reduce_each_time() -> None:
    layout = stack([3, 1, 2, 2])
    once = ("u0", "u1", "u2", "u3", "u3", "u2", "u1", "u0")
    p = make_plan(layout, Schedule(once * 3))
    check(p)
    assert [r.use for r in p.reductions] == [8 * m + k for m in range(3) for k in (4, 5, 6, 7)]
    assert p.by_name["u0"].lives == ((0, 0), (6, 8), (14, 16), (22, 23))  # kept from one microbatch to the next
    assert p.uses[9].start == 8
    assert p.arena == p.bound == make_plan(layout).arena
    assert {u.gathers for u in make_plan(layout, Schedule(once * 3, keep="all")).units} == {1}


groups = st.lists(st.sampled_from(["u0", "u1", "u2", "u3", "u4"]), min_size=1, max_size=4, unique=True).map(tuple)
calls = st.lists(st.one_of(groups, st.sampled_from(["u0", "u1", "u2", "u3", "u4"])), min_size=1, max_size=10)


@relaxed
@given(st.lists(st.integers(1, 40), min_size=5, max_size=5), calls, st.integers(0, 3), st.data())
def test_every_order_of_groups_is_sound(kibs: list[int], order: list[Any], depth: int, data: Any) -> None:
    """Also with `u4` resident, and with any set of units kept."""
    keep = data.draw(st.one_of(st.none(), st.just("all"), st.integers(0, 100 << 10), st.just(("u[02]",))))
    placement = {"u4": fsdp.ddp("data"), "*": fsdp.zero3("data")} if data.draw(st.booleans()) else None
    p = make_plan(stack(kibs, Spec({"data": 2}, placement)), Schedule(order, depth, keep))
    check(p)
    assert tuple(use.unit for use in p.uses) == tuple(n for c in order for n in ([c] if isinstance(c, str) else c))


def test_what_is_used_at_once_is_live_at_once_and_freed_at_once() -> None:
    """A tied embedding, asked for together with the head."""
    order = ("u0", "u1", ("u0", "u2"), "u1", "u0")
    p = make_plan(stack([4, 1, 2]), Schedule(order, keep=()))
    check(p)
    assert [(use.unit, use.group, use.end) for use in p.uses] == [
        ("u0", (0, 0), 0),
        ("u1", (1, 1), 1),
        ("u0", (2, 3), 3),
        ("u2", (2, 3), 3),
        ("u1", (4, 4), 4),
        ("u0", (5, 5), 5),
    ]
    assert [g.start for g in p.gathers if g.first in (2, 3)] == [1, 1]  # a group counts as one use ahead
    assert p.uses[4].start == 2
    assert p.turn == 4
    assert p.live(2) == p.live(3) == ("u0", "u1", "u2")
    assert p.arena == p.bound == 7 << 10


@pytest.mark.parametrize(
    ("order", "turn"),
    [
        ("abc cba", 3),
        ("abc ba", 3),  # c is used once for both
        ("abc cb", 3),  # the backward of a needs no weights
        ("abc ccbbaa", 3),  # recomputed
        ("abc cba abc cba", 3),
        ("abca acba", 4),  # a is tied
        ("abca acb", 4),
        ("abca cb", 4),
        ("abcad dacba", 5),
        ("ababcab bacbaba", 7),
        ("abc", 3),
        ("abc abc", 3),
        ("ab[cb] [cb]ba", 4),
        ("ab[ca] ba", 4),  # not inside a group
        ("abc[ad] [ad]cba", 5),
        ("abc[ad] dacba", 5),
    ],
)
def test_the_forward_ends_where_the_rest_is_its_reverse(order: str, turn: int) -> None:
    p = make_plan(stack([1] * 4), Schedule(calls_of(order)))
    assert p.turn == turn
    check(p)


def test_a_tied_leaf_is_used_again_where_its_further_path_lies() -> None:
    def forward(paths: str, tied: dict[str, str]) -> str:
        """Leaves of the units a, b, ... in the tree's order; an upper-case letter is a further path of that unit."""
        names = [f"{c}.w{i}" for i, c in enumerate(paths)]
        again = {c: tuple(n for n in names if n[0] == c.upper()) for c in tied}
        leaves = [LeafInfo(n, (256,), FP32, aliases=again.get(n[0], ())) for n in names if n[0].islower()]
        p = make_plan(plan_layout(leaves, Spec({"data": 2}), names))
        check(p)
        order = "".join(use.unit[0] for use in p.uses)
        half = len(order) // 2
        assert p.turn == half
        assert order[half:] == order[:half][::-1], "the backward is the forward reversed"
        assert len(p.reductions) == len(p.units), "one pass, even where the forward is its own reverse"
        return order[:half]

    tied = {"a": "A"}
    assert forward("abcAd", tied) == "abcad"
    assert forward("abcA", tied) == "abca"
    assert forward("abAbc", tied) == "abac"  # inside b: before the next unit
    assert forward("abAAc", tied) == "abac"
    assert forward("aAbc", tied) == "abc", "never directly after itself"
    assert forward("abAcAd", tied) == "abacad"
    assert forward("aAbA", tied) == "aba"
    assert forward("abcABAd", {"a": "A", "b": "B"}) == "abcabd"
    assert forward("abBAB", {"a": "A", "b": "B"}) == "aba" + "b"


def test_a_model_with_a_tied_head() -> None:
    paths = ("embed.weight", "blocks.0.w", "blocks.1.w", "head.weight", "tail.w")
    leaves = [LeafInfo(n, (256,), FP32) for n in paths if n != "head.weight"]
    leaves[0] = LeafInfo("embed.weight", (1024,), FP32, aliases=("head.weight",))
    p = make_plan(plan_layout(leaves, Spec({"data": 2}), paths))
    check(p)
    forward = ["embed.weight", "blocks.0", "blocks.1", "embed.weight", "tail"]
    assert [use.unit for use in p.uses] == forward + forward[::-1]
    assert p.turn == 5
    reduced = {"tail": 5, "blocks.1": 7, "blocks.0": 8, "embed.weight": 9}
    assert [(r.unit, r.use) for r in p.reductions] == [*reduced.items()]


def test_what_is_used_in_the_forward_only_waits_for_frozen_units_and_in_each_microbatch() -> None:
    leaves = [LeafInfo(f"{n}.w", (256,), FP32, n != "f") for n in "afb"]
    once = ("a", "f", "b", "b", "f")
    p = make_plan(plan_layout(leaves, Spec({"data": 2})), Schedule(once * 2))
    check(p)
    assert [(r.unit, r.use) for r in p.reductions] == [("b", 3), ("a", 4), ("b", 8), ("a", 9)]
    assert p.turn == 3


def test_a_recorded_order_is_not_known_before_the_first_step() -> None:
    schedule = Schedule("recorded", {"u0": 2}, ["u1"], debug=True)
    with pytest.raises(ScheduleError, match=r"'recorded'\) has no order before the first step\. Give an order, as"):
        make_plan(stack([1, 2]), schedule)
    assert schedule.ordered(["u0", ["u1", "u0"]]) == Schedule(("u0", ("u1", "u0")), {"u0": 2}, ["u1"], debug=True)


def test_resident_and_frozen_units() -> None:
    leaves = [LeafInfo(f"{n}.w", (1024,), FP32, n != "frozen") for n in ("a", "norm", "frozen", "b")]
    spec = Spec({"data": 2}, {"norm": fsdp.zero2("data"), "*": fsdp.zero3("data")})
    p = make_plan(plan_layout(leaves, spec))
    check(p)
    norm = p.by_name["norm"]
    assert (norm.nbytes, norm.parts, norm.lives, norm.gathers) == (0, (), (), 0)
    assert p.by_name["frozen"].lives == ((0, 2), (4, 5))  # the resident unit in between does not count
    assert [r.unit for r in p.reductions] == ["b", "norm", "a"]
    assert make_plan(plan_layout(leaves, Spec({"data": 2}, fsdp.ddp("data")))).arena == 0


def test_staging_is_sized_by_what_travels() -> None:
    leaves = [LeafInfo(f"u{i}.w", (n * 1024,), FP32) for i, n in enumerate((3, 8, 5, 1))]
    for compute in (FP32, BF16, torch.float64):
        p = make_plan(plan_layout(leaves, Spec({"data": 2}, precision=Precision(compute=compute))))
        assert [(r.unit, r.nbytes) for r in p.reductions] == [
            (f"u{i}", n * 1024 * compute.itemsize) for i, n in ((3, 1), (2, 5), (1, 8), (0, 3))
        ]
        assert p.staging == (5 + 8) * 1024 * compute.itemsize  # two at once, the largest neighbours
        assert [(r.use, r.until) for r in p.reductions] == [(4, 6), (5, 7), (6, 8), (7, 8)]
        check(p)


def test_with_one_slot_every_reduction_lies_on_the_same_bytes() -> None:
    leaves = [LeafInfo(f"u{i}.w", (n * 1024,), FP32) for i, n in enumerate((3, 8, 5, 1))]
    layout = plan_layout(leaves, Spec({"data": 2}, transport="copy_engine"))
    two, one = make_plan(layout), make_plan(layout, slots=1)
    assert {reduction.address for reduction in one.reductions} == {0}
    assert (one.staging, two.staging) == (8 * 4096, (5 + 8) * 4096)
    assert [r.until for r in one.reductions] == [5, 6, 7, 8]
    assert one.received == two.received == (5 + 8) * 4096  # what exact sums receive lies beside it, two at once
    assert one.hash != two.hash


# -------------------------------------------------------------------------------- values, texts, pictures


def test_schedules_and_plans_are_values() -> None:
    assert Schedule() == Schedule(None, 1, None, False)
    one, two = Schedule(["u0", "u0"], {"u0": 2}, {"u1", "u0"}), Schedule(("u0", "u0"), {"u0": 2}, ["u0", "u1"])
    assert one == two
    assert Schedule([["u0", "u1"], ["u2"]]) == Schedule((("u0", "u1"), "u2")) != Schedule(("u0", "u1", "u2"))
    assert len({one, two, Schedule(), Schedule(prefetch=2), Schedule(keep=0), Schedule(debug=True)}) == 5
    layouts = stack([1, 2, 3]), stack([1, 2, 3])
    a, b = map(make_plan, layouts)
    assert a == b
    assert (hash(a), a.hash) == (hash(b), b.hash)
    assert pickle.loads(pickle.dumps(a)) == a == copy.deepcopy(a)
    others = {make_plan(layouts[0], s) for s in (Schedule(prefetch=0), Schedule(keep="all"), Schedule(debug=True))}
    assert len({a, b, make_plan(stack([1, 2, 4])), *others}) == 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"order": "abc"}, r"Schedule\(order='abc'\): expected the names of units in order of use"),
        ({"order": ["a", 1]}, r"Schedule\(order=\('a', 1\)\): expected the names"),
        ({"order": ["a", ("b", 1)]}, r"expected the names of units .* a tuple of names where several are used at once"),
        ({"order": ["a", {"b", "c"}]}, r"Schedule\(order=.*expected the names of units"),
        ({"order": ["a", ()]}, r"Schedule\(order\): use 1 is the group \(\); expected at least 1 unit, each once"),
        ({"order": [("a", "a")]}, r"Schedule\(order\): use 0 is the group \('a', 'a'\); expected at least 1 unit"),
        ({"order": ()}, r"Schedule\(order=\(\)\): expected at least 1 use, got 0. None means"),
        ({"prefetch": -1}, r"Schedule\(prefetch\): '\*' maps to -1; expected a number of uses of at least 0"),
        ({"prefetch": {"u0": 1.5}}, r"Schedule\(prefetch\): 'u0' maps to 1.5; expected a number"),
        ({"prefetch": True}, r"Schedule\(prefetch\): '\*' maps to True"),
        ({"keep": "u0"}, r"'frozen', a set .*, or a number of bytes \(an int, at least 0\). One unit is \{'u0'\}"),
        ({"keep": 2e9}, r"keep=2000000000.0\): expected None, 'all', 'frozen', a set of units, or a number of bytes"),
        ({"keep": [1]}, r"Schedule\(keep=\[1\]\): expected None"),
        ({"keep": True}, r"keep=True\): expected None"),
        ({"keep": -5}, r"keep=-5\): expected None, .* or a number of bytes \(an int, at least 0\)"),
    ],
)
def test_a_schedule_says_what_is_wrong_with_it(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        Schedule(**arguments)


def test_a_schedule_in_words() -> None:
    order = ("u0", ("u1", "u0"))
    words = {
        Schedule(): "forward, then backward; prefetch 1",
        Schedule("recorded", prefetch=2, keep="all"): "order recorded in the first step; prefetch 2; keeps everything",
        Schedule(order, {"u0": 0, "*": 2}, keep=()): "2 uses in order; prefetch u0: 0, *: 2; keeps nothing",
        Schedule(keep=["b", "a"], debug=True): "forward, then backward; prefetch 1; keeps a, b; debug",
        Schedule(keep=3 << 20): "forward, then backward; prefetch 1; keeps 3.0 MiB more",
    }
    assert {schedule: str(schedule) for schedule in words} == words


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (
            Schedule(("u0", ("u1", "head"))),
            r"\(order\): 'head' is not a unit .* 5 units are 'u0', 'u1', 'u2', 'u3', ...",
        ),
        (Schedule(keep=["blocks.*"]), r"Schedule\(keep\): 'blocks.\*' matches no unit .* or leave keep out"),
        (Schedule(prefetch={"x": 2}), r"Schedule\(prefetch\): 'x' matches no unit"),
    ],
)
def test_a_plan_says_what_the_layout_does_not_have(schedule: Schedule, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make_plan(stack([1] * 5), schedule)


def test_printing_a_plan_gives_a_table() -> None:
    leaves = [LeafInfo(f"{n}.w", (1024,), FP32, n != "c") for n in ("a", "norm", "b", "c")]
    spec = Spec({"data": 2}, {"norm": fsdp.ddp("data"), "*": fsdp.zero3("data")})
    lines = str(make_plan(plan_layout(leaves, spec), Schedule(debug=True))).splitlines()
    assert [" ".join(line.split()) for line in lines if not line.startswith("-")] == [
        "unit bytes address gathered in uses gathers kept reduces",
        "a 4.0 KiB 0 0, 5–7 2 - 1",
        "norm resident - - - - 1",
        "b 4.0 KiB 4,096 0–2, 4–5 2 - 1",
        "c 4.0 KiB 0 2–4 1 yes -",
        "8 uses, 5 gathers, 3 reductions a step; prefetch 1, debug",
        "arena 8.0 KiB (two sides; lower bound 8.0 KiB, +0.0 %), staging 8.0 KiB",
    ]


def test_the_prediction_by_hand() -> None:
    """Two units: gathers and reductions take 1 s, forwards 2 s, backwards 4 s."""
    p = make_plan(stack([4, 4]))
    timeline = timeline_of(p, gather=4096, reduce=4096, compute=2.0)
    lanes = {name: [(s.unit, s.begin, s.end) for s in timeline.lane(name)] for name in ("gather", "compute", "reduce")}
    assert lanes == {
        "gather": [("u0", 0, 1), ("u1", 1, 2), ("u0", 5, 6)],
        "compute": [("u0", 1, 3), ("u1", 3, 5), ("u1", 5, 9), ("u0", 9, 13)],
        "reduce": [("u1", 9, 10), ("u0", 13, 14)],
    }
    assert timeline.seconds == 14
    assert timeline.hidden("gather") == pytest.approx(2 / 3)
    assert timeline.hidden("reduce") == pytest.approx(1 / 2)
    serial = timeline_of(make_plan(stack([4, 4]), Schedule(prefetch=0)), gather=4096, reduce=4096, compute=2.0)
    assert serial.hidden("gather") == 0
    assert serial.seconds == 16


def test_compute_waits_for_staging_when_reductions_are_slow() -> None:
    p = make_plan(stack([4] * 4), Schedule(keep="all"))
    timeline = timeline_of(p, gather=4e9, reduce=409.6, compute={f"u{i}": 1.0 for i in range(4)}, backward=1.0)
    reduces, compute = timeline.lane("reduce"), timeline.lane("compute")
    assert [round(s.seconds) for s in reduces] == [10] * 4
    assert compute[7].begin >= reduces[0].end  # the third reduction's copy waited for the first one's staging


def test_several_reductions_after_one_use_take_turns_in_staging() -> None:
    p = make_plan(stack([4] * 4), Schedule(("u0", "u1", "u2", "u3")))
    timeline = timeline_of(p, gather=4e9, reduce=4096, compute=1.0)
    assert [(s.unit, s.use) for s in timeline.lane("reduce")] == [(f"u{i}", 3) for i in (3, 2, 1, 0)]
    assert all(a.end <= b.begin for a, b in pairwise(timeline.lane("reduce")))


def test_a_slow_rank_keeps_the_others_waiting() -> None:
    """Of three ranks the last takes twice as long: collectives go by it, and in the end all the others wait for it."""
    p = make_plan(stack([1024] * 3), Schedule(prefetch=1))

    def of(compute: float, ranks: Sequence[float] = (1.0,)) -> Timeline:
        return timeline_of(p, gather=4096, reduce=4096, compute=compute, ranks=ranks)

    alone, slow, timeline = of(2.0), of(4.0), of(2.0, (1, 1, 2))
    assert timeline.lanes == ("gather", "compute 0", "compute 1", "compute 2", "reduce")
    for lane in ("gather", "reduce"):
        assert timeline.lane(lane) == slow.lane(lane) != alone.lane(lane)
    mine, last = timeline.lane("compute 0"), timeline.lane("compute 2")
    assert [(s.begin, s.end) for s in last] == [(s.begin, s.end) for s in slow.lane("compute")]
    assert timeline.busy("compute 0") == alone.busy("compute")
    assert mine[-1].end < last[-1].end
    assert all(a.begin >= g.end for a in mine for g in timeline.lane("gather") if g.use == a.use)
    with pytest.raises(SpecError, match=r"timeline\(ranks=\(\)\): expected a number for each rank"):
        of(2.0, ())


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    group = make_plan(stack([1, 2]), Schedule((("u0", "u1"), "u0")))
    fsdp.timeline(group, tmp_path / "group.png", gather=1e3, reduce=1e3, compute=1.0)
    p = make_plan(hybrid(), Schedule(prefetch=2, keep=2_000_000_000))
    seconds = {u.name: 1e-3 + u.nbytes / 4e11 for u in p.units}
    timeline = fsdp.timeline(p, tmp_path / "plan.png", gather=300e9, reduce=200e9, compute=seconds)
    assert timeline == timeline_of(p, gather=300e9, reduce=200e9, compute=seconds)
    pixels = (image.imread(tmp_path / "plan.png")[:, :, :3] * 255).round().astype("int64")
    assert pixels.shape[0] >= 900
    assert pixels.shape[1] >= 1600
    colours = torch.from_numpy(pixels) @ torch.tensor([1 << 16, 1 << 8, 1])
    values, counts = torch.unique(colours, return_counts=True)
    assert int((counts > 500).sum()) > 40, "a colour for every unit"
    assert float(counts.max()) / counts.sum() < 0.9, "not an empty page"
    assert len(values) > 100


def test_labels_are_whole_in_the_middle_of_their_boxes_and_fit() -> None:
    seen: list[tuple[Any, ...]] = []
    axes = SimpleNamespace(add_patch=lambda patch: None)
    axes.text = lambda x, y, said, fontsize, rotation, **_: seen.append((x, y, said, fontsize, rotation))
    panel = Panel(axes, lambda *args, **style: None, (10.0, 5.0), (100.0, 10.0))  # a page of 100 by 10 in inches
    for width in (10, 5, 1.2, 0.5):
        panel.box(20, 4, width, 2, "layers.mlp")
    narrow = pytest.approx(0.7 * 1.2 * 72 / 10)
    assert seen == [
        (25, 5, "layers.mlp", 9.0, 0),
        (22.5, 5, "layers.mlp", 9.0, 90),
        (20.6, 5, "layers.mlp", narrow, 90),
    ]
    assert panel.unnamed == ["layers.mlp"]


def test_times_go_by_names_and_patterns() -> None:
    p = make_plan(stack([4, 4, 4]))
    found = timeline_of(p, gather=4096, reduce=4096, compute={"u[01]": 2.0, "u1": 3.0})
    assert [(span.unit, span.seconds) for span in found.lane("compute")][:3] == [("u0", 2.0), ("u1", 3.0), ("u2", 0.0)]


def test_bandwidths_and_times_are_checked(tmp_path: Path) -> None:
    p = make_plan(stack([1]))
    with pytest.raises(SpecError, match=r"timeline\(gather=0\): expected bytes a second, more than 0, as 300e9"):
        fsdp.timeline(p, tmp_path / "x.png", gather=0, reduce=1, compute=1.0)
    with pytest.raises(SpecError, match=r"timeline\(compute\): \{'u0': -1.0\} is negative"):
        fsdp.timeline(p, tmp_path / "x.png", gather=1, reduce=1, compute={"u0": -1.0})


def test_bytes_lie_in_the_arena_as_long_as_the_plan_says() -> None:
    """What is drawn of a unit: gathered, waiting, and as wide as its compute."""
    p = make_plan(stack([4, 4]))
    found = timeline_of(p, gather=4096, reduce=4096, compute=2.0)
    drawn = [
        (begin, loaded, done, [s.seconds for s in spans]) for begin, loaded, done, spans in _lives(p.units[0], found)
    ]
    assert drawn == [(0, 1, 3, [2.0]), (5, 6, 13, [4.0])]


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "functional-fsdp\[plots\]"'):
        fsdp.timeline(make_plan(stack([1])), tmp_path / "x.png", gather=1, reduce=1, compute=1.0)
