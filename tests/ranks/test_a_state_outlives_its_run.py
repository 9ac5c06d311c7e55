"""Training is killed in a save, goes on by another strategy on fewer ranks; from_pretrained reads its model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.moved import whole_trees

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._io import checkpoint as _checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def config_of(name: str) -> Any:
    import transformers

    kind, more = MODELS[name]
    return getattr(transformers, f"{kind}Config")(**SIZES, **more)


def module_of(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(name))


def tokens(step: int) -> torch.Tensor:
    """This rank's part of a batch of 4."""
    ids = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(step))
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def loss_fn(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def killed(name: str, folder: str) -> None:
    """Four ranks by zero3; the third save kills a rank in its middle."""
    params, model = fsdp.functionalize(module_of(name))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=1e-2))
    forward_backward = T.forward_backward(model, loss_fn)
    for step in range(1, 4):
        state, _ = forward_backward(state, tokens(step))
        state = fsdp.step(state)
        if step == 3 and dist.get_rank() == 2:
            _checkpoint.write_tensors = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        fsdp.save(state, f"{folder}/step_{step}")
        kept = whole_trees({"main": state.main, "mean": state.opt.mean, "square": state.opt.square})
        if dist.get_rank() == 0:
            torch.save(kept, f"{folder}/kept_{step}.pt")


def resumed(name: str, folder: str) -> tuple[list[str], int]:
    """Two ranks by hsdp, computing in bfloat16. Returns what is not the same bits, and the steps in the end."""
    newest = fsdp.latest_checkpoint(folder)
    assert newest is not None
    mesh = fsdp.local_mesh(replica=2, shard=1)
    spec = fsdp.Spec(mesh, fsdp.hsdp("replica", "shard"), precision=fsdp.Precision(compute=torch.bfloat16))
    state = fsdp.load(newest, spec, fsdp.adamw(lr=1e-2))
    kept = torch.load(f"{folder}/kept_{state.steps}.pt")
    found = whole_trees({"main": state.main, "mean": state.opt.mean, "square": state.opt.square})
    wrong = [path for path in kept.keys() | found.keys() if not torch.equal(kept[path], found[path])]
    model = fsdp.functionalize(module_of(name))[1]
    forward_backward = T.forward_backward(model, loss_fn)
    state, _ = forward_backward(state, tokens(state.steps + 1))
    state = fsdp.step(state)
    fsdp.save_safetensors(state, f"{folder}/exported", max_shard_size=20_000, convert=fsdp.conversions_of(model))
    plain = module_of(name)
    plain.load_state_dict(fsdp.state_dict(state))
    if dist.get_rank() == 0:
        torch.save(plain(torch.arange(20).view(2, 10)).logits, f"{folder}/logits.pt")
    return wrong, state.steps


@pytest.mark.large
@pytest.mark.parametrize("name", MODELS)
def test_a_killed_run_goes_on_elsewhere_and_its_model_is_read(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(fsdp.LaunchError, match="rank 2 of 4 failed: the process was killed by SIGKILL"):
        launch(killed, (name, str(tmp_path)), nprocs=4)
    assert sorted(p.name for p in tmp_path.glob("step_?")) == ["step_1", "step_2"]
    assert launch(resumed, (name, str(tmp_path)), nprocs=2) == [([], 3)] * 2
    config_of(name).save_pretrained(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    logits = model(torch.arange(20).view(2, 10)).logits
    assert torch.equal(logits, torch.load(tmp_path / "logits.pt"))
