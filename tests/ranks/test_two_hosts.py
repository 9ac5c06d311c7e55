"""Two ranks on each of two hosts, which share a network and a folder and nothing else (see `support.hosts`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from support.commands import EXAMPLES, ROOT, command
from support.hosts import Hosts, address, missing
from support.on_two_hosts import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.large, pytest.mark.usefixtures("possible")]
WAIT = 60  # seconds, for a busy machine


@pytest.fixture(scope="module")
def possible() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as made:
        yield made


def until(done: Any, processes: list[Popen[bytes]], logs: Path) -> None:
    """Wait until `done()`, or a process ends badly."""
    end = time.monotonic() + WAIT
    while not done():
        bad = any(process.poll() for process in processes)
        if bad or time.monotonic() > end:
            said = "\n".join(f"---- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(logs.glob("*.log")))
            pytest.fail(f"{'a process failed' if bad else 'timeout'}\n{said}")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def found(possible: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the four ranks have found, by rank. One set of processes for all tests, since theirs is most of the time."""
    folder = tmp_path_factory.mktemp("shared")
    common = {
        "MASTER_ADDR": address(0),
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "4",
        "FUNCTIONAL_FSDP_TIMEOUT": "120",
    }
    script = ROOT / "tests" / "support" / "on_two_hosts.py"
    with Hosts() as hosts:
        ranks = [
            hosts.start(r // 2, [script, folder], {**common, "RANK": str(r)}, folder / f"{r}.log") for r in range(4)
        ]
        until(lambda: all((folder / f"trains_{rank}").exists() for rank in range(4)), ranks, folder)
        hosts.cut()
        until(lambda: all((folder / f"found_{rank}").exists() for rank in range(4)), ranks, folder)
        for process in ranks:
            assert process.wait(120) == 0
    return [json.loads((folder / f"found_{rank}").read_text()) for rank in range(4)]


def test_ranks_of_two_hosts_see_their_neighbours_only_and_vote_by_gloo(found: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(found):
        assert said["who"] == {"sees": [rank ^ 1], "in_memory": False, "meet_by_gloo": True}


@pytest.mark.parametrize("preset", ["zero3", "hsdp"])
def test_training_goes_on_from_a_shared_folder_with_the_same_bits(found: list[dict[str, Any]], preset: str) -> None:
    for said in found:
        same, count, newest = said[preset]
        assert same
        assert count == 3
        assert Path(newest).name == "step_3"


def test_gradients_and_weights_go_over_the_network_and_shards_on_each_host_save_half_of_it(
    found: list[dict[str, Any]],
) -> None:
    for said in found:
        assert said["sent for zero3"] > 1.5 * said["sent for hsdp"] > 150_000


def test_a_step_that_one_rank_abandons_is_taken_again_on_both_hosts(found: list[dict[str, Any]]) -> None:
    assert [said["votes"]["heard"] for said in found] == ["RestartError"] * 3 + ["ValueError"]
    assert all(said["votes"]["same"] for said in found)


def test_copies_between_hosts_are_refused(found: list[dict[str, Any]]) -> None:
    assert all("copy_engine" in said["copies"] for said in found)


def test_a_host_that_is_cut_off_is_an_error_on_both_sides_within_the_timeout(found: list[dict[str, Any]]) -> None:
    for said in found:
        (kind, text, spent), (again, _, at_once) = said["cut off"]["said"]
        assert kind == again == "CommError", text
        assert "Restart the job from its last checkpoint" in text
        assert spent < PATIENCE + 30  # far above what a busy machine takes, far below torch's own timeouts
        assert at_once < PATIENCE


def test_the_main_job_on_two_hosts_has_the_bits_of_one(hosts: Hosts, tmp_path: Path) -> None:
    flags: list[str | Path] = [EXAMPLES / "train_gpt.py", "--tiny", "--steps", "4"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node"]
    across = [*torchrun, "2", "--nnodes", "2", "--master-addr", address(0), "--node-rank"]
    jobs = [
        hosts.start(i, [*across, str(i), *flags, "--out", tmp_path / "two"], {}, tmp_path / f"{i}.log")
        for i in range(2)
    ]
    until(lambda: all(job.poll() == 0 for job in jobs), jobs, tmp_path)
    alone = command(sys.executable, *flags, "--ranks", "4", "--out", tmp_path / "one")
    assert alone.returncode == 0, alone.stderr
    two, one = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("two", "one"))
    assert two["losses"] == one["losses"]
    assert two["weights"] == one["weights"]
