#!/usr/bin/env bash
# FSDP2 fails in the backward of a module that has a parameter of no elements.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import tempfile, torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.none = nn.Linear(4, 4), nn.Parameter(torch.zeros(0, 4))
    def forward(self, x): return torch.cat([self.linear(x), self.none @ torch.ones(4, 4)])
def run(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    m = M()
    m(torch.ones(2, 4)).sum().backward()
    assert m.none.grad.shape == (0, 4)
    m.zero_grad()
    fully_shard(m, mesh=torch.distributed.init_device_mesh("cpu", (world,)))
    loss = m(torch.ones(2, 4)).sum()
    try:
        loss.backward()
        raise SystemExit("no error any more")
    except RuntimeError as error:
        if rank == 0:
            print("torch", torch.__version__, "| plain module: a gradient of (0, 4); fully_shard:", error)
        assert "non-empty" in str(error)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(run, (2, tempfile.mktemp()), 2)
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
