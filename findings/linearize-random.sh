#!/usr/bin/env bash
# What torch.func.linearize returns draws random numbers anew in each call: through dropout it is the derivative of another function each time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.nn.functional as F
print("torch", torch.__version__)


def dropped(x): return F.dropout(x, 0.5)


x = torch.ones(12)
torch.manual_seed(0)
value, push = torch.func.linearize(dropped, x)
first, second = push(torch.ones(12)), push(torch.ones(12))
print("value of dropout(1):    ", value.int().tolist())
print("its derivative, a call: ", first.int().tolist())
print("another call, same input:", second.int().tolist())
assert not first.equal(value) and not second.equal(value) and not first.equal(second)
torch.manual_seed(0)
value, tangent = torch.func.jvp(dropped, (x,), (torch.ones(12),))
out, pull = torch.func.vjp(dropped, x)
assert tangent.equal(value) and pull(torch.ones(12))[0].equal(out) and pull(torch.ones(12))[0].equal(out)
print("jvp and vjp: those of the value that they return")
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
