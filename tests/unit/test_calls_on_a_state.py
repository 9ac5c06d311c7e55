"""What a call on a State goes through first: one thread at a time, outside torch.inference_mode."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from support.chains import mean_square as loss_of

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._common import calls as _entry

# ---------------------------------------------------------------- threads


def in_thread(fn: Callable[[], Any]) -> Any:
    """What a function returns, or raises, in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(fn())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return found[0]


def begin(n: int = 3, **spec: Any) -> fsdp.State:
    torch.manual_seed(0)
    params = {f"layers.{i}.weight": torch.randn(4, 4) for i in range(n)}
    return fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), **spec), fsdp.sgd(lr=0.1))


def ones(state: fsdp.State) -> Any:
    return {path: torch.ones(4, 4) for path in state.layout.paths}


class Inside:
    """An optimizer whose update calls something, when a step is in the middle of its verb."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.found: Any = None

    def init(self, main: Any) -> Any:
        return ()

    def update(self, grads: Any, opt: Any, main: Any, count: Any) -> Any:
        self.found = self.call()
        return main, opt


def test_two_threads_at_once_are_an_error_that_says_so(tmp_path: Path) -> None:
    """While one thread is inside `step`, another calls everything; the step itself is none the worse."""
    mesh = fsdp.local_mesh()
    other = begin()
    module = nn.Linear(4, 4)
    model = fsdp.functionalize(module)[1]
    second = fsdp.shard(dict(module.named_parameters()), fsdp.Spec(mesh), fsdp.sgd())
    x = torch.ones(1, 4)
    calls: dict[str, Callable[[], Any]] = {
        "unshard": lambda: fsdp.unshard(other),
        "reduce": lambda: fsdp.reduce(other, ones(other)),
        "step": lambda: fsdp.step(other),
        "pmean": lambda: fsdp.pmean(other, 1.0),
        "full_params": lambda: fsdp.full_params(other),
        "local_shards": lambda: fsdp.local_shards(other),
        "save": lambda: fsdp.save(other, tmp_path / "saved"),
        "__deepcopy__": lambda: copy.deepcopy(other),
        "__getstate__": lambda: pickle.dumps(other),
        "drop_gradients": lambda: fsdp.drop_gradients(other),
        "forward_backward": lambda: T.forward_backward(model, lambda m, x: m(x).sum())(second, x),
        "apply": lambda: T.apply(model)(second, x),
    }
    optimizer = Inside(lambda: {name: in_thread(call) for name, call in calls.items()})
    state = fsdp.shard({"w": torch.ones(2)}, fsdp.Spec(mesh), optimizer)
    state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(2)}))
    assert state.steps == 1
    for name, error in optimizer.found.items():
        assert isinstance(error, fsdp.ScheduleError), (name, error)
        where = threading.current_thread().name
        assert f"{name} was called in the thread 'other' while the thread '{where}' is in a call" in str(error)
    for name, call in calls.items():  # and nothing had changed
        if name not in ("step", "unshard", "reduce"):
            assert not isinstance(in_thread(call), Exception), name


def test_threads_one_after_another_are_fine() -> None:
    state = begin()
    expected = fsdp.full_params(fsdp.step(fsdp.reduce(copy.deepcopy(state), ones(state))))
    (state, _) = in_thread(lambda: fsdp.unshard(state))
    state = fsdp.reduce(state, ones(state))
    state = in_thread(lambda: fsdp.step(state))
    assert all(torch.equal(p, expected[path]) for path, p in fsdp.full_params(state).items())
    assert not state.version.lineage.runtime.users


def test_calls_within_calls_of_one_thread_are_fine_and_let_go_at_the_end() -> None:
    """`full_params` inside a step's update, and `pmean` inside a loss function."""
    other = begin()
    optimizer = Inside(lambda: fsdp.full_params(other))
    state = fsdp.shard({"w": torch.ones(2)}, fsdp.Spec(fsdp.local_mesh()), optimizer)
    state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(2)}))
    assert set(optimizer.found) == set(other.layout.paths)
    users = state.version.lineage.runtime.users
    assert not users
    with pytest.raises(fsdp.ScheduleError, match="there is no unit"):
        fsdp.unshard(other, "nothing")
    assert not users, "a verb that raised holds its thread's claim"


