"""Modules that recompute, and their parts: what a call makes of buffers and attributes, and what is lent to it."""

from __future__ import annotations

import gc
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.chains import mean_square
from support.late_lane import LateLane, late_lane
from support.tables import each

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._seams import torch_private
from functional_fsdp.transforms._remat.region import Product, _is_product

WIDTH = 32
KEPT = ("save", "offload")


@pytest.fixture(autouse=True)
def lane() -> Iterator[LateLane]:
    with late_lane() as found:
        yield found


def trained(
    make: Callable[[], nn.Module],
    change: Callable[[nn.Module], nn.Module],
    loss_fn: Callable[..., torch.Tensor] = mean_square,
    steps: int = 3,
    train: bool = True,
) -> list[torch.Tensor]:
    """Losses, gradients, buffers and weights of some steps of two microbatches."""
    torch.manual_seed(0)
    module = make().train(train)
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(debug=True))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2), buffers=fsdp.buffers(module, every=True))
    forward_backward = T.forward_backward(change(model).train(train), loss_fn)
    seen: list[torch.Tensor] = []
    for i in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))
        for part in (x, x + 1):
            state, loss = forward_backward(state, part, last_microbatch=part is not x)
            seen.append(loss)
        state = fsdp.finish_reductions(state)
        seen += [buffer.local.clone() for buffer in state.grads.values()]
        state = fsdp.step(state)
    return [*seen, *state.buffers.values(), *fsdp.full_params(state).values()]


def same(make: Callable[[], nn.Module], *fates: str | None, part: str = "part", pattern: str = "*", **how: Any) -> None:
    """Training has the same bits where modules recompute, without parts and with one of each fate."""
    right = trained(make, lambda m: m, **how)
    for fate in fates:
        kept: dict[str, Any] = {fate: (part,)} if fate else {}
        mine = trained(make, lambda m: T.remat(m, pattern, **kept), **how)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True)), fate


class Block(nn.Module):
    """`before` and `after` are computed again, `part` is saved or moved."""

    part: Any

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.part = nn.Linear(WIDTH, WIDTH) if part is None else part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(self.before(x).tanh())
        return self.after(self.use(y.sin())).tanh()

    def use(self, y: torch.Tensor) -> torch.Tensor:
        return y


def two(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(kind(), kind())


class Blocks(nn.Module):
    """Two blocks, which are given something besides."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(), kind()])


# ---------------------------------------------------------------- lists and dicts that a module is given


class Noting(nn.Linear):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        seen.append(y.mean().exp())
        return y


class Writes(Block):
    """Writes to a dict, has its part write to a list in it, which it is given besides, and reads both."""

    def __init__(self) -> None:
        super().__init__(Noting(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, notes: dict[str, Any], seen: Any = None) -> torch.Tensor:  # type: ignore[override]
        y = self.part(self.before(x).tanh(), seen)
        notes["all"] = notes["all"] * (1 + y.square().mean())
        return self.after(y * notes["seen"][-1] * notes["all"]).tanh() * len(notes["seen"])


class Written(Blocks):
    def __init__(self) -> None:
        super().__init__(Writes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        notes: dict[str, Any] = {"all": x.mean() + 1, "seen": [x.mean()]}
        for block in self.blocks:
            x = block(x, notes, seen=notes["seen"])
        out: torch.Tensor = x + sum(notes["seen"]) + notes["all"]
        return out


class Stacks(Block):
    """Puts something onto a stack, from which its caller takes it."""

    def forward(self, x: torch.Tensor, stack: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        y = self.part(self.before(x).tanh())
        stack.append(y)
        return self.after((y * len(stack)).sin()).tanh()


class Stacked(Blocks):
    stack: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__(Stacks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.stack)
        out = x * self.stack.pop() * self.stack.pop()
        assert not self.stack  # also after what was computed again before
        return out


class Outputs(Block):
    """Puts something into outputs as those of transformers, which let nobody take it out."""

    def forward(self, x: torch.Tensor, outputs: Any) -> torch.Tensor:  # type: ignore[override]
        y = self.part(self.before(x).tanh())
        y = y * (3 if outputs.attentions is None else outputs["attentions"])
        outputs["attentions"] = y.mean()
        return self.after((y * len(outputs)).sin()).tanh()


class Collected(Blocks):
    def __init__(self) -> None:
        super().__init__(Outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        outputs: Any = BaseModelOutput(last_hidden_state=x)
        for block in self.blocks:
            x = block(x, outputs)
        out: torch.Tensor = x * outputs["attentions"]
        return out


class Holds(Block):
    """Is given what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, notes: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        y = self.part(self.before(x).tanh())
        notes["sum"] = notes.get("sum", 0) + y.square().mean()
        return self.after((y * self.notes["sum"]).sin()).tanh()


class Held(nn.Module):
    def __init__(self, clears: bool) -> None:
        super().__init__()
        self.block, self.clears = Holds(), clears

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block.notes.clear()
        x = self.block(self.block(x, self.block.notes), self.block.notes)
        out: torch.Tensor = x * self.block.notes["sum"]
        if self.clears:
            self.block.notes.clear()
        return out


@pytest.mark.parametrize(
    "make",
    [Written, Stacked, Collected, partial(Held, False), partial(Held, True)],
    ids=["written", "stacked", "collected", "held", "held and cleared"],
)
def test_what_is_computed_again_finds_what_it_is_given_as_it_was(make: Callable[[], nn.Module]) -> None:
    same(make, None, "save", pattern="block" if isinstance(make, partial) else "blocks.*", steps=1)
    assert not Stacked.stack


class Reads(Noting):
    """Its caller writes to the list, it only reads it; or it writes, too."""

    writes = False

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x, seen if self.writes else [])
        return (y + sum(seen)).tanh() * (1 + len(seen))


