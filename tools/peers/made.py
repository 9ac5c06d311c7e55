"""How each peer trains and saves."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.peers import DECAY, LR, MORE, STEPS, PeerModel, batch_of, loss_of

MAKERS: dict[str, Callable[[Path], None]] = {}
RANKS: dict[str, int] = {}
Step = Callable[[torch.Tensor], torch.Tensor]


def maker(name: str, ranks: int = 2) -> Any:
    def add(function: Any) -> Any:
        MAKERS[name] = function
        RANKS[name] = ranks
        return function

    return add


def one(rank: int, name: str, folder: str, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS[name]), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    MAKERS[name](Path(folder))


def began() -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def steps_of(step: Step, begin: int, end: int) -> list[float]:
    found = []
    for n in range(begin, end):
        loss = step(batch_of(n, dist.get_rank())).detach().double().clone()
        dist.all_reduce(loss)
        found.append(loss.item() / dist.get_world_size())
    return found


def note(folder: Path, weights: dict[str, Any], moments: dict[str, dict[str, Any]], losses: list[float]) -> None:
    """Write what is expected, by the first rank; what is given is whole."""
    if dist.get_rank() == 0:
        held = {f"weight/{name}": tensor.detach().clone().contiguous() for name, tensor in weights.items()}
        for name, kept in moments.items():
            held |= {f"{slot}/{name}": kept[slot].detach().clone().contiguous() for slot in ("exp_avg", "exp_avg_sq")}
        save_file({**held, "losses": torch.tensor(losses, dtype=torch.float64)}, folder / "expected.safetensors")
    dist.barrier()


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---------------------------------------------------------------- torch's FSDP2


def fsdp2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Step]:
    from torch.distributed.fsdp import fully_shard

    mesh = began()
    model = PeerModel().to(dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=DECAY)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def noted_fsdp2(folder: Path, model: Any, optimizer: Any, step: Step) -> None:
    weights = {name: whole(p).clone() for name, p in model.named_parameters()}
    weights |= {name: b.clone() for name, b in model.named_buffers()}
    moments = {
        name: {slot: whole(t).clone() for slot, t in optimizer.state[p].items()}
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    note(folder, weights, moments, steps_of(step, STEPS, STEPS + MORE))


def by_dcp(folder: Path, shape: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer, step = fsdp2()
    steps_of(step, 0, STEPS)
    flat = StateDictOptions(flatten_optimizer_state_dict=shape in ("flat", "top"))
    weights, kept = get_state_dict(model, optimizer, options=flat)
    if shape == "top":  # as torchtitan: weights at the top, without a prefix
        state = {**weights, "optimizer": kept, "train_state": {"step": torch.tensor(STEPS)}, "lr": 0.1}
    elif shape == "plain":
        state = weights
    else:
        state = {"model": weights, "optim": kept}
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    noted_fsdp2(folder, model, optimizer, step)


for shape in ("nested", "flat", "top", "plain"):
    maker(f"dcp-{shape}")(partial(by_dcp, shape=shape))


@maker("hf-dcp")
def hf_dcp(folder: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    model, optimizer, step = fsdp2()
    steps_of(step, 0, STEPS)
    held = {name: t for name, t in model.state_dict().items() if name != "head.weight"}
    writer = HuggingFaceStorageWriter(str(folder / "checkpoint"), save_distributed=True)
    dcp.save(held, storage_writer=writer)
    noted_fsdp2(folder, model, optimizer, step)


@maker("rank-files")
def rank_files(folder: Path) -> None:
    """As verl's FSDPCheckpointManager: each rank's state dicts, of DTensors, by torch.save."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # noqa: F401

    model, optimizer, step = fsdp2()
    steps_of(step, 0, STEPS)
    rank, path = dist.get_rank(), folder / "checkpoint"
    path.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path / f"model_world_size_2_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), path / f"optim_world_size_2_rank_{rank}.pt")
    extra = {"lr_scheduler": None, "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, path / f"extra_state_world_size_2_rank_{rank}.pt")
    noted_fsdp2(folder, model, optimizer, step)


# ---------------------------------------------------------------- torchtitan


@maker("torchtitan")
def torchtitan(folder: Path) -> None:
    """What torchtitan's manager gives to DCP: the model's leaves at the top, the optimizer's state by name."""
    from torchtitan.components.checkpointer.base import ModelWrapper
    from torchtitan.components.optimizer.utils import get_flat_optim_state_dict

    model, optimizer, step = fsdp2()
    for group in optimizer.param_groups:
        group["param_names"] = [name for name, p in model.named_parameters() if p.requires_grad]
    steps_of(step, 0, STEPS)
    flat = get_flat_optim_state_dict(optimizer)
    states = {"optimizer": flat, "lr_scheduler": {"last_epoch": STEPS}, "train_state": {"step": torch.tensor(STEPS)}}
    dcp.save({**states, **ModelWrapper(model).state_dict()}, checkpoint_id=folder / "checkpoint")
    noted_fsdp2(folder, model, optimizer, step)


# ---------------------------------------------------------------- Accelerate


def accelerate(folder: Path, version: int, kind: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    began()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type=kind, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["PeerBlock"], use_orig_params=True, cpu_offload=False,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True)
    plugin.set_auto_wrap_policy(PeerModel())
    accelerator.state.distributed_type = "FSDP"
    model: Any
    if version == 2:
        model, optimizer, step = fsdp2()
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        # what lies on the CPU is not moved there: torch would free it, and have every moment in one buffer
        torch.distributed.fsdp._flat_param.FlatParamHandle.to_cpu = lambda self: nullcontext()
        if kind == "FULL_STATE_DICT":
            plugin.optim_state_dict_config.offload_to_cpu = False
        model = PeerModel()
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=plugin.auto_wrap_policy, use_orig_params=True, device_id=torch.device("cpu")
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=DECAY)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        plugin.set_state_dict_type()
    steps_of(step, 0, STEPS)
    save_fsdp_model(plugin, accelerator, model, str(folder / "checkpoint"))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder / "checkpoint"))
    if version == 2:
        noted_fsdp2(folder, model, optimizer, step)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        moments = {}
        for name, p in model.named_parameters():  # full_optim_state_dict gives wrong ones on CPUs
            if p in optimizer.state or p.requires_grad:
                parts: list[Any] = [None] * dist.get_world_size()
                own = {slot: optimizer.state[p][slot] for slot in SLOTS} if p in optimizer.state else {}
                dist.all_gather_object(parts, {slot: t.clone() for slot, t in own.items() if t.numel()})
                plain = name.replace("_fsdp_wrapped_module.", "")
                held = {slot: torch.cat([part[slot] for part in parts if slot in part]) for slot in SLOTS}
                moments[plain] = {slot: t.view(SHAPES[plain]) for slot, t in held.items()}
        with FSDP.summon_full_params(model):
            weights = {n.replace("_fsdp_wrapped_module.", ""): p.clone() for n, p in model.named_parameters()}
            weights |= {n.replace("_fsdp_wrapped_module.", ""): b.clone() for n, b in model.named_buffers()}
        note(folder, weights, moments, steps_of(step, STEPS, STEPS + MORE))


