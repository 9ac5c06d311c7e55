"""functionalize and bind: a module as a function of its weights, that behaves as the module and leaves it alone."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils._pytree as pytree
from support.files import saved
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import TreeError
from functional_fsdp import transforms as T
from functional_fsdp._nn.module import Slots


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(torch.tanh(self.up(h)))

    def half(self, h: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        return self.up(h) * scale

    def first_layer(self, h: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.up(h) * scale


class Model(nn.Module):
    """Tied, nested, with buffers and methods: what real models have."""

    table: torch.Tensor
    wte: Any
    blocks: Any
    head: Any

    def __init__(self, vocabulary: int = 7, width: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.width = width
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        if tied:
            self.head.weight = self.wte.weight
        self.register_buffer("table", torch.arange(float(width)))

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.wte(ids) * self.gain + self.table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.encode(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    @staticmethod
    def count(ids: torch.Tensor) -> int:
        return ids.numel()


IDS = torch.tensor([[1, 2, 3, 4], [0, 6, 5, 1]])


def model(**kwargs: Any) -> Model:
    torch.manual_seed(0)
    return Model(**kwargs)


# -------------------------------------------------------------------------------- functionalize


class Tap:
    """A hook that is an object, or a method of one."""

    def __init__(self, feats: dict[str, Any]) -> None:
        self.feats = feats

    def __call__(self, part: Any, args: Any, out: torch.Tensor) -> None:
        self.feats["a"] = out

    def method(self, *args: Any) -> None:
        self(*args)


class Featured(nn.Module):
    """Reads what a hook, or a function in an attribute, wrote into a container that it holds."""

    feats: Any
    scale: Any

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        feats: dict[str, Any] = {} if how != "nested" else {"deep": [{}]}
        self.feats = feats
        self.scale = lambda out: out
        first, forward, calls = self.a, self.a.forward, 0

        def write(into: Any, part: Any, args: Any, out: Any) -> None:
            into["a"] = out

        def counting(part: Any, args: Any, out: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                feats["a"] = out
            else:
                counting(part, args, out)

        hooks: dict[str, Any] = {
            "closure": lambda part, args, out: feats.__setitem__("a", out),
            "default": lambda part, args, out, into=feats: into.__setitem__("a", out),
            "keyword": lambda part, args, out, *, into=feats: into.__setitem__("a", out),
            "partial": functools.partial(write, feats),
            "method": Tap(feats).method,
            "object": Tap(feats),
            "recursive": counting,
            "nested": lambda part, args, out: feats["deep"][0].__setitem__("a", out),
        }
        if how in hooks:
            self.a.register_forward_hook(hooks[how])
        elif how == "backward":
            feats["a"] = torch.ones(2)
            self.a.register_full_backward_hook(lambda part, into, out: feats.__setitem__("a", into))
        elif how == "attribute":
            self.scale = lambda out: feats.setdefault("a", first(out)) * 2
        elif how == "in a list":
            self.scale = {"all": [lambda out: feats.setdefault("a", first(out)) * 2]}
        else:
            part: Any = self.a
            part.forward = lambda x: feats.setdefault("a", forward(x) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale["all"][0] if isinstance(self.scale, dict) else self.scale
        y = scale(self.b(self.a(x)))
        feats = self.feats["deep"][0] if "deep" in self.feats else self.feats
        return y + feats["a"]


@pytest.mark.parametrize(
    "how",
    ["closure", "default", "keyword", "partial", "method", "object", "recursive", "nested", "backward", "attribute",
     "in a list", "forward"],
)  # fmt: skip
def test_functions_go_on_with_the_copy(how: str) -> None:
    """What a hook of the copy closes over is the copy's, and the module's own is left alone."""
    module, other = Featured(how), Featured(how)
    params = {name: p.detach() for name, p in other.named_parameters()}
    x = torch.randn(3, 2)
    want = other(x)
    before = repr(module.feats)
    _, skeleton = fsdp.functionalize(module)
    again = fsdp.functionalize(skeleton)[1]  # as a driver does
    for one in (skeleton, again):
        assert torch.equal(fsdp.bind(one, params)(x), want)
        assert repr(module.feats) == before


def test_what_a_hook_writes_for_its_user_stays_his() -> None:
    seen: list[torch.Tensor] = []
    tap = Tap({})
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].register_forward_hook(lambda part, args, out: seen.append(out))
    module[1].register_forward_hook(tap)
    params, skeleton = fsdp.functionalize(module)
    out = fsdp.bind(skeleton, params)(torch.ones(1, 2))
    assert len(seen) == 1
    assert tap.feats["a"] is out


FEATS: dict[str, Any] = {}


class Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)


def test_functions_that_cannot_go_on_with_the_copy_are_refused() -> None:
    module = Local()
    module.table = nn.Buffer(torch.ones(2))
    table = module.table
    module.a.register_forward_hook(lambda part, args, out: out * table)
    with pytest.raises(fsdp.TreeError, match=r"'a\._forward_hooks\[\d+\]\.table' .* closes over the buffer 'table'"):
        fsdp.functionalize(module)

    module = Local()
    module.feats = FEATS  # type: ignore[assignment]
    module.a.register_forward_hook(lambda part, args, out: FEATS.__setitem__("a", out))
    with pytest.raises(fsdp.TreeError, match=r"reads the global variable 'FEATS', which is a part of the model"):
        fsdp.functionalize(module)

    kept: dict[str, Any] = {}

    class Closes(Local):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept["a"] = self.a(x)
            return kept["a"]

    assert fsdp.functionalize(Closes())  # it is nobody's but the class's
    module = Closes()
    module.kept = kept  # type: ignore[assignment]
    with pytest.raises(fsdp.TreeError, match=r"Closes\.forward\) closes over a .* by 'kept', and classes"):
        fsdp.functionalize(module)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(kind: str) -> None:
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    handle = getattr(module[0].weight, kind)(lambda grad: None)
    with pytest.raises(fsdp.TreeError, match=r"'0\.weight' has a hook .* Spec\(trainable=\{pattern: False\}\)"):
        fsdp.functionalize(module)
    handle.remove()
    fsdp.functionalize(module)


def test_modules_that_cannot_be_copied_say_why() -> None:
    with pytest.raises(fsdp.TreeError, match=r"the parameter '0\.weight' has no shape yet: its module is lazy"):
        fsdp.functionalize(nn.Sequential(nn.LazyLinear(2)))
    module = nn.Sequential(nn.Linear(2, 2))
    part: Any = module[0]
    part.double = part.weight * 2
    with pytest.raises(fsdp.TreeError, match=r"the attribute '0\.double' is a tensor computed from others"):
        fsdp.functionalize(module)


def test_the_module_is_not_touched_and_its_tensors_are_shared() -> None:
    module = model()
    before = {name: (id(p), p.data_ptr(), p._version) for name, p in module.named_parameters(remove_duplicate=False)}
    params, _ = fsdp.functionalize(module)
    assert list(params) == list(before)
    for there in (params.items(), module.named_parameters(remove_duplicate=False)):
        assert {name: (id(p), p.data_ptr(), p._version) for name, p in there} == before


def test_the_skeleton_has_the_structure_and_no_weights() -> None:
    module = model().eval()
    module.gain.requires_grad_(False)
    params, skeleton = fsdp.functionalize(module)
    assert type(skeleton) is Model
    assert [name for name, _ in skeleton.named_modules()] == [name for name, _ in module.named_modules()]
    for name, placeholder in skeleton.named_parameters(remove_duplicate=False):
        assert placeholder.device.type == "meta"
        assert (placeholder.shape, placeholder.dtype) == (params[name].shape, params[name].dtype)
        assert isinstance(placeholder, nn.Parameter)
        assert placeholder.requires_grad == params[name].requires_grad == (name != "gain")
    assert sum(p.numel() for p in skeleton.parameters()) == sum(p.numel() for p in params.values())
    assert (skeleton.width, skeleton.training, repr(skeleton)) == (module.width, False, repr(module))
    skeleton.table.add_(1)  # a copy
    assert module.table.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_tied_weights_appear_at_both_paths() -> None:
    params, skeleton = fsdp.functionalize(model())
    assert isinstance(skeleton, Model)
    assert params["wte.weight"] is params["head.weight"]
    assert skeleton.wte.weight is not skeleton.head.weight
    zeros = {**params, "wte.weight": torch.zeros_like(params["wte.weight"])}
    assert torch.equal(fsdp.bind(skeleton, zeros)(IDS), torch.zeros(2, 4, 7))  # the first path is that of both
    assert fsdp.bind(skeleton, zeros).wte(IDS).abs().sum() == 0


# -------------------------------------------------------------------------------- bind weights first


@pytest.mark.parametrize("call", ["forward", "part", "method", "arithmetic", "cast", "detach"])
def test_a_skeleton_says_bind_weights_first(call: str) -> None:
    _, skeleton = fsdp.functionalize(model())
    assert isinstance(skeleton, Model)
    calls: dict[str, Any] = {
        "forward": lambda: skeleton(IDS),
        "part": lambda: skeleton.blocks[0](torch.ones(1, 4)),
        "method": lambda: skeleton.encode(IDS),
        "arithmetic": lambda: skeleton.gain * 2,
        "cast": lambda: skeleton.gain.to(torch.float64),
        "detach": lambda: skeleton.gain.detach(),
    }
    with pytest.raises(TreeError, match=r"bind weights first: this is a skel.*fsdp\.bind\(model, weights\)\(\.\.\.\)"):
        calls[call]()


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda m: m.state_dict(), r"fsdp\.state_dict\(state, model\)"),
        (lambda m: m.requires_grad_(False), r"fsdp\.freeze\(state, pattern\)"),
        (lambda m: m.to("cpu", torch.float64), r"Precision\(main=, compute=\)"),
        (lambda m: m.bfloat16(), r"Precision\(main=, compute=\)"),
        (lambda m: m.cpu(), r"Precision\(main=, compute=\)"),
        (lambda m: nn.init.zeros_(m.weight), r"fsdp\.replace_params\(state, params\)"),
        (lambda m: nn.init.normal_(m.weight), r"fsdp\.replace_params\(state, params\)"),
        (lambda m: m(torch.ones(1, 3)), r"linear was called on one of shape \(5, 3\)"),
    ],
)
def test_what_is_called_on_a_skeleton_as_on_any_module_is_refused_with_what_to_call_here(
    call: Any, remedy: str
) -> None:
    _, skeleton = fsdp.functionalize(nn.Linear(3, 5))
    with pytest.raises(TreeError, match=rf"bind weights first: this is a skeleton.*{remedy}"):
        call(skeleton)


def test_a_part_that_is_put_into_a_skeleton_is_refused() -> None:
    """The weights of a new head would not be used: those of the state have its name."""
    params, skeleton = fsdp.functionalize(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    skeleton[1] = nn.Linear(5, 4)
    for of in (
        lambda: T.forward_backward(skeleton, lambda m, x: m(x).sum()),
        lambda: T.apply(skeleton),
        lambda: T.remat(skeleton, "0"),
    ):
        with pytest.raises(TreeError, match=r"the parameter '1\.weight' has values, .* before functionalize"):
            of()
    with pytest.raises(TreeError, match=r"'1\.weight' has shape \(2, 5\); expected \(4, 5\)"):
        fsdp.bind(skeleton, params)


def test_a_state_of_a_model_of_another_width_is_refused_by_driven_steps() -> None:
    """It would compute by the state's shapes, and by the numbers of heads, say, of this one."""
    params, _ = fsdp.functionalize(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    _, wider = fsdp.functionalize(nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2)))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()))
    steps: list[Any] = [T.forward_backward(wider, lambda m, x: m(x).sum(), second_order=k) for k in (False, True)]
    for call in (T.apply(wider), *steps):
        with pytest.raises(TreeError, match=r"'0\.weight' is \[5, 3\] in the state, and \[7, 3\] in Sequential"):
            call(state, torch.ones(1, 3))


