"""Errors that users meet, provoked in one process: each says what was given, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from support.chains import mean_square
from support.torch_optimizers import ByParameter

import functional_fsdp as fsdp
import functional_fsdp.transforms as T


def state_of(model: nn.Module, **spec: Any) -> fsdp.State:
    return fsdp.shard(fsdp.functionalize(model)[0], fsdp.Spec(fsdp.local_mesh(), **spec), fsdp.sgd(lr=0.1))


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) @ self.table


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


def cached_across() -> Any:
    """The decoder's attention to the encoder's outputs takes its keys from the cache, if they are there."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    loss = lambda m, ids: m(ids, labels=ids).loss  # noqa: E731
    forward_backward = T.forward_backward(T.remat(model, "decoder.block.*"), loss)
    return forward_backward(state_of(model), torch.randint(32, (2, 8)))


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


def one(**spec: Any) -> fsdp.State:
    return fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh(), **spec), fsdp.sgd(lr=0.1))


def of_torch(file: Path | None = None) -> Any:
    """What a torch.optim optimizer keeps; or a file of it."""
    kept = torch.optim.AdamW([torch.ones(4, requires_grad=True)]).state_dict()
    if file is not None:
        torch.save(kept, file)
    return file or kept


def begun(grads: Any, unit: str | None = None) -> Any:
    state = fsdp.unshard(one(), unit)[0] if unit else fsdp.unshard(one())[0]
    return fsdp.reduce(state, grads, unit)


def file_of(folder: Path, name: str, held: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(held)
    return folder / name


def loaded(path: Path) -> Any:
    return fsdp.load_weights(one(), path)


HEADER = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
HELD = len(HEADER).to_bytes(8, "little") + HEADER


def torn(folder: Path) -> Any:
    """A file of safetensors whose tensor lacks bytes."""
    return loaded(file_of(folder, "torn.safetensors", HELD + bytes(7)))


def pickled(folder: Path, held: Any) -> Any:
    torch.save(held, folder / "held.pt")
    return loaded(folder / "held.pt")


def named_twice() -> Any:
    return fsdp.shard({"a": torch.ones(2)}, fsdp.Spec(fsdp.local_mesh()), buffers={"a": torch.ones(2)})


def stepped() -> fsdp.State:
    state = one()
    state, _ = fsdp.unshard(state)
    return fsdp.step(fsdp.reduce(state, {"w": torch.ones(4)}))


def abandoned() -> Any:
    old, _ = fsdp.unshard(one())
    state = fsdp.drop_gradients(old)
    state, _ = fsdp.unshard(state)
    fsdp.step(fsdp.reduce(state, {"w": torch.ones(4)}))
    return fsdp.drop_gradients(old)


def of_frozen(call: Callable[[fsdp.State], Any]) -> Any:
    return call(one(trainable={"*": False}))


def kept_weight() -> Any:
    """A weight of one call, used after it."""
    kept: list[Any] = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.scale)
            return self.up(x) * self.scale

    state = state_of(Keeps(), units=["up", "scale"])
    fsdp.drop_gradients(T.apply(Keeps())(state, torch.ones(2, 4))[0])
    return kept[0] * 2


class Two(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def again(tree: Any, folder: Path, **extras: Any) -> Any:
    """Saved, and loaded by a spec."""
    spec = fsdp.Spec(fsdp.local_mesh())
    fsdp.save(fsdp.replace_extras(fsdp.shard(tree, spec), **extras), folder)
    return fsdp.load(folder, spec)


def stepping(state: fsdp.State) -> Any:
    """A function that should make a module, and takes a step."""
    made: Any = lambda: fsdp.step(state)  # noqa: E731
    return fsdp.init(made, fsdp.Spec(fsdp.local_mesh()))


def numbered(folder: Path, *numbers: int) -> Any:
    for number in numbers:
        file_of(folder, f"model-{number:05}-of-00003.safetensors", HELD.replace(b"w", b"%d" % number) + bytes(16))
    return fsdp.open_checkpoint(folder)


def odd(keeps: Callable[[Any, Any], Any], fails: bool = False) -> Any:
    """A step of a class that keeps something of its own of each leaf, by whole leaves."""
    failing = [False]

    class Odd(ByParameter):
        def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
            if failing[0]:
                raise RuntimeError("on purpose")
            keeps(s, p)
            p.add_(g / (g.norm() + 1), alpha=-0.1)

    spec = fsdp.Spec(fsdp.local_mesh())
    state = fsdp.shard({"w": torch.ones(4, 4)}, spec, fsdp.from_torch(Odd, by="leaf"))
    failing[0] = fails
    return fsdp.step(fsdp.reduce(fsdp.unshard(state)[0], {"w": torch.ones(4, 4)}))


WIDE = torch.complex128
MESH = {"data": 2}


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).amax() + (x @ x if len(x) == 3 else 0)


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


