"""The small functions around a train step: accumulate, apply, remat, clipping, skipped steps, an average of weights."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from support.driven import raised, start
from support.models import CASES, LENGTH, Batch, Stack, batch_of, entropy, made
from support.problems import batch as small_batch
from support.problems import full_grads, largest, mesh_and_placement, net, on, reference
from support.problems import loss_fn as small_loss
from support.ranks import each_rank, launch
from support.tables import each

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

Tree = dict[str, torch.Tensor]


# ---------------------------------------------------------------- accumulate


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("preset", ["zero3", "zero1"])
@each_rank(2)
def test_accumulate_is_the_mean_over_microbatches(preset: str, has_aux: bool) -> None:
    case, n = CASES["loose parameters"], 3
    state, model = start(made(case), preset)
    mine, plain = dist.get_rank(), made(case)
    losses = [[case.loss_fn(plain, batch_of(case, 0, rank, k)) for k in range(n)] for rank in range(2)]
    torch.stack([loss for row in losses for loss in row]).mean().backward()
    parts = [batch_of(case, 0, mine, k) for k in range(n)]
    data = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def with_aux(model: Any, batch: Batch, flag: str) -> tuple[torch.Tensor, torch.Tensor]:
        assert flag == "as it is"
        return entropy(model, batch), batch["source"].sum()

    if has_aux:
        state, (loss, aux) = T.accumulate(T.forward_backward(model, with_aux, has_aux=True), n)(state, data, "as it is")
        assert [int(a) for a in aux] == [int(part["source"].sum()) for part in parts]
    else:
        state, loss = T.accumulate(T.forward_backward(model, entropy), n)(state, data)
    grads = full_grads(fsdp.finish_reductions(state))
    assert abs(loss.item() - torch.stack(losses[mine]).mean().item()) < 1e-12
    assert largest(grads, {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}) < 1e-12


@pytest.mark.parametrize("compiled", [False, True])
def test_accumulate_adds_up_where_ranks_do(compiled: bool) -> None:
    """A mean over tokens: the sum of all microbatches, divided by the number of tokens."""
    module = torch.nn.Linear(3, 1)
    x = torch.randn(8, 3)
    want = module(x).square().mean()
    grads = torch.autograd.grad(want, [*module.parameters()])
    params, model = fsdp.functionalize(module)

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        forward_backward = T.accumulate(T.forward_backward(model, lambda m, x: m(x).square().sum()), 4)
        state, loss = forward_backward(state, x, scale=2.0)
        state, tokens = fsdp.psum(state, torch.tensor(len(x)))
        return fsdp.step(T.divide(state, tokens)), loss / tokens

    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), average="sum"), fsdp.sgd(lr=0.1))
    step = T.compile(train_step, "aot_eager") if compiled else train_step
    state, loss = step(state, x)
    torch.testing.assert_close(loss, want.detach())
    for leaf, p, grad in zip(fsdp.full_params(state).values(), module.parameters(), grads, strict=True):
        torch.testing.assert_close(leaf, (p - 0.2 * grad).detach())


def test_accumulate_refuses_before_anything_runs() -> None:
    def never(state: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it ran")

    state: Any = None
    with pytest.raises(fsdp.TreeError, match=r"shape \(10, 2\), along dim 0, cannot be cut into 4 .* Give 8 rows"):
        T.accumulate(never, 4)(state, {"b": torch.zeros(10, 2), "a": torch.zeros(10)})
    for n in (0, True, 1.5):
        with pytest.raises(fsdp.SpecError, match="expected a number of microbatches of at least 1"):
            T.accumulate(never, n)  # type: ignore[arg-type]


def parts(n: int, *args: Any, split: Any = None, **kwargs: Any) -> list[Any]:
    """What each microbatch is called with."""
    seen = []

    def record(state: Any, *some: Any, last_microbatch: bool, scale: float, **more: Any) -> Any:
        seen.append((some, more) if more else some)
        return state, torch.zeros(())

    state: Any = SimpleNamespace(spec=SimpleNamespace(average="mean"))
    T.accumulate(record, n, split=split)(state, *args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, seen)


class Pair(NamedTuple):
    a: Any
    b: Any


IDS, MASK = torch.arange(4), torch.ones(1, 1)
SAMPLES = [{"boxes": torch.full((i % 2 + 1, 1), float(i))} for i in range(4)]


def test_accumulate_by_default_wants_one_length() -> None:
    assert parts(2, IDS, 3, b={"x": IDS, "y": torch.tensor(5)})[1] == (([2, 3], 3), {"b": {"x": [2, 3], "y": 5}})
    assert parts(1, IDS, SAMPLES)[0][0] == [0, 1, 2, 3]  # whole
    with pytest.raises(fsdp.TreeError, match=r"different lengths along dim 0: argument 0\['ids'\] has shape \(4,\), "):
        parts(2, {"ids": IDS, "mask": MASK})
    with pytest.raises(fsdp.TreeError, match=r"0 has shape \(4,\), argument 1\[0\]\['boxes'\] has shape \(1, 1"):
        parts(2, IDS, SAMPLES)
    with pytest.raises(fsdp.TreeError, match=r"'mask' has shape \(1, 1\)\. Say what is batch, .* split=\(0, None"):
        parts(2, IDS, mask=MASK)


@pytest.mark.parametrize(
    "batch", [[torch.zeros(4)] * 4, (torch.zeros(4),) * 4, [{"x": torch.zeros(4)}] * 4, {"a": [[torch.zeros(4)] * 4]}]
)
def test_accumulate_refuses_a_list_that_may_be_one_of_samples(batch: Any) -> None:
    """Pictures of four channels, say, four of them."""
    with pytest.raises(fsdp.TreeError, match=r"a (list|tuple) of 4, and tensors have 4 rows: it may be one of samples"):
        parts(2, batch)
    assert len(parts(2, (torch.zeros(4), torch.zeros(4), torch.zeros(4)))[0][0]) == 3
    assert parts(2, Pair(torch.zeros(2), torch.zeros(2)))[0] == (Pair([0.0], [0.0]),)  # a tuple of names is no list


@pytest.mark.parametrize(
    "weights", [[0.1, 0.2, 0.3, 0.4], (3, 1, 2, 4), {"n": [1, 2, 3, 4]}, torch.arange(4).numpy()], ids=str
)
def test_accumulate_refuses_numbers_that_may_be_one_of_each_sample(weights: Any) -> None:
    with pytest.raises(fsdp.TreeError, match=r"a (list|tuple|ndarray) of 4, and tensors have 4 rows"):
        parts(2, torch.zeros(4, 3), weights)
    whole = parts(2, torch.zeros(4, 3), weights, split=(0, None))
    assert [str(one) for _, one in whole] == [str(weights)] * 2


def test_accumulate_splits_as_it_is_told() -> None:
    halves = parts(2, IDS, SAMPLES, MASK, split=(0, list, None))
    assert halves[0] == ([0, 1], [{"boxes": [[0.0]]}, {"boxes": [[1.0], [1.0]]}], [[1.0]])
    assert [one["boxes"][0] for one in halves[1][1]] == [[2.0], [3.0]]
    grid = torch.arange(8).view(2, 4)
    assert parts(2, grid, split=(1,))[1] == ([[2, 3], [6, 7]],)
    assert parts(2, {"x": grid, "y": grid}, split=({"x": -1},))[0] == ({"x": [[0, 1], [4, 5]], "y": [[0, 1, 2, 3]]},)
    assert parts(2, [IDS, MASK], split=([0, None],))[1] == ([[2, 3], [[1.0]]],)
    assert parts(2, IDS, mask=MASK, split={"mask": None})[1] == (([2, 3],), {"mask": [[1.0]]})
    assert parts(2, Pair(IDS, MASK), split=((0, None),))[1] == (Pair([2, 3], [[1.0]]),)
    assert parts(2, UserDict(a=IDS, b=MASK), split=({"b": None},))[1][0]["a"].tolist() == [2, 3]
    assert parts(2, (IDS, IDS), 3, split=(0, None))[1] == (([2, 3], [2, 3]), 3)

    def odd_and_even(args: Any, kwargs: Any, n: int) -> Any:
        return [((args[0][i::n],), kwargs) for i in range(n)]

    assert parts(2, IDS, split=odd_and_even) == [([0, 2],), ([1, 3],)]


@pytest.mark.parametrize(
    ("args", "split", "said"),
    [
        ((IDS,), 0, r"accumulate\(split=0\): expected a tuple"),
        ((IDS,), (0, None), r"split has 2 entries for 1 positional arguments"),
        ((IDS,), {"mask": None}, r"split names 'mask', which is no keyword argument"),
        ((IDS,), (list,), r"split says list of argument 0, which is a Tensor"),
        ((IDS,), (1,), r"split says dim 1 of argument 0, which has shape \(4,\)"),
        (({"a": IDS},), ({"b": 0},), r"split names 'b', which argument 0 does not have"),
        ((IDS,), ("rows",), r"split says 'rows' of argument 0, which is a Tensor"),
        ((IDS,), (lambda args, kwargs, n: [(args, kwargs)]), r"gave 1 parts; expected 2, each \(args, kwargs\)"),
        ((IDS,), (lambda args, kwargs, n: [args, args]), r"gave 2 parts of another kind; expected 2"),
    ],
)
def test_accumulate_says_what_is_wrong_with_a_split(args: Any, split: Any, said: str) -> None:
    with pytest.raises(fsdp.SpecError, match=said):
        parts(2, *args, split=split)
    with pytest.raises(fsdp.TreeError, match=r"argument 0, a list of 3 cannot be cut into 2 equal microbatches"):
        parts(2, SAMPLES[:3], split=(list,))


def test_accumulate_over_samples_is_the_plain_mean() -> None:
    torch.manual_seed(0)
    module = nn.Linear(1, 1)
    x = torch.randn(4, 1)

    def loss_fn(model: Any, x: torch.Tensor, targets: Any) -> torch.Tensor:
        return torch.stack([(p - t["boxes"]).abs().mean() for p, t in zip(model(x), targets, strict=True)]).mean()

    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    accumulated = T.accumulate(T.forward_backward(model, loss_fn), 2, split=(0, list))
    state, loss = accumulated(state, x, SAMPLES)
    want = loss_fn(module, x, SAMPLES)
    torch.testing.assert_close(loss, want.detach())
    grads = torch.autograd.grad(want, [*module.parameters()])
    found = full_grads(fsdp.finish_reductions(state))
    assert largest(found, dict(zip(("weight", "bias"), grads, strict=True))) < 1e-6


# ---------------------------------------------------------------- apply


@pytest.mark.parametrize(
    ("name", "debug"), each(["loose parameters", "resnet", "lstm", "nn.Transformer"], [False, True])
)
@each_rank(2)
def test_apply_computes_what_the_module_computes(name: str, debug: bool) -> None:
    case = CASES[name]
    module = made(case)
    state, model = start(module, schedule=fsdp.Schedule(debug=debug), **case.spec)
    module.eval()
    data = {k: t for k, t in batch_of(case, 0, 0).items() if k != "labels"}
    with torch.no_grad():
        plain = module(**data)
    before = state
    predict = T.apply(model)
    for _ in range(2):
        state, out = predict(state, **data)
        pairs = zip(pytree.tree_leaves(plain), pytree.tree_leaves(out), strict=True)
        for want, found in (pair for pair in pairs if isinstance(pair[0], torch.Tensor)):
            assert (want - found).abs().max() < 1e-12
            assert not found.requires_grad
        assert state is before
        assert state.between_steps
        assert state.cursor.idle
    forward_backward = T.forward_backward(model, case.loss_fn)
    middle, first = forward_backward(state, batch_of(case, 0, 0), last_microbatch=False)
    middle, _ = predict(middle, **data)  # in the middle of a step, too
    middle, second = forward_backward(middle, batch_of(case, 0, 0))
    assert torch.equal(first, second)
    assert not middle.between_steps
    state, out = predict(fsdp.step(middle), **data)
    assert pytree.tree_leaves(out)[0].isfinite().all()


def test_apply_draws_the_same_on_one_state_and_others_with_a_seed() -> None:
    for mine, others in zip(*launch(draws, nprocs=2), strict=True):
        assert not torch.equal(mine, others)


def draws() -> list[torch.Tensor]:
    """Of two calls on one state, of one on a state of the same seed, and of two with seeds."""
    (state, model), (other, _) = start(net()), start(net())

    def noise(model: Any, seed: int | None = None) -> torch.Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return torch.randn(3)

    sample = T.apply(model, noise)
    torch.manual_seed(7)
    own = torch.randn(3)
    torch.manual_seed(7)
    drawn = [sample(one)[1] for one in (state, state, other)]
    seeded = [sample(state, fsdp.extend.seeds(state, "noise")(k, dist.get_rank()))[1] for k in range(2)]
    assert torch.equal(torch.randn(3), own)  # the program's own
    assert all(torch.equal(one, drawn[0]) for one in drawn)
    assert not torch.equal(*seeded)
    return [*drawn, *seeded]


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.large), "mamba"])
@each_rank(2)
def test_generation_with_a_cache(name: str) -> None:
    case = CASES[name]
    module = made(case, torch.float32).eval()
    state, model = start(module, schedule=fsdp.Schedule(debug=True))
    ids = batch_of(case, 0, dist.get_rank())["input_ids"]
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    generate = T.apply(model, lambda model, ids: model.generate(ids, **settings))
    for _ in range(2):
        state, out = generate(state, ids)
        assert torch.equal(out, module.generate(ids, **settings))  # type: ignore[operator]
    assert out.shape == (2, LENGTH + 5)


# ---------------------------------------------------------------- remat


class Stateful(nn.Module):
    """Computes with a buffer, and changes it; BatchNorm counts, and a power iteration goes on."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("calls", torch.ones(()))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(self.norm(x)).tanh() * self.calls * self.table
        self.calls = self.calls + 1
        return y


