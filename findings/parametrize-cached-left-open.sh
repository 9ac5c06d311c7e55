#!/usr/bin/env bash
# parametrize.cached() keeps values by module until it is left: after a step in it, and under functional_call, a module has old ones.
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
from torch.func import functional_call
from torch.nn.utils import parametrize
class Double(nn.Module):
    def forward(self, w): return 2 * w
torch.manual_seed(0)
m, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
parametrize.register_parametrization(m, "weight", Double())
opt = torch.optim.SGD(m.parameters(), lr=0.5)
def loss(): return round(m(x).square().mean().item(), 5)
with parametrize.cached():
    m(x).square().mean().backward(); opt.step()
    inside = loss()
print("after a step, where cached() is open:", inside, " and where it is not:", loss())
zeros = {name: torch.zeros_like(p) for name, p in m.named_parameters()}
with parametrize.cached():
    m(x)
    other = functional_call(m, zeros, (x,)).abs().max().item()
print("functional_call with weights of zeros, where cached() is open:", round(other, 5))
assert inside != loss() and other > 0
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
