"""Ballots: what the number that a rank gives says of where it is. Every place has numbers of its own, so that a ballot
also tells whether all ranks came to the same one."""

from __future__ import annotations

__all__ = ["ALIKE", "APART", "EXCHANGES", "GIVEN", "METRICS", "NAMES", "OUTSIDE", "TURNS", "elsewhere"]

GIVEN = 2  # bits of a vote's number; the other 32 are its digest
ALIKE = 1 << 38  # no vote's number, which has 34 bits
OUTSIDE = 1 << 40  # ballots from here on name a unit that is used outside the plan
EXCHANGES = 1 << 41  # are of what an exchange is for
METRICS = 1 << 42  # ballots from here on are of the structure of metrics
TURNS = 1 << 44  # are of what a rank wants next, where ranks agree on each use
APART = 1 << 46  # of a rank that cannot come, see `_runtime.host_lanes`
NAMES = 1 << 16  # units that have numbers of their own


def elsewhere(number: int, names: tuple[str, ...]) -> str:
    """Where a rank is that came to a ballot with this number."""
    if number >= TURNS:
        return "something planned" if number >= APART else "a use in the first step"
    if number >= EXCHANGES:
        return "pmean, psum or pmax" if number >= METRICS else "an exchange"
    before, unit = divmod(number - OUTSIDE, NAMES)
    return "step" if number < OUTSIDE else f"{names[unit]!r}{f' after {before - 1} reductions' if before else ''}"
