"""load_weights: weights from files or another framework's tree, each rank its own runs only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from .._common.calls import verb
from .._common.errors import ScheduleError, TreeError
from .._runtime.agree import Topic, agree
from .._runtime.joint import Joint
from .._runtime.runtime import runtime_of
from .._state.state import State
from .._storage.flat import zeros
from .._verbs.replace import copies, renewed
from .conversions import Conversions, checked
from .sources import Rename, Source, fill, opened, same_source

__all__ = ["load_weights"]


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ScheduleError("load_weights reads files, which a compiled step cannot. Call it outside torch.compile.")


@verb(_refuse)
def load_weights(
    state: State,
    source: str | os.PathLike[str] | Source | Mapping[str, torch.Tensor],
    *,
    rename: Rename | None = None,
    convert: Conversions | None = None,
    partial: bool = False,
    optimizer: bool = True,
) -> State:
    """A State with other weights, in a lineage of its own: leaves of global shapes in files -> shards [n / ranks].

    Each rank reads the runs of the leaves that it holds and nothing else; numbers are converted to `Precision.main`.
    Buffers of the state are read by their paths, too.

    Args:
        state: any state that no step has consumed. It stays as it is, and is as usable as before.
        source: a folder or file of any format that `open_checkpoint` knows, of whatever package, nothing of which is
            run; what `open_checkpoint` gives; or {name: tensor}.
        rename: from a leaf's path to its name in the source: a function, or a mapping of those that differ. None: as
            they are, or with one beginning ("model.") that all names there have and the leaves have not.
        convert: {path: what holds the leaf in the source} where that is not one leaf: parts that are `Stacked` or
            `Concatenated`, one `Transposed`, or a slice of one (`Sliced`); or its name. `conversions_of(model)` makes
            that of a Hugging Face model. Of a transposed leaf a rank reads a run for each row of the source.
        partial: True where leaves may be missing there, which keep their values, and others may be there.
        optimizer: False leaves out the optimizer and its state: for evaluation. `step` then refuses.

    Returns:
        a State between steps, without gradients. Optimizer state, count, rng and extras are copies of the old one's.

    Memory: as another State; on the host 16 Mi elements.

    Raises:
        TreeError: leaves that are missing, unexpected or of another shape, by name, before anything is read.
        SpecError: a conversion of no leaf, or one that does not fit its leaf; ranks that were given different ones.
        FileNotFoundError, CheckpointError: no weights there, or damaged ones. If one rank raises, all do.

    Collective: every rank calls it. Checks on the host; an all-gather a bucket where a placement keeps compute copies.

    Example:
        >>> state = fsdp.load_weights(state, "llama/", rename=lambda path: f"model.{path}")  # doctest: +SKIP
        >>> state = fsdp.load_weights(state, "mixtral/", convert=fsdp.conversions_of(model))  # doctest: +SKIP
    """
    state._valid("load_weights")
    lineage, run = state.version.lineage, runtime_of(state.spec.mesh)
    lineage.look(state.version.serial)
    lineage.touched()
    trees: dict[str, Any] = {}
    tied = {p: source for p, source in zip(state.layout.paths, state.layout.source, strict=True) if p != source}

    def read() -> None:
        trees.update(copies(state, optimizer), main=zeros(state.main)[0])
        if partial:
            for name, buffer in trees["main"].items():
                buffer.local.copy_(state.main[name].local)
        filled = fill(trees["main"], trees["buffers"], there, rename, cuts, partial, tied)
        if partial and not filled:
            raise TreeError(
                f"load_weights: no name in {there.what} is one of the model's ({state.layout.paths[0]!r} and others), "
                "so nothing would be loaded. Say how names differ: rename=."
            )

    def look() -> tuple[tuple[Source, Conversions], list[Topic]]:
        cuts = checked(convert)
        found, topics = same_source(opened(source), cuts)
        return (found, cuts), topics

    with Joint(run, "load_weights") as joint:
        there, cuts = agree(joint, "the source", look)
        joint(read, "weights")
    return renewed(state, trees, optimizer)
