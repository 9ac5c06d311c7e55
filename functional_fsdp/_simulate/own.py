"""Own: what each rank has of its own that a process has once: it is put in place when the rank's turn comes, and taken
away when it ends. Everything else that is the process's (globals of modules, the working directory) ranks share."""

from __future__ import annotations

import io
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._common.calls import bring_back, put_away
from .._common.device import random_state, set_random_state
from .._common.torch_names import dual_level_verbs, forward_ad, func_transforms, parametrize, set_forward_enabled
from .._io import pending
from .._runtime import runtime

__all__ = ["Own", "Stream"]


class DualLevel:
    """Torch's level of dual numbers, of which a process has one: ranks that are in it share it, and tangents are there
    until the last one leaves. A rank that has left, which is a thread, does not see them, up to its next level."""

    def __init__(self) -> None:
        self.inside = 0
        self.verbs = [getattr(*place) for place in dual_level_verbs]

    def enter(self) -> int:
        level: int = 0 if self.inside and forward_ad._current_level < 0 else self.verbs[0]()
        self.inside += 1
        set_forward_enabled(True)
        return level

    def exit(self, *, level: int) -> None:
        self.inside -= 1
        if self.inside:
            set_forward_enabled(False)
        else:
            self.verbs[1](level=level)


DUAL = DualLevel()

Mode = tuple[Callable[[], Any], Callable[[Any], Any]]
MODES: tuple[Mode, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda on: torch.set_anomaly_enabled(*on),
    ),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)  # torch's, of a process: a rank begins with those of the caller


class Own:
    """Attributes of modules, torchrun's variables, random generators, modes of torch, and where it prints.

    Args:
        places: {(module, attribute): value}, beside those that every rank has.
        environ: variables; None: there is none of that name.
    """

    def __init__(self, places: Mapping[tuple[Any, str], Any], environ: Mapping[str, str | None]) -> None:
        self.places = dict(places)
        self.environ = dict(environ)
        self.traced: Any = ([], [])
        self.modes = [get() for get, _ in MODES]
        self.drawn: Any = (torch.Generator().get_state(), None), random.Random(0).getstate(), None

    @classmethod
    def of_the_caller(cls, like: Own) -> Own:
        """What is in place now, where that of a rank will be."""
        found = cls(
            {(module, name): getattr(module, name) for module, name in like.places},
            {name: os.environ.get(name) for name in like.environ},
        )
        return found

    @staticmethod
    def fresh() -> dict[tuple[Any, str], Any]:
        """What a process that has made no mesh yet has of this package, and what torch keeps by module."""
        return {
            (runtime, "_RUNTIMES"): {},
            (runtime, "_unused"): [],
            (pending, "_saving"): type(pending._saving)(),
            (parametrize, "_cache_enabled"): 0,
            (parametrize, "_cache"): {},
            (forward_ad, "_current_level"): -1,
            (func_transforms, "JVP_NESTING"): 0,
            dual_level_verbs[0]: DUAL.enter,
            dual_level_verbs[1]: DUAL.exit,
        }

    def leave(self) -> None:
        for module, name in self.places:
            self.places[module, name] = getattr(module, name)
        self.traced = put_away()
        self.modes = [get() for get, _ in MODES]
        numpy = sys.modules.get("numpy")
        self.drawn = random_state(), random.getstate(), numpy and numpy.random.get_state()

    def enter(self) -> None:
        for (module, name), value in self.places.items():
            setattr(module, name, value)
        bring_back(self.traced)
        for (get, put), mode in zip(MODES, self.modes, strict=True):
            if get() != mode:
                put(mode)
        for name, said in self.environ.items():
            if said is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = said
        of_torch, of_python, of_numpy = self.drawn
        set_random_state(of_torch)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)


class Stream(io.TextIOBase):
    """Where a rank prints: where the caller does, each line with the rank's number in front."""

    encoding = "utf-8"

    def __init__(self, to: Any, rank: int) -> None:
        self.to, self.prefix = to, f"[rank {rank}] "
        self.begun = False  # whether there is a part of a line

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self.to.write(line if self.begun else self.prefix + line)
            self.begun = not line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self.to.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        found: int = self.to.fileno()
        return found
