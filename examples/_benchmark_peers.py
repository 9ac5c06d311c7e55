"""The peers' rows of benchmark.py: functions (model, setting) -> step, as each library's documentation has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from _benchmark_setting import LR, Setting, Step
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["ddp", "fsdp2", "fsdp2_float8", "fsdp2_tuned", "megatron"]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting) -> Step:
    """The step of every peer whose optimizer sees to everything."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = setting.config.loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(model: nn.Module, setting: Setting, tune: Callable[[Any, list[Any], Setting], None] | None = None) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=setting.dtype, reduce_dtype=setting.wire or setting.dtype)
    reshard = setting.placement not in ("zero1", "zero2") and setting.keep != "all"
    if setting.selective:
        selective(setting.to_compile(model)[: setting.config.depth])
    for layer in setting.to_compile(model):
        layer.compile(dynamic=False)
    *units, head = setting.modules(model)
    for modules in units:
        fully_shard(modules, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(head, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=setting.mesh, mp_policy=policy)
    if tune:
        tune(model, [modules[0] for modules in (*units, head)], setting)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), setting)


def selective(layers: list[nn.Module]) -> None:
    """torch's selective checkpoints, by torchtitan's policy: attention and every other matrix product are saved."""
    aten = torch.ops.aten
    saved = {
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    }  # fmt: skip

    def contexts() -> Any:
        products = {True: 0, False: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op is aten.mm.default:
                products[ctx.is_recompute] += 1
                return (
                    CheckpointPolicy.MUST_SAVE if products[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
                )
            return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


def fsdp2_float8(model: nn.Module, setting: Setting) -> Step:
    """torchao's linears, gathered in float8, the scales of all of them by one reduction a step."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # type: ignore[import-not-found]

    model = setting.in_float8(model, fsdp2_gathers=True)
    step = fsdp2(model, setting)

    def scaled(tokens: torch.Tensor) -> torch.Tensor:
        loss = step(tokens)
        precompute_float8_dynamic_scale_for_fsdp(model)
        return loss

    return scaled


def fsdp2_tuned(model: nn.Module, setting: Setting) -> Step:
    return fsdp2(model, setting, tune)


def tune(model: Any, units: list[Any], setting: Setting) -> None:
    """Gathers two units ahead, issued early; reductions on a communicator of their own, two of them in flight."""
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 3])
        unit.set_modules_to_backward_prefetch(units[max(0, i - 2) : i][::-1])
    if hasattr(model, "set_separate_reduce_scatter_group"):  # torch 2.13
        model.set_separate_reduce_scatter_group()
    else:
        ranks = dist.get_process_group_ranks(setting.mesh.get_group(setting.mesh.ndim - 1))
        own = ReduceScatter(dist.new_group(ranks, use_local_synchronization=True))
        for unit in units:
            unit.set_custom_reduce_scatter(own)
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):  # torch 2.13
        model.set_reduce_scatter_max_input_buffers(2)


class ReduceScatter:
    """What `set_custom_reduce_scatter` asks for: the default's, in a process group of its own."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, self.group, async_op)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights only: buffers keep their dtype, as they do for the other contestants."""
    for p in model.parameters():
        p.data = p.data.to(dtype)


def ddp(model: nn.Module, setting: Setting) -> Step:
    main = list(model.parameters())
    if setting.dtype is not torch.float32:
        main = [nn.Parameter(p.detach().clone()) for p in main]
        cast(model, setting.dtype)
    for layer in setting.to_compile(model):
        layer.compile(dynamic=False)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compute = list(model.parameters())
    optimizer = torch.optim.AdamW(main, lr=LR, fused=True)
    if setting.dtype is torch.float32:
        return trained(parallel, optimizer, setting)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = setting.config.loss(parallel, tokens)
        loss.backward()
        for m, p in zip(main, compute, strict=True):
            m.grad = p.grad.float() if p.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list[torch.Tensor](compute), list[torch.Tensor](main))
        parallel.zero_grad()
        return loss.detach()

    return step


def megatron(model: nn.Module, setting: Setting) -> Step:
    import megatron_fsdp as peer  # type: ignore[import-not-found]

    strategy = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[setting.placement]
    policy = peer.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=setting.wire or setting.dtype
    )
    cast(model, setting.dtype)  # compute's dtype is the module's there
    for layer in setting.to_compile(model):
        layer.forward = torch.compile(layer.forward, dynamic=False)  # `layer.compile()` would take its hooks in
    *units, _ = setting.modules(model)  # the head is left to the root, which keeps it gathered, as the others do
    parallel = peer.fully_shard_model(
        module=model,
        fsdp_unit_modules=list({type(module) for module in chain(*units)}),
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    optimizer = peer.fully_shard_optimizer(torch.optim.AdamW(parallel.parameters(), lr=LR, fused=True))
    for values in optimizer.state.values():  # it has made a step on zeros, which does not count
        values["step"].zero_()
    return trained(parallel, optimizer, setting)
