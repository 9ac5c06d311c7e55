"""The notebooks of examples/, which are stored without outputs: on 2 ranks, beside plain torch.func.

`make test-all` runs them as they are stored, `make test` with fewer steps, or ranks, where these take time.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHORTER = {
    "per_sample_gradients": ("steps=80", "steps=10"),
    "hessian_vector": ("steps=300", "steps=20"),
    "gradient_penalty": ("steps=150", "steps=15"),
    "simulate": ("train, state, model, 50)", "train, state, model, 25)"),
    "derivatives": ("RANKS = 4", "RANKS = 2"),
}
#: `make test` runs these, in one kernel: starting one takes long
QUICK = ("first_steps", "simulate", "derivatives")
as_stored = pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.large)])


@cache
def executed(names: tuple[str, ...], stored: bool) -> dict[str, tuple[str, int]]:
    """What notebooks printed, and how many pictures they drew. One kernel runs them; each finds no names of others."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    books = {name: nbformat.read(ROOT / "examples" / f"{name}.ipynb", 4) for name in names}
    whole = nbformat.v4.new_notebook()
    for name, book in books.items():
        if not stored and name in SHORTER:
            (cell,) = (cell for cell in book.cells if SHORTER[name][0] in cell.source)
            cell.source = cell.source.replace(*SHORTER[name])
        whole.cells += [*book.cells, nbformat.v4.new_code_cell("%reset -f")]
    where = {"metadata": {"path": str(ROOT / "examples")}}
    with patch.dict(os.environ, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}):
        nbclient.NotebookClient(whole, timeout=250, kernel_name="python3", resources=where).execute()
    found = {}
    for name, book in books.items():
        outputs: list[Any] = [output for cell in book.cells for output in cell.get("outputs", ())]
        assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
        text = "".join(output.text for output in outputs if output.output_type == "stream")
        found[name] = text, sum("image/png" in output.get("data", {}) for output in outputs)
    return found


def execute(name: str, stored: bool) -> tuple[str, int]:
    """What a notebook printed, and how many pictures it drew."""
    return executed((name,) if stored or name not in QUICK else QUICK, stored)[name]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert cells
    assert book.cells[0].source.startswith("# ")
    assert not [cell.source for cell in cells if cell.outputs or cell.execution_count is not None]
    assert len({cell.id for cell in book.cells}) == len(book.cells)


pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of nbclient's event loop
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_first_steps() -> None:
    text, pictures = execute("first_steps", stored=False)
    losses = re.findall(r"^(?:plain|sharded|two ranks): +\[(.*)\]$", text, re.MULTILINE)
    plain, sharded, by_two = ([float(loss.strip("'")) for loss in found.split(", ")] for found in losses)
    assert sharded == pytest.approx(plain, abs=2e-4)
    assert by_two == pytest.approx(plain, abs=2e-4)
    assert plain[-1] < plain[0] / 2
    assert "rank 0: ['a step', 'a step', 'RestartError', 'a step']" in text
    assert "rank 1: ['a step', 'a step', 'my own error: " in text
    assert "steps taken: [13, 13]" in text
    assert "rank 1 of 2 failed: ValueError: something else" in text
    assert "steps taken: [15, 15]" in text
    assert "read at step 5" in text
    found = re.search(r"largest difference after the checkpoint: (\S+)", text)
    assert found is not None
    assert float(found[1]) < 1e-5
    assert pictures == 1


@pytest.mark.large
@as_stored
def test_per_sample_gradients(stored: bool) -> None:
    text, pictures = execute("per_sample_gradients", stored)
    assert (
        len(re.findall(r"rank \d: the norms of 150 samples agree with torch.func to \de-0[6-9], relative", text)) == 2
    )
    found = re.search(r"(\d+) of the 30 largest norms are wrong labels, of which there are 30", text)
    assert found is not None
    assert int(found[1]) > 20
    assert re.search(r"\d+ of 300 samples are clipped; the mean agrees with torch.func to \de-0[6-9]", text)
    assert pictures == 2


@pytest.mark.large
@as_stored
def test_hessian_vector(stored: bool) -> None:
    text, pictures = execute("hessian_vector", stored)
    agree = r"rank \d: H·v agrees with torch.func to \de-0[5-9]; by hand and T.hvp the same bits: True"
    assert len(re.findall(agree, text)) == 2
    found = re.findall(r"lr ([\d.]+): ([\d.]+) by power iteration .*; of the whole Hessian ([\d.]+)", text)
    assert len(found) == 2
    for lr, power, whole in found if stored else ():
        assert float(power) == pytest.approx(float(whole), rel=0.02)
        assert float(whole) == pytest.approx(2 / float(lr), rel=0.1)  # the edge of stability
    assert pictures == 1


@pytest.mark.large
@as_stored
def test_gradient_penalty(stored: bool) -> None:
    text, pictures = execute("gradient_penalty", stored)
    agree = r"rank \d: loss [\d.]+, and the gradient agrees with the plain module's to \de-0[6-9]"
    assert len(re.findall(agree, text)) == 2
    assert "without second_order: a gradient of a gradient was asked for" in text
    assert pictures == 2


@as_stored
def test_simulate(stored: bool) -> None:
    text, pictures = execute("simulate", stored)
    found = re.search(r"loss of each rank: \[(.*)\]", text)
    assert found is not None
    losses = found[1].split(", ")
    assert len(losses) == 8
    assert len({*losses}) == 1
    assert float(losses[0]) < 12
    assert re.search(r"^replica +outer +\S+ +all_reduce +8 +[\d,]+$", text, re.MULTILINE)
    assert "no rank can go on:\n  rank 0 waits for " in text
    assert "rank 6 has ended" in text
    assert "[rank 2] {'0.weight': (64, 16)" in text
    assert "ValueError('a bad batch')" in text
    assert pictures == 0


@as_stored
def test_derivatives(stored: bool) -> None:
    ranks = 4 if stored else 2
    text, pictures = execute("derivatives", stored)
    found = re.search(r"three steps agree with the plain module to (\S+)", text)
    assert found is not None
    assert float(found[1]) < 1e-9
    found = re.search(
        rf"(\d+) of the {8 * ranks} samples with the worst influence .* wrong labels, of {40 * ranks}", text
    )
    assert found is not None
    assert int(found[1]) > 6 * ranks
    losses = [float(loss) for loss in re.findall(r"(?:plain|natural) gradient, 10 steps: loss ([\d.]+)", text)]
    assert len(losses) == 2
    assert losses[1] < losses[0] / 5
    assert pictures == 0
