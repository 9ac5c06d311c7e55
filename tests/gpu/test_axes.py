"""Leaves along "tp" on GPUs: a cut Llama beside FSDP2 with parallelize_module, by every way of running a step.

`pytest -s tests/gpu/test_axes.py` on 2 or 4 GPUs: data 1 × tp 2, or data 2 × tp 2. The last two print a table: seconds
of a step and bytes at most, at 1.2 B parameters in bfloat16.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import _axes_llama as cut
import pytest
import torch
from gpu.machine import GPUS, own_gpus
from support import tensor_parallel as gpt

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_workers")]
RANKS = 4 if GPUS >= 4 else 2
AXES = {"data": RANKS // 2, "tp": 2}
SMALL = cut.Config(width=128, heads=8, hidden=256, depth=3, vocab=256, length=64)
LARGE = cut.Config(width=2048, heads=16, hidden=5632, depth=22, vocab=32000, length=2048, rows=2)  # 1.26 B
WAYS: dict[str, dict[str, Any]] = {
    "DTensors": {"dtensors": True}, "DTensors, graph": {"dtensors": True, "graph": True},
    "DTensors, debug": {"dtensors": True, "debug": True}, "collective": {}, "debug": {"debug": True},
    "graph": {"graph": True}, "units": {"compiled": "units"}, "units, graph": {"compiled": "units", "graph": True},
    "compiled": {"compiled": "step"}, "copy engine": {"transport": "copy_engine"},
    "symmetric": {"transport": "symmetric"},
}  # fmt: skip


def losses(how: dict[str, Any] | None) -> list[float]:
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    found = cut.theirs(SMALL, AXES, 6) if how is None else cut.ours(SMALL, AXES, 6, **how)
    return found.losses


@pytest.fixture(scope="module")
def right() -> list[float]:
    return launch(losses, (None,), nprocs=RANKS, timeout=60)[0]


@pytest.mark.parametrize("way", [pytest.param(w, marks=own_gpus) if w == "symmetric" else w for w in WAYS])
def test_losses_are_those_of_fsdp2_with_parallelize_module(way: str, right: list[float]) -> None:
    if way == "symmetric":  # a process has torch's symmetric memory by one backend only
        stop_workers()
    for found in launch(losses, (WAYS[way],), nprocs=RANKS, timeout=60):
        assert found == pytest.approx(right, abs=2e-4)


def in_float64(sequence: bool) -> tuple[list[float], list[float], list[float], list[float]]:
    """Losses and norms of the cut GPT of `support.tensor_parallel`, and the plain one's."""
    mesh = fsdp.local_mesh(**AXES)
    spec = fsdp.Spec(mesh, own=gpt.own(sequence), schedule=fsdp.Schedule(debug=True))
    with torch.device(mesh.device_type):
        params, model = fsdp.functionalize(gpt.cut(mesh["tp"], sequence).to(mesh.device_type), spec)
    torch.manual_seed(0)
    whole = gpt.plain()
    params = {name: p.detach().to(mesh.device_type) for name, p in whole.named_parameters()}
    state = fsdp.shard(params, spec, fsdp.adamw(lr=0.01, weight_decay=0.01))
    forward_backward = T.forward_backward(model, gpt.loss_fn)
    seen, norms = [], []
    for step in range(4):
        data = [t.to(state.count.device) for t in gpt.batch(step, mesh.get_local_rank("data"))]
        state, loss = forward_backward(state, data)
        state, norm = T.clip_by_global_norm(state, 1.0)
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        seen.append(loss.item())
        norms.append(norm.item())
    return seen, norms, *gpt.whole_losses(4, AXES["data"], 1.0)[:2]


@pytest.mark.parametrize("sequence", [False, True])
def test_float64_is_the_plain_model(sequence: bool) -> None:
    for seen, lengths, right, norms in launch(in_float64, (sequence,), nprocs=RANKS, timeout=60):
        assert seen == pytest.approx(right, abs=1e-9)
        assert lengths == pytest.approx(norms, abs=1e-9)


def large(which: str, how: dict[str, Any]) -> cut.Found:
    warnings.simplefilter("ignore")
    gc.collect()  # FSDP2's modules go round in circles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    make = cut.theirs if which == "theirs" else cut.ours
    return make(LARGE, AXES, 9, torch.bfloat16, **how)


@own_gpus
def test_beside_fsdp2_at_1_2_b() -> None:
    """The same losses, and no more memory. What a step takes is printed."""
    stop_workers()  # see above: theirs may have torch's symmetric memory by another backend
    rows = {"FSDP2 + parallelize_module": launch(large, ("theirs", {}), nprocs=RANKS, timeout=100)}
    for name in ("DTensors", "collective", "copy engine", "graph"):
        rows[name] = launch(large, ("ours", WAYS[name]), nprocs=RANKS, timeout=100)
    first = rows["FSDP2 + parallelize_module"]
    slowest = max(one.seconds for one in first)
    print(f"\n{RANKS} GPUs, {AXES}, bfloat16:")
    for name, found in rows.items():
        seconds, peak = max(one.seconds for one in found), max(one.peak for one in found)
        print(f"{name:28} {seconds * 1e3:8.1f} ms  {slowest / seconds:5.2f} x  {peak / 2**30:6.2f} GiB")
        assert found[0].losses == pytest.approx(first[0].losses, rel=2e-2)
    assert max(one.peak for one in rows["collective"]) <= max(one.peak for one in first)
