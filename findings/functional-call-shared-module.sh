#!/usr/bin/env bash
# functional_call leaves the given weights in a module that is registered at two paths.
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
from torch.func import functional_call, grad
shared = nn.Linear(2, 2)
model, x = nn.Sequential(shared, nn.Tanh(), shared), torch.ones(1, 2)
weight, given = shared.weight, {path: p.detach() + 1 for path, p in model.named_parameters()}
functional_call(model, given, (x,))
print("after a call: the module's own weight is there:", shared.weight is weight, "- the given one:", shared.weight is given["0.weight"])
assert shared.weight is given["0.weight"]
grad(lambda w: functional_call(model, w, (x,)).sum())(given)
wrapped = torch._C._functorch.is_gradtrackingtensor(shared.weight)
print("after a gradient: a tensor of the transform is in the module:", wrapped, "- parameters that are left:", len(list(nn.ModuleList([shared]).parameters())))
assert wrapped
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
