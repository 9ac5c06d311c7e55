"""ProcessWatch: which of the other ranks' processes have ended, as far as this one can see them: those on its host.

Nobody needs to ask them: the kernel says so (pidfds, Linux 5.3). Of ranks elsewhere one hears when a connection breaks.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from typing import Any

__all__ = ["ProcessWatch", "here"]


class ProcessWatch:
    """The processes {place: number}; those that it cannot see are left out."""

    def __init__(self, processes: dict[int, int]) -> None:
        self.places: dict[int, int] = {}  # by descriptor
        self.poll = select.poll()
        opened: list[int] = []
        weakref.finalize(self, _close, opened)
        for place, pid in processes.items():
            with contextlib.suppress(OSError, AttributeError):
                fd = os.pidfd_open(pid)  # readable when the process has ended
                opened.append(fd)
                self.places[fd] = place
                self.poll.register(fd, select.POLLIN)

    def ended(self) -> list[int]:
        """The places of the processes that have ended."""
        return sorted(self.places[fd] for fd, _ in self.poll.poll(0)) if self.places else []

    def __len__(self) -> int:
        return len(self.places)


def here() -> tuple[Any, int]:
    """Where this process is, the same for processes that can see each other, and its number: the kernel that runs, and
    its names for them."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return (file.read(), os.readlink("/proc/self/ns/pid")), os.getpid()
    return None, os.getpid()


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
