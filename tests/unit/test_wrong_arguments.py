"""Arguments of another kind than is asked for: an error that says what was expected and what came."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


params: Any
model: Any
params, model = fsdp.functionalize(nn.Linear(2, 2))
sizes: Any = {"data": 2}
wrong: Any = (["*bias"], {"*": 3}, None, 1.5, torch.tensor(3.0))
hidden, head = torch.randn(3, 4), torch.randn(5, 4)

CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a class": (lambda state: fsdp.functionalize(nn.Linear), "a model: expected a module, as Net.., and got the class"),
    "a state": (lambda state: T.forward_backward(state, loss_fn), "expected a module, .* and got a State"),
    "apply": (lambda state: T.apply(params, loss_fn), "expected a module, .* and got a dict"),
    "bind": (lambda state: fsdp.bind(params, model), r"bind\(model, weights\): expected a module, .* and got a dict"),
    "as_module": (lambda state: fsdp.as_module(state, model), "expected a module, .* and got a State"),
    "no weights": (lambda state: fsdp.as_module(model, model), "expected a State, or {path: tensor}"),
    "buffers": (lambda state: fsdp.buffers(state), r"buffers\(module\): expected a module, .* and got a State"),
    "units": (lambda state: fsdp.units(params, nn.Linear), "expected a module, .* and got a dict"),
    "make_layout": (
        lambda state: fsdp.make_layout(params, sizes),
        r"make_layout\(spec\): expected a Spec, .* and got a dict",
    ),
    "make_plan": (
        lambda state: fsdp.make_plan(state),
        "expected what make_layout gives, or state.layout, and got a State",
    ),
    "step_memory": (lambda state: T.step_memory(model, state), "expected what T.forward_backward.* and got a Linear"),
    "no seed": (lambda state: fsdp.shard(params, state.spec, seed=wrong[2]), "seed=None: expected a whole number"),
    "half a seed": (lambda state: fsdp.init(lambda: nn.Linear(2, 2), state.spec, seed=wrong[3]), "seed=1.5: expected"),
    "a long seed": (lambda state: fsdp.shard(params, state.spec, seed=2**63), r"from -2\*\*63 to 2\*\*63 - 1"),
    "a tensor": (lambda state: fsdp.shard(params, state.spec, seed=wrong[4]), r"seed=tensor\(3.\): expected a whole"),
    "a list": (lambda state: fsdp.Spec(sizes, trainable=wrong[0]), r"Spec\(trainable=.*expected {pattern: bool}"),
    "a number": (lambda state: fsdp.Spec(sizes, labels=wrong[1]), r"Spec\(labels=.*expected {pattern: str}"),
    "patterns": (
        lambda state: fsdp.load_weights(state, params, partial=wrong[3]),
        "partial: expected a name or several, and got 1.5",
    ),
    "no pattern": (lambda state: fsdp.load_weights(state, params, partial=wrong[2]), "partial: .* and got None"),
    "patterns of moments": (
        lambda state: fsdp.load_optimizer_state(state, {}, partial=wrong[0]),
        r"load_optimizer_state\(partial\): expected True or False, and got a list",
    ),
    "labels": (
        lambda state: T.linear_cross_entropy(hidden, head, torch.rand(3)),
        "labels are torch.float32; expected int",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_of_another_kind_is_named(call: str) -> None:
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1))
    function, said = CALLS[call]
    with pytest.raises((fsdp.TreeError, fsdp.SpecError), match=said):
        function(state)


bad: Any = {"None": None, "3": 3, "bytes": b"x", "a list": [1], "lambda": lambda *_: None, "a text": "x"}
bad |= {"nan": math.nan, "1j": 1j, "-1": -1, "a class": nn.Linear, "tensors": torch.ones(3)}
bad["inf"] = math.inf
bad["meta"] = torch.ones((), device="meta")
loose: Any = fsdp
driven: Any = T


def graded() -> Any:
    """A state with gradients."""
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1))
    return T.forward_backward(model, loss_fn)(state, torch.randn(3, 2))[0]


def stepped(make: Callable[..., Any], batch: Any = None, **settings: Any) -> Any:
    """A step whose settings are given by functions."""
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), make(**settings))
    state, _ = T.forward_backward(model, loss_fn)(state, torch.randn(3, 2) if batch is None else batch)
    try:
        return fsdp.step(state)
    except fsdp.SpecError:
        before = fsdp.full_params(state)  # nothing was written, and the state is as good as before
        assert all(torch.equal(params[path], leaf) for path, leaf in before.items())
        raise


#: what is called, the names in `bad` that it is given, and what its error says, but for the value
TABLE: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "save": (lambda x: fsdp.save(graded(), x), "None,3,a class", r"save\(folder\): expected a path, and got"),
    "save_dcp": (lambda x: fsdp.save_dcp(graded(), x), "None,3", r"save_dcp\(folder\): expected a path"),
    "files": (lambda x: fsdp.save_safetensors(graded(), x), "None", r"save_safetensors\(folder\): expected a path"),
    "load(folder)": (lambda x: fsdp.load(x, fsdp.Spec(fsdp.local_mesh("cpu"))), "None,3", "expected a path"),
    "latest_checkpoint": (loose.latest_checkpoint, "None,3,tensors", "expected a path, and got"),
    "open_checkpoint": (loose.open_checkpoint, "None,3,a list", "expected a path, and got"),
    "flight_record": (loose.flight_record, "3,tensors", "expected a path, or None"),
    "lr": (lambda x: stepped(fsdp.adamw, lr=lambda n: x), "None,a text,nan,1j,-1,tensors,meta,lambda", "lr: "),
    "betas": (lambda x: stepped(fsdp.adamw, betas=(0.9, lambda n: x)), "None,nan,tensors", "betas: "),
    "sgd": (lambda x: stepped(fsdp.sgd, momentum=lambda n: x, lr=0.1), "None,a text,nan,tensors", "momentum: "),
    "max_norm": (lambda x: T.clip_by_global_norm(graded(), x), "None,a text,nan,-1,tensors,lambda", "norm of at least"),
    "max_value": (lambda x: T.clip_by_value(graded(), x), "None,a text,nan,-1,tensors", "value of at least 0"),
    "divide": (lambda x: T.divide(graded(), x), "None,a text,a list,1j", r"expected a number or a tensor \[\]"),
    "norm's order": (lambda x: T.global_norm(graded(), x), "None,a text,tensors,-1", "expected 1, 2 or math.inf"),
    "Concatenated": (loose.Concatenated, "None,3,a list,a class", "Concatenated"),
    "Stacked": (lambda x: loose.Stacked(["a"], x), "None,a text,nan", r"Stacked\(dim\): expected a whole number"),
    "Transposed": (loose.Transposed, "None,3,a list", "Transposed: a part: expected a name, or a conversion"),
    "Sliced": (lambda x: loose.Sliced("a", x, of=2), "None,a text,nan", r"Sliced\(start\): expected a whole number"),
    "pmean": (lambda x: fsdp.pmean(graded(), {"a": x}), "None,a text,lambda", r"pmean\(tree\): expected numbers"),
    "pmean's axis": (lambda x: fsdp.pmean(graded(), 1.0, x), "3,a list", "axis of the mesh: expected a name or"),
    "own": (lambda x: fsdp.Spec(sizes, own=x), "3,a text,a list", r"Spec\(own\): expected {pattern: rule}"),
    "precision": (lambda x: fsdp.Spec(sizes, precision=x), "3,tensors", r"Spec\(precision\) .*: expected a Precision"),
    "order": (loose.Schedule, "3,a text,lambda", "expected the names of units in order of use"),
    "with_schedule": (lambda x: fsdp.Spec(sizes).with_schedule(x), "3,a text", "expected a Schedule"),
    "Placement": (lambda x: fsdp.Placement(main=x), "None,3,a list", "Placement.main: expected a name or several"),
    "Along": (lambda x: fsdp.Along("tp", grads=x), "None,3,a text", "expected grads to be one of 'equal', 'sum'"),
    "buffers": (lambda x: fsdp.shard(params, graded().spec, buffers=x), "3,a text", "expected {path: tensor}"),
    "types": (
        lambda x: loose.units(model, x),
        "None,3,a text",
        r"units\(model, \*types\): expected classes of modules",
    ),
    "patterns": (lambda x: driven.remat(model, x), "None,3,a list", r"remat\(\*patterns\): expected a name or several"),
    "save=": (lambda x: T.remat(model, "*", save=x), "None,3,a list", r"remat\(save\): expected a name or several"),
    "loss_fn": (lambda x: driven.forward_backward(model, x), "None,3,a text", "expected a function of"),
    "apply": (lambda x: driven.apply(model, x), "3,a text", r"apply\(fn\): expected a function of"),
    "accumulate": (lambda x: driven.accumulate(x, 2), "None,3", "expected a function, as T.forward_backward"),
    "skip_nonfinite": (driven.skip_nonfinite, "None,3", "expected a function, as fsdp.step"),
    "compile": (driven.compile, "3,a text", r"compile\(train_step\): expected a function of \(state, ...\)"),
    "stream_to": (lambda x: fsdp.stream_to(x, graded()), "None,3", r"stream_to\(put\): expected a function of"),
    "state_dict": (lambda x: fsdp.state_dict(graded(), x), "3,a text", r"state_dict\(module\): expected a module"),
    "muon": (lambda x: loose.muon(ns_coefficients=x), "None,3", r"muon\(ns_coefficients\): expected three numbers"),
    "rename": (lambda x: fsdp.load_weights(graded(), params, rename=x), "3,a text", "rename: expected a function from"),
    "local_mesh": (loose.local_mesh, "3,a list", r"local_mesh\(device\): expected a kind of device"),
    "from_quantized": (loose.from_quantized, "None,3", r"from_quantized\(model\): expected a module"),
    "tile": (lambda x: loose.fp8_block(tile=x), "3,a text", r"fp8_block\(tile.*: expected rows and columns"),
}


@pytest.mark.parametrize("call", TABLE)
def test_a_value_that_means_nothing_is_refused_by_name(call: str) -> None:
    function, values, said = TABLE[call]
    for value in map(bad.__getitem__, values.split(",")):
        with pytest.raises((fsdp.TreeError, fsdp.SpecError), match=said):
            function(value)


def stepped_by(make: Callable[..., Any], lr: Any) -> bool:
    """Whether a function that gives this has the same done as the number."""
    batch = torch.ones(3, 2)
    found, right = (stepped(make, batch, lr=one) for one in (lambda n: lr, float(lr)))
    return all(torch.equal(right.main[name].local, buffer.local) for name, buffer in found.main.items())


def saved_to(folder: Any) -> bool:
    """Whether a state is saved and found there."""
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")))
    path = fsdp.save(state, folder)
    there = path == Path(os.fsdecode(folder)) == fsdp.latest_checkpoint(path.parent)
    return there and fsdp.load(folder, state.spec).steps == 0


def buffered(**given: Any) -> Any:
    """A state with two buffers."""
    given = {"buffers": {"a": torch.ones(1), "b": torch.ones(1)}} | given
    return fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), **given)


deep: Any = fsdp.functionalize(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh())))[1]

#: what means something, though it is not of the first kind that one thinks of
TAKEN: dict[str, Callable[[Path], Any]] = {
    "lr of numpy's": lambda _: stepped_by(fsdp.adamw, np.float32(0.125)),
    "lr [1] of sgd": lambda _: stepped_by(fsdp.sgd, torch.tensor([0.125])),
    "lr [1] of adamw": lambda _: stepped_by(fsdp.adamw, torch.tensor([0.125])),
    "max_value []": lambda _: driven.clip_by_value(graded(), torch.tensor(0.5)),
    "max_norm of numpy's": lambda _: driven.clipped_gradients(model, loss_fn, max_norm=np.float32(1)),
    "metrics in an array": lambda _: fsdp.pmean(graded(), array("f", [1, 3]))[1].tolist() == [1, 3],
    "a path of bytes": lambda folder: saved_to(os.fsencode(folder / "one")),
    "one file": lambda folder: fsdp.save_safetensors(buffered(), folder / "one", max_shard_size=bad["inf"]),
    "parts by a generator": lambda _: loose.Along("tp", 0, parts=(n for n in (1, 2))).parts == (1, 2),
    "sizes of numpy's": lambda _: loose.Concatenated(["a", "b"], np.int64(0), np.array([1, 2])).sizes == (1, 2),
    "slices of numpy's": lambda _: loose.Sliced("a", np.int64(1), np.int64(2)).start == 1,
    "a tile of numpy's": lambda _: loose.fp8_block(tile=np.array([4, 8])).tile == (4, 8),
    "an order by keys": lambda _: loose.Schedule({"a": 1, "b": 2}.keys()).order == ("a", "b"),
    "an order by a generator": lambda _: loose.Schedule(name for name in "ab").order == ("a", "b"),
    "types in a tuple": lambda _: loose.units(deep[0], (nn.Linear, nn.Tanh)) == ["0", "1"],
    "types in a union": lambda _: loose.units(deep[0], nn.Linear | nn.Tanh) == ["0", "1"],
    "coefficients of numpy's": lambda _: loose.muon(ns_coefficients=np.array([3.0, -4.0, 2.0])),
    "a pattern in a list": lambda _: loose.muon(matrices=["(k i) o -> k i o", {"k": 2}]).matrices,
    "buffers in a list": lambda _: len(buffered(buffers=[torch.ones(2)]).buffers) == 1,
    "local buffers by a generator": lambda _: buffered(local_buffers=(name for name in "a")).local_buffers == {"a"},
    "local buffers by one name": lambda _: buffered(local_buffers="b").local_buffers == {"b"},
    "parts of remat by a generator": lambda _: "_part" in vars(driven.remat(deep, "0", save=(n for n in "1"))[0][1]),
    "a dim of numpy's": lambda _: (
        driven.collectives.all_gather(torch.ones(2), fsdp.local_mesh("cpu"), dim=np.int64(0)).sum() == 2
    ),
    "a budget": lambda _: loose.tune(nn.Linear(2, 2), loss_fn, torch.ones(2, 2), mesh={"data": 1}, budget=7e9),
}


@pytest.mark.parametrize("call", TAKEN)
def test_a_value_that_means_something_is_taken(call: str, tmp_path: Path) -> None:
    assert TAKEN[call](tmp_path)


def test_muon_looks_at_its_settings_before_it_writes_anything() -> None:
    own = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    now: Any = {"b": None}
    optimizer = fsdp.muon(lr={"default": 0.1, "b": lambda count: now["b"]})
    state = fsdp.shard(own, fsdp.Spec(fsdp.local_mesh("cpu"), labels={"b": "b"}), optimizer)
    state = fsdp.reduce(*fsdp.unshard(state))
    with pytest.raises(fsdp.SpecError, match="lr: what its function gave for the count is None"):
        fsdp.step(state)
    assert all(torch.equal(leaf, own[path]) for path, leaf in fsdp.full_params(state).items())
    assert not any(buffer.local.any() for buffer in state.opt.momentum.values())
    now["b"] = torch.tensor([0.1])
    assert fsdp.step(state).steps == 1


@pytest.mark.parametrize("name", ["newest", "replace_extras", "merged", "host_transfer", "lower"])
def test_what_is_no_state_is_named(name: str) -> None:
    call = getattr(fsdp, name)
    given: Any = {"merged": (None, {}), "lower": (len, None)}.get(name, (None,))
    with pytest.raises(TypeError, match=rf"{name}\(state\): expected a State, and got None"):
        call(*given)


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    folder = fsdp.save(fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu"))), tmp_path / "one")
    assert fsdp.latest_checkpoint(tmp_path) == folder
    assert fsdp.latest_checkpoint(tmp_path / "none") is None
    with pytest.raises(fsdp.CheckpointError, match=r"is a checkpoint itself. Give the folder that it lies in"):
        fsdp.latest_checkpoint(folder)
    with pytest.raises(NotADirectoryError):
        fsdp.latest_checkpoint(folder / "layout.json")


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x))


class Scripted(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), torch.jit.script(act)

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self.layer(x))


@pytest.mark.parametrize("act", [nn.Sequential(nn.Tanh(), nn.Tanh()), twice])
def test_modules_with_a_part_of_torch_jit_are_computed_again(act: Any) -> None:
    plain = nn.Sequential(Scripted(act), Scripted(act)).double()
    own, skeleton = fsdp.functionalize(plain)
    state = fsdp.shard(own, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1))
    x = torch.randn(3, 4).double()
    found, loss = T.forward_backward(T.remat(skeleton, "*"), loss_fn)(state, x)
    right = loss_fn(plain, x)
    right.backward()
    torch.testing.assert_close(loss, right.detach(), rtol=1e-9, atol=0)
    for path, p in plain.named_parameters():
        torch.testing.assert_close(fsdp.local_shards(found, "grads")[path].view_as(p), p.grad, rtol=1e-9, atol=1e-12)


def test_a_part_of_torch_jit_alone_is_not_computed_again() -> None:
    skeleton = fsdp.functionalize(nn.Sequential(Scripted(nn.Sequential(nn.Tanh()))))[1]
    for call in (lambda: T.remat(skeleton, "*.act"), lambda: T.offload(skeleton, "*.act")):
        with pytest.raises(fsdp.SpecError, match=r"'0.act' is a torch.jit module"):
            call()
    T.compile_units(skeleton, "*.act")  # may be


def test_labels_of_any_integers_and_one_token_alone() -> None:
    small = torch.tensor([0, 255, 4], dtype=torch.uint8)
    found = T.linear_cross_entropy(hidden, head, small, ignore_index=255)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ head.T, small.long(), ignore_index=255))
    one = T.linear_cross_entropy(hidden[0], head, torch.tensor(3))
    torch.testing.assert_close(one, F.cross_entropy(hidden[0] @ head.T, torch.tensor(3)))
