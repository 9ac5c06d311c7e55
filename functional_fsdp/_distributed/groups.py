"""The process groups that lanes have: how they are made, beside whatever other groups there are.

torch names a group that only its own ranks make by those ranks and by how many groups the process is in. Where a
program has made a group of some ranks, as `dist.new_group([0])` on all of them does, ranks would call ours by different
names and wait for each other; so `level` counts first. For the same reason groups are not destroyed, which would have
names come twice: those of a mesh that nobody holds any more go to the next one of the same ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from .._common.errors import CommError
from .._common.torch_names import default_store
from .watch import here

__all__ = ["Levelled", "forget", "level", "new_group", "one_thread"]

NAME = "gloo_with_one_thread"
POLL, GRACE = 0.1, 2.0  # seconds: how often to look whether a rank has died, and what those get that go on without it
_levelled: Counter[str] = Counter()  # how often, by ranks


def new_group(
    ranks: list[int],
    what: str,
    timeout: timedelta,
    backend: str,
    options: Any = None,
    gone: Callable[[], list[int]] | None = None,
) -> dist.ProcessGroup:
    """A group of these ranks, which alone call this; `level` has been called before. Collective.

    Args:
        gone: the ranks that are known to have ended. Groups on CPUs do not wait for those.

    Raises:
        CommError: a rank is gone, or cannot be reached.
    """
    make = partial(
        dist.new_group,
        ranks,
        timeout=timeout,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=f"functional_fsdp {what}",
    )
    try:
        return make() if gone is None or backend == "nccl" else _unless(lambda: set(gone()) & set(ranks), make)
    except RuntimeError as error:
        raise CommError(
            f"communicators for the ranks {ranks}: the one for {what} could not be made: a rank died, or cannot be "
            "reached over the network. Restart the job; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network "
            f"interface. The backend says: {str(error)[:300]}"
        ) from error


def _unless(dead: Callable[[], set[int]], make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """What is made, in a thread: torch waits for a rank that has died until the timeout."""
    made: Future[dist.ProcessGroup] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=run, name="functional_fsdp new_group", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL)
            if thread.is_alive() and (found := dead()):
                thread.join(GRACE)
                if thread.is_alive():
                    raise RuntimeError(f"ranks {sorted(found)} have ended")
    except KeyboardInterrupt:
        thread.join(GRACE)  # what it makes counts, as torch names groups
        raise
    return made.result()


class Levelled(NamedTuple):
    """What ranks know of each other before they communicate.

    Attributes:
        place: a name in the store that these ranks have to themselves, each time another one. What is said in `level`
            lies there until they `forget` it.
        again: the names that all offer, sorted.
        processes: of the other ranks on this host, by place among the ranks.
    """

    place: str
    again: list[str]
    processes: dict[int, int]


def level(ranks: list[int], timeout: timedelta, offers: Iterable[str] = ()) -> Levelled:
    """Bring these ranks, which alone call this, to the same number of groups: a rank with fewer makes some of its own.

    Collective, through the store only: no communicator is made for it.

    Args:
        offers: names of what this rank could use again, if all can.

    Raises:
        CommError: a rank has not come within the timeout.
    """
    world: Any = dist.distributed_c10d
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    key = f"functional_fsdp/groups/{name}/{_levelled[name]}"
    store: Any = dist.PrefixStore(key, world._get_default_store())  # type: ignore[attr-defined]
    me, mine = dist.get_rank(), len(world._world.pg_names)
    try:
        store.set(str(me), json.dumps((mine, sorted(offers), *here())))
        if me == ranks[0]:
            store.wait([str(rank) for rank in ranks], timeout)
            counts, offered, machines, numbers = zip(*(json.loads(store.get(str(rank))) for rank in ranks), strict=True)
            shared = set.intersection(*map(set, offered))
            store.set("most", json.dumps((max(counts), sorted(shared), machines, numbers)))
        store.wait(["most"], timeout)
        most, again, machines, numbers = json.loads(store.get("most"))
    except RuntimeError as error:
        try:
            missing = [rank for rank in ranks if not store.check([str(rank)])] or ranks[:1]
            store.delete_key(str(me))  # nobody is to think that this rank is here
        except RuntimeError:
            raise CommError(
                f"communicators for the ranks {ranks}: the ranks' store cannot be reached: the process that keeps it, "
                f"rank 0's or the launcher's, is gone. Restart the job. It says: {str(error)[:300]}"
            ) from error
        raise CommError(
            f"communicators for the ranks {ranks}: after {timeout.total_seconds():g} s ranks {missing} have not come "
            "to make them. Every rank of a mesh makes the same states on it, in the same order."
        ) from error
    for _ in range(mine, most):
        new_group([me], "nothing", timeout, "gloo")
    _levelled[name] += 1
    near = machines[ranks.index(me)]
    others = enumerate(zip(ranks, machines, numbers, strict=True))
    return Levelled(key, again, {i: n for i, (rank, where, n) in others if rank != me and where == near is not None})


def forget(place: str, ranks: list[int]) -> None:
    """Take out of the store what this rank said in `level`: all have read it."""
    store: Any = dist.PrefixStore(place, default_store())  # type: ignore[attr-defined]
    with suppress(RuntimeError):  # whoever keeps the store may be gone
        store.delete_key(str(dist.get_rank()))
        if dist.get_rank() == ranks[0]:
            store.delete_key("most")


def one_thread() -> str:
    """The name of a backend for `new_group`: gloo with one worker thread a group, for functional collectives.

    torch gives a group two, and a thread that has done a work writes the work's name into a string of the group's
    without a lock. Short names fit into the string itself; a functional all-gather's, "ALLGATHER_COALESCED", does not,
    so both threads now and then free the same old name, which corrupts the heap (seen with torch 2.13 on its own).
    """
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _one_thread, extended_api=True, devices=["cpu"])
    return NAME


def _one_thread(group: Any, _: Any) -> Any:
    backend: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = backend._Options()
    options._devices = [backend.create_device(interface=name) for name in names] or [backend.create_default_device()]
    options._threads = 1
    options._timeout = group.timeout
    options.global_ranks_in_group, options.group_name = group.global_ranks_in_group, group.group_id
    return backend(group.store, group.group_rank, group.group_size, options)
