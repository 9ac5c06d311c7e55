"""Buffers of ranks: that count differently, that nothing tells of, that a checkpoint has, that one rank has sent."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.chains import mean_square as loss_fn
from support.driven import refused
from support.ranks import each_rank, launch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms._drive.buffers import _digest

RULES = ("mean", "first", "local")


class Counting(nn.Module):
    """Buffers of all kinds, which each rank changes by what it sees; half of them through `.data`."""

    mean: torch.Tensor
    wave: torch.Tensor
    short: torch.Tensor
    seen: torch.Tensor
    quiet: torch.Tensor
    begun: torch.Tensor
    quietly: torch.Tensor
    late: torch.Tensor
    some: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("wave", torch.zeros(3, dtype=torch.complex128))
        self.register_buffer("short", torch.zeros(3, dtype=torch.int16))
        for name in ("seen", "quiet", "late", "some"):
            self.register_buffer(name, torch.zeros(3, dtype=torch.int64))
        for name in ("begun", "quietly"):
            self.register_buffer(name, torch.tensor(False))
        self.register_buffer("constant", torch.tensor([7, 8]))
        self.register_buffer("table", torch.arange(3.0, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                found = x.mean(0)
                self.mean.mul_(0.5).add_(found)
                self.wave.add_(torch.complex(found, 2 * found))
                self.seen.add_((x > 0).sum(0))
                self.short.add_((x > 0).sum(0).to(torch.int16))
                self.quiet.data.add_((x > 0).sum(0))
                self.begun.copy_(x.sum() > 0)
                self.quietly.data.copy_(x.sum() > 0)
                if self.seen.sum() > 15:  # not in the first step
                    self.late.data.add_((x > 0).sum(0))
                if x.sum() > 0:  # on the second rank
                    self.some.add_(1)
        return self.linear(x + self.table)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + rank)) + rank - 0.4


def begun(**more: Any) -> tuple[fsdp.State, Any]:
    torch.manual_seed(0)
    module = Counting()
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1), buffers=fsdp.buffers(module), **more)
    return state, model


def trained(state: fsdp.State, step: Any, steps: range) -> fsdp.State:
    rank = fsdp.extend.ranks_of(state).index
    for number in steps:
        state, _ = step(state, batch(number, rank))
        state = fsdp.step(state)
    return state


def plain(steps: int, rank: int) -> dict[str, torch.Tensor]:
    """What this rank's forwards alone make of the buffers."""
    torch.manual_seed(0)
    module = Counting()
    for number in range(steps):
        module(batch(number, rank))
    return {path: value.clone() for path, value in fsdp.buffers(module).items()}


def by_rule(folder: str) -> list[Any]:
    found = []
    for rule in RULES:
        state, model = begun(local_buffers=["wave"] if rule == "first" else [])
        step = T.forward_backward(model, loss_fn, buffers=rule)  # type: ignore[call-overload]
        state = trained(state, step, range(2))
        fsdp.save(state, Path(folder) / rule)
        after = trained(state, step, range(2, 4))
        loaded = fsdp.load(Path(folder) / rule, state.spec, fsdp.sgd(lr=0.1))
        kept = sorted(loaded.local_buffers)
        again = trained(loaded, step, range(2, 4))
        found.append((rule, dict(after.buffers), dict(again.buffers), kept))
    return found


