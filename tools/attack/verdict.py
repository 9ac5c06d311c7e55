"""Verdict: what came out of a case, on one rank or on all; and which exceptions are the package's word."""

from __future__ import annotations

import os
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

import functional_fsdp as fsdp

COLUMNS = {
    "right": "as plain arithmetic says",
    "refused": "a documented error, where one is allowed",
    "unseen": "damage inside raw tensor data, which only checksums could find",
    "unfit": "a documented error where the case should work",
    "accepted": "no error where there must be one",
    "wrong": "wrong numbers",
    "hang": "not done in time, or only by a timeout",
    "raw": "an error that the package does not document",
    "crash": "a process died by itself, or left something behind",
}
SCALE = float(os.environ.get("ATTACK_PATIENCE", "1"))  # for machines that are busy
PATIENCE = 5.0 * SCALE  # seconds that a collective waits: an error that comes later than that is a hang
LIMIT = 9.0 * SCALE  # seconds that a case may take
LATE = "not done in time"
STARVED = 0.2 * PATIENCE  # seconds that a rank had no core in, after which a wait that ended says nothing
FINE = ("right", "refused", "unseen")
_ORDER = ("crash", "wrong", "hang", "raw", "accepted", "unfit", "unseen", "refused", "right")


class Wrong(Exception):
    """Raised by a case: the package computed something else than plain arithmetic."""


class Refused(Exception):
    """Raised by a case: the package raised its `error` at a place where it may."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class Ended(Refused):
    """A documented error after which this rank cannot go on, so that its peers may meet a CommError."""


@dataclass
class Verdict:
    """What came out, the text of it, and notes that tests and reports may want."""

    column: str
    text: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    clean: bool = True  # the ranks may go on to the next case

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def fine(self) -> bool:
        return self.column in FINE


def documented(error: BaseException, *more: type[BaseException]) -> bool:
    """Whether the package raised this on purpose."""
    return isinstance(error, (fsdp.FsdpError, *more))


def judged(error: BaseException, seconds: float, patience: float) -> Verdict:
    """The verdict on an exception that ended a case which should work."""
    if isinstance(error, Wrong):
        return Verdict("wrong", str(error), clean=False)
    if isinstance(error, Ended):
        return Verdict("refused", str(error)[:300], {"ended": True}, clean=False)
    if isinstance(error, Refused):
        return Verdict("refused", str(error)[:300], clean=False)
    said = " ".join(f"{type(error).__name__}: {error}"[:400].split())
    if documented(error):
        if isinstance(error, fsdp.CommError) and seconds > patience:
            return Verdict("hang", f"{said} (after {seconds:.1f} s){_where(error)}", clean=False)
        return Verdict("unfit", said + _where(error), clean=False)
    return Verdict("raw", said + _where(error), clean=False)


def _where(error: BaseException) -> str:
    """The last lines of the package and of the case that the error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames]
    return " | " + " < ".join(reversed(shown[-6:])) if shown else ""


def worst(verdicts: list[Verdict]) -> Verdict:
    """One verdict for all ranks: the worst, with the ranks that had it."""
    if any(v.notes.get("ended") for v in verdicts):  # what its peers met then is that it was gone
        gone = [v.column != "wrong" and ("CommError" in v.text or "gloo" in v.text) for v in verdicts]
        verdicts = [Verdict("refused", v.text, clean=False) if g else v for g, v in zip(gone, verdicts, strict=True)]
    column = min((v.column for v in verdicts), key=_ORDER.index)
    ends = [v.notes.get("end") for v in verdicts]
    if column in FINE and len(set(ends)) > 1:
        said = "; ".join(
            f"rank {r}: {end} {v.text[:150]}" for r, (end, v) in enumerate(zip(ends, verdicts, strict=True))
        )
        return Verdict("accepted", f"ranks disagree: {said}", clean=False)
    ranks = [r for r, v in enumerate(verdicts) if v.column == column]
    text = verdicts[ranks[0]].text
    others = sorted({f"{v.column}: {v.text[:160]}" for v in verdicts if v.column != column and v.text})
    if column not in FINE:
        met = [m for v in verdicts for m in v.notes.get("met", [])]
        text = f"rank {', '.join(map(str, ranks))}: {text}" + "".join(f"; elsewhere {other}" for other in others[:2])
        text += f"; met {met}" if met else ""
    return Verdict(column, text, verdicts[ranks[0]].notes, all(v.clean for v in verdicts))
