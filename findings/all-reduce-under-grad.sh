#!/usr/bin/env bash
# torch.func.grad through an in-place all_reduce gives the gradient of the rank's own part, without an error.
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
    def loss(w):
        y = (w * (rank + 1)).sum()
        dist.all_reduce(y)
        return y
    g, value = torch.func.grad_and_value(loss)(torch.ones(2))
    print(f"rank {rank}: loss {value.item()} (the sum of both ranks), gradient {g.tolist()}")
    assert value == 6.0 and torch.equal(g, torch.full((2,), rank + 1.0))
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile
    mp.spawn(run, (2, tempfile.mktemp()), nprocs=2)
    print("the gradient is that of the rank's own part: the collective has no derivative, and no error says so")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
