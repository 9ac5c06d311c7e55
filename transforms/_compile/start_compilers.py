"""start_compilers: what compilers need before they can begin, on a thread, while something else is waited for.

start_compilers()        imports of Dynamo and Inductor   ┐ on the thread
ranks connect, init      Inductor's processes start       ┘
compile=True             waits for what is left of it
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from functional_fsdp._seams import torch_private

__all__ = ["finish_start", "start_compilers"]

_started: list[threading.Thread] = []  # one, once it is asked for


def start_compilers() -> None:
    """Import Dynamo and Inductor, and start the processes in which Inductor compiles kernels, on a thread.

    The first compiled step waits seconds for them. Ranks that connect wait for the network, and `init` and `load` for
    the device and the disk: call it before, once the program's own imports are done. What is compiled later waits for
    what is left. Nothing else changes; a second call does nothing, and `os.fork` waits until the thread is done.

    Example:
        >>> T.start_compilers()
        >>> mesh = fsdp.local_mesh()  # connects
    """
    if not _started:
        thread = threading.Thread(target=_start, name="start_compilers")
        _started.append(thread)
        os.register_at_fork(before=finish_start)  # a child would wait forever for what is being imported
        thread.start()


def finish_start() -> None:
    """Wait for the thread, if there is one."""
    for thread in _started:
        if thread is not threading.current_thread():
            thread.join()


def _start() -> None:
    with suppress(Exception):  # whoever compiles imports it again, and sees why it fails
        torch_private.dynamo()
        torch_private.start_compilers()
        torch_private.inductor()
