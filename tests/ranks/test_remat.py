"""What a backward needs of a forward: kept, computed again, or moved to the host's memory. On the CPU the same path
copies from memory to memory."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.attention import CALLS, CHANGES, DEPTH, Blocks, calls_of
from support.chains import mean_square
from support.driven import start
from support.presets import PRESETS
from support.problems import mesh_and_placement
from support.ranks import each_rank, launch
from support.tables import marked
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import set_checkpoint_early_stop

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T
from functional_fsdp._seams import torch_private

WIDTH, ROWS = 32, (2, 16)
SIZE = ROWS[0] * ROWS[1] * WIDTH * 4  # bytes of what goes from block to block
Tree = dict[str, torch.Tensor]


def made(preset: str = "zero3", depth: int = DEPTH, debug: bool = True) -> tuple[fsdp.State, nn.Module]:
    torch.manual_seed(0)
    module = Blocks(WIDTH, depth)
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(mesh, placement, schedule=fsdp.Schedule(debug=debug))
    return fsdp.shard(params, spec, fsdp.adamw(lr=1e-2), buffers=fsdp.buffers(module)), model


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(*ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


BACKEND = "aot_eager"
#: what is compiled: nothing, the parts of what recomputes, unit modules, the whole step
WAYS = ("eager", "parts", "units", "whole")


def trained(name: str, preset: str, way: str = "eager") -> tuple[list[torch.Tensor], Tree, tuple[int, ...], list[str]]:
    """Losses and gradients of two steps of two microbatches, then the weights; how often blocks and parts ran, and the
    order in which units are used."""
    torch._dynamo.reset()
    state, model = made(preset, 2 if way != "eager" else DEPTH, debug=way != "whole")
    if way == "parts":
        model = T.compile_units(model, "blocks.*.attn", "blocks.*.mlp", backend=BACKEND)
    changed = CHANGES[name][0](model) if name else model
    forward_backward = T.forward_backward(changed, mean_square, compile=way == "units" and {"backend": BACKEND})

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, list[torch.Tensor]]:
        state, loss = forward_backward(state, x, last_microbatch=False)
        state, other = forward_backward(state, x + 1)
        state = fsdp.finish_reductions(state)
        seen = [loss, other, *(buffer.local.clone() for buffer in state.grads.values())]
        return fsdp.step(state), seen

    step = T.compile(train_step, BACKEND) if way == "whole" else train_step
    seen: list[torch.Tensor] = []
    calls_of()
    for i in range(2):
        state, found = step(state, batch(i, dist.get_rank()))
        seen += found
    return seen, fsdp.full_params(state), calls_of(), [use.unit for use in state.cursor.plan.uses]


def rows_of_law() -> list[tuple[str, str, int, str]]:
    """What the compiler keeps is its own affair, so in what is compiled nothing can be moved."""
    moves = [name for name in CHANGES if "off" in name or name in ("both", "deeper")]
    never = {"parts": ["deeper"], "whole": moves}  # parts of parts
    return [
        (name, preset, ranks, way)
        for name, preset, ranks, way in itertools.product(CHANGES, PRESETS, (1, 2, 3, 4), WAYS)
        if name not in never.get(way, ())
    ]


ONCE = [
    *((name, "zero3", 1, "eager") for name in CHANGES),
    ("both", "zero3", 2, "eager"),
    ("offload attn", "ddp", 2, "eager"),
    ("both", "zero3", 1, "parts"),
    ("deeper", "zero3", 1, "units"),
]


@cache
def plainly(preset: str, ranks: int, way: str, apart: bool) -> list[Any]:
    """The model that keeps everything."""
    return launch(trained, ("", preset, way), nprocs=ranks, processes=apart)


@pytest.mark.parametrize(("name", "preset", "ranks", "way"), marked(rows_of_law(), ONCE))
def test_bits_are_those_of_a_model_that_keeps_everything(name: str, preset: str, ranks: int, way: str) -> None:
    """Released weights are NaN, so nothing that is lent was kept; dropout is on, in parts and between them."""
    apart = ranks > 1 or way != "eager"
    other = launch(trained, (name, preset, way), nprocs=ranks, processes=apart)  # which count calls in a global
    for (right, weights, _, uses), (seen, mine, calls, order) in zip(
        plainly(preset, ranks, way, apart), other, strict=True
    ):
        assert len(seen) == len(right)
        assert all(map(torch.equal, seen, right))
        assert all(torch.equal(mine[path], weights[path]) for path in weights)
        assert not torch.equal(right[0], right[1])
        if way == "eager":
            assert calls == tuple(4 * DEPTH * n for n in CHANGES[name][1])
            assert order == uses  # what recomputes shares the backward's gather


# ---------------------------------------------------------------- bytes


def noting(model: Any, kept: list[list[tuple[StorageWeakRef, int]]]) -> None:
    """Have each MLP of a model note its input, and what goes into its dropout and its second layer."""

    class Noted(type(model.blocks[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.up(x)
            wide = F.gelu(up)
            kept.append([(StorageWeakRef(t.untyped_storage()), t.nbytes) for t in (x, up, wide)])
            return self.down(wide)

    for block in model.blocks:
        block.mlp.__class__ = Noted


def alive(kept: list[list[tuple[StorageWeakRef, int]]]) -> list[int]:
    return [sum(n for ref, n in some if not ref.expired()) for some in kept]


@pytest.mark.parametrize(
    ("change", "there", "moved"),
    [
        (lambda m: m, [9, 9, 9, 9], 0),
        (lambda m: T.remat(m, "blocks.*"), [0, 0, 0, 0], 0),
        (lambda m: T.remat(m, "blocks.*", save=("mlp",)), [9, 9, 9, 9], 0),
        (lambda m: T.remat(m, "blocks.*", offload=("mlp",)), [0, 0, 0, 9], 4 * 10),  # and the output, for tanh
        (lambda m: T.offload(m, "blocks.*.mlp"), [0, 0, 0, 9], 4 * 9),
    ],
    ids=["plain", "remat", "save", "offload", "only offload"],
)
def test_bytes_that_are_kept(change: Callable[[Any], Any], there: list[int], moved: int) -> None:
    """Of each block's MLP after the forward, in multiples of the block's input; and bytes in the host's memory."""
    state, model = made(depth=4)
    kept: list[list[tuple[StorageWeakRef, int]]] = []
    noting(model, kept)
    found: list[list[int]] = []

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        kept.clear()
        out = model(x)
        found.append([n // SIZE for n in alive(kept)])
        return out.square().mean()

    forward_backward = T.forward_backward(change(model), loss_fn)
    made_at: list[int] = []
    part = forward_backward.driver.model.blocks[0].mlp  # type: ignore[union-attr, index]
    for i in range(3):
        state, _ = forward_backward(state, batch(i))
        state = fsdp.step(state)
        if moved:
            buffers = vars(part)["_part"].owner.buffers
            made_at.append(buffers.made)
            assert buffers.nbytes == moved * SIZE
            assert len(buffers.free) == buffers.made  # all are given back
    assert found == [there] * 3
    assert not any(alive(kept))  # nothing lives on
    assert len({*made_at}) <= 1  # none is made in a steady step


def test_an_output_is_kept_only_if_something_after_it_is_computed_again() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.up(self.norm(x))
            outs.append(StorageWeakRef(out.untyped_storage()))
            return x + out  # which keeps nothing

    outs: list[StorageWeakRef] = []
    state, model = start(nn.Sequential(Ends(), Ends()))

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        assert all(ref.expired() for ref in outs)
        return out.square().mean()

    T.forward_backward(T.remat(model, "*", save=("up",)), loss_fn)(state, batch(0))
    assert len(outs) == 2  # what is computed again ends with the norm


def test_views_of_a_storage_are_moved_once_and_come_back_as_they_were() -> None:
    seen: list[Any] = []

    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            wide = x * 2
            ctx.save_for_backward(wide[:, ::2], wide.t(), wide[1:], wide)
            seen.append([(t.clone(), t.stride(), t.storage_offset()) for t in ctx.to_save])
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append([(t, t.stride(), t.storage_offset()) for t in ctx.saved_tensors])
            return grad

    stage = T.offload(lambda w, x: Views.apply(x) * w["a"])
    w, x = {"a": torch.ones(())}, torch.randn(16, 32)
    out, pullback = T.vjp(stage, w, x)
    pullback(w, out)
    before, after = seen
    for (t, *place), (u, *there) in zip(before, after, strict=True):
        assert torch.equal(t, u)
        assert place == there
    assert len({u.untyped_storage()._cdata for u, *_ in after}) == 1


def test_what_was_moved_comes_back_one_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = extend.copy_lane(torch.device("cpu"))
    begin = lane.copy
    homes: set[int] = set()
    events: list[Any] = []

    def noted(pairs: Any, made_on: Any = ()) -> Any:
        pairs = [*pairs]
        goes = not any(source.data_ptr() in homes for _, source in pairs)
        homes.update(into.data_ptr() for into, _ in pairs if goes)
        events.append("out" if goes else "back")
        return begin(pairs, made_on)

    state, made_of = made(depth=4)
    model: Any = made_of

    class Named(type(model.blocks[0])):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            events.append(self.name)
            return super().forward(x)

    for i, one in enumerate(model.blocks):
        one.__class__, one.name = Named, i
    forward_backward = T.forward_backward(T.remat(model, "blocks.*", offload=("mlp",)), mean_square)
    monkeypatch.setattr(lane, "copy", noted)
    for step in range(2):
        events.clear()
        homes.clear()
        state, _ = forward_backward(state, batch(step))
        state = fsdp.step(state)
        out = ["out", "out"]  # what the MLP saves, and its output
        assert events == [0, *out, 1, *out, 2, *out, 3, *out, "back", 3, "back", 2, "back", 1, 0]  # the last never left


def test_weights_buffers_and_inputs_of_a_region_are_not_moved() -> None:
    """What is moved of a linear layer with a buffer: its own input, which the region does not have."""
    state, model = made(depth=2)
    changed = T.remat(model, "blocks.*", offload=("mlp.up",))
    forward_backward = T.forward_backward(changed, mean_square)
    state, _ = forward_backward(state, batch(0))
    buffers = vars(forward_backward.driver.model.blocks[0].mlp.up)["_part"].owner.buffers  # type: ignore[union-attr, index]
    assert buffers.nbytes == 2 * SIZE * (1 + 4)  # of each block: the input, and the output, which is computed with


# ---------------------------------------------------------------- by hand


def attention(w: Tree, h: torch.Tensor) -> torch.Tensor:
    CALLS["attn"] += 1
    return F.dropout((h @ w["attn.qkv.weight"].t()).tanh(), 0.2)[..., :WIDTH]


def mlp(w: Tree, h: torch.Tensor) -> torch.Tensor:
    CALLS["mlp"] += 1
    return F.dropout((h @ w["mlp.up.weight"].t()).relu(), 0.2) @ w["mlp.down.weight"].t()


def block(attention: Any, mlp: Any, w: Tree, h: torch.Tensor) -> torch.Tensor:
    CALLS["block"] += 1
    h = F.dropout(h + attention(w, h), 0.1)
    return h + F.dropout(mlp(w, h), 0.1).sigmoid()


def by_hand(stage: Any) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    state, _ = made()
    seen = []
    torch.manual_seed(dist.get_rank())
    calls_of()
    for step in range(2):
        h, pullbacks = batch(step, dist.get_rank()), {}
        units = [f"blocks.{i}" for i in range(DEPTH)]
        for unit in units:
            state, w = fsdp.unshard(state, unit)
            h, pullbacks[unit] = T.vjp(stage, w, h)
            state = fsdp.release(state, unit)
        dh = h
        for unit in reversed(units):
            state, w = fsdp.unshard(state, unit)
            dw, dh = pullbacks.pop(unit)(w, dh)
            state = fsdp.reduce(state, dw, unit)
            state = fsdp.release(state, unit)
        state = fsdp.finish_reductions(state)
        seen += [h, dh, *(buffer.local.clone() for buffer in state.grads.values())]
        state = fsdp.step(state)
    return seen, calls_of()


@each_rank(2, processes=True)
def test_stages_by_hand() -> None:
    right, _ = by_hand(partial(block, attention, mlp))
    for stage, calls in (
        (T.remat(partial(block, attention, mlp)), (2, 2, 2)),
        (T.remat(partial(block, T.saved(attention), T.offload(mlp))), (2, 1, 1)),
        (T.offload(partial(block, attention, T.saved(mlp))), (1, 1, 1)),
    ):
        seen, found = by_hand(stage)
        assert len(seen) == len(right)
        assert all(map(torch.equal, seen, right)), calls
        assert found == tuple(2 * DEPTH * n for n in calls)


# ---------------------------------------------------------------- around it


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(x)
        y += x
        return self.down(y.tanh())


@pytest.mark.parametrize("fate", ["save", "offload"])
def test_an_output_that_others_change_in_place(fate: str) -> None:
    runs: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return super().forward(x)

    found = []
    parts: dict[str, Any] = {fate: ("up",)}
    changes: list[Callable[[Any], Any]] = [lambda m: m, lambda m: T.remat(m, "*", **parts)]
    for change in changes:
        torch.manual_seed(0)
        module = nn.Sequential(InPlace(), InPlace())
        for part in module:
            part.up.__class__ = Counted
        state, model = start(module)
        forward_backward = T.forward_backward(change(model), mean_square)
        counts = []
        for i in range(3):
            runs.clear()
            state, _ = forward_backward(state, batch(i))
            state = fsdp.step(state)
            counts.append(len(runs))
        found.append((fsdp.full_params(state), counts))
    (right, plain), (mine, again) = found
    assert all(torch.equal(mine[path], right[path]) for path in right)
    assert (plain, again) == ([2, 2, 2], [4, 2, 2])  # a copy is kept, once it is known


def test_what_is_saved_and_changed_in_place_is_an_error() -> None:
    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x).tanh()  # keeps its output
            y += 1
            return y

    state, model = start(nn.Sequential(Spoils()))
    with pytest.raises(fsdp.ScheduleError, match="changed in place after it was kept"):
        T.forward_backward(T.offload(model, "0"), mean_square)(state, batch(0))


def test_a_forward_without_its_backward_gives_buffers_back() -> None:
    state, model = made(depth=2)
    changed = T.remat(model, "blocks.*", offload=("mlp",))

    class Stopped(Exception):
        pass

    stops = [True]

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = mean_square(model, x)
        if stops[0]:
            raise Stopped
        return loss

    forward_backward = T.forward_backward(changed, loss_fn)
    for _ in range(2):
        with pytest.raises(Stopped):
            forward_backward(state, batch(0))
    buffers = vars(forward_backward.driver.model.blocks[0].mlp)["_part"].owner.buffers  # type: ignore[union-attr, index]
    assert len(buffers.free) == buffers.made > 0
    stops.clear()
    stops.append(False)
    state, _ = forward_backward(state, batch(0))
    dead = weakref.ref(buffers)
    assert len(buffers.free) == buffers.made
    del forward_backward, buffers
    gc.collect()
    assert dead() is None


@pytest.mark.parametrize("fate", ["save", "offload"])
def test_after_an_error_in_a_part_tensors_are_saved_as_before(fate: str) -> None:
    state, model = made(depth=2)
    parts: dict[str, Any] = {fate: ("mlp",)}
    fails = [True]

    class Fails(type(model.blocks[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if fails[0]:
                raise ValueError("bad data")
            return super().forward(x)

    model.blocks[1].mlp.__class__ = Fails  # type: ignore[index, union-attr]
    forward_backward = T.forward_backward(T.remat(model, "blocks.*", **parts), mean_square)
    with pytest.raises(ValueError, match="bad data"):
        forward_backward(state, batch(0))
    assert torch_private.top_saved_hooks() is None
    fails[0] = False
    _, loss = forward_backward(state, batch(0))
    _, right = T.forward_backward(model, mean_square)(state, batch(0))
    assert torch.equal(loss, right)


def test_a_recomputation_that_goes_on_to_its_end_runs_a_part_whose_output_was_let_go() -> None:
    runs: list[int] = []

    class Ends(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return x + super().forward(x.tanh())

    found = []
    for stops in (True, False):
        torch.manual_seed(0)
        state, model = start(nn.Sequential(nn.Sequential(nn.LayerNorm(WIDTH), Ends(WIDTH, WIDTH))))
        runs.clear()
        with set_checkpoint_early_stop(stops):
            state, _ = T.forward_backward(T.remat(model, "0", save=("1",)), mean_square)(state, batch(0))
        found.append((fsdp.full_params(fsdp.step(state)), len(runs)))
    (right, once), (mine, twice) = found
    assert all(torch.equal(mine[path], right[path]) for path in right)
    assert (once, twice) == (1, 2)


def test_evaluation_keeps_and_moves_nothing() -> None:
    state, model = made(depth=2)
    changed = T.remat(model, "blocks.*", save=("attn",), offload=("mlp",))
    torch.manual_seed(0)
    state, out = T.apply(changed)(state, batch(0))
    state, right = T.apply(model)(state, batch(0))
    assert torch.equal(out, right)


def test_a_second_gradient() -> None:
    """A penalty: saved parts are differentiated twice; what would be moved is refused, and whole weights with it."""
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    state, model = start(nn.ModuleDict({"a": parts, "b": copy.deepcopy(parts)}))

    def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(model["b"](model["a"](x)).sum(), x, create_graph=True)
        return dx.square().mean()

    losses, found = [], []
    for one in (model, T.remat(model, "a", "b", save=("2",))):
        after, loss = T.forward_backward(one, penalty, second_order=True)(state, batch(0))
        losses.append(loss)
        found.append([buffer.local.clone() for buffer in fsdp.finish_reductions(after).grads.values()])
    assert torch.equal(*losses)
    assert all(map(torch.equal, *found))
    for one in (T.remat(model, "a", offload=("2",)), T.offload(model, "a.2")):
        with pytest.raises(fsdp.SpecError, match=r"'a\.2' keeps would be moved"):
            T.forward_backward(one, penalty, second_order=True)


# ---------------------------------------------------------------- compiled code


def test_in_compiled_code_nothing_is_moved() -> None:
    with pytest.raises(Exception, match=r"offload: compiled code .* moves nothing"):
        launch(trained, ("both", "zero3", "whole"), nprocs=1, processes=True)


@each_rank(1, processes=True)
def test_units_recompute_around_their_compiled_code_which_is_one_for_all() -> None:
    """In a process of its own: after some tests torch finds no code in its cache."""
    made_of, ran = list[Any](), list[Any]()

    def boxed(graph: Any, inputs: Any, log: Any = None) -> Any:
        def call(args: Any) -> Any:
            if log is not None:
                log.append(graph)
            return torch.fx.Interpreter(graph).boxed_run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def counts(graph: Any, inputs: Any) -> Any:
        made_of.append(graph)
        return boxed(graph, inputs, ran)

    backend = torch_private.dynamo().backends.common.aot_autograd(fw_compiler=counts, bw_compiler=boxed)
    state, model = made(depth=4)
    changed = T.remat(model, "blocks.1", "blocks.2")
    forward_backward = T.forward_backward(changed, mean_square, compile={"backend": backend})
    for step in range(2):
        ran.clear()
        state, _ = forward_backward(state, batch(step))
        state = fsdp.step(state)
        assert len(ran) == 4 + 2
    assert len(made_of) == 2  # the first block's input has no gradient; the others share one


# ---------------------------------------------------------------- errors


def test_what_cannot_be_is_refused() -> None:
    _, model = fsdp.functionalize(Blocks(WIDTH))
    stage: Any = torch.tanh
    with pytest.raises(fsdp.SpecError, match=r"remat\(save=\) in 'blocks\.0': the pattern 'attention' matches no"):
        T.remat(model, "blocks.*", save=("attention",))
    with pytest.raises(fsdp.SpecError, match=r"'mlp\.up' is saved and 'mlp' is moved"):
        T.remat(model, "blocks.*", save=("mlp.up",), offload=("mlp",))
    with pytest.raises(fsdp.SpecError, match=r"remat\(save='attn'\): expected several patterns, as save=\('attn',\)"):
        T.remat(model, "blocks.*", save="attn")
    with pytest.raises(fsdp.SpecError, match=r"wrap what is not to run again: T\.saved"):
        T.remat(stage, save=("attn",))
    with pytest.raises(fsdp.SpecError, match=r"saved: this is a module"):
        T.saved(nn.Linear(2, 2))
    with pytest.raises(fsdp.SpecError, match=r"offload\(model\): name the modules"):
        T.offload(model)
    with pytest.raises(fsdp.SpecError, match="are paths in a model, and this is a function"):
        T.offload(stage, "blocks.*")
    with pytest.raises(fsdp.ScheduleError, match=r"torch\.func's transforms .* forbid saved-tensor hooks"):
        torch.func.grad(lambda x: T.offload(stage)(x).sum())(torch.ones(3))
    x = torch.ones(3)
    torch.testing.assert_close(torch.func.grad(lambda x: T.saved(torch.tanh)(x).sum())(x), 1 - x.tanh() ** 2)
