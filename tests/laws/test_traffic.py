"""What travels: numbers of collectives and bytes on the wire in a step, for each placement, beside the arithmetic.

The transport's collectives are replaced by doubles that count, and then do the same. n: elements of all units, padded.
"""

from __future__ import annotations

import pytest
from support.presets import PRESETS
from support.ranks import launch
from support.tables import product
from support.traffic import BF16, F32, Traffic, counted

import functional_fsdp as fsdp

UNITS = 4
GATHERS = 2 * UNITS - 1  # forward and backward; the last unit stays gathered


def expected(preset: str, micro: int, last: bool, n: int, compute: int, wire: int, exact: bool) -> Traffic:
    """Of one microbatch, on 4 ranks (2 × 2 for hsdp and hfsdp)."""
    found: Traffic = {}
    unit = n // UNITS
    if preset in ("zero3", "hsdp", "hfsdp"):
        found["all_gather"] = (GATHERS, GATHERS * unit * compute)
    first = "all_to_all" if exact else "reduce_scatter"
    if preset in ("zero3", "zero2", "hsdp", "hfsdp") or (preset == "zero1" and last):
        found[first] = (UNITS, n * wire)
    later = 4 if exact else wire  # on further axes an exact sum carries float32
    if preset == "ddp" and last:
        found["all_to_all" if exact else "all_reduce"] = (UNITS, n * wire)
        if exact:
            found["all_gather"] = (UNITS, n * 4)
    if preset == "hsdp" and last:
        found["all_reduce"] = (UNITS, n // 2 * later)
    if preset == "hfsdp" and last:
        count, size = found.get("reduce_scatter", (0, 0))
        found["reduce_scatter"] = (count + UNITS, size + n // 2 * later)
    return found


PRECISIONS = {
    "float32": fsdp.Precision(),
    "bf16 compute": fsdp.Precision(compute=BF16, wire=F32),
    "exact": fsdp.Precision(wire=BF16, sum="fp32"),
}


@pytest.mark.parametrize(("preset", "name", "micro"), product(PRESETS, PRECISIONS, (1, 3)))
def test_collectives_bytes_and_memory_are_the_arithmetic(preset: str, name: str, micro: int) -> None:
    precision = PRECISIONS[name]
    main, compute, grads, wire, added, *_ = precision.resolve(F32)
    for seen, held, n in launch(counted, (preset, micro, precision), nprocs=4):
        *batches, step = seen
        for k, found in enumerate(batches):
            want = expected(preset, micro, k == micro - 1, n, compute.itemsize, wire.itemsize, added == "fp32")
            assert found == want
        refresh = preset in ("zero1", "zero2", "hfsdp")  # weights are less sharded than main weights
        cut = {"hfsdp": 2}.get(preset, 1)
        assert step == ({"all_gather": (UNITS, n // cut * compute.itemsize)} if refresh else {})
        shards = {"ddp": (1, 1, 1), "zero1": (1, 4, 4), "zero2": (1, 4, 4), "zero3": (4, 4, 4), "hsdp": (2, 2, 2),
                  "hfsdp": (2, 4, 4)}[preset]  # fmt: skip
        copies = refresh or (preset == "ddp" and compute is not main)
        assert held == {
            "main": n // shards[2] * main.itemsize,
            "opt": 2 * n // shards[2] * main.itemsize,
            "grads": n // shards[1] * grads.itemsize,
            "weights": n // shards[0] * compute.itemsize if copies else 0,
        }
