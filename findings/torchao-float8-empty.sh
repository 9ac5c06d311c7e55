#!/usr/bin/env bash
# torchao's float8 linear refuses a batch of no rows, which nn.Linear takes: the largest of no elements.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet torchao==0.18.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.nn as nn, torchao
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
print("torch", torch.__version__, "torchao", torchao.__version__)
x = torch.randn(0, 16)
print("nn.Linear:", tuple(nn.Linear(16, 16)(x).shape))
model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=Float8LinearConfig(emulate=True))
try:
    model(x)
    raise SystemExit("float8: no error any more")
except RuntimeError as error:
    print("float8:", error)
    assert "numel() == 0" in str(error)
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
