#!/usr/bin/env bash
# linear_cross_entropy with options (in chunks) loses its gradient under vmap, and its derivative in a jvp is zero.
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
import torch.nn.functional as F
from torch.func import jvp, vmap
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
print("torch", torch.__version__)
torch.manual_seed(0)
x, head, labels = torch.randn(2, 8, 3).double(), torch.randn(4, 3).double(), torch.randint(0, 4, (8,))


def gradients(**options):
    """Of the loss, and of it with the mean square of its input, under vmap and in a loop; and the slope along x."""
    def loss(x): return F.linear_cross_entropy(x, head, labels, **options) + x.square().mean()

    leaf = x.clone().requires_grad_()
    (batched,) = torch.autograd.grad(vmap(loss)(leaf).sum(), leaf)
    (looped,) = torch.autograd.grad(sum(loss(row) for row in leaf), leaf)
    slope = jvp(loss, (x[0],), (x[1],))[1]
    return batched, looped, slope, (looped[0] * x[1]).sum()


batched, looped, slope, right = gradients()
print(f"no options: the gradient under vmap is {(batched - looped).abs().max():.0e} off, the slope {abs(slope - right):.0e}")
torch.testing.assert_close((batched, slope), (looped, right))
batched, looped, slope, right = gradients(options=LinearCrossEntropyOptions(batch_chunk_size=2))
print(f"in chunks: the gradient under vmap is {(batched - looped).abs().max():.0e} off, the slope {abs(slope - right):.0e}")
torch.testing.assert_close(batched, 2 * x / 24)  # of the mean square alone
torch.testing.assert_close(slope, (2 * x[0] / 24 * x[1]).sum())
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
