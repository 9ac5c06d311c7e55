"""Slabs: bytes that every rank has, and that each can read of all the others along some axes of the mesh.

    rank 0   [ mine ][ rank 1's ]      GPUs: symmetric memory over NVLink (torch.distributed._symmetric_memory)
    rank 1   [ rank 0's ][ mine ]      CPU: anonymous shared memory, mapped by all processes of the host

Whoever writes and whoever reads keep out of each other's way by barriers, which are collectives like others.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._common.errors import SpecError
from .._common.torch_names import symmetric_memory
from .._distributed.peers import Peers

__all__ = ["PeerMemory", "check_reach", "use_backend"]


class PeerMemory:
    """`mine` [nbytes], uint8, and `peers`: every rank's along each axis, by place; at the own place it is `mine`.

    Making one is collective over the mesh.

    Raises:
        SpecError: on every rank, if the memory of one could not be had or read.
    """

    def __init__(self, run: Peers, axes: Sequence[str], nbytes: int) -> None:
        self.axes = axes
        self.nbytes = max(nbytes, 1)
        self.mine: torch.Tensor
        self.peers: dict[str, list[torch.Tensor]] = {}
        self.handles: dict[str, Any] = {}  # of symmetric memory
        if run.device.type == "cuda":
            self._symmetric(run)
        else:
            self._shared(run)

    def _symmetric(self, run: Peers) -> None:
        symmetric = symmetric_memory()

        failed = ""
        try:
            use_backend(run, "CUDA")
            self.mine = symmetric.empty(self.nbytes, dtype=torch.uint8, device=run.device)
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        self._agree(run, failed)
        try:
            for axis in self.axes:
                handle = self.handles[axis] = symmetric.rendezvous(self.mine, run.groups["gather", axis].group_name)
                places = range(run.sizes[axis])
                self.peers[axis] = [handle.get_buffer(place, (self.nbytes,), torch.uint8) for place in places]
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        self._agree(run, failed)

    def _shared(self, run: Peers) -> None:
        """Memory without a name, which peers find by this process's number: nothing stays behind if it dies."""
        fd = os.memfd_create("functional_fsdp")
        try:
            where, failed = "", ""
            try:
                os.posix_fallocate(fd, 0, self.nbytes)
                where = f"/proc/{os.getpid()}/fd/{fd}"
                self.mine = self._map(where)
            except (OSError, RuntimeError) as error:
                failed = str(error)
            told = run.everyone((where, failed), "memory of a peer memory")
            if not any(why for _, why in told):
                try:
                    for axis in self.axes:
                        paths = [told[i][0] for i in _along(run, axis)]
                        self.peers[axis] = [self.mine if path == where else self._map(path) for path in paths]
                except (OSError, RuntimeError) as error:
                    failed = str(error)
            self._agree(run, failed)
        finally:
            os.close(fd)

    def _agree(self, run: Peers, failed: str) -> None:
        why = run.complaint(failed)
        if why is not None:
            raise SpecError(
                f"Spec(transport='copy_engine'): {self.nbytes:,} bytes of memory that others can read, along "
                f"{', '.join(map(repr, self.axes))}, could not be had on every rank: {why}. Free memory, or use "
                "transport='collective'."
            )

    def _map(self, path: str) -> torch.Tensor:
        os.close(os.open(path, os.O_RDWR))  # torch would make a file that it does not find
        return torch.from_file(path, shared=True, size=self.nbytes, dtype=torch.uint8)


def _along(run: Peers, axis: str) -> list[int]:
    """The ranks of this rank's row along an axis, by place, as indices of `run.everyone`."""
    return [run.ranks.index(rank) for rank in run.rows[axis]]


def check_reach(run: Peers, axes: Iterable[str]) -> None:
    """Raise SpecError, on every rank, unless ranks can read each other's memory along these axes. Collective.

    Raises:
        SpecError: naming what is missing: ranks on several hosts, or GPUs without peer access.
    """
    cuda = run.device.type == "cuda"
    device = torch.cuda.current_device() if cuda else -1
    ranks = run.everyone((socket.gethostname(), device), "hosts and devices")
    wrong = ""
    for axis in axes:
        along = [ranks[i] for i in _along(run, axis)]
        hosts = sorted({host for host, _ in along})
        if len(hosts) > 1:
            wrong = (
                f"ranks must be on one host along each axis whose shards are read; along {axis!r} they are on "
                f"{', '.join(hosts)}. Use an inner axis for each host (hsdp, hfsdp), or transport='collective'."
            )
        elif cuda and not all(d == device or torch.cuda.can_device_access_peer(device, d) for _, d in along):
            wrong = (
                f"GPUs must be able to read each other's memory (NVLink, or PCIe peer access); along {axis!r} some "
                "cannot. Use transport='collective'."
            )
    found = run.complaint(wrong)
    if found:
        raise SpecError(f"Spec(transport='copy_engine'): {found}")


def use_backend(run: Peers, name: str) -> None:
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
