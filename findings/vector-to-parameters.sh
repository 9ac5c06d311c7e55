#!/usr/bin/env bash
# vector_to_parameters makes the parameters views of the vector, of its dtype: training goes on in the vector that was kept as a copy.
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
from torch.nn.utils import parameters_to_vector, vector_to_parameters

print("torch", torch.__version__)
torch.manual_seed(0)
model = nn.Linear(3, 2)
best = parameters_to_vector(model.parameters()).detach()
kept = best.clone()


def train():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


train()
first = torch.equal(best, kept)
vector_to_parameters(best, model.parameters())
train()
second = torch.equal(best, kept)
print("the kept vector is as it was: after a step", first, "- after it was put back, and a step", second)
half = nn.Linear(3, 2).to(torch.bfloat16)
vector_to_parameters(kept, half.parameters())
print("a bfloat16 module that was given a float32 vector:", half.weight.dtype)
assert first and not second and half.weight.dtype == torch.float32
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
