#!/usr/bin/env bash
# A reduced DTensor as a Python number (item(), int(), bool()) is the rank's own part: a test for NaN gives ranks other answers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, float("nan")]), mesh, [Shard(0)])
y = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])


def on_ranks(value):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


shown = {
    "y.sum().item()": on_ranks(y.sum().item()),
    "int(y.sum())": on_ranks(int(y.sum())),
    "y.max().item()": on_ranks(y.max().item()),
    "y.mean().item()": on_ranks(y.mean().item()),
    "x.isnan().any().item()": on_ranks(x.isnan().any().item()),
    "bool(x.isnan().any())": on_ranks(bool(x.isnan().any())),
    "y.sum().full_tensor().item()": on_ranks(y.sum().full_tensor().item()),
    "bool(x.isnan().any().full_tensor())": on_ranks(bool(x.isnan().any().full_tensor())),
}
if rank == 0:
    for name, value in shown.items():
        print(f"{name}: {value}")
    assert list(shown.values()) == [
        [1, 5], [1, 5], [1, 3], [0.5, 2.5], [False, True], [False, True], [6, 6], [True, True]
    ]
dist.destroy_process_group()
PYTHON
python -c "import torch; print('torch', torch.__version__)"
torchrun --standalone --nproc-per-node 2 "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
