"""NCCL's symmetric memory, and "auto", which chooses among the transports.

    Symmetric, NcclWindows     the transport "symmetric", and its memory
    Auto                       the transport "auto"
    NAMES                      transports that are known by a name: a line each, at the end

`NcclWindows`: the arena and the staging in memory that NCCL knows on every rank, so that it uses symmetric kernels.

    arena     one allocation, registered with the gather lane's communicator of each axis
    staging   one allocation, registered with those of the reduce and the outer lane

Every address in a window is the same distance from its beginning on every rank, which a plan sees to. NCCL's symmetric
kernels add up, but do not average: sums are divided afterwards. With `zero_cta` gathers go by a communicator of their
own that is told to use no multiprocessor: the copy engines do it.

Source: NCCL's documentation, "Window Registration" and `NCCL_CTA_POLICY_ZERO`; torch.distributed._symmetric_memory.

`Auto`: which one a state gets where the spec leaves it open.

    collective    less than 1 GiB to gather: a step has many small transfers then, and NCCL launches each as one kernel
    copy_engine   else GPUs that read each other's memory along every axis that shards
    symmetric     else NCCL 2.27 or newer, with memory to be had that it can register
    collective    else, and without GPUs

It is tried with a few bytes on every rank, and the first one that all of them can have is taken. That happens in
`shard` and `init`; a layout or a plan made without ranks is that of "collective".
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .._common.errors import SpecError
from .._engine.gathers import Carrier, CollectiveTransport
from .._plan.layout import Layout, Unit
from .._plan.plan import Plan
from .._runtime.runtime import Runtime
from .._shared.torch_names import symmetric_memory
from .._spec.spec import NAMES, Traits, Transport
from .copy_engine import Copies, CopyEngine
from .peer_memory import check_reach, complaint, uneven, use_backend

LEAST = (2, 27)  # NCCL's version


class NcclWindows(Carrier):
    """The windows of one lineage of states. Making one is collective.

    A window is never freed: NCCL would go on to take its address for one. When its lineage is gone, or needs a larger
    one, it is kept for the next lineage of the mesh.

    """

    inside = keeps_arena = True

    def __init__(self, run: Runtime, layout: Layout, traits: Traits) -> None:
        super().__init__(run, layout, traits)
        self.made: dict[tuple[str, str], tuple[int, torch.Tensor]] = {}
        weakref.finalize(self, _give_back, run, self.made)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
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
        self._stages(plan.staging)
        return {key: number for key, (number, _) in self.made.items()} != have

    def arena(self, nbytes: int) -> torch.Tensor:
        return self._window("arena", nbytes, (self.traits.gathers,))

    def staging(self, unit: Unit, nbytes: int) -> torch.Tensor:
        return self._stages(nbytes)

    def _stages(self, nbytes: int) -> torch.Tensor:
        return self._window("staging", nbytes, ("reduce", "outer"))

    def _window(self, what: str, nbytes: int, lanes: tuple[str, ...]) -> torch.Tensor:
        key = what, lanes[0]
        if key not in self.made or self.made[key][1].numel() < nbytes:
            found = self._found(key, nbytes)
            if found is None:
                groups = [self._group(lane, axis) for lane in lanes for axis, n in self.run.sizes.items() if n > 1]
                found = self.run.windows + 1, registered(self.run, nbytes, groups)
                self.run.count_windows(found[0])
            if key in self.made:
                _give_back(self.run, {key: self.made[key]})
            self.made[key] = found
        return self.made[key][1]

    def _group(self, lane: str, axis: str) -> dist.ProcessGroup:
        """The communicator of a lane on an axis; gathers by the copy engines have one of their own."""
        if lane != "zero_cta":
            return self.run.groups[lane, axis]
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        return self.run.extra_group(lane, axis, "nccl", options)

    def _found(self, key: tuple[str, str], nbytes: int) -> tuple[int, torch.Tensor] | None:
        """The smallest that is large enough and that every rank has to spare: ranks let go in their own time."""
        spare = self.run.spare.get(key, {})
        fitting = {number for number, window in spare.items() if window.numel() >= nbytes}
        every = self.run.everyone((fitting, self.run.windows), "windows that fit")
        self.run.count_windows(max(count for _, count in every))  # one may have been stopped before it counted its last
        shared = set.intersection(*(fitting for fitting, _ in every))
        if not shared:
            return None
        number = min(shared, key=lambda number: (spare[number].numel(), number))
        return number, spare.pop(number)


class Symmetric(Transport):
    """NCCL with its symmetric kernels, on memory that stays registered with it."""

    name = "symmetric"
    stays = True

    def __init__(self, zero_cta: bool = False) -> None:
        self.zero_cta = zero_cta

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits("zero_cta" if self.zero_cta else "gather", averages=False)

    def on(self, run: Runtime, layout: Layout) -> NcclWindows:
        return NcclWindows(run, layout, self.traits)


def symmetric(zero_cta: bool = False) -> Transport:
    """The transport "symmetric": NCCL's symmetric kernels, for `Spec(transport=...)`.

    Args:
        zero_cta: gathers by the copy engines, which leave the multiprocessors to compute.

    Example: `fsdp.Spec(mesh, transport=fsdp.symmetric(zero_cta=True))`.

    Source: NCCL's documentation, "Window Registration" and `NCCL_CTA_POLICY_ZERO`.
    """
    if not isinstance(zero_cta, bool):
        raise SpecError(f"symmetric(zero_cta={zero_cta!r}): expected True or False.")
    return Symmetric(zero_cta)


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
    memory = torch.empty(0, dtype=torch.uint8, device=run.device)
    if run.device.type != "cuda":
        failed = f"it needs GPUs, and this mesh is on the {run.device.type}"
    elif torch.cuda.nccl.version() < LEAST:
        failed = f"it needs NCCL {'.'.join(map(str, LEAST))}; this is {'.'.join(map(str, torch.cuda.nccl.version()))}"
    else:
        try:
            use_backend(run, "NCCL")
            memory = symmetric.empty(max(nbytes, 1), dtype=torch.uint8, device=run.device)
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
    why = complaint(run, failed)
    if why is None:
        try:
            for group in groups:
                dist.all_reduce(torch.zeros(1, device=run.device), group=group)  # it exists once it was used
                symmetric.rendezvous(memory, group.group_name)
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        why = complaint(run, failed)
        if why is None:
            return memory
    raise SpecError(
        f"Spec(transport='symmetric'): {nbytes:,} bytes of NCCL's symmetric memory could not be had on every rank: "
        f"{why}. Use transport='collective', or 'auto', which takes what there is."
    )


log = logging.getLogger(__name__)
TRIED = 1024  # bytes
LARGE = 1 << 30  # bytes of gathered weights


class Auto(Transport):
    """See the top of this file."""

    name = "auto"

    def resolve_transport(self, run: Runtime, layout: Layout) -> Transport:
        """What was taken, and why, is logged once for each such choice."""
        large = sum(bucket.nbytes("weights") * bucket.slices("weights") for bucket in layout.buckets.values()) >= LARGE
        axes = Copies(run, layout).axes() if large else []

        def choose() -> Transport:
            found, why = _choose(run, axes) if large else (CollectiveTransport(), "there is little to gather")
            log.info("Spec(transport='auto'): %s (%s)", found.name, why)
            return found

        return run.choose(large, tuple(axes), choose)


def _choose(run: Runtime, axes: list[str]) -> tuple[Transport, str]:
    """The transport, and why."""
    collective = CollectiveTransport()
    gpus = run.device.type == "cuda"
    if not gpus or run.size == 1:
        return collective, "there is one rank" if gpus else "there are no GPUs"
    try:
        check_reach(run, axes)
        for axis in axes:
            run.lanes.signalling(axis)
        return CopyEngine(), "the GPUs can read each other's memory"
    except SpecError as error:
        why = str(error)
    try:
        registered(run, TRIED, [group for (lane, _), group in run.groups.items() if lane == "gather"])
        return Symmetric(), f"copy_engine cannot be had: {why}"
    except SpecError as error:
        return collective, f"copy_engine cannot be had: {why}; neither can symmetric: {error}"


NAMES.update({one.name: one for one in (CollectiveTransport(), Symmetric(), CopyEngine(), Auto())})