class Strike:
    """Interrupts what claims a State, at one of its bytecodes."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> Strike:
        sys.settrace(self.called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in _entry._codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.inside

    def inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.left -= event == "opcode"
        if self.left < 0:
            raise KeyboardInterrupt
        return self.inside


@pytest.mark.parametrize("name", [pytest.param("pmean", marks=pytest.mark.large), "full_params"])
def test_a_claim_that_an_interrupt_left_behind_keeps_nobody_out(name: str) -> None:
    call: Callable[[fsdp.State], Any] = {"pmean": lambda s: fsdp.pmean(s, 1.0), "full_params": fsdp.full_params}[name]
    users = begin().version.lineage.runtime.users
    at, kept, struck = 0, 0, True
    while struck:
        state, other, strike = begin(1), begin(1), Strike(at)
        with contextlib.suppress(KeyboardInterrupt), torch.enable_grad(), strike:
            call(state)
        at, kept, struck = at + 1, kept + bool(users), strike.left < 0
        found = in_thread(lambda: call(other))  # noqa: B023
        assert not isinstance(found, Exception), (at, found)
        assert not users
    assert at > 50
    assert kept > 5


def test_of_threads_that_come_together_one_is_let_in() -> None:
    """Many threads claim at once, again and again: never are two inside."""
    inside, most, refused, done = [0], [0], [0], [0]

    def update(grads: Any, opt: Any, main: Any, count: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.0005)  # lets the others run
        inside[0] -= 1
        return main, opt

    mesh = fsdp.local_mesh()
    start = threading.Barrier(4)

    def work(state: fsdp.State) -> None:
        start.wait()
        for _ in range(20):
            try:
                state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(2)}))
                done[0] += 1
            except fsdp.ScheduleError as error:
                refused[0] += "while the thread" in str(error)

    optimizer = fsdp.Optimizer(lambda main: (), update)
    states = [fsdp.shard({"w": torch.ones(2)}, fsdp.Spec(mesh), optimizer) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert refused[0] > 0
    assert done[0] > 0


# ---------------------------------------------------------------- inference mode


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def made(**spec: Any) -> tuple[fsdp.State, Any]:
    torch.manual_seed(0)
    module = Normed()
    params, model = fsdp.functionalize(module)
    spec = {"schedule": fsdp.Schedule(), **spec}
    return fsdp.shard(
        params, fsdp.Spec(fsdp.local_mesh(), **spec), fsdp.adamw(lr=0.1), buffers=fsdp.buffers(module)
    ), model


def train(state: fsdp.State, model: Any, steps: int = 2) -> Any:
    """Trained in the third way, and by whole trees; the weights and buffers at the end."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    forward_backward = T.forward_backward(model, loss_of)
    for _ in range(steps):
        state, _ = forward_backward(state, x)
        state, _ = T.clip_by_global_norm(state, 1.0)
        state = T.skip_nonfinite(fsdp.step)(state)
        state, params = fsdp.unshard(state)
        state = fsdp.step(fsdp.reduce(state, pytree.tree_map(torch.tanh, params)))
    assert not [t for t in tensors(state) if t.is_inference()]
    return fsdp.full_params(state), state.buffers


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


BATCH = torch.ones(5, 4)


def by_hand(state: fsdp.State, model: Any, folder: Path) -> fsdp.State:
    before = state
    for unit in state.units:
        state, _ = fsdp.unshard(state, unit)
        state = fsdp.release(state, unit)
    state, _ = fsdp.unshard(state)
    assert not [t for t in tensors(fsdp.full_params(state)) if t.is_inference()]
    assert not [t for t in fsdp.local_shards(state).values() if t.is_inference()]
    return before


def reduced(state: fsdp.State, model: Any, folder: Path) -> fsdp.State:
    """Gradients that are thrown away, and a step with the first ones of all."""
    state, params = fsdp.unshard(state)
    middle = fsdp.reduce(state, pytree.tree_map(torch.ones_like, params))
    middle, norm = T.global_norm(middle)
    assert norm.item() > 0
    return fsdp.drop_gradients(middle)


