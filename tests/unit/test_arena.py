"""The arena: what lies in a unit's place, and what is put there for residuals that point at it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp._engine.gathers import Arena, Gathers
from functional_fsdp._extend import PlannedCopies, overwrite
from functional_fsdp._plan.layout import LeafInfo, plan_layout
from functional_fsdp._plan.plan import make_plan

SIZES = {"a": 1024, "b": 512, "c": 2048, "d": 512}  # elements; a and c lie on one side of the arena


def arena() -> Any:
    """An arena as GPUs have it, where no more bytes are kept than the unit that is there has."""
    leaves = [LeafInfo(f"{name}.w", (n,), torch.float32) for name, n in SIZES.items()]
    layout = plan_layout(leaves, fsdp.Spec({"data": 2}))
    run: Any = SimpleNamespace(device=torch.device("cpu"))
    carrier: Any = SimpleNamespace(keeps_arena=False)
    made: Any = Arena(run, make_plan(layout), carrier)
    made.kept = False
    for unit in made.where:
        whole = torch.empty(0)
        made.allocate(unit)
        whole.set_(memory_of(made, unit), 0, (SIZES[unit],), (1,))
        made.places[unit] = SimpleNamespace(parts=[SimpleNamespace(whole=whole, bucket=SimpleNamespace(name=unit))])
    return made


def memory_of(made: Any, unit: str) -> Any:
    return made.memory[made.where[unit][0]]


def test_units_of_one_side_share_bytes() -> None:
    made = arena()
    assert memory_of(made, "a") is memory_of(made, "c")
    assert memory_of(made, "a") is not memory_of(made, "b")
    assert {unit: size for unit, (_, size, _) in made.where.items()} == {name: 4 * n for name, n in SIZES.items()}


@pytest.mark.parametrize(("there", "put"), [("a", "c"), ("c", "a"), ("a", "a")])
def test_what_lay_there_is_back_after_something_was_put_in_its_place(there: str, put: str) -> None:
    made = arena()
    made.allocate(there)
    mine, other = (made.places[unit].parts[0].whole for unit in (there, put))
    mine.copy_(torch.arange(SIZES[there]))
    undo = overwrite(made, put, {put: -torch.arange(float(SIZES[put]))})
    assert memory_of(made, put).nbytes() == 4 * SIZES[put]
    assert torch.equal(other, -torch.arange(float(SIZES[put])))
    undo()
    assert memory_of(made, there).nbytes() == 4 * SIZES[there]
    assert torch.equal(mine, torch.arange(float(SIZES[there])))


def test_a_place_is_crowded_while_something_that_is_held_lies_there() -> None:
    def lent(*put: str, **held: bool) -> Any:
        """`put`: units that are put in place there."""
        places = {unit: SimpleNamespace(loan=SimpleNamespace(held=one)) for unit, one in held.items()}
        others = {"a": ("c", "d"), "b": ()}
        plan = SimpleNamespace(overlap=lambda one, other: other in others[one], crowded={"a", "c", "d"})
        made: Any = SimpleNamespace(arena=SimpleNamespace(places=places), progress=SimpleNamespace(plan=plan))
        made.copied = PlannedCopies()
        made.copied.update(dict.fromkeys(put))
        return made

    assert Gathers.is_crowded(lent(a=True, d=True), "a") is True
    assert Gathers.is_crowded(lent(c=False, d=False), "a") is False  # was released
    assert Gathers.is_crowded(lent(), "a") is False  # was never gathered
    assert Gathers.is_crowded(lent(a=True, c=True, d=True), "b") is False
    assert Gathers.is_crowded(lent("d"), "a") is True
    assert Gathers.is_crowded(lent("b"), "a") is False
    assert Gathers.is_crowded(lent("a", "d"), "b") is False
