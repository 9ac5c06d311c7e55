#!/usr/bin/env bash
# DCP's HuggingFaceStorageWriter with its defaults writes one file name from two ranks: half of a sharded tensor is there afterwards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
pip install --quiet safetensors==0.8.0 fsspec
cat > "$folder/show.py" <<'PYTHON'
import json, pathlib, sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.checkpoint import save, HuggingFaceStorageWriter
from torch.distributed.tensor import distribute_tensor, Shard
def run(rank, world, store, folder):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    w = distribute_tensor(torch.arange(8.), mesh, [Shard(0)])
    save({"w": w}, storage_writer=HuggingFaceStorageWriter(folder))
    dist.barrier()
    if rank == 0:
        found = []
        from safetensors.torch import load_file
        for f in sorted(pathlib.Path(folder).rglob("*.safetensors")):
            found += load_file(f).values()
            print(f.name, {k: v.tolist() for k, v in load_file(f).items()})
        print('the tensor that was saved has 8 elements, the files hold', sum(map(len, found)))
        assert sum(map(len, found)) == 4
    dist.destroy_process_group()
if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    mp.spawn(run, (2, tempfile.mktemp(), folder), nprocs=2)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch safetensors'.split()))"
python show.py
