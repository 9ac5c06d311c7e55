"""What a transform of your own is made of, beside the verbs. `functional_fsdp.transforms` uses this and nothing else.

    state = fsdp.finish(state)                                        # the gradients are whole
    squares = {axes: ... for axes, buffers in extend.shards(state).items()}
    norm = extend.total(state, squares).sqrt()                        # each element once, whatever the placement
    state = extend.change(state, "my_transform()", work)              # in place; the old state is consumed

Such a function runs eagerly, inside torch.compile and `T.compile`, and in `T.cuda_graph`, as it is: state first in,
state first out, nothing that waits for the device, and no number of the host that changes from step to step.
CONTRIBUTING.md has one in full.

| for                   |                                                                                              |
|-----------------------|----------------------------------------------------------------------------------------------|
| changes to a state    | `change`, `change_weights`, `apart`, `evolve` (of extras: `fsdp.replace_extras`)             |
| shards                | `shards`, `leaf_shards`, `LeafShard`, `gather_leaves`, `by_unit`                             |
| numbers of all ranks  | `total`, `all_reduce`, `ranks_of`, `Ranks`, `seeds`                                          |
| calls                 | `alone`, `begin_round`, `end_round`, `tracing`, `refuse`                                     |
| modules               | `skeleton_of`, `Placeholder`, `every_buffer`, `refuse_meta`                                  |
| trees by path         | `match`, `flatten`                                                                           |
| borrowed weights      | `Lease`, `lease_of`                                                                          |
| driving a module      | `Session`, `Collision`                                                                       |
| transports            | `Transport`, `Carrier`, `Collective`                                                         |
| compilers             | `begin_compiled`, `residuals_kept`, `keeping`, `point_at_second_gathers`                     |
| steps as graphs       | `graph_of`, `Graph`, `Tracing`, `tracing_now`, `coordinate_of`, `users_line`, `refuse_values`|
| graphs                | `Capture`, `NewCounts`, `Lineage`, `lineage`, `put`, `outside_inference`, `cuda_driver`      |
| torch's private names | `torch_private`, a module: the one place where the packages have them                        |

The last four rows are for those who make compilers and graphs: they follow what torch does, and may change with it.
"""

from __future__ import annotations

from . import _cuda as cuda_driver
from . import _torch as torch_private
from ._capture import Capture
from ._carrier import Carrier
from ._change import apart, change, change_weights
from ._entry import alone, outside_inference
from ._given import NewCounts
from ._graph import Graph, graph_of, refuse_values, users_line
from ._ledger import begin_compiled
from ._metrics import all_reduce
from ._ranks import Lineage, Ranks, lineage, ranks_of, seeds
from ._record import Collective
from ._regather import point_at_second_gathers
from ._rounds import begin_round, end_round
from ._session import Session
from ._shards import LeafShard, by_unit, gather_leaves, leaf_shards, shards, total
from ._skeleton import Placeholder, every_buffer, refuse_meta, skeleton_of
from ._state import State
from ._trace import coordinate_of
from ._tracing import KEEPING, Tracing, keeping, refuse, tracing, tracing_now
from ._transport import Transport
from ._tree import flatten, match
from ._update import put
from ._walk import Collision
from ._weights import Lease, lease_of

__all__ = [
    "Capture",
    "Carrier",
    "Collective",
    "Collision",
    "Graph",
    "LeafShard",
    "Lease",
    "Lineage",
    "NewCounts",
    "Placeholder",
    "Ranks",
    "Session",
    "Tracing",
    "Transport",
    "all_reduce",
    "alone",
    "apart",
    "begin_compiled",
    "begin_round",
    "by_unit",
    "change",
    "change_weights",
    "coordinate_of",
    "cuda_driver",
    "end_round",
    "every_buffer",
    "evolve",
    "flatten",
    "gather_leaves",
    "graph_of",
    "keeping",
    "leaf_shards",
    "lease_of",
    "lineage",
    "match",
    "outside_inference",
    "point_at_second_gathers",
    "put",
    "ranks_of",
    "refuse",
    "refuse_meta",
    "refuse_values",
    "residuals_kept",
    "seeds",
    "shards",
    "skeleton_of",
    "torch_private",
    "total",
    "tracing",
    "tracing_now",
    "users_line",
]

#: `evolve(state, **fields)`: the same state of its step with other trees in some fields (`buffers=`, say), unchecked.
#: Consumes nothing. For extras and gradients see `fsdp.replace_extras` and `fsdp.replace_grads`, which check.
evolve = State._evolve


def residuals_kept() -> bool:
    """Whether a traced pullback may keep the forward's residuals, which `point_at_second_gathers` then has read the
    second gather; else it recomputes. True inside `keeping(True)`."""
    return bool(KEEPING)
