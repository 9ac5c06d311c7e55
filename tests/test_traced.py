"""The traced transport: whole train steps under torch.compile(fullgraph=True) and T.compile, beside the plain module.

`make laws` runs every placement with every way and backend; `make test` a row for each value.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from problems import DEPTH, LOOPS, Stack, batch, mesh_and_placement, net, reference, through_the_stack
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, SpecError, launch
from functional_fsdp import transforms as T
from functional_fsdp._launch import stop_workers
from functional_fsdp._lower import _kind, _memory
from functional_fsdp._regather import point_at_second_gathers
from functional_fsdp._tracing import keeping

STEPS = 3
FULL = os.environ.get("LAWS") == "full"
BLOCKS = DEPTH if FULL else 2  # to trace them is what takes time
TRACED = fsdp.Schedule(transport="traced")
EAGER = ("lanes", "graph")  # ways that need no such schedule
PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Counted:
    """A backend of torch's that counts what it compiles."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.count += 1
        return torch._dynamo.lookup_backend(self.name)(module, inputs)


def compiled(way: str, step: Any) -> tuple[Any, Any]:
    """The compiled step, and how many compilations there were."""
    if way.startswith("graph"):  # of the step as it is, or of a compiled one
        inner, count = compiled(way.removeprefix("graph "), step) if " " in way else (step, lambda: 0)
        return T.cuda_graph(inner, warmup=1, pass_through=True), count
    torch._dynamo.reset()
    if way.startswith("T."):
        begun = dict(torch._dynamo.utils.counters["stats"])
        fn = T.compile(step, way.removeprefix("T."))
        return fn, lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"] - begun.get("unique_graphs", 0)
    backend = Counted(way)
    return torch.compile(step, fullgraph=True, backend=backend), lambda: backend.count


def trained(
    preset: str, loop: str, way: str, steps: int = STEPS, micro: int = 2, dtype: torch.dtype = torch.float64,
    precision: Any = None, depth: int = DEPTH,
) -> tuple[list[Any], int]:  # fmt: skip
    """(loss, weights) after each compiled step on this rank, and the number of compilations."""
    warnings.filterwarnings("ignore", "TensorFloat32")  # that it could be used
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(dtype, depth))
    schedule = TRACED if way not in EAGER else None
    spec = fsdp.Spec(mesh, placement, schedule=schedule, precision=precision)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2, weight_decay=0.1))

    def train_step(state: fsdp.State, batches: Any) -> Any:
        for k, data in enumerate(batches):
            state, loss = LOOPS[loop](model, state, data, k == len(batches) - 1)
        return fsdp.step(state), loss

    step, count = compiled(way, train_step) if way != "lanes" else (train_step, lambda: 0)
    seen = []
    for i in range(steps):
        state, loss = step(state, [batch(i, dist.get_rank(), k) for k in range(micro)])
        seen.append((loss.item(), {path: p.cpu() for path, p in fsdp.full_params(state).items()}))
    assert state.steps == steps
    assert f"step {steps}, between steps" in repr(state)
    return seen, count()


ROWS = [
    ("zero3", "whole", "inductor"), ("zero3", "by_unit", "T.inductor"), ("zero2", "by_unit", "aot_eager"),
    ("zero1", "whole", "T.aot_eager"), ("ddp", "whole", "eager"),
    ("hsdp", "by_unit", "eager"), ("hfsdp", "whole", "eager"),
]  # fmt: skip
if FULL:
    ROWS = [*product(PRESETS, LOOPS, ("eager", "aot_eager", "inductor", "T.aot_eager", "T.inductor"))]


@pytest.mark.parametrize(("preset", "loop", "way"), ROWS)
def test_a_compiled_step_is_the_plain_modules(preset: str, loop: str, way: str) -> None:
    world = 4 if preset in ("hsdp", "hfsdp") else 2
    # One microbatch is half the code to trace. With two, and by units, `test_cuda_graph` compiles a step.
    micro = 2 if FULL or (world == 2 and loop == "whole" and not way.endswith("inductor")) else 1
    expected = list(reference(world, STEPS, micro, depth=BLOCKS))
    ranks = launch(trained, world, preset, loop, way, micro=micro, depth=BLOCKS)
    assert [count for _, count in ranks] == [1] * world
    for i, (loss, _, weights) in enumerate(expected):
        assert ranks[0][0][i][0] == pytest.approx(loss, abs=1e-9)
        for seen, _ in ranks:
            for path, weight in weights.items():
                torch.testing.assert_close(seen[i][1][path], weight, rtol=0, atol=1e-9)


