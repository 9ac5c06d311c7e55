"""Compiled units: one compilation for all that are alike, the eager numbers, and no silence where it is eager."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.driven import refused
from support.models import CASES, VOCABULARY, batch_of, hf, own_loss
from support.problems import mesh_and_placement, net
from support.ranks import each_rank
from support.scenario import SGD, Scenario, alike, apart, case, run
from support.tables import FULL, marked
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

Tree = dict[str, torch.Tensor]
RANKS = 2 if FULL else 1  # each compiles the same


def start(model: nn.Module, preset: str = "zero3", **settings: Any) -> tuple[fsdp.State, nn.Module]:
    """Released bytes are NaN: a backward that does not read what was gathered again shows."""
    mesh, placement = mesh_and_placement(preset)
    params, skeleton = fsdp.functionalize(model)
    spec = fsdp.Spec(mesh, placement, schedule=fsdp.Schedule(debug=True), **settings)
    return fsdp.shard(params, spec, fsdp.adamw(lr=1e-2, weight_decay=0.1), buffers=fsdp.buffers(model)), skeleton


def counting(backend: str = "aot_eager") -> Any:
    """A backend that counts graphs in `frame_count`."""
    return CompileCounterWithBackend(backend)


# ---------------------------------------------------------------- driven


UNITS = Scenario(model=lambda: net(torch.float32), spec={"schedule": fsdp.Schedule(debug=True)}, optimizer=SGD, micro=2)
AOT = {"backend": "aot_eager"}


def beside_eager(one: Scenario, eager: Scenario, counter: Any, count: int, within: float) -> None:
    """Losses, gradients and weights, after so many graphs were made."""
    alike(run(one), run(eager), within)
    assert counter.frame_count == count


BACKENDS = [("aot_eager", "zero2"), ("inductor", "zero3")]  # Inductor's numbers are beside eager's below, too


@pytest.mark.parametrize(("backend", "preset"), marked(BACKENDS, BACKENDS[:1]))
@each_rank(RANKS)
def test_as_eager(backend: str, preset: str) -> None:
    counter, eager = counting(backend), replace(UNITS, preset=preset)
    one = replace(eager, options={"compile": {"backend": counter}})
    beside_eager(one, eager, counter, 1, 1e-5)  # for all blocks; embed, head and tail run as they are


@each_rank(RANKS)
def test_stages_by_hand() -> None:
    counter, eager = counting(), replace(UNITS, loop="by_unit")
    one = replace(eager, change=lambda model: T.compile_units(model, "blocks.*", "tail", backend=counter))
    beside_eager(one, eager, counter, 2, 1e-5)  # the blocks, and the tail


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@each_rank(RANKS)
def test_driven_with_remat(inside: bool) -> None:
    counter, eager = counting(), replace(UNITS, steps=1, micro=1, change=lambda model: T.remat(model, "blocks.*"))
    one = replace(eager, options={"compile": {"backend": counter}}) if inside else replace(
        eager, change=lambda model: T.remat(T.compile_units(model, "blocks.*", backend=counter), "blocks.*")
    )  # fmt: skip
    beside_eager(one, eager, counter, 1, 1e-5)


CHOSEN = ["llama, checkpointed", "resnet", "checkpoint around two", "a unit called twice", "a unit called on one rank",
          "adapters", "containers"]  # fmt: skip


@pytest.mark.parametrize("names", [CHOSEN[1:6:2], pytest.param(CHOSEN, marks=pytest.mark.large)], ids=["some", "all"])
@each_rank(RANKS)
def test_awkward_models(names: list[str]) -> None:
    for name in names:
        eager = case(name, spec=UNITS.spec, optimizer=SGD)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what cases warn of is tested elsewhere
            alike(run(replace(eager, options={"compile": AOT})), run(eager), 1e-12)


def llama(depth: int) -> nn.Module:
    settings = {"num_hidden_layers": depth, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8}
    settings |= {"intermediate_size": 12, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "use_cache": False}
    torch.manual_seed(0)
    return hf("LlamaForCausalLM", "LlamaConfig", settings)()


class Compilations:
    """A backend that counts frames that Dynamo traced, and forwards and backwards that were compiled."""

    def __init__(self) -> None:
        self.frames = self.forwards = self.backwards = 0
        self.inner = aot_autograd(fw_compiler=self.forward, bw_compiler=self.backward)

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.frames += 1
        return self.inner(module, inputs)

    def forward(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.forwards += 1
        return make_boxed_func(module.forward)

    def backward(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.backwards += 1
        return make_boxed_func(module.forward)

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.frames, self.forwards, self.backwards


@each_rank(1)
def test_equal_layers_are_one_graph() -> None:
    """Of a model of 3 layers: after each step of two microbatches, then after an evaluation and another; at last all
    units."""
    state, module = start(llama(3))
    counter, every, counts, one = Compilations(), Compilations(), list[tuple[int, int, int]](), CASES["llama"]
    model = T.compile_units(module, "model.layers.*", backend=counter)
    forward_backward, predict, eager = (
        T.forward_backward(model, own_loss),
        T.apply(model, own_loss),
        T.apply(module, own_loss),
    )
    for step in range(3):
        state, _ = forward_backward(state, batch_of(one, step, 0), last_microbatch=False)
        state = fsdp.step(forward_backward(state, batch_of(one, step, 0))[0])
        counts.append(counter.counts)
    for step in range(2):
        state, loss = predict(state, batch_of(one, step, 0))
        state, same = eager(state, batch_of(one, step, 0))
        counts.append(counter.counts)
    state, also = T.apply(module, own_loss, compile={"backend": every})(state, batch_of(one, 1, 0))
    with_gradients, without = (1, 1, 1), (2, 2, 1)
    assert counts == [with_gradients] * 3 + [without] * 2
    assert every.counts == (1, 1, 0)  # what repeats
    assert max((loss - same).abs().item(), (also - same).abs().item()) < 1e-6


WARM = """
import functional_fsdp as fsdp, torch
from functional_fsdp import transforms as T
from torch._dynamo.utils import counters

