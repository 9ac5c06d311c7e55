#!/usr/bin/env bash
# torchao's AdamW8bit keeps float32 state for a tensor below 4,096 elements or of no whole number of blocks: a shard has other rounding than the whole.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet torchao==0.18.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torchao
from torchao.optim import AdamW8bit
print("torch", torch.__version__, "torchao", torchao.__version__)
found = {}
for n in (8192, 8192 // 2, 8192 // 4, 8192 + 1):
    p = torch.nn.Parameter(torch.randn(n))
    optimizer = AdamW8bit([p])
    p.grad = torch.randn(n)
    optimizer.step()
    found[n] = type(optimizer.state[p]["exp_avg"]).__name__
print(found)
assert found == {8192: "OptimState8bit", 4096: "OptimState8bit", 2048: "Tensor", 8193: "Tensor"}
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
