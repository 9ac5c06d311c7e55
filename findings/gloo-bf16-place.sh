#!/usr/bin/env bash
# gloo: a sum in bfloat16 is rounded at each hop, and depends on where in the buffer a number stands.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.distributed as dist, torch.multiprocessing as mp
def run(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    part = torch.randn(64).bfloat16()
    x = part.repeat(64)  # the same 64 numbers again and again
    dist.all_reduce(x)
    sums = x.view(64, 64)
    kinds = len({tuple(row.tolist()) for row in sums})
    gathered = [torch.empty(64, dtype=torch.bfloat16) for _ in range(world)]
    dist.all_gather(gathered, part)
    exact = torch.stack(gathered).float().sum(0).bfloat16()
    off = int((sums[0] != exact).sum())
    if rank == 0:
        print(f"bfloat16, {world} ranks, the same 64 numbers 64 times in one buffer: {kinds} different results, by place")
        print(f"{off} of 64 sums are not the float32 sum rounded once")
    assert kinds > 1 and off > 0
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile
    mp.spawn(run, (4, tempfile.mktemp()), nprocs=4)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
