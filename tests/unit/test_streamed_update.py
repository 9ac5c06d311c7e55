"""The update of what lies in the host's memory, in a world of one: stopped anywhere, of other tensors, by optimizers of
one's own, and while a step is captured."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from support.streams import ordered
from support.tables import each

import functional_fsdp as fsdp
from functional_fsdp import _host_memory, extend
from functional_fsdp import _verbs as _step
from functional_fsdp._capture import Capture
from functional_fsdp._common.device import clone_as, empty_as, host_memory, in_host_memory, zeros_as
from functional_fsdp._optim.optimizer import runs
from functional_fsdp._optim_extra.muon import Muon

HOST = "pinned_host"
CPU = torch.device("cpu")
PARAMS = {"a": torch.arange(200.0), "b": torch.ones(7, 10)}  # three parts


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host_memory, "FILL", 512)


def made(kind: Any = HOST, optimizer: Any = None, **more: Any) -> fsdp.State:
    placement = fsdp.zero3("data", memory_kind=kind)
    spec = fsdp.Spec(fsdp.local_mesh(), placement, precision=fsdp.Precision(compute=torch.bfloat16), **more)
    return fsdp.shard(PARAMS, spec, optimizer or fsdp.adamw(lr=0.1))


def reduced(state: fsdp.State, by: float = 1.0) -> fsdp.State:
    return fsdp.reduce(state, pytree.tree_map(lambda p: by * (1 + torch.arange(p.numel()).view(p.shape) % 3), PARAMS))


def values(state: fsdp.State) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((state.main, state.weights, state.opt, state.count))
    return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


# ---------------------------------------------------------------- stopped


class StoppedError(BaseException):
    pass


@contextmanager
def stopped_at(line: int) -> Iterator[list[int]]:
    """Raise before this line of the update's, in the order in which lines run. Gives how many there were."""
    names, seen = {_host_memory.__name__, _step.__name__}, [0]
    verb = {"step", "_vote_and_take", "_take"}  # around the update

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        ours = frame.f_globals.get("__name__") in names and frame.f_code.co_name not in verb
        return inside if ours else None

    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] - 1 == line:
                sys.settrace(None)
                raise StoppedError
        return inside

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield seen
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(("kind", "how"), each((HOST, {"main": HOST}), ((False, False), (True, False), (True, True))))
def test_a_step_that_is_stopped_anywhere_costs_nothing_or_says_so(kind: Any, how: tuple[bool, bool]) -> None:
    watched, overlap = how
    with ordered() if watched else nullcontext() as order:

        def begun() -> fsdp.State:
            return fsdp.step(reduced(made(kind, schedule=fsdp.Schedule(overlap_update=overlap))))

        middle = reduced(begun(), 2)
        with stopped_at(-1) as lines:
            wanted = values(fsdp.step(middle))
        ends = {"whole": 0, "broken": 0}
        for line in range(0, lines[0], 13 if watched else 7):
            state = begun()
            before = values(state)
            middle = reduced(state, 2)
            with pytest.raises(StoppedError), stopped_at(line):
                fsdp.step(middle)
            if state.version.lineage.broken:
                ends["broken"] += 1
                with pytest.raises(fsdp.StaleStateError, match="this State is half updated"):
                    reduced(state)
            else:
                ends["whole"] += 1
                assert same(values(state), before)
                assert same(values(fsdp.step(reduced(state, 2))), wanted)
        del state, middle
        gc.collect()
        assert min(ends.values()) > 3
        assert order is None or not order.races


# ---------------------------------------------------------------- of other tensors


class Descent:
    """Gradient descent by elements, by `tree_map`, that keeps nothing: what it keeps is the same object everywhere."""

    by_bucket = elementwise = True

    def init(self, main: Any) -> Any:
        return ()

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> Any:
        pytree.tree_map(lambda p, g: p.sub_(g), main, grads)
        return main, opt


@pytest.mark.parametrize("kind", ["device", HOST])
def test_an_optimizer_of_one_s_own_is_given_parts_as_trees(kind: Any) -> None:
    state = fsdp.step(reduced(made(kind, Descent())))
    found = fsdp.full_params(state)
    assert torch.equal(found["a"], PARAMS["a"] - (1 + torch.arange(200) % 3))


def test_a_state_with_other_main_weights_is_updated_there() -> None:
    state = fsdp.step(reduced(made(HOST, Descent())))
    old = {name: buffer.local.clone() for name, buffer in state.main.items()}
    main = {name: buffer.but(clone_as(buffer.local)) for name, buffer in state.main.items()}
    new = fsdp.step(reduced(extend.evolve(state, main=main)))
    assert all(torch.equal(state.main[name].local, old[name]) for name in old)
    assert torch.equal(fsdp.full_params(new)["a"], PARAMS["a"] - 2 * (1 + torch.arange(200) % 3))
    copies = {name: buffer.local.clone() for name, buffer in new.weights.items()}
    assert all(torch.equal(copies[name], new.main[name].local.bfloat16()) for name in copies)


def test_what_is_kept_may_come_in_other_trees() -> None:
    """As a compiled step returns it. The buffers have given their memory back by then."""
    state, twin = (fsdp.step(reduced(made())) for _ in range(2))
    state = extend.evolve(state, opt=pytree.tree_map(lambda t: t, state.opt))
    assert same(values(fsdp.step(reduced(state))), values(fsdp.step(reduced(twin))))


