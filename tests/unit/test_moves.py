"""What is moved to the host's memory, on a lane that copies as late as it may: orders that only a GPU would show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.late_lane import LateLane, late_lane
from support.move_program import MoveProgram, Pass
from torch.multiprocessing.reductions import StorageWeakRef

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T
from functional_fsdp.transforms._drive.unit_uses import USES
from functional_fsdp.transforms._remat.moves import MovedTensor, MoveGroup

CPU = torch.device("cpu")
WIDTH = 32


@pytest.fixture
def lane() -> Iterator[LateLane]:
    with late_lane() as found:
        yield found


def test_the_lane_finds_what_is_let_go_or_written_too_early() -> None:
    lane = LateLane()
    source, into = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    mark = lane.copy([(into, source)])
    assert not torch.equal(into, source)  # nobody has waited
    lane.wait(mark)
    assert torch.equal(into, source)
    mark = lane.copy([(into, source)])
    source += 1
    with pytest.raises(AssertionError, match="written to"):
        lane.wait(mark)
    mark = lane.copy([(into, source)])
    del source
    with pytest.raises(AssertionError, match="let go"):
        lane.wait(mark)


@pytest.mark.parametrize("block", range(4))
def test_random_programs(block: int, lane: LateLane) -> None:
    """Every read comes after the copy back, every reuse after the copies that the bytes are in."""
    for seed in range(50 * block, 50 * block + 50):
        assert MoveProgram(seed, CPU).run()
        lane.wait(lane.marks)
    assert lane.copies > 200


def call(buffers: extend.HostBuffers) -> tuple[MoveGroup, Any]:
    """A call that packs a tensor, and is over."""
    group = MoveGroup(buffers, CPU, set())
    packed = group.pack(torch.randn(40, WIDTH))
    group.end()
    return group, packed


def test_a_chain_of_stages_gives_memory_back_after_its_copies(lane: LateLane) -> None:
    torch.manual_seed(0)
    part = lambda w, h: (h @ w["a"]).sin().exp()  # noqa: E731
    w, x = {"a": torch.randn(WIDTH, WIDTH) / 8}, torch.randn(40, WIDTH)
    found = []
    make = lambda part: lambda w, h: part(w, h.sin()).cos()  # noqa: E731
    for stage in (make(part), make(T.offload(part)), T.remat(make(T.offload(part)))):
        found.append(through(stage, w, x))
        assert all(map(torch.equal, found[0], found[-1]))
    assert lane.copies > 20
    assert not lane.left or lane.left[-1].mark < lane.marks


def through(stage: Any, w: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs and gradients of four stages after each other."""
    h, pullbacks, seen = x, [], []
    for _ in range(4):
        h, pullback = T.vjp(stage, w, h)
        pullbacks.append(pullback)
    dh = torch.ones_like(h)
    seen.append(h)
    while pullbacks:
        dw, dh = pullbacks.pop()(w, dh)
        seen += [dw["a"], dh]
    return seen


# ---------------------------------------------------------------- streams


def test_bytes_are_copied_after_the_stream_that_made_them(lane: LateLane) -> None:
    group = MoveGroup(extend.HostBuffers(), CPU, set())
    with lane.at("side"):
        packed = group.pack(torch.randn(40, WIDTH))
    group.send()
    assert lane.joined == {"compute", "side"}
    del packed


def test_memory_goes_back_to_the_stream_that_has_it(lane: LateLane) -> None:
    buffers = extend.HostBuffers()
    first, second = (MoveGroup(buffers, CPU, set()) for _ in range(2))
    with lane.at("side"):
        packed = first.pack(torch.randn(40, WIDTH))
    first.end()
    other = second.pack(torch.randn(40, WIDTH))
    assert "side" not in lane.waited
    second.end()
    assert lane.waited["side"] == 1
    del packed, other


def test_each_stream_that_reads_waits_for_itself(lane: LateLane) -> None:
    buffers = extend.HostBuffers()
    (_, packed), other = call(buffers), call(buffers)
    MoveGroup.unpack(packed)
    assert not lane.lent
    back = lane.marks
    with lane.at("side"):
        MoveGroup.unpack(packed)
        MoveGroup.unpack(packed)
    assert lane.waited["side"] == back
    assert lane.lent == ["side"]
    del other


