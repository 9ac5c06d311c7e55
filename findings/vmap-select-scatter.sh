#!/usr/bin/env bash
# The gradient of a vmap over select_scatter is n times too large for what is put in, where the dim has n places.
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
from torch.func import grad, vmap
print("torch", torch.__version__)
torch.manual_seed(0)
x, part = torch.randn(2, 3, 4), torch.randn(2, 4)
factors = torch.randn(3, 4)


def put(x, part): return (torch.select_scatter(x, part, 0, 1) * factors).sum()
def written(x, part):
    x = x.clone()
    x[1] = part
    return (x * factors).sum()


leaf = part.clone().requires_grad_()
for name, loss in (("select_scatter", put), ("x[1] = part", written)):
    (found,) = torch.autograd.grad(vmap(loss)(x, leaf).sum(), leaf)
    inside = vmap(grad(loss, 1))(x, part)
    ratio, within = (found / factors[1]).mean().item(), (inside / factors[1]).mean().item()
    print(f"{name}: the gradient of the vmap is {ratio:.3f} times the right one, that inside of it {within:.3f} times")
    torch.testing.assert_close(inside, factors[1].expand(2, 4))
    torch.testing.assert_close(found, ((3 if loss is put else 1) * factors[1]).expand(2, 4))
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