class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, bias=False)
    def forward(self, x):
        return self.linear(x)  # products only, which need no kernel of Inductor's

params, model = fsdp.functionalize(torch.nn.Sequential(torch.nn.Linear(2, 2), *(Part() for _ in range(5))))
state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
run = T.forward_backward(model, lambda model, x: model(x).sum(), compile=True)
for _ in range(2):
    state, _ = run(state, torch.ones(3, 2))
    state = fsdp.step(state)
print(counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_miss"],
      counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_miss"],
      counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.large
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Dynamo traces one of five layers; of it a forward and a backward are compiled once, and read from the cache
    later."""
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", WARM], capture_output=True, text=True, timeout=600, check=True,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        )  # fmt: skip
        said.append(done.stdout.split())
    assert said == [["1", "1", "0", "2", "0"], ["1", "0", "1", "0", "2"]]


class Scale(nn.Module):
    """No layer of torch's."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tanh(self.weight)


CHOICES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "what repeats": (lambda: nn.Sequential(Scale(5), Drop(0.0, 0), Drop(0.0, 1)), {"1", "2"}),
    "each that repeats": (
        lambda: nn.Sequential(nn.Linear(5, 5), Scale(5), Drop(0.0, 0), Drop(0.0, 1), Scale(5)),
        {"1", "2", "3", "4"},
    ),
    "nothing repeats": (lambda: nn.Sequential(Scale(5), Drop(0.0, 0), nn.Linear(5, 5)), {"0", "1"}),
    "torch's own alone": (lambda: nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5)), set()),
}


@pytest.mark.parametrize("choice", list(CHOICES))
@each_rank(1)
def test_what_repeats_is_compiled(choice: str) -> None:
    make, want = CHOICES[choice]
    torch.manual_seed(0)
    (state, model), counter, x, losses = start(make()), counting(), torch.randn(4, 5), []
    for compile in (False, {"backend": counter}):
        step = T.forward_backward(model, lambda model, x: model(x).square().mean(), compile=compile)
        state, loss = step(state, x, last_microbatch=False)
        losses.append(loss)
        units = {call.unit_module.path for call in step.driver.unit_calls if call.compiled}  # type: ignore[union-attr]
    assert units == want
    assert counter.frame_count == len({type(part) for i, part in make().named_children() if i in units})
    assert torch.allclose(*losses)