def counting() -> fsdp.State:
    pair = (lambda main: {"n": 3}, lambda grads, opt, main: (main, opt))
    return fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh()), pair)


#: what is called with an empty folder, and what it raises: the error, and what of its text is looked for
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a class among units": (lambda _: fsdp.Spec(MESH, units=[nn.Linear]),  # type: ignore[list-item]
        r"SpecError: Linear'> is no pattern.*fsdp\.units\(model, Linear\)"),
    "a class in a unit of several": (lambda _: fsdp.Spec(MESH, units=[("a", nn.Linear)]),  # type: ignore[list-item]
        r"SpecError: fsdp\.units\(model, Linear\)"),
    "a class by a name": (lambda _: fsdp.Spec(MESH, units={"a": nn.Linear}),  # type: ignore[dict-item]
        r"SpecError: fsdp\.units\(model, Linear\)"),
    "a class as units": (lambda _: fsdp.Spec(MESH, units=nn.Linear),  # type: ignore[arg-type]
        r"SpecError: not a class.*fsdp\.units"),
    "a number as units": (lambda _: fsdp.Spec(MESH, units=5),  # type: ignore[arg-type]
        r"SpecError: Spec\(units\): expected a list of patterns.* and got 5"),
    "a number among units": (lambda _: fsdp.Spec(MESH, units=[5]),  # type: ignore[list-item]
        "SpecError: 5 is no pattern. Patterns are texts"),
    "dropout, sample by sample": (lambda _: per_sample(drop(), torch.randn(3, 4)),
        r"TreeError: per_sample_norms: loss_fn draws random numbers \(dropout\).*model\.eval\(\)"),
    "a float32 buffer": (lambda _: mixed(lambda model: T.forward_backward(model, mean_square)),
        r"SpecError: the module '0' computes in bfloat16 and has the buffer 'table' in "
        r"float32.*'0\.\*': Precision\(\)"),
    "a float32 buffer in apply": (lambda _: mixed(T.apply),
        r"SpecError: the module '0' computes in bfloat16 and has the buffer 'table' in float32"),
    "a model within its loss": (lambda _: nested(), r"ScheduleError: \. Use the model that the loss function is given"),
    "a cache of keys and values": (lambda _: cached(),
        r"ScheduleError: put its keys and values into the DynamicCache .*use_cache=False"),
    "a cache of keys and values across": (lambda _: cached_across(),
        r"ScheduleError: put its keys and values into the EncoderDecoderCache .*use_cache=False"),
    "load: arguments the wrong way round": (lambda _: fsdp.load(one(), "folder"),  # type: ignore[arg-type]
        r"SpecError: load\(folder, like=state\): the folder comes first"),
    "load: neither spec nor state": (lambda folder: fsdp.load(folder),
        "SpecError: expected either a spec .* or like=state"),
    "load: a text of what is allowed": (lambda folder: fsdp.load(folder, like=one(), allow="buffers"),
        r"SpecError: load\(allow='buffers'\): expected some of"),
    "save_safetensors: a dtype of integers": (
        lambda folder: fsdp.save_safetensors(one(), folder / "out", dtype=torch.int32),
        r"SpecError: save_safetensors\(dtype=torch\.int32\): expected a floating dtype"),
    "save_safetensors: a name for two": (lambda folder: fsdp.save_safetensors(named_twice(), folder / "out"),
        "SpecError: a parameter and a buffer are both called 'a'. Rename"),
    "safetensors: bytes are missing": (torn, r"CheckpointError: torn\.safetensors"),
    "safetensors: no header": (
        lambda folder: loaded(file_of(folder, "x.safetensors", (10**9).to_bytes(8, "little") + b"{}")),
        r"CheckpointError: is no safetensors file: its header would have 1000000000 of its 10 bytes"),
    "a file that holds numbers": (lambda folder: pickled(folder, {"w": 3}),
        "CheckpointError: has a int at 'w'; expected tensors by name"),
    "reduce: a complex gradient": (lambda _: begun({"w": torch.ones(4, dtype=torch.complex64)}),
        "TreeError: expected a dense tensor of floats"),
    "reduce: on the meta device": (lambda _: begun({"w": torch.ones(4, device="meta")}),
        "TreeError: meta device and has no numbers"),
    "local_shards: another kind": (lambda _: fsdp.local_shards(one(), "moments"),  # type: ignore[arg-type]
        "TreeError: expected one of 'main', 'weights', 'grads'"),
    "drop_gradients of an old state": (lambda _: abandoned(), "StaleStateError: drop_gradients"),
    "norms where all is frozen": (lambda _: of_frozen(T.global_norm),
        "ScheduleError: nothing is trainable: every leaf is frozen"),
    "divide by a vector": (lambda _: T.divide(one(), torch.ones(2)),
        r"TreeError: divide: the divisor has shape \(2,\)"),
    "a module for a tree": (lambda _: fsdp.shard(nn.Linear(2, 2), fsdp.Spec(fsdp.local_mesh())),
        r"TreeError: is a module \(Linear\)\. Split it"),
    "a mesh on paper": (lambda _: fsdp.shard({"w": torch.ones(2)}, fsdp.Spec(MESH)),
        "SpecError: is a plan without ranks. To run"),
    "nesterov without momentum": (lambda _: fsdp.sgd(lr=0.1, nesterov=True),
        "SpecError: needs momentum: give a positive one"),
    "compiled, and differentiated twice": (
        lambda _: T.forward_backward(nn.Linear(2, 2), mean_square, compile=True, second_order=True),
        "SpecError: torch does not differentiate compiled code twice"),
    "cuda_graph: another word": (lambda _: T.cuda_graph(stepped, host_reads="warn"),  # type: ignore[arg-type]
        r"SpecError: host_reads='warn'.*expected \"error\""),
    "norms of tensors": (lambda _: T.norms(one(), {"w": torch.ones(4)}),  # type: ignore[dict-item]
        r"TreeError: norms: the tree has tensor\(.*for the bucket 'w'; expected"),
    "Transposed: a dim that there is not": (
        lambda folder: fsdp.save_safetensors(one(), folder / "out", convert={"w": fsdp.Transposed("w", 0, 2)}),
        r"SpecError: Transposed has dim 2 of \[4\], which has 1 dims\. Give another dim"),
    "Sliced: more than there is": (
        lambda folder: fsdp.save_safetensors(one(), folder / "out", convert={"w": fsdp.Sliced("w", 3, of=5)}),
        "SpecError: Sliced takes 4 elements from 3 on along dim 0, of 5. Give start= and of="),
    "save: a number in an optimizer's state": (lambda folder: fsdp.save(counting(), folder / "out"),
        r"TreeError: State\.opt holds a int at 'n'; only tensors are written\. Keep it as a tensor"),
    "save: a sparse tensor among the extras": (
        lambda folder: fsdp.save(fsdp.replace_extras(one(), s=torch.ones(2).to_sparse()), folder / "out"),
        r"TreeError: layout torch\.sparse_coo at 's'; only plain, dense tensors"),
    "all_reduce: an axis twice": (lambda _: fsdp.extend.all_reduce(one(), [torch.ones(())], "sum", ("data", "data")),
        r"SpecError: expected distinct axes of the mesh.*'data' is there twice"),
    "replace_grads: a tensor for a buffer": (lambda _: fsdp.replace_grads(one(), {"w": torch.ones(4)}),
        "TreeError: the bucket 'w' is a Tensor; expected a FlatBuffer"),
    "accumulate: a split of another length": (
        lambda _: T.accumulate(T.forward_backward(nn.Linear(4, 4), mean_square), 2, split=(0, 0))(
            state_of(nn.Linear(4, 4)), torch.ones(2, 4)),
        "SpecError: split has 2 entries for 1 positional arguments. Give one each"),
    "remat: twice": (lambda _: T.remat(T.remat(nn.Sequential(nn.Linear(4, 4)), "0"), "0"),
        "SpecError: the module '0' .*Name it once"),
    "remat: a part saved and moved": (lambda _: T.remat(nn.Sequential(drop()), "0", save=("0",), offload=("0",)),
        "SpecError: in '0' the part '0' is saved and '0' is moved.*Name each part once"),
    "step_memory of second order": (
        lambda _: T.step_memory(
            T.forward_backward(nn.Linear(4, 4), mean_square, second_order=True), state_of(nn.Linear(4, 4)),
            torch.ones(2, 4)),
        r"ScheduleError: step_memory: .*second_order=True"),
    "step_memory of accumulate": (
        lambda _: T.step_memory(
            T.accumulate(T.forward_backward(nn.Linear(4, 4), mean_square), 2), state_of(nn.Linear(4, 4)),  # type: ignore[arg-type]
            torch.ones(2, 4)),
        r"SpecError: step_memory: .*Of T\.accumulate give the function that it was made of, and one microbatch"),
    "predict: a class": (lambda _: fsdp.predict(Mixes, mean_square, torch.ones(2, 4), fsdp.Spec({"data": 2})),  # type: ignore[arg-type]
        "SpecError: expected a module, not Mixes. Build it where it has no memory"),
    "tune: a budget in words": (
        lambda _: fsdp.tune(nn.Linear(4, 4), mean_square, torch.ones(2, 4), gpus=2, budget="80GB"),  # type: ignore[arg-type]
        r"SpecError: tune\(budget='80GB'\): expected bytes, more than 0, as 70 \* 2"),
    "tune: a share of memory": (
        lambda _: fsdp.tune(nn.Linear(4, 4), mean_square, torch.ones(2, 4), gpus=2, budget=0.8),  # type: ignore[arg-type]
        r"SpecError: tune\(budget=0\.8\): expected bytes, more than 0"),
    "save_safetensors: a dtype of no file": (
        lambda folder: fsdp.save_safetensors(
            fsdp.shard({"w": torch.ones(2)}, fsdp.Spec(fsdp.local_mesh()), buffers={"b": torch.ones(2).to(WIDE)}),
            folder / "out"),
        r"SpecError: 'b' is torch\.complex128, which safetensors has not"),
    "safetensors: a dtype that is not read": (
        lambda folder: loaded(file_of(folder, "x.safetensors", HELD.replace(b"F32", b"F99") + bytes(16))),
        r"CheckpointError: ^\S*x\.safetensors has 'w' as F99, a dtype that this torch has not"),
    "load: a tree of another kind": (lambda folder: again(Two(torch.ones(2), torch.ones(2)), folder / "out"),
        r"TreeError: ^load: .* parameters in a tree that is not of dicts.*load\(folder, like=state\)"),
    "load: extras by numbers": (lambda folder: again({"w": torch.ones(2)}, folder / "out", s={0: torch.ones(2)}),
        r"TreeError: ^load: .* has extras whose keys are not all text.*load\(folder, like=state\)"),
    "files of weights: some are missing": (lambda folder: numbered(folder, 1, 3),
        "CheckpointError: has 2 of 3 files of weights: some are missing"),
    "a pickle that is no metadata": (
        lambda folder: fsdp.open_checkpoint(file_of(folder, ".metadata", b"\x80\x04N.").parent),
        r"CheckpointError: \.metadata is no metadata of torch\.distributed\.checkpoint"),
    "init: an error of this package": (lambda _: stepping(one()), r"ScheduleError: ^step: this state has no gradients"),
    "load_optimizer_state: steps below 0": (lambda _: fsdp.load_optimizer_state(one(), {}, steps=-1),
        r"SpecError: steps=-1\): expected a whole number, 0 or more, or None"),
    "load_optimizer_state: no optimizer": (
        lambda _: fsdp.load_optimizer_state(fsdp.shard({"w": torch.ones(2)}, fsdp.Spec(fsdp.local_mesh())), {}),
        "SpecError: this state has no optimizer. Give shard or init one"),
    "shard: a text for a spec": (lambda _: fsdp.shard({"w": torch.ones(2)}, "zero3"),  # type: ignore[arg-type]
        r"SpecError: shard\(spec\): expected a Spec, as Spec\(mesh.* and got 'zero3'"),
    "buffers: another rule": (
        lambda _: T.forward_backward(nn.Linear(4, 4), mean_square, buffers="sum"),  # type: ignore[call-overload]
        "SpecError: buffers='sum': expected 'mean'"),
    "from_torch: a complex state": (
        lambda _: odd(lambda st, p: st.setdefault("c", torch.zeros(p.shape, dtype=torch.complex64))),
        "SpecError: keeps a Tensor of torch.complex64 as 'c'; a State has plain tensors of real numbers"),
    "from_torch: a state of objects": (lambda _: odd(lambda st, p: st.setdefault("o", object())),
        "SpecError: keeps a object as 'o', which no State can hold"),
    "from_torch: a class that raises later": (lambda _: odd(lambda st, p: None, fails=True),
        r"TreeError: raised RuntimeError with the leaf 'w' of shape \[4, 4\]: on purpose"),
    "redistribute: an axis that there is not": (
        lambda _: next(iter(one().main.values())).redistribute({"nope": fsdp.Replicated}),
        "SpecError: unknown axis 'nope'; this buffer lies on 'data'"),
    "compile: no state": (lambda _: T.compile(lambda state: state)(5), "SpecError: got a int first; expected a State"),
    "load_weights: a list": (lambda _: fsdp.load_weights(one(), [1]),  # type: ignore[arg-type]
        "SpecError: weights: expected a folder, a file.* and got a list"),
    "load_optimizer_state: of torch.optim, by number": (
        lambda _: fsdp.load_optimizer_state(one(), of_torch()),
        r"TreeError: has a dict at 'state'; expected tensors by name\..* leaves are numbers.*'optimizer': optimizer"),
    "load_optimizer_state: a file of torch.optim, by number": (
        lambda folder: fsdp.load_optimizer_state(one(), of_torch(folder / "adam.pt")),
        r"CheckpointError: has a dict at 'state'; expected tensors by name\..* leaves are numbers"),
    "load_weights: a number": (lambda _: fsdp.load_weights(one(), {"w": 3}),  # type: ignore[dict-item]
        "TreeError: has a int at 'w'; expected tensors by name"),
    "replace_params: another dtype": (lambda _: fsdp.replace_params(one(), {"w": torch.ones(4).double()}),
        r"TreeError: is torch\.float64; expected torch\.float32, as main weights are"),
    "replace_params: another shape": (lambda _: fsdp.replace_params(one(), {"w": torch.ones(5)}),
        r"TreeError: has shape \(5,\); expected its global shape \(4,\)"),
    "replace_extras: a graph": (lambda _: fsdp.replace_extras(one(), s=torch.ones(2, requires_grad=True)),
        "TreeError: 's' requires a gradient, and would keep its graph. Detach it"),
    "delta: blocks of nothing": (lambda _: fsdp.delta(fsdp.snapshot(one()), one(), block=0),
        r"SpecError: block=0\): expected a whole number of elements, 1 or more"),
    "a weight after its call": (lambda _: kept_weight(), "ScheduleError: was used after the model had run"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_an_error_says_what_to_do(case: str, tmp_path: Path) -> None:
    call, expected = CASES[case]
    kind, _, said = expected.partition(": ")
    with pytest.raises(getattr(fsdp, kind), match=f"(?s){said}"):
        call(tmp_path)
