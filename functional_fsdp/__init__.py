"""Fully sharded data parallelism as a pure transform: parameters and a placement spec in, a sharded State out.

state, params = fsdp.unshard(state)
grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
state = fsdp.reduce(state, grads)
state = fsdp.step(state)
"""

from . import extend
from ._checkpoint import latest, load, save
from ._draw import timeline
from ._errors import (
    CheckpointError,
    CommError,
    FsdpError,
    RestartError,
    ScheduleError,
    SpecError,
    StaleStateError,
    TreeError,
)
from ._export import buffers, full_params, local_shards, state_dict
from ._flat import FlatBuffer
from ._free import free_arena
from ._init import init
from ._launch import LaunchError, launch, local_mesh
from ._layout import Bucket, Layout, Leaf, Unit
from ._lower import Lowered, abstract, lower
from ._metrics import pmean, psum
from ._module import bind, functionalize
from ._optim import Optimizer, adamw, from_updates, sgd
from ._placement import Placement, ddp, hfsdp, hsdp, zero1, zero2, zero3
from ._plan import Plan, plan
from ._precision import Precision
from ._replace import replace_extras, replace_grads, replace_params
from ._rounds import drop_gradients
from ._route import Partial, Replicate, Shard
from ._schedule import Schedule
from ._shard import layout, shard
from ._spec import Spec
from ._state import State
from ._ties import tie
from ._transports import symmetric
from ._units import units
from ._verbs import finish, newest, reduce, release, step, unshard

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "CheckpointError",
    "CommError",
    "FlatBuffer",
    "FsdpError",
    "LaunchError",
    "Layout",
    "Leaf",
    "Lowered",
    "Optimizer",
    "Partial",
    "Placement",
    "Plan",
    "Precision",
    "Replicate",
    "RestartError",
    "Schedule",
    "ScheduleError",
    "Shard",
    "Spec",
    "SpecError",
    "StaleStateError",
    "State",
    "TreeError",
    "Unit",
    "abstract",
    "adamw",
    "bind",
    "buffers",
    "ddp",
    "drop_gradients",
    "extend",
    "finish",
    "free_arena",
    "from_updates",
    "full_params",
    "functionalize",
    "hfsdp",
    "hsdp",
    "init",
    "latest",
    "launch",
    "layout",
    "load",
    "local_mesh",
    "local_shards",
    "lower",
    "newest",
    "plan",
    "pmean",
    "psum",
    "reduce",
    "release",
    "replace_extras",
    "replace_grads",
    "replace_params",
    "save",
    "sgd",
    "shard",
    "state_dict",
    "step",
    "symmetric",
    "tie",
    "timeline",
    "units",
    "unshard",
    "zero1",
    "zero2",
    "zero3",
]