for version in (1, 2):
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        name = f"accelerate{version}-{kind.split('_')[0].lower()}"
        maker(name)(partial(accelerate, version=version, kind=kind))


# ---------------------------------------------------------------- DeepSpeed


def deepspeed(folder: Path, stage: int, bf16: bool, universal: bool = False) -> None:
    import deepspeed as ds

    ds.init_distributed("gloo")
    model = PeerModel()
    options = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
    }  # fmt: skip
    if bf16:
        options["bf16"] = {"enabled": True}
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": DECAY}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=options)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss

    steps_of(step, 0, STEPS)
    engine.save_checkpoint(str(folder / "checkpoint"))
    dist.barrier()
    if dist.get_rank() == 0:
        to_universal(folder)
    dist.barrier()
    weights, moments = {}, {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            there = folder / "universal" / "zero" / name
            read = {slot: torch.load(there / f"{slot}.pt", weights_only=False) for slot in ("fp32", *SLOTS)}
            values = {s: (t["param"] if isinstance(t, dict) else t).view(SHAPES[name]) for s, t in read.items()}
            weights[name] = values.pop("fp32")
            moments[name] = values
        else:
            with ds.zero.GatheredParameters([p], enabled=stage == 3):
                weights[name] = p.detach().clone()
    weights |= {name: b.clone() for name, b in model.named_buffers()}
    dist.barrier()
    if dist.get_rank() == 0:
        if universal:
            shutil.rmtree(folder / "checkpoint")
            (folder / "universal").rename(folder / "checkpoint")
        else:
            shutil.rmtree(folder / "universal")
    note(folder, weights, moments, steps_of(step, STEPS, STEPS + MORE))


SLOTS = ("exp_avg", "exp_avg_sq")
SHAPES = {name: p.shape for name, p in PeerModel().named_parameters()}


def to_universal(folder: Path) -> None:
    """By DeepSpeed's own tool."""
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

    tag = (folder / "checkpoint" / "latest").read_text()
    sys.argv = ["", "--input_folder", str(folder / "checkpoint" / tag), "--output_folder",
                str(folder / "universal"), "--num_extract_workers", "1", "--num_merge_workers", "1",
                "--inject_missing_state"]  # fmt: skip
    main(parse_arguments())


for stage in (1, 2, 3):
    for bf16 in (False, True):
        maker(f"deepspeed{stage}{'-bf16' if bf16 else ''}")(partial(deepspeed, stage=stage, bf16=bf16))
for stage in (2, 3):
    maker(f"deepspeed{stage}-universal")(partial(deepspeed, stage=stage, bf16=False, universal=True))


# ---------------------------------------------------------------- Lightning


@maker("lightning")
def lightning(folder: Path) -> None:
    import lightning as L

    losses: list[float] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = PeerModel()
            self.save_hyperparameters({"width": 6})

        def training_step(self, batch: Any, i: int) -> torch.Tensor:
            loss = loss_of(self.model, batch_of(self.global_step, dist.get_rank()))
            mean = loss.detach().double().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=LR, weight_decay=DECAY)

    def fitted(steps: int, path: Path | None = None) -> Any:
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        )  # fmt: skip
        data = torch.utils.data.DataLoader(torch.zeros(1000, 1), batch_size=1)
        trainer.fit(Module(), data, ckpt_path=path, weights_only=False)
        return trainer

    trainer = fitted(STEPS)
    trainer.save_checkpoint(folder / "checkpoint.ckpt")
    optimizer, plain = trainer.optimizers[0], trainer.model.module.model if hasattr(trainer.model, "module") else None
    plain = trainer.lightning_module.model if plain is None else plain
    moments = {name: copy.deepcopy(optimizer.state[p]) for name, p in plain.named_parameters() if p in optimizer.state}
    weights = {n: p.detach().clone() for n, p in (*plain.named_parameters(), *plain.named_buffers())}
    losses.clear()
    fitted(STEPS + MORE, folder / "checkpoint.ckpt")
    note(folder, weights, moments, losses)


