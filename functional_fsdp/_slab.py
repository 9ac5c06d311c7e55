"""Slabs: bytes that every rank of a mesh axis has, and that each can read of all the others.

    rank 0   [ mine ][ rank 1's ]      GPUs: symmetric memory over NVLink (torch.distributed._symmetric_memory)
    rank 1   [ rank 0's ][ mine ]      CPU: a file in shared memory, mapped by all processes of the host

Whoever writes and whoever reads keep out of each other's way by barriers, which are collectives like others.
"""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ._errors import SpecError

if TYPE_CHECKING:
    from ._runtime import Runtime

__all__ = ["Slab", "check_reach"]

ROOM = 1 << 26  # bytes that are left free in shared memory


class Slab:
    """`mine` [nbytes], uint8, and `peers`: every rank's along the axis, by place; `peers[own place]` is `mine`.

    Making one is collective over the mesh.
    """

    def __init__(self, run: Runtime, axis: str, nbytes: int) -> None:
        self.axis = axis
        self.nbytes = nbytes
        self.mine: torch.Tensor
        self.peers: list[torch.Tensor]
        self.handle: Any = None  # of symmetric memory: barriers
        if run.cuda:
            self._symmetric(run)
        else:
            self._shared(run)

    def _symmetric(self, run: Runtime) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.mine = symmetric.empty(self.nbytes, dtype=torch.uint8, device=run.device)
        self.handle = symmetric.rendezvous(self.mine, run.groups["gather", self.axis].group_name)
        self.peers = [
            self.handle.get_buffer(place, (self.nbytes,), torch.uint8) for place in range(run.sizes[self.axis])
        ]

    def _shared(self, run: Runtime) -> None:
        path = _folder(self.nbytes) / f"functional_fsdp-{uuid.uuid4().hex}"
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
            mine = self._map(path)
            paths = run.everyone(str(path))
            others = [paths[i] for i in _along(run, self.axis)]
            self.peers = [mine if other == str(path) else self._map(Path(other)) for other in others]
            self.mine = mine
            run.everyone(0)  # all have mapped all
        finally:
            path.unlink(missing_ok=True)  # the bytes stay until the last process lets go of them

    def _map(self, path: Path) -> torch.Tensor:
        return torch.from_file(str(path), shared=True, size=self.nbytes, dtype=torch.uint8)


def _along(run: Runtime, axis: str) -> list[int]:
    """The ranks of this rank's row along an axis, by place, as indices of `run.everyone`."""
    names = run.mesh.mesh_dim_names or ()
    i = names.index(axis)
    rows = run.mesh.mesh.movedim(i, -1).reshape(-1, run.sizes[axis]).tolist()
    return [run.ranks.index(rank) for rank in next(row for row in rows if dist.get_rank() in row)]


def _folder(nbytes: int) -> Path:
    """Shared memory if it has room, else the folder for temporary files."""
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = os.statvfs(shared)
        if room.f_bavail * room.f_frsize > nbytes + ROOM:
            return shared
    return Path(tempfile.gettempdir())


def check_reach(run: Runtime) -> None:
    """Raise SpecError, on every rank, unless ranks can read each other's memory along every axis. Collective.

    Raises:
        SpecError: naming what is missing: ranks on several hosts, or GPUs without peer access.
    """
    hosts = run.everyone(socket.gethostname())
    for axis, size in run.sizes.items():
        along = [hosts[i] for i in _along(run, axis)] if size > 1 else []
        if len(set(along)) > 1:
            raise SpecError(
                f"Schedule(transport='copy_engine') reads the memory of other ranks, which must be on one host along "
                f"each axis that shards; along {axis!r} they are on {', '.join(sorted(set(along)))}. Use an inner axis "
                "for each host (hsdp, hfsdp), or transport='collective'."
            )
    reaches = True
    if run.cuda:
        mine = torch.cuda.current_device()
        devices = run.everyone(mine)
        reaches = all(other == mine or torch.cuda.can_device_access_peer(mine, other) for other in devices)
    if not all(run.everyone(reaches)):
        raise SpecError(
            "Schedule(transport='copy_engine') needs GPUs that can read each other's memory (NVLink, or PCIe peer "
            "access), and some of these cannot. Use transport='collective'."
        )
