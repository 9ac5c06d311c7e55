"""Docstrings of the package, as the reference needs them: mkdocs.yml names this extension of griffe.

Raises:                                        Raises:
    SpecError: a pattern matches nothing,          SpecError: a pattern matches nothing,
    or two do. TreeError: a leaf is missing.           or two do.
                                                   TreeError: a leaf is missing.
Returns:                                       **Returns:** the `Plan`: ...
    the `Plan`: ...
Example: `f(x)`.                               **Example:** `f(x)`.
"""

from __future__ import annotations

import re
from inspect import cleandoc
from typing import Any

import griffe

SECTION = re.compile(
    r"^((?:Args|Attributes|Raises|Returns|Example)\b[^\n]*?):[ ]*(.*\n(?:(?:[ ]{4}.*)?\n)*)", re.MULTILINE
)
ITEM = re.compile(r"[*`\w]+(?:, [*`\w]+)*(?: \([^)]*\))?: ")
NAMES = r"(?:\w+Error|Vetoed)"
ERROR = re.compile(rf"(?:^|(?<=[.,;:)]) )(?:\(\w[^)]*\) )?({NAMES}(?:, {NAMES})*): ")
SESSION = re.compile(r"(?:^|(?<=\n\n))((?:>>> .*\n(?:(?!\n).*\n)*)+)", re.MULTILINE)


def rewritten(text: str) -> str:
    """The docstring with one item a line in its sections, whose further lines are indented, and sessions fenced."""
    text = SECTION.sub(_section, cleandoc(text) + "\n")
    return SESSION.sub(r"```pycon\n\1```\n", text).rstrip()


def _section(found: re.Match[str]) -> str:
    name, body = found[1].split()[0].rstrip(","), cleandoc(f"\n{found[2]}")
    if name in ("Returns", "Example"):
        return f"**{found[1]}:**{chr(10) * 2 if body.startswith('>>>') else ' '}{body}\n\n"
    if name == "Raises":
        body = ERROR.sub(r"\n\1: ", " ".join(body.split())).strip()
    lines = [line if not line or ITEM.match(line) else f"    {line}" for line in body.split("\n")]
    return f"{name}:\n{_indented(chr(10).join(lines))}\n\n"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n"))


class Sections(griffe.Extension):
    """Rewrites each docstring before it is parsed; takes functions for what they are where a file has their name."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """`transforms.vjp` is the function of `transforms/vjp.py`, as it is when it is imported."""
        transforms = pkg["transforms"]
        for name, file in [*transforms.modules.items()]:
            if name in file.members and name in transforms.exports:
                transforms.members[name] = griffe.Alias(name, file[name], parent=transforms)