class Numbered(nn.Module):
    """A layer whose code reads its number, and computes nothing with it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.number < 0:
            return x
        return x + torch.tanh(self.linear(x))


def numbered() -> tuple[int, int, int]:
    """Of four such layers and a first one, so that all take an input with a gradient."""
    counters, cache = torch._dynamo.utils.counters, tempfile.mkdtemp()
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):  # nothing is in it
        counters.clear()
        state, model = start(nn.Sequential(nn.Linear(6, 6), *(Numbered(i) for i in range(4))))
        run = T.forward_backward(model, lambda model, x: model(x).square().mean(), compile=True)
        run(state, torch.randn(3, 6))
    found = counters["aot_autograd"]
    shutil.rmtree(cache)
    return counters["stats"]["unique_graphs"], found["autograd_cache_miss"], found["autograd_cache_hit"]


@pytest.mark.large
def test_layers_whose_graphs_are_equal_are_compiled_once() -> None:
    assert launch(numbered, nprocs=1) == [(4, 1, 3)]


class Drops(nn.Module):
    """Layers that differ in what their code reads, in the class of a part, or in nothing but a name."""

    def __init__(self, *rates: float) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)  # so that all layers take an input that has a gradient
        self.layers = nn.ModuleList(Drop(rate, i) for i, rate in enumerate(rates))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Drop(nn.Module):
    def __init__(self, rate: float, number: int) -> None:
        super().__init__()
        self.rate, self.number, self.linear = rate, number, nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.linear(x), self.rate, self.training)


def drops(*rates: float) -> Scenario:
    def data(step: int, rank: int, micro: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(4, 5, dtype=torch.float64, generator=drawn)

    return Scenario(
        model=lambda: Drops(*rates).double(),
        loss_fn=lambda model, x: model(x),
        data=data,
        spec=UNITS.spec,
        optimizer=SGD,
    )


@pytest.mark.parametrize(
    ("rates", "count"),
    [
        ((0.5,) * 4, 1),
        pytest.param((0.0, 0.5, 0.0, 0.5), 2, marks=pytest.mark.large),
        (tuple(i / 20 for i in range(4)), 4),
    ],
)
@each_rank(1)
def test_layers_that_differ_are_compiled_apart(rates: tuple[float, ...], count: int) -> None:
    """More of them than torch's recompile limit, too. Under aot_eager random numbers are eager's."""
    counter, eager = counting(), drops(*rates)
    with torch._dynamo.config.patch(recompile_limit=3):
        beside_eager(replace(eager, options={"compile": {"backend": counter}}), eager, counter, count, 1e-9)


@pytest.mark.large
@each_rank(1)
def test_random_numbers_of_inductor() -> None:
    """The same with the same seed; others than eager's, unless asked for."""
    fallback = {"options": {"fallback_random": True}}
    eager, found, again, as_eager = (
        run(replace(drops(0.5, 0.5), options={"compile": compile})).losses for compile in (False, True, True, fallback)
    )
    assert found == again
    assert found != eager
    assert as_eager == pytest.approx(eager, abs=1e-6)


# ---------------------------------------------------------------- by hand


class Block(nn.Module):
    def __init__(self, width: int = 8, says: str = "", raises: bool = False) -> None:
        super().__init__()
        self.linear, self.says, self.raises = nn.Linear(width, width), says, raises

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise ValueError("no such block")
        if self.says:
            torch._dynamo.graph_break()
        return x + torch.tanh(self.linear(x))


def blocks(n: int = 1, **settings: Any) -> tuple[list[Tree], nn.ModuleList]:
    torch.manual_seed(0)
    made = nn.ModuleList(Block(**settings) for _ in range(n))
    weights = [{key: p.detach().clone() for key, p in block.named_parameters()} for block in made]
    return weights, fsdp.functionalize(made)[1]


def gradients(stage: Callable[..., Any], w: Any, x: torch.Tensor) -> Tree:
    out, pullback = T.vjp(stage, w, x)
    dw, dx = pullback(w, torch.ones_like(out))
    return {**dw, "x": dx, "out": out}


def bound(part: nn.Module) -> Callable[..., Any]:
    return lambda w, h: fsdp.bind(part, w)(h)


