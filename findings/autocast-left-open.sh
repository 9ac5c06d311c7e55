#!/usr/bin/env bash
# autocast opened once around a loop computes with the casts of the first step's weights in all later steps: the loss stays the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.nn as nn
torch.manual_seed(0)
m, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
def train(m, left_open):
    opt, losses = torch.optim.SGD(m.parameters(), lr=0.5), []
    def step():
        opt.zero_grad(); loss = m(x).float().square().mean(); loss.backward(); opt.step(); losses.append(round(loss.item(), 5))
    if left_open:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(4): step()
    else:
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16): step()
    return losses
import copy
each, once = train(copy.deepcopy(m), False), train(copy.deepcopy(m), True)
print("autocast opened in each step:  losses", each)
print("autocast opened around the loop: losses", once)
assert len(set(once)) == 1 and len(set(each)) == 4
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
