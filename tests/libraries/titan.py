"""torchtitan's Llama 3, cut along "tp" by its own plan, beside the same model that nobody has cut. Run by hand:

    pip install --no-deps --target /tmp/titan torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring-parser triton
    PYTHONPATH=/tmp/titan:$PWD OMP_NUM_THREADS=1 python tests/libraries/titan.py [--gloo] [--steps 20]

In float64, on two rows of data and two ranks of "tp": each line has the largest difference of losses, norms, weights.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

VOCAB, LENGTH, WIDTH, HEADS = 24, 8, 16, 4
AXES: Any = {"data": 2, "tp": 2}


def dims(mesh: Any) -> Any:
    """torchtitan's ParallelDims, of a mesh that is there."""
    sizes = {"dp_replicate": 1, "dp_shard": mesh["data"].size(), "tp": mesh["tp"].size(), "cp": 1, "pp": 1, "ep": 1}
    made = import_module("torchtitan.distributed").ParallelDims
    there = {name: mesh[name] for name in mesh.mesh_dim_names}
    return made(**sizes, world_size=mesh.size(), spmd_backend="partial_dtensor", _single_axis_meshes=there)


def llama(sequence: bool, fused: bool) -> Any:
    """The model as torchtitan's registry builds it, with how it is to be cut."""
    made, common = import_module("torchtitan.models.llama3"), import_module("torchtitan.models.common")
    linear = {"weight": partial(torch.nn.init.normal_, std=0.1)}
    rope = common.ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=LENGTH, theta=10000.0)
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": HEADS, "n_kv_heads": 2, "hidden_dim": 32}
    layers = made._build_llama3_layers(rope=rope, fuse_qkv=fused, attn_backend="flex", **sizes)
    attention = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    for layer in layers:
        layer.attention.inner_attention = attention.Config()  # flex_attention has no backward on CPUs
    config = made.Llama3Model.Config(
        dim=WIDTH, vocab_size=VOCAB, layers=layers,
        tok_embeddings=common.Embedding.Config(num_embeddings=VOCAB, embedding_dim=WIDTH, param_init=linear),
        norm=common.RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": torch.nn.init.ones_}),
        lm_head=common.Linear.Config(in_features=WIDTH, out_features=VOCAB, param_init=linear),
    )  # fmt: skip
    import_module("torchtitan.models.llama3.sharding").set_llama3_sharding_config(config, enable_sp=sequence)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    for layer in model.layers.values():
        layer.attention.rope.apply_rotary_emb = rotated
    return model.double()


def rotated(query: torch.Tensor, key: torch.Tensor, cache: torch.Tensor) -> list[torch.Tensor]:
    """As ComplexRoPE, which does it in float32 whatever it is given."""
    pairs = (torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) for t in (query, key))
    return [torch.view_as_real(t * cache).flatten(3) for t in pairs]


def batch_of(step: int, row: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + row))


def loss_fn(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trained(axes: dict[str, int], steps: int, cut: bool, sequence: bool, fused: bool) -> Any:
    """Losses and norms [steps, 2], and whole weights."""
    mesh = fsdp.local_mesh(**axes)
    module = llama(sequence, fused)
    if cut:
        module.parallelize(dims(mesh))
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, fsdp.Spec(mesh), fsdp.adamw(lr=0.01), buffers=fsdp.buffers(model))
    forward_backward = T.forward_backward(model, loss_fn)
    rows = [mesh.get_local_rank("data")] if cut else [*range(AXES["data"])]
    seen = []
    for step in range(steps):
        total: Any = 0.0
        for i, row in enumerate(rows):
            last = i == len(rows) - 1
            state, loss = forward_backward(state, batch_of(step, row), last_microbatch=last, scale=1 / len(rows))
            total = total + loss / len(rows)
        state, norm = T.clip_by_global_norm(state, 1.0)
        state, total = fsdp.pmean(fsdp.step(state), total)
        seen.append([total.item(), norm.item()])
    return torch.tensor(seen, dtype=torch.float64), fsdp.full_params(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for sequence in (False, True):
        for fused in (False, True):
            how = sequence, fused
            right, weights = fsdp.launch(trained, ({}, options.steps, False, *how), nprocs=1, simulate=True)[0]
            if options.gloo:
                found = fsdp.launch(trained, (AXES, options.steps, True, *how), nprocs=4)
            else:
                with fsdp.simulate(**AXES) as ranks:
                    found = [*zip(*(one.get() for one in ranks(trained, {}, options.steps, True, *how)), strict=True)]
            assert all(whole.keys() == weights.keys() for _, whole in found)
            most = max((whole[name] - weights[name]).abs().max().item() for _, whole in found for name in weights)
            losses, norms = torch.stack([numbers - right for numbers, _ in found]).abs().amax((0, 1)).tolist()
            print(f"sequence parallel norms: {sequence}, fused qkv: {fused}: {losses:.1e} {norms:.1e} {most:.1e}")
            assert max(losses, norms, most) < 1e-9


if __name__ == "__main__":
    main()