@pytest.mark.parametrize("units", [["0", "1", "2"], None, {"all": "*"}])
def test_remat_makes_buffers_once(units: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), Stateful(), Stateful())
    x = torch.randn(5, 4)
    params, model = fsdp.functionalize(module)
    states = []
    for one in (model, T.remat(model, "1", "2")):
        spec = fsdp.Spec(fsdp.local_mesh(), units=units)
        state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1, momentum=0.9), buffers=fsdp.buffers(module))
        forward_backward = T.forward_backward(one, lambda model, x: model(x).square().sum())
        for _ in range(3):
            state, _ = forward_backward(state, x, last_microbatch=False)
            state, _ = forward_backward(state, x)
            state = fsdp.step(state)
        states.append(state)
    plain, again = states
    assert plain.buffers["1.norm.num_batches_tracked"] == again.buffers["1.norm.num_batches_tracked"] == 6
    for key, buffer in plain.buffers.items():
        assert torch.equal(again.buffers[key], buffer), key
    assert largest(fsdp.full_params(again), fsdp.full_params(plain)) < 1e-6


def test_remat_of_a_function_that_binds_makes_buffers_once() -> None:
    skeletons = []
    for remat in (False, True):
        torch.manual_seed(0)
        params, model = fsdp.functionalize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        stage: Any = lambda w, h, model=model: fsdp.bind(model, w)(h)  # noqa: E731
        out, pullback = T.vjp(T.remat(stage) if remat else stage, params, torch.ones(3, 4))
        pullback(params, out)
        skeletons.append(dict(model.named_buffers()))
    assert skeletons[1]["1.num_batches_tracked"] == 1
    assert all(torch.equal(skeletons[0][key], skeletons[1][key]) for key in skeletons[0])


