"""Links, measured where there are ranks: one for each axis, the same on all ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import functional_fsdp as fsdp
from functional_fsdp._predict import prediction as links


def measured() -> dict[str, fsdp.Link]:
    return fsdp.measure_links(fsdp.local_mesh(replica=2, shard=-1, alone=1))


def test_every_axis_of_more_than_one_rank_has_a_link_that_all_ranks_know() -> None:
    found = fsdp.launch(measured, nprocs=4, simulate=True)
    assert all(one == found[0] for one in found)
    assert [*found[0]] == ["replica", "shard"]
    assert all(link.latency > 0 and link.bandwidth > 0 for link in found[0].values())


@pytest.mark.parametrize("bandwidth", [1e9, 4e11])
def test_noise_of_the_host_is_no_part_of_the_bandwidth(bandwidth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = itertools.cycle((1.0, 0.8, 1.1))

    def seconds(run: Any, axis: str, ranks: int, size: int) -> float:
        return 2e-4 * next(noise) + 2 * size * (ranks - 1) / bandwidth

    monkeypatch.setattr(links, "_seconds", seconds)
    found = fsdp.launch(lambda: fsdp.measure_links(fsdp.local_mesh())["data"], nprocs=2, simulate=True)[0]
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.15)
    assert found.latency == pytest.approx(2e-4, rel=0.25)
