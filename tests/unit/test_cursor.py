"""Cursor and advance, pure: their table row by row, and simulated ranks that skip what they like."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import FULL, product

import functional_fsdp as fsdp
from functional_fsdp import Layout, Schedule, ScheduleError, Spec
from functional_fsdp._plan.cursor import Action, Cursor, Positions, advance, nominal, numbers
from functional_fsdp._plan.layout import LeafInfo, plan_layout
from functional_fsdp._plan.plan import ALIGN, Plan, make_plan

relaxed = settings(deadline=None, max_examples=150 if FULL else 40)
LETTERS = "abcdefgh"


def stack(kibs: Sequence[int], frozen: str = "", spec: Spec | None = None) -> Layout:
    """A layout of one float32 leaf a unit: a, b, ... of so many KiB."""
    leaves = [LeafInfo(f"{x}.w", (256 * kib,), torch.float32, x not in frozen) for x, kib in zip(LETTERS, kibs)]  # noqa: B905
    return plan_layout(leaves, spec or Spec({"data": 2}))


def made(n: int, *order: Any, frozen: str = "", **schedule: Any) -> Plan:
    """`n` units of equal size; an order is given as letters, a group as a tuple or list of them."""
    return make_plan(stack([1] * n, frozen), Schedule(order or None, **schedule))


def gathers_of(actions: Sequence[Action]) -> list[int]:
    return [what for kind, what in actions if kind == "gather"]


def reductions_of(actions: Sequence[Action]) -> list[tuple[int, bool]]:
    return [due for kind, what in actions if kind == "reduce" for due in what]


def doing(actions: Sequence[Action]) -> list[Action]:
    """Without the reductions that only say: try again what was put off."""
    return [action for action in actions if action != ("reduce", ())]


def passes_of(p: Plan, times: int) -> list[int]:
    """What so many passes of a step gather: what stays only in the first."""
    return [*range(len(p.gathers)), *[i for i, g in enumerate(p.gathers) if g.unit not in p.stays] * (times - 1)]


def said(kind: str, what: Any) -> list[str]:
    """An action as a story says it: a gather's number; a reduction's as r0, of zeros as z0; a unit outside the plan as
    !a, one that ranks agree on as =a."""
    if kind == "gather":
        return [str(what)]
    if kind == "reduce":
        return [f"{'r' if given else 'z'}{i}" for i, given in what]
    return [{"unplanned": "!", "agreed": "="}[kind] + what] if kind in ("unplanned", "agreed") else []


class Rank:
    """A rank's cursor and the arena that it would fill: each gather stamps its bytes, each use looks at the stamps.

    Whatever is asked for: gathers are issued in the plan's order, none over a unit that is held, what is handed out has
    the bytes of its gather, and cursors never change.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cursor = Cursor(plan)
        self.arena = [""] * (plan.arena // ALIGN)
        self.held: set[str] = set()  # in the arena
        self.unplanned: set[str] = set()  # held, outside the plan
        self.gathers: list[int] = []
        self.stay: set[str] = set()  # gathered, until the end of the step
        self.reductions: list[int] = []
        self.given: list[bool] = []
        self.log: list[str] = []  # what was started, as stories say it
        self.passes = 0

    @property
    def early(self) -> set[int]:
        return set(numbers(self.cursor.early_bits))

    def place(self, name: str) -> slice:
        unit = self.plan.by_name[name]
        return slice(unit.address // ALIGN, (unit.address + unit.nbytes) // ALIGN)

    def good(self, name: str) -> bool:
        return set(self.arena[self.place(name)]) <= {name}

    def happens(self, kind: str, *units: str) -> list[Action]:
        """What follows, done. On a ScheduleError nothing has changed."""
        before = replace(self.cursor)
        cursor, actions = advance(self.plan, self.cursor, (kind, units))
        assert self.cursor == before
        assert (cursor, actions) == advance(self.plan, before, (kind, units)), "a function of values"
        self.passes += cursor.at < self.cursor.at
        self.cursor = cursor
        for what, which in actions:
            self.log += said(what, which)
            if what == "gather":
                self.gather(which)
            elif what == "reduce":
                self.note(which)
            elif what == "unplanned" and kind == "unshard":
                self.unplanned.add(which)
            elif what == "free":
                place = self.place(which)
                self.arena[place] = ["NaN"] * (place.stop - place.start)
        return [*actions]

    def gather(self, i: int) -> None:
        name = self.plan.gathers[i].unit
        assert name not in self.stay, f"{name} stays, and is gathered again"
        before = i
        while before and self.gathers[-1:] != [before - 1] and self.plan.gathers[before - 1].unit in self.stay:
            before -= 1  # it is there since an earlier pass
        assert before == 0 or self.gathers[-1] == before - 1, "out of the plan's order"
        place = self.place(name)
        self.arena[place] = [name] * (place.stop - place.start)
        for other in self.held:
            assert self.good(other), f"gathering {name} wrote over {other}, which is held"
        self.gathers.append(i)
        self.stay |= {name} & self.plan.stays

    def note(self, due: Sequence[tuple[int, bool]]) -> None:
        for i, came in due:
            assert i == (self.reductions[-1] + 1 if self.reductions else 0) % len(self.plan.reductions)
            self.reductions.append(i)
            self.given.append(came)

    def use(self, *names: str) -> list[int]:
        """The gathers that it starts."""
        actions = self.happens("unshard", *names)
        outside = {what for kind, what in actions if kind == "unplanned"}
        assert outside <= set(names)
        for name in names:
            if name not in outside:
                assert self.good(name), f"{name} is handed out, but these are not its bytes"
                self.held.add(name)
        return gathers_of(actions)

    def release(self, *names: str) -> list[int]:
        """The gathers that waited for these bytes."""
        self.unplanned -= set(names)
        mine = [name for name in names if name in self.held]
        self.held -= set(mine)
        actions = self.happens("release", *mine)
        assert {what for kind, what in actions if kind == "free"} <= set(mine)
        return gathers_of(actions)

    def once(self, *names: str) -> list[int]:
        """A use and its release."""
        indices = self.use(*names)
        return indices + self.release(*names)

    def reduce(self, name: str) -> list[tuple[int, bool]]:
        """What is reduced now."""
        return reductions_of(self.happens("reduce", name))

    def tree(self) -> None:
        """A microbatch of the whole tree."""
        self.happens("round")
        for name in dict.fromkeys(reduction.unit for reduction in self.plan.reductions):
            self.happens("reduce tree", name)
        self.happens("round")

    def end(self) -> None:
        """As `step`: catch up with the gathers, close the round, begin anew."""
        assert repr(self.cursor) == repr(replace(self.cursor))  # to be printed it takes no other state
        self.held.clear()
        self.happens("step")
        assert doing(self.happens("step")) == []
        assert self.stay <= {*self.cursor.live}
        self.cursor = Cursor(self.plan)
        self.stay.clear()

    def evaluate(self, units: str) -> None:
        for name in units:
            self.once(name)

    def train(self, units: str, fused: bool = False) -> None:
        """`fused`: forward and backward of the last unit in one use."""
        for name in units[: len(units) - fused]:
            self.once(name)
        for i, name in enumerate(reversed(units)):
            assert fused or i or name == units[-1]
            self.use(name)
            self.reduce(name)
            self.release(name)


# -------------------------------------------------------------------------------- the table, row by row


def names_of(text: str) -> set[str]:
    return set(text.replace(" ", ""))


#: what stories say of a rank, beside what it does
SEEN: dict[str, Callable[[Rank, str], bool]] = {
    "at": lambda rank, text: rank.cursor.at == int(text),
    "passes": lambda rank, text: rank.passes == int(text),
    "held": lambda rank, text: rank.cursor.held == names_of(text),
    "outside": lambda rank, text: rank.unplanned == names_of(text),
    "early": lambda rank, text: rank.early == {*map(int, text.split())},
    "reduced": lambda rank, text: rank.cursor.reduced == int(text),
    "agreed": lambda rank, text: rank.cursor.agreed == (text == "yes"),
    "gathers": lambda rank, text: rank.gathers == [*map(int, text.split())],
    "reductions": lambda rank, text: [x for x in rank.log if x[0] in "rz"] == text.split(),
}


def tell(rank: Rank, story: str) -> None:
    """`use ab > 0 1`: what is done with which units, and what that starts (nothing is said without a >). Events
    of `advance` have a star before them."""
    for step in filter(None, map(str.strip, story.split(";"))):
        did, arrow, started = step.partition(">")
        verb, _, names = did.strip().partition(" ")
        before = len(rank.log)
        if verb in SEEN:
            assert SEEN[verb](rank, names), f"{step}: {rank.cursor}"
        elif verb[0] == "*":
            rank.happens(verb[1:].replace("-", " "), *names)
        elif verb in ("evaluate", "train"):
            getattr(rank, verb)(names)
        else:
            getattr(rank, verb)(*names)
        assert not arrow or rank.log[before:] == started.split(), f"{step}: started {rank.log[before:]}"


STORIES: dict[str, tuple[Plan, str]] = {
    "the drawing in `_plan.plan`": (made(3),
        "use a > 0 1; release a >; use b > 2; release b >; use c >; release c >; use c > 3; release c >; use b > 4;"
        "release b >; use a >; release a >; at 6; passes 0"),
    "one that is held is handed out again": (made(4),
        "use a; use a >; at 1; use aa >; release a; use b > 2; use b >; at 2"),
    "and together with others": (made(4), "use a; use ab; held ab; use ba; at 2; release ab; train abcd"),
    "one that is kept is handed out again without a gather": (made(3, keep="all"), "evaluate abccba; gathers 0 1 2"),
    "also one that was released": (made(3, keep="all"), "once a; once b; use b; gathers 0 1 2"),
    "units that share nothing may be held as long as one likes": (made(3, keep="all"),
        "use a; use b; use c; use c; use b; use a; held abc; release abc; end"),
    "everything else is outside the plan": (made(3, *"abba"),
        "once a; use c > !c; outside c; at 1; held; reduce c > !c; use bc > !c; at 2; held b; use n > !n"),
    "a group may be asked for one after the other": (made(3, "a", ("b", "c"), "a"),
        "once a; use b; use c; held bc; at 3; outside"),
    "of a call of two, one is tied and used alone before": (
        made(4, "b", "a", "c", ("a", "d"), ("a", "d"), "c", "a", "b", prefetch=0, keep=()),
        "once b; use ad; outside; at 5"),
    "a tied unit whose gradient is late is not waited for at each of its uses": (made(3, *"abcb", *"bcba"),
        "once a; once b; once b; use b; release b; use a; passes 0; at 8"),
    # gradients
    "gradients are reduced in the plan's order, and early ones wait": (made(4),
        "evaluate abcddcba; reduce b >; reduce c >; early 1 2; reduce d > r0 r1 r2; reduce a > r3; early; reduced 0"),
    "a gradient may come long before and long after its turn": (made(3),
        "evaluate abc; reduce a >; once c; reduce c > r0; once b; reduce b > r1 r2; evaluate abc; evaluate cba;"
        "reduce a >; reduce b >; reduce c > r0 r1 r2; end; gathers 0 1 2 3 4 0 1 2 3 4"),
    "zeros are reduced for a unit that was passed without a use": (made(4),
        "evaluate abd; use d; reduce d > r0; release d; use b > 5 z1 6; reduce b > r2; release b; use a; reduce a > r3;"
        "release a; end; reductions r0 z1 r2 r3"),
    "no zeros for a unit whose gradient may still come": (made(3),
        "evaluate abccb; use a; reduce a >; reduce b >; reduce c > r0 r1 r2"),
    "units that are skipped last get zeros when nothing more can come: peers wait for it": (made(4),
        "train cd; reductions r0 r1 z2 z3; end; reductions r0 r1 z2 z3; train ab; end;"
        "reductions r0 r1 z2 z3 z0 z1 r2 r3"),
    "a unit given twice begins the next round": (made(3),
        "evaluate abccba; reduce c > r0; reduce c > z1 z2 r0; reduce b > r1; end; reductions r0 z1 z2 r0 r1 z2"),
    "a gradient that waits is not lost when its unit is given again": (made(3),
        "evaluate abc; reduce b >; reduce b > z0 r1 z2; early 1; *round > z0 r1 z2"),
    "a program of two microbatches, and a step of one": (made(2, *"abbaabba"),
        "train ab; train ab; reductions r0 r1 r2 r3; passes 0; end; train ab; end; gathers 0 1 2 3 4 0 1 2 3 4;"
        "reductions r0 r1 r2 r3 r0 r1 z2 z3"),
    "frozen units are gathered and never reduced": (made(4, frozen="bd"),
        "reduce b > !b; evaluate abcdd; use c; reduce c > r0; release c; once b; use a; reduce a > r1; end"),
    "nothing is trained": (made(2, frozen="ab"), "reduce a > !a; *round >"),
    "gradients of a whole tree come without a use": (made(4),
        "reduce d; reduce c; reduce b; reduce a; reductions r0 r1 r2 r3; gathers; end; gathers"),
    "what a forward leaves out is no place that a rank must come to": (
        make_plan(stack([1] * 3), Schedule([*"abcb", *"ca"]), forward=4),  # b is used twice, and never in the backward
        "*begin; once a; once b; once c; *turn; use c; outside; reduce c > r0; release c; reduce b > r1; use a;"
        "reduce a > r2"),
    # ranks that agree on each use
    "gradients are reduced in the plan's order all the same": (made(3),
        "*begin-agreed; *unshard c > =c; *release c; *unshard a > =a; *release a; *turn; reduce a >;"
        "reduce c > r0 z1 r2; gathers; *end; agreed no; train abc; end; gathers 0 1 2 3 4"),
    "a pass in which nothing is used goes to its end": (made(3),
        "*begin; *turn; *await b; reduce b >; *end; gathers 0 1 2 3 4; reductions z0 r1 z2"),
    "no zeros for a peer while this rank's forward goes on, nor a gather of the plan": (made(3),
        "*begin-agreed; *unshard a; *peer-reduces >; *peer-gathers >; *turn; *peer-reduces > z0; *peer-reduces > z1;"
        "*peer-reduces >"),  # that of `a` may come
    "nothing for a peer of a round that has not begun": (made(3),
        "*begin-agreed; *turn; *peer-reduces > z0; *peer-reduces > z1; *peer-reduces > z2; *peer-reduces >"),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_story(story: str) -> None:
    plan, text = STORIES[story]
    tell(Rank(plan), text)


def test_stories_are_compared() -> None:
    for wrong in ("use a > 0", "use a; at 2", "reduce a >; reductions r1"):
        with pytest.raises(AssertionError):
            tell(Rank(made(3)), wrong)


@pytest.mark.parametrize("keep", [None, (), ("b",), "all"])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_every_depth_issues_what_the_plan_says(depth: int, keep: Any) -> None:
    p = make_plan(stack([3, 1, 4, 1, 5]), Schedule(prefetch=depth, keep=keep))
    rank = Rank(p)
    for k, name in enumerate("abcdeedcba"):
        rank.use(name)
        assert len(rank.gathers) == p.due[k]
        assert rank.cursor.held == {name}
        assert {*p.live(k)} | p.stays >= set(rank.cursor.live), "live is what the plan says"
        rank.release(name)
        assert (name in rank.cursor.live) == (p.uses[k].end > k or name in p.stays), "free is what the plan says"
    assert rank.cursor.live.keys() == p.stays
    rank.end()


def test_what_stays_is_gathered_once_a_step() -> None:
    """All of "all"; of some that are kept those in whose bytes nothing else lies; never what is to be good no more."""
    rank = Rank(made(3, keep="all"))
    assert rank.plan.stays == {"a", "b", "c"}
    for _ in range(3):
        rank.train("abc")
    rank.evaluate("abc")
    assert rank.gathers == [0, 1, 2]
    assert rank.reductions == [0, 1, 2] * 3
    rank.end()
    rank.train("abc")  # weights are new
    assert rank.gathers == [0, 1, 2] * 2
    rank = Rank(made(5, keep=("a",)))
    assert rank.plan.stays == {"a"}
    for _ in range(2):
        rank.train("abcde")
    assert [rank.plan.gathers[i].unit for i in rank.gathers].count("a") == 1
    assert rank.gathers == passes_of(rank.plan, 2)
    assert made(3).stays == made(3, keep=()).stays == made(3, keep="all", debug=True).stays == frozenset()


def test_a_peer_that_waits_is_helped_past_what_stays() -> None:
    rank = Rank(made(5, keep=("a", "b")))
    assert rank.plan.stays == {"a", "b"}
    rank.train("abcde")
    rank.use("a")
    issued = len(rank.gathers)
    rank.happens("peer gathers")
    assert rank.plan.gathers[rank.gathers[issued]].unit == "c"
    assert len(rank.gathers) == issued + 1


def test_one_that_comes_later_is_that_use_and_what_lies_between_is_issued_all_the_same() -> None:
    p = made(5)
    rank = Rank(p)
    for name, use in (("a", 0), ("d", 3), ("d", 6), ("a", 9)):  # the backward of e was skipped too
        rank.once(name)
        assert rank.cursor.at == use + 1
        assert rank.gathers == list(range(p.due[use]))
    assert rank.gathers == list(range(len(p.gathers)))


def test_one_that_begins_the_program_is_the_next_pass() -> None:
    rank = Rank(made(3))
    for evaluation in range(3):
        for name, cursor in zip("abc", (1, 2, 3), strict=True):
            rank.once(name)
            assert rank.cursor.at == cursor
            assert rank.passes == evaluation
    assert rank.gathers == [0, 1, 2] * 3
    for microbatch in range(3):
        rank.train("abc")
        assert rank.passes == 3 + microbatch
    assert rank.gathers == [0, 1, 2] * 3 + [0, 1, 2, 3, 4] * 3
    assert rank.reductions == [0, 1, 2] * 3
    rank.evaluate("abc")
    assert rank.passes == 6
    rank.end()
    assert rank.gathers == [0, 1, 2] * 3 + [0, 1, 2, 3, 4] * 3 + [0, 1, 2]


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_pass_that_ends_early_is_issued_to_its_end(depth: int) -> None:
    """An evaluation to the end of the forward, with what is prefetched there; a microbatch to the end of all."""
    p = make_plan(stack([3, 1, 4, 1, 5]), Schedule(prefetch=depth))
    rank = Rank(p)
    rank.evaluate("abcd")
    rank.evaluate("abc")
    assert rank.gathers[: p.due[4]] == list(range(p.due[4]))
    assert rank.gathers[p.due[4]] == 0
    rank.train("abc")
    rank.evaluate("ac")
    rank.end()
    forward = list(range(p.due[4]))
    assert rank.gathers == [*forward, *forward, *range(len(p.gathers)), *forward]


def test_what_only_looked_reduces_nothing_at_its_end() -> None:
    """Not even where it looked like a backward that came by a unit without its gradient."""
    rank = Rank(made(3, *"abccba", frozen="b"))
    for unit in "aba":
        rank.happens("unshard", unit)
        rank.happens("release", unit)
    before = rank.cursor
    assert reductions_of(rank.happens("look")) == []
    assert reductions_of(advance(rank.plan, before, ("step", ()))[1]) == [(1, False)]


# -------------------------------------------------------------------------------- several units at once


@pytest.mark.parametrize("names", ["ad", "da"])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_group_of_the_order_is_asked_for_in_any_order(depth: int, names: str) -> None:
    p = made(4, "a", "b", "c", ("a", "d"), "c", "b", "a", prefetch=depth)
    rank = Rank(p)
    for name in "abc":
        rank.once(name)
    rank.use(*names)
    assert rank.cursor.at == 5
    assert rank.cursor.held == {"a", "d"}
    assert len(rank.gathers) == p.due[4]
    rank.reduce("d")
    rank.release(*names)
    for name in "cba":
        rank.use(name)
        rank.reduce(name)
        rank.release(name)
    assert rank.gathers == list(range(len(p.gathers)))
    assert rank.unplanned == set()
    for _ in range(2):
        rank.evaluate("abc")
        rank.once(*names)
    assert rank.unplanned == set()
    rank.end()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_of_groups_that_are_alike_the_next_one_is_meant(depth: int) -> None:
    rank = Rank(made(3, ("a", "b"), "c", ("a", "b"), "c", ("a", "b"), prefetch=depth, keep=()))
    for names, at in (("ab", 2), ("c", 3), ("ba", 5), ("c", 6), ("ab", 8)):
        rank.use(*names)
        assert rank.cursor.at == at
        rank.release(*names)
    assert rank.unplanned == set()


@pytest.mark.parametrize(
    ("kibs", "depth", "keep"), product(((1,) * 5, (2, 1, 3, 1, 2), (5, 4, 3, 2, 1)), (0, 1, 2, 4), (None, (), "all"))
)
def test_units_named_at_once_that_the_plan_has_one_after_the_other(
    kibs: tuple[int, ...], depth: int, keep: Any
) -> None:
    """They are all good while they are held: the gather of the next one must not take the bytes of the first."""
    p = make_plan(stack(kibs), Schedule(prefetch=depth, keep=keep))
    for names in ("ab", "ba", "bc", "cde", "ac", "ad", "be", "abcde", "eca"):
        rank = Rank(p)
        rank.use(*names)
        for name in names:
            assert name in rank.unplanned or rank.good(name)
        rank.release(*names)
        rank.train("abcde")
        rank.end()


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("names", ["ab", "ae", "be", "de", "ce", "abe"])
def test_units_named_at_once_after_an_evaluation(depth: int, names: str) -> None:
    """Some of them may be expected next, others begin a pass: what is handed out is gathered all the same."""
    for keep in (None, (), "all", ("a",)):
        rank = Rank(make_plan(stack([2, 1, 3, 1, 2]), Schedule(prefetch=depth, keep=keep)))
        rank.evaluate("abcde")
        rank.once(*names)
        rank.once(*names)
        rank.end()


def test_units_at_once_that_share_bytes_are_outside_the_plan_and_the_others_are_not() -> None:
    p = made(3, prefetch=0, keep=())
    assert all(p.overlap(one, other) == (one != other) for one in "abc" for other in "abc")  # one place for all
    assert p.crowded == {"a", "b", "c"}
    rank = Rank(p)
    rank.use("a", "b")
    assert len(rank.unplanned) == 1
    assert len(rank.cursor.held) == 1
    rank.release("a", "b")
    rank.use("a", "b", "c")
    assert len(rank.unplanned) == 2
    other = Rank(p)
    other.use("b", "a")
    assert other.unplanned == {"a"} or other.unplanned == {"b"}
    other.release("b", "a")
    other.use("c", "b", "a")
    assert other.unplanned == rank.unplanned, "whatever the order of the names"


# -------------------------------------------------------------------------------- late releases


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_prefetch_waits_for_a_late_release_and_starts_in_it(depth: int) -> None:
    """c comes to where a lies (and so on): a is released only when b has been asked for."""
    p = make_plan(stack([1] * 12, spec=None) if depth == 4 else stack([1] * 6), Schedule(prefetch=depth, keep=()))
    order = [use.unit for use in p.uses]
    rank = Rank(p)
    held: list[str] = []
    deferred = 0
    for k, name in enumerate(order):
        rank.use(name)
        held.append(name)
        deferred += len(rank.gathers) < p.due[k]
        if len(held) > 1:
            rank.release(held.pop(0))
            assert len(rank.gathers) == p.due[k], "the release starts what waited"
    assert deferred
    rank.release(*held)
    rank.end()


def test_a_prefetch_that_waits_is_issued_with_the_next_use_if_nothing_is_in_its_way() -> None:
    rank = Rank(made(5))
    rank.use("a")
    assert rank.use("b") == []  # c would come to where a lies
    assert rank.release("b") == []
    assert "b" not in rank.cursor.live
    with pytest.raises(ScheduleError, match="gathering 'c' would write over 'a'"):
        rank.use("c")
    assert rank.release("a") == [2]
    assert rank.use("c") == [3]


def test_a_gather_over_a_unit_that_is_held_raises_says_what_to_do_and_changes_nothing() -> None:
    rank = Rank(made(5))
    rank.use("a")
    rank.use("b")
    for names in ("c", "d", "e", "cd"):
        with pytest.raises(ScheduleError) as error:
            rank.use(*names)
        text = str(error.value)
        assert "'a', which was not released" in text or "'b', which was not released" in text
        assert "state = release(state, " in text
        assert "Schedule(keep={" in text
    assert rank.cursor.held == {"a", "b"}
    rank.release("a")
    rank.release("b")
    rank.once("c")
    rank.evaluate("de")
    rank.use("e")
    with pytest.raises(ScheduleError, match="would write over"):
        rank.use("c")  # past d
    rank.release("e")
    rank.evaluate("dcba")
    rank.end()


def test_the_next_pass_raises_too_if_it_would_write_over_a_unit_that_is_held() -> None:
    rank = Rank(made(3))
    rank.evaluate("ab")
    rank.use("c")
    with pytest.raises(ScheduleError, match="gathering 'a' would write over 'c'"):
        rank.use("a")
    rank.release("c")
    assert rank.once("a") == [0, 1]


# -------------------------------------------------------------------------------- gradients


def test_resident_units_are_used_and_reduced_and_never_gathered() -> None:
    spec = Spec({"data": 2}, {"b": fsdp.ddp("data"), "*": fsdp.zero3("data")})
    p = make_plan(stack([1] * 4, spec=spec))
    assert not p.by_name["b"].parts
    rank = Rank(p)
    rank.use("a")
    rank.once("b")
    rank.once("b")
    rank.release("a")
    rank.train("acd")
    for units in ("abcd", "acd", "bcd", "b"):
        rank = Rank(p)
        rank.train(units)
        rank.end()
        assert rank.gathers == list(range(len(p.gathers)))
        assert rank.reductions == [0, 1, 2, 3]


# -------------------------------------------------------------------------------- the end


def test_closing_and_finishing_when_there_is_nothing_to_do() -> None:
    rank = Rank(made(3))
    for kind in ("finish", "round", "close", "release", "unshard"):
        assert doing(rank.happens(kind)) == []
        assert rank.cursor == Cursor(rank.plan)
    rank.evaluate("ab")
    rank.train("abc")
    assert doing(rank.happens("round")) == []
    idle = [rank.cursor.idle]
    rank.end()
    assert [*idle, rank.cursor.idle] == [False, True]


@pytest.mark.parametrize("keep", [None, (), "all"])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_step_may_go_on_after_its_gradients_were_finished(depth: int, keep: Any) -> None:
    """`finish_reductions` for whoever reads gradients in the middle of a pass: the units that come next are good."""
    p = make_plan(stack([2, 1, 3, 1, 2]), Schedule(prefetch=depth, keep=keep))
    for done in range(1, 10):
        rank = Rank(p)
        for k, name in enumerate("abcdeedcba"):
            rank.use(name)
            if k > 4:
                rank.reduce(name)
            rank.release(name)
            if k + 1 == done:
                rank.happens("finish")
        rank.train("abcde")
        rank.end()


# -------------------------------------------------------------------------------- whatever is asked for


class Example(NamedTuple):
    plan: Plan
    names: str


@st.composite
def examples(draw: Callable[..., Any], least: int = 1, orders: bool = False) -> Example:
    n = draw(st.integers(least, 6))
    names = LETTERS[:n]
    keep = draw(st.one_of(st.sampled_from([None, (), "all"]), st.sets(st.sampled_from(names)).map(tuple)))
    order = None
    if orders and draw(st.booleans()):
        one = st.sampled_from(names)
        order = draw(st.lists(st.one_of(one, st.lists(one, min_size=1, max_size=3, unique=True)), min_size=1))
    kibs = draw(st.lists(st.integers(1, 20), min_size=n, max_size=n))
    return Example(make_plan(stack(kibs), Schedule(order, draw(st.integers(0, 4)), keep)), names)


@relaxed
@given(examples(orders=True), st.data())
def test_whatever_is_asked_for_is_handed_out_with_its_own_bytes(example: Example, data: Any) -> None:
    """Any calls in any order: nothing is gathered over what is held, and an error changes nothing."""
    p, names = example
    rank = Rank(p)
    some = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
    for call in data.draw(st.lists(st.sampled_from(["use", "use", "use", "release", "reduce"]), max_size=25)):
        if call == "use":
            asked = data.draw(some)
            try:
                rank.use(*asked)
            except ScheduleError:
                rank.release(*sorted(rank.held | rank.unplanned))
                rank.use(*asked)
            if data.draw(st.booleans()):
                rank.release(*asked)
        elif call == "release" and rank.held:
            rank.release(data.draw(st.sampled_from(sorted(rank.held))))
        elif call == "reduce":
            name = data.draw(st.sampled_from(names))
            if name in {reduction.unit for reduction in p.reductions}:
                rank.reduce(name)
    for name in rank.held:
        assert rank.good(name)
    rank.release(*sorted(rank.held))
    rank.end()


@relaxed
@given(examples(orders=True), st.integers(1, 3))
def test_a_program_that_is_followed_needs_nothing_outside_the_plan(example: Example, times: int) -> None:
    p, _ = example
    rank = Rank(p)
    groups = dict.fromkeys(use.group for use in p.uses)
    for _ in range(times):
        for first, last in groups:
            rank.once(*(use.unit for use in p.uses[first : last + 1]))
            assert rank.cursor.at == last + 1
            assert rank.cursor.issued == p.due[last]
        for reduction in p.reductions:
            rank.reduce(reduction.unit)
    assert rank.unplanned == set()
    rank.end()
    assert rank.gathers == passes_of(p, times)
    assert rank.reductions == list(range(len(p.reductions))) * times
    assert all(rank.given)


# -------------------------------------------------------------------------------- ranks that skip units


@relaxed
@given(examples(), st.data())
def test_ranks_that_skip_units_in_one_pass_issue_the_same(example: Example, data: Any) -> None:
    """Each rank skips its own units, in forward and backward, and gets its gradients in its own order."""
    p, names = example
    for _ in range(3):
        rank = Rank(p)
        units = "".join(sorted(data.draw(st.sets(st.sampled_from(names), min_size=1))))
        rank.evaluate(units)
        late: list[str] = []
        for name in reversed(units):
            rank.use(name)
            late.append(name)
            while late and data.draw(st.booleans()):
                rank.reduce(late.pop(data.draw(st.integers(0, len(late) - 1))))
            rank.release(name)
        for name in data.draw(st.permutations(late)):
            rank.reduce(name)
        rank.end()
        assert rank.unplanned == set()
        assert rank.gathers == list(range(len(p.gathers)))
        assert rank.reductions == list(range(len(p.reductions)))
        assert sum(rank.given) == len(units)


Passes = list[tuple[str, str]]


def skips(draw: Callable[..., Any], names: str, kinds: list[str], fused: bool) -> Passes:
    """What one rank uses in each pass.

    Whatever it skips, with one exception: an evaluation must be told from the pass after it, so that one begins before
    where this one ended ("a b" and then "c" looks like one pass, "a b c" and then "c" like a backward). A loop whose
    last unit does forward and backward in one use has that unit's loss, and does not skip it.
    """
    passes: Passes = []
    for kind in kinds:
        units = set(draw(st.sets(st.sampled_from(names), min_size=1)))
        if fused and kind == "train":
            units.add(names[-1])
        if passes and passes[-1][0] == "evaluate":
            ended = names.index(passes[-1][1][-1])
            if names.index(min(units)) >= ended:
                units.add(draw(st.sampled_from(names[:ended])))
        if kind == "evaluate" and units == {names[0]}:
            units.add(draw(st.sampled_from(names[1:])))
        passes.append((kind, "".join(sorted(units))))
    return passes


def follow(p: Plan, passes: Passes, fused: bool) -> Rank:
    rank = Rank(p)
    for kind, units in passes:
        if kind == "train":
            rank.train(units, fused)
        else:
            rank.evaluate(units)
    rank.end()
    return rank


def check_that_ranks_agree(p: Plan, names: str, ranks: Sequence[Passes], fused: bool) -> None:
    everyone = follow(p, [(kind, names) for kind, _ in ranks[0]], fused)
    for passes in ranks:
        rank = follow(p, passes, fused)
        assert rank.unplanned == set(), "this rank would wait for the others to come with the same unit"
        assert rank.gathers == everyone.gathers, f"other gathers than a rank that skips nothing: {passes}"
        assert rank.reductions == everyone.reductions, f"other reductions than a rank that skips nothing: {passes}"
        assert sum(rank.given) == sum(len(units) for kind, units in passes if kind == "train")


microbatches = st.lists(st.just("train"), min_size=2, max_size=3)
evaluations_too = st.lists(st.sampled_from(["train", "evaluate"]), min_size=1, max_size=4)


@relaxed
@given(examples(least=2), st.one_of(microbatches, evaluations_too), st.booleans(), st.data())
def test_ranks_that_skip_units_in_some_microbatches_and_evaluations_issue_the_same(
    example: Example, kinds: list[str], fused: bool, data: Any
) -> None:
    p, names = example
    check_that_ranks_agree(p, names, [skips(data.draw, names, kinds, fused) for _ in range(3)], fused)


@pytest.mark.parametrize(
    ("keep", "passes"),
    [
        (None, ("abc", "ab", "abc")),
        (None, ("ab", "abc", "bc")),
        (None, ("bc", "abc", "abc")),
        (None, ("bc", "a", "abc")),  # what comes first is what was skipped last
        ((), ("c", "a", "b")),
        ("all", ("ab", "abc", "abc")),  # what is skipped is last, and all else lies in the arena
        ("all", ("a", "abc", "a")),
        ("all", ("b", "b", "b")),
        (("a",), ("ab", "ac", "abc")),
    ],
)
def test_examples_of_ranks_that_skip_units_in_some_microbatches(keep: Any, passes: tuple[str, ...]) -> None:
    check_that_ranks_agree(made(3, keep=keep), "abc", [[("train", units) for units in passes]], False)


@pytest.mark.parametrize("keep", [None, (), "all"])
@pytest.mark.parametrize(
    "passes",
    [
        ("abcd", "acd", "TRAIN"),
        ("acd", "abcd", "TRAIN"),
        ("abd", "abc", "TRAIN"),
        ("abcd", "bcd", "TRAIN"),  # b is no backward: that of d comes first
        ("ad", "ad", "ad", "TRAIN"),
        ("bc", "bd", "TRAIN"),
        ("TRAIN", "acd", "bcd"),
    ],
)
def test_examples_of_ranks_that_skip_units_in_evaluations(keep: Any, passes: tuple[str, ...]) -> None:
    mine = [("train", "abcd") if units == "TRAIN" else ("evaluate", units) for units in passes]
    check_that_ranks_agree(made(4, keep=keep), "abcd", [mine], False)


# -------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("passes", ["ut", "tu", "utu", "uut", "utt"])
@pytest.mark.parametrize("micros", [1, 2, 3])
def test_ranks_that_skip_units_beside_microbatches_of_the_whole_tree_issue_the_same(micros: int, passes: str) -> None:
    """The program may have more microbatches than the step."""
    p = made(3, *"abccba" * micros, keep=())

    def issued(used: str) -> tuple[list[int], list[int]]:
        rank = Rank(p)
        for kind in passes:
            rank.train(used) if kind == "u" else rank.tree()
        rank.end()
        assert not rank.unplanned
        return rank.gathers, rank.reductions

    assert {repr(issued(used)) for used in ("abc", "ab", "ac", "bc", "a", "b", "c")} == {repr(issued("abc"))}


def test_a_rank_with_an_empty_gradient_alone_closes_the_round_before_a_whole_tree() -> None:
    layout = plan_layout([LeafInfo(f"{x}.w", (256 * (x != "b"),), torch.float32) for x in "abc"], Spec({"data": 2}))
    p = make_plan(layout, Schedule())

    def issued(used: str) -> list[int]:
        rank = Rank(p)
        for name in used:
            rank.once(name)
        for name in reversed(used):
            rank.use(name)
            rank.happens("empty" if name == "b" else "reduce", name)
            rank.release(name)
        rank.tree()
        rank.end()
        return rank.reductions

    assert issued("b") == issued("abc") == issued("ab") == [0, 1, 0, 1]


def test_printing_shows_what_a_person_needs() -> None:
    spec = Spec({"data": 2}, {"d": fsdp.ddp("data"), "*": fsdp.zero3("data")})
    rank = Rank(make_plan(stack([1] * 4, spec=spec)))
    text = repr(rank.cursor)
    assert text.splitlines()[0].split() == ["unit", "bytes", "address", "gathered", "in", "uses", "gathers", "now"]
    assert "nothing is begun" in text
    assert text.count("released") == 3
    rank.use("a")
    rank.use("d")
    rows = {line.split()[0]: line for line in repr(rank.cursor).splitlines()[2:6]}
    assert rows["a"].endswith("live, held") or rows["a"].endswith("overwritten")
    assert rows["d"].endswith("resident, held")
    rank = Rank(made(3))
    rank.use("a")
    rank.reduce("b")
    text = repr(rank.cursor)
    rows = {line.split()[0]: line for line in text.splitlines()[2:5]}
    assert rows["a"].endswith("live, held")
    assert rows["b"].endswith("live")
    assert rows["c"].endswith("released")
    assert "1.0 KiB" in rows["a"]
    assert "0, 4–5" in rows["a"]
    assert "use 1 of 6 comes next (b)" in text
    assert "2 of 5 gathers and 0 of 3 reductions of this pass issued" in text
    assert "1 gradients wait for their turn" in text
    rank.end()
    rank.evaluate("abccba")
    assert "the program is through" in repr(rank.cursor)
    rank.end()
    assert "nothing is begun" in repr(rank.cursor)


# -------------------------------------------------------------------------------- ranks that agree on each use


@pytest.mark.parametrize("agreed", [False, True])
def test_no_zeros_for_a_gradient_that_comes_without_a_use(agreed: bool) -> None:
    """It was given to a function whose forward reads no weight; other units are come to meanwhile, by their turn or as
    a peer waits."""
    rank = Rank(made(3))
    rank.happens("begin agreed" if agreed else "begin")
    for name in "ac":
        rank.happens("unshard", name)
        rank.happens("release", name)
    rank.happens("turn")
    rank.happens("await", "b")
    rank.happens("unshard", "c")
    assert rank.reduce("c") == [(0, True)]
    assert reductions_of(rank.happens("peer reduces")) == []
    rank.happens("release", "c")
    assert "unplanned" not in dict(rank.happens("unshard", "a"))
    assert rank.reduce("a") == []
    assert rank.reduce("b") == [(1, True), (2, True)]
    rank.happens("release", "a")
    rank.happens("end")
    assert reductions_of(rank.happens("step")) == []


# -------------------------------------------------------------------------------- positions


@relaxed
@given(examples(orders=True), st.data())
def test_positions_are_what_advance_says(example: Example, data: Any) -> None:
    p, names = example
    positions = Positions(p)
    position, cursor = positions.start, Cursor(p)
    for _ in range(data.draw(st.integers(0, 12))):
        event = (data.draw(st.sampled_from(["unshard", "reduce", "skip"])), (data.draw(st.sampled_from(names)),))
        found: list[Any] = []
        for step in (lambda: advance(p, cursor, event), lambda: position[event]):  # noqa: B023
            try:
                found.append(step())
            except ScheduleError as error:
                found.append(str(error))
        expected, got = found
        if isinstance(expected, str):
            assert got == expected
            continue
        cursor, position = expected[0], got[0]
        assert (position.cursor, got[1]) == expected


@pytest.mark.parametrize("bounded", [False, True])
def test_the_nominal_path_is_made_with_the_plan(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p = make_plan(stack([3, 1, 4, 1, 5]), Schedule())
    positions = Positions(p)
    monkeypatch.setattr("functional_fsdp._plan.cursor.advance", None)  # from here on nothing is worked out
    position, gathers, reductions = positions.start, [], []
    for event in nominal(p, bounded):
        position, actions = position[event]
        gathers += gathers_of(actions)
        reductions += reductions_of(actions)
    assert gathers == list(range(len(p.gathers)))
    assert reductions == [(i, True) for i in range(len(p.reductions))]


def test_positions_beside_the_nominal_path_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_fsdp._plan.cursor.OTHERS", 20)
    p = made(6)
    positions = Positions(p)
    nominal_ones = len(positions.known)
    most = 0
    for number in range(200):
        position = positions.start
        for i in range(6):
            if number >> i & 1:
                position, _ = position["unshard", (LETTERS[i],)]
                position, _ = position["release", (LETTERS[i],)]
        most = max(most, len(positions.known))
    assert nominal_ones < most <= nominal_ones + 21
    assert advance(p, positions.start.cursor, ("unshard", ("a",)))[0] == positions.start["unshard", ("a",)][0].cursor


def test_a_position_is_shown_and_compared_without_those_that_its_moves_reach() -> None:
    positions, other = Positions(made(6)), Positions(made(6))
    position, _ = move = positions.start["unshard", ("a",)]
    assert len(repr(move)) < 1000  # as tracebacks with locals show it
    assert position == position != other.start["unshard", ("a",)][0]


def test_a_cursor_is_names_and_integers() -> None:
    rank = Rank(made(3))
    rank.use("a")
    rank.reduce("b")
    for name, value in vars(rank.cursor).items():
        assert name == "plan" or isinstance(value, int | str | tuple), name
    assert pickle.loads(pickle.dumps(rank.cursor)) == rank.cursor
    with pytest.raises(FrozenInstanceError):
        rank.cursor.at = 3  # type: ignore[misc]
