"""Pictures of what is asked for and of what follows from it: what is drawn where, and what a picture refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp import SpecError
from functional_fsdp._plan.cursor import Cursor
from functional_fsdp.look import draw as module
from functional_fsdp.look.draw import Panel

pytest.importorskip("matplotlib")
FOUR, TWO = {"data": 4}, {"replica": 2, "shard": 2}
SHAPES = {"embed.w": (64, 32), **{f"blocks.{i}.w": (96, 32) for i in range(3)}, "blocks.0.b": (8,), "head.w": (32, 64)}
PARAMS = {path: torch.empty(shape, device="meta") for path, shape in SHAPES.items()}


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every box that is drawn, as (x, y, width, height, label, colour)."""
    seen: list[tuple[Any, ...]] = []
    drawn = Panel.box

    def box(self: Panel, x: float, y: float, w: float, h: float, label: str = "", **style: Any) -> None:
        seen.append((x, y, w, h, label, style.get("facecolor")))
        drawn(self, x, y, w, h, label, **style)

    monkeypatch.setattr(Panel, "box", box)
    return seen


@pytest.mark.parametrize(
    ("preset", "mesh", "filled"),
    [
        ("ddp", FOUR, {"weights": [(0, 1)] * 4, "grads": [(0, 1)] * 4, "main": [(0, 1)] * 4}),
        ("zero2", FOUR, {"weights": [(0, 1)] * 4, "grads": [(i / 4, 1 / 4) for i in range(4)]}),
        ("zero3", FOUR, {kind: [(i / 4, 1 / 4) for i in range(4)] for kind in ("weights", "main")}),
        ("hsdp", TWO, {kind: [(0, 0.5), (0.5, 0.5)] * 2 for kind in ("weights", "main")}),
        ("hfsdp", TWO, {"grads": [(0, 0.5), (0.5, 0.5)] * 2, "main": [(i / 4, 1 / 4) for i in (0, 2, 1, 3)]}),
    ],
)  # fmt: skip
def test_a_spec_shows_what_each_rank_keeps(
    preset: str, mesh: dict[str, int], filled: dict[str, Any], boxes: list[Any], tmp_path: Path
) -> None:
    fsdp.draw(fsdp.Spec(mesh, getattr(fsdp, preset)(*mesh)), tmp_path / "spec.svg")
    for kind, parts in filled.items():
        mine = [(x % 1 / 0.93, w / 0.93) for x, _, w, _, _, colour in boxes if colour == module.COLOURS[kind]]
        assert mine == [pytest.approx(part) for part in parts]


def test_a_layout_is_to_scale_and_says_what_is_alike(boxes: list[Any], tmp_path: Path) -> None:
    layout = fsdp.make_layout(PARAMS, fsdp.Spec(FOUR))
    fsdp.draw(layout, tmp_path / "layout.svg")
    leaves = [(x, w, label) for x, _, w, _, label, _ in boxes if label]
    assert leaves == [(0, 2048, "w"), (0, 3072, "w"), (3072, 8, "b"), (0, 3072, "w"), (0, 2048, "w")]
    assert [w for _, _, w, _, label, _ in boxes if not label] == [2048, 3584, 3072, 2048]  # with padding


def test_layouts_beside_each_other_show_bytes(boxes: list[Any], tmp_path: Path) -> None:
    half = fsdp.Precision(compute=torch.bfloat16)
    made = {name: fsdp.make_layout(PARAMS, fsdp.Spec(FOUR, getattr(fsdp, name)("data"), precision=half))
            for name in ("ddp", "zero2", "zero3")}  # fmt: skip
    fsdp.draw(made, tmp_path / "bytes.svg")
    n = sum(bucket.numel for bucket in made["ddp"].buckets.values())
    kib = {
        name: [w * 1024 for _, y, w, *_ in boxes if int(y) == row] for row, name in enumerate(("zero3", "zero2", "ddp"))
    }
    assert kib == {
        "ddp": [4 * n, 4 * n, 2 * n],
        "zero2": [n, n, 2 * n],
        "zero3": [n, n, fsdp.make_plan(made["zero3"]).arena],
    }


def test_a_plan_shows_each_unit_where_and_as_long_as_it_lies(boxes: list[Any], tmp_path: Path) -> None:
    plan = fsdp.make_plan(fsdp.make_layout(PARAMS, fsdp.Spec(FOUR)))
    fsdp.draw(plan, tmp_path / "plan.svg")
    uses = [(x, label) for x, y, *_, label, _ in boxes if label and y == 0.12]
    assert uses == [(k, use.unit) for k, use in enumerate(plan.uses)]
    (head,) = {(x, y, w) for x, y, w, _, label, _ in boxes if label == "head" and y != 0.12 and x == plan.turn}
    assert head == (plan.turn, plan.by_name["head"].address / 1024, 1)
    pale = [(x, w) for x, y, w, h, label, _ in boxes if not label and w and h == plan.by_name["embed"].nbytes / 1024]
    assert (len(plan.uses) - 2, 1) in pale  # the embedding is gathered again during the last use but one


def test_a_cursor_says_which_use_comes_next(tmp_path: Path) -> None:
    plan = fsdp.make_plan(fsdp.make_layout(PARAMS, fsdp.Spec(FOUR)))
    fsdp.draw(Cursor(plan, at=2), tmp_path / "cursor.svg")
    fsdp.draw(plan, tmp_path / "plan.svg")
    assert (tmp_path / "cursor.svg").read_bytes() != (tmp_path / "plan.svg").read_bytes()


def test_collectives_are_as_high_as_their_bytes(boxes: list[Any], tmp_path: Path) -> None:
    state = fsdp.abstract_state(PARAMS, fsdp.Spec(TWO, fsdp.hsdp("replica", "shard")), fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State) -> fsdp.State:
        state, params = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: torch.stack([w.square().sum() for w in p.values()]).sum())(params)
        return fsdp.step(fsdp.reduce(state, grads))

    lowered = fsdp.lower(train_step, state)
    fsdp.draw(lowered, tmp_path / "sent.png")
    assert [(h * 1024, label) for _, _, _, h, label, _ in boxes] == [
        (one.nbytes, one.bucket) for one in lowered.collectives
    ]
    assert len(boxes) == 3 * len(state.units)
    assert (tmp_path / "sent.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape("draw: a spec of 1,024 ranks; expected at most 16")):
        fsdp.draw(fsdp.Spec({"data": 1024}), tmp_path / "x.png")
    with pytest.raises(TypeError, match="draw: got dict; expected a Spec, a Layout, a dict of one of these by title"):
        fsdp.draw(PARAMS, tmp_path / "x.png")
    assert not [*tmp_path.iterdir()]