def test_one_compilation_serves_twenty_steps() -> None:
    for seen, count in launch(trained, 2, "zero3", "whole", "eager", steps=20, micro=1, depth=1):
        assert count == 1
        assert len({loss for loss, _ in seen}) == 20


def overtaken(transport: Any) -> list[tuple[int, bool]]:
    """Of each group that gathers or reduces: its threads, and whether a short work overtook a long one."""
    params, _ = fsdp.functionalize(net(torch.float64))
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(transport=transport))
    ledger = fsdp.shard(params, spec, fsdp.sgd(lr=0.1)).token.ledger
    lanes = ledger.runtime.groups
    names = {ledger.recipes.group(*key) for key in lanes} if ledger.recipes else {lanes["gather", "data"].group_name}
    found = []
    for group in [lanes[key] for key in sorted(lanes) if lanes[key].group_name in names]:
        long, short = torch.ones(1 << 24), torch.ones(1)
        dist.barrier()
        works = [dist.all_reduce(one, group=group, async_op=True) for one in (long, short)]
        works[1].wait()
        done = works[0].is_completed()
        works[0].wait()
        options: Any = group._get_backend(torch.device("cpu")).options
        found.append((options._threads, not done))
    return found


def test_functional_collectives_have_one_thread_a_group() -> None:
    """Two threads corrupt the heap: each frees the name of the last work, when an all-gather's is too long to be kept
    in place. A work that is over before an earlier one shows the second thread."""
    assert launch(overtaken, 2, "traced") == [[(1, False)]] * 2
    assert launch(overtaken, 2, "collective") == [[(2, True)]] * 2  # which issues no all-gathers of gloo's


