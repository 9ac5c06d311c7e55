"""Joint work: what every rank does at once, part by part, and raises together if it fails on any of them.

    rank 0   do() ── error ──┐            raises its own error
    rank 1   do() ── value ──┴─ exchange ─ raises one of the same kind, which names rank 0 and what it met

So that no rank waits in an exchange for one that has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .._common.errors import FsdpError, RestartError
from .._common.interrupts import guard, leave

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["Joint"]

T = TypeVar("T")


class Met(NamedTuple):
    """An error, as other ranks are told of it."""

    kinds: tuple[type[Exception], ...]  # its classes that every rank knows, nearest first
    stopped: bool
    name: str
    text: str
    errno: int | None

    @classmethod
    def of(cls, error: BaseException) -> Met:
        known = ("builtins", FsdpError.__module__)
        mro = type(error).__mro__
        kinds = [k for k in mro if issubclass(k, Exception) and k is not Exception and k.__module__ in known]
        number = getattr(error, "errno", None)
        return cls(tuple(kinds), not isinstance(error, Exception), type(error).__name__, str(error), number)

    def again(self, what: str, rank: int) -> Exception:
        """The error for a rank that did not meet it."""
        text = self.text.removeprefix(f"{what}: ")
        said = f"{self.name}: {text}" if text else self.name
        if self.stopped:
            return RestartError(
                f"{what}: rank {rank} was stopped by {said}. Nothing is lost: make the same call again on every rank."
            )
        for kind in self.kinds:
            try:
                error = kind(f"{what}: rank {rank} met {said}")
            except TypeError:  # it wants to be told more
                continue
            if isinstance(error, OSError):
                error.errno = self.errno
            return error
        return FsdpError(f"{what}: rank {rank} met {said}")


class Joint:
    """A call that every rank makes. Within it, `joint(do, part)` is one exchange.

    An error of this package (FsdpError) that is raised between exchanges is raised on all ranks, as it follows from
    what all were told. A rank that anything else stops there meets the others in its next call.
    """

    def __init__(self, run: Runtime, what: str) -> None:
        self.run, self.what = run, what
        self.known = False  # whether all ranks have been told of the error

    def __enter__(self) -> Joint:
        guard()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.known and not isinstance(error, FsdpError):
            self.run.leave()
        leave()

    def __call__(self, do: Callable[[], T], part: str = "") -> list[T]:
        """Every rank's result of `do`, by rank: small objects. Host; waits for all.

        Args:
            part: of the call, the same on every rank: ranks that come with different ones raise ScheduleError.

        Raises:
            BaseException: what `do` raised here. Exception: where it raised elsewhere, one of the same kind, which
                names the first rank that met it; RestartError where that rank was interrupted.
            CommError, RestartError: as `Runtime.everyone`.
        """
        mine: Any = None
        error: BaseException | None = None
        told: list[Any] = []
        try:
            mine = do()
        except BaseException as met:
            error = met
        try:
            told = self.run.everyone(
                (mine, None if error is None else Met.of(error)), f"{self.what}{part and ', '}{part}"
            )
            self.known = any(there for _, there in told)
        except Exception as left:  # a rank has left: what this one met may only follow from that
            if isinstance(error, Exception):
                raise left from error
            if error is None:
                raise
        try:
            if error is not None:
                raise error
        finally:
            error = None  # its traceback has this frame
        for rank, (_, there) in enumerate(told):
            if there is not None:
                raise there.again(self.what, self.run.ranks[rank])
        return [value for value, _ in told]