def test_placeholders_print_and_measure() -> None:
    _, skeleton = fsdp.functionalize(nn.Linear(3, 5))
    weight: Any = skeleton.weight
    assert repr(weight) == "Placeholder(shape=(5, 3), dtype=torch.float32)"
    assert f"{weight}" == repr(weight)
    assert (weight.numel(), weight.dim(), weight.size(0), len(weight), weight.element_size()) == (15, 2, 5, 5, 4)
    assert len({weight, skeleton.bias}) == 2


# -------------------------------------------------------------------------------- bind


WAYS: dict[str, Callable[[nn.Module, Any], torch.Tensor]] = {
    "any mapping in any order": lambda m, w: fsdp.bind(m, MappingProxyType(dict(reversed(list(w.items())))))(IDS),
    "bound again": lambda m, w: fsdp.bind(fsdp.bind(m, {k: 0 * p for k, p in w.items()}), w)(IDS),  # type: ignore[arg-type]
    "plain functional_call": lambda m, w: torch.func.functional_call(m, dict(w), (IDS,)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_skeleton_has_the_weights_that_it_is_given(way: str) -> None:
    module = model()
    params, skeleton = fsdp.functionalize(module)
    assert torch.equal(WAYS[way](skeleton, params), module(IDS))


def without(weights: Any, path: str) -> Any:
    return {name: p for name, p in weights.items() if name != path}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: without(w, "norm.weight"), r"13 parameters and was given 12 weights: it lacks 'norm\.weight'\."),
        (lambda w: without(w, "head.weight"), r"lacks 'head\.weight'.*a tied weight is a unit of its own"),
        (lambda w: {**w, "extra": torch.ones(1)}, r"13 parameters and was given 14 weights: .* unknown 'extra'\."),
        (lambda w: {"x": torch.ones(1)}, r"lacks 'gain', 'wte\.weight', 'blocks\.0\.up\.weight'\.\.\. and .*'x'\."),
        (lambda w: {**w, "norm.bias": torch.ones(5)}, r"the weight 'norm\.bias' has shape \(5,\); expected \(4,\)\."),
        *((lambda w, v=v: {**w, "gain": v}, rf"the weight 'gain' is a {type(v).__name__}; expected a tensor\.")
          for v in (None, 1.0, [[1.0, 2.0]])),
        *((lambda w, v=v: v, rf"bind: weights is a {type(v).__name__}; expected \{{path: tensor\}}")
          for v in ([torch.ones(1)], torch.ones(1), None)),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(change: Any, said: str) -> None:
    params, skeleton = fsdp.functionalize(model())
    with pytest.raises(TreeError, match=said):
        fsdp.bind(skeleton, change(params))


# -------------------------------------------------------------------------------- behaves as the module


class Scaled(nn.Linear):
    @property
    def total(self) -> torch.Tensor:
        return self.weight.sum() + self.bias.sum()


class SharedParts(nn.Module):
    """One buffer under two names and one module at two places, as rotary caches and shared norms are."""

    x: torch.Tensor
    y: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        cache = torch.arange(3.0)
        self.register_buffer("x", cache)
        self.register_buffer("y", cache)
        self.first = nn.BatchNorm1d(3)
        self.second = self.first

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(h + self.x) * self.y)