@pytest.mark.parametrize("total", ["native", "fp32"])
def test_every_stage_has_the_dtype_that_the_spec_says(total: Any) -> None:
    """bfloat16 compute: as with lanes, to the rounding of another order of operations in bfloat16."""
    precision = fsdp.Precision(compute=torch.bfloat16, sum=total)
    runs = [
        launch(trained, 2, "zero3", "by_unit", way, steps=1, micro=1, dtype=torch.float32, precision=precision, depth=1)
        for way in ("lanes", "T.aot_eager")
    ]
    for (eager, _), (traced, _) in zip(*runs, strict=True):
        assert eager[0][0] == traced[0][0]
        for path, weight in eager[0][1].items():  # a step of AdamW moves each weight by no more than lr
            assert weight.dtype == traced[0][1][path].dtype == torch.float32 or "nothing" in path
            torch.testing.assert_close(traced[0][1][path], weight, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- what is in the graph


LAYERS = 5


def captured(recompute: bool, keep: Any) -> tuple[dict[str, int], dict[str, int], list[int], int]:
    """Of the graph that a backend gets: its collectives, the plan's, the most bytes of gathered weights before and
    after the pass, and those of one layer."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def look(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    params, _ = fsdp.functionalize(Stack(depth=LAYERS))
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(keep=keep, transport="traced"))
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = through_the_stack(state, x)
        return fsdp.step(state), loss

    with keeping(not recompute):
        step = torch.compile(train_step, fullgraph=True, backend=aot_autograd(fw_compiler=look))
        step(state, torch.ones(4, 32))
    (module,) = graphs
    gathered = [_memory(module.graph).gathered]
    point_at_second_gathers(module.graph)
    module.graph.eliminate_dead_code()
    gathered.append(_memory(module.graph).gathered)
    kinds = Counter(str(_kind(node)) for node in module.graph.nodes if _kind(node))
    plan = fsdp.plan(state.layout, spec.schedule)
    planned = {"all-gather": len(plan.gathers), "reduce-scatter": len(plan.reductions)}
    return dict(kinds), planned, gathered, plan.units[0].nbytes


@pytest.mark.parametrize(("recompute", "keep"), [(True, None), (False, None), (False, {"layers.2"})])
def test_the_graph_has_the_plans_collectives_and_no_more_gathered_bytes(recompute: bool, keep: Any) -> None:
    for kinds, planned, (before, after), layer in launch(captured, 2, recompute, keep):
        assert kinds == planned
        assert after == (3 if keep else 2) * layer
        assert (
            before == after if recompute else before >= LAYERS * layer
        )  # without the pass, residuals hold the first gathers


# ---------------------------------------------------------------- around a step


def carried_out() -> list[str]:
    """What the code that Inductor makes of a step does, in order: collectives and waits by number, matrix products."""
    params, _ = fsdp.functionalize(Stack(64, LAYERS))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), schedule=TRACED), fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = through_the_stack(state, x)
        return fsdp.step(state), loss

    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(T.compile(train_step), state, torch.ones(4, 64))
    names: dict[str, str] = {}
    found = []
    for line in codes[0][codes[0].index("def call(") :].splitlines():
        issued = re.search(r"(\w+) = torch\.ops\._c10d_functional\.(all_gather|reduce_scatter)", line)
        waited = re.search(r"wait_tensor\.default\((\w+)\)", line)
        if issued:
            names[issued[1]] = f"{issued[2]} {sum(name.startswith(issued[2]) for name in names.values())}"
            found.append(names[issued[1]])
        elif waited:
            found.append(f"wait {names[waited[1]]}")
        elif re.search(r"extern_kernels\.(mm|addmm)\(", line):
            found.append("product")
    return found


def test_inductor_keeps_the_order_of_the_plan() -> None:
    """Between a collective and its wait lies compute, but for the first gather and the last reduction."""
    for order in launch(carried_out, 2):
        issued = [one for one in order if one[-1].isdigit() and not one.startswith("wait")]
        assert Counter(one.split()[0] for one in issued) == {"all_gather": 2 * LAYERS - 1, "reduce_scatter": LAYERS}
        bare = [one for one in issued if "product" not in order[order.index(one) : order.index(f"wait {one}")]]
        assert bare == ["all_gather 0", f"reduce_scatter {LAYERS - 1}"]


def around(way: str) -> list[Any]:
    """Clipping, accumulation, a skipped step, and a mean over ranks."""
    params, model = fsdp.functionalize(net(depth=1))
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=TRACED if way != "lanes" else None)
    state = fsdp.shard(params, spec, fsdp.sgd(lr=lambda count: 0.1 / (count + 1), momentum=0.9))
    stepped = T.skip_nonfinite(fsdp.step)

    def one(state: fsdp.State, data: Any, last: bool = True, scale: Any = 1.0) -> Any:
        state, params = fsdp.unshard(state)

        def loss_fn(p: Any) -> torch.Tensor:
            logits = fsdp.bind(model, p)(data[0])
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[1].flatten()) * data[2]

        grads, loss = torch.func.grad_and_value(lambda p: loss_fn(p) * scale)(params)
        return fsdp.reduce(state, grads, last=last), loss / scale

    accumulated = T.accumulate(one, 2)

    def train_step(state: fsdp.State, data: Any) -> Any:
        state, loss = accumulated(state, data)
        state, norm = T.clip_by_global_norm(state, 0.5)
        state, loss = fsdp.pmean(state, loss)
        return stepped(state), loss, norm

    step = compiled(way, train_step)[0] if way != "lanes" else train_step
    seen = []
    for i in range(4):
        bad = float("nan") if i == 2 and dist.get_rank() == 1 else 1.0
        state, loss, norm = step(state, (*batch(i, dist.get_rank()), torch.tensor(bad, dtype=torch.float64)))
        skipped = int(state.extras["skipped"])
        seen.append((loss.item(), norm.item(), skipped, int(state.count), fsdp.full_params(state)))
    return seen


def test_clipping_accumulating_skipping_and_averaging_trace_too() -> None:
    eager, traced = launch(around, 2, "lanes"), launch(around, 2, "eager")
    for theirs, mine in zip(eager, traced, strict=True):
        assert [s[2:4] for s in mine] == [(0, 1), (0, 2), (1, 2), (1, 3)]
        for a, b in zip(theirs, mine, strict=True):
            assert a[:4] == pytest.approx(b[:4], rel=1e-9, nan_ok=True)
            torch.testing.assert_close(b[4], a[4], rtol=0, atol=1e-9)


def saved(folder: str) -> tuple[int, float, float]:
    """A state of compiled steps, saved and loaded, goes on as it would have."""
    params, model = fsdp.functionalize(net(depth=1))
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=TRACED)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))

    def train_step(state: fsdp.State, data: Any) -> Any:
        state, loss = LOOPS["whole"](model, state, data, True)
        return fsdp.step(state), loss

    step, _ = compiled("eager", train_step)
    for i in range(2):
        state, _ = step(state, batch(i, dist.get_rank()))
    addresses = [buffer.local.data_ptr() for buffer in state.main.values()]
    fsdp.save(state, folder)
    fresh = fsdp.load(fsdp.shard(params, spec, fsdp.adamw(lr=1e-2)), folder)
    steps = fresh.steps
    fresh, theirs = step(fresh, batch(2, dist.get_rank()))
    state, mine = step(state, batch(2, dist.get_rank()))
    assert addresses == [buffer.local.data_ptr() for buffer in state.main.values()]
    return steps, theirs.item(), mine.item()


def test_a_checkpoint_of_compiled_steps_goes_on(tmp_path: Any) -> None:
    for steps, theirs, mine in launch(saved, 2, str(tmp_path / "there")):
        assert steps == 2
        assert theirs == mine


# ---------------------------------------------------------------- what cannot work says so


def state_of(transport: Any = "traced") -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(net(depth=1))
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(transport=transport))
    return fsdp.shard(params, spec, fsdp.sgd(lr=0.1)), model


STAGES: dict[str, Any] = {"0": lambda w, h, x: x @ w["weight"], "1": lambda w, h, x: (h @ w["weight"]).sum()}


@pytest.mark.parametrize(
    "call",
    [
        lambda state: T.hvp(STAGES)(state, state.main, torch.ones(2, 2)),
        lambda state: T.per_sample_norms(STAGES)(state, torch.ones(2, 2)),
        lambda state: T.clipped_gradients(STAGES, 1.0)(state, torch.ones(2, 2)),
    ],
)
def test_what_calls_the_verbs_itself_is_not_traced(call: Any) -> None:
    torch._dynamo.reset()
    params = {"0": {"weight": torch.ones(2, 2)}, "1": {"weight": torch.ones(2, 2)}}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), schedule=TRACED), fsdp.sgd(lr=0.1))
    with pytest.raises(ScheduleError, match=r"for what calls the verbs for you, .*transport='collective'"):
        call(state)
    with pytest.raises(Exception, match="drives the schedule from Python, as it runs, and cannot be traced"):
        torch.compile(call, fullgraph=True, backend="eager")(state)


def recomputed(way: str) -> Any:
    """The loss and the weights after a step whose first stage recomputes, by the model's own module."""
    torch.manual_seed(0)
    params, model = fsdp.functionalize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    model = T.remat(model, "0") if way else model
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), schedule=TRACED), fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, weights = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda w: fsdp.bind(model, w)(x).square().mean())(weights)
        return fsdp.step(fsdp.reduce(state, grads)), loss

    torch._dynamo.reset()
    state, loss = torch.compile(train_step, fullgraph=True, backend="eager")(state, torch.ones(4, 8))
    return loss, fsdp.full_params(state)


