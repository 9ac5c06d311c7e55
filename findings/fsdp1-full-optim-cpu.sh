#!/usr/bin/env bash
# FSDP1 on CPUs: full_optim_state_dict gives exp_avg_sq in the place of exp_avg, for every leaf.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
def run(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5))
    model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(4, 6)).square().sum().backward(); optimizer.step(); optimizer.zero_grad()
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    same = [name for name, kept in full.items() if torch.equal(kept["exp_avg"], kept["exp_avg_sq"])]
    own = any(torch.equal(k["exp_avg"], k["exp_avg_sq"]) for k in optimizer.state.values() if k["exp_avg"].numel())
    if rank == 0:
        print(f"exp_avg equals exp_avg_sq in {len(same)} of {len(full)} leaves; in the optimizer itself: {own}")
    assert len(same) == len(full) and not own
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(run, (2, tempfile.mktemp()), nprocs=2)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
