"""Reloads: modules that the caller has loaded anew are loaded anew in its workers.

Functions and classes of a module travel by name, and each worker imports the module once. Whoever edits the module and
reloads it (`importlib.reload`, `%autoreload`) has other code under the same name than workers that imported it before:
the caller counts its reloads, and a worker that is behind reloads, in the same way.

A module that is not reloaded stays as it was imported, in the caller and in the workers, whatever becomes of its file.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from typing import Any

__all__ = ["Reloads", "Versions"]

AUTORELOAD = "IPython.extensions.autoreload"
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Versions:
    """The caller's side: how often it has loaded each module of the user's own anew."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, int]] = {}  # by module: its spec and its file's time when it was loaded last
        self.files: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.modules = 0

    def look(self) -> tuple[dict[str, int], bool]:
        """By module: how often it was loaded anew; and whether by %autoreload, which changes old objects in place."""
        automatic = AUTORELOAD in sys.modules
        if self.modules != len(sys.modules):
            self.modules = len(sys.modules)
            for name, module in list(sys.modules.items()):
                if name not in self.seen and (file := _own_file(name, module)):
                    self.files[name] = file
                    self.seen[name] = module.__spec__, _time(file)
        for name, (spec, time) in self.seen.items():
            now = getattr(sys.modules.get(name), "__spec__", spec)
            if now is spec and not automatic:
                continue
            written = _time(self.files[name])
            self.seen[name] = now, written
            if written != time:
                self.versions[name] = self.versions.get(name, 0) + 1
        return dict(self.versions), automatic


def _own_file(name: str, module: Any) -> str:
    """The source file of a module of the user's own; "" for those that are installed."""
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None) or ""
    own = isinstance(file, str) and file.endswith(".py") and name.partition(".")[0] != __name__.partition(".")[0]
    return file if own and not file.startswith(INSTALLED) and "site-packages" not in file else ""


def _time(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


class Reloads:
    """A worker's side."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.old_objects: dict[Any, Any] = {}

    def follow(self, versions: dict[str, int], automatic: bool) -> None:
        """Load anew what the caller has loaded anew since the last call. What is not imported yet, is new anyhow."""
        for name, version in versions.items():
            if self.done.get(name, 0) < version and (module := sys.modules.get(name)):
                self._reload(module, automatic)
            self.done[name] = version

    def _reload(self, module: Any, automatic: bool) -> None:
        importlib.invalidate_caches()
        if automatic:
            from IPython.extensions.autoreload import superreload

            superreload(module, importlib.reload, self.old_objects)
        else:
            importlib.reload(module)
