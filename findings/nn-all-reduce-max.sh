#!/usr/bin/env bash
# torch.distributed.nn.functional.all_reduce with MAX, MIN or PRODUCT has a wrong gradient: its backward is the same reduction of gradients.
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
from torch.distributed._functional_collectives import all_reduce as functional
from torch.distributed.nn.functional import all_reduce

dist.init_process_group("gloo")
rank = dist.get_rank()


def gradients(reduce):
    """Of the sum over ranks of the reduction of 1 and 2, times 1 on the first rank and 10 on the second."""
    x = torch.tensor(1.0 + rank, requires_grad=True)
    (reduce(x) * (10.0 if rank else 1.0)).backward()
    found = [None, None]
    dist.all_gather_object(found, x.grad.item())
    return found


right = {"SUM": [11, 11], "AVG": [5.5, 5.5], "MAX": [0, 11], "MIN": [11, 0], "PRODUCT": [22, 11]}
seen = {"SUM": [11, 11], "AVG": [5.5, 5.5], "MAX": [10, 10], "MIN": [1, 1], "PRODUCT": [10, 10]}
for op, want in right.items():
    found = gradients(lambda x: all_reduce(x, op=getattr(dist.ReduceOp, op)))
    if rank == 0:
        print(f"all_reduce {op}: gradients of the ranks {found}, right are {want}")
    assert found == seen[op]
try:
    gradients(lambda x: functional(x, "max", dist.group.WORLD))
    raise AssertionError("the functional collective does not raise")
except RuntimeError as error:
    if rank == 0:
        print("the functional collective:", error)
dist.destroy_process_group()
PYTHON
python -c "import torch; print('torch', torch.__version__)"
torchrun --standalone --nproc-per-node 2 "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
