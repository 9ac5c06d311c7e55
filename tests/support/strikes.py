"""Interrupts at any bytecode of the package: a SIGINT is raised after so many of them, as if it had come just then."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.problems import LOOPS, batch, loss_fn, mesh_and_placement, net

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

WAYS = ("whole", "by_unit", "driven")
Step = Callable[[fsdp.State], fsdp.State]


class Strike:
    """Counts bytecodes of this package's functions on this thread, and raises SIGINT at the one whose turn it is."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.count = 0
        self.where = ""

    def __enter__(self) -> Strike:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not str(frame.f_globals.get("__name__", "")).startswith("functional_fsdp."):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            if self.count == self.at:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                self.count += 1
                signal.raise_signal(signal.SIGINT)
                return None
            self.count += 1
        return self._inside


@contextmanager
def interruptible() -> Iterator[None]:
    """Workers of `launch` ignore SIGINT; within, Python's own handler is there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def training(way: str, preset: str, **spec: Any) -> tuple[fsdp.State, Callable[[int], Step]]:
    """A state, and the step with a number, in one of the three ways of writing it."""
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float32))
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, **spec), fsdp.adamw(lr=1e-2))
    driven = T.forward_backward(model, loss_fn) if way == "driven" else None

    def numbered(number: int) -> Step:
        data = batch(number, dist.get_rank())

        def step(state: fsdp.State) -> fsdp.State:
            state, loss = driven(state, data) if driven else LOOPS[way](model, state, data, True)
            state, _ = fsdp.pmean(state, {"loss": loss})
            state, _ = T.clip_by_global_norm(state, 1.0)
            return fsdp.step(state)

        return step

    return state, numbered


def bits(state: fsdp.State) -> list[torch.Tensor]:
    kept = (state.main, state.weights, state.opt, state.count)
    return [leaf.clone() for leaf in pytree.tree_leaves(kept) if isinstance(leaf, torch.Tensor)]


def struck(step: Step, state: fsdp.State, at: int) -> tuple[fsdp.State, str, str]:
    """A step that is interrupted at a bytecode, and what it takes to get on.

    Returns the new state, where it was struck, and how the new state was had: by itself, anew, or by `newest`.
    """
    steps, new, how = state.steps, None, "undisturbed"
    strike, come = Strike(at), False
    while new is None:
        try:
            if strike.where or at < 0:
                new = step(state)
            else:
                with strike:
                    new = step(state)
            deadline = time.monotonic() + 60
            while strike.where and not come:  # it waits until the state is here
                time.sleep(0.001)
                assert time.monotonic() < deadline, f"the interrupt at {strike.where} was lost"
        except (KeyboardInterrupt, fsdp.RestartError) as error:
            come = come or isinstance(error, KeyboardInterrupt)
            how = "by itself" if new is not None else f"anew after {type(error).__name__}"
            if new is None and state.version.lineage.steps > steps:
                new, how = fsdp.newest(state), "newest"
    return new, strike.where, how


def disturbed(way: str, preset: str, count: int, seed: int, who: list[int], **spec: Any) -> list[tuple[int, str, str]]:
    """`count` steps, each interrupted somewhere on the ranks in `who`. Returns what went wrong: step, place, what.

    A step may be a few bytecodes shorter than the one that was counted, and end before its turn; that is rare.
    """
    state, numbered = training(way, preset, **spec)
    rank = dist.get_rank()
    wanted, length = [], 0
    for number in range(count + 2):
        with Strike() as strike:
            state = numbered(number)(state)
        length = strike.count
        wanted.append(bits(state))
    state, numbered = training(way, preset, **spec)
    draw, wrong, spared = random.Random(f"{seed} {rank}"), [], 0
    with interruptible():
        for number in range(count + 2):
            at = draw.randrange(length) if number >= 2 and rank in who else -1
            state, where, how = struck(numbered(number), state, at)
            if not all(map(torch.equal, bits(state), wanted[number])):
                wrong.append((number, where, f"other bits, {how}"))
            spared += at >= 0 and not where
    if 4 * spared > count:
        wrong.append((spared, "", "not interrupted"))
    return wrong