class Power(nn.Module):
    """A power iteration in a buffer, a count in an attribute, and dropout that is set from outside."""

    vector: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), 0
        self.register_buffer("vector", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.vector.copy_(torch.nn.functional.normalize(self.linear.weight @ self.vector, dim=0))
        self.count += 1
        scale = (self.linear.weight @ self.vector.clone()).norm() * self.count
        out: torch.Tensor = (self.linear(x) / scale).sin()
        return out


@pytest.mark.parametrize("part", [None, T.saved, T.offload])
@pytest.mark.parametrize("writes", [False, True])
def test_remat_of_a_function_finds_what_a_bound_module_had(part: Any, writes: bool) -> None:
    found = []
    for remat in (False, True):
        torch.manual_seed(0)
        params, model = fsdp.functionalize(nn.Sequential(Power(), Power()))

        def run(w: Any, h: torch.Tensor, i: int, model: Any = model) -> torch.Tensor:
            if writes:  # so that a part is run again
                h.mul_(2)
            out: torch.Tensor = fsdp.bind(model[i], w)(h)
            return out

        inner: Any = part(run) if part is not None and remat else run

        def stage(w: Any, h: torch.Tensor, inner: Any = inner, model: Any = model) -> torch.Tensor:
            first, second = ({k[2:]: v for k, v in w.items() if k[0] == i} for i in "01")
            h = inner(first, h + 0, 0).exp()
            h = fsdp.bind(model[1], second)(h) + inner(first, h + 0, 0)  # the first one twice
            return h.cos().exp()

        again: Any = T.remat(stage) if remat else stage
        some: list[Any] = []
        for step in range(3):
            out, pullback = T.vjp(again, params, torch.ones(3, 4) + step)
            dw, dx = pullback(params, out)
            some += [out, dx, *dw.values(), torch.tensor([one.count for one in model])]
        found.append([*some, *model.buffers()])
    assert all(map(torch.equal, found[0], found[1]))


def test_a_model_that_recomputes_is_not_bound_by_hand() -> None:
    params, model = fsdp.functionalize(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = torch.randn(2, 3)
    out, pullback = T.vjp(lambda w, x: fsdp.bind(T.remat(model, "0"), w)(x), params, x)
    with pytest.raises(fsdp.ScheduleError, match=r"bound by hand, .* T\.vjp\(T\.remat\(stage\), w, h\)"):
        pullback(params, out)
    with pytest.raises(fsdp.TreeError, match="bind weights first"):
        T.remat(model, "0")(x)


def test_remat_says_what_is_wrong() -> None:
    _, model = fsdp.functionalize(Stack())
    with pytest.raises(fsdp.SpecError, match=r"the pattern 'blocks\.\*' matches no module of Stack\. Its parts"):
        T.remat(model, "blocks.*")
    with pytest.raises(fsdp.SpecError, match="name the modules that recompute"):
        T.remat(model)
    with pytest.raises(fsdp.SpecError, match="are paths in a model, and this is a function"):
        T.remat(len, "blocks.*")  # type: ignore[call-overload]
    with pytest.raises(fsdp.ScheduleError, match=r"inside of torch\.func's transforms \(.*T\.vjp\(T\.remat"):
        torch.func.grad(T.remat(torch.sum))(torch.ones(3))
    assert type(T.remat(model, "layers.*").layers[0]) is not type(model.layers[0])
    assert type(T.remat(model, "layers.*")) is Stack


# ---------------------------------------------------------------- clipping


PLACEMENTS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "mixed")
MIXED = {"blocks.1": fsdp.ddp("data"), "blocks.2": fsdp.zero1("data"), "*": fsdp.zero3("data")}


@pytest.mark.parametrize(
    ("on_ranks", "how"),
    each([*itertools.product([2], PLACEMENTS), (4, "hsdp"), (4, "hfsdp")], ["norm", "large norm", "value"]),
)
def test_clipping_is_torchs(on_ranks: tuple[int, str], how: str) -> None:
    ranks, placement = on_ranks
    launch(clipped, (placement, how), nprocs=ranks)


def clipped(placement: str, how: str) -> None:
    mesh, placed = mesh_and_placement(placement) if placement != "mixed" else (fsdp.local_mesh(), MIXED)
    _, grads, _ = next(iter(reference(mesh.size(), 1, 1)))
    plain = {key: nn.Parameter(torch.empty_like(g)) for key, g in grads.items()}
    for key, p in plain.items():
        p.grad = grads[key].clone()
    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(mesh, placed), fsdp.sgd(lr=0.1))
    data = on(state, small_batch(0, dist.get_rank()))
    old, _ = T.forward_backward(model, small_loss)(state, data, last_microbatch=False)
    bound = 1e3 if how == "large norm" else 0.02
    if how == "value":
        nn.utils.clip_grad_value_(plain.values(), bound)
        state = T.clip_by_value(old, bound)
    else:
        norm = nn.utils.clip_grad_norm_(plain.values(), bound)
        state, found = T.clip_by_global_norm(old, bound)
        assert abs(found.item() - norm.item()) < 1e-12
    assert "clip_by" in raised(lambda: fsdp.step(old)) or "finish_reductions()" in raised(lambda: fsdp.step(old))
    clipped = full_grads(state)
    assert largest(clipped, {key: p.grad for key, p in plain.items() if p.grad is not None and key in clipped}) < 1e-12
    assert {*clipped} <= {*plain}
    fsdp.step(state)


