"""What MkDocs builds beside the pages of docs/: pictures that the library draws, and the files that pages link to.

    docs/concepts.md          ![...](pictures/arena.svg)    drawn by _pictures.py while the site is built
    docs/guide/optimizers.md  [Lion](../../examples/lion.py) becomes a page of its own, `source/examples/lion.py`

So every link works twice: in a checkout, and in the site. mkdocs.yml names this file as its hook.
"""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCED = re.compile(r"^(```+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".txt": "text"}
OUTSIDE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures, and a page for each file outside of docs/ that a page links to, and that those link to."""
    pictures = importlib.util.spec_from_file_location("_pictures", DOCS / "_pictures.py")
    assert pictures
    assert pictures.loader
    pictures.loader.exec_module(_pictures := importlib.util.module_from_spec(pictures))
    for name, drawn in _pictures.drawn().items():
        files.append(File.generated(config, f"pictures/{name}", content=drawn))
    todo = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    done: set[str] = set()
    while todo:
        place = todo.pop()
        for target in _targets(place, _prose(ROOT / place)):
            page = _page_of(target)
            if target.startswith("docs/") or page in done or not (ROOT / target).exists():
                continue
            done.add(page)
            files.append(File.generated(config, page, content=_as_page(target)))
            todo += [target]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ lead to the pages made of those files."""
    return _relinked(markdown, f"docs/{page.file.src_uri}", posixpath.dirname(page.file.src_uri))


def on_post_build(config: Any, **_: Any) -> None:
    """The site has to work where there is no network."""
    for page in Path(config.site_dir).rglob("*.html"):
        if found := OUTSIDE.search(page.read_text()):
            raise PluginError(f"{page.relative_to(config.site_dir)} loads something from elsewhere: {found[0]}")


def _cells(path: Path) -> list[tuple[str, bool]]:
    """(text, whether it is code) of a notebook's cells."""
    return [("".join(cell["source"]), cell["cell_type"] == "code") for cell in json.loads(path.read_text())["cells"]]


def _prose(path: Path) -> str:
    """What of a file may have links."""
    if path.suffix == ".ipynb":
        return "\n\n".join(text for text, code in _cells(path) if not code)
    return path.read_text() if path.suffix == ".md" and path.is_file() else ""


def _targets(place: str, text: str) -> list[str]:
    """Files of the repository to which the text of a page at `place` links, as paths from the root."""
    links = [found[2] for found in LINK.finditer(FENCED.sub("", text)) if "://" not in found[2]]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(place), link)) for link in links]


def _page_of(target: str) -> str:
    """Where the page made of a file outside of docs/ lies, from docs/."""
    return f"source/{target.removesuffix('.md')}.md"


def _relinked(text: str, place: str, start: str) -> str:
    """Links as from the folder `start` of docs/, of a text that was written for `place`."""

    def link(found: re.Match[str]) -> str:
        (target,) = _targets(place, found[0]) or ("",)
        if not target or (place.startswith("docs/") and target.startswith("docs/")) or not (ROOT / target).exists():
            return found[0]
        page = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
        return f"{found[1]}{posixpath.relpath(page, start or '.')}{found[3] or ''}{found[4]}"

    parts, at = [], 0
    for block in FENCED.finditer(text):
        parts += [LINK.sub(link, text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, LINK.sub(link, text[at:])])


def _as_page(target: str) -> str:
    """A file of the repository as Markdown."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if one.name[0] not in "._" or one.name.endswith(".py"))
        return f"# {target}/\n\nThe folder has:\n\n" + "".join(f"- `{name}`\n" for name in names)
    if target.endswith(".md"):
        return _relinked(path.read_text(), target, posixpath.dirname(_page_of(target)))
    if target.endswith(".ipynb"):
        text = "\n\n".join(f"```python\n{text}\n```" if code else text for text, code in _cells(path))
        return _relinked(text, target, posixpath.dirname(_page_of(target)))
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
