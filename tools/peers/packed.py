"""Numbers of bitsandbytes and torchao, for tests/unit/test_codecs.py; and QLoRA by peft and bitsandbytes, beside ours.

pip install --no-deps --target /tmp/peers bitsandbytes==0.50.2 peft==0.21.2 accelerate psutil torchao==0.18.0
PYTHONPATH=/tmp/peers:$PWD python tools/peers/packed.py write     writes tests/data/packed.pt
PYTHONPATH=/tmp/peers:$PWD python tools/peers/packed.py qlora     50 steps of both, on 1, 2 and 4 simulated ranks
"""

from __future__ import annotations

import copy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

OUT = Path(__file__).parents[2] / "tests" / "data" / "packed.pt"
STEPS = 50


def write() -> None:
    bnb: Any = import_module("bitsandbytes").functional
    mx: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
    w = torch.randn(34, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.randn(16, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 16)[:, None]
    found: dict[str, Any] = {"w": w, "rows": rows}
    for name, nested in (("nf4", False), ("nf4 nested", True)):
        data, state = bnb.quantize_4bit(w, quant_type="nf4", blocksize=64, compress_statistics=nested)
        planes = {"data": data.view(-1), "absmax": state.absmax}
        if nested:
            planes |= {"outer": state.state2.absmax, "mean": state.offset.view(1)}
        found[name] = planes, bnb.dequantize_4bit(data, state)
    data, absmax, _ = bnb.int8_vectorwise_quant(w.half())
    found["int8"] = {"data": data.view(-1), "absmax": absmax}, bnb.int8_vectorwise_dequant(data, absmax)
    found["dynamic map"] = bnb.create_dynamic_map()
    scale, data = mx.to_mx(rows, torch.float8_e4m3fn, 32)[:2]
    plain = mx.to_dtype(data, scale, torch.float8_e4m3fn, 32, torch.float32)
    planes = {"data": data.view(torch.uint8).reshape(-1), "scale": scale.view(torch.uint8).reshape(-1)}
    found["mxfp8"] = planes, plain
    torch.save(found, OUT)
    print(OUT, OUT.stat().st_size, "bytes")


def made() -> Any:
    """A small Llama of transformers, its linears in nf4 by bitsandbytes, with adapters of peft."""
    bnb, peft = import_module("bitsandbytes"), import_module("peft")
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config)
    for path, part in [*model.named_modules()]:
        if type(part) is torch.nn.Linear and path != "lm_head":
            packed = bnb.nn.Linear4bit(part.in_features, part.out_features, bias=False, quant_type="nf4")
            packed.weight = bnb.nn.Params4bit(part.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, packed)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_fn(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def theirs(ranks: int) -> list[float]:
    model = made()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, eps=1e-6)
    losses = []
    for step in range(STEPS):
        found = [loss_fn(model, batch(step, rank)) for rank in range(ranks)]
        loss = torch.stack(found).mean()
        for p, grad in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            p.grad = grad
        optimizer.step()
        losses.append(loss.item())
    return losses


def ours(model: Any, placement: Any) -> tuple[list[float], int]:
    rank = torch.distributed.get_rank()
    params, skeleton = fsdp.functionalize(fsdp.from_quantized(copy.deepcopy(model)))
    spec = fsdp.Spec(fsdp.local_mesh(), placement)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3, weight_decay=0.0, eps=1e-6), buffers=fsdp.buffers(skeleton))
    forward_backward, losses = T.forward_backward(skeleton, loss_fn), []
    for step in range(STEPS):
        state, loss = forward_backward(state, batch(step, rank))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss.item())
    return losses, sum(b.nbytes("main") for b in state.layout.buckets.values() if b.packed)


def qlora() -> None:
    for ranks in (1, 2, 4):
        right = theirs(ranks)
        for placement in (fsdp.zero3("data"), fsdp.zero2("data"), fsdp.ddp("data")):
            losses, nbytes = fsdp.launch(ours, (made(), placement), nprocs=ranks, simulate=True)[0]
            most = max(abs(a - b) for a, b in zip(losses, right, strict=True))
            print(f"{ranks} ranks, {placement}: {nbytes} bytes of base a rank, losses differ by {most:.1e} at most")
        print("  ", [round(loss, 4) for loss in right[::10]])


if __name__ == "__main__":
    {"write": write, "qlora": qlora}[sys.argv[1]]()
