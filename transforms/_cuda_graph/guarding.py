"""Guarding: steps whose host reads from the device are captured with what they read in warm-up.

Before a step ranks replay if each of them has a graph for what it read last; else all of them step eagerly. Then:

    device   forward ─▶ reads compared ─▶ flag ─▶ all ranks' flags ─▶ the update, where it is 0
    host                                                 └──▶ pinned memory ─▶ commits, or they all step eagerly
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections import deque
from typing import Any

import torch

from functional_fsdp import ScheduleError, State
from functional_fsdp._seams import Veto, Vetoed
from functional_fsdp.extend import Ranks, bytes_of

from .capturing import refusal
from .host_traffic import Recording, Values

__all__ = ["Guard", "Randoms", "Steadiness"]

UNKNOWN = -1
POLL = 2e-5  # seconds
MISSES, WINDOW = 4, 100  # a line that misses more often in so many steps is not worth a graph


class Guard:
    """The flag of one graph: whether a read would have given something else, on this rank, and then on any."""

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.device
        self.flag = torch.zeros(1, dtype=torch.int32, device=ranks.device)
        self.host = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=ranks.device.type == "cuda")
        self.seen = bytes_of(self.host).cast("i")

    def differs(self, one: torch.Tensor) -> None:
        """Captured: take the step back where this is true."""
        self.flag.bitwise_or_(one)

    def veto(self, state: State) -> Veto:
        return Veto(state, self.flag, self.host)

    def before(self) -> None:
        """A replay is about to be launched."""
        self.seen[0] = UNKNOWN

    def after(self) -> None:
        """Wait until the replay has said it, long before it is done.

        Raises:
            Vetoed: the step is not taken, on any rank.
        """
        stream = torch.cuda.current_stream(self.device)
        while self.seen[0] == UNKNOWN:
            if stream.query():  # raises what went wrong on the device
                break
            time.sleep(POLL)
        if self.seen[0] == UNKNOWN:
            raise RuntimeError("cuda_graph: a replay has ended without a word on what it compared")
        if self.seen[0]:
            raise Vetoed


class Randoms:
    """Where the host's and the device's default generators are, to go back to."""

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.generator
        self.drawn = None if self.device is None else self.device.get_state()
        self.host = torch.default_generator.get_state()
        self.python = random.getstate()
        self.numpy: Any = sys.modules.get("numpy.random")
        self.numbers = self._numbers()

    def back(self) -> None:
        if self.device is not None:
            self.device.set_state(self.drawn)
        torch.default_generator.set_state(self.host)
        random.setstate(self.python)
        if self.numpy:
            self.numpy.set_state(self.numbers)

    def _numbers(self) -> Any:
        return self.numpy and self.numpy.get_state()

    def moved(self) -> list[str]:
        """Which of the host's own have drawn since, beside torch's."""
        found = ["random"] if random.getstate() != self.python else []
        if self.numpy and not all(map(_alike, self._numbers(), self.numbers)):
            found.append("numpy.random")
        return found


def _alike(a: Any, b: Any) -> bool:
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())


class Steadiness:
    """What steps of one signature have read on this rank: which graph the next one replays, and whether it pays.

    Attributes:
        latest, earlier: the last two steps that ran eagerly.
        values: what the last one read; () where reads are not compared.
        steady: whether the last two read the same.
        eager: it did not pay.
    """

    def __init__(self, compares: bool = True) -> None:
        self.compares = compares
        self.latest: Recording | None = None
        self.earlier: Recording | None = None
        self.values: Values = ()
        self.steady = True
        self.steps = 0
        self.misses: dict[str, deque[int]] = {}
        self.eager = False

    def ran(self, record: Recording) -> None:
        """A step ran eagerly."""
        self.earlier, self.latest = self.latest, record
        before, self.values = self.values, record.values() if self.compares else ()
        self.steady = not self.values or self.values == before

    def missed(self, before: Values) -> None:
        """A replay of the graph for these values was taken back, and its step ran eagerly. Where peers were the cause,
        nothing has changed here."""
        was = dict(before)
        for key, value in self.values:
            if was.get(key) != value:
                found = self.misses.setdefault(key[1], deque(maxlen=MISSES + 1))
                found.append(self.steps)
                if len(found) > MISSES and self.steps - found[0] < WINDOW:
                    self.eager = True
                    warnings.warn(
                        f"cuda_graph: what the host reads from the device at {key[1]} has changed {len(found)} times "
                        f"in {self.steps - found[0] + 1} steps. Steps of this signature run eagerly from now on. Keep "
                        "it on the device.",
                        RuntimeWarning,
                        stacklevel=7,
                    )
                return

    def unsteady(self) -> ScheduleError:
        """Why no step of this signature can be captured."""
        assert self.latest is not None
        assert self.earlier is not None
        was = self.earlier.reads
        key = next((k for k, one in self.latest.reads.items() if k not in was or was[k].bits != one.bits), None)
        if key is None:
            key = next(k for k in was if k not in self.latest.reads)
        then, now = (str(r.reads[key].given) if key in r.reads else "nothing" for r in (self.earlier, self.latest))
        return refusal(
            key[1],
            f"what the host reads from the device changes from step to step ({then[:80]}, then {now[:80]}). Keep it on "
            "the device, or return it and look at it outside",
        )
