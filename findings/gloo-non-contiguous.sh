#!/usr/bin/env bash
# gloo's all_reduce, reduce and broadcast of a view that is not contiguous take the memory after its first element: other numbers change, and it stays as it was.
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

dist.init_process_group("gloo")
rank = dist.get_rank()


def column(do):
    """What becomes of a matrix of 1, on the second rank of 10, when its left half goes through a collective."""
    whole = torch.full((2, 4), 10.0 if rank else 1.0)
    do(whole[:, :2])
    return whole.tolist()


right = {"all_reduce": (0, [[11, 11, 1, 1]] * 2), "reduce to 0": (0, [[11, 11, 1, 1]] * 2), "broadcast from 0": (1, [[1, 1, 10, 10]] * 2)}
found = {
    "all_reduce": column(dist.all_reduce),
    "reduce to 0": column(lambda x: dist.reduce(x, 0)),
    "broadcast from 0": column(lambda x: dist.broadcast(x, 0)),
}
for name, (at, want) in right.items():
    if rank == at:
        print(f"{name} of a matrix's left half, on rank {at}: {found[name]}, right is {want}", flush=True)
        assert found[name] == ([[11, 11, 11, 11], [1, 1, 1, 1]] if at == 0 else [[1, 1, 1, 1], [10, 10, 10, 10]])
    dist.barrier()
gathered = [torch.zeros(2, 2) for _ in range(2)]
dist.all_gather(gathered, torch.full((2, 4), float(rank))[:, :2])
assert [one.tolist() for one in gathered] == [[[0, 0]] * 2, [[1, 1]] * 2]
transposed = torch.arange(4.0).reshape(2, 2).t() if rank else torch.zeros(2, 2)
dist.all_reduce(transposed)
if rank == 0:
    print("all_gather of such a view is right")
    print(f"all_reduce of 0 and [[0, 2], [1, 3]], a transposed matrix: on rank 0 {transposed.tolist()}")
    assert transposed.tolist() == [[0, 1], [2, 3]]
dist.destroy_process_group()
PYTHON
python -c "import torch; print('torch', torch.__version__)"
torchrun --standalone --nproc-per-node 2 "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
