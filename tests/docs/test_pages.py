"""The Python of each page in docs/ runs as it stands, top to bottom."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    losses = []
    torch.manual_seed(0)
    for block in blocks:
        before = script.__dict__.get("state")
        exec(compile(block, str(page), "exec"), script.__dict__)
        if script.__dict__.get("state") is not before:
            losses.append(float(script.__dict__["loss"]))
    assert len(losses) >= 5
    assert all(math.isfinite(loss) and loss < 3.9 for loss in losses)  # they learn: it begins at log 50


def test_links_of_pages_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