REMAT: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
    "a function": lambda parts, options: T.compile_units(bound(parts[0]), **options),
    "remat of it": lambda parts, options: T.remat(T.compile_units(bound(parts[0]), **options)),
    "it with remat inside": lambda parts, options: T.compile_units(T.remat(bound(parts[0])), **options),
    "a part": lambda parts, options: bound(T.compile_units(parts[0], **options)),
    "remat of a part": lambda parts, options: T.remat(bound(T.compile_units(parts, "*", **options)[0])),
    "a part with remat inside": lambda parts, options: bound(T.compile_units(T.remat(parts, "*"), "*", **options)[0]),
}


@pytest.mark.parametrize("name", REMAT)
def test_functions_and_remat(name: str) -> None:
    (w,), parts = blocks()
    x = torch.randn(3, 8)
    counter = counting()
    found = gradients(REMAT[name](parts, {"backend": counter}), w, x)
    assert apart(found, gradients(bound(parts[0]), w, x)) < 1e-6
    assert counter.frame_count == 1


def test_residuals_are_the_weights_and_no_copies_of_them() -> None:
    """What is saved of weights lies where they are gathered, so gathered bytes are not held twice."""
    (w,), parts = blocks(width=13)
    part = T.compile_units(parts, "*", backend="aot_eager")[0]
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        T.vjp(lambda w, h: fsdp.bind(part, w)(h), w, torch.randn(3, 13))
    where = {t.untyped_storage().data_ptr() for t in w.values()}
    large = [t for t in saved if t.numel() == 13 * 13]
    assert large
    assert all(t.untyped_storage().data_ptr() in where for t in large)


def test_the_users_module_is_not_touched() -> None:
    module = nn.ModuleList([Block(), Block()])
    before = [(type(part), [*vars(part)]) for part in module.modules()]
    skeleton = fsdp.functionalize(module)[1]
    made = T.compile_units(skeleton, "*")
    for untouched in (module, skeleton):
        assert [(type(part), [*vars(part)]) for part in untouched.modules()] == before
    assert all(isinstance(part, Block) and type(part) is not Block for part in made)


# ---------------------------------------------------------------- hooks


