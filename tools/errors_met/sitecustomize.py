"""Where errors of the package are made, in every process that has this folder on its path: lines of $ERRORS_MET."""

import builtins
import os
import sys
from typing import Any

build = builtins.__build_class__
seen: set[tuple[str, int]] = set()


def noted(self: Exception, *args: Any) -> None:
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name in ("_raise", "refuse"):
        frame = frame.f_back
    where = frame.f_code.co_filename, frame.f_lineno
    if where not in seen:
        seen.add(where)
        with open(os.environ["ERRORS_MET"], "a") as out:
            out.write(f"{where[0]}:{where[1]}\n")


def build_class(function: Any, name: str, *bases: Any, **options: Any) -> Any:
    made = build(function, name, *bases, **options)
    if name == "FsdpError" and made.__module__ == "functional_fsdp._common.errors":
        made.__init__ = noted
        builtins.__build_class__ = build
    return made


if "ERRORS_MET" in os.environ:
    builtins.__build_class__ = build_class
