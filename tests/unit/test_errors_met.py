"""Errors that users meet, provoked in one process: each says what was given, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import functional_fsdp as fsdp
import functional_fsdp.transforms as T

Case = Callable[[], Any]


def mean_square(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found


def state_of(model: nn.Module, **spec: Any) -> fsdp.State:
    return fsdp.shard(fsdp.functionalize(model)[0], fsdp.Spec(fsdp.local_mesh(), **spec), fsdp.sgd(lr=0.1))


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out: torch.Tensor = super().forward(x)[0]
        return out


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(x) @ self.table
        return out


def drop() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))


def per_sample(model: nn.Module, x: torch.Tensor) -> Any:
    return T.per_sample_norms(model, mean_square)(state_of(model), x)


def mixed(call: Callable[..., Any]) -> Any:
    model = nn.Sequential(Mixes(), nn.Linear(4, 4))
    half = fsdp.Precision(compute=torch.bfloat16, inputs=True)
    return call(model)(state_of(model, precision=half), torch.randn(3, 4))


def nested() -> Any:
    model = nn.Linear(4, 4)
    state = state_of(model)
    made: list[Any] = []
    made.append(T.forward_backward(model, lambda m, x: made[0](state, x)[1]))
    return made[0](state, torch.randn(2, 4))


def cached() -> Any:
    from transformers import AutoModelForCausalLM, Gemma2Config

    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    loss = lambda m, ids: m(ids, labels=ids).loss  # noqa: E731
    forward_backward = T.forward_backward(T.remat(model, "model.layers.*"), loss)
    return forward_backward(state_of(model), torch.randint(32, (2, 8)))


MESH = {"data": 2}
CASES: dict[str, tuple[Case, type[Exception], str]] = {
    "a class among units": (
        lambda: fsdp.Spec(MESH, units=[nn.Linear]),  # type: ignore[list-item]
        fsdp.SpecError,
        r"Linear'> is no pattern.*fsdp\.units\(model, Linear\)",
    ),
    "a class in a unit of several": (
        lambda: fsdp.Spec(MESH, units=[("a", nn.Linear)]),  # type: ignore[list-item]
        fsdp.SpecError,
        r"fsdp\.units\(model, Linear\)",
    ),
    "a class by a name": (
        lambda: fsdp.Spec(MESH, units={"a": nn.Linear}),  # type: ignore[dict-item]
        fsdp.SpecError,
        r"fsdp\.units\(model, Linear\)",
    ),
    "a class as units": (
        lambda: fsdp.Spec(MESH, units=nn.Linear),  # type: ignore[arg-type]
        fsdp.SpecError,
        r"not a class.*fsdp\.units",
    ),
    "a number as units": (
        lambda: fsdp.Spec(MESH, units=5),  # type: ignore[arg-type]
        fsdp.SpecError,
        r"units=5.*expected a list of patterns",
    ),
    "a number among units": (
        lambda: fsdp.Spec(MESH, units=[5]),  # type: ignore[list-item]
        fsdp.SpecError,
        "5 is no pattern. Patterns are texts",
    ),
    "dropout, sample by sample": (
        lambda: per_sample(drop(), torch.randn(3, 4)),
        fsdp.TreeError,
        r"per_sample_norms: the stage '2' draws random numbers \(dropout\).*model\.eval\(\)",
    ),
    "an LSTM, sample by sample": (
        lambda: per_sample(nn.Sequential(nn.Linear(4, 4), Recurrent(4, 4)), torch.randn(3, 2, 4)),
        fsdp.TreeError,
        r"the stage '1' uses an operation that torch's vmap cannot run.*nn\.LSTM",
    ),
    "a float32 buffer": (
        lambda: mixed(lambda model: T.forward_backward(model, mean_square)),
        fsdp.SpecError,
        r"the module '0' computes in bfloat16 and has the buffer 'table' in float32.*'0\.\*': Precision\(\)",
    ),
    "a float32 buffer in apply": (
        lambda: mixed(T.apply),
        fsdp.SpecError,
        r"the module '0' computes in bfloat16 and has the buffer 'table' in float32",
    ),
    "a model within its loss": (nested, fsdp.ScheduleError, r"\. Use the model that the loss function is given"),
    "a cache of keys and values": (cached, fsdp.ScheduleError, r"put its keys and values into a .*use_cache=False"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_an_error_says_what_to_do(case: str) -> None:
    call, kind, said = CASES[case]
    with pytest.raises(kind, match=f"(?s){said}"):
        call()


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(x).amax() + (x @ x if len(x) == 3 else 0)
        return out


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize(("rows", "where"), [(0, "the module '1'"), (3, "the module '1'")])
def test_an_error_of_torch_in_a_unit_says_which_and_what_it_was_given(rows: int, where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Breaks())
    state = state_of(model)
    for call in (T.apply(model), T.forward_backward(model, mean_square)):
        with pytest.raises((RuntimeError, IndexError)) as caught:
            call(state, torch.randn(rows, 4))
        assert caught.value.__notes__ == [f"In {where}, called with float32 [{rows}, 4]."]
        state = fsdp.drop_gradients(state)