def sequence() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(2, 3), act, nn.Linear(3, 2), act)


def in_turn(layers: Any, h: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        h = layer(h)
    return h


H, TWO = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(1, 2)
#: a module, and what is asked of it and of one that is bound
ALIKE: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "a call": (model, lambda m: (m(IDS), m(ids=IDS))),
    "without a tie": (lambda: model(tied=False), lambda m: m(IDS)),
    "methods": (model, lambda m: (m.encode(IDS), m.loss(IDS), m.loss(ids=IDS), m.count(IDS))),
    "a part's method": (model, lambda m: m.blocks[1].first_layer(H, scale=2.0)),
    "methods that overload those of modules": (model, lambda m: (m.forward(IDS), m.blocks[0].half(H, scale=3.0))),
    "attributes": (model, lambda m: (m.width, m.training, m.gain, m.head.weight, m.wte.weight, m.table)),
    "a property": (lambda: Scaled(2, 3), lambda m: m.total),
    "parts": (model, lambda m: (m.norm(H), m.blocks[1].down(torch.ones(1, 8)))),
    "indices": (model, lambda m: ([m.blocks[i](H) for i in (0, 1, -1)], len(m.blocks), [b(H) for b in m.blocks])),
    "slices": (sequence, lambda m: (m[:2](TWO), m[1:](torch.ones(1, 3)))),
    "iteration, which visits a shared module each time": (sequence, lambda m: in_turn(m, TWO)),
    "a dict": (lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}),
               lambda m: (m["b"](TWO), list(m), "a" in m, "c" in m, [part(TWO) for _, part in m.items()])),
    "shared buffers and modules": (lambda: SharedParts().eval(), lambda m: m(H[:, :3])),
    "no parameters": (nn.ReLU, lambda m: m(H)),
    "another dtype": (lambda: nn.Linear(2, 2).double(), lambda m: m(TWO.double())),
}  # fmt: skip


