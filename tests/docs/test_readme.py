"""The README's Python runs as it stands, top to bottom, and does what it says."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_runs(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)  # where the compiler looks for what functions refer to
    space = script.__dict__
    losses = []
    torch.manual_seed(0)  # of its random batches, whatever ran in this process before
    for block in blocks:
        exec(compile(block, str(README), "exec"), space)
        if "loss" in space:
            losses.append(float(space["loss"]))
    printed = capsys.readouterr().out
    assert "zero3(data)" in printed
    assert "between steps" in printed
    assert "the step was dropped" in printed
    assert losses[-1] < losses[0] or math.isclose(losses[-1], losses[0], rel_tol=0.5)
    assert math.isfinite(space["mean"])
    assert int(space["state"].count) == 5
    assert torch.isfinite(space["loss"])
