#!/usr/bin/env bash
# stack_module_state takes the names of the first model: if that one is tied and the next is not, a weight of the next is lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import copy, torch, torch.nn as nn
class M(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tie: self.b.weight = self.a.weight
    def forward(self, x): return self.b(self.a(x))
def run(models):
    params, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0])
    x = torch.ones(2, 3)
    out = torch.vmap(lambda p, b, x: torch.func.functional_call(base, (p, b), (x,)), (0, 0, None))(params, buffers, x)
    return sorted(params), [torch.allclose(out[i], m(x)) for i, m in enumerate(models)]
torch.manual_seed(0)
print("order tied, untied:", end=" ")
names, right = run([M(True), M(False)])
print(names, "each model's output is right:", right)
assert names == ["a.weight"] and right == [True, False]
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
