"""Results: what calls returned and stays on a worker, under the numbers that the caller's handles have.

After a call that failed, `renew` has the ranks of every mesh meet, and the States go to the last whole step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._common.errors import FsdpError, StaleStateError
from .._common.torch_names import pytree
from .._runtime.restart import ALL
from .._runtime.runtime import forget_runtime, runtimes
from .._state.state import State
from .._verbs.verbs import newest

__all__ = ["Key", "drop", "held", "keep", "meshes", "renew", "same", "short"]

WIDTH = 100  # characters of a value, where a handle is printed

Key = tuple[int, int | None]  # the number of a call, and a place in the tuple that it returned; None: all of it

_values: dict[Key, Any] = {}
_lengths: dict[int, int] = {}  # of results that are tuples, by call; their items lie one by one


def held(key: Key) -> Any:
    """The value of a handle."""
    number, place = key
    if place is None and number in _lengths:
        return tuple(_values[number, i] for i in range(_lengths[number]))
    return _values[key]


def keep(number: int, result: Any) -> int | None:
    """Keep a call's result. Returns its length if it is a tuple that is not empty."""
    if type(result) is tuple and result:
        _lengths[number] = len(result)
        _values.update(((number, i), item) for i, item in enumerate(result))
        return len(result)
    _values[number, None] = result
    return None


def drop(keys: Iterable[Key]) -> None:
    for number, place in keys:
        if place is None:
            for i in range(_lengths.pop(number, 0)):
                _values.pop((number, i), None)
        _values.pop((number, place), None)


def meshes() -> dict[str, int]:
    """After a call that failed or was stopped: the meshes on which this rank may have parted from others, each by a
    name that all of its ranks have for it, with the number of those."""
    gc.collect()  # states of the call that failed, which need not be compared
    return {name: run.size for name, run in runtimes().items()}


def renew(keys: list[Key], common: list[str]) -> None:
    """After a call that failed or was stopped: the ranks of every mesh meet, since some may have been stopped in a step
    and others after it. Each State that the call was given is the one after the last whole step.

    Args:
        keys: of the handles that the call was given.
        common: the meshes that all of their ranks have, in the order in which they meet.
    """
    here = runtimes()
    for name in here.keys() - {*common}:
        forget_runtime(here.pop(name), "A call was stopped while its ranks made their communicators.")
    places = [place for key in keys for place in _places(key)]
    given = _lineages(places)
    met = {id(run) for run, _ in given.values() if run.size == 1}
    for name in common:
        if name in here and _meet(here[name], given.get(id(here[name]), (None, []))[1]):
            met.add(id(here[name]))

    def later(state: State) -> State:
        lineage = state.version.lineage
        return _newest(state) if lineage.successor is None or id(lineage.runtime) in met else state

    seen: set[int] = set()
    for place in places:
        _values[place] = _replaced(_values[place], later, seen)


def _places(key: Key) -> list[Key]:
    """Where in the table the values of a handle lie."""
    number, place = key
    return [(number, i) for i in range(_lengths[number])] if place is None and number in _lengths else [key]


def _lineages(places: list[Key]) -> dict[int, tuple[Any, list[Any]]]:
    """The lineages of all States there, by the id of their runtime."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for state in _states([_values[place] for place in places], set()):
        lineage = state.version.lineage
        found.setdefault(id(lineage.runtime), (lineage.runtime, []))[1].append(lineage)
    return found


def _states(value: Any, seen: set[int]) -> Iterator[State]:
    """The States in a pytree, and in attributes of the user's objects there."""
    for leaf in pytree.tree_leaves(value, is_leaf=_is_state):
        if isinstance(leaf, State):
            yield leaf
        for attribute in _attributes(leaf, seen).values():
            yield from _states(attribute, seen)


def _replaced(value: Any, later: Callable[[State], State], seen: set[int]) -> Any:
    """`value` with each such State replaced by what `later` says. Objects stay the ones they are."""

    def at(leaf: Any) -> Any:
        if isinstance(leaf, State):
            return later(leaf)
        for name, attribute in [*_attributes(leaf, seen).items()]:
            own = [one for one in pytree.tree_leaves(attribute, is_leaf=_is_state) if isinstance(one, State)]
            found = _replaced(attribute, later, seen)
            if any(later(one) is not one for one in own):
                vars(leaf)[name] = found
        return leaf

    return pytree.tree_map(at, value, is_leaf=_is_state)


def _attributes(x: Any, seen: set[int]) -> dict[str, Any]:
    """Those of an object of a class of the user's own, once."""
    package = type(x).__module__.partition(".")[0]
    if package in ("builtins", "torch", __name__.partition(".")[0]) or isinstance(x, type | torch.nn.Module):
        return {}
    if id(x) in seen:
        return {}
    seen.add(id(x))
    return getattr(x, "__dict__", {})


def _meet(run: Any, lineages: list[Any]) -> bool:
    """The ranks of a runtime meet. Returns whether these states went equally far on all of them: where one was stopped
    while a verb moved a state, and others after it, nobody has it whole."""
    try:
        run.restart(lineages[-1].number if lineages else ALL)
        told = run.everyone(([len(lineage.successors) for lineage in lineages], run.lineage_count), "renew")
    except FsdpError:  # a state of it says so itself where it is used
        return False
    run.count_lineages(max(count for _, count in told))
    return all(gone == told[0][0] for gone, _ in told)


def _is_state(x: Any) -> bool:
    return isinstance(x, State)


def _newest(state: State) -> State:
    try:
        state._valid("a handle")
    except StaleStateError:
        with contextlib.suppress(StaleStateError):  # it says so itself where it is used
            return newest(state)
    return state


def same(value: Any) -> Any:
    """The value of a handle, sent to the caller."""
    return value


def short(value: Any) -> str:
    """A value in one line."""
    text = repr(value)
    text = " ".join(text.partition("\n")[0].split() if isinstance(value, State) else text.split())
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
