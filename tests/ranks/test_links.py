"""Links, measured where there are ranks: one for each axis, the same on all ranks."""

from __future__ import annotations

import functional_fsdp as fsdp


def measured() -> dict[str, fsdp.Link]:
    return fsdp.measure_links(fsdp.local_mesh(replica=2, shard=-1, alone=1))


def test_every_axis_of_more_than_one_rank_has_a_link_that_all_ranks_know() -> None:
    found = fsdp.launch(measured, nprocs=4, simulate=True)
    assert all(one == found[0] for one in found)
    assert [*found[0]] == ["replica", "shard"]
    assert all(link.latency > 0 and link.bandwidth > 0 for link in found[0].values())
