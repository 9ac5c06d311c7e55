"""Replicas: leaves that ranks had of their own when they were saved, and leaves that they have of their own now.

    there                                   here                    with allow=["replicas"]
    main.w of replica 0, of replica 1       main.w                  read from the first, if all hold the same
    main.w                                  main.w of replica 0     every replica reads it
    main.w of replica 0, of replica 1       of replica 0, 1, 2      from the first, if all hold the same

Replicas that train apart (DiLoCo) hold the same whenever they have been averaged. Experts never do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from .._common.errors import SpecError
from .._state.state import State
from .about import as_there, names_of
from .note import Tensor

__all__ = ["with_replicas"]


def with_replicas(path: Path, state: State, there: Mapping[str, Tensor], allow: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names that this state has for them.

    Raises:
        SpecError: it has them by other ranks, and that is not allowed; or they differ.
    """
    by_leaf: dict[str, list[str]] = {}
    for name in there:
        by_leaf.setdefault(_leaf(name), []).append(name)
    wanted = names_of(as_there(state, there), there)
    lacking = [name for name in wanted if name not in there]
    found = dict(there)
    for name in lacking:
        alike = by_leaf.get(_leaf(name), [])
        if not alike or ("optimizer" in allow and name.startswith("opt.")):
            continue  # it is missing in any case, or not wanted
        if "replicas" not in allow:
            raise SpecError(
                f"load: {path} has {alike[0]!r}{f' and {len(alike) - 1} more' if len(alike) > 1 else ''}, and this "
                f"state wants {name!r}: other ranks have leaves of their own. Where they are replicas that hold the "
                "same, say load(..., allow=['replicas']); else give the mesh the axes with which it was saved."
            )
        other = next((one for one in alike if _content(there[one]) != _content(there[alike[0]])), None)
        if other is not None:
            remedy = "Average the replicas before they are saved"
            if name.startswith("opt."):
                remedy = "Begin with a new optimizer state (allow=['replicas', 'optimizer'])"
            raise SpecError(
                f"load: {path} has {alike[0]!r} and {other!r}, which differ, and this state wants {name!r}. {remedy}, "
                "or give the mesh the axes with which it was saved."
            )
        found[name] = there[alike[0]]
        for other in alike:
            if other not in wanted:
                found.pop(other, None)
    return found


def _leaf(name: str) -> str:
    """The name without the place of the ranks that have it."""
    return re.sub(r" of \w+ \d+(, \w+ \d+)*$", "", name)


def _content(tensor: Tensor) -> object:
    """What of a tensor can be compared without reading it: its chunks' places and the sums of their blocks."""
    return tensor.dtype, tensor.shape, [(chunk.start, chunk.stop, chunk.sums[1:]) for chunk in tensor.chunks]
