"""Windows: the arena and the staging in memory that NCCL knows on every rank, so that it takes its symmetric kernels.

    arena     one allocation, registered with the gather lane's communicator of each axis
    staging   one allocation, registered with those of the reduce and the outer lane

Every address in a window is the same distance from its beginning on every rank, which a plan sees to. NCCL's symmetric
kernels add up, but do not average: sums are divided afterwards. With `zero_cta` gathers go by a communicator of their
own that is told to use no multiprocessor: the copy engines do it.

Source: NCCL's documentation, "Window Registration" and `NCCL_CTA_POLICY_ZERO`; torch.distributed._symmetric_memory.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ._errors import SpecError
from ._exchange import uneven
from ._records import Traits
from ._torch import symmetric_memory

if TYPE_CHECKING:
    from ._plan import Plan
    from ._runtime import Runtime

__all__ = ["Windows", "registered", "use_backend"]

LEAST = (2, 27)  # NCCL's version


class Windows:
    """The windows of one lineage of states. Making one is collective.

    A window is never freed: NCCL would go on to take its address for one. When its lineage is gone, or needs a larger
    one, it is kept for the next lineage of the mesh.

    Attributes:
        lane: whose communicators gather: "gather", or "zero_cta".
    """

    def __init__(self, run: Runtime, zero_cta: bool) -> None:
        self.run = run
        self.lane = "zero_cta" if zero_cta else "gather"
        self.traits = Traits(self.lane, averages=False)
        self.made: dict[tuple[str, str], tuple[int, torch.Tensor]] = {}
        weakref.finalize(self, _give_back, run, self.made)

    @property
    def nbytes(self) -> int:
        """Of all windows."""
        return sum(window.numel() for _, window in self.made.values())

    def prepare(self, plan: Plan) -> bool:
        """Make all that a plan needs, and that not every rank has: one may have been stopped in it. Collective.

        Returns whether something is new.
        """
        have = {key: number for key, (number, _) in self.made.items()}
        for key in uneven(self.run, have, "windows"):
            _give_back(self.run, {key: self.made.pop(key)})
        self.arena(plan.arena)
        self.staging(plan.staging)
        return {key: number for key, (number, _) in self.made.items()} != have

    def arena(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes [uint8] for gathered units."""
        return self._window("arena", nbytes, (self.lane,))

    def staging(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes [uint8] for gradients."""
        return self._window("staging", nbytes, ("reduce", "outer"))

    def _window(self, what: str, nbytes: int, lanes: tuple[str, ...]) -> torch.Tensor:
        key = what, lanes[0]
        if key not in self.made or self.made[key][1].numel() < nbytes:
            found = self._found(key, nbytes)
            if found is None:
                groups = [self.run.group(lane, axis) for lane in lanes for axis, n in self.run.sizes.items() if n > 1]
                found = self.run.windows + 1, registered(self.run, nbytes, groups)
                self.run.windows += 1
            if key in self.made:
                _give_back(self.run, {key: self.made[key]})
            self.made[key] = found
        return self.made[key][1]

    def _found(self, key: tuple[str, str], nbytes: int) -> tuple[int, torch.Tensor] | None:
        """The smallest that is large enough and that every rank has to spare: ranks let go in their own time."""
        spare = self.run.spare.get(key, {})
        fitting = {number for number, window in spare.items() if window.numel() >= nbytes}
        every = self.run.everyone((fitting, self.run.windows), "windows that fit")
        self.run.windows = max(count for _, count in every)  # one rank may have been stopped before it counted its last
        shared = set.intersection(*(fitting for fitting, _ in every))
        if not shared:
            return None
        number = min(shared, key=lambda number: (spare[number].numel(), number))
        return number, spare.pop(number)


def _give_back(run: Runtime, made: dict[tuple[str, str], tuple[int, torch.Tensor]]) -> None:
    for key, (number, window) in made.items():
        run.spare.setdefault(key, {})[number] = window


def registered(run: Runtime, nbytes: int, groups: list[Any]) -> torch.Tensor:
    """Memory [nbytes, uint8] that is a window of these communicators. Collective over the mesh.

    Raises:
        SpecError: on every rank, if any cannot have it: no GPUs, an old NCCL, no memory.
    """
    symmetric = symmetric_memory()

    failed = ""
    memory = torch.empty(0, dtype=torch.uint8)
    if not run.cuda:
        failed = f"it needs GPUs, and this mesh is on the {run.device.type}"
    elif torch.cuda.nccl.version() < LEAST:
        failed = f"it needs NCCL {'.'.join(map(str, LEAST))}; this is {'.'.join(map(str, torch.cuda.nccl.version()))}"
    else:
        try:
            use_backend(run, "NCCL")
            memory = symmetric.empty(max(nbytes, 1), dtype=torch.uint8, device=run.device)
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
    why = run.complaint(failed)
    if why is None:
        try:
            for group in groups:
                dist.all_reduce(torch.zeros(1, device=run.device), group=group)  # it exists once it was used
                symmetric.rendezvous(memory, group.group_name)
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        why = run.complaint(failed)
        if why is None:
            return memory
    raise SpecError(
        f"Schedule(transport='symmetric'): {nbytes:,} bytes of NCCL's symmetric memory could not be had on every rank: "
        f"{why}. Use transport='collective', or 'auto', which takes what there is."
    )


def use_backend(run: Runtime, name: str) -> None:
    """Have symmetric memory by this backend of torch's, of which a process has one.

    Raises:
        RuntimeError: it has another one already.
    """
    symmetric = symmetric_memory()

    have = symmetric.get_backend(run.device)
    if have == name:
        return
    try:
        symmetric.set_backend(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"this process uses torch's symmetric memory with the backend {have!r}, {name!r} is needed, and torch has "
            "one a process (copy_engine and symmetric exclude each other)"
        ) from error
