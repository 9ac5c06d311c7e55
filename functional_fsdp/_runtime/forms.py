"""Forms: the structures of the metrics that ranks reduce, which have to be the same on every rank.

A collective of other sizes on other ranks gives numbers without meaning, or ends the process. So ranks compare forms
before it, by a ballot on the host; but only where the form is not the one that followed last time:

    loss ▸ loss ▸ loss ▸ norm, loss ▸ norm, loss ▸ ...
    !      !             !     !    !                     ballots: what came after what is known from there on

What a rank expects follows from what came before, which was the same on every rank. So where ranks differ, one at least
did not expect its form, and waits in the ballot; the others, which wait in the collective, hear of that.
"""

from __future__ import annotations

import zlib
from itertools import takewhile
from typing import Any

from .._common.errors import ScheduleError, TreeError
from .._common.torch_names import pytree
from .._distributed import Case

MOST = 256  # transitions that are remembered
AROUND = 80  # letters of a long text before the place where it differs


class Forms:
    """The forms that came on one mesh. A restart clears it, on every rank.

    Attributes:
        form: of the metrics that are being reduced, the `count`th since the last meeting; () while none are.
        asking: whether this rank waits for its peers to compare it; presumed: whether it goes ahead without that.
        recorded: while a step is captured, its forms, and after how many votes.
    """

    def __init__(self) -> None:
        self.recorded: list[tuple[Any, int]] | None = None
        self.form: Any = ()
        self.asking = self.presumed = False
        self.clear()

    def clear(self) -> None:
        """Nothing came yet."""
        self.last = -1
        self.count = 0
        self.known: list[Any] = []
        self.next: dict[int, int] = {}  # what came after which, the last time

    def record(self, forms: list[tuple[Any, int]] | None) -> None:
        """Note forms here, while a step is captured; None: no more."""
        self.recorded = forms

    def begin(self, run: Any, form: Any, lineage: Any) -> None:
        """This rank is about to reduce metrics of this form, until `end`.

        Raises:
            TreeError: on every rank, where ranks have different ones. ScheduleError: a rank does something else.
        """
        if self.recorded is not None:
            self.recorded.append((form, run.votes))
        found = self.next.get(self.last, -1)
        expected = found >= 0 and self.known[found] == form
        self.count += 1
        self.form, self.presumed = form, expected
        if not expected:
            text = described(form)
            self._compare(run, zlib.crc32(text.encode()), lineage)
            if len(self.known) > MOST:
                self._forget()
            found = self.known.index(form) if form in self.known else len(self.known)
            if found == len(self.known):
                self.known.append(form)
            self.next[self.last] = found
        self.last = found

    def end(self) -> None:
        """They are reduced, or will not be."""
        self.form = ()

    def asked_for(self, store: Any, meetings: int) -> bool:
        """Whether a peer waits for this rank to compare the metrics that this rank took for those it knows."""
        key = f"metrics/{meetings}/{self.count}"
        if self.asking:
            store.set(key, "1")
        return bool(self.form) and self.presumed and store.check([key])

    def differ(self, run: Any, forms: list[str]) -> None:
        """Raise TreeError if ranks have metrics of different forms; "": none."""
        said = [(rank, form) for rank, form in zip(run.ranks, forms, strict=True) if form]
        self.end()
        for rank, form in said:
            if form != said[0][1]:
                at = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(form, said[0][1], strict=False)))
                remedy = "Give pmean, psum and pmax the same tree, with the same shapes and dtypes, on every rank."
                raise TreeError(
                    f"ranks have different metrics: rank {said[0][0]} has {_cut(said[0][1], at)}, rank {rank} has "
                    f"{_cut(form, at)}.{_of_buffers(form) or f' {remedy}'}"
                )

    def _forget(self) -> None:
        self.last, self.known, self.next = -1, [], {}

    def _compare(self, run: Any, number: int, lineage: Any) -> None:
        """Every rank is about to reduce metrics, of the form with this number. Host, 16 bytes; more where they differ.

        Raises:
            TreeError: forms differ. ScheduleError: a rank is elsewhere.
        """
        self.asking = True
        try:
            most, least = run.tally(run.ballot(Case.METRICS, number, "metrics"))
        finally:
            self.asking = False
        if most == least:
            return
        if not least.case is most.case is Case.METRICS:
            what = _cut(described(self.form))
            raise ScheduleError(
                f"ranks came to {what}, and to something else (a step, a use outside the plan). Make the same "
                f"calls in the same order on every rank.{_of_buffers(self.form)} The state before the step is valid."
            )
        forms = run.everyone(described(self.form), "metrics")
        lineage.unchanged()  # all know
        self.differ(run, forms)


def described(form: Any) -> str:
    """A form in words: the same for equal ones."""
    if not form:
        return ""
    _, structure, tensors, along = form
    where = f" along {', '.join(map(repr, along))}" if along is not None else ""
    kinds = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in tensors]
    if not structure:
        return f"{len(kinds)} tensors: {', '.join(kinds)}{where}"
    name, treedef = structure
    return f"{name}({pytree.tree_unflatten(kinds, treedef)}){where}"


def _cut(text: str, at: int = 0) -> str:
    """Some of a text, around a place in it."""
    start = max(0, at - AROUND) if len(text) > 4 * AROUND else 0
    stop = start + 4 * AROUND
    return f"{'...' * (start > 0)}{text[start:stop]}{'...' * (stop < len(text))}"


def _of_buffers(form: Any) -> str:
    """What to do, where what differs are buffers of driven steps: a form, or one in words."""
    if not (form if isinstance(form, str) else described(form)).startswith("buffers("):
        return ""
    return (
        " These are the buffers that a driven step changed. Every rank must change the same ones: have the model in "
        "the same mode, and let no branch decide. Or keep each rank's own: forward_backward(buffers='local')."
    )
