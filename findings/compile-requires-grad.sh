#!/usr/bin/env bash
# Inside of torch.func.grad a tensor requires a gradient; torch.compile of the same code takes requires_grad to be False.
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
x = torch.ones(3)
fn = lambda x: (x * (2.0 if x.requires_grad else 100.0)).sum()
eager = torch.func.grad(fn)(x)
compiled = torch.compile(lambda x: torch.func.grad(fn)(x), fullgraph=True, backend="eager")(x)
print("torch.func.grad:", eager, "compiled:", compiled)
assert torch.equal(eager, 2 * x)
assert torch.equal(compiled, 100 * x)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