def driven(state: fsdp.State, model: Any, folder: Path) -> fsdp.State:
    middle, loss = T.forward_backward(model, loss_of)(state, BATCH)
    assert loss.item() > 0
    return fsdp.drop_gradients(middle)


#: what may be asked of a state between steps
WAYS: dict[str, Callable[[fsdp.State, Any, Path], fsdp.State]] = {
    "evaluated": lambda state, model, folder: T.apply(model)(state, BATCH)[0],
    "by hand": by_hand,
    "reduced": reduced,
    "driven": driven,
    "saved": lambda state, model, folder: fsdp.load(fsdp.save(state, folder / "saved"), like=state),
    "copied": lambda state, model, folder: copy.deepcopy(state),
    "pickled": lambda state, model, folder: pickle.loads(pickle.dumps(copy.deepcopy(state))),
}
PLACEMENTS = [fsdp.zero3("data"), fsdp.zero1("data"), fsdp.ddp("data")]


@cache
def outside(placement: fsdp.Placement) -> list[torch.Tensor]:
    """What training gives that no inference mode has seen."""
    return tensors(train(*made(placement=placement)))


def goes_on(state: fsdp.State, model: Any, placement: fsdp.Placement = PLACEMENTS[0]) -> None:
    """To the same bits."""
    got, expected = tensors(train(state, model)), outside(placement)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_look_in_inference_mode_changes_nothing(way: str, placement: Any, tmp_path: Path) -> None:
    """Before the first step, when everything is allocated: training then gives the same bits as without."""
    state, model = made(placement=placement)
    with torch.inference_mode():
        state = WAYS[way](state, model, tmp_path)
    assert not [t for t in tensors(state) if t.is_inference()]
    goes_on(state, model, placement)


def test_everything_in_inference_mode() -> None:
    """Made, built and trained under it: as outside it."""
    with torch.inference_mode():
        state, model = made()
        built, _ = fsdp.init(Normed, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd())
    assert not [t for t in tensors((state, built, list(model.buffers()))) if t.is_inference()]
    goes_on(state, model)


def test_a_model_computes_in_the_mode_of_its_caller() -> None:
    state, model = made()
    with torch.inference_mode():
        state, y = T.apply(model)(state, torch.ones(5, 4))
    assert y.is_inference()
    state, z = T.apply(model)(state, torch.ones(5, 4))
    assert not z.is_inference()
    assert torch.equal(y, z)


def under_inference_mode() -> tuple[fsdp.State, Any]:
    params = {"w": torch.arange(1.0, 4.0)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.5))
    with torch.inference_mode():
        state, weights = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: p["w"].square().sum())(weights)
        return fsdp.reduce(state, grads), grads


def test_gradients_under_inference_mode_are_right_or_refused() -> None:
    """In torch 2.11 torch.func.grad gives zeros there, without an error."""
    try:
        state, _ = under_inference_mode()
    except fsdp.ScheduleError:
        assert torch.__version__ < "2.13"
    else:
        assert torch.equal(fsdp.full_params(fsdp.step(state))["w"], torch.zeros(3))


def test_zeros_under_inference_mode_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_fsdp._verbs._inference_gives_zeros", lambda: True)
    state = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.5))
    with torch.inference_mode():
        for unit, tree in ((None, {"w": torch.zeros(3)}), ("w", {"w": torch.zeros(3)})):
            begun = fsdp.unshard(state, unit)[0] if unit else fsdp.unshard(state)[0]
            said = r"torch\.func\.grad gives zeros there in torch 2.*outside of it"
            with pytest.raises(fsdp.ScheduleError, match=said):
                fsdp.reduce(begun, tree, unit)
            state = fsdp.drop_gradients(state)
        begun, _ = fsdp.unshard(state)
        begun = fsdp.reduce(begun, {"w": torch.tensor([0.0, 1.0, 0.0])})
    assert fsdp.full_params(fsdp.step(begun))["w"].tolist() == [1.0, 0.5, 1.0]
