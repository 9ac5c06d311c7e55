"""What shares memory with a weight: one leaf where it is the same, else an error, since a copy would not follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import TreeError
from functional_fsdp import transforms as T


def by_init(module: Callable[[], nn.Module]) -> Any:
    return fsdp.init(module, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))


def by_functionalize(module: Callable[[], nn.Module]) -> Any:
    params, model = fsdp.functionalize(module())
    return fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1)), model


class Holds(nn.Module):
    def __init__(self, hold: Callable[[Any, nn.Linear], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        hold(self, self.layer)


def closed(m: Any, layer: nn.Linear) -> None:
    held = layer.weight.detach()
    layer.register_forward_hook(lambda module, args, out: out @ held)


#: what holds memory of a weight, and what is said of it
REFUSED: dict[str, tuple[Callable[[Any, nn.Linear], Any], str]] = {
    "an attribute": (lambda m, layer: setattr(m, "view", layer.weight.detach().t()),
        "'view' in the module .* has memory of the parameter 'layer.weight'"),
    # another spec may train it, and `load_weights` give it other values
    "of a frozen one": (lambda m, layer: setattr(m, "view", layer.weight.requires_grad_(False).detach().t()),
        "'view' in the module .* has memory of the parameter 'layer.weight', whose values come from a state"),
    "within a dict": (lambda m, layer: setattr(m, "held", {"w": [layer.weight.data[1:]]}),
        r"held\['w'\]\[0\]. in the module"),
    "closed over": (closed, "held' in the module .* has memory of the parameter 'layer.weight'"),
    "a buffer": (lambda m, layer: m.register_buffer("seen", layer.weight.data), "'seen' in the module"),
    "transposed": (lambda m, layer: setattr(m, "w", nn.Parameter(layer.weight.data.t())),
        "'w' and 'layer.weight' share memory, in other ways"),
    "frozen": (lambda m, layer: setattr(m, "w", nn.Parameter(layer.weight.data, requires_grad=False)),
        "of the one leaf that they are 'layer.weight' trains alone"),
}  # fmt: skip


@pytest.mark.parametrize("make", [by_init, by_functionalize])
@pytest.mark.parametrize("hold", REFUSED)
def test_what_would_not_follow_a_weight_is_refused(hold: str, make: Any) -> None:
    of, said = REFUSED[hold]
    with pytest.raises(TreeError, match=said):
        make(lambda: Holds(of))


def parts_of_one(m: Any, layer: nn.Linear) -> None:
    m.a, m.b = (nn.Parameter(part) for part in torch.randn(4, 2).chunk(2))
    m.clone = layer.weight.detach().clone()


@pytest.mark.parametrize("make", [by_init, by_functionalize])
def test_parts_of_one_storage_and_clones_are_what_they_were(make: Any) -> None:
    state, _ = make(lambda: Holds(parts_of_one))
    assert fsdp.full_params(state).keys() == {"a", "b", "layer.weight", "layer.bias"}


@pytest.mark.parametrize("make", [by_init, by_functionalize])
def test_a_weight_that_a_hook_computes_anew_in_each_call_is_no_memory_of_it(make: Any) -> None:
    """As torch.nn.utils.spectral_norm has it: until the first call the attribute is the parameter's memory."""
    spectral_norm = nn.utils.spectral_norm
    state, model = make(lambda: nn.Sequential(spectral_norm(nn.Linear(4, 4).double())).eval())
    plain = nn.Sequential(spectral_norm(nn.Linear(4, 4).double())).eval()
    plain.load_state_dict({**plain.state_dict(), **fsdp.full_params(state), **fsdp.buffers(model)})
    x, optimizer = torch.randn(8, 4).double(), torch.optim.SGD(plain.parameters(), lr=0.1)
    forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())
    for _ in range(2):
        state, loss = forward_backward(state, x)
        state = fsdp.step(state)
        optimizer.zero_grad()
        (right := plain(x).square().mean()).backward()
        optimizer.step()
        assert torch.equal(loss, right)


def tied_by_data() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight.data = module[0].weight.data
    return module


@pytest.mark.parametrize("make", [by_init, by_functionalize])
def test_weights_of_the_same_bytes_are_one_leaf(make: Any) -> None:
    """As they are to an optimizer of torch, which writes in place."""
    state, model = make(tied_by_data)
    whole = fsdp.full_params(state)
    plain = tied_by_data()
    plain.load_state_dict({path: leaf.clone() for path, leaf in whole.items()})
    x = torch.randn(8, 4)
    state, _ = T.forward_backward(model, lambda model, x: model(x).square().mean())(state, x)
    after = fsdp.full_params(fsdp.step(state))
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(after["0.weight"], after["2.weight"])
    for path, p in plain.named_parameters():
        torch.testing.assert_close(after[path], p.detach())
