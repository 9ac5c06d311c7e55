"""The demonstration of optimizers as a user runs it: sharded losses are those of plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from support.commands import run_as

STEPS = 8


@run_as
def test_sharded_and_unsharded_losses_agree_and_are_drawn(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("optimizers.py", "--steps", STEPS, "--ranks", 1, 2, "--out", tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())["losses"]
    assert [*found] == ["unsharded", "1 rank", "2 ranks"]
    assert [*found["unsharded"]] == ["AdamW", "RAdam", "Muon"]
    for by_name in found.values():
        for name, losses in by_name.items():
            assert losses == pytest.approx(found["unsharded"][name], abs=1e-4)
            assert len(losses) == STEPS
            assert losses[-1] < losses[0] - 0.01
    ends = [losses[-1] for losses in found["2 ranks"].values()]
    assert min(abs(a - b) for a, b in pairwise(ends)) > 0.1  # three optimizers, not one
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "from the unsharded losses at most" in printed
