"""What a transform of your own is made of, beside the verbs. `functional_fsdp.transforms` uses this and nothing else.

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

| for                   |                                                                                              |
|-----------------------|----------------------------------------------------------------------------------------------|
| changes to a state    | `change`, `change_weights`, `separate_gradients`, `evolve`, and `fsdp.replace_extras`        |
| shards                | `shards`, `leaf_shards`, `LeafShard`, `gather_leaves`, `by_unit`                             |
| numbers of all ranks  | `total`, `over_shards`, `all_reduce`, `ranks_of`, `Ranks`, `seeds`, `default_generator`      |
| calls                 | `alone`, `begin_round`, `end_round`, `check_between_steps`, `traced_as`, `tracing`, `refuse` |
| modules               | `skeleton_of`, `Placeholder`, `every_buffer`, `refuse_meta`, `around_bound_calls`,           |
|                       | `aliases_of`                                                                                 |
| trees by path         | `match`, `flatten`                                                                           |
| bytes                 | `bytes_of`, `state_bytes`, `find_peak`, `Stretch`, `StepMemory`, `steps_on`, `plan_for`      |
| borrowed weights      | `Loan`, `loan_of`, `is_lent`, `changed`, `spoilt`                                            |
| copies to the host    | `copy_lane`, `CopyLane`, `HostBuffers`, `HostBuffer`, `computes_on`                          |
| driving a module      | `Session`, `Collision`                                                                       |
| optimizers            | `Sender`: what an update gets that communicates, see `fsdp.Optimizer`                        |
| transports            | `Transport`, `Traits`, `Carrier`, `Collective`, `Route`, `BucketPlace`, `Place`, `Steps`,    |
|                       | `Portions`                                                                                   |
| compilers             | `begin_compiled`, `residuals_kept`, `keep_residuals`, `point_at_second_gathers`              |
| steps as graphs       | `graph_of`, `Graph`, `GraphBuild`, `tracing_now`, `coordinate_of`, `foreign_tracer`          |
| values in graphs      | `users_line`, `refuse_values`                                                                |
| CUDA graphs           | `Capture`, `NewCounts`, `Lineage`, `lineage_of`, `put`, `outside_inference`, `cuda_driver`   |
|                       | `Veto`, `Vetoed`                                                                             |
| objects               | `objects`, a module: what any Python object holds                                            |
| names in profiles     | `ranges`, a module: `ranged`, `opened`                                                       |
| torch's private names | `torch_private`, a module: the one place where the packages have them                        |

The last five rows are for those who make compilers and graphs: they follow what torch does, and may change with it.
"""

from __future__ import annotations

from typing import Any

from ._common import objects, ranges
from ._common import torch_names as torch_private
from ._common.calls import alone, outside_inference
from ._common.device import computes_on, default_generator
from ._common.record import Collective
from ._common.tracing import (
    KEEPING,
    GraphBuild,
    foreign_tracer,
    keep_residuals,
    refuse,
    traced_as,
    tracing,
    tracing_now,
    users_line,
)
from ._common.tree import flatten, match
from ._distributed import cuda_driver
from ._distributed.lanes import Steps
from ._graph.graph import Graph, graph_of, refuse_values
from ._graph.regather import point_at_second_gathers
from ._graph.trace import coordinate_of
from ._nn.bound_calls import around_bound_calls
from ._nn.skeleton import Placeholder, changed, every_buffer, refuse_meta, skeleton_of
from ._nn.ties import aliases_of
from ._optim.optimizer import Sender, put
from ._plan.peak import StepMemory, Stretch, find_peak
from ._plan.route import Route
from ._plan.walk import Collision
from ._runtime.copy_lane import CopyLane, HostBuffer, HostBuffers, copy_lane
from ._runtime.given import NewCounts
from ._spec.transport import Traits, Transport
from ._state.capture import Capture
from ._state.lineage import begin_compiled
from ._state.ranks import Lineage, Ranks, check_between_steps, lineage_of, ranks_of, seeds
from ._state.rounds import begin_round, end_round
from ._state.session import Session
from ._state.sizes import plan_for, state_bytes, steps_on
from ._state.state import FIELDS, State
from ._state.veto import Veto, Vetoed
from ._storage.flat import LeafShard, gather_leaves, leaf_shards
from ._storage.place import BucketPlace, Place
from ._storage.safetensors import bytes_of
from ._storage.weights import Loan, is_lent, loan_of, spoilt
from ._transports.carrier import Carrier, Portions
from ._verbs.change import change, change_weights, separate_gradients
from ._verbs.metrics import all_reduce
from ._verbs.shards import by_unit, over_shards, shards, total

__all__ = [
    "BucketPlace",
    "Capture",
    "Carrier",
    "Collective",
    "Collision",
    "CopyLane",
    "Graph",
    "GraphBuild",
    "HostBuffer",
    "HostBuffers",
    "LeafShard",
    "Lineage",
    "Loan",
    "NewCounts",
    "Place",
    "Placeholder",
    "Portions",
    "Ranks",
    "Route",
    "Sender",
    "Session",
    "StepMemory",
    "Steps",
    "Stretch",
    "Traits",
    "Transport",
    "Veto",
    "Vetoed",
    "aliases_of",
    "all_reduce",
    "alone",
    "around_bound_calls",
    "begin_compiled",
    "begin_round",
    "by_unit",
    "bytes_of",
    "change",
    "change_weights",
    "changed",
    "check_between_steps",
    "computes_on",
    "coordinate_of",
    "copy_lane",
    "cuda_driver",
    "default_generator",
    "end_round",
    "every_buffer",
    "evolve",
    "find_peak",
    "flatten",
    "foreign_tracer",
    "gather_leaves",
    "graph_of",
    "is_lent",
    "keep_residuals",
    "leaf_shards",
    "lineage_of",
    "loan_of",
    "match",
    "objects",
    "outside_inference",
    "over_shards",
    "plan_for",
    "point_at_second_gathers",
    "put",
    "ranges",
    "ranks_of",
    "refuse",
    "refuse_meta",
    "refuse_values",
    "residuals_kept",
    "seeds",
    "separate_gradients",
    "shards",
    "skeleton_of",
    "spoilt",
    "state_bytes",
    "steps_on",
    "torch_private",
    "total",
    "traced_as",
    "tracing",
    "tracing_now",
    "users_line",
]


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


def residuals_kept() -> bool:
    """Whether a traced pullback may keep the forward's residuals, which `point_at_second_gathers` then has read the
    second gather; else it recomputes. True inside `keep_residuals(True)`."""
    return bool(KEEPING)