def test_what_is_known_of_orders_of_buckets_is_bounded() -> None:
    state = made()
    there = _host_memory.Streamed(CPU)
    for names in [["a"], ["b"], ["a", "b"], ["b", "a"]] * 3 + [["a"] * i for i in range(1, 20)]:
        assert [part.name for one in there.portions(state, dict.fromkeys(names)) for part in one.parts]  # type: ignore[arg-type]
        assert len(there.found) <= _host_memory.ORDERS


@pytest.mark.parametrize("like", [empty_as, zeros_as, clone_as])
def test_tensors_like_those_of_the_host_have_their_shape(like: Any) -> None:
    far = host_memory(6, torch.float32, CPU).view(2, 3)
    found = like(far)
    assert found.shape == far.shape
    assert in_host_memory(found)
    assert found.data_ptr() != far.data_ptr()


def test_a_copy_shares_nothing_and_goes_on_alike() -> None:
    state = fsdp.step(reduced(made()))
    twin = copy.deepcopy(state)
    assert {in_host_memory(buffer.local) for buffer in (*twin.main.values(), *twin.weights.values())} == {True}
    new = fsdp.step(reduced(state))
    assert not same(values(new), values(twin))
    assert same(values(new), values(fsdp.step(reduced(twin))))


class Updates:
    """A pair that returns updates, with momentum."""

    def init(self, params: Any) -> Any:
        return pytree.tree_map(torch.zeros_like, params)

    def update(self, grads: Any, opt: Any, params: Any) -> Any:
        moved = pytree.tree_map(lambda m, g: 0.9 * m + g, opt, grads)
        return pytree.tree_map(lambda m: -0.01 * m, moved), moved


def falling(count: torch.Tensor) -> torch.Tensor:
    return 0.1 / (1 + count)


OPTIMIZERS: dict[str, Any] = {
    "float64": lambda: fsdp.adamw(lr=0.1),
    "a learning rate that falls": lambda: fsdp.adamw(lr=falling, betas=(0.8, 0.99)),
    "from updates": lambda: fsdp.from_updates(Updates()),
    "from torch": lambda: fsdp.from_torch(torch.optim.Rprop, lr=0.1),
    "a partition": lambda: fsdp.partition(
        {"one": fsdp.from_torch(torch.optim.Adamax, lr=0.1), "default": fsdp.sgd(0.1, 0.9)}
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_device_s_bits(name: str) -> None:
    found = []
    for kind in ("device", HOST):
        params = {**PARAMS, "c": torch.ones(300)}
        if name == "float64":
            params = {path: leaf.double() for path, leaf in params.items()}
        spec = fsdp.Spec(
            fsdp.local_mesh(), fsdp.zero3("data", memory_kind=kind), labels={"c": "one"}, units=["[ab]", "c"]
        )
        state = fsdp.shard(params, spec, OPTIMIZERS[name]())
        for i in range(5):
            grads = {path: (leaf + 1).cos() * (i + 1) for path, leaf in params.items()}
            state = fsdp.reduce(state, grads | {"a": None} if i == 2 else grads)
            state = fsdp.step(state, skip=torch.tensor(i == 3))
            if i == 1:
                state = copy.deepcopy(state)
        found.append([*fsdp.full_params(state).values()])
    assert same(*found)


class Together:
    """Says which buckets one update has together."""

    init = update = staticmethod(len)

    def __init__(self, *groups: str) -> None:
        self.groups = groups

    def at_once(self, opt: Any) -> Any:
        return [[*some] for some in self.groups]


def test_an_update_has_together_what_its_optimizer_says() -> None:
    sizes = dict.fromkeys("abcde", 1 << 25)
    assert runs(Together("ca", "xb"), None, sizes) == [["c", "a"], ["b"], ["d"], ["e"]]
    assert runs(fsdp.sgd(), None, sizes) == [[name] for name in sizes]
    several = fsdp.partition({"one": Together("ab", "cd"), "two": Together("e", "bc"), "default": fsdp.sgd()})
    assert runs(several, dict.fromkeys(several.members), sizes) == [["e"], ["a", "b", "c", "d"]]


def test_matrices_that_are_one_batch_are_so_in_the_host_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Muon, "fill", 2 * 4 * 32 * 32)  # two of these
    params = {f"m{i}": torch.ones(32, 32) for i in range(5)} | {"v": torch.ones(8)}
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data", memory_kind=HOST), labels={"m*": "matrix"})
    optimizer = fsdp.partition({"matrix": fsdp.muon(), "default": fsdp.adamw()})
    state = fsdp.shard(params, spec, optimizer)
    found = _host_memory.Streamed(CPU).portions(state, tuple(state.main))
    names = [[part.name for part in one.parts] for one in found]
    assert names == [*map(list, state.opt["matrix"].groups), ["v"]] == [["m4", "m3"], ["m2", "m1"], ["m0"], ["v"]]


# ---------------------------------------------------------------- while a step is captured


def places(state: fsdp.State) -> set[int]:
    return {buffer.local.data_ptr() for buffer in fsdp.finish_reductions(state).grads.values()}


def test_what_a_graph_writes_no_eager_step_is_given() -> None:
    state = fsdp.step(reduced(made()))
    capture = Capture(state)
    with capture.recording():
        mine = places(reduced(state))
        state = fsdp.step(reduced(state))
    eager = places(middle := reduced(state))
    assert mine.isdisjoint(eager)  # a replay writes there, whoever holds what an eager step has left
    state = fsdp.step(middle)
    again = Capture(state)
    with again.recording():
        assert places(reduced(state)) == mine
        fsdp.step(reduced(state))
    assert {id(buffer) for buffer in state._executor.sink.streams.buffers} <= {id(one) for one in capture.held[2]}