@pytest.mark.parametrize("what", ALIKE)
def test_a_bound_module_is_as_the_module(what: str) -> None:
    """Bound to other weights than the skeleton was made from, so that reading the wrong ones shows."""
    make, ask = ALIKE[what]
    module = make()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.5)
    _, skeleton = fsdp.functionalize(make())
    found, want = ask(fsdp.bind(skeleton, fsdp.functionalize(module)[0])), ask(module)
    assert pytree.tree_structure(found) == pytree.tree_structure(want)
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(want), strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
    assert untouched(skeleton)


def test_what_a_bound_module_does_not_have() -> None:
    params, skeleton = fsdp.functionalize(model())
    bound: Any = fsdp.bind(skeleton, params)
    with pytest.raises(AttributeError, match="nothing"):
        _ = bound.nothing
    with pytest.raises(IndexError):
        bound.blocks[2]
    with pytest.raises(AttributeError, match="cannot set 'width' on a bound module"):
        bound.width = 3
    assert bound.width == 4
    assert dict(bound.named_parameters()) == params
    assert [id(p) for p in bound.parameters()] == [id(p) for p in params.values()]


def test_bind_a_part_with_its_own_weights() -> None:
    module = model()
    params, skeleton = fsdp.functionalize(module)
    assert isinstance(skeleton, Model)
    weights = {name.removeprefix("blocks.1."): p for name, p in params.items() if name.startswith("blocks.1.")}
    h = torch.randn(3, 4)
    assert torch.equal(fsdp.bind(skeleton.blocks[1], weights)(h), module.blocks[1](h))


def test_binding_leaves_the_skeleton_as_it_was() -> None:
    params, skeleton = fsdp.functionalize(model())
    before = {name: id(p) for name, p in skeleton.named_parameters(remove_duplicate=False)}
    fsdp.bind(skeleton, params)(IDS)
    with pytest.raises(IndexError):
        fsdp.bind(skeleton, params)(torch.tensor([[99]]))
    assert {name: id(p) for name, p in skeleton.named_parameters(remove_duplicate=False)} == before
    with pytest.raises(TreeError, match="bind weights first"):
        skeleton(IDS)


# -------------------------------------------------------------------------------- nothing is left behind


def untouched(skeleton: nn.Module) -> bool:
    return all(type(p).__name__ == "Placeholder" for p in skeleton.parameters())


class Recursive(nn.Module):
    """Calls itself with other weights, as weight-shared recurrences and fixed-point solvers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: torch.Tensor, others: Any = ()) -> torch.Tensor:
        before = self.inner(h)
        if others:
            before = fsdp.bind(self, others[0])(before, others[1:])
        return before + self.inner(h)


def test_weights_that_an_interrupt_left_in_a_module_go_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    params, model = fsdp.functionalize(nn.Linear(2, 2))
    before, x = model.weight, torch.ones(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "restore", lambda *args: [])  # it was on its way there
        fsdp.bind(model, params)(x)
    assert model.weight is params["weight"]
    fsdp.bind(model, params)(x)
    assert model.weight is before


def test_a_module_may_call_itself_with_other_weights() -> None:
    modules = [Recursive() for _ in range(3)]
    weights = [dict(m.named_parameters()) for m in modules]
    _, skeleton = fsdp.functionalize(modules[0])
    h = torch.randn(4, 2)

    def want(h: torch.Tensor, i: int) -> torch.Tensor:
        out = modules[i].inner(h)
        return (want(out, i + 1) if i < 2 else out) + modules[i].inner(h)

    for _ in range(2):
        assert torch.equal(fsdp.bind(skeleton, weights[0])(h, weights[1:]), want(h, 0))
        assert untouched(skeleton)


def test_other_weights_while_weights_are_in_and_a_wrong_one() -> None:
    """Also a part of the module; and an error inside leaves the outer weights where they were."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            before = self.part.weight
            with pytest.raises(TreeError, match="lacks 'bias'"):
                fsdp.bind(self.part, {"weight": torch.ones(2, 2)})
            with pytest.raises(RuntimeError):
                fsdp.bind(self.part, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})(h[:, :1])
            twos = fsdp.bind(self.part, {"weight": 2 * torch.ones(2, 2), "bias": torch.zeros(2)})(h)
            assert self.part.weight is before
            return twos + self.part(h)

    module = Outer()
    params, skeleton = fsdp.functionalize(module)
    h = torch.randn(4, 2)
    want = h @ (2 * torch.ones(2, 2)) + module.part(h)
    for _ in range(2):
        torch.testing.assert_close(fsdp.bind(skeleton, params)(h), want)
        assert untouched(skeleton)


