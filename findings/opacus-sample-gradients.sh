#!/usr/bin/env bash
# Opacus has wrong gradients by sample of a Conv with padding_mode= and of an Embedding with padding_idx=; so are the norms of ghost clipping.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet opacus==1.6.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import copy, opacus, torch, torch.nn as nn
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping

print("torch", torch.__version__, "opacus", opacus.__version__)
torch.manual_seed(0)
series, words = torch.randn(4, 4, 9), torch.randint(0, 3, (4, 5))
cases = {
    "Conv1d": (nn.Conv1d(4, 6, 3, padding=1), series),
    "Conv1d, reflect": (nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"), series),
    "Conv1d, circular": (nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), series),
    "Embedding": (nn.Embedding(7, 6), words),
    "Embedding, padding_idx": (nn.Embedding(7, 6, padding_idx=0), words),
}
loss = lambda y: y.sin().sum()


def samples(model, x):
    gradients = []
    for one in x.split(1):
        model.zero_grad()
        loss(model(one)).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    return [torch.stack(of_one) for of_one in zip(*gradients)]


def off(a, b):
    return ((a - b).norm() / b.norm()).item()


found = {}
for name, (module, x) in cases.items():
    right = samples(copy.deepcopy(module), x)
    norms = torch.cat([g.flatten(1) for g in right], 1).norm(dim=1)
    row = []
    for functorch in (False, True):
        model = copy.deepcopy(module)
        loss(GradSampleModule(model, loss_reduction="sum", force_functorch=functorch)(x)).backward()
        row.append(max(off(p.grad_sample, g) for p, g in zip(model.parameters(), right)))
        plain = [g.sum(0) for g in right]
        assert all(off(p.grad, g) < 1e-5 for p, g in zip(model.parameters(), plain))  # the batch's gradient is right
    ghost = GradSampleModuleFastGradientClipping(copy.deepcopy(module), max_grad_norm=1.0, loss_reduction="sum")
    loss(ghost(x)).backward()
    row.append(off(ghost.get_norm_sample(), norms))
    found[name] = row
    print(f"{name}: gradients by sample off by {row[0]:.0%}, with force_functorch=True {row[1]:.0%}; norms of ghost clipping {row[2]:.0%}")
for name, (hooks, functorch, ghost) in found.items():
    assert functorch < 1e-4 and (min(hooks, ghost) > 0.01) == ("," in name) and (max(hooks, ghost) < 1e-4) == ("," not in name)
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
