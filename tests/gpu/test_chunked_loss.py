"""A head and its cross entropy in chunks on GPUs: bfloat16, a whole step in a graph, what it takes, and how long."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.machine import RANKS

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("fresh_workers")]

VOCABULARY, WIDTH, TOKENS = 128_256, 1024, 4096


def timed(loss_fn: Any, given: list[torch.Tensor]) -> tuple[Any, int, float]:
    """The gradients, bytes beyond what there was before, and milliseconds."""
    for _ in range(3):
        grads = torch.autograd.grad(loss_fn(*given), given)
    del grads
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    grads = torch.autograd.grad(loss_fn(*given), given)
    end.record()
    torch.cuda.synchronize()
    return grads, torch.cuda.max_memory_allocated() - before, start.elapsed_time(end)


def test_a_head_of_llama_3_takes_less_and_has_the_gradients_of_the_plain_one() -> None:
    torch.manual_seed(0)
    h = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (0.02 * torch.randn(VOCABULARY, WIDTH, device="cuda")).bfloat16().requires_grad_()
    y = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    rows = {
        "plain": lambda h, w: F.cross_entropy(F.linear(h, w).float(), y),
        "in chunks": lambda h, w: T.linear_cross_entropy(h, w, y),
        "in chunks, float32 sums": lambda h, w: T.linear_cross_entropy(h, w, y, accum_dtype=torch.float32),
    }
    found = {name: timed(loss_fn, [h, w]) for name, loss_fn in rows.items()}
    for name, (_, nbytes, ms) in found.items():
        print(f"{name}: {ms:.1f} ms, {nbytes / 2**20:.0f} MiB")
    logits = TOKENS * VOCABULARY * 4
    assert found["in chunks"][1] < found["plain"][1] - 1.5 * logits
    for name in ("in chunks", "in chunks, float32 sums"):
        for grad, want in zip(found[name][0], found["plain"][0], strict=True):
            assert (grad.float() - want.float()).norm() < 0.02 * want.float().norm(), name


def losses(some: bool, graph: bool, compiled: bool) -> tuple[list[float], int]:
    import transformers

    warnings.simplefilter("ignore")  # Inductor's of softmax
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    transformers.AttentionInterface.register("causal", transformers.integrations.sdpa_attention.sdpa_attention_forward)
    settings: Any = transformers.LlamaConfig
    config = settings(
        vocab_size=32_000, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048, attn_implementation="causal", pad_token_id=None,
    )  # fmt: skip
    params, model = fsdp.functionalize(transformers.AutoModelForCausalLM.from_config(config).cuda())
    spec = fsdp.Spec(fsdp.local_mesh(), precision=fsdp.Precision(compute=torch.bfloat16))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-4))  # a larger one makes the loss jump, and rounding show

    def plain(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def in_chunks(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return of(model, tokens, tokens)

    loss_fn = in_chunks if some else plain
    if some:
        model, of = T.chunked_loss(model)
    if compiled:
        model = T.compile_units(model, "model.layers.*", *(["lm_head"] if some else []))
    forward_backward = T.forward_backward(model, loss_fn)

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> Any:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step, warmup=2) if graph else train_step
    tokens = torch.randint(32_000, (1, 2048), device="cuda")
    out = []
    for i in range(6):
        if i == 5:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        state, loss = step(state, tokens)
        out.append(float(loss))
    peak = max((one.peak for one in step.graphs.values()), default=0) if graph else torch.cuda.max_memory_allocated()
    return out, peak


@pytest.mark.parametrize(("graph", "compiled"), [(False, False), (True, False), (True, True)])
def test_a_llama_in_chunks_learns_as_the_plain_one_and_takes_less(graph: bool, compiled: bool) -> None:
    (want, most), *_ = launch(losses, (False, graph, compiled), nprocs=RANKS)
    (found, peak), *_ = launch(losses, (True, graph, compiled), nprocs=RANKS)
    print(f"graph {graph}, compiled {compiled}: {peak / 2**20:.0f} MiB, plain {most / 2**20:.0f}")
    assert found == pytest.approx(want, rel=2e-3)
    assert peak < most