def test_in_a_graph_remat_is_left_to_the_compiler() -> None:
    (plain, _), (again, _) = (launch(recomputed, 2, way) for way in ("", "remat"))
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(plain[1][path], again[1][path]) for path in plain[1])


def test_an_eager_step_of_a_traced_state_is_an_error() -> None:
    state, _ = state_of()
    with pytest.raises(ScheduleError, match=r"unshard ran eagerly, .* transport='traced'.*fullgraph=True"):
        fsdp.unshard(state)
    with pytest.raises(ScheduleError, match="unshard ran eagerly"):
        fsdp.unshard(state, "tail")
    assert (
        fsdp.full_params(state).keys() == dict(net(depth=1).named_parameters(remove_duplicate=False)).keys()
    )  # looking may
    assert fsdp.pmean(state, torch.tensor(1.0))[1] == 1.0


def test_a_compiled_step_of_an_eager_state_is_an_error() -> None:
    torch._dynamo.reset()
    state, _ = state_of("collective")
    step = torch.compile(lambda state: fsdp.unshard(state)[1], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"transport='traced'"):
        step(state)


def test_falling_back_to_eager_execution_is_an_error() -> None:
    torch._dynamo.reset()
    state, _ = state_of()
    skipped = torch._dynamo.disable(lambda state: fsdp.unshard(state)[1])  # as whatever torch cannot trace
    with pytest.raises(ScheduleError, match="unshard ran eagerly"):
        torch.compile(lambda state: skipped(state), backend="eager")(state)


