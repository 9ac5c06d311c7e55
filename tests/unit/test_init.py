"""init: the module's own initialisers, one unit at a time, with bits that depend on the seed alone."""

from __future__ import annotations

import copy
import hashlib
import math
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from support.models import CASES
from support.tables import marked
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.out_dtype import out_dtype
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import MetaConverter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import functional_fsdp as fsdp
from functional_fsdp import Spec, SpecError, State
from functional_fsdp import transforms as T
from functional_fsdp._seams import torch_private
from functional_fsdp._shared.torch_names import OperationMode


def init(make: Callable[[], nn.Module], *, seed: int = 0, optimizer: Any = None, **spec: Any) -> tuple[State, Any]:
    """fsdp.init in a world of one; toy models have small blocks, which is not what is looked at here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="What no block covers")
        return fsdp.init(make, Spec(fsdp.local_mesh(), **spec), optimizer, seed=seed)


def values(make: Callable[[], nn.Module], **kwargs: Any) -> dict[str, torch.Tensor]:
    return fsdp.full_params(init(make, **kwargs)[0])


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.fc(self.norm(h))


class GPT(nn.Module):
    """With everything that real models do in their constructors."""

    mask: torch.Tensor
    inv_freq: torch.Tensor
    noise: torch.Tensor

    def __init__(self, width: int = 64, vocabulary: int = 50, depth: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width, padding_idx=3)
        self.pos = nn.Parameter(torch.randn(16, width) * 0.01)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("noise", torch.randn(5))
        self.apply(self.init_weights)
        self.head.weight = self.wte.weight

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.25)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.wte(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(h)


# -------------------------------------------------------------------------------- structure


def test_the_state_is_as_if_the_module_had_been_sharded() -> None:
    state, model = init(GPT)
    module = GPT()
    params, skeleton = fsdp.functionalize(module)
    full = fsdp.full_params(state)
    assert list(full) == list(params)
    assert full["wte.weight"] is full["head.weight"]
    assert state.units == ("pos", "wte.weight", "blocks.0", "blocks.1", "blocks.2")
    assert state.layout.source[-1] == "wte.weight"
    assert state.between_steps
    assert state.opt == {}
    for name, p in full.items():
        assert (p.shape, p.dtype, p.device.type) == (params[name].shape, params[name].dtype, "cpu")
    assert type(model) is GPT
    assert repr(model) == repr(skeleton)
    assert model.wte.weight is not model.head.weight
    assert all(p.device.type == "meta" for p in model.parameters())
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(fsdp.TreeError, match="bind weights first"):
        model(ids)
    module.load_state_dict({**full, "inv_freq": model.inv_freq, "noise": model.noise})
    state, weights = fsdp.unshard(state)
    assert torch.equal(fsdp.bind(model, weights)(ids), module(ids))


def test_frozen_parameters_are_frozen() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[0].requires_grad_(False)
        return module

    state, model = init(make)
    assert list(state.layout.trainable) == ["1"]
    assert not model[0].weight.requires_grad


# -------------------------------------------------------------------------------- values


def test_the_statistics_are_those_of_the_modules_own_initialisers() -> None:
    torch.manual_seed(0)
    params, real = values(GPT), dict(GPT().named_parameters())
    for name, p in real.items():
        ours = params[name].double()
        assert ours.isfinite().all(), name
        if p.numel() > 500:
            torch.testing.assert_close(ours.std(), p.detach().double().std(), rtol=0.1, atol=1e-6)
            torch.testing.assert_close(ours.mean(), p.detach().double().mean(), rtol=0, atol=0.1 * p.std().item())
        else:
            torch.testing.assert_close(ours, p.detach().double())
    assert (params["blocks.1.fc.bias"] == 0.25).all()
    assert (params["blocks.1.norm.weight"] == 1).all()
    assert params["blocks.1.fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_padding_idx_is_zero() -> None:
    params = values(lambda: nn.Embedding(10, 4, padding_idx=2))
    assert params["weight"][2].tolist() == [0.0] * 4
    assert (params["weight"].abs().sum(1) > 0).sum() == 9


def test_equal_layers_do_not_get_equal_weights() -> None:
    params = values(GPT)
    assert not torch.equal(params["blocks.0.fc.weight"], params["blocks.1.fc.weight"])
    assert not torch.equal(params["blocks.1.fc.weight"], params["blocks.2.fc.weight"])


class One(nn.Module):
    """One parameter of this shape, made by this initialiser."""

    def __init__(self, fill: Callable[[torch.Tensor], Any], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(*shape))
        fill(self.w)


INITIALISERS: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[int, ...]]] = {
    "uniform_": (lambda w: nn.init.uniform_(w, -0.3, 0.1), (80, 60)),
    "normal_": (lambda w: nn.init.normal_(w, 0.5, 0.1), (80, 60)),
    "xavier_uniform_": (nn.init.xavier_uniform_, (80, 60)),
    "xavier_normal_": (nn.init.xavier_normal_, (80, 60)),
    "kaiming_uniform_": (lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)), (80, 60)),
    "kaiming_normal_": (lambda w: nn.init.kaiming_normal_(w, mode="fan_out"), (80, 60)),
    "trunc_normal_": (lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.04, b=0.04), (80, 60)),
    "trunc_normal_ of a tail": (lambda w: nn.init.trunc_normal_(w, std=1.0, a=1.0, b=1.2), (80, 60)),
    "orthogonal_": (lambda w: nn.init.orthogonal_(w, gain=2.0), (80, 60)),
    "sparse_": (lambda w: nn.init.sparse_(w, sparsity=0.25, std=0.5), (80, 60)),
    "eye_": (nn.init.eye_, (20, 30)),
    "dirac_": (nn.init.dirac_, (8, 8, 3)),
    "constant_": (lambda w: nn.init.constant_(w, 0.7), (7,)),
    "in place": (lambda w: w.data.uniform_(-1, 1).mul_(0.5).add_(2), (80, 60)),
    "erfinv_": (lambda w: w.data.uniform_(-0.9, 0.9).erfinv_().mul_(0.02).clamp_(-0.02, 0.02), (80, 60)),
    "a row of its own": (lambda w: (w.data.normal_(), w.data[3].fill_(9.0)), (80, 60)),
    "copy_": (lambda w: w.data.copy_(torch.arange(12.0).view(3, 4).flip(0)), (3, 4)),
}


@pytest.mark.parametrize("name", list(INITIALISERS))
def test_every_initialiser_gives_what_it_gives_for_real(name: str, poisoned: None) -> None:
    fill, shape = INITIALISERS[name]
    ours = values(lambda: One(fill, *shape))["w"]
    torch.manual_seed(1)
    real = One(fill, *shape).w.detach()
    assert ours.isfinite().all()
    if name in ("eye_", "dirac_", "constant_", "copy_"):
        assert torch.equal(ours, real)
    spread = real.std().item()
    assert ours.mean().item() == pytest.approx(real.mean().item(), abs=0.1 * spread + 1e-6)
    assert ours.std().item() == pytest.approx(spread, rel=0.05)
    assert ours.min().item() == pytest.approx(real.min().item(), abs=spread)
    assert ours.max().item() == pytest.approx(real.max().item(), abs=spread)
    low, high = {"uniform_": (-0.3, 0.1), "trunc_normal_": (-0.04, 0.04), "erfinv_": (-0.02, 0.02)}.get(
        name, (-1e3, 1e3)
    )
    assert low <= ours.min() <= ours.max() <= high
    assert (ours == 0).sum() == (real == 0).sum()
    if name == "orthogonal_":
        torch.testing.assert_close(ours.T @ ours, 4 * torch.eye(60), rtol=1e-4, atol=1e-4)


def test_memory_that_no_initialiser_wrote_is_never_taken_for_weights(poisoned: None) -> None:
    """On the meta device an initialiser may do nothing at all; the weights would be whatever the memory held."""

    def only_for_real(w: torch.Tensor) -> None:
        if w.device.type != "meta":
            w.data.normal_()

    try:
        found = values(lambda: One(only_for_real, 40, 40))
    except SpecError as error:
        assert "'w'" in str(error)  # noqa: PT017
    else:
        assert found["w"].isfinite().all()


def test_parameters_from_values() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.5))
            self.literal = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            self.drawn = nn.Parameter(torch.randn(30, 30))
            self.doubled = nn.Parameter(self.drawn.detach().clone() * 2)
            self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.legacy = nn.Parameter(torch.Tensor([5.0, 6.0]))
            self.short = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))

    params = values(Model)
    assert params["scalar"].item() == 2.5
    assert params["literal"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert params["drawn"].std().item() == pytest.approx(1, rel=0.1)
    assert torch.equal(params["doubled"], 2 * params["drawn"])
    assert params["steps"].tolist() == [0, 1, 2]
    assert params["empty"].shape == (0, 4)
    assert params["legacy"].tolist() == [5.0, 6.0]
    assert params["short"].tolist() == [0.5] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_module_that_is_converted_as_it_is_made(dtype: torch.dtype) -> None:
    state, model = init(lambda: GPT(width=16).to(dtype))
    plain = values(lambda: GPT(width=16))
    state, params = fsdp.unshard(state)
    assert {p.dtype for p in params.values()} == {dtype}
    assert model.noise.dtype == dtype
    for name, p in params.items():
        assert torch.equal(p, plain[name].to(dtype))


def test_modules_of_torch() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict(
            {
                "lstm": nn.LSTM(8, 8),
                "bn": nn.BatchNorm2d(4),
                "conv": nn.Conv2d(3, 8, 3),
                "attn": nn.MultiheadAttention(8, 2),
                "wn": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
                "bilinear": nn.Bilinear(3, 3, 3),
                "prelu": nn.PReLU(),
            }
        )

    torch.manual_seed(0)
    params = values(make)
    for name, p in make().named_parameters():
        ours = params[name]
        assert ours.shape == p.shape
        assert ours.isfinite().all(), name
        assert ours.abs().max() <= 1.5 * p.abs().max() + 1e-6, name
        assert (ours.std(correction=0) > 0) == (p.std(correction=0) > 0), name
    _, model = init(make)
    assert model["bn"].num_batches_tracked.item() == 0
    assert model["bn"].running_var.tolist() == [1.0] * 4
    wn = params["wn.parametrizations.weight.original0"]
    torch.testing.assert_close(wn, params["wn.parametrizations.weight.original1"].norm(dim=1, keepdim=True))


# -------------------------------------------------------------------------------- buffers


def test_buffers_have_values() -> None:
    _, model = init(GPT)
    real = GPT()
    assert torch.equal(model.mask, real.mask)
    assert torch.equal(model.inv_freq, real.inv_freq)
    assert model.noise.device.type == "cpu"
    assert model.noise.std() > 0
    assert model._non_persistent_buffers_set == {"mask"}


class Attributes(nn.Module):
    literal: torch.Tensor
    nothing: None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("literal", torch.tensor([1.0, -2.0, 3.5]))
        self.register_buffer("number", torch.tensor(7))
        self.register_buffer("from_list", torch.as_tensor([1, 2]))
        self.register_buffer("legacy", torch.Tensor([4.0, 5.0]))
        self.register_buffer("nothing", None)
        self.plain = torch.arange(3) * 2
        self.w = nn.Parameter(torch.ones(2))
        self.scaled = self.plain.float() / self.plain.float().max()


def test_literals_and_plain_attributes_have_values() -> None:
    _, model = init(Attributes)
    assert model.literal.tolist() == [1.0, -2.0, 3.5]
    assert (model.number.item(), model.number.dtype) == (7, torch.int64)
    assert model.from_list.tolist() == [1, 2]
    assert model.legacy.tolist() == [4.0, 5.0]
    assert model.nothing is None
    assert model.plain.tolist() == [0, 2, 4]
    assert model.scaled.tolist() == [0.0, 0.5, 1.0]


def test_a_literal_that_is_changed_in_place_is_changed_once_for_each_who_asks() -> None:
    """What led to each parameter is replayed from the literal as it was, however often that was done before."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.tensor([1.0, 2.0])
            base.mul_(3)
            assert base.sum().item() == 9  # a replay on the spot
            self.first = nn.Linear(1, 2, bias=False)
            self.second = nn.Linear(1, 2, bias=False)
            self.first.weight.data.copy_(base[:, None])
            self.second.weight.data.copy_(base[:, None] + 1)
            self.register_buffer("base", base)

    state, model = init(Model, units=["first", "second"])
    found = fsdp.full_params(state)
    assert found["first.weight"].flatten().tolist() == [3, 6]
    assert found["second.weight"].flatten().tolist() == [4, 7]
    assert model.base.tolist() == [3, 6]


