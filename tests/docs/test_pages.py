"""README and the pages of docs/: their Python runs as it stands, and their links lead somewhere.

The blocks of a page run in order, in one namespace, as one script in an empty folder. What is not to be run is no
block of Python: ```text, or ```sh for commands. An ```output block shows lines that the block before it prints.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import io
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.commands import TORCHAO

import functional_fsdp as fsdp
from functional_fsdp import extend, transforms

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "output", "text", "sh", "toml", "pycon"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(path: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return [(language.strip(), text) for _, _, language, text in FENCE.findall(path.read_text())]


def blocks(path: Path) -> list[str]:
    return [text for language, text in fences(path) if language == "python"]


def run(path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[dict[str, Any]]:
    """Run the blocks of a page in one namespace; what its names are after each. What a page shows as printed is."""
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)  # where the compiler looks for what functions refer to
    monkeypatch.chdir(folder)
    torch.manual_seed(0)  # of its random batches, whatever ran in this process before
    text, found, at, said = path.read_text(), [], 0, ""
    for language, block in fences(path):
        at = text.index(block, at)
        if language == "output":
            assert block in said, f"{name(path)}: expected to print\n{block}\nand printed\n{said}"
        if language != "python":
            continue
        lines = "\n" * text.count("\n", 0, at)  # an error names the line of the page
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(lines + block, str(path), "exec"), script.__dict__)
        found.append({**script.__dict__})
        said = re.sub(r" +$", "", out.getvalue(), flags=re.MULTILINE)
        print(said, end="")
    return found


OPTIMIZERS = ROOT / "docs" / "guide" / "optimizers.md"  # runs in a test of its own


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page != OPTIMIZERS], ids=name)
def test_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if page.stem == "float8":
        monkeypatch.syspath_prepend(str(TORCHAO))
    found = run(page, monkeypatch, tmp_path)
    assert found[-1]["fsdp"] is fsdp
    losses = [float(one["loss"]) for one in found if isinstance(one.get("loss"), torch.Tensor | float)]
    assert all(map(math.isfinite, losses))


def test_every_optimizer_of_the_guide_learns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(OPTIMIZERS, monkeypatch, tmp_path)
    losses = {id(one["state"]): float(one["loss"]) for one in found if "state" in one}
    assert len(losses) >= 5
    assert all(loss < 3.9 for loss in losses.values())  # it begins at log 50


def test_the_readme_runs(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    *_, space = run(ROOT / "README.md", monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert "zero3(data)" in printed
    assert "between steps" in printed
    assert "the step was dropped" in printed
    assert int(space["state"].count) == 4  # a step on bad data is none
    assert torch.isfinite(space["loss"])
    assert set(space["state"].units) == {"blocks.0", "blocks.1", "blocks.2", "head"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_blocks_say_what_they_are(path: Path) -> None:
    """Python that is not run has to be marked as something else, in the page itself."""
    assert {language for language, _ in fences(path)} <= LANGUAGES
    for block in blocks(path):
        ast.parse(block)


# ---------------------------------------------------------------- links


def prose(path: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]+`(?!\])", "", FENCE.sub("", path.read_text()))


def anchors(path: Path) -> set[str]:
    """What can follow the # in a link to a page: its headings, and the names of a page of the reference."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found.add(slug if slug not in found else f"{slug}_1")
    return found | set(documented(path))


def documented(path: Path) -> list[str]:
    return re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)


DEFINED = re.compile(r"^\[([^\]\n]+)\]: (\S+)$", re.MULTILINE)  # at the end of a page: [fsdp.save]: file#anchor


def links(path: Path) -> Iterator[tuple[str, str]]:
    """(file, anchor) of each link within the repository."""
    text = prose(path)
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *(target for _, target in DEFINED.findall(text))]:
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield file, anchor


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for file, anchor in links(path):
        target = (path.parent / file) if file else path
        if file.endswith(".svg"):
            assert target.parent.resolve() == ROOT / "docs" / "pictures", (
                f"{file}: pictures are drawn into docs/pictures"
            )
            assert target.stem in pictures().PICTURES, f"{file}: docs/_pictures.py draws no such picture"
            continue
        assert target.exists(), f"{file}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}: expected one of {sorted(anchors(target))}"
    text = FENCE.sub("", path.read_text())
    defined = [label for label, _ in DEFINED.findall(text)]
    assert sorted(defined) == sorted({*re.findall(r"`\]\[([^\]\n]+)\]", text)}), "labels are defined, once, and used"


GUIDE = [page for page in PAGES if page.parent.name == "guide"]


@pytest.mark.parametrize("page", GUIDE, ids=name)
def test_the_guide_links_to_the_reference_where_a_name_first_appears(page: Path) -> None:
    """As [`fsdp.save`][fsdp.save], which is readable as it stands, with [fsdp.save]: ... at the end of the page."""
    text = FENCE.sub("", page.read_text())
    defined = dict(DEFINED.findall(text))
    for label, target in defined.items():
        assert target.rpartition(".")[2] == label.rpartition(".")[2], f"{label} leads to {target}"
    plain = re.sub(r"^#+ .*$|\[[^\]]*\]\([^)]*\)", "", text, flags=re.MULTILINE)  # no headings, no other links
    said = {*re.findall(r"`((?:fsdp|T)\.[a-z]\w+)", plain)}
    public = {f"fsdp.{one}" for one in fsdp.__all__} | {f"T.{one}" for one in transforms.__all__}
    assert not (said & public) - {*defined}, "no link to the reference"