def test_a_state_that_leaves_a_compiled_function_midway_says_so() -> None:
    torch._dynamo.reset()
    state, _ = state_of()
    middle = torch.compile(lambda s: fsdp.unshard(s, "tail")[0], fullgraph=True, backend="eager")(state)
    with pytest.raises(ScheduleError, match="left a compiled function in the middle of a step"):
        fsdp.step(middle)


def test_gradients_around_a_compiled_step_are_refused() -> None:
    torch._dynamo.reset()
    state, _ = state_of()

    def total(state: fsdp.State) -> torch.Tensor:
        _, params = fsdp.unshard(state)
        return params["tail.scale"] * 2

    def outer(x: torch.Tensor, step: Any) -> torch.Tensor:
        return step(state) * x

    with pytest.raises(ScheduleError, match=r"inside a torch.func transform"):
        torch.func.grad(outer)(torch.tensor(1.0, dtype=torch.float64), T.compile(total, "aot_eager"))
    with pytest.raises(Exception, match=r"torch.func.grad\(compiled_fn\)|inside a torch.func transform"):
        torch.func.grad(outer)(torch.tensor(1.0, dtype=torch.float64), torch.compile(total, backend="aot_eager"))


def test_a_collective_inside_a_transform_is_refused_when_compiled() -> None:
    torch._dynamo.reset()
    state, _ = state_of()

    def inside(state: fsdp.State, x: torch.Tensor) -> Any:
        return torch.func.grad(lambda x: fsdp.pmean(state, x.sum())[1])(x)

    with pytest.raises(Exception, match=r"inside a torch.func transform"):
        torch.compile(inside, fullgraph=True, backend="eager")(state, torch.ones(2, dtype=torch.float64))


class Tripled(torch.autograd.Function):
    """The identity, with three times the gradient."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_custom_backward_is_refused_because_the_compiler_drops_it() -> None:
    """If the first assertion fails, torch has changed: compile(func.grad) does not drop custom backwards any more."""
    torch._dynamo.reset()
    x = torch.ones(2)
    gradient = torch.func.grad(lambda x: Tripled.apply(x).sum())
    right, found = gradient(x), torch.compile(gradient, fullgraph=True, backend="eager")(x)
    assert (right.tolist(), found.tolist()) == ([3.0, 3.0], [1.0, 1.0])

    state, _ = state_of()

    def train_step(state: fsdp.State) -> Any:
        state, params = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: Tripled.apply(p["tail.scale"]))(params)
        return fsdp.step(fsdp.reduce(state, grads))

    with pytest.raises(ScheduleError, match=r"torch.autograd.Function.*Tripled"):
        T.compile(train_step, "aot_eager")(state)


def test_a_step_that_cannot_be_searched_for_custom_backwards_says_so() -> None:
    torch._dynamo.reset()
    state, _ = state_of()

    def train_step(state: fsdp.State, flag: torch.Tensor) -> Any:
        state, params = fsdp.unshard(state)
        if not torch.compiler.is_compiling():
            flag.item()
        grads = torch.func.grad(lambda p: p["tail.scale"] * 2)(params)
        return fsdp.step(fsdp.reduce(state, grads))

    with pytest.warns(RuntimeWarning, match="could not be searched for torch.autograd.Functions"):
        after = T.compile(train_step, "aot_eager")(state, torch.tensor(1.0))
    assert after.steps == 1


def test_what_drives_the_schedule_itself_cannot_be_traced() -> None:
    torch._dynamo.reset()
    state, model = state_of()
    forward_backward = T.forward_backward(model, lambda model, x: model(x).sum())
    with pytest.raises(Exception, match=r"forward_backward drives the schedule .* cannot be traced"):
        torch.compile(forward_backward, fullgraph=True, backend="eager")(state, batch(0, 0)[0])
    with pytest.raises(ScheduleError, match=r"apply drives the schedule .* cannot be traced"):
        fsdp.lower(T.apply(model), state, batch(0, 0)[0])


# ---------------------------------------------------------------- as eager steps


def descended(way: str, kind: str) -> tuple[list[float], bool]:
    """Three steps of an optimizer of one's own: sums of the weights after each, and whether they have a history."""

    def update(grads: Any, opt: Any, main: Any, count: Any) -> Any:
        if kind == "the last weights are kept":
            return pytree.tree_map(lambda g, p: p - 0.1 * g, grads, main), main
        return pytree.tree_map(lambda g, p, m: p - 0.1 * (g + m), grads, main, opt), grads

    initial: Any = lambda main: pytree.tree_map(torch.zeros_like, main)  # noqa: E731
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=TRACED if way != "lanes" else None)
    params, model = fsdp.functionalize(net(depth=1))
    teacher = net(depth=1)  # its weights require gradients, and nobody wants them
    state = fsdp.shard(params, spec, fsdp.Optimizer(initial, update))

    def train_step(state: fsdp.State, data: Any) -> Any:
        state, params = fsdp.unshard(state)
        with torch.no_grad() if way == "lanes" else nullcontext():
            wanted = teacher(data[0])
        grads = torch.func.grad(lambda p: (fsdp.bind(model, p)(data[0]) - wanted * 0.5).square().mean())(params)
        return fsdp.step(fsdp.reduce(state, grads)), 0

    step = compiled(way, train_step)[0] if way != "lanes" else train_step
    sums = []
    for i in range(3):
        state, _ = step(state, batch(i, dist.get_rank()))
        sums.append(sum(p.double().sum().item() for p in fsdp.full_params(state).values()))
    return sums, any(buffer.local.requires_grad for buffer in state.main.values())