class Plain(nn.Module):
    """Blocks, of which the second has a hook, of its own or of the layer in it."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)
        self.seen: list[torch.Tensor] = []
        block: Any = self.blocks[1]
        owner = block.linear if hook == "inner" else block
        if hook == "pre":
            owner.register_forward_pre_hook(lambda module, args: (3 * args[0],))
        elif hook == "keeps":
            seen = self.seen  # not a default of the lambda: Dynamo of torch 2.11 drops what is appended to those
            owner.register_forward_hook(lambda module, args, out: seen.append(out))
        else:
            owner.register_forward_hook(lambda module, args, out: 3 * out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize(
    "hook", [*(pytest.param(x, marks=pytest.mark.large) for x in ("own", "pre")), "inner", "keeps"]
)
@each_rank(1)
def test_hooks_of_some_layers_run_in_every_call(hook: str) -> None:
    """Losses are eager ones: of steps, then of another shape, then of an evaluation."""
    found: dict[str, list[float]] = {}
    kept = 0
    for how in ("eager", "driven", "chosen") if FULL or hook == "keeps" else ("eager", "driven"):
        torch.manual_seed(0)
        state, model = start(Plain(hook))
        if how == "chosen":
            model = T.compile_units(model, "blocks.*", backend="aot_eager")
        compile: Any = AOT if how == "driven" else False
        step = T.forward_backward(model, lambda model, x: (model(x), len(model.seen)), has_aux=True, compile=compile)
        look, losses = T.apply(model, compile=compile), []
        for seed, n in enumerate((4, 3, 4)):
            x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
            state, (loss, seen) = step(state, x)
            state = fsdp.step(state)
            losses += [loss.item(), look(state, x)[1].item()]
            kept += seen
        found[how] = losses
        assert losses == pytest.approx(found["eager"], abs=1e-6)
    assert kept == (9 if hook == "keeps" else 0)


def test_hooks_that_come_and_go() -> None:
    """By hand they are seen; in driven models they are an error."""
    (w, other), parts = blocks(2)
    compiled = T.compile_units(parts, "*", backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(fsdp.bind(compiled[0], w)(X), fsdp.bind(parts[0], w)(X))
        torch.testing.assert_close(fsdp.bind(compiled[1], other)(X), fsdp.bind(parts[1], other)(X))
    owners: list[Any] = [compiled[0], compiled[0].linear]
    for owner in owners:
        handle = owner.register_forward_hook(lambda module, args, out: 3 * out)
        for x in (X, torch.ones(2, 8), X):
            linear = F.linear(x, w["linear.weight"], w["linear.bias"])
            want = 3 * (x + torch.tanh(linear)) if owner is compiled[0] else x + torch.tanh(3 * linear)
            torch.testing.assert_close(fsdp.bind(compiled[0], w)(x), want)
            torch.testing.assert_close(fsdp.bind(compiled[1], other)(x), fsdp.bind(parts[1], other)(x))
        handle.remove()
        torch.testing.assert_close(fsdp.bind(compiled[0], w)(X), fsdp.bind(parts[0], w)(X))


@each_rank(1)
def test_a_compiled_model_does_not_keep_the_transforms_of_it() -> None:
    """Of transforms of one compiled model the last is still there."""
    counter, (state, model), known = counting(), start(Drops(0.0, 0.0)), list[Any]()
    model = T.compile_units(model, "layers.*", backend=counter)
    for _ in range(4):
        step = T.forward_backward(model, lambda model, x: model(x))
        step(state, torch.ones(2, 5))
        known.append(weakref.ref(step.driver))
    gc.collect()
    assert [one() is not None for one in known] == [False, False, False, True]
    assert counter.frame_count == 1


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def within_a_mode() -> list[bool]:
    """Whether torch holds this rank to be within a mode of dispatch. Each enters one in its turn, rank 0 first, and
    leaves it in its turn."""
    fsdp.local_mesh()
    mode, rank, seen = Mode(), dist.get_rank(), []
    for turn in range(4):
        if turn == rank:
            mode.__enter__()
        if turn == 2 + rank:
            mode.__exit__(None, None, None)
        dist.barrier()
        seen.append(is_in_torch_dispatch_mode())
    return seen


def test_each_is_within_its_own_modes_of_dispatch() -> None:
    """Else the process keeps a flag of one that is over, and no compiled code is taken again: each call compiles."""
    with fsdp.simulate(data=2) as ranks:
        assert ranks(within_a_mode).get() == [[True, True, False, False], [False, True, True, False]]
    counter = counting("eager")
    run = torch.compile(lambda x: x + 1, backend=counter)
    for _ in range(3):
        run(torch.ones(2))
    assert (is_in_torch_dispatch_mode(), counter.frame_count) == (False, 1)


# ---------------------------------------------------------------- no silence


X = torch.ones(3, 8)


def test_code_that_is_not_one_graph() -> None:
    (w,), parts = blocks(says="a break")
    part = T.compile_units(parts, "*", backend="aot_eager")[0]
    with pytest.raises(fsdp.SpecError, match=r"the module '0' \(Block\) does not compile as one graph: Call to `torch"):
        fsdp.bind(part, w)(X)
    (w,), parts = blocks(raises=True)
    part = T.compile_units(parts, "*", backend="aot_eager")[0]
    with pytest.raises(fsdp.SpecError, match=r"raised exception ValueError\(.*'no such block'.*\)\. Change its code"):
        fsdp.bind(part, w)(X)


class Checkpointed(nn.Module):
    """As transformers' T5 has it, with gradient checkpointing on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gradient_checkpointing = nn.Linear(8, 8), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(8)
        if self.gradient_checkpointing:
            bias.requires_grad = True
        out: torch.Tensor = self.linear(x) + bias
        return out


def test_what_is_no_graph_for_its_checkpointing_is_told_what_to_write() -> None:
    params, model = fsdp.functionalize(nn.Sequential(Checkpointed()))
    layer = fsdp.bind(T.compile_units(model, "*", backend="aot_eager"), params)
    remedy = r"leave gradient_checkpointing_enable\(\) out, and write T\.remat\(model, '\*'\)"
    with pytest.raises(fsdp.SpecError, match=rf"does not compile as one graph: setattr.*{remedy}"):
        layer(X)


class Writes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.linear.weight.data.mul_(0.5)
        else:
            self.linear.weight.data = 0.5 * self.linear.weight.data
        return torch.tanh(self.linear(x))


WRITES = [*itertools.product(("in place", "by .data ="), ("eager", "aot_eager", "inductor"))]