class Read(nn.Module):
    def __init__(self, writes: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Reads(WIDTH, WIDTH) for _ in range(blocks)])
        for block in self.blocks:
            block.writes = writes  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
            seen.append(x.mean())
        out: torch.Tensor = x + sum(seen)
        return out


def slope(model: Any, x: torch.Tensor) -> torch.Tensor:
    _, along = torch.func.jvp(model, (x,), (torch.ones_like(x),))  # type: ignore[misc]
    found: torch.Tensor = along.square().mean()
    return found


def beside(model: Any, x: torch.Tensor) -> torch.Tensor:
    """In the jvp the model does not move."""
    out, along = torch.func.jvp(lambda t: model(x) * t, (x,), (torch.ones_like(x),))  # type: ignore[misc]
    found: torch.Tensor = (out * along).mean()
    return found


@pytest.mark.parametrize(("make", "loss_fn"), [(Read, slope), (partial(Read, True), beside), (Written, beside)])
def test_lists_and_dicts_in_a_jvp(make: Callable[[], nn.Module], loss_fn: Any) -> None:
    same(make, None, pattern="blocks.*", steps=1, loss_fn=loss_fn)


@pytest.mark.parametrize("make", [Written, partial(Read, True, 1)], ids=["with tensors", "empty"])
def test_what_is_written_within_a_jvp_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(fsdp.ScheduleError, match=r"remat: a module in a jvp writes to a (dict|list) .*Have it return"):
        trained(make, lambda m: T.remat(m, "blocks.*"), slope, steps=1)


# ---------------------------------------------------------------- buffers and attributes


class Average(nn.Linear):
    """An average of what it returns, and how often it was called, in buffers; the last output in an attribute."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.last: Any = None
        self.count = 0
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.5)
        self.calls = self.calls + 1
        self.last = {"out": y.exp()}
        self.count += 1
        self.seen.append(y.detach().mean())
        return y


class Averaged(Block):
    """Reads them between calls of the part."""

    def __init__(self) -> None:
        super().__init__(Average())

    def use(self, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (y + self.part.mean * self.part.calls).sin() * self.part.count + self.part.last["out"].cos()
        y = self.part(out).sin()
        y = y * self.part.mean.exp() + self.part.last["out"].tanh() * self.part.count
        return (y + self.part.seen[-1] * len(self.part.seen)).sin() * self.part.seen[0]


def test_what_is_computed_again_twice_finds_buffers_as_they_were() -> None:
    """A gradient of a gradient needs the forward's tensors two times."""

    class Counts(Block):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(WIDTH))

        def use(self, y: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (y + self.calls).sin()

    def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return dx.square().mean()

    found = []
    for change in (lambda m: m, lambda m: T.remat(m, "*"), lambda m: T.remat(m, "*", save=("part",))):
        torch.manual_seed(0)
        params, model = fsdp.functionalize(two(Counts))
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1), buffers=fsdp.buffers(model))
        forward_backward = T.forward_backward(change(model), penalty, second_order=True)
        for _ in range(2):
            state = fsdp.step(forward_backward(state, torch.ones(2, WIDTH))[0])
        found.append([*state.buffers.values(), *fsdp.full_params(state).values()])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