@pytest.mark.parametrize("kind", ["momentum", "the last weights are kept"])
def test_an_optimizer_of_ones_own_does_the_same(kind: str) -> None:
    for (eager, _), (traced, history) in zip(
        launch(descended, 2, "lanes", kind), launch(descended, 2, "eager", kind), strict=True
    ):
        assert traced == pytest.approx(eager, rel=1e-12)
        assert not history


def test_other_weights_for_a_pullback_are_an_error_and_the_function_again() -> None:
    torch._dynamo.reset()
    state, _ = state_of()

    def train_step(state: fsdp.State) -> Any:
        state, w = fsdp.unshard(state, "tail")
        out, pullback = T.vjp(lambda w: (w["scale"] * w["pair"].sum()).exp(), w)
        dw, *_ = pullback({key: 2 * value for key, value in w.items()}, torch.ones_like(out))
        return fsdp.step(fsdp.release(fsdp.reduce(state, dw, "tail"), "tail"))

    with pytest.raises(Exception, match="a pullback was given other weights than its forward had"):
        T.compile(train_step, "aot_eager")(state)
    torch._dynamo.reset()
    state, _ = state_of()
    after = torch.compile(train_step, fullgraph=True, backend="eager")(state)
    expected = 1.5 - 0.1 * 0  # of the scale: the pair adds up to nothing
    assert fsdp.full_params(after)["tail.scale"].item() == pytest.approx(expected)


def test_a_step_is_searched_for_custom_backwards_for_each_kind_of_call() -> None:
    torch._dynamo.reset()
    state, _ = state_of()

    def train_step(state: fsdp.State, tripled: bool) -> Any:
        state, params = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: Tripled.apply(p["tail.scale"]) if tripled else p["tail.scale"] * 1)(params)
        return fsdp.step(fsdp.reduce(state, grads))

    step = T.compile(train_step, "aot_eager")
    state = step(state, False)
    with pytest.raises(ScheduleError, match="Tripled"):
        step(state, True)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SpecError, match=r"transport='nvlink'.*'collective', .*'copy_engine', 'traced'"):
        fsdp.Schedule(transport="nvlink")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"backend='cudagraphs'.*'inductor', 'aot_eager'"):
        T.compile(lambda state: state, "cudagraphs")
    with pytest.raises(SpecError, match=r"got a tuple first; expected a State"):
        T.compile(lambda pair: pair, "aot_eager")((1, 2))


# ---------------------------------------------------------------- leaves without a gradient


SMALL = {"u.a": (5,), "u.b": (130,), "w": (4,), "never": (3,)}


