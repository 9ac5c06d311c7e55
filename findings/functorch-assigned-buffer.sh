#!/usr/bin/env bash
# A buffer that a module assigns under torch.func's nested transforms holds wrappers of levels that are over: the next
# call of the module ends in an internal assert.
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
from torch.func import grad, jvp


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 1)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n = self.n + 1
        return self.a(x)


module, x = Counts(), torch.ones(2, 3)
gradient = grad(lambda x: module(x).sum())
jvp(gradient, (x,), (torch.ones_like(x),))
print("the buffer after the call:", module.n)
try:
    jvp(gradient, (x,), (torch.ones_like(x),))
except RuntimeError as e:
    print("the same call again raises:", str(e).splitlines()[0][:120])
    assert "INTERNAL ASSERT FAILED" in str(e)
else:
    raise AssertionError("the second call went on")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