class Recurrent(Block):
    """Goes on from what its last call has left, and does something else every third time."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None
        self.turn = 0

    def use(self, y: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            y = y + self.state.sin()
        self.state = y.detach()
        self.turn += 1
        return y.exp() if self.turn % 3 else y.cos()


@pytest.mark.parametrize("numel", [WIDTH, WIDTH << 11])
def test_a_buffer_that_first_changes_in_a_later_call(numel: int) -> None:
    """A large one is not copied as long as it is not known to change; then that is an error, once."""

    class Masked(Block):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(numel, dtype=torch.int64))
            self.turn = 0

        def use(self, y: torch.Tensor) -> torch.Tensor:
            y = (y * self.mask[:WIDTH].clone()).sin()
            self.turn += 1
            if self.turn == 3:
                self.mask[::2] = 2
            return y

    if numel == WIDTH:
        same(lambda: two(Masked), None)
    else:
        with pytest.raises(fsdp.ScheduleError, match=r"a Masked changed its buffer 'mask' in place.* Call again"):
            same(lambda: two(Masked), None)


class Fills(Block):
    """Writes into a tensor that is an attribute, or lies in one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.total, self.caches, self.name = torch.zeros(WIDTH), [torch.zeros(WIDTH)], name

    def use(self, y: torch.Tensor) -> torch.Tensor:
        mine = self.total if self.name == "total" else self.caches[0]
        mine.add_(1)
        return y * mine.clone()


@pytest.mark.parametrize("name", ["total", "caches"])
def test_an_attribute_that_is_changed_in_place_is_an_error(name: str) -> None:
    with pytest.raises(fsdp.ScheduleError, match=rf"a Fills changed its attribute '{name}' in place.* Make it a buff"):
        same(lambda: two(partial(Fills, name)), None)