@each_rank(2)
def test_clipping_refuses() -> None:
    state, model = start(net())
    middle, _ = T.forward_backward(model, small_loss)(state, on(state, small_batch(0, 0)))
    assert "expected a norm of at least 0" in raised(lambda: T.clip_by_global_norm(middle, -1.0))
    assert "expected a value of at least 0" in raised(lambda: T.clip_by_value(middle, -1.0))
    none = raised(lambda: T.global_norm(state))
    assert "no gradients" in none or "StaleStateError" in none


# ---------------------------------------------------------------- steps that are skipped


def plain_sgd() -> fsdp.Optimizer:
    """An optimizer that knows nothing of skipping."""

    def update(grads: Any, opt: Any, main: Any, count: torch.Tensor) -> tuple[Any, Any]:
        new = pytree.tree_map(lambda m, g: 0.9 * m + g, opt, grads)
        return pytree.tree_map(lambda p, m: p - 0.1 * m, main, new), new

    return fsdp.Optimizer(lambda main: pytree.tree_map(torch.zeros_like, main), update)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=1e-2, weight_decay=0.1),
    "sgd": lambda: fsdp.sgd(lr=0.1, momentum=0.9),
    "pure": plain_sgd,
}


def skipping(optimizer: str, bad: int, who: int, clip: bool) -> tuple[Tree, list[int], int, list[T.Nonfinite], int]:
    mesh, placement = mesh_and_placement("zero3")
    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), OPTIMIZERS[optimizer]())

    def loss_fn(model: Any, data: Any, factor: float) -> torch.Tensor:
        return small_loss(model, data) * factor

    forward_backward, step = T.forward_backward(model, loss_fn), T.skip_nonfinite(fsdp.step)
    skipped: list[int] = []
    found: list[T.Nonfinite] = []
    for k in range(4):
        wrong = k == bad and dist.get_rank() == who
        data = on(state, small_batch(min(k, 2) if bad < 0 else k if k < bad else k - 1, dist.get_rank()))
        if bad < 0 and k == 3:
            break
        state, _ = forward_backward(state, data, float("inf") if wrong else 1.0)
        if k == bad:
            state, found = T.find_nonfinite(state)
        if clip:
            state, _ = T.clip_by_global_norm(state, 0.05)
        state = step(state)
        skipped.append(int(state.extras["skipped"]))
    return fsdp.full_params(state), skipped, int(state.count), found, len(pytree.tree_leaves(state.opt))