def test_no_tensor_of_the_model_stays_without_values() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.masks = [torch.ones(2), torch.zeros(2)]
            self.tables = {"cos": torch.arange(3.0).cos()}

    try:
        _, model = init(Lists)
    except SpecError as error:  # it may refuse, but not hand out a model that cannot compute
        assert "masks" in str(error)  # noqa: PT017
    else:
        assert [mask.tolist() for mask in model.masks] == [[1.0, 1.0], [0.0, 0.0]]
        assert model.tables["cos"][0].item() == 1.0


# -------------------------------------------------------------------------------- bits


def test_bits_are_those_of_the_seed_whatever_the_global_generator_did_which_is_left_alone() -> None:
    torch.manual_seed(1)
    (one, model), before = init(GPT, seed=3), torch.get_rng_state()
    same, again = init(GPT, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(7)
    (later, _), (other, differs) = init(GPT, seed=3), init(GPT, seed=4)
    assert equal(fsdp.full_params(one), fsdp.full_params(same))
    assert equal(fsdp.full_params(one), fsdp.full_params(later))
    assert torch.equal(model.noise, again.noise)
    assert not torch.equal(model.noise, differs.noise)
    for name in ("wte.weight", "pos", "blocks.0.fc.weight"):
        assert not torch.equal(fsdp.full_params(one)[name], fsdp.full_params(other)[name])
    assert other.rng.item() == 4


@pytest.mark.parametrize(
    "spec",
    [
        {"placement": fsdp.ddp("data")},
        {"placement": fsdp.zero1("data"), "precision": fsdp.Precision(compute=torch.bfloat16)},
        {"units": [("wte", "pos", "blocks.*")]},
        {"units": ["blocks.*.fc", "blocks.*.norm"], "labels": {"*.bias": "bias"}},
        {"trainable": {"blocks.0": False}},
    ],
)
def test_the_bits_do_not_depend_on_placement_units_or_labels(spec: dict[str, Any]) -> None:
    assert equal(values(GPT), values(GPT, **spec))


def test_a_generator_of_the_modules_own_decides_nothing() -> None:
    generator = torch.Generator().manual_seed(7)
    before = generator.get_state()
    one, same = (values(lambda: One(lambda w: w.data.normal_(2.0, 0.1, generator=generator), 30)) for _ in range(2))
    assert equal(one, same)
    assert torch.equal(generator.get_state(), before)
    assert one["w"].mean().item() == pytest.approx(2, abs=0.1)


def test_draws_cost_nothing_for_devices_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed puts a stack into words for each of them, in each call."""
    said: list[str] = []

    def format_stack() -> list[str]:
        said.append(sys._getframe(1).f_globals["__name__"])
        return []

    monkeypatch.setattr(traceback, "format_stack", format_stack)
    torch.manual_seed(0)
    assert "torch.xpu" in said
    said.clear()
    init(GPT)
    assert {*said} <= {"torch.cuda"}


def test_draws_are_those_of_the_seed_alone() -> None:
    """Of the second operation that is recorded: the first makes what is filled."""
    number = int.from_bytes(hashlib.sha256(b"3 1").digest()[:7], "little")
    torch.manual_seed(number)
    expected = torch.empty(30).normal_(2.0, 0.1)
    assert torch.equal(values(lambda: One(lambda w: w.data.normal_(2.0, 0.1), 30), seed=3)["w"], expected)


def test_a_hard_coded_device_is_not_silently_unseeded() -> None:
    """Every rank would draw its own weights."""

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, device="cpu"))

    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        try:
            found.append(values(Stubborn, seed=0))
        except SpecError as error:
            assert "'w'" in str(error)  # noqa: PT017
    assert len(found) != 1
    assert not found or equal(*found)


# -------------------------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """The largest sum of bytes of real tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def live(self) -> int:
        tensors = [t for t in (ref() for ref in self.alive) if t is not None]
        self.alive = [weakref.ref(t) for t in tensors]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().device.type != "meta":  # fake ones lie there
                self.alive.append(weakref.ref(t))
        self.peak = max(self.peak, self.live())
        return out


def stack(depth: int, width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(Block(width) for _ in range(depth)))


def test_only_one_unit_is_whole_at_a_time() -> None:
    depth, width = 8, 128
    unit = 4 * (width * width + 3 * width)
    with LiveBytes() as memory:
        state, model = fsdp.init(stack(depth, width), Spec(fsdp.local_mesh()))
    shards = state.layout.nbytes("main")
    assert shards == depth * unit
    assert memory.peak >= shards + 0.9 * unit  # it does see what is there
    assert memory.peak <= shards + 1.1 * unit
    assert memory.live() <= shards + 1024
    del state, model
    assert memory.live() <= 1024


def test_construction_itself_allocates_nothing() -> None:
    seen: list[int] = []

    def make() -> nn.Module:
        module = stack(4, 256)()
        seen.append(memory.peak)
        return module

    with LiveBytes() as memory:
        fsdp.init(make, Spec(fsdp.local_mesh()))
    assert seen == [0]
    assert memory.peak > 4 * 256 * 256 * 4


def test_construction_may_look_at_values() -> None:
    """What led to the one tensor is replayed on the spot, with the same random numbers as later."""
    seen: dict[str, Any] = {}

    def look(w: torch.Tensor) -> None:
        w.data.normal_()
        seen.update(item=torch.linspace(0, 1, 3)[1].item(), list=torch.arange(3).tolist(), top=float(w.data.max()))
        if w.data.sum() > -1e9:
            w.data.mul_(2)

    found = values(lambda: One(look, 30))["w"]
    assert seen["item"] == 0.5
    assert seen["list"] == [0, 1, 2]
    assert seen["top"] == found.max().item() / 2


# -------------------------------------------------------------------------------- what it cannot do


def test_weights_that_make_reads_by_torch_load_are_refused_with_the_way_to_read_them(tmp_path: Path) -> None:
    """torch.load gives no values where tensors have none."""
    there = nn.Linear(2, 2)
    torch.save(there.state_dict(), tmp_path / "weights.pt")

    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        module.load_state_dict(torch.load(tmp_path / "weights.pt"))
        return module

    spec = Spec(fsdp.local_mesh())
    with pytest.raises(SpecError, match=r"init: .* by torch\.load, .*init\(make, spec, weights=file\)"):
        fsdp.init(make, spec)
    state, _ = fsdp.init(lambda: nn.Linear(2, 2), spec, weights=tmp_path / "weights.pt")
    assert torch.equal(fsdp.full_params(state)["weight"], there.weight)


@pytest.mark.parametrize("look", [lambda w: w.detach().numpy(), lambda w: w.data.nonzero().shape])
def test_construction_that_fake_tensors_cannot_follow(look: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(SpecError, match=r"values yet \(.+\)\. .* use functionalize\(module\) and shard") as caught:
        init(lambda: One(look, 3))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_tensor_that_was_made_beside_the_recording_is_refused() -> None:
    beside = torch.randn(3)

    def look(w: torch.Tensor) -> None:
        fake: Any = w.data
        w.data = fake.fake_mode.from_tensor(beside)

    with pytest.raises(SpecError, match=r"a tensor of shape \(3,\) was made where it could not be recorded\..*shard"):
        init(lambda: One(look, 3))


def raising(error: Exception) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        raise error

    return make


@pytest.mark.parametrize(
    ("make", "spec", "error", "said"),
    [
        (raising(ValueError("mine")), {}, ValueError, "mine"),  # the user's own
        (raising(RuntimeError()), {}, SpecError, "could not be built with tensors that have no values yet"),
        (nn.ReLU, {}, fsdp.TreeError, "no leaves"),
        (GPT, {"units": ["layers.*"]}, SpecError, "matches nothing"),
        (nn.Linear(2, 2), {}, SpecError, r"expected a function that builds the module, as lambda: Linear\(\.\.\.\)"),
        (lambda: 3, {}, SpecError, r"make\(\) returned: expected a module, and got 3"),
    ],
)
def test_what_is_refused(make: Any, spec: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        init(make, **spec)


def test_construction_may_copy_layers() -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    assert fsdp.init(make, Spec(fsdp.local_mesh()))[0].units == ("layers.0", "layers.1")  # warnings are errors here


def test_a_higher_order_operator_is_given_the_operation_that_it_asks_for() -> None:
    """And not a function that runs it under our mode."""

    class Mode(OperationMode):
        def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
            return func(*args, **kwargs)

    x = torch.ones(2, 2, dtype=torch.int8)
    with Mode():
        assert torch.equal(out_dtype(torch.ops.aten.mm.default, torch.int32, x, x), torch.full((2, 2), 2).int())


def test_modes_of_fake_tensors_have_the_rules_of_higher_order_operators() -> None:
    """By which Inductor runs an operator that writes to its arguments, as an optimizer of torch's in a driven step."""
    with torch_private.fakes_that_die():
        x = torch.ones(2)
        (y,) = cond_op(x.sum() > 0, lambda a: (a + 1,), lambda a: (a * 2,), (x,))
        assert y.shape == (2,)


class Counted(nn.Module):
    """Tensors of one number, of which torch keeps what they are, by weak references to storages."""

    one: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale, self.shift = torch.tensor(2.0), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("one", torch.tensor(3.0))
        self.linear.weight.note = "kept"  # type: ignore[attr-defined]


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = Counted()
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
        notes = [one.linear.weight.note for one in (layer, *self.layers)]
        assert notes == ["kept"] * 3


def test_layers_with_numbers_can_be_copied() -> None:
    state, model = init(Copied)
    found = fsdp.full_params(state)
    assert torch.equal(found["layers.0.linear.weight"], found["layers.1.linear.weight"])
    for i, layer in enumerate(model.layers):
        assert (layer.scale.item(), layer.one.item(), found[f"layers.{i}.shift"].item()) == (2, 3, 1)


SOME = ["Copied", *[*CASES][::4]]


@pytest.mark.parametrize("family", marked([("Copied",), *((name,) for name in CASES)], [(name,) for name in SOME]))
def test_no_weak_reference_of_torchs_is_copied(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of one would free a storage twice, and corrupt the process's memory: so it is only asked for."""
    asked: list[str] = []

    def ask(self: Any, *protocol: Any) -> str:
        asked.append(type(self).__name__)
        return "nothing"  # what stands for itself

    for kind in (StorageWeakRef, FakeTensorMode, MetaConverter):
        monkeypatch.setattr(kind, "__reduce_ex__", ask)
    case = CASES.get(family)
    make = Copied if case is None else case.make
    spec = {} if case is None else case.spec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, model = init(make, **spec)
    again = fsdp.functionalize(copy.deepcopy(model))[1]
    parts = [path for path, part in again.named_modules() if path and type(part).forward is not nn.Module.forward]
    T.remat(again, parts[0])
    assert asked == []
