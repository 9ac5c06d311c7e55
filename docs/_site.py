"""What MkDocs builds beside the pages of docs/: pictures that the library draws, and the files that pages link to.

    docs/concepts.md          ![...](pictures/arena.svg)    drawn by _pictures.py while the site is built
    docs/guide/optimizers.md  [Lion](../../examples/lion.py) becomes a page of its own, `source/examples/lion.py`

So every link works twice: in a checkout, and in the site. mkdocs.yml names this file as its hook.

The site works as a folder, opened by file://, search included: Material's plugin "offline" writes the index as a
script, and iframe-worker.js runs the search in a frame, since such a page may start no worker.
"""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCED = re.compile(r"^(```+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"  # whole files would come before the pages that speak of them
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
    """Links that lead out of docs/ lead to the pages made of those files. In a search the guide comes first."""
    if page.file.src_uri.startswith(("reference/", "source/")):
        page.meta.setdefault("search", {"boost": 0.5})
    return _relinked(markdown, f"docs/{page.file.src_uri}", posixpath.dirname(page.file.src_uri))


@event_priority(-200)  # after "offline"
def on_post_build(config: Any, **_: Any) -> None:
    """The site has to work where there is no network, and no server."""
    site = Path(config.site_dir)
    if not (site / "search" / "search_index.js").exists():
        raise PluginError("there is no search/search_index.js, which search in a folder reads: see mkdocs.yml, plugins")
    for page in site.rglob("*.html"):
        text = page.read_text()
        if found := OUTSIDE.search(text):
            raise PluginError(f"{page.relative_to(site)} loads something from elsewhere: {found[0]}")
        if "iframe-worker.js" not in text:
            raise PluginError(f"{page.relative_to(site)} does not load iframe-worker.js: see mkdocs.yml, polyfills")


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
    return f"{UNSEARCHED}# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