def test_what_is_dropped_on_its_way_back_waits_on_its_own_stream(lane: LateLane) -> None:
    """The garbage collector comes on any stream."""
    buffers = extend.HostBuffers()
    groups, packed = map(list, zip(*(call(buffers) for _ in range(3)), strict=True))
    MoveGroup.unpack(packed[1])  # the first begins to come
    assert lane.left
    lane.waited.clear()
    with lane.at("other"):
        del packed[0]
    assert [*lane.waited] == ["compute"]
    assert not lane.left
    packed.clear()
    assert len(buffers.free) == buffers.made
    assert len(groups) == 3  # they live on


# ---------------------------------------------------------------- where a driver says how far a pass is

N = 8  # uses


def driven(
    driver: Any, moved: set[int], leaves: int = 0, keeps: float = 1, both: bool = False
) -> tuple[list[int], list[int]]:
    """One pass of so many uses, some of which move a tensor, and the others keep a share of that. By use, of how many
    the memory is taken: at the end of the use in the forward, at its beginning in the backward.

    both: in those that move regions recompute, before and after."""
    buffers, packed, alive, taken, back = extend.HostBuffers(), {}, [], [], []
    for use in range(1, N + 1):
        if CPU in USES:
            USES[CPU].used(driver, use, 0, leaves)
        if use in moved:
            group, t = MoveGroup(buffers, CPU, set()), torch.randn(40, WIDTH)
            if both and CPU in USES:
                USES[CPU].recomputes(0)
            alive.append(StorageWeakRef(t.untyped_storage()))
            packed[use] = group, group.pack(t), t.clone()
            del t
            group.end()
            if both:
                USES[CPU].recomputes(0)
        elif CPU in USES and keeps < 1:
            USES[CPU].recomputes(keeps)
        taken.append(sum(not ref.expired() for ref in alive))
    for use in range(N, 0, -1):
        USES[CPU].used(driver, N, N - use + 1, leaves)
        back.append(sum(group.brought for group, _, _ in packed.values()))
        if use in moved:
            _, one, value = packed.pop(use)
            assert torch.equal(MoveGroup.unpack(one), value)
    return taken, back


def test_what_few_uses_have_moved_is_away_only_where_others_need_its_room(lane: LateLane) -> None:
    driver = Pass()
    first, _ = driven(driver, {1, 2})
    assert first == [1, 1, 1, 1, 1, 1, 1, 1]  # nobody knows yet what comes
    for _ in range(2):
        taken, back = driven(driver, {1, 2})
        assert taken == [1, 2, 2, 2, 2, 2, 1, 0]
        assert back == [0, 0, 1, 2, 2, 2, 2, 1]
        kept = [0, 0, 1, 2, 3, 4, 5, 6]
        assert max(map(sum, zip(taken, kept, strict=True))) == N - 2
    assert not lane.left


@pytest.mark.parametrize("leaves", [0, 10, 20, 30, 40])
@pytest.mark.parametrize("moved", [{1, 2}, {1}, {5}, {6}, {1, 5}, {3, 4, 6}, {1, 2, 3, 4}])
@pytest.mark.parametrize("keeps", [1, 0.6, 0])
def test_coming_back_raises_no_peak(lane: LateLane, keeps: float, moved: set[int], leaves: int) -> None:
    """Each use keeps 40 rows, of which those that recompute keep a share, and leaves main gradients of so many. All but
    one that is on its way are away where the peak would be without moves: where the backward begins, or, of large
    gradients, where it ends."""
    driver = Pass()
    kept = [0 if use in moved else 40 * keeps for use in range(1, N + 1)]
    most = max(sum(kept), leaves * N) + 40
    for _ in range(3):
        taken, back = driven(driver, moved, 4 * WIDTH * leaves, keeps)
        assert max(sum(kept[: k + 1]) + 40 * taken[k] for k in range(N)) <= most + 40  # that of the call before
        assert max(sum(kept[: N - k]) + 40 * back[k] + leaves * k for k in range(N)) <= most