def compiled_without(optimizer: Any, late: bool) -> tuple[list[dict[str, torch.Tensor]], int, list[str]]:
    """Steps in which `u.a` gets a gradient only after the first two, if `late`, and the unit `never` is not reduced."""
    params = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SMALL.items()}
    spec = fsdp.Spec(fsdp.local_mesh(), units=["u", "w", "never"], schedule=TRACED)
    state = fsdp.shard(params, spec, optimizer)

    def train_step(state: fsdp.State, scale: torch.Tensor, come: bool) -> fsdp.State:
        state, w = fsdp.unshard(state)
        one = {name: p * scale for name, p in w.items()}
        state = fsdp.reduce(state, {"a": one["u.a"] if come else None, "b": one["u.b"]}, "u")
        return fsdp.step(fsdp.reduce(state, {"w": one["w"]}, "w"))

    step, count = compiled("eager", train_step)
    seen = []
    for i in range(4):
        state = step(state, torch.tensor(1.0 + i + dist.get_rank(), dtype=torch.float64), i > 1 or not late)
        seen.append(fsdp.full_params(state))
    return seen, count(), sorted(getattr(state.opt, "missed", ()))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("which", ["adamw", "sgd"])
def test_a_compiled_step_leaves_alone_what_gets_no_gradient_in_it(which: str, late: bool) -> None:
    pairs: dict[str, tuple[Any, Any]] = {
        "adamw": (fsdp.adamw(lr=0.1, weight_decay=0.2), torch.optim.AdamW),
        "sgd": (fsdp.sgd(lr=0.1, momentum=0.9, weight_decay=0.2), partial(torch.optim.SGD, momentum=0.9)),
    }
    mine, torchs = pairs[which]
    plain = {name: torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for name, shape in SMALL.items()}
    optimizer = torchs([*plain.values()], lr=0.1, weight_decay=0.2)
    ranks = launch(compiled_without, 2, mine, late)
    for i in range(4):
        for name, p in plain.items():
            p.grad = None if name == "never" or (name == "u.a" and late and i < 2) else p.detach() * (1.5 + i)
        optimizer.step()
        for seen, _, _ in ranks:
            for name, p in plain.items():
                torch.testing.assert_close(seen[i][name], p.detach(), rtol=0, atol=1e-9)
    for _, count, missed in ranks:
        assert count == (1 + late + (which == "adamw"))  # counts that come make another state
        assert missed == (["never"] + ["u"] * late if which == "adamw" else [])


def parted() -> str:
    params = {"a": torch.ones(5), "b": torch.ones(5)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), schedule=TRACED), fsdp.sgd(lr=0.1))
    mine = dist.get_rank() == 1

    def train_step(state: fsdp.State) -> fsdp.State:
        state, w = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, {"a": w["a"], "b": w["b"] if mine else None}))

    with pytest.raises(
        fsdp.ScheduleError, match=r"the leaf 'b' gets a gradient on some ranks only.*Give zeros in the place of"
    ):
        compiled("eager", train_step)[0](state)
    return str(fsdp.full_params(state)["a"].tolist())


def one_that_never_compiles() -> str:
    state = fsdp.shard({"a": torch.ones(7)}, fsdp.Spec(fsdp.local_mesh(), schedule=TRACED), fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State) -> fsdp.State:
        state, w = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, w))

    if dist.get_rank():
        return ""
    with pytest.raises(fsdp.CommError) as caught:
        compiled("eager", train_step)[0](state)
    return str(caught.value)


def test_an_error_of_communication_while_a_step_is_compiled_is_itself() -> None:
    stop_workers()  # groups that are there keep their timeout
    said, _ = launch(one_that_never_compiles, 2, timeout=2)
    assert "Restart the job from its last checkpoint" in said


def test_ranks_that_compile_steps_with_other_gradients_hear_of_it() -> None:
    assert launch(parted, 2) == ["[1.0, 1.0, 1.0, 1.0, 1.0]"] * 2


def test_a_step_compiled_by_itself_knows_which_leaves_have_gradients() -> None:
    torch._dynamo.reset()
    params = {"a": torch.ones(5), "b": torch.ones(5)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), schedule=TRACED), fsdp.sgd(lr=0.1, weight_decay=0.1))

    def gradients(state: fsdp.State, all_of_them: bool) -> fsdp.State:
        state, w = fsdp.unshard(state)
        return fsdp.finish(fsdp.reduce(state, {"a": w["a"], "b": w["b"] if all_of_them else None}))

    first = torch.compile(gradients, fullgraph=True, backend="eager")
    second = torch.compile(fsdp.step, fullgraph=True, backend="eager")
    state = second(first(state, True))
    before = fsdp.full_params(state)
    after = fsdp.full_params(second(first(state, False)))
    assert torch.equal(after["b"], before["b"])
    assert not torch.equal(after["a"], before["a"])