def test_checkpoints_that_bind_in_backward() -> None:
    module = Block(3)
    params, skeleton = fsdp.functionalize(module)
    h = torch.randn(4, 3)

    def loss(p: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = checkpoint(lambda p, h: fsdp.bind(skeleton, p)(h), p, h, use_reentrant=False)
        return out.square().sum()

    weights = {name: p.detach().requires_grad_() for name, p in params.items()}
    grads = torch.autograd.grad(loss(weights), list(weights.values()))
    wanted = torch.autograd.grad(module(h).square().sum(), list(module.parameters()))
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want)
    assert untouched(skeleton)


class Stateful(nn.Module):
    """Does to its own parameters and buffers what modules do."""

    count: torch.Tensor
    mean: torch.Tensor
    seen: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", None)

    def forward(self, h: torch.Tensor, what: str) -> torch.Tensor:
        out = self.layer(h) * self.gain
        if what == "in place":
            self.count.add_(1)
        elif what == "replace a buffer":
            self.mean = out.detach().mean(0)
            assert self.mean.abs().sum() > 0
        elif what == "fill a buffer":
            self.seen = h
        elif what == "delete a buffer":
            del self.mean
        elif what == "replace a parameter":
            self.gain = nn.Parameter(2 * torch.ones(2))
        elif what == "delete a parameter":
            del self.gain
        elif what == "an attribute in its place":
            gain = self.gain
            del self.gain
            self.gain = 2 * gain  # type: ignore[assignment]
        return out


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("what", ["in place", "replace a buffer", "fill a buffer", "delete a buffer"])
def test_what_a_module_does_to_its_buffers(what: str, known: bool) -> None:
    """Buffers that a call takes away are there again; what it makes of others stays."""
    module = Stateful()
    params, skeleton = fsdp.functionalize(module)
    h = torch.randn(4, 2)
    if known:
        fsdp.bind(skeleton, params)(h, "nothing")
    want = module.layer(h) * module.gain
    for calls in (1, 2):
        assert torch.equal(fsdp.bind(skeleton, params)(h, what), want)
        assert untouched(skeleton)
        assert torch.equal(skeleton.mean, want.mean(0) if what == "replace a buffer" else torch.zeros(2))
        assert not skeleton.mean.requires_grad
        assert skeleton.count == (calls if what == "in place" else 0)
        assert (skeleton.seen is h) == (what == "fill a buffer")


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("what", ["replace a parameter", "delete a parameter", "an attribute in its place"])
def test_a_parameter_that_a_module_puts_in_the_place_of_another_is_refused(what: str, known: bool) -> None:
    """It would be lost. The skeleton is as it was, and goes on."""
    module = Stateful()
    params, skeleton = fsdp.functionalize(module)
    h = torch.randn(4, 2)
    if known:
        fsdp.bind(skeleton, params)(h, "nothing")
    for _ in range(2):
        with pytest.raises(fsdp.ScheduleError, match=r"changed the weight 'gain' by assignment.*replace_params"):
            fsdp.bind(skeleton, params)(h, what)
        assert untouched(skeleton)
        assert set(dict(skeleton.named_parameters())) == {"layer.weight", "gain"}
        assert "gain" not in vars(skeleton)
        assert torch.equal(fsdp.bind(skeleton, params)(h, "nothing"), module.layer(h) * module.gain)


class Assigns(nn.Module):
    """Puts new tensors in the places of its buffers."""

    mean: torch.Tensor
    calls: torch.Tensor
    cache: torch.Tensor

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2), persistent=persistent)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, h: torch.Tensor, fails: bool = False) -> torch.Tensor:
        out: torch.Tensor = self.layer(h + self.mean)
        self.mean = 0.5 * self.mean + out.mean(0)
        self.calls = self.calls + 1
        if fails:
            raise ZeroDivisionError
        return out


def bound_by(way: str, skeleton: nn.Module, params: Any) -> Any:
    """bind by the short way, by the long one, by checkpointing, or compiled."""
    if way == "checkpoint":
        return lambda h: checkpoint(fsdp.bind(skeleton, params), h, use_reentrant=False)
    if way == "compiled":
        return torch.compile(lambda h: fsdp.bind(skeleton, params)(h), fullgraph=True, backend="aot_eager")
    return fsdp.bind(skeleton, params)