@pytest.mark.parametrize("name", ["generator", "generators"])
def test_numbers_of_a_generator_that_a_module_holds(name: str) -> None:
    class Holds(Block):
        def use(self, y: torch.Tensor) -> torch.Tensor:
            held = vars(self)[name]
            return y * (torch.rand(y.shape, generator=held if name == "generator" else held["here"][0]) < 0.7)

    def given(change: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
        def whole(model: nn.Module) -> nn.Module:
            changed = change(model)
            for i, part in enumerate(changed.children()):
                held = torch.Generator().manual_seed(i)
                vars(part)[name] = held if name == "generator" else {"here": [held]}
            return changed

        return whole

    right = trained(lambda: two(Holds), given(lambda m: m))
    assert all(map(torch.equal, right, trained(lambda: two(Holds), given(lambda m: T.remat(m, "*")))))


def test_what_only_training_does_is_seen_after_an_evaluation() -> None:
    class Trains(Recurrent):
        def use(self, y: torch.Tensor) -> torch.Tensor:
            return super().use(y * random.random()) if self.training else y

    def changed(change: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        random.seed(0)
        torch.manual_seed(0)
        params, model = fsdp.functionalize(two(Trains))
        model = change(model).eval()
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
        forward_backward, x = T.forward_backward(model, mean_square), torch.ones(2, WIDTH)
        state = fsdp.step(forward_backward(state, x)[0])
        model.train()
        for _ in range(2):
            state = fsdp.step(forward_backward(state, x)[0])
        return [*fsdp.full_params(state).values()]

    assert all(map(torch.equal, changed(lambda m: m), changed(lambda m: T.remat(m, "*"))))


# ---------------------------------------------------------------- calls


def test_a_part_that_is_run_again_takes_the_kernels_of_its_forward() -> None:
    """torch's attention has a fast path without gradients, whose bits are others."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attend(x, x, x, need_weights=False)[0]

    class InPlace(Block):
        def __init__(self) -> None:
            super().__init__(Attends())

        def use(self, y: torch.Tensor) -> torch.Tensor:
            return y

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.part(self.before(x).tanh()[None])
            y += 1
            return self.after(y.sin()).tanh()[0]

    same(lambda: two(InPlace), *KEPT, train=False)


def test_forwards_before_one_backward_and_a_part_that_is_shared() -> None:
    class Twice(Block):
        def use(self, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.part(y).exp(), 0.2)

    def shared() -> nn.Module:
        first, second = Twice(), Twice()
        second.part = first.part
        return nn.Sequential(first, second)

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = model(x), model(x.cos())
        return (first * second.sin()).square().mean() + model[1](first).mean()

    same(shared, *KEPT, loss_fn=loss_fn)


def test_a_call_without_gradients_before_the_backward() -> None:
    """A teacher's forward between forward and backward, and parts under `no_grad`."""

    class Teacher(Block):
        def use(self, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.part(y)
            return y * target.sin()

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        with torch.no_grad():
            target = model(x + 1)
        return (out - target).square().mean()

    same(lambda: two(Teacher), *KEPT, loss_fn=loss_fn)


# ---------------------------------------------------------------- weights


def test_weights_that_are_whole_are_not_moved(lane: LateLane) -> None:
    """Those that `bind` has given a model by hand are leaves, or views of one."""
    params, model = fsdp.functionalize(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    moved = T.offload(model, "*")
    x = torch.randn(8, WIDTH)
    out, pullback = T.vjp(lambda w, x: fsdp.bind(moved, w)(x), params, x)
    assert lane.copies == 3  # of the first layer its input, tanh's output, which is the third's input
    dw, dx = pullback(params, out)
    right, other = T.vjp(lambda w, x: fsdp.bind(model, w)(x), params, x)[1](params, out)
    assert torch.equal(dx, other)
    assert all(torch.equal(dw[key], right[key]) for key in right)


# ---------------------------------------------------------------- errors


def test_what_is_never_called_or_named_twice() -> None:
    _, model = fsdp.functionalize(nn.ModuleDict({"blocks": nn.ModuleList([Block()])}))
    for change in (T.remat, T.offload):
        with pytest.raises(fsdp.SpecError, match=r"'blocks' is a ModuleList, which is never called.*'blocks\.\*'"):
            change(model, "blocks")
    with pytest.raises(fsdp.SpecError, match=r"remat: the module 'blocks\.0' recomputes already"):
        T.remat(T.remat(model, "blocks.*"), "blocks.0")
    with pytest.raises(fsdp.SpecError, match=r"offload: the module 'blocks\.0\.part' is saved or moved already"):
        T.offload(T.remat(model, "blocks.*", save=("part",)), "blocks.*.part")
    with pytest.raises(fsdp.SpecError, match=r"remat\(save=\): the module 'blocks\.0\.part' is saved or moved already"):
        T.remat(T.offload(model, "blocks.*.part"), "blocks.*", save=("part",))


# ---------------------------------------------------------------- what others set, and what goes on in containers


class Told(nn.Module):
    """Sets attributes of its block around the block's call, as models do to hand something on; in turn it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Listens()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block.scale, self.block.training = x.detach().mean() + 1, False
        out: torch.Tensor = self.block(x)
        self.block.scale, self.block.training = None, self.training
        return out


class Listens(Block):
    scale: torch.Tensor | None = None

    def use(self, y: torch.Tensor) -> torch.Tensor:
        assert self.scale is not None
        return F.dropout(y * self.scale, 0.5, self.training) * self.scale


class Collects(Block):
    """Counts in containers of every kind, within each other; from the second call on in further ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = {"lists": [[0.0]], "pair": ([1.0], {2})}
        self.queue, self.words = deque([1.0], maxlen=2), Counter("ab")
        self.lists: defaultdict[str, list[float]] = defaultdict(list)
        self.late: list[float] = []
        self.turns = OrderedDict(turn=0)

    def use(self, y: torch.Tensor) -> torch.Tensor:
        self.first["lists"][0][0] += 1
        self.first["pair"][0].append(2.0)
        self.first["pair"][1].add(len(self.first["pair"][1]))
        self.queue.append(self.queue[-1] + 1)
        self.words["a"] += 1
        self.lists[str(self.turns["turn"])].append(1.0)
        self.turns["turn"] += 1
        if self.turns["turn"] > 1:
            self.late.append(0.5)
        counted = self.first["lists"][0][0] + sum(self.queue) + self.words["a"] + len(self.lists) + sum(self.late)
        return (y * (counted + len(self.first["pair"][0]) + len(self.first["pair"][1]))).sin()


class Tires(Block):
    """Goes on from the third call on, in a number and in a large list."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.rest, self.said = 0, 0.0, [0] * 100

    def use(self, y: torch.Tensor) -> torch.Tensor:
        self.said[0] = self.turn  # known from the first call on
        self.turn += 1
        if self.turn > 2:
            self.rest += 1.0
        return (y * (self.rest + self.said[0])).cos()


@pytest.mark.parametrize(
    ("kind", "fates", "pattern"),
    [
        (Averaged, (None, *KEPT), "*"),
        (Recurrent, (None, *KEPT), "*"),
        (Told, (None, *KEPT), "*.block"),
        (Collects, (None, *KEPT), "*"),
        (Tires, (None,), "*"),
    ],
)
def test_what_a_call_makes_of_buffers_and_attributes(kind: Any, fates: tuple[str | None, ...], pattern: str) -> None:
    same(lambda: two(kind), *fates, pattern=pattern)


# ---------------------------------------------------------------- modules that keep their weights in a list


class Lists(nn.Module):
    """A block around a module of torch's that has its weights in a list of its own, too."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(WIDTH), kind(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rnn(self.norm(x))[0]


@pytest.mark.parametrize(("kind", "pattern"), each((nn.GRU, nn.LSTM, nn.RNN), ("*", "*.rnn")))
def test_recurrent_modules_recompute(kind: type[nn.RNNBase], pattern: str) -> None:
    same(lambda: two(partial(Lists, kind)), None, pattern=pattern, steps=2)


def test_recurrent_modules_are_parts() -> None:
    same(lambda: two(partial(Lists, nn.GRU)), *KEPT, part="rnn", steps=2)


def test_recurrent_modules_recompute_by_hand() -> None:
    module, x = Lists(nn.GRU), torch.randn(3, 2, WIDTH)
    params, model = fsdp.functionalize(module)
    w = {path: p.detach() for path, p in params.items()}
    out, pullback = T.vjp(T.remat(lambda w, x: fsdp.bind(model, w)(x)), w, x)
    dw, _ = pullback(w, torch.ones_like(out))
    want = torch.autograd.grad(module(x).sum(), [*module.parameters()])
    assert all(map(torch.equal, dw.values(), want))


class Mlp(nn.Module):
    """Products with something cheap between them."""

    def __init__(self, dropout: float = 0.0, in_place: str = "") -> None:
        super().__init__()
        self.norm, self.dropout, self.in_place = nn.RMSNorm(WIDTH), dropout, in_place
        self.held: Any = None
        self.up, self.mid, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.up(self.norm(x))
        q, k = (both.mul_(2) if self.in_place == "inside" else both).chunk(2, -1)
        q, k = q[None, None], k[None, None]
        y = F.scaled_dot_product_attention(q, k, k, dropout_p=self.dropout)[0, 0]
        y = F.dropout(self.mid(y), self.dropout).tanh()
        if self.in_place == "out":
            with torch.no_grad():  # out= takes nothing that is recorded
                scale = x @ self.mid.weight
                torch.mul(scale, 2, out=scale)
                torch.mm(x, self.mid.weight, out=(other := torch.empty_like(x)))
            y = y * scale * other
        if self.in_place == "beside":
            with torch.no_grad():
                self.held = x @ self.mid.weight  # not returned, and written to by who has the module
        out: torch.Tensor = self.down(y)
        return out


class Outer(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.mlp, self.after, self.in_place = Mlp(**how), nn.Linear(WIDTH, WIDTH), how.get("in_place", "")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x.sin())
        if self.in_place == "outside":
            y.mul_(2)
        if self.in_place == "beside":
            y = y * self.mlp.held.mul_(3)
        return x + self.after(y.tanh())


class Products(torch_private.TorchDispatchMode):
    """Counts products of forwards and recomputations, and what is alive of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("named", "dropout", "in_place"),
    [
        ("mlp", 0.0, ""),
        ("mlp.up", 0.0, ""),
        ("*", 0.5, ""),
        ("*", 0.0, "inside"),
        ("mlp", 0.0, "outside"),
        ("mlp", 0.0, "out"),
        ("mlp", 0.0, "beside"),
    ],
)
def test_products_that_stay_change_no_bit(named: str, dropout: float, in_place: str) -> None:
    same(lambda: nn.Sequential(Outer(dropout=dropout, in_place=in_place)), "products", part=named)


def test_products_do_not_run_again_and_what_is_between_them_does() -> None:
    ran = {}
    for name, change in {
        "plain": lambda m: m,
        "remat": lambda m: T.remat(m, "*"),
        "products": lambda m: T.remat(m, "*", products=("mlp", "after")),
    }.items():
        with Products() as counted:
            trained(lambda: nn.Sequential(Outer()), change, steps=1)
        ran[name] = counted.ran
    assert ran["products"]["addmm"] == ran["plain"]["addmm"] < ran["remat"]["addmm"]
    assert ran["products"]["tanh"] == ran["remat"]["tanh"] > ran["plain"]["tanh"]


def test_what_products_keep_is_their_outputs() -> None:
    state, model = fsdp.init(lambda: nn.Sequential(Outer(), Outer()), fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    x = torch.randn(4096, WIDTH)

    def peak(model: nn.Module) -> int:
        return T.step_memory(T.forward_backward(model, mean_square), state, x).peak

    again = peak(T.remat(model, "*"))
    kept = peak(T.remat(model, "*", products=("mlp.mid", "after")))
    each = 4096 * WIDTH * 4
    assert 0 < kept - again <= 2 * each  # of `mid` in each; after `after` nothing is needed
    assert kept < peak(T.remat(model, "*", products=("mlp",))) < peak(model)


def test_products_within_what_is_saved_are_refused() -> None:
    _, model = fsdp.functionalize(nn.Sequential(Outer()))
    with pytest.raises(fsdp.SpecError, match=r"'mlp' is saved and 'mlp.up' is one whose products are kept"):
        T.remat(model, "*", save=("mlp",), products=("mlp.up",))
    with pytest.raises(fsdp.SpecError, match=r"remat\(products=\): the module '0.mlp' is saved or moved already"):
        T.remat(T.offload(model, "*.mlp"), "*", products=("mlp",))


def test_an_attention_that_drops_is_run_again() -> None:
    attention, place = torch.ops.aten._scaled_dot_product_flash_attention.default, (None,) * 3
    assert _is_product(attention, place, {})
    assert _is_product(attention, (*place, 0.0), {})
    assert not _is_product(attention, (*place, 0.5), {})
    assert not _is_product(attention, place, {"dropout_p": 0.5})
    assert not _is_product(torch.ops.aten.native_dropout.default, place, {})


def test_products_are_gone_after_the_backward_without_the_garbage_collector() -> None:
    state, model = fsdp.init(lambda: nn.Sequential(Outer()), fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    forward_backward = T.forward_backward(T.remat(model, "*", products=("mlp",)), mean_square)
    gc.collect()
    gc.disable()
    try:
        before = {id(one) for one in gc.get_objects() if isinstance(one, Product)}
        state, _ = forward_backward(state, torch.randn(8, WIDTH))
        assert not [one for one in gc.get_objects() if isinstance(one, Product) and id(one) not in before]
    finally:
        gc.enable()
    fsdp.step(state)