@pytest.mark.parametrize(("optimizer", "clip"), each(OPTIMIZERS, [False, True]))
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_on_every_rank(optimizer: str, clip: bool) -> None:
    expected = launch(skipping, (optimizer, -1, 0, clip), nprocs=2)[0]
    for weights, skipped, count, found, _ in launch(skipping, (optimizer, 1, 1, clip), nprocs=2):
        assert skipped == [0, 1, 1, 1]
        assert count == expected[2] == 3
        assert all(torch.equal(weights[key], expected[0][key]) for key in weights)
        assert {one.rank for one in found} == {0, 1}
        assert "blocks.1" in {one.unit for one in found}
        one = next(one for one in found if one.leaf == "blocks.1.up.weight")
        assert one.unit == "blocks.1"
        assert sum(f.elements for f in found if f.leaf == one.leaf) == 3 * 7 * 7


@each_rank(2)
def test_the_count_of_skipped_steps_is_saved(tmp_path: Any) -> None:
    state, model = start(net())
    step = T.skip_nonfinite(fsdp.step)
    forward_backward = T.forward_backward(model, small_loss)
    state = step(forward_backward(state, on(state, small_batch(0, 0)))[0])
    fsdp.save(state, tmp_path / "saved")
    middle, _ = forward_backward(state, on(state, small_batch(1, 0)))
    wrong = raised(lambda: fsdp.step(middle, skip=torch.zeros(2)))
    assert "skip has shape (2,) and dtype torch.float32; expected a bool" in wrong
    assert "or a tensor of shape [] and torch.bool" in wrong
    assert int(fsdp.load(tmp_path / "saved", like=state).extras["skipped"]) == 0


# ---------------------------------------------------------------- a reduction of one's own


@pytest.mark.parametrize("second_order", [False, True])
@each_rank(2)
def test_a_reduction_in_the_place_of_reduce(second_order: bool) -> None:
    units: list[str | None] = []

    def reduce(state: fsdp.State, grads: Any, unit: str | None = None, *, last_microbatch: bool = True) -> fsdp.State:
        units.append(unit)
        twice = {path: g if g is None else 2 * g for path, g in grads.items()}
        return fsdp.reduce(state, twice, unit, last_microbatch=last_microbatch)

    state, model = start(net())
    data = on(state, small_batch(0, dist.get_rank()))
    plain, _ = T.forward_backward(model, small_loss)(state, data, scale=2.0)
    want = {name: b.local.clone() for name, b in fsdp.finish_reductions(plain).grads.items()}
    own = T.forward_backward(model, small_loss, reduce=reduce, second_order=second_order)
    state, _ = own(fsdp.drop_gradients(plain), data)
    found = fsdp.finish_reductions(state).grads
    assert max((found[name].local - want[name]).abs().max().item() for name in want) < 1e-12
    assert (units == [None]) == second_order
    assert len(units) == len(set(units))
