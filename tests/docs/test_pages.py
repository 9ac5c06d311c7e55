"""The Python of each page in docs/ runs as it stands, top to bottom."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.commands import EXAMPLES, ROOT, TORCHAO

PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN = {page.relative_to(ROOT / "docs").as_posix(): page for page in PAGES if "```python\n" in page.read_text()}
#: pages of the site that are written apart from these
APART = re.compile(r"(concepts|architecture|glossary|benchmarks|index)\.md$|reference/|^docs/optimizers\.md$")


def run(page: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What there is after each block. Blocks of a page run in one namespace, in the folder of the examples."""
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)  # where the compiler looks for what functions refer to
    monkeypatch.chdir(EXAMPLES)
    torch.manual_seed(0)
    found, text = [], page.read_text()
    for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        lines = "\n" * text.count("\n", 0, block.start(1))  # an error names the line of the page
        exec(compile(lines + block[1], str(page), "exec"), script.__dict__)
        found.append({**script.__dict__})
    return found


@pytest.mark.parametrize("name", RUN)
def test_a_page_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "guide/float8.md":
        monkeypatch.syspath_prepend(str(TORCHAO))
    found = run(RUN[name], monkeypatch)
    assert found
    losses = [float(one["loss"]) for one in found if isinstance(one.get("loss"), torch.Tensor | float)]
    assert all(map(math.isfinite, losses))


def test_every_optimizer_of_the_page_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = run(RUN["guide/optimizers.md"], monkeypatch)
    pairs = [(one["state"], one["loss"]) for one in spaces if "state" in one]
    losses = {id(state): loss for state, loss in pairs}
    assert len(losses) >= 5
    assert all(loss < 3.9 for loss in losses.values())  # it begins at log 50


def test_links_of_pages_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not link.startswith("http") and not APART.search(link):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
