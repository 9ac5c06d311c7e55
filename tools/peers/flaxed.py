"""The small checkpoints of tests/data/peers that flax and Orbax make: python tools/peers/flaxed.py [NAME ...]

It runs in an environment of its own: pip install flax==0.12.8 orbax-checkpoint==0.12.8 jax==0.10.2 tensorstore==0.1.86
optax==0.2.8 safetensors. Two devices on the CPU have a part of each leaf whose sizes allow it. What is written is as
__main__ says, with names and layouts as torch has them; model and data are those of tests/support/peers.py.
"""

from __future__ import annotations

import os

os.environ.update(XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")

import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

TARGET = Path(__file__).resolve().parents[2] / "tests" / "data" / "peers"
VOCAB, WIDTH, STEPS, MORE = 13, 6, 3, 10
LR, DECAY = 1e-2, 0.1
MAKERS: dict[str, Callable[[Path], None]] = {}
MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
OPTIMIZER = optax.adamw(LR, weight_decay=DECAY)
SCALE, SEEN = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32), np.array([3, 40000], np.int32)
Tree = dict[str, Any]


def maker(name: str) -> Any:
    def add(function: Any) -> Any:
        MAKERS[name] = function
        return function

    return add


def batch_of(step: int) -> Any:
    """int32 [8, 6]: those of both ranks."""
    at = np.arange(24).reshape(4, 6)
    return jnp.asarray(np.concatenate([(at * (3 + r) + 5 * step + at // 6 * r) % VOCAB for r in range(2)]), jnp.int32)


def loss_of(logits: Any, tokens: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def cut(tree: Any) -> Any:
    """Each array over both devices, along the first dim of width 6."""

    def place(one: Any) -> Any:
        shape = np.shape(one)
        at = next((i for i, n in enumerate(shape) if n == WIDTH), None)
        spec = PartitionSpec(*[None] * at, "data") if at is not None else PartitionSpec()
        return jax.device_put(one, NamedSharding(MESH, spec))

    return jax.tree.map(place, tree)


def note(folder: Path, weights: Tree, moments: dict[str, Tree], losses: list[float]) -> None:
    """Write what is expected, with names and layouts of torch."""
    held = {f"weight/{name}": value for name, value in weights.items()}
    held |= {f"{slot}/{name}": value for slot, some in moments.items() for name, value in some.items()}
    held = {name: np.ascontiguousarray(np.asarray(value)) for name, value in held.items()}
    save_file({**held, "losses": np.array(losses, np.float64)}, folder / "expected.safetensors")


def as_torch(tree: Tree, path: tuple[str, ...] = ()) -> Tree:
    """{"blocks.0.up.weight": [out, in]} of flax's leaves."""
    found: Tree = {}
    for key, one in tree.items():
        if isinstance(one, dict):
            found |= as_torch(one, (*path, str(key)))
        else:
            last = {"kernel": "weight", "embedding": "weight", "scale": "weight" if path else "scale"}.get(key, key)
            found[".".join((*path, last))] = one.T if key == "kernel" else one
    return found


# ---------------------------------------------------------------- nnx


class Frozen(nnx.Variable):
    """A leaf that no optimizer has."""


class Buffer(nnx.Variable):
    """A leaf that is no weight."""


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 7, rngs=rngs)
        self.down = nnx.Linear(7, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(self.norm(x)), approximate=False))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.gate.kernel = Frozen(self.gate.kernel[...])
        self.blocks = nnx.List([Block(rngs)])
        self.scale, self.seen = Buffer(jnp.asarray(SCALE)), Buffer(jnp.asarray(SEEN))

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        x = x + self.gate(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


@maker("orbax-nnx")
def of_nnx(folder: Path) -> None:
    """State of a model and of its optimizer, by StandardCheckpointer."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    for one in (model, optimizer):
        nnx.update(one, cut(nnx.state(one)))

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: loss_of(m(tokens[:, :-1]), tokens))(model)
        optimizer.update(model, grads)
        return loss

    for n in range(STEPS):
        step(model, optimizer, batch_of(n))
    held = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / "checkpoint", held)
    weights = as_torch(nnx.to_pure_dict(held["model"]))
    kept = nnx.to_pure_dict(held["optimizer"])["opt_state"]
    moments = {slot: as_torch(kept[0][name]) for slot, name in (("exp_avg", "mu"), ("exp_avg_sq", "nu"))}
    note(folder, jax.tree.map(np.asarray, weights), jax.tree.map(np.asarray, moments),
         [float(step(model, optimizer, batch_of(n))) for n in range(STEPS, STEPS + MORE)])  # fmt: skip


# ---------------------------------------------------------------- linen


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        h = linen.LayerNorm(use_bias=False, epsilon=1e-5, use_fast_variance=False, name="norm")(x)
        h = linen.gelu(linen.Dense(7, name="up")(h), approximate=False)
        return x + linen.Dense(WIDTH, use_bias=False, name="down")(h)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, tokens: Any) -> Any:
        embed = linen.Embed(VOCAB, WIDTH, name="embed")
        x = embed(tokens)
        scale = self.variable("constants", "scale", lambda: jnp.asarray(SCALE))
        self.variable("constants", "seen", lambda: jnp.asarray(SEEN))
        x = x + linen.Dense(WIDTH, use_bias=False, name="gate")(x) * scale.value
        x = LinenBlock(name="blocks_0")(x)
        return embed.attend(x)


class Trained(TrainState):
    constants: Any = None


@maker("orbax-linen")
def of_linen(folder: Path) -> None:
    """A TrainState, by CheckpointManager, with the frozen leaf masked in the optimizer."""
    model = LinenModel()
    made = model.init(jax.random.key(1), batch_of(0)[:, :-1])
    frozen = {name: name == "gate" for name in made["params"]}
    labels = {name: "frozen" if is_it else "trained" for name, is_it in frozen.items()}
    optimizer = optax.multi_transform({"trained": OPTIMIZER, "frozen": optax.set_to_zero()}, labels)
    state = Trained.create(apply_fn=model.apply, params=made["params"], tx=optimizer, constants=made["constants"])
    state = cut(state)

    @jax.jit
    def step(state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            return loss_of(state.apply_fn({"params": params, "constants": state.constants}, tokens[:, :-1]), tokens)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    for n in range(STEPS):
        state, _ = step(state, batch_of(n))
    with ocp.CheckpointManager(folder.absolute() / "checkpoint") as manager:
        manager.save(STEPS, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    weights = as_torch({**state.params, **state.constants})
    inner = state.opt_state.inner_states["trained"].inner_state[0]
    moments = {
        slot: as_torch({k: v for k, v in getattr(inner, name).items() if k != "gate"})
        for slot, name in (("exp_avg", "mu"), ("exp_avg_sq", "nu"))
    }
    renamed = {slot: {k.replace("blocks_0", "blocks.0"): v for k, v in some.items()} for slot, some in moments.items()}
    weights = jax.tree.map(np.asarray, {k.replace("blocks_0", "blocks.0"): v for k, v in weights.items()})
    renamed = jax.tree.map(np.asarray, renamed)
    losses = []
    for n in range(STEPS, STEPS + MORE):
        state, loss = step(state, batch_of(n))
        losses.append(float(loss))
    note(folder, weights, renamed, losses)


def main(names: list[str]) -> None:
    for name in names or MAKERS:
        folder = Path(tempfile.mkdtemp()) / name
        folder.mkdir()
        MAKERS[name](folder)
        with tarfile.open(TARGET / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(folder, name)
        there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        print(name, (TARGET / f"{name}.tar.xz").stat().st_size, there, flush=True)
        shutil.rmtree(folder.parent)


if __name__ == "__main__":
    main(sys.argv[1:])
