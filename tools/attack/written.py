"""written: models whose forwards change weights, and contexts of torch that stay open, in each way to write a step;
beside a plain module, which enters the context anew in each step.

    {"parts": ["clamp", "none"], "when": "later", "way": "units", "around": "autocast", "opened": "loop"}

A weight that is changed is refused by name, or stays changed as in the plain module; after a refusal the state goes on
as it was, or says that it is of no more use. A context is honoured, or refused.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .verdict import Verdict, Wrong

Case = dict[str, Any]
D, LR = 4, 0.5
Write = Callable[[Any], Any]


class Part(nn.Module):
    """A layer whose forward does something to its weight, always or from its third call on."""

    def __init__(self, how: str, later: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(D, D))
        self.bias = nn.Parameter(torch.randn(D))
        self.how, self.begins, self.calls = how, 3 if later else 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        if self.calls[0] > self.begins:
            with torch.no_grad():
                (WRITES | HARMLESS)[self.how](self)
        return torch.tanh(F.linear(x, self.weight, self.bias))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _assign(module: Any) -> None:
    module.weight = nn.Parameter(0.5 * module.weight.detach())


def _data(module: Any) -> None:
    module.weight.data = 0.5 * module.weight.data


def _foreach(module: Any) -> None:
    torch._foreach_mul_([module.weight], 0.5)


def _view(module: Any) -> None:
    module.weight.view(-1)[1:].mul_(0.5)


def _swapped(module: Any) -> None:
    held = module.weight[0].clone()
    module.weight[0] = module.weight[1]
    module.weight[1] = held


WRITES: dict[str, Write] = {
    "clamp": lambda module: module.weight.clamp_(-0.1, 0.1),
    "multiply": lambda module: module.weight.mul_(0.5),
    "copy": lambda module: module.weight.copy_(torch.full((D, D), 0.25)),
    "init": lambda module: nn.init.constant_(module.weight, 0.25),
    "out": lambda module: torch.mul(module.weight, 0.5, out=module.weight),
    "data in place": lambda module: module.weight.data.mul_(0.5),
    "detached": lambda module: module.weight.detach().mul_(0.5),
    "set": lambda module: module.weight.set_(0.5 * module.weight),
    "renorm": lambda module: torch.embedding_renorm_(module.weight, torch.tensor([0, 1]), 0.1, 2.0),
    "index": lambda module: module.weight.index_fill_(0, torch.tensor([1]), 0.25),
    "data": _data, "assign": _assign, "foreach": _foreach, "view": _view, "swapped": _swapped,
}  # fmt: skip
UNSEEN = ("data in place", "data", "detached", "set")  # no version counter tells of them: seen in the first call, and
# by hand not at all: torch.func refuses the first two by itself
HARMLESS: dict[str, Write] = {
    "none": lambda module: None,
    "copied": lambda module: module.weight.detach().clone().clamp_(-0.1, 0.1),
    "restored": lambda module: module.weight.mul_(2.0).mul_(0.5),
}
CONTEXTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast, no cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "float64": lambda: _default_dtype(torch.float64),
    "device": lambda: torch.device("cpu"),
    "anomaly": torch.autograd.detect_anomaly,
    "deterministic": _deterministic,
    "save on cpu": torch.autograd.graph.save_on_cpu,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "random": torch.random.fork_rng,
}
UNPLAIN = ("no_grad", "inference")  # a plain module does not train in them: what we do is right, or refused


class Model(nn.Sequential):
    def __init__(self, case: Case) -> None:
        super().__init__(*(Part(how, case["when"] == "later") for how in case["parts"]))


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"written:{seed}:{index}")
    parts = [rng.choice([*HARMLESS]) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.6:
        parts[rng.randrange(len(parts))] = rng.choice([*WRITES])
    return {
        "kind": "written", "world": rng.choice((1, 1, 2)), "seed": rng.randint(0, 10**6), "parts": parts,
        "when": rng.choice(("always", "always", "later")), "way": rng.choice(("tree", "units", "driven", "driven")),
        "around": rng.choice((*CONTEXTS, "autocast", "none")), "opened": rng.choice(("loop", "loop", "step")),
        "preset": rng.choice(("zero3", "zero3", "zero2", "zero1", "ddp")), "steps": rng.randint(2, 4), "patience": 15,
    }  # fmt: skip


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank, which keeps a plain module."""
    torch.manual_seed(case["seed"])
    plain = Model(case)
    params, model = fsdp.functionalize(copy.deepcopy(plain))
    spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, case["preset"])("data"))
    state = fsdp.shard(params, spec, fsdp.sgd(lr=LR))
    one = _driven(model) if case["way"] == "driven" else _tree if case["way"] == "tree" else _units
    context = CONTEXTS[case["around"]]
    within = contextlib.nullcontext if case["opened"] == "loop" else context
    before = fsdp.full_params(state)
    late = case["when"] == "later" or case["way"] == "units"
    unseen = late and any(how in UNSEEN for how in case["parts"])
    with context() if case["opened"] == "loop" else contextlib.nullcontext():
        for step in range(case["steps"]):
            with _anew(case):
                wanted = _plain_step(case, plain, step)
            try:
                with within():
                    state, loss = one(state, model, _batch(case, step, rank))
                state = fsdp.step(state)
            except (fsdp.FsdpError, RuntimeError) as error:
                hooks = case["way"] == "tree" and "saved tensor hooks" in str(error)  # torch.func takes none
                functorch = hooks or "`.data` inside functorch transform is not allowed" in str(error)
                if not isinstance(error, fsdp.FsdpError) and case["around"] not in UNPLAIN and not functorch:
                    raise
                writes = any(how in WRITES or how == "restored" for how in case["parts"])
                if not (hooks or writes or case["around"] in UNPLAIN):
                    raise
                try:
                    _goes_on(state, before)
                except Wrong as wrong:
                    if unseen:
                        return Verdict("unseen", str(wrong))
                    raise
                return Verdict("refused", notes={"end": type(error).__name__})
            try:
                _close(case, loss, wanted[rank], f"the loss of step {step}")
                before = fsdp.full_params(state)
                for path, weight in plain.named_parameters():
                    _close(case, before[path], weight, f"the weight {path!r} after step {step}")
            except Wrong as wrong:
                if unseen:
                    return Verdict("unseen", str(wrong))
                raise
    return Verdict("right", notes={"end": "end"})


