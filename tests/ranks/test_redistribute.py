"""A state goes into another strategy, mesh, precision, units or transport on the same ranks, with the same bits."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from support.driven import raised, refused
from support.moved import begun, spec_of, trained, whole, wrong_in
from support.presets import PRESETS
from support.ranks import each_rank, launch
from support.tables import FULL, covering

import functional_fsdp as fsdp
from functional_fsdp import _export, _redistribute

STEPS = 10 if FULL else 3
DTYPES = [torch.float32, torch.bfloat16]


def moved(preset: str, dtype: torch.dtype, other: str, compute: torch.dtype, settings: Any) -> tuple[list[str], float]:
    """What is not the same, and the largest difference of a loss in further steps."""
    state = begun(preset, dtype)
    kept = whole(state)
    straight = trained(fsdp.load(fsdp.save(state, settings.pop("folder")), like=state), 2, STEPS)[1]
    there = fsdp.redistribute(state, spec_of(other, compute, **settings))
    wrong = wrong_in(there, kept)
    said = raised(lambda: fsdp.unshard(state))
    wrong += [] if "redistribute() has taken what this state held" in said else [said]
    wrong += ["memory"] * any(b.local.numel() for b in state.main.values())
    losses = trained(there, 2, STEPS)[1]
    return wrong, max(abs(a - b) for a, b in zip(straight, losses, strict=True))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"units": []},
    {"labels": {"*bias": "bias"}},
    {"transport": "copy_engine"},
    {"schedule": fsdp.Schedule(prefetch=0)},
]
ROWS = [*itertools.product(PRESETS, DTYPES, PRESETS, DTYPES, [1, 2, 3, 4], range(len(SETTINGS)))]


@pytest.mark.parametrize("row", ROWS if FULL else covering(ROWS[::5])[:3], ids=lambda r: "-".join(map(str, r)))
def test_any_state_becomes_any_other(row: Any, tmp_path: Any) -> None:
    preset, dtype, other, compute, ranks, i = row
    settings = {**SETTINGS[i], "folder": str(tmp_path / "saved")}
    for wrong, apart in launch(moved, (preset, dtype, other, compute, settings), nprocs=ranks):
        assert not wrong
        if dtype is compute is torch.float32:
            assert apart < 1e-5


@each_rank(4)
def test_experts_stay_where_they_are() -> None:
    """Leaves of ranks' own, on two meshes."""
    mesh = fsdp.local_mesh(expert=2, data=2)
    at = mesh.get_local_rank("expert")
    params = {"experts": torch.full((5,), float(at)), "rest": torch.arange(7.0)}
    rules = {"experts": fsdp.zero3("data"), "*": fsdp.zero3("expert", "data")}
    state = fsdp.shard(params, fsdp.Spec(mesh, rules), fsdp.adamw())
    whole_mesh, own = fsdp.local_mesh(), "ranks have 'experts' of their own along 'expert' (2 ranks)"
    refused((lambda: fsdp.redistribute(state, fsdp.Spec(whole_mesh)), f"{own}, and by the spec along no axis"))
    spec = fsdp.Spec(mesh, {"experts": fsdp.ddp("data"), "*": fsdp.hsdp("expert", "data")})
    moved = fsdp.redistribute(state, spec)
    back = fsdp.full_params(moved)
    assert all(torch.equal(back[name], params[name]) for name in params)
    assert fsdp.step(fsdp.reduce(*fsdp.unshard(moved))).steps == 1


@each_rank(2)
def test_what_cannot_be_moved_is_refused_and_the_state_stays() -> None:
    state = begun("zero3", torch.float32)
    kept = whole(state)
    spec = state.spec
    lists = fsdp.replace_extras(state, listed=[next(iter(state.main.values()))])
    middle, _ = fsdp.unshard(state)
    other = PRESETS[torch.distributed.get_rank()]

    def to(preset: str, **more: Any) -> Any:
        return lambda: fsdp.redistribute(state, spec_of(preset, torch.float32, **more))

    refused(
        (lambda: fsdp.redistribute(middle, spec), "in the middle of a step"),
        (to("ddp", average="sum"), "average='mean', the spec average='sum'"),
        (to("ddp", trainable={"tail.*": False}), "is trained in this state, and frozen by the spec"),
        (to("ddp", units=["nothing.*"]), "matches nothing"),
        (lambda: fsdp.redistribute(lists, spec), "lies in no dict by bucket"),
        (to(other), "ranks have different settings"),
    )
    assert wrong_in(state, kept) == []


