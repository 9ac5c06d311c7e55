#!/usr/bin/env bash
# fully_shard of two parts that share a weight, without fully_shard of what holds both, unties the weight without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import torch.multiprocessing as mp
class Part(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.linear = nn.Linear(n, m, bias=False)
    def forward(self, x): return self.linear(x)
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Part(4, 4), Part(4, 4)
        self.last.linear.weight = self.first.linear.weight
    def forward(self, x): return self.last(self.first(x))
def run(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    m = M()
    assert len(list(m.parameters())) == 1
    fully_shard(m.first, mesh=mesh); fully_shard(m.last, mesh=mesh)
    n = len(list(m.parameters()))
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    m(torch.ones(2, 4)).sum().backward(); opt.step()
    a, b = m.first.linear.weight.full_tensor(), m.last.linear.weight.full_tensor()
    if rank == 0:
        print("parameters before fully_shard of two parts: 1, after:", n, "| equal after one step:", torch.equal(a, b))
    assert n == 2 and not torch.equal(a, b)
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile
    mp.spawn(run, (2, tempfile.mktemp()), nprocs=2)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
