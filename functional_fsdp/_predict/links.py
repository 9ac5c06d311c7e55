"""measure_links: latency and bandwidth along each axis of a mesh, from gathers of two sizes."""

from __future__ import annotations

import time

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._common.record import Collective
from .._runtime.runtime import Runtime, runtime_of
from .hardware import Link

__all__ = ["measure_links"]

SMALL, LARGE, MOST, ROUNDS = 1 << 10, 1 << 24, 1 << 29, 5  # elements: of a rank, of all ranks; and how often
LONGER = 8  # times what the small one takes: then noise of the host is no part of the bandwidth


def measure_links(mesh: DeviceMesh) -> dict[str, Link]:
    """Latency and bandwidth along each axis of a mesh, for `fsdp.predict(links=)`. The same on every rank.

    Args:
        mesh: with named axes, as `fsdp.local_mesh()`.

    Returns:
        a `Link` an axis of more than one rank: seconds a hop, bytes received a second. Each is the middle one of five
        rounds, on the slowest rank: an all-gather of 1024 elements in bfloat16 a rank, and one of 32 MiB in all, or as
        many more, up to 1 GiB, as take 8 times as long.

    Collective: six all-gathers of each size along each axis, on the compute lane, and an exchange on the host.

    Raises:
        SpecError: the mesh is a mapping: it has no ranks.

    Example: `fsdp.predict(model, loss_fn, batch, spec, links=fsdp.measure_links(fsdp.local_mesh()))`.
    """
    run = runtime_of(mesh)
    return {axis: _measured(run, axis, ranks) for axis, ranks in run.sizes.items() if ranks > 1}


def _measured(run: Runtime, axis: str, ranks: int) -> Link:
    short = _slowest(run, axis, ranks, SMALL)
    size = max(LARGE // ranks, SMALL)
    long = _slowest(run, axis, ranks, size)
    while long < LONGER * short and 2 * size * ranks <= MOST:
        size *= 2
        long = _slowest(run, axis, ranks, size)
    received = 2 * (ranks - 1) * (size - SMALL)
    return Link(short / (ranks - 1), received / max(long - short, long / LONGER))


def _slowest(run: Runtime, axis: str, ranks: int, size: int) -> float:
    """What it takes on the slowest rank of the mesh."""
    return max(run.everyone(_seconds(run, axis, ranks, size), "links"))


def _seconds(run: Runtime, axis: str, ranks: int, size: int) -> float:
    """Of an all-gather of so many elements of each rank."""
    whole = torch.zeros(size * ranks, dtype=torch.bfloat16, device=run.device)
    at = run.coordinate[axis]
    own = whole[at * size : (at + 1) * size]
    hop = Collective("all_gather", axis, size * ranks, torch.bfloat16, "", "side", "links")
    found = []
    for _ in range(ROUNDS + 1):
        whole[0].item()  # until the device is idle
        begun = time.perf_counter()
        run.now(hop, whole, own)
        whole[0].item()
        found.append(time.perf_counter() - begun)
    return sorted(found[1:])[ROUNDS // 2]
