"""Shrink: the simplest case that still comes out as badly, found within some seconds; and its description."""

from __future__ import annotations

import json
import time
from typing import Any

from . import harness
from .verdict import Verdict

Case = dict[str, Any]


def shrunk(case: Case, column: str, seconds: float) -> tuple[Case, Verdict | None]:
    """The simplest case found whose verdict has this column too, and the verdict; None if it did not come again."""
    begun = time.monotonic()
    verdict = harness.play_one(case)
    if verdict.column != column:
        return case, None
    module, again = harness.module_of(case["kind"]), True
    while again:
        again = False
        for simpler in getattr(module, "smaller", lambda case: [])(case):
            if time.monotonic() - begun > seconds:
                return case, verdict
            try:
                found = harness.play_one(simpler)
            except Exception:  # a case that cannot be: another one
                continue
            if found.column == column:
                case, verdict, again = simpler, found, True
                break
    return case, verdict


def described(case: Case) -> str:
    """A case in few lines."""
    if "models" not in case:
        return json.dumps({k: v for k, v in case.items() if k not in ("name", "kind")})
    lines = [f"mesh {dict(case['mesh'])}" + (f", must refuse {case['refuse']!r}" if "refuse" in case else "")]
    for model in case["models"]:
        for leaf in model["leaves"]:
            keys = ".".join(str(key) for _, key in leaf["keys"])
            more = [k for k in ("frozen",) if leaf[k]] + (
                [f"tied to {leaf['same']}"] if leaf["same"] is not None else []
            )
            lines.append(f"  leaf {keys!r} {tuple(leaf['shape'])} {leaf['dtype']} {' '.join(more)}")
        settings = {k: v for k, v in model["settings"].items() if v not in ([], None, "mean")}
        lines.append(f"  settings {json.dumps(settings)}")
        lines += [f"  {json.dumps({k: v for k, v in op.items() if v is not None})}" for op in model["program"]]
    return "\n".join(lines)