@pytest.mark.parametrize(("how", "backend"), marked(WRITES, [("in place", "eager"), ("by .data =", "aot_eager")]))
@each_rank(1)
def test_writes_through_data_are_seen_in_the_first_call(how: str, backend: str) -> None:
    """And before they are done: replicated weights are the state's own."""
    state, model = start(nn.Sequential(Writes(how), Writes(how)), "ddp")
    before = {path: weight.clone() for path, weight in fsdp.full_params(state).items()}
    step = T.forward_backward(model, lambda model, x: model(x).sum(), compile={"backend": backend})
    with pytest.raises(fsdp.ScheduleError, match=rf"^the forward changed the weight '0\.linear\.weight' {how}"):
        step(state, torch.ones(2, 8))
    assert apart(fsdp.full_params(state), before) == 0


def test_graph_breaks_where_they_are_allowed() -> None:
    (w,), parts = blocks(says="a break")
    counter = counting()
    part = T.compile_units(parts, "*", backend=counter, fullgraph=False)[0]
    torch.testing.assert_close(fsdp.bind(part, w)(X), fsdp.bind(parts[0], w)(X))
    assert counter.frame_count == 1


def test_the_recompile_limit() -> None:
    """It is of calls after the first ones."""
    (w,), parts = blocks()
    part = T.compile_units(parts, "*", backend="aot_eager")[0]
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in (1, 2, 3):
            fsdp.bind(part, w)(torch.ones(n, 8))
        said = r"'0' \(Block\) was called in another way than before, and 2 comp.* size mismatch at index 0.*\. Of"
        with pytest.raises(fsdp.SpecError, match=said):
            fsdp.bind(part, w)(torch.ones(4, 8))
        part = T.compile_units(parts, "*", backend="aot_eager", fullgraph=False)[0]
        for n in (1, 2, 3):
            fsdp.bind(part, w)(torch.ones(n, 8))
        said = r"'0' \(Block\) runs eagerly: torch.compile is turned off, or its limit"
        with pytest.warns(RuntimeWarning, match=said):
            fsdp.bind(part, w)(torch.ones(4, 8))
        counter = counting()
        part = T.compile_units(parts, "*", backend=counter, dynamic=True)[0]
        for n in range(2, 8):
            fsdp.bind(part, w)(torch.ones(n, 8))
        assert counter.frame_count <= 2


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.large)])
def test_layers_that_differ_leave_the_recompile_limit_to_others(fullgraph: bool) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Drop(i / 20, i) for i in range(4))
    weights = [{key: p.detach().clone() for key, p in layer.named_parameters()} for layer in layers]
    counter = counting()
    parts = T.compile_units(fsdp.functionalize(layers)[1], "*", backend=counter, fullgraph=fullgraph)
    with torch._dynamo.config.patch(recompile_limit=3), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for n in (2, 3, 4, 5):
            fsdp.bind(parts[0], weights[0])(torch.ones(n, 5))
            if n == 2:
                for part, w in zip(parts[1:], weights[1:], strict=True):
                    fsdp.bind(part, w)(torch.ones(n, 5))
    assert counter.frame_count == 4 + 3


def test_under_torch_func() -> None:
    (w,), parts = blocks()
    counter = counting()
    part = T.compile_units(parts, "*", backend=counter)[0]
    with pytest.warns(RuntimeWarning, match=r"'0' \(Block\) runs eagerly under a torch.func transform, in which"):
        found = torch.func.grad(lambda w: fsdp.bind(part, w)(X).sum())(w)
    assert apart(found, torch.func.grad(lambda w: fsdp.bind(parts[0], w)(X).sum())(w)) == 0
    stage = T.compile_units(lambda w: w["linear.weight"].sum(), backend=counter)
    with pytest.warns(RuntimeWarning, match=r"the function test_under_torch_func.<locals>.<lambda> runs eagerly under"):
        torch.func.grad(stage)(w)
    assert counter.frame_count == 0


def test_within_a_compiled_function() -> None:
    (w,), parts = blocks()
    part = T.compile_units(parts, "*", backend="aot_eager")[0]
    outer = counting()
    compiled = torch.compile(lambda w, x: fsdp.bind(part, w)(x), backend=outer, fullgraph=True)
    torch.testing.assert_close(compiled(w, X), fsdp.bind(parts[0], w)(X))
    assert outer.frame_count == 1


