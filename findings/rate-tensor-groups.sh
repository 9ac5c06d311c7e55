#!/usr/bin/env bash
# A learning rate that is a tensor is one tensor in all param groups: a scheduler of one function a group gives all the last one's rate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch
from torch.optim.lr_scheduler import LambdaLR

print("torch", torch.__version__)
found = {}
for kind, make in (("a float", lambda: 0.1), ("a tensor", lambda: torch.tensor(0.1))):
    body, head = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [body]}, {"params": [head]}], lr=make())
    scheduler = LambdaLR(optimizer, [lambda n: 0.1, lambda n: 1.0])  # the body a tenth of the head
    body.grad, head.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    found[kind] = [round(1 - p[0].item(), 4) for p in (body, head)]
    rates = [round(float(group["lr"]), 4) for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] *= 0.5
    after = [round(float(group["lr"]), 4) for group in optimizer.param_groups]
    print(f"lr is {kind}: body and head moved {found[kind]}, rates {rates}; after lr *= 0.5 of the first group {after}")
assert found == {"a float": [0.01, 0.1], "a tensor": [0.1, 0.1]}
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
