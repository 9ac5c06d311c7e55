"""divide: gradients divided by a tensor, as for losses that are sums over tokens."""

from __future__ import annotations

import torch

from functional_fsdp import State, TreeError, finish_reductions
from functional_fsdp._verbs.seams import torch_private
from functional_fsdp.extend import change, shards

__all__ = ["divide"]


@torch.no_grad()
def divide(state: State, divisor: float | torch.Tensor) -> State:
    """Divide all gradients, in place, by a number or a tensor [] that is the same on every rank; use the new state.

    Where ranks have different numbers of tokens, a mean over tokens is a sum of sums over their total:

        spec = fsdp.Spec(mesh, average="sum")
        state, loss = forward_backward(state, batch)         # loss_fn adds up over tokens
        state, n = fsdp.psum(state, tokens)                  # how many there are on all ranks
        state = fsdp.step(T.divide(state, n))

    Raises:
        TreeError: a tensor with more than one element. ScheduleError: the state has no gradients.

    Collective: what `finish_reductions` issues.
    """
    if isinstance(divisor, torch.Tensor) and divisor.numel() != 1:
        raise TreeError(f"divide: the divisor has shape {tuple(divisor.shape)}; expected a number or a tensor [].")
    state = finish_reductions(state)
    by = divisor.reshape(()).to(state.count.device) if isinstance(divisor, torch.Tensor) else divisor

    def divide_all() -> None:
        tensors = [buffer.local for buffers in shards(state).values() for buffer in buffers]
        if isinstance(by, torch.Tensor):
            torch_private.foreach_div_(tensors, by)
        else:
            torch_private.foreach_div_(tensors, float(by))

    return change(state, "divide()", divide_all, by)
