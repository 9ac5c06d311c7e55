#!/usr/bin/env bash
# The gradient of a jvp through layer_norm, batch_norm or det is wrong, without an error; the jvp of the gradient is right.
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
from torch.func import grad, jacfwd, jvp
torch.manual_seed(0)
x, v, u = (torch.randn(6, 6, dtype=torch.float64) for _ in range(3))
def by_hand(x):
    y = x - x.mean(1, keepdim=True)
    return y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt()
ways = {"layer_norm by hand": by_hand, "layer_norm": lambda x: F.layer_norm(x, (6,)), "group_norm": lambda x: F.group_norm(x, 1),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True), "det": lambda x: torch.det(x)}
wrong = []
for name, f in ways.items():
    loss = lambda x: (f(x).sin() * u).sum()
    want = (grad(loss)(x + 1e-6 * v) - grad(loss)(x - 1e-6 * v)) / 2e-6
    far = lambda got: float((got - want).abs().max() / want.abs().max())
    found = (far(jvp(grad(loss), (x,), (v,))[1]), far(grad(lambda x: jvp(loss, (x,), (v,))[1])(x)),
             far((jacfwd(jacfwd(loss))(x).reshape(36, 36) @ v.flatten()).view(6, 6)))
    print(f"{name:18}", "H v beside finite differences: jvp of grad %.0e, grad of jvp %.0e, jvp of jvp %.0e" % found)
    assert found[0] < 1e-5
    wrong += [name] if max(found) > 1e-2 else []
assert wrong == ["layer_norm", "batch_norm", "det"], wrong
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