@maker("fabric")
def fabric(folder: Path) -> None:
    """Lightning's Fabric, FSDP2: torch's DCP, with the rest in meta.pt."""
    import lightning as L
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any, mesh: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(parallelize_fn=shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(PeerModel())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=DECAY)
    optimizer = fabric.setup_optimizers(optimizer)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    steps_of(step, 0, STEPS)
    fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer, "step": STEPS})
    noted_fsdp2(folder, model.module if hasattr(model, "module") else model, optimizer, step)


# ---------------------------------------------------------------- Megatron-FSDP


class NoStream:
    """A stream or an event of CUDA where there is none: what is enqueued is done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_: NoStream()


def without_gpus() -> None:
    """Megatron-FSDP asks CUDA for devices and streams, and NCCL for sums of what is multiplied: it is told of none."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.current_stream = NoStream
    cuda.stream = lambda _: nullcontext()
    cuda.current_device = lambda: 0
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.cuda, tensor.record_stream = lambda t, *_: t, lambda *_: None
    dist._make_nccl_premul_sum = lambda factor: dist.ReduceOp.AVG  # type: ignore[attr-defined]


@maker("megatron-fsdp")
def megatron(folder: Path) -> None:
    """On two GPUs, or without. Its optimizer has taken a step before the first one, with gradients of zero."""
    from megatron_fsdp import fully_shard

    gpus = torch.cuda.is_available()
    device = torch.device(f"cuda:{dist.get_node_local_rank()}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        without_gpus()
    dist.init_process_group()
    mesh = dist.device_mesh.init_device_mesh(device.type, (2, 1), mesh_dim_names=("data", "tp"))
    model = PeerModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    made: Any = fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="data", tp_dim="tp", zero_dp_strategy=3,
                            fsdp_unit_modules=["support.peers.PeerBlock"], device=device)  # fmt: skip
    sharded, optimizer = made

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(sharded, tokens.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.cpu()

    steps_of(step, 0, STEPS)
    held = {"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(held, checkpoint_id=folder / "checkpoint")

    def gathered(own: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Whole tensors; a rank that has nothing of a leaf keeps no moments for it."""
        parts: list[Any] = [None, None]
        lies = {name: (t.shape, t.to_local() if hasattr(t, "to_local") else t) for name, t in own.items()}
        dist.all_gather_object(parts, {name: (shape, t.reshape(-1).cpu()) for name, (shape, t) in lies.items()})
        every = {name: shape for part in parts for name, (shape, _) in part.items()}
        flat = {name: torch.cat([part[name][1] for part in parts if name in part]) for name in every}
        return {name: t[: every[name].numel()].view(every[name]) for name, t in flat.items()}  # some are on both ranks

    names = [name.removeprefix("module.") for name, _ in sharded.named_parameters()]
    weights = gathered({name.removeprefix("module."): t for name, t in held["model"].items()})
    kept = held["optimizer"]["state"]
    moments = [gathered({slot: kept[i][slot] for slot in SLOTS} if i in kept else {}) for i in range(len(names))]
    named = {name: slots for name, slots in zip(names, moments, strict=True) if slots}
    note(folder, weights, named, steps_of(step, STEPS, STEPS + MORE))


# ---------------------------------------------------------------- Hugging Face


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_LM, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


VOCAB_LM = 17


@maker("peft", ranks=1)
def peft(folder: Path) -> None:
    """LoRA with DoRA's vectors, an adapter of the embedding, and a module that is saved whole."""
    from peft import LoraConfig, get_peft_model

    began()
    model = tiny_llama()
    model.save_pretrained(folder / "base")
    config = LoraConfig(r=2, lora_alpha=6, use_dora=True, target_modules=["q_proj", "down_proj", "embed_tokens"],
                        modules_to_save=["norm"])  # fmt: skip
    made = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) / 8)
    made.save_pretrained(folder / "checkpoint")
    tokens = torch.arange(8).view(1, 8)
    logits = made.eval()(tokens).logits.detach()
    merged = made.merge_and_unload()
    held = {f"merged/{n}": t.detach().clone() for n, t in merged.state_dict().items() if n != "lm_head.weight"}
    held |= {"logits": logits.contiguous()}
    save_file(held, folder / "expected.safetensors")
