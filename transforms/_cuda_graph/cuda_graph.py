"""cuda_graph: a whole train step captured once and replayed, one launch a step.

    first calls    real steps, eagerly, on a stream of its own: libraries load, code is compiled, the schedule settles
    then           the step is captured for this signature (shapes and dtypes of the batch) and replayed
    from then on   vote ─▶ batch copied in ─▶ replay ─▶ results copied out

The calls of such a function are in `graphed`, by `signature`; what a capture is in `capturing`, what a replay is in
`captured_step`. While it is captured a step goes the way it went before: `questions`, `host_traffic`. Where the host
reads from the device: `guarding`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar, cast

from functional_fsdp import SpecError, State

from .graphed import Graphed

__all__ = ["cuda_graph"]

F = TypeVar("F", bound=Callable[..., Any])


def cuda_graph(
    train_step: F,
    *,
    warmup: int = 3,
    graphs: int = 8,
    host_reads: Literal["error", "guard"] = "error",
    pass_through: bool = False,
) -> F:
    """Capture `train_step(state, ...)` as one CUDA graph and replay it: gathers, compute, reductions, clipping, update.

    Args:
        train_step: state first in, state first out, with one `step` in it; `state` or `state, results`.
        warmup: real steps, run eagerly, before the one that is captured; at least 1. For each signature.
        graphs: how many are captured, by signature (and by what the host reads); further steps run eagerly, and a
            warning says so once.
        host_reads: what happens where the host reads from the device within the step, see below. "guard" needs a warmup
            of at least 2.
        pass_through: without GPUs run the step as it is, instead of raising.

    Returns:
        a function that is called as `train_step` is. Every call takes one step, the first ones too.

    A signature is the batch's structure, shapes and dtypes, and whatever in it is no tensor. Tensors of the batch are
    copied into memory of the graph's (from the host too, where pinned memory may be overwritten once the step is
    done); what the step returns beside the state are copies. The state stays where it is in memory; a state from
    elsewhere (a checkpoint, a deep copy) is copied in, and the one that was there before cannot be used any more.
    Between replays states can be saved, copied, looked at and stepped eagerly. `.graphs` has the graphs by signature,
    each with `peak`, the bytes that a replay uses beside the state, which torch does not count then, and `reserved`.
    (Capturing resets torch's peak memory statistics.)

    Whatever else Python decides (a branch, a learning rate that is a number) is decided when the step is captured. A
    schedule is a function of the count, `fsdp.adamw(lr=lambda count: ...)`. Random numbers of `T.forward_backward` are
    those of the eager step, also in what `T.remat` computes again; those of a step by hand go on in torch's default
    generator, as they do eagerly. There, and with torch's own activation checkpointing, nothing is drawn again:
    `preserve_rng_state=False`. What is drawn on the host is what it was when the step was captured, and a warning says
    so.

    While it is captured a step goes the way it went in warm-up. Libraries that ask whether the stream is captured hear
    "no" (torch hears the truth). A tensor that is made on the host and copied to the device is a constant: it must be
    what it was in warm-up, and lies on the device from then on.

    Where the host reads from the device (`.item()`, `if tensor:`, torch.equal, a copy of at most 64 KiB), "error"
    raises, naming the line. "guard" goes on with what the last two steps read there, and the graph compares, bit by
    bit: where one rank would have read something else, no rank takes the step, and all take it again, eagerly. So every
    step of such a function costs an all-reduce of 4 bytes and a wait for its result, and updates do not overlap the
    backward (`Schedule(overlap_update=)`); where no rank reads anything nothing is added. Graphs are kept by what was
    read. A line whose value changes more than 4 times in 100 steps has its steps run eagerly, with a warning. Reads
    after `step` are errors, and so is what reads within a kernel (nonzero, a mask as an index). A replay whose read has
    changed computes with the old value until the comparison is heard: with a size that is too small now, an index may
    lie outside, and a kernel that checks it ends the process. All ranks step by the same such function.

    Which leaves got no gradient on any rank, and so keep their weights, is decided then, too. A replay does not ask
    again; if a rank that steps eagerly has gradients for other leaves, all hear of it in the vote, and none steps.

    `T.cuda_graph(T.compile(train_step))` captures a step that was compiled as a whole.

    Ranks vote before each replay, so a step is still a transaction: until all have come, an exception costs nothing.
    (A step that was compiled whole has no votes.) Ranks may have batches of different shapes, and one may step eagerly
    while another replays, if they issue the same collectives and the eager step does not wait for the device.

    Raises:
        SpecError: `warmup` or `graphs` below 1; another `host_reads`. (When called) ScheduleError: no GPU; a step that
            cannot be captured, with its cause and line: the host waits for the device, what it reads changes from step
            to step, a use outside the plan, memory that moved. The state that came in can be used again then.
        TreeError: a result that is not a state first; a state whose structure is another at the end; something in the
            batch that is no tensor and has no hash.
        StaleStateError, RestartError, CommError: as `step`.

    Collective: at a replay two votes on the host, and on the device what was captured; guarded, a
    third vote on the host, and an all-reduce of 4 bytes an axis.

    Source: torch.cuda.CUDAGraph's documentation.

    Example:
        >>> train_step = T.cuda_graph(train_step)  # doctest: +SKIP
        >>> state, loss = train_step(state, batch)  # doctest: +SKIP
    """
    for name, value in (("warmup", warmup), ("graphs", graphs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"cuda_graph({name}={value!r}): expected a number of at least 1.")
    if host_reads not in ("error", "guard") or (host_reads == "guard" and warmup < 2):
        raise SpecError(
            f'cuda_graph(host_reads={host_reads!r}, warmup={warmup}): expected "error", or "guard" with a warmup of at '
            "least 2, which read the same."
        )
    graphed = Graphed(train_step, warmup, graphs, host_reads == "guard", pass_through)

    @wraps(train_step)
    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        return graphed(state, args, kwargs)

    call.graphs = graphed.captured  # type: ignore[attr-defined]
    return cast(F, call)
