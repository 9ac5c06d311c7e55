"""A user's default device, `with torch.device(...):`, changes nothing of what the library makes for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.problems import batch, loss_fn, net

import functional_fsdp as fsdp
from functional_fsdp import Schedule, launch
from functional_fsdp import transforms as T


def lived(folder: str, device: str, transport: str) -> Any:
    """Losses and weights of a State's life; the default device is one that no tensor of it may lie on."""
    whole = net(depth=1)  # to trace them is what takes time
    with torch.device(device):
        mesh = fsdp.local_mesh()
        with torch.device("cpu"):
            data = [batch(step, dist.get_rank()) for step in range(6)]
        params, model = fsdp.functionalize(whole)
        adam, adamw = fsdp.from_torch(torch.optim.Adam, lr=0.01), fsdp.adamw(lr=0.01)
        parted = fsdp.partition({"matrix": fsdp.muon(lr=0.01), "tail": adam, "default": adamw})
        labels = {"blocks.*.up.weight": "matrix", "blocks.*.down.weight": "matrix", "tail.*": "tail"}
        spec = fsdp.Spec(mesh, transport=transport, labels=labels)
        state = fsdp.shard(params, spec, parted)
        forward_backward, seen = T.forward_backward(model, loss_fn), []
        for one in data[:3]:
            state, loss = forward_backward(state, one)
            state, norm = T.clip_by_global_norm(state, 0.1)
            state, mean = fsdp.pmean(fsdp.step(state), loss)
            seen += [loss, norm, mean]
        fsdp.save(state, f"{folder}/a")
        state = fsdp.load(f"{folder}/a", like=state)
        if transport != "collective":  # what follows has a transport of its own
            return seen, fsdp.full_params(state)
        spec = fsdp.Spec(mesh, fsdp.zero2("data"), schedule=Schedule(overlap_update=True))
        state = fsdp.shard(fsdp.full_params(state), spec, adamw)
        step = T.compile(lambda state, one: fsdp.step(forward_backward(state, one)[0]), "aot_eager")
        state = step(step(state, data[3]), data[4])
        state = fsdp.redistribute(state, fsdp.Spec(mesh))
        state, grads = fsdp.unshard(state)
        state = T.skip_nonfinite(fsdp.step)(fsdp.reduce(state, grads))
        fsdp.async_save(state, f"{folder}/b").result()
        return seen, fsdp.full_params(fsdp.load(f"{folder}/b", like=state)), fsdp.full_params(state)


def test_a_state_lives_alike_whatever_the_default_device_is(tmp_path: Path) -> None:
    for transport in ("collective", "copy_engine"):
        folder = tmp_path / transport
        right, mine = (launch(lived, (f"{folder}/{device}", device, transport), nprocs=2) for device in ("cpu", "meta"))
        torch.testing.assert_close(mine, right, rtol=0, atol=0)
