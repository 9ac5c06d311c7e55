"""The GPUs that tests here run on. Where there is one, up to four ranks share it: NCCL takes them for ranks of several
hosts, which it joins by sockets, and copies between "GPUs" stay on the one. That shows what is computed, and in which
order; not how fast, nor what needs NVLink."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from functional_fsdp._launch.launch import SHARED_GPUS

GPUS = torch.cuda.device_count()
SHARED = GPUS == 1 or SHARED_GPUS in os.environ  # which whoever needs four ranks on two GPUs may set
MOST = 4 if SHARED else GPUS
RANKS = 2 if SHARED else GPUS  # as many as there are, and two at least

if SHARED:  # workers have it from here
    os.environ.update({SHARED_GPUS: "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"})

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # with ":4096:8" cuBLAS repeats its bits: it reads it when it is first used
own_gpus = pytest.mark.skipif(SHARED, reason="needs a GPU for each rank; this machine has one")


def check_gpus(ranks: int) -> None:
    """Fail where there are none."""
    assert ranks <= MOST, f"these tests need {ranks} GPUs, or one that ranks share; this machine has {GPUS}"


def need_ranks(ranks: int) -> None:
    """Skip what takes more ranks than this machine has room for."""
    if ranks > MOST:
        pytest.skip(f"needs {ranks} GPUs")


@contextmanager
def deterministic() -> Iterator[None]:
    """The same bits in each run, also of matrix products if `CUBLAS` was set before the workers began. What
    `torch.empty` gives is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """RuntimeError where torch would let the host wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: this mode is a prototype, which may miss some
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
