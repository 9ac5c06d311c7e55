#!/usr/bin/env bash
# make_fx of a jvp through layer_norm ends in an internal assert, and then eager gradients fail on this thread.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import logging
import torch, torch.nn.functional as F
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx
logging.disable(logging.CRITICAL)
x, w = torch.randn(2, 8), torch.ones(8)
norm = lambda x: jvp(lambda x: F.layer_norm(x, (8,), w), (x,), (x.cos(),))[1]
slope = lambda x: grad(lambda x: x.sin().sum())(x)
norm(x), slope(x)  # both work
for name, call in (("make_fx of the jvp of layer_norm", lambda: make_fx(norm, tracing_mode="fake")(x)), ("then, eagerly, the gradient of sin", lambda: slope(x))):
    try:
        call()
    except RuntimeError as error:
        print(f"{name:34}", str(error)[:75])
    else:
        raise AssertionError(f"{name} works")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
