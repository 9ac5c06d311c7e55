#!/usr/bin/env bash
# gloo's MAX and MIN lose a NaN that is not the first rank's: the largest gradient of FSDP2 parameters is finite, and error_if_nonfinite does not raise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
nan = float("nan")
for op in ("MAX", "MIN", "SUM"):
    t = torch.tensor([nan if rank == 0 else 1.0, nan if rank == 1 else 1.0])
    dist.all_reduce(t, getattr(dist.ReduceOp, op))
    if rank == 0:
        print(f"all_reduce {op}: a NaN of rank 0 gives {t[0].item()}, a NaN of rank 1 gives {t[1].item()}")
    assert t[0].isnan() and t[1].isnan().item() == (op == "SUM")
for bad in (0, 1):
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    if rank == bad:
        model[0].weight.grad.to_local().fill_(nan)
    try:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"), error_if_nonfinite=True)
        said = f"the norm is {norm.full_tensor().item()}"
    except RuntimeError as error:
        said = "an error: " + str(error)[:60]
    if rank == 0:
        print(f"clip_grad_norm_(norm_type=inf, error_if_nonfinite=True), NaN gradients on rank {bad}: {said}")
    assert said == "the norm is 2.0" if bad else said.startswith("an error")
dist.destroy_process_group()
PYTHON
python -c "import torch; print('torch', torch.__version__)"
torchrun --standalone --nproc-per-node 2 "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
