"""Ranks that are forked apart from `launch`, some of which die."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from functional_fsdp import launch
from functional_fsdp._launch import launch as _launch

_inherited: list[Any] = []  # process groups that came through a fork: their threads did not, so never join them
SOON = 20  # seconds: far below the timeout of a collective here, far above what a busy machine takes


def forked(fn: Callable[..., Any], number: int, args: Any) -> str:
    """What comes of `fn` in a child of this worker, which is the rank in its place, and may die."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            if dist.is_initialized():
                _inherited.extend(dist.distributed_c10d._world.pg_map)
                dist.destroy_process_group()
            _launch._numbers = itertools.count(1000 * number)  # keys in the store that no other has
            fn(*args)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


_children = itertools.count(1)


def survivors(fn: Callable[..., Any], ranks: int, *args: Any) -> list[str]:
    """What all ranks but the last say when that one dies."""
    begun = time.monotonic()
    *said, last = launch(forked, (fn, next(_children), args), nprocs=ranks, timeout=120.0)
    assert time.monotonic() - begun < SOON
    assert last == ""
    return said
