"""Fully sharded data parallelism as a pure transform: parameters and a placement spec in, a sharded State out.

state, params = fsdp.unshard(state)
grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
state = fsdp.reduce(state, grads)
state = fsdp.step(state)
"""

from pathlib import Path as _Path

if not (_Path(__file__).parent / "transforms").is_dir():  # unpacked without links: it lies beside this package
    __path__.append(str(_Path(__file__).parents[1]))

from . import _exact_sums, _one_source, extend  # noqa: F401  # those with a private name provide what the core calls by name
from . import _host_memory as _streamed  # noqa: F401
from ._as_module import as_module
from ._axes import Along
from ._common.errors import (
    CheckpointError,
    CommError,
    FsdpError,
    RestartError,
    ScheduleError,
    SpecError,
    StaleStateError,
    TreeError,
)
from ._export import full_params, local_shards, state_dict
from ._float8 import Float8Weight
from ._graph import traced as _traced  # noqa: F401
from ._graph.graph import Lowered, abstract_state, lower
from ._host_memory import HostTransfer, host_transfer
from ._init import init
from ._io.background import async_save
from ._io.checkpoint import latest_checkpoint, load, save
from ._io.conversions import Concatenated, Sliced, Stacked, Transposed, conversions_of
from ._io.foreign import Checkpoint, open_checkpoint
from ._io.load_weights import load_optimizer_state, load_weights, optimizer_state
from ._io.safetensors import merged, save_adapter, save_merged, save_safetensors
from ._io.stream import WeightDelta, WeightSnapshot, apply_delta, delta, snapshot, stream, stream_to
from ._io.to_dcp import save_dcp
from ._launch.launch import launch, local_mesh, workers
from ._launch.pool import LaunchError
from ._launch.workers import Handle, Simulation, WorkerGroup, simulate
from ._metrics import pmax, pmean, psum
from ._nn.module import bind, buffers, functionalize, units
from ._nn.skeleton import tie
from ._optim.adamw import adamw
from ._optim.optimizer import Optimizer
from ._optim.sgd import sgd
from ._optim_extra import packed_adamw as _packed_adamw  # noqa: F401
from ._optim_extra.from_torch import from_torch
from ._optim_extra.muon import muon
from ._optim_extra.partition import partition
from ._optim_extra.updates import from_updates
from ._plan.layout import Bucket, Layout, Leaf, Unit
from ._plan.plan import Plan, make_plan
from ._plan.route import Partial, Replicated, Sharded
from ._predict.hardware import Hardware, Link
from ._predict.prediction import Prediction, measure_compute, measure_links, predict
from ._predict.tune import Candidate, Tuned, tune
from ._redistribute import free_arena, freeze, redistribute, replace_extras, replace_grads, replace_params, unfreeze
from ._simulate import Traffic
from ._spec.placement import Placement, ddp, hfsdp, hsdp, zero1, zero2, zero3
from ._spec.precision import Codec, Precision
from ._spec.spec import Schedule, Spec
from ._state.shard import make_layout, shard
from ._state.state import State
from ._storage import FlatBuffer, PackedWeight
from ._transports import peer_memory as _signals  # noqa: F401
from ._transports.auto import symmetric
from ._verbs import drop_gradients, finish_reductions, newest, reduce, release, step, unshard
from .codecs import packed_reductions as _packed_reductions  # noqa: F401
from .codecs import rows as _rows  # noqa: F401
from .codecs.blocks import dynamic8, fp8_block, from_quantized, int4, int8, mxfp8, nf4
from .look import equal_check as _equal_check  # noqa: F401
from .look import tables as _tables  # noqa: F401
from .look.draw import draw
from .look.fingerprint import Comparison, Difference, Prints, compare, fingerprint
from .look.flight import flight_record
from .look.observe import Late, Observation, observe
from .look.timeline import timeline

__version__ = "0.1.0"

__all__ = [
    "Along", "Bucket", "Candidate", "Checkpoint", "CheckpointError", "Codec", "CommError", "Comparison",
    "Concatenated", "Difference", "FlatBuffer", "Float8Weight", "FsdpError", "Handle", "Hardware", "HostTransfer",
    "Late", "LaunchError", "Layout", "Leaf", "Link", "Lowered", "Observation", "Optimizer", "PackedWeight",
    "Partial", "Placement", "Plan", "Precision", "Prediction", "Prints", "Replicated", "RestartError", "Schedule",
    "ScheduleError", "Sharded", "Simulation", "Sliced", "Spec", "SpecError", "Stacked", "StaleStateError",
    "State", "Traffic", "Transposed", "TreeError", "Tuned", "Unit", "WeightDelta", "WeightSnapshot",
    "WorkerGroup", "abstract_state", "adamw", "apply_delta", "as_module", "async_save", "bind", "buffers",
    "compare", "conversions_of", "ddp", "delta", "draw", "drop_gradients", "dynamic8", "extend", "fingerprint",
    "finish_reductions", "flight_record", "fp8_block", "free_arena", "freeze", "from_quantized", "from_torch",
    "from_updates", "full_params", "functionalize", "hfsdp", "host_transfer", "hsdp", "init", "int4", "int8",
    "latest_checkpoint", "launch", "load", "load_optimizer_state", "load_weights", "local_mesh", "local_shards",
    "lower", "make_layout", "make_plan", "measure_compute", "measure_links", "merged", "muon", "mxfp8", "newest",
    "nf4", "observe", "open_checkpoint", "optimizer_state", "partition", "pmax", "pmean", "predict", "psum",
    "redistribute", "reduce", "release", "replace_extras", "replace_grads", "replace_params", "save",
    "save_adapter", "save_dcp", "save_merged", "save_safetensors", "sgd", "shard", "simulate", "snapshot",
    "state_dict", "step", "stream", "stream_to", "symmetric", "tie", "timeline", "tune", "unfreeze", "units",
    "unshard", "workers", "zero1", "zero2", "zero3",
]  # fmt: skip