def test_arguments() -> None:
    _, parts = blocks()
    compile: Any = T.compile_units
    drops: Any = Drops(0.0)
    refused(
        (lambda: compile(parts, "layers.*"), "compile_units: the pattern 'layers.*' matches no module of ModuleList"),
        (lambda: compile(drops, "layers"), "compile_units: 'layers' is a ModuleList, which nobody calls. Name "),
        (lambda: compile(torch.sin, "a"), "compile_units: 'a' are paths in a model, and this is a function"),
        (lambda: T.forward_backward(parts, own_loss, compile={"backends": "inductor"}),
         "SpecError", "no option 'backends' here; there are backend, dynamic, fullgraph, mode"),
        (lambda: T.apply(parts, compile="inductor"),  # type: ignore[call-overload]
         "SpecError", "compile='inductor': expected True, or options of torch.compile"),
    )  # fmt: skip


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"backend": "indctor"}, r"does not take these options: Invalid backend: 'indctor'"),
    "no name": ({"backend": 3}, r"backend=3: expected a name, as 'inductor', or a function"),
    "mode": ({"mode": "fast"}, r"does not take these options: Unrecognized mode=fast"),
    "option": ({"options": {"fallback_randm": True}}, r"these options: Unexpected optimization option fallback_randm$"),
    "type": ({"options": {"fallback_random": "a"}}, r"these options: Unexpected type of attr fallback_random"),
    "both": ({"mode": "default", "options": {"max_autotune": True}}, r"these options: Either mode or options"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_options_are_looked_at_when_the_transform_is_made(what: str) -> None:
    options, said = UNKNOWN[what]
    _, parts = blocks()
    for make in (
        lambda: T.forward_backward(parts, own_loss, compile=options),
        lambda: T.apply(parts, compile=options),
        lambda: T.compile_units(parts, "*", **options),
        lambda: T.compile_units(torch.sin, **options),
    ):
        with pytest.raises(fsdp.SpecError, match=said):
            make()


@each_rank(1)
def test_no_graph_over_several_units() -> None:
    state, model = start(Drops(0.0, 0.0))
    forward_backward = T.forward_backward(T.compile_units(model, backend="aot_eager"), lambda model, x: model(x))
    with pytest.raises(fsdp.SpecError) as said:
        forward_backward(state, torch.ones(2, 5))
    assert str(said.value).startswith(
        "compile: the module Drops is compiled and holds 3 parts that are gathered on their own: 'first', 'layers.0', "
        "'layers.1'. Compile those: T.compile_units(model, 'first'), or compile=True."
    )


class Holds(nn.Module):
    """A layer with a part that the model has elsewhere, too."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.up = part, nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(self.part(x))
        return out


class Elsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
        self.a, self.b = Holds(self.part), Holds(self.part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(self.b(self.a(x))).sum()
        return out


@each_rank(1)
def test_a_module_around_a_shared_unit_is_named() -> None:
    state, model = start(Elsewhere())
    for chosen, compile in ((model, AOT), (T.compile_units(model, "a", **AOT), False)):
        forward_backward = T.forward_backward(chosen, lambda model, x: model(x), compile=compile)
        for _ in range(2):  # the second call, too
            with pytest.raises(fsdp.SpecError) as caught:
                forward_backward(state, torch.ones(2, 5))
            assert str(caught.value) == (
                "compile: the module 'a' (Holds) is compiled and holds a part that is gathered alone: 'part'. Compile "
                "those: T.compile_units(model, 'part'), and not what holds them: the model has them elsewhere, too, "
                "and gathers them there."
            )
    remedied = T.compile_units(model, "part", **AOT)
    T.forward_backward(remedied, lambda model, x: model(x))(state, torch.ones(2, 5))


@each_rank(1)
def test_the_error_names_the_unit() -> None:
    state, model = start(Drops(0.0, 0.0))
    forward_backward = T.forward_backward(T.compile_units(model, "first", "layers.*", **AOT), lambda model, x: model(x))
    said = r"the module 'first' \(Linear\) was called in another way than before, and 1 compilations were made"
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (2, 3):
            state, _ = forward_backward(state, torch.ones(n, 5), last_microbatch=False)
        with pytest.raises(fsdp.SpecError, match=said):
            forward_backward(state, torch.ones(4, 5), last_microbatch=False)
