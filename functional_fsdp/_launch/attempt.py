"""A store of their own for the ranks that torchrun starts together: its store outlives them, with all that they said.

After a restart (`--max-restarts`) ranks would read addresses of processes that are gone. The number of restarts that
torchrun tells each of them is no name for what is theirs: each host counts its own. So the first rank draws a name.

    ranks/R          a number that rank R has just drawn, until it replaces that of its predecessor
    answers/NUMBER   the name, from the first rank, to whoever drew this number
    heard/NAME       how many have it
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["store_of_this_attempt"]

POLL = 0.01  # seconds


def store_of_this_attempt(timeout: timedelta) -> tuple[Any, int, int]:
    """The store of `env://`, the rank, and how many ranks there are. Nothing that an earlier attempt said is in it."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # else the store belongs to a rank, and ends with it
        meeting = dist.PrefixStore("functional_fsdp/attempts", store)  # type: ignore[attr-defined]
        store = dist.PrefixStore(_name(meeting, rank, world, timeout), store)  # type: ignore[attr-defined]
    return store, rank, world


def _name(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """A name that all of these ranks know, and that no others had. RuntimeError if they do not come."""
    drawn = uuid.uuid4().hex
    if rank:
        store.set(f"ranks/{rank}", drawn)
        store.wait([f"answers/{drawn}"], timeout)
        name: str = store.get(f"answers/{drawn}").decode()
        store.delete_key(f"answers/{drawn}")
        store.add(f"heard/{name}", 1)
        return name
    answered, end = {""}, time.monotonic() + timeout.total_seconds()
    while store.add(f"heard/{drawn}", 0) < world - 1:
        if time.monotonic() > end:
            raise RuntimeError(f"{store.add(f'heard/{drawn}', 0) + 1} of {world} ranks came")
        for other in range(1, world):
            number = store.get(f"ranks/{other}").decode() if store.check([f"ranks/{other}"]) else ""
            if number not in answered:
                answered.add(number)
                store.set(f"answers/{number}", drawn)
        time.sleep(POLL)
    return drawn
