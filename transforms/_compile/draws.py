"""Random numbers of a compiled step: those of (state.rng, state.count, rank, which draw of the step it is).

    eager      the host seeds a generator for each microbatch (`_seed`): it knows the step's number
    compiled   the graph computes the seeds that Inductor draws from, out of the state's seed and count

So masks differ by step, draw and rank, nothing waits for the device, and a step that is taken again draws the same.
What does not draw from Inductor's seeds (attention's kernels, permutations) would draw from the process's own
generator, and is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.fx as fx

from functional_fsdp import ScheduleError
from functional_fsdp._seams import torch_private, users_line

__all__ = ["Draws", "Seeded", "seeds"]

LARGEST = (1 << 63) - 1
#: what Inductor draws from its seeds
DRAWN = {"bernoulli", "bernoulli_", "native_dropout", "normal_", "rand", "rand_like", "randint", "randint_like",
         "randn", "randn_like", "uniform", "uniform_"}  # fmt: skip
NONE = "set its rate to 0, or run this step eagerly"


@torch.library.custom_op("functional_fsdp::seeds", mutates_args=())
def seeds(rng: torch.Tensor, count: torch.Tensor, n: int, rank: int) -> torch.Tensor:
    """Seeds [n] of int64, from 0, for draws of the step `count` on a rank: splitmix64 of all of them."""
    z = torch.arange(n, device=count.device) * _signed(0x9E3779B97F4A7C15)
    for value in (rng, count, rank):
        z = _mixed(z + value * _signed(0xD1B54A32D192ED03) + _signed(0x8CB92BA72F3D8DD7))
    return z & LARGEST


@seeds.register_fake
def _(rng: torch.Tensor, count: torch.Tensor, n: int, rank: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.int64, device=count.device)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mixed(z: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, as an unsigned number."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def draws(func: Any, args: Sequence[Any] = (), kwargs: Any = None) -> bool:
    """Whether an operation draws random numbers, called with these."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # of attention
            rate = args[i] if i < len(args) else (kwargs or {}).get("dropout_p", argument.default_value)
            return bool(rate)
    return True


class Draws(torch_private.TorchDispatchMode):
    """Notes what is drawn while a graph is made.

    Attributes:
        ops: {operation: the user's line that drew first}. backward: those that a backward drew. others: those that do
            not draw from Inductor's seeds. python: whether Python's or numpy's generator moved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, str] = {}
        self.backward: dict[str, str] = {}
        self.others: dict[str, str] = {}
        self.python = False

    def __enter__(self) -> Draws:
        self.before = _of_python()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.python = self.before != _of_python()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs):
            where = self.ops if torch_private.autograd_node() is None else self.backward
            where.setdefault(str(func), users_line(_stack()))
            own = any(isinstance(value, torch.Generator) for value in (kwargs or {}).values())
            if func._schema.name.split("::")[1] not in DRAWN or own:
                self.others.setdefault(str(func), where[str(func)])
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        """Raise for what a graph would draw alike in each step, or not as the forward did."""
        if self.python:
            raise ScheduleError(
                "compile: the step draws from Python's or numpy's random numbers, which a graph would have once and "
                "for all (layer drop, say). Draw with torch, or run this step eagerly."
            )
        for op, line in self.others.items():
            raise ScheduleError(
                f"compile: {op}, at {line}, draws by itself, and random numbers of a compiled step come from the "
                f"state's seed and count. Where it is dropout inside attention, {NONE}, or have attention computed by "
                "plain operations; else draw outside the step, and give it what was drawn."
            )
        for op, line in self.backward.items():
            raise ScheduleError(
                f"compile: the backward draws random numbers ({op}), at {line}. Activation checkpointing runs a "
                f"forward again, which would draw another mask than it had. Where it is dropout, {NONE}; or leave "
                "activation checkpointing out."
            )


def _stack() -> Iterator[tuple[FrameType, int]]:
    """Of the caller's caller, the innermost frame first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _of_python() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()


class Seeded:
    """A pass for Inductor's graphs: its seeds, from the state's.

    Args:
        rng, count: which inputs of the graph these are. inputs: how many it has.
    """

    def __init__(self, rng: int, count: int, inputs: int, rank: int) -> None:
        self.key = (rng, count, inputs, rank)
        self.left: list[str] = []  # operations that draw by themselves

    def __call__(self, graph: fx.Graph) -> None:
        rng, count, inputs, rank = self.key
        given = [node for node in graph.nodes if node.op == "placeholder"]
        for node in [node for node in graph.nodes if node.op == "call_function" and draws(node.target, node.args)]:
            name = str(node.target)
            if "inductor_seeds" not in name or len(given) != inputs:
                self.left.append(name)
                continue
            with graph.inserting_before(node):
                new = graph.call_function(
                    torch.ops.functional_fsdp.seeds.default, (given[rng], given[count], node.args[0], rank)
                )
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)

    def refuse(self, drawn: Mapping[str, str]) -> None:
        """Raise for operations that would draw from the process's own generator."""
        if self.left:
            raise ScheduleError(
                f"compile: {self.left[0]} would draw from the process's own random numbers; those of a compiled step "
                f"come from the state's seed and count. The step draws with {drawn}. Where it is dropout, {NONE}; and "
                "leave fallback_random as it is."
            )
