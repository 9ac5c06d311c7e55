#!/usr/bin/env bash
# A write to a row of a DTensor that is sharded along it is lost without an error: under FSDP2 the padding row of an embedding keeps random values.
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
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh, first = init_device_mesh("cpu", (2,)), dist.get_rank() == 0
torch.manual_seed(0)
plain = nn.Embedding(10, 4, padding_idx=0)
with torch.device("meta"):
    model = nn.Sequential(nn.Embedding(10, 4, padding_idx=0))
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
model[0].reset_parameters()  # as FSDP2's guide says; it ends with weight[padding_idx].fill_(0)
row = model[0].weight.full_tensor()[0].detach()
if first:
    print("the padding row of nn.Embedding:", plain.weight[0].tolist(), " with FSDP2 from the meta device:", row.tolist())
assert not plain.weight[0].any() and row.all()

writes = {
    "t[3].fill_(7)": lambda t: t[3].fill_(7),
    "t[2:].zero_()": lambda t: t[2:].zero_(),
    "t[3, 1] = 7.0": lambda t: t.__setitem__((3, 1), 7.0),
    "t.diagonal().fill_(7)": lambda t: t.diagonal().fill_(7),
    "t.chunk(2)[1].zero_()": lambda t: t.chunk(2)[1].zero_(),
}
for name, write in writes.items():
    t = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    write(t)
    lost = bool((t.full_tensor() == 1).all())
    if first:
        print(name, "on a DTensor with Shard(0): lost" if lost else "written")
    assert lost
t = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
t[:, 1:].zero_()  # along another dim: written
assert not t.full_tensor()[:, 1].any()
dist.destroy_process_group()
PYTHON
python -c "import torch; print('torch', torch.__version__)"
torchrun --standalone --nproc-per-node 2 "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
