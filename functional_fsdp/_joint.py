"""Joint work: what every rank does at once, and raises together if it fails on any of them.

    rank 0   do() ── error ──┐            raises its own error
    rank 1   do() ── value ──┴─ exchange ─ raises one of the same kind, which names rank 0 and what it met

So that no rank waits in an exchange for one that has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ._errors import FsdpError

if TYPE_CHECKING:
    from ._runtime import Runtime

__all__ = ["jointly"]

T = TypeVar("T")


class Met(NamedTuple):
    """An error, as other ranks are told of it."""

    kinds: tuple[type[Exception], ...]  # its classes that every rank knows, nearest first
    name: str
    text: str
    errno: int | None

    @classmethod
    def of(cls, error: BaseException) -> Met:
        known = ("builtins", FsdpError.__module__)
        kinds = [k for k in type(error).__mro__ if issubclass(k, Exception) and k.__module__ in known]
        return cls(tuple(kinds), type(error).__name__, str(error), getattr(error, "errno", None))

    def again(self, what: str, rank: int) -> Exception:
        """The error for a rank that did not meet it. For a stop (Ctrl-C, exit) an FsdpError: only one rank was
        stopped."""
        text = f"{what}: rank {rank} met {self.name}{': ' if self.text else ''}{self.text}"
        for kind in self.kinds:
            if kind is Exception:
                break
            try:
                error = kind(text)
            except TypeError:  # it wants to be told more
                continue
            if isinstance(error, OSError):
                error.errno = self.errno
            return error
        return FsdpError(text)


def jointly(run: Runtime, what: str, do: Callable[[], T]) -> list[T]:
    """Every rank's result of `do`, by rank: small objects. Host; waits for all.

    Raises:
        BaseException: what `do` raised here. Exception: where it raised elsewhere, one of the same kind, which names
            the first rank that met it.
    """
    mine: Any = None
    error: BaseException | None = None
    try:
        mine = do()
    except BaseException as met:
        error = met
    told: list[Any] = []
    try:
        told = run.everyone((mine, None if error is None else Met.of(error)))
    except Exception:
        if error is None:
            raise
    try:
        if error is not None:
            raise error
    finally:
        error = None  # its traceback has this frame
    for rank, (_, met_there) in enumerate(told):
        if met_there is not None:
            raise met_there.again(what, run.ranks[rank])
    return [value for value, _ in told]
