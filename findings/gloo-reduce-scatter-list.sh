#!/usr/bin/env bash
# gloo: reduce_scatter_tensor and reduce_scatter of a list of the same numbers give sums with other last bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def run(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    x = torch.randn(world * 1000)
    a, b = torch.empty(1000), torch.empty(1000)
    dist.reduce_scatter_tensor(a, x.clone())
    dist.reduce_scatter(b, list(x.clone().split(1000)))
    n = torch.tensor(int((a != b).sum()))
    dist.all_reduce(n)
    close = torch.allclose(a, b, atol=1e-5)
    if rank == 0:
        print(f"float32, {world} ranks: reduce_scatter_tensor and reduce_scatter of a list differ in the bits of {n.item()} of {world * 1000} sums, equal to 1e-5: {close}")
    assert close and n > 0
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile
    mp.spawn(run, (4, tempfile.mktemp()), nprocs=4)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
