"""The notebooks of examples/, which are stored without outputs: on 2 ranks, beside plain torch.func.

`make test-all` runs them as they are stored, in a kernel. `make test` runs the cells of some in this process, with
fewer steps or ranks where these take time: a kernel would import everything again.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHORTER = {
    "simulate": {"train, state, model, 50)": "train, state, model, 25)"},
    "derivatives": {
        "RANKS = 4": "RANKS = 2",
        "((False, (0.1, 0.3, 1.0)), (True, (0.3, 1.0)))": "((False, (0.3,)), (True, (0.3,)))",  # the best of each
    },
}
as_stored = pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.large)])
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of nbclient's event loop
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def read(path: Path) -> Any:
    return pytest.importorskip("nbformat").read(path, 4)


def execute(name: str, patch: pytest.MonkeyPatch, printed: Any = None) -> tuple[str, int]:
    """What a notebook printed, and how many pictures it drew: in a kernel, or here, where `printed` has the output."""
    book = read(ROOT / "examples" / f"{name}.ipynb")
    if printed is None:
        for key, value in {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
            patch.setitem(os.environ, key, value)
        where = {"metadata": {"path": str(ROOT / "examples")}}
        client = pytest.importorskip("nbclient").NotebookClient
        client(book, timeout=250, kernel_name="python3", resources=where).execute()
        outputs: list[Any] = [output for cell in book.cells for output in cell.get("outputs", ())]
        said = dict.fromkeys(("stdout", "stderr"), "")
        for output in outputs:
            if output.output_type == "stream":
                said[output.name] += output.text
        assert not said["stderr"]
        return said["stdout"], sum("image/png" in output.get("data", {}) for output in outputs)
    script, pictures, found = ModuleType("__main__"), 0, set[str]()
    patch.setitem(sys.modules, "__main__", script)
    patch.chdir(ROOT / "examples")
    for cell in book.cells:
        if cell.cell_type == "code":
            source = cell.source
            for text, shorter in SHORTER.get(name, {}).items():
                if text in source:
                    source = source.replace(text, shorter)
                    found.add(text)
            code = ast.parse(source)
            if isinstance(last := code.body[-1], ast.Expr):  # what a notebook shows below the cell
                code.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
            exec(compile(ast.fix_missing_locations(code), f"{name}.ipynb", "exec"), script.__dict__)
            pictures += type(script.__dict__.pop("_", None)).__name__ == "Image"
    assert found == {*SHORTER.get(name, {})}, "what was to be shorter is not in the notebook"
    text, wrong = printed.readouterr()
    assert not wrong
    return text, pictures


def number(pattern: str, text: str) -> float:
    """The number in the group of what is found."""
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in\n{text}"
    return float(found[1])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    book = read(path)
    pytest.importorskip("nbformat").validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert cells
    assert book.cells[0].source.startswith("# ")
    assert not [cell.source for cell in cells if cell.outputs or cell.execution_count is not None]
    assert len({cell.id for cell in book.cells}) == len(book.cells)


@as_stored
def test_first_steps(stored: bool, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    text, pictures = execute("first_steps", monkeypatch, None if stored else capfd)
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
    assert number(r"largest difference after the checkpoint: (\S+)", text) < 1e-5
    assert pictures == 1


@pytest.mark.large
def test_per_sample_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    text, pictures = execute("per_sample_gradients", monkeypatch)
    agree = r"rank \d: the norms of 150 samples agree with torch.func to \de-0[6-9], relative"
    assert len(re.findall(agree, text)) == 2
    assert number(r"(\d+) of the 30 largest norms are wrong labels, of which there are 30", text) > 20
    assert re.search(r"\d+ of 300 samples are clipped; the mean agrees with torch.func to \de-0[6-9]", text)
    assert pictures == 2


@pytest.mark.large
def test_hessian_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    text, pictures = execute("hessian_vector", monkeypatch)
    agree = r"rank \d: H·v agrees with torch.func to \de-0[5-9]; by hand and T.hvp the same bits: True"
    assert len(re.findall(agree, text)) == 2
    found = re.findall(r"lr ([\d.]+): ([\d.]+) by power iteration .*; of the whole Hessian ([\d.]+)", text)
    assert len(found) == 2
    for lr, power, whole in found:
        assert float(power) == pytest.approx(float(whole), rel=0.02)
        assert float(whole) == pytest.approx(2 / float(lr), rel=0.1)  # the edge of stability
    assert pictures == 1


@pytest.mark.large
def test_gradient_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    text, pictures = execute("gradient_penalty", monkeypatch)
    agree = r"rank \d: loss [\d.]+, and the gradient agrees with the plain module's to \de-0[6-9]"
    assert len(re.findall(agree, text)) == 2
    assert "without second_order: a gradient of a gradient was asked for" in text
    assert pictures == 2


@as_stored
def test_simulate(stored: bool, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    text, pictures = execute("simulate", monkeypatch, None if stored else capfd)
    (found,) = re.findall(r"loss of each rank: \[(.*)\]", text)
    losses = found.split(", ")
    assert len(losses) == 8
    assert len({*losses}) == 1
    assert float(losses[0]) < 12
    assert re.search(r"^replica +outer +\S+ +all_reduce +8 +[\d,]+$", text, re.MULTILINE)
    assert "no rank can go on:\n  rank 0 waits for " in text
    assert "rank 6 has ended" in text
    assert "[rank 2] {'0.weight': (64, 16)" in text
    assert "ValueError('a bad batch')" in text
    assert pictures == 0


@pytest.mark.large  # `test_derivative_examples` has what it computes
@as_stored
def test_derivatives(stored: bool, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    ranks = 4 if stored else 2
    text, pictures = execute("derivatives", monkeypatch, None if stored else capfd)
    assert number(r"three steps agree with the plain module to (\S+)", text) < 1e-9
    wrong = rf"(\d+) of the {8 * ranks} samples with the worst influence .* wrong labels, of {40 * ranks}"
    assert number(wrong, text) > 6 * ranks
    plain, natural = map(float, re.findall(r"(?:plain|natural) gradient, 10 steps: loss ([\d.]+)", text))
    assert natural < plain / 5
    assert pictures == 0
