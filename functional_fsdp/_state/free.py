"""free_arena: give back the memory that eager steps keep, where a state goes on by compiled ones."""

from __future__ import annotations

from .._common.calls import alone
from .state import State

__all__ = ["free_arena"]


@alone
def free_arena(state: State) -> State:
    """Give back what eager steps keep between steps: the arena where it stays (on CPUs, and where ranks share it or
    NCCL knows it), staging, and what is known of the order of use. The next eager step makes it again.

    Args:
        state: a state between steps. It stays valid, and is returned.

    On GPUs with "collective" nothing stays between steps, and nothing is to be given back. A window of NCCL's is kept
    for the next state of the mesh.

    Raises:
        StaleStateError: a consumed state, or one in the middle of a step. ScheduleError: a rank does something else.

    Collective: every rank calls it; an exchange on the host.

    Example: `state = fsdp.free_arena(state)`, before compiled steps.
    """
    lineage = state.version.lineage
    state._resting("free_arena")
    lineage.enter(state.version.serial, "free_arena")
    if lineage.executor is not None:
        lineage.executor.settle()
    lineage.runtime.everyone(True, "free_arena")  # nobody reads another's arena any more
    lineage.drop_executor()
    return state