@cache
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_pictures", ROOT / "docs" / "_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_picture_is_on_a_page_and_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = {Path(file).stem for page in PAGES for file, _ in links(page) if file.endswith(".svg")}
    assert shown == {*pictures().PICTURES}
    for file, drawn in pictures().drawn().items():
        assert b"<svg" in drawn, file
        assert drawn.count(b"<path") > 10, f"{file} is empty"


# ---------------------------------------------------------------- the site


def test_every_page_is_in_the_nav_and_every_page_of_the_nav_is_there() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


def test_every_result_says_how_it_was_measured_and_is_on_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for file in sorted((ROOT / "docs" / "results").glob("*.json")):
        found = json.loads(file.read_text())
        assert {"question", "command", "machine", "versions", "date", "about", "rows"} <= {*found}, file.name
        assert found["rows"], file.name
        assert found["command"] or found["about"], file.name
        assert f"(results/{file.name})" in page, file.name


def test_the_surprises_name_tests_that_there_are() -> None:
    named = re.findall(r"`(tests/\S+\.py)`, `(test_\w+)`", (ROOT / "docs" / "surprises.md").read_text())
    assert len(named) > 10
    assert not [(file, name) for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]


def test_every_row_is_of_a_table() -> None:
    """A row behind an empty line begins another table, which has no head."""
    for page in DOCUMENTS:
        first = re.findall(r"(?<=\n\n)\|.*\n(.*)", FENCE.sub("", page.read_text()))
        assert not [line for line in first if not line.startswith("|-")], name(page)


def test_every_public_name_is_in_the_reference_once() -> None:
    modules = (fsdp, transforms, extend)
    public = [f"{module.__name__}.{one}" for module in modules for one in module.__all__]
    public.remove("functional_fsdp.extend")  # has a page of its own
    found = [key for page in PAGES for key in documented(page)]
    assert sorted(found) == sorted(public)
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    listed = re.findall(r"\]\(\w+\.md#(functional_fsdp[\w.]*)\)", index)
    assert sorted(listed) == sorted(public)


def test_the_map_names_every_folder_and_no_other() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().split("## The folders")[1].split("## ")[0]
    named = re.findall(r"^\| `(\w+)(?:\.py)?` \|", table, re.MULTILINE)
    package = Path(inspect.getfile(fsdp)).parent
    files = {file.stem for file in package.glob("*.py")} - {"__init__"}
    folders = {file.parent.name for file in package.glob("*/__init__.py")} | files | {"transforms"}
    assert sorted(named) == sorted(folders)
    layers = re.findall(
        r'^  "(\w+)",$', (ROOT / "pyproject.toml").read_text().split("layers = [")[1].split("]")[0], re.M
    )
    assert named == layers[::-1], "in the order in which folders may import each other"


def test_the_map_names_files_that_there_are() -> None:
    package = Path(inspect.getfile(fsdp)).parent
    named = re.findall(r"`(_\w+/\w+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 30
    assert not [file for file in named if not (package / file).exists()]


def test_the_glossary_has_the_words_of_the_library_and_no_others() -> None:
    terms = re.findall(r"^- \*\*([^*]+)\*\*:", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) <= 60, "a user reads it"
    words = [word for term in terms for word in term.split(", ")]
    assert len(words) == len({*words})
    files = [*Path(inspect.getfile(fsdp)).parent.rglob("*.py"), *(ROOT / "transforms").rglob("*.py"), *PAGES]
    said = "\n".join(file.read_text() for file in files if file.stem != "glossary").lower()
    assert not [word for word in words if word.lower() not in said]
    for word in re.findall(
        r"\w+",
        "unit bucket leaf axis lane arena staging wire sum cursor lineage plan "
        "placement main compute driven borrowed unplanned resident held live kept awaited issued",
    ):
        assert [term for term in terms if word in term], word  # fmt: skip


def test_the_glossary_has_what_tables_say() -> None:
    """Heads of printed tables, and what they say of units."""
    state = fsdp.shard({"a": {"w": torch.ones(4)}, "b": {"w": torch.ones(4)}}, fsdp.Spec(fsdp.local_mesh()))
    plan = fsdp.make_plan(fsdp.make_layout({"w": torch.ones(4)}, fsdp.Spec({"data": 2})))
    middle, _ = fsdp.unshard(state, "a")
    heads = [str(table).split("---")[0] for table in (plan, middle.cursor, state.layout)]
    heads += [str(state).splitlines()[1], *(middle.cursor.status(unit) for unit in state.units), plan.rule]
    glossary = (ROOT / "docs" / "glossary.md").read_text().lower()
    words = {word for head in heads for word in re.findall(r"[a-z]{3,}", head)} - {"now", "placed"}
    assert len(words) > 20
    assert not [word for word in words if word.removesuffix("s") not in glossary]


def test_docstrings_become_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    rewritten = importlib.import_module("_docstrings").rewritten
    given = """First.

    Args:
        a, b: numbers, of which one
        is small.

    Raises:
        SpecError: too many, as
        7: or so. TreeError, OSError: none.

    Returns:
        the sum: of both.

    Example, a short one:
        >>> f(1)
        2
    """
    assert rewritten(given).splitlines() == [
        "First.", "",
        "Args:", "    a, b: numbers, of which one", "        is small.", "",
        "Raises:", "    SpecError: too many, as 7: or so.", "    TreeError, OSError: none.", "",
        "**Returns:** the sum: of both.", "",
        "**Example, a short one:**", "", "```pycon", ">>> f(1)", "2", "```",
    ]  # fmt: skip