def test_ranks_agree_on_every_kind_of_buffer_and_go_on_so_after_a_load(tmp_path: Path) -> None:
    first, second = launch(by_rule, (str(tmp_path),), nprocs=2)
    one, two = plain(4, 0), plain(4, 1)
    for (rule, mine, again, kept), (_, theirs, others, _) in zip(first, second, strict=True):
        assert kept == (["wave"] if rule == "first" else [])
        differ = {path for path in mine if not torch.equal(mine[path], theirs[path])}
        if rule == "local":
            assert all(torch.equal(mine[p], one[p]) and torch.equal(theirs[p], two[p]) for p in mine)
            continue
        assert differ == ({"wave"} if rule == "first" else set())
        assert torch.equal(mine["constant"], torch.tensor([7, 8]))
        for path in mine:  # as if it had not been interrupted; of a rank's own a checkpoint has the first one's
            assert torch.equal(mine[path], again[path]), (rule, path)
            assert path in differ or torch.equal(theirs[path], others[path]), (rule, path)
        for path in ("seen", "short", "quiet", "late", "some"):  # counted on from what they agreed on: the first rank's
            assert torch.equal(mine[path], one[path]), (rule, path)
        assert torch.equal(mine["begun"], one["begun"])
        assert torch.equal(mine["quietly"], one["quietly"])
        if rule == "mean":
            torch.testing.assert_close(mine["wave"], (one["wave"] + two["wave"]) / 2, rtol=0, atol=1e-12)
            torch.testing.assert_close(mine["mean"], (one["mean"] + two["mean"]) / 2, rtol=0, atol=1e-12)
        else:
            torch.testing.assert_close(mine["mean"], one["mean"], rtol=0, atol=1e-12)


@each_rank(2)
def test_tables_that_one_rank_has_are_sent_or_compared(tmp_path: Path) -> None:
    """By every transform that drives, again after a refusal, and after a load. Rank 0 has the values; the other's
    module was made without memory, and its table is what lay there."""
    torch.manual_seed(0)
    module = Counting()
    mesh = fsdp.local_mesh()
    if mesh.get_rank():
        module.table.fill_(3.0)
    params, model = fsdp.functionalize(module)
    step = T.forward_backward(model, loss_fn)

    def made(every: bool) -> fsdp.State:
        buffers = fsdp.buffers(module, every=every)
        return fsdp.shard(params, fsdp.Spec(mesh), fsdp.sgd(lr=0.1), buffers=buffers, src=0)

    def resumed(state: fsdp.State, x: torch.Tensor) -> Any:
        return T.apply(model)(fsdp.load(fsdp.save(state, tmp_path / "begun"), state.spec, fsdp.sgd(lr=0.1)), x)

    calls: list[Any] = [step, step, T.apply(model), T.per_sample_norms(model, loss_fn), resumed, step]
    said = "ranks have different buffers 'table', which is not persistent"
    for call in calls:
        refused((lambda: call(made(False), batch(0, 0)), said, "buffers=fsdp.buffers(module, every=True)"))  # noqa: B023
    state, loss = step(made(True), batch(0, 0))
    state, mean = fsdp.pmean(state, loss)
    torch.manual_seed(0)
    assert float(loss) == float(mean) == float(loss_fn(Counting(), batch(0, 0)).detach())


@pytest.mark.parametrize("how", ["in place", "data", "data ="])
def test_one_rank_keeps_what_a_forward_writes_into_flags(how: str) -> None:
    class Flagged(nn.Module):
        begun: torch.Tensor
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.register_buffer("begun", torch.tensor(False))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> Any:
            out = self.linear(x) + (0.0 if self.begun else 5.0)
            if how == "in place":
                self.begun.fill_(True)
                self.count.add_(1)
            elif how == "data":
                self.begun.data.fill_(True)
                self.count.data.add_(1)
            else:
                self.begun.data = torch.tensor(True)
                self.count.data = self.count + 1
            return out

    params, model = fsdp.functionalize(Flagged())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1), buffers=fsdp.buffers(model))
    step = T.forward_backward(model, lambda model, x: model(x).mean())
    for number in range(3):
        state, loss = step(state, torch.zeros(2, 2))
        assert (float(loss) > 2.5) is (number == 0)
        state = fsdp.step(state)
    assert bool(state.buffers["begun"])
    assert int(state.buffers["count"]) == 3
    assert not model.begun


def test_ranks_compare_the_bytes_that_a_table_has_wherever_these_lie() -> None:
    """Of a view that is copied for it the copy lives until it was read."""
    large = torch.arange(3 << 18, dtype=torch.float64).view(3, -1)
    for table in (large, large.t(), torch.complex(large, -large).conj(), large[:, ::3], large[:0]):
        want = hashlib.sha256(table.resolve_conj().contiguous().numpy().tobytes()).hexdigest()
        assert [_digest(table) for _ in range(3)] == [want] * 3
