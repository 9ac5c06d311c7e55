#!/usr/bin/env bash
# to_empty of a module on the meta device unties weights, where .to of a module on the CPU keeps ties.
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
with torch.device("meta"):
    m = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    m["head"].weight = m["embed"].weight
assert m["head"].weight is m["embed"].weight
print("tied on meta:", m["head"].weight is m["embed"].weight, "parameters:", len(list(m.parameters())))
m.to_empty(device="cpu")
print("after to_empty:", m["head"].weight is m["embed"].weight, "parameters:", len(list(m.parameters())))
assert m["head"].weight is not m["embed"].weight and len(list(m.parameters())) == 2
c = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
c["head"].weight = c["embed"].weight
c.to(torch.float64)
assert c["head"].weight is c["embed"].weight
print("a cast by .to of a module on cpu keeps the tie")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