def test_uses_before_the_first_move_leave_no_room_that_is_not_there(lane: LateLane) -> None:
    """They may have recomputed. Until then what is moved is let go at the end of the next call."""
    driver = Pass()
    for _ in range(3):
        assert max(driven(driver, {5, 6, 7, 8}, 0, 0)[0]) == 1


@pytest.mark.parametrize("keeps", [1, 0.5])
def test_a_use_that_moves_and_recomputes_counts_once(lane: LateLane, keeps: float) -> None:
    moved, one, other = {1, 2, 3, 4, 7, 8}, Pass(), Pass()
    for _ in range(3):
        expected, found = driven(one, moved, 0, keeps), driven(other, moved, 0, keeps, both=True)
    assert found == expected


@pytest.mark.parametrize(("leaves", "back"), [(0, [0, 0, 1, 2, 2, 2, 2, 1]), (20, [0, 0, 0, 1, 1, 1, 2, 1])])
def test_main_gradients_take_some_of_what_is_free_again(lane: LateLane, leaves: int, back: list[int]) -> None:
    driver = Pass()
    driven(driver, {1, 2}, 4 * WIDTH * leaves)
    assert driven(driver, {1, 2}, 4 * WIDTH * leaves)[1] == back


def test_what_is_known_of_one_model_is_not_of_another(lane: LateLane) -> None:
    few, whole = Pass(), Pass()
    for _ in range(2):
        driven(few, {1, 2})
    for _ in range(2):
        assert max(driven(whole, {*range(1, N + 1)})[0]) == 1
        assert driven(few, {1, 2})[0] == [1, 2, 2, 2, 2, 2, 1, 0]


def test_a_pass_in_which_another_one_began_says_nothing(lane: LateLane) -> None:
    """A teacher in the student's loss, say: what stays on the device in the next step is what stayed in the first."""
    student, teacher = Pass(), Pass()
    buffers = extend.HostBuffers()
    for _ in range(3):
        packed, most = [], 0
        for use in range(1, N + 1):
            if CPU in USES:
                USES[CPU].used(student, use, 0, 0)
            packed.append(call(buffers))
            most = max(most, len(packed[-1][0].order._taken()))
        USES[CPU].used(teacher, 1, 0, 0)
        USES[CPU].used(teacher, 0, 0, 0)
        packed.append(call(buffers))
        for i, (_, one) in enumerate(reversed(packed)):
            USES[CPU].used(student, N, i + 1, 0)
            MoveGroup.unpack(one)
        assert most == 1
        USES[CPU].used(student, 0, 0, 0)


def test_by_hand_after_a_driven_pass_that_was_stopped_memory_is_given_back(lane: LateLane) -> None:
    driver, buffers = Pass(), extend.HostBuffers()
    for _ in range(2):
        driven(driver, {1, 2})
    USES[CPU].used(driver, 1, 0, 0)
    USES[CPU].used(driver, 0, 0, 0)  # it has raised
    packed = []
    for _ in range(30):
        packed.append(call(buffers))
        assert len(packed[-1][0].order._taken()) == 1
    packed.clear()
    packed.append(call(buffers))
    assert len(packed[0][0].order.moved) == 1


@pytest.mark.parametrize("moved", [{*range(1, N + 1)}, {*range(2, N)}], ids=["all", "all but the ends"])
def test_where_nearly_all_is_moved_copies_have_one_use_to_hide_behind(moved: set[int], lane: LateLane) -> None:
    driver = Pass()
    first = driven(driver, moved)
    assert driven(driver, moved) == first
    assert max(first[0]) == 1


def test_passes_of_other_sizes_follow_each_other(lane: LateLane) -> None:
    """What was known is not so any more: another number of calls, none, and then all."""
    driver = Pass()
    for moved in ({1, 2}, {5, 6, 7, 8}, set(), {1}, {*range(1, N + 1)}, {8}):
        if moved or CPU in USES:
            driven(driver, moved)
    assert lane.copies > 16  # all went, and not all were still there


