"""What a transform of your own is made of, beside the verbs.

    state = fsdp.finish_reductions(state)                                        # the gradients are whole
    squares = {axes: ... for axes, buffers in extend.shards(state).items()}
    norm = extend.total(state, squares).sqrt()                        # each element once, whatever the placement
    state = extend.change(state, "my_transform()", work)              # in place; the old state is consumed

Such a function runs eagerly, inside torch.compile and `T.compile`, and in `T.cuda_graph`, as it is: state first in,
state first out, nothing that waits for the device, and no number of the host that changes from step to step.
CONTRIBUTING.md has one in full.

- `seeds`, `Ranks.everyone` and `Ranks.any` do wait: they are for eager steps, and for what comes between steps. In a
  graph compute draws from the tensors `state.rng` and `state.count`.
- `finish_reductions` comes before `state.grads` is read: without it a reduction may still be under way.
- `total` and `over_shards` take the keys that `shards` gives: tuples of axes along which ranks hold other elements.

| for                  |                                                                                         |
|----------------------|-----------------------------------------------------------------------------------------|
| changes to a state   | `change`, `change_weights`, `separate_gradients`, `evolve`, and `fsdp.replace_extras`   |
| shards               | `shards`, `leaf_shards`, `gather_leaves`, `by_unit`                                     |
| numbers of all ranks | `total`, `over_shards`, `all_reduce`, `ranks_of`, `Ranks`, `seeds`, `default_generator` |
| calls                | `alone`, `begin_round`, `end_round`, `check_between_steps`, `traced_as`, `refuse`       |
| modules              | `skeleton_of`, `Placeholder`, `every_buffer`                                            |
| trees by path        | `match`, `flatten`                                                                      |
| bytes                | `bytes_of`, `state_bytes`                                                               |
| borrowed weights     | `Loan`, `loan_of`, `is_lent`                                                            |
| copies to the host   | `copy_lane`, `CopyLane`, `HostBuffers`, `computes_on`                                   |
| driving a module     | `Session`                                                                               |
| optimizers           | `Sender`: what an update gets that communicates, see `fsdp.Optimizer`                   |
| transports           | `Transport`, `Carrier`, `Collective`, `BucketPlace`                                     |
| lineages             | `lineage_of`                                                                            |

What compilers and CUDA graphs need beside it follows torch, and is no part of it.
"""

from __future__ import annotations

from typing import Any

from ._common.calls import alone, refuse, traced_as
from ._common.device import default_generator
from ._common.record import Collective
from ._common.tree import flatten, match
from ._engine.gathers import Carrier
from ._export import gather_leaves
from ._extend import (
    Ranks,
    Session,
    begin_round,
    by_unit,
    change,
    change_weights,
    check_between_steps,
    end_round,
    lineage_of,
    over_shards,
    ranks_of,
    seeds,
    separate_gradients,
    shards,
    total,
)
from ._host_memory import CopyLane, HostBuffers, computes_on, copy_lane
from ._io.folder import bytes_of
from ._metrics import all_reduce
from ._nn.skeleton import Placeholder, every_buffer, skeleton_of
from ._optim.optimizer import Sender
from ._spec.spec import Transport
from ._state.state import FIELDS, State
from ._storage import BucketPlace, Loan, is_lent, leaf_shards, loan_of
from .look.tables import state_bytes

__all__ = [
    "BucketPlace", "Carrier", "Collective", "CopyLane", "HostBuffers", "Loan", "Placeholder", "Ranks", "Sender",
    "Session", "Transport", "all_reduce", "alone", "begin_round", "by_unit", "bytes_of", "change",
    "change_weights", "check_between_steps", "computes_on", "copy_lane", "default_generator", "end_round",
    "every_buffer", "evolve", "flatten", "gather_leaves", "is_lent", "leaf_shards", "lineage_of", "loan_of",
    "match", "over_shards", "ranks_of", "refuse", "seeds", "separate_gradients", "shards", "skeleton_of",
    "state_bytes", "total", "traced_as",
]  # fmt: skip


def evolve(state: State, **fields: Any) -> State:
    """The same state of its step with other trees in some fields, unchecked. Consumes nothing.

    Args:
        fields: by name, `buffers=` say. For extras and gradients see `fsdp.replace_extras` and `fsdp.replace_grads`,
            which check.

    Raises:
        TypeError: a State has no such field.

    Example: `state = extend.evolve(state, buffers=buffers)`.
    """
    for name in fields:
        if name not in FIELDS:
            raise TypeError(f"evolve: a State has no field {name!r}. Its fields are {', '.join(FIELDS)}.")
    return state._evolve(**fields)
