"""`launch` and `local_mesh` on GPUs: NCCL, results on the CPU, and callers that have touched CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu.machine import SHARED

from functional_fsdp import launch, local_mesh
from functional_fsdp._launch.launch import SHARED_GPUS, stop_workers

ROOT = Path(__file__).parents[2]


def script(text: str, **environment: str) -> str:
    """Standard output and error of a script in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run(
        [sys.executable, "-"], input=textwrap.dedent(text), env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def work() -> tuple[Any, ...]:
    mesh = local_mesh(replica=2, shard=-1)
    on_gpu, on_cpu = torch.ones(2, device="cuda"), torch.ones(2)
    dist.all_reduce(on_gpu, group=mesh["replica"].get_group())
    dist.all_reduce(on_cpu)
    return mesh.device_type, torch.cuda.current_device(), on_gpu, on_cpu


def test_one_rank_on_each_gpu_and_results_on_the_cpu() -> None:
    for _ in range(2):
        for rank, (kind, gpu, on_gpu, on_cpu) in enumerate(launch(work, nprocs=2)):
            assert (kind, gpu) == ("cuda", 0 if SHARED else rank)
            assert on_gpu.device.type == on_cpu.device.type == "cpu"
            assert on_gpu.tolist() == on_cpu.tolist() == [2, 2]
    assert not torch.cuda.is_initialized()


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_workers()
    monkeypatch.delenv(SHARED_GPUS, raising=False)
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(RuntimeError, match=rf"has {ranks - 1} GPU\(s\), none for local rank {ranks - 1}"):
        launch(local_mesh, nprocs=ranks)
    assert launch(lambda: local_mesh("cpu").device_type, nprocs=ranks) == ["cpu"] * ranks


TOUCHING = {
    "a tensor": "torch.ones(1, device='cuda')",
    "is_available": "torch.cuda.is_available()",
    "a backward pass on the CPU": "x = torch.ones(1, requires_grad=True); torch.autograd.grad(x.sum(), x)",
}


@pytest.mark.parametrize("line", TOUCHING.values(), ids=TOUCHING)
def test_a_caller_that_has_touched_cuda(line: str) -> None:
    printed = script(f"""
        import torch
        from functional_fsdp import launch, local_mesh
        {line}
        print(launch(lambda: torch.ones(1, device=local_mesh(data=1).device_type).item(), nprocs=1))
    """)
    assert printed.split() == ["[1.0]"]


def test_a_caller_that_has_looked_for_cuda_without_touching_it() -> None:
    text = """
        import torch
        from functional_fsdp import launch, local_mesh
        assert torch.cuda.is_available()
        assert launch(lambda: local_mesh(DEVICE).device_type, nprocs=2) == [DEVICE or "cuda"] * 2
    """
    script(text.replace("DEVICE", "None"), PYTORCH_NVML_BASED_CUDA_CHECK="1")
    script(text.replace("DEVICE", "'cpu'"))


def test_a_world_of_one() -> None:
    printed = script("""
        import torch, torch.distributed as dist
        from functional_fsdp import local_mesh
        mesh = local_mesh()
        dist.all_reduce(torch.ones(1, device="cuda"))
        dist.barrier()
        print(mesh.device_type, mesh.size())
    """)
    assert printed.startswith("cuda 1")