# ---------------------------------------------------------------- calls in each other


def test_what_an_outer_call_moves_is_let_go_too(lane: LateLane) -> None:
    """`T.offload(T.remat(model, "blocks.*", offload=("mlp",)), "blocks.*")`: inputs, and what parts keep."""
    buffers = extend.HostBuffers()
    alive, packed = [], []
    for _ in range(3):
        outer, inner = (MoveGroup(buffers, CPU, set()) for _ in range(2))
        for group in (outer, inner):
            t = torch.randn(40, WIDTH)
            alive.append(StorageWeakRef(t.untyped_storage()))
            packed.append((group.pack(t), t.clone()))
            del t
        inner.end()
        outer.end()
    assert [ref.expired() for ref in alive] == [True] * 4 + [False] * 2
    for one, value in reversed(packed):
        assert torch.equal(MoveGroup.unpack(one), value)


def test_an_address_that_is_used_again_within_a_call_is_another_storage(lane: LateLane) -> None:
    """An inner call that ends must not have what the open one around it has packed let go: its next tensor may lie
    where the first one did, with the same version."""
    buffers = extend.HostBuffers()
    outer = MoveGroup(buffers, CPU, set())
    kept = []
    for i in range(8):
        t = torch.full((40, WIDTH), float(i))
        kept.append((outer.pack(t), t.clone()))
        outer.send()
        del t
        inner = MoveGroup(buffers, CPU, set())
        inner.pack(torch.randn(40, WIDTH))
        inner.end()
    outer.end()
    for packed, value in kept:
        assert torch.equal(MoveGroup.unpack(packed), value)


def test_a_gradient_inside_a_call_brings_nothing_else(lane: LateLane) -> None:
    buffers = extend.HostBuffers()
    earlier, outer, inner = (MoveGroup(buffers, CPU, set()) for _ in range(3))
    kept = [group.pack(torch.randn(40, WIDTH)) for group in (earlier, outer)]
    earlier.end()
    outer.send()
    kept.append(inner.pack(torch.randn(40, WIDTH)))
    inner.end()
    copies = lane.copies
    MoveGroup.unpack(kept[2])
    MoveGroup.unpack(kept[1])
    assert lane.copies == copies
    kept.append(outer.pack(torch.randn(40, WIDTH)))
    outer.end()
    MoveGroup.unpack(kept[3])
    assert lane.copies == copies + 2  # there; and the first one's back


# ---------------------------------------------------------------- what does not go well


def test_where_no_memory_is_left_nothing_is_lost(lane: LateLane, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = extend.HostBuffers()
    first, second = (MoveGroup(buffers, CPU, set()) for _ in range(2))
    values = [torch.randn(40, WIDTH) for _ in range(2)]
    packed = [first.pack(v.clone()) for v in values]
    first.end()
    other = second.pack(torch.randn(40, WIDTH))
    second.end()
    empty, calls = torch.empty, []

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") is torch.uint8 and args and args[0]:
            calls.append(1)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("no memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(torch.OutOfMemoryError):
        MoveGroup.unpack(packed[0])
    for one, value in zip(packed, values, strict=True):
        assert torch.equal(MoveGroup.unpack(one), value)
    del other


def test_what_is_written_to_on_the_way_is_an_error(lane: LateLane) -> None:
    group = MoveGroup(extend.HostBuffers(), CPU, set())
    for when in ("before", "after"):
        t = torch.randn(40, WIDTH)
        packed = group.pack(t)
        if when == "after":
            assert torch.equal(MoveGroup.unpack(packed), t)  # a gradient inside the call
        t += 1
        with pytest.raises(fsdp.ScheduleError, match="changed in place after it was kept"):
            MoveGroup.unpack(packed)


def test_what_lies_elsewhere_is_not_moved(lane: LateLane) -> None:
    group = MoveGroup(extend.HostBuffers(), CPU, set())
    assert not isinstance(group.pack(torch.randn(100, 100, device="meta")), MovedTensor)
    assert isinstance(group.pack(torch.randn(100, 100)), MovedTensor)
