"""host_transfer: what it costs that a state lies in the host's memory, in bytes and seconds."""

from __future__ import annotations

import math

from .._common.device import host_bandwidth
from .._common.errors import SpecError
from .._state.state import State
from .transfer import HostTransfer, planned_transfer

__all__ = ["host_transfer"]


def host_transfer(state: State, bandwidth: float | None = None) -> HostTransfer:
    """What it costs that a state lies in the host's memory (`memory_kind="pinned_host"`), by plan.

    Args:
        state: between steps or not; or an `abstract_state`, of which nothing is measured.
        bandwidth: bytes a second each way. None: measured, on the first call for a device, by four copies of 64 MiB
            each way at once. Others that use the same bus at the same time are not counted.

    Raises:
        SpecError: a bandwidth that is no positive number.

    Collective: none.

    Example: `print(fsdp.host_transfer(state))` gives "a step moves 18.4 GiB to the device and 13.8 GiB to the host (in
    step 13.8 GiB and 11.5 GiB, beside compute 4.6 GiB and 2.3 GiB): at most 0.441 s at 50.4 GB/s each way".
    """
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and 0 < bandwidth < math.inf):
        raise SpecError(f"host_transfer(bandwidth={bandwidth!r}): expected bytes a second, as 50e9, or None.")
    if bandwidth is None:
        abstract = any(buffer.local.is_meta for buffer in state.main.values())
        bandwidth = math.nan if abstract else host_bandwidth(state.count.device)
    return planned_transfer(state)._replace(bandwidth=float(bandwidth))