@each_rank(2)
def test_counts_of_leaves_go_along() -> None:
    """Of a leaf that missed steps."""
    params = {"a": torch.ones(5), "b": torch.ones(300)}
    results = []
    for moves in (False, True):
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=[]), fsdp.adamw(lr=0.1))
        for step in range(4):
            grads = {"a": torch.ones(5), "b": torch.ones(300) if step != 1 else None}
            state = fsdp.step(fsdp.reduce(state, grads))
            if moves and step == 2:
                state = fsdp.redistribute(state, fsdp.Spec(fsdp.local_mesh(), fsdp.zero1("data")))
        results.append([value[0].item() for value in fsdp.full_params(state).values()])
    assert results[0] == results[1]


def stopped_between_meshes(folder: str, first: bool) -> list[Any]:
    """Rank 0 is stopped while a state goes to another mesh; both ranks load its checkpoint, first on the old mesh or on
    the new one, and then on the other."""
    old, new = fsdp.Spec(fsdp.local_mesh(data=2)), fsdp.Spec(fsdp.local_mesh(other=2), fsdp.zero1("other"))
    state = fsdp.shard({"a": torch.arange(40.0), "b": torch.ones(7)}, old, fsdp.adamw())
    fsdp.save(state, folder)
    with pytest.raises(BaseException, match=r"(stopped here|another rank was stopped)") as caught:
        fsdp.redistribute(state, new)
    found: list[Any] = [caught.type.__name__, raised(lambda: fsdp.full_params(state))]
    for spec in (new, old) if first else (old, new):
        found.append(fsdp.full_params(fsdp.load(folder, spec, optimizer=fsdp.adamw()))["a"].sum().item())
    return found


@pytest.mark.parametrize("first", [True, False], ids=["new", "old"])
@pytest.mark.parametrize(
    ("place", "lost"),
    [
        ((_redistribute, "free_arena"), False),
        ((_redistribute, "gather_leaves"), True),
        ((_redistribute, "refresh"), True),
        ((_redistribute, "_over"), True),
    ],
    ids=["before", "old mesh", "new mesh", "end"],
)
def test_who_is_stopped_between_two_meshes_is_waited_for_on_neither(
    place: Any, lost: bool, first: bool, tmp_path: Any
) -> None:
    owner, name = place
    real, to_come = getattr(owner, name), ["here"]

    def stopped(*args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 0 and to_come:
            raise KeyboardInterrupt(f"stopped {to_come.pop()}")
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, stopped):
        both = fsdp.launch(stopped_between_meshes, (str(tmp_path / "saved"), first), nprocs=2, simulate=True)
    for (kind, after, *sums), want in zip(both, ["KeyboardInterrupt", "RestartError"], strict=True):
        assert kind == want
        assert ("stopped while it was moving what this state held" in after) == lost
        assert sums == [780.0, 780.0]


def stopped_in_a_look(at: str) -> list[Any]:
    """Rank 1 is stopped in a look at a state, then a state goes to another mesh. (At a state of the new mesh at its
    end, where the other rank hears of nothing; of the old one while the other rank is there still.)"""
    old, new = fsdp.Spec(fsdp.local_mesh(data=2)), fsdp.Spec(fsdp.local_mesh(other=2), fsdp.zero1("other"))
    params = {"a": torch.arange(40.0), "b": torch.ones(7)}
    state = fsdp.shard(params, old)
    looked = state if at == "old" else fsdp.shard({"a": params["a"]}, new)
    kind = ""
    try:
        fsdp.full_params(looked)
    except (KeyboardInterrupt, fsdp.RestartError) as error:
        kind = type(error).__name__
    return [kind, fsdp.full_params(fsdp.redistribute(state, new))["a"].sum().item()]


@pytest.mark.parametrize(("at", "other"), [("old", "RestartError"), ("new", "")])
def test_who_was_stopped_in_a_look_before_meets_its_peers_first(at: str, other: str) -> None:
    name, to_come = "unpacked_leaves", ["here"]
    real = getattr(_export, name)

    def stopped(*args: Any) -> Any:
        if torch.distributed.get_rank() == 1 and to_come:
            raise KeyboardInterrupt(f"stopped {to_come.pop()}")
        return real(*args)

    with mock.patch.object(_export, name, stopped):
        both = fsdp.launch(stopped_in_a_look, (at,), nprocs=2, simulate=True)
    assert both == [[other, 780.0], ["KeyboardInterrupt", 780.0]]