@contextlib.contextmanager
def _anew(case: Case) -> Any:
    """The context, entered anew, for the plain module; torch's defaults where it would not train."""
    plain = case["around"] in UNPLAIN
    with torch.inference_mode(False), torch.enable_grad():
        torch.clear_autocast_cache()
        with contextlib.nullcontext() if plain else CONTEXTS[case["around"]]():
            yield
        torch.clear_autocast_cache()


def _plain_step(case: Case, plain: Model, step: int) -> list[torch.Tensor]:
    """SGD on the mean of the gradients of all ranks' batches; the losses."""
    losses, copies = [], [copy.deepcopy(plain) for _ in range(case["world"])]
    for rank, one in enumerate(copies):
        losses.append(_loss(one(_batch(case, step, rank))))
        losses[-1].backward()
    with torch.no_grad():
        for p, *shares in zip(plain.parameters(), *(one.parameters() for one in copies), strict=True):
            p.copy_(shares[0] - LR * sum(share.grad for share in shares) / case["world"])
    for part, share in zip(plain, copies[0], strict=True):
        vars(part)["calls"][0] = vars(share)["calls"][0]
    return [loss.detach() for loss in losses]


def _tree(state: fsdp.State, model: Any, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
    state, params = fsdp.unshard(state)
    grads, loss = torch.func.grad_and_value(lambda p: _loss(fsdp.bind(model, p)(x)))(params)
    return fsdp.reduce(state, grads), loss


def _units(state: fsdp.State, model: Any, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
    pullbacks = {}
    for unit in state.units:
        state, weights = fsdp.unshard(state, unit)
        x, pullbacks[unit] = T.vjp(lambda w, x, unit=unit: fsdp.bind(model[int(unit)], w)(x), weights, x)
        state = fsdp.release(state, unit)
    x = x.detach().requires_grad_()
    loss = _loss(x)
    (d,) = torch.autograd.grad(loss, x)
    for unit in reversed(state.units):
        state, weights = fsdp.unshard(state, unit)
        grads, d = pullbacks[unit](weights, d)
        state = fsdp.release(fsdp.reduce(state, grads, unit), unit)
    return state, loss


def _driven(model: Any) -> Any:
    forward_backward = T.forward_backward(model, lambda m, x: _loss(m(x)))
    return lambda state, _, x: forward_backward(state, x)


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def _batch(case: Case, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case["seed"] + 100 * step + rank)
    return torch.randn(4, D, generator=generator, dtype=torch.float32)


def _goes_on(state: fsdp.State, before: dict[str, torch.Tensor]) -> None:
    """After a refusal: the state has its weights, or says that it has not."""
    try:
        now = fsdp.full_params(fsdp.drop_gradients(state))
    except fsdp.FsdpError:
        return
    for path, weight in now.items():
        if not torch.equal(weight, before[path]):
            raise Wrong(f"after a refusal the weight {path!r} is another one, without an error")


def _close(case: Case, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    close = 2e-2 if "autocast" in case["around"] else 1e-5
    far = (got.detach() - want.detach()).abs().max().item()
    if not far <= close * (1 + want.detach().abs().max().item()):
        raise Wrong(f"{what} is {far:.3g} from that of the plain module")


def smaller(case: Case) -> list[Case]:
    """Simpler cases, the boldest first."""
    parts = case["parts"]
    found: list[Case] = [{**case, "parts": parts[:k] + parts[k + 1 :]} for k in range(len(parts)) if len(parts) > 1]
    found += [
        {**case, key: value}
        for key, value in {
            "world": 1, "preset": "zero3", "around": "none", "opened": "step", "when": "always", "steps": 2,
        }.items()
        if case[key] != value
    ]  # fmt: skip
    found += [{**case, "parts": ["none" if j == k else how for j, how in enumerate(parts)]} for k in range(len(parts))]
    return [one for one in found if one != case]