@pytest.mark.parametrize("way", ["short", "long", "checkpoint", "long checkpoint", "compiled"])
def test_a_buffer_that_the_forward_replaces_is_the_skeletons_from_then_on(way: str) -> None:
    module = plain = Assigns()
    params, skeleton = fsdp.functionalize(module)
    if way.startswith("long"):  # no skeleton
        skeleton = copy.deepcopy(module)
    bound = bound_by(way.removeprefix("long "), skeleton, params)
    for _ in range(3):
        h = torch.randn(4, 2, requires_grad=True)
        out, want = bound(h), plain(h)
        torch.testing.assert_close(out, want)
        out.sum().backward()
        plain.mean.detach_()
        torch.testing.assert_close(dict(skeleton.named_buffers()), dict(plain.named_buffers()))
        assert not skeleton.mean.requires_grad
    with pytest.raises(ZeroDivisionError):
        fsdp.bind(skeleton, params)(h, fails=True)
    torch.testing.assert_close(dict(skeleton.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("long", [False, True])
def test_where_it_would_be_lost_it_is_refused(long: bool) -> None:
    h = torch.ones(3, 2)

    def loss(bound: Any, h: torch.Tensor) -> torch.Tensor:
        return bound(h).sum()

    for persistent in (True, False):
        module = Assigns(persistent)
        params, skeleton = fsdp.functionalize(module)
        skeleton = copy.deepcopy(module) if long else skeleton
        for run in (
            lambda: torch.func.grad(lambda p: loss(fsdp.bind(skeleton, p), h))(params),  # noqa: B023
            lambda: torch.func.vmap(lambda h: loss(fsdp.bind(skeleton, params), h[None]))(h),  # noqa: B023
        ):
            if persistent:
                with pytest.raises(fsdp.SpecError, match=r"another tensor in the place of the buffer 'mean'"):
                    run()
            else:
                run()  # a cache is made again
            assert skeleton.mean.tolist() == [0.0, 0.0]
    shapes = {path: p.to("meta") for path, p in params.items()}
    skeleton.mean, skeleton.calls = skeleton.calls, skeleton.mean  # a number goes with any device
    assert fsdp.bind(skeleton, shapes)(h.to("meta")).is_meta
    assert not skeleton.mean.is_meta


# -------------------------------------------------------------------------------- a structure that changes


class Chain(nn.Module):
    """Whatever parts it has, one after the other."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            self.add_module(f"part{i}", part)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            h = part(h)
        return h


@pytest.mark.parametrize("change", ["added", "replaced", "removed", "parameter", "shape", "none", "name", "real"])
def test_a_skeleton_that_changes_is_looked_at_again(change: str) -> None:
    module = Chain(nn.Linear(2, 2), nn.Tanh(), Chain(nn.Linear(2, 2)))
    params, skeleton = fsdp.functionalize(module)
    h = torch.randn(4, 2)
    old = fsdp.bind(skeleton, params)
    old(h)
    for m in (module, skeleton):
        inner: Any = m.part2
        if change == "added":
            inner.part1 = nn.Linear(2, 3)
        elif change == "replaced":
            inner.part0 = nn.LayerNorm(2)
        elif change == "removed":
            del inner.part0
        elif change == "parameter":
            inner.part0.extra = nn.Parameter(torch.ones(1))
        elif change == "shape":
            inner.part0.weight, inner.part0.bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
        elif change == "none":
            inner.part0.bias = None
        elif change == "name":
            inner.other = inner.part0
            del inner.part0
        else:
            inner.part0 = nn.Linear(2, 2)
    new = {name: (p + 1).detach() for name, p in module.named_parameters()}
    if change != "real":
        with pytest.raises(TreeError):
            fsdp.bind(skeleton, params)
    if change not in ("real", "shape", "replaced"):
        with pytest.raises(RuntimeError, match="reparametrizing"):
            old(h)
    for _ in range(2):
        assert torch.equal(fsdp.bind(skeleton, new)(h), torch.func.functional_call(module, new, (h,)))
    params, skeleton = fsdp.functionalize(skeleton)
    assert torch.equal(fsdp.bind(skeleton, new)(h), torch.func.functional_call(module, new, (h,)))


def test_parts_that_change_places() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    params, skeleton = fsdp.functionalize(module)
    h = torch.randn(4, 2)
    fsdp.bind(skeleton, params)(h)
    skeleton[0], skeleton[1] = skeleton[1], skeleton[0]
    assert torch.equal(fsdp.bind(skeleton, params)(h), module(h))


def test_a_skeleton_that_was_bound_can_go() -> None:
    params, skeleton = fsdp.functionalize(model())
    fsdp.bind(skeleton, params)(IDS)
    bound: Any = fsdp.bind(skeleton, params)
    bound.blocks[0](torch.ones(1, 4))
    gone: list[weakref.ref[Any]] = [weakref.ref(skeleton), *map(weakref.ref, params.values())]
    del skeleton, bound, params
    gc.collect()
    assert [r() for r in gone] == [None] * len(gone)


def test_a_module_with_weights_is_as_it_was() -> None:
    module = model()
    before = [id(p) for p in module.parameters()]
    zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters(remove_duplicate=False)}
    for _ in range(2):
        assert fsdp.bind(module, zeros)(IDS).abs().sum() == 0
        assert [id(p) for p in module.parameters()] == before


# -------------------------------------------------------------------------------- transforms


def test_vmap_over_weights() -> None:
    module = nn.Linear(3, 2)
    params, skeleton = fsdp.functionalize(module)
    stacked = {name: torch.stack([p, 2 * p, -p]).detach() for name, p in params.items()}
    h = torch.randn(5, 3)
    out = torch.vmap(lambda p: fsdp.bind(skeleton, p)(h))(stacked)
    for i, factor in enumerate((1, 2, -1)):
        torch.testing.assert_close(out[i], F.linear(h, factor * module.weight, factor * module.bias))


def test_functional_call_with_a_part_of_the_weights_does_not_pass_silently() -> None:
    params, skeleton = fsdp.functionalize(model(tied=False))
    del params["gain"]
    with pytest.raises(TreeError, match="bind weights first"):
        torch.func.functional_call(skeleton, dict[str, torch.Tensor](params), (IDS,))


@pytest.mark.parametrize("what", ["forward", "method", "part", "methods", "static"])
def test_compiled_functions_may_bind(what: str) -> None:
    torch._dynamo.reset()
    params, skeleton = fsdp.functionalize(model())
    functions: dict[str, Any] = {
        "forward": lambda p, ids: fsdp.bind(skeleton, p)(ids),
        "method": lambda p, ids: fsdp.bind(skeleton, p).loss(ids),
        "part": lambda p, ids: fsdp.bind(skeleton, p).norm(fsdp.bind(skeleton, p).encode(ids)),
        "methods": lambda p, ids: [fsdp.bind(skeleton, p).loss(ids) for _ in range(2)],
        "static": lambda p, ids: fsdp.bind(skeleton, p).loss(ids) / fsdp.bind(skeleton, p).count(ids),
    }
    compiled = torch.compile(functions[what], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(params, IDS), functions[what](params, IDS))


# -------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_skeleton_can_be_copied(how: str) -> None:
    module = model()
    params, skeleton = fsdp.functionalize(module)
    if how == "deepcopy":
        again = copy.deepcopy(skeleton)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(skeleton))
    else:
        again = torch.load(saved(skeleton), weights_only=False)
    assert isinstance(skeleton, Model)
    assert isinstance(again, Model)
    assert again is not skeleton
    assert again.table.data_ptr() != skeleton.table.data_ptr()
    assert torch.equal(fsdp.bind(again, params)(IDS), module(IDS))
    with pytest.raises(TreeError, match="bind weights first"):
        again(IDS)


def test_a_skeleton_pickles_without_weights() -> None:
    _, skeleton = fsdp.functionalize(nn.Linear(1000, 1000))
    assert len(pickle.dumps(skeleton)) < 10_000


def test_frozen_and_integer_parameters_survive_a_copy() -> None:
    module = nn.Module()
    module.steps = nn.Parameter(torch.arange(3), requires_grad=False)
    module.w = nn.Parameter(torch.ones(2))
    _, skeleton = fsdp.functionalize(module)
    for again in (copy.deepcopy(skeleton), pickle.loads(pickle.dumps(skeleton))):
        assert (again.steps.dtype, again.steps.requires_grad) == (torch.int64, False)
        assert (again.w.dtype, again.w.requires_grad) == (torch.float32, True)


# ---------------------------------------------------------------- modules with weights


def test_as_module_is_a_module_of_the_same_class_with_these_weights() -> None:
    model = Model()
    params, skeleton = fsdp.functionalize(model)
    weights = {path: p.detach().clone() for path, p in params.items()}
    module = fsdp.as_module(skeleton, weights)
    tokens = torch.tensor([[1, 2, 3]])
    assert type(module) is Model
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    assert module.head.weight is module.wte.weight  # tied
    assert torch.equal(module(tokens), model(tokens))
    got = torch.autograd.grad(module(tokens).sum(), [*module.parameters()])
    want = torch.autograd.grad(model(tokens).sum(), [*model.parameters()])
    assert all(map(torch.equal, got, want))
    doubled = {path: 2 * weights["wte.weight" if path == "head.weight" else path] for path in weights}
    assert torch.equal(
        torch.func.functional_call(module, doubled, (tokens,), tie_weights=False), fsdp.bind(skeleton, doubled)(tokens)
    )
    assert torch.equal(torch.export.export(module, (tokens,)).module()(tokens), model(tokens))
    assert torch.equal(torch.load(saved(module), weights_only=False)(tokens), model(tokens))
    assert module.blocks[0].up.weight.data_ptr() == weights["blocks.0.up.weight"].data_ptr()  # no copy
    assert next(skeleton.parameters()).is_meta  # the skeleton goes without
    one = torch.zeros(2, 2)
    untied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    parts = fsdp.as_module(untied, {"0.weight": one, "1.weight": one})
    assert len([*parts.parameters()]) == 2  # not tied, whatever was given
    with pytest.raises(TreeError, match=r"as_module: Model has 13 parameters and was given 1 weights"):
        fsdp.as_module(skeleton, {"gain": weights["gain"]})


def test_as_module_lets_gradients_go_to_the_weights() -> None:
    model = Model(tied=False)
    params, skeleton = fsdp.functionalize(model)
    tokens = torch.tensor([[1, 2, 3]])
    want = torch.autograd.grad(model(tokens).sum(), [*model.parameters()])
    weights = {path: p.detach().clone() for path, p in params.items()}
    by_func = torch.func.grad(lambda w: fsdp.as_module(skeleton, w)(tokens).sum())(weights)
    leaves = {path: w.clone().requires_grad_() for path, w in weights.items()}
    once_more = {path: leaf * 1 for path, leaf in leaves.items()}
    by_autograd = torch.autograd.grad(fsdp.as_module(skeleton, once_more)(tokens).sum(), [*leaves.values()])
    assert all(map(torch.equal, by_func.values(), want))
    assert all(map(torch.equal, by_autograd, want))


class Again(torch.autograd.Function):
    """Calls its module again in the backward."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> Any:
        ctx.f = f
        ctx.save_for_backward(x, *weights)
        return f(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.f(x)
        return None, *torch.autograd.grad(out, (x, *weights), grad)


@pytest.mark.parametrize("how", ["adjoint", "checkpoint", "remat"])
def test_as_module_computes_in_a_backward(how: str) -> None:
    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.head = Block(4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how == "adjoint":
                h = Again.apply(self.block, x, *self.block.parameters())
            elif how == "checkpoint":
                h = checkpoint(self.block, x, use_reentrant=False)
            else:
                h = self.block(x)
            return self.head(h).square().sum()

    module, x = Runs(), torch.randn(3, 4)
    params, skeleton = fsdp.functionalize(module)
    if how == "remat":
        skeleton = T.remat(skeleton, "block")
    weights = {path: p.detach() for path, p in params.items()}
    want = torch.autograd.grad(module(x), [*module.parameters()])
    made = fsdp.as_module(skeleton, weights)
    assert all(map(torch.equal, torch.autograd.grad(made(x), [*made.parameters()]), want))
    out, pullback = T.vjp(lambda w, x: fsdp.as_module(skeleton, w)(x), weights, x)
    dw, _ = pullback(weights, torch.ones_like(out))
    assert all(map(torch.equal, dw.values(), want))


def test_as_module_of_a_state() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GRU(3, 2))
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(fsdp.local_mesh(), trainable={"0.*": False})
    buffers = {path: b + 2 for path, b in fsdp.buffers(module).items()}
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1), buffers=buffers)
    made = fsdp.as_module(model.eval(), state)
    assert [p.requires_grad for p in made.parameters()] == [path[0] != "0" for path in params]
    assert not made.training
    module.load_state_dict(fsdp.state_dict(state, module))
    x = torch.randn(5, 3)
    assert torch.equal(made(x)[0], module.eval()(x)[0])
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.zero_()  # they are the module's own
    assert all(torch.equal(fsdp.full_params(state)[path], p) for path, p in params.items())
    assert all(torch.equal(state.buffers[path], b) for path, b in buffers.items())


def test_bound_parameters_are_asked_for_as_those_of_a_module() -> None:
    model = Model()
    bound = fsdp.bind(*reversed(fsdp.functionalize(model)))  # type: ignore[arg-type]
    every: list[dict[str, Any]] = [{}, {"prefix": "m"}, {"recurse": False}, {"prefix": "m", "recurse": False}]
    for how in every:
        got = dict(bound.named_parameters(**how))
        assert got.keys() == dict(model.named_parameters(remove_duplicate=False, **how)).keys()
    assert len([*bound.named_parameters(remove_duplicate=True)]) == len([*model.parameters()])
    with pytest.raises(TypeError, match=r"Bound\((.|\n)*is not an instance of torch\.nn\.Module"):
        torch.func.functional_call(bound, dict(model.named_parameters()), (torch.tensor([1]),))  # type: ignore[arg-type]


# ---------------------------------------------------------------- modules that another library has taken over


def test_modules_that_another_library_has_taken_over() -> None:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def looks(name: str, home: str) -> nn.Module:
        return type(name, (nn.Module,), {"__module__": home})()

    fsdp.local_mesh()
    taken: dict[str, Any] = {
        "fully_shard, which has sharded": fully_shard(nn.Linear(2, 2)),
        "FSDP, which has flattened": looks("FullyShardedDataParallel", "torch.distributed.fsdp"),
        "DDP, which averages": DistributedDataParallel(nn.Linear(2, 2)),
        "replicate, which averages": replicate(nn.Linear(2, 2)),
        "opacus, which keeps": looks("AbstractGradSampleModule", "opacus.grad_sample.gsm_base"),
    }
    for what, module in taken.items():
        with pytest.raises(TreeError, match=rf"the model, a .*, was taken over by (torch's )?{what}"):
            fsdp.functionalize(module)
    part: Any = fully_shard(nn.Linear(2, 2))
    with pytest.raises(TreeError, match=r"the module '1', a FSDPLinear, was taken over"):
        fsdp.functionalize(nn.Sequential(nn.Linear(2, 2), part))


class Asserts(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.ndim == 2, x  # which pytest writes anew, with its own globals
        return super().forward(x)


def test_what_pytest_holds_is_nothing_that_a_model_reads(request: pytest.FixtureRequest) -> None:
    model, key = Asserts(2, 2), pytest.StashKey[Any]()
    request.config.stash[key] = model
    try:
        params, called = fsdp.functionalize(model)
    finally:
        del request.config.stash[key]
    assert fsdp.bind(called, params)(torch.ones(1, 2)).shape == (1, 2)
