#!/usr/bin/env bash
# mse_loss (huber, smooth_l1, bce, soft_margin too) of DTensors sharded over n ranks: the loss is right, its gradient n times too large; of uneven shards both are wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh, first = init_device_mesh("cpu", (2,)), dist.get_rank() == 0
torch.manual_seed(0)


def beside_plain(loss_fn, rows):
    x, y = torch.rand(rows, 3, requires_grad=True), torch.rand(rows, 3)
    plain = loss_fn(x, y)
    plain.backward()
    sharded = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
    loss = loss_fn(sharded, distribute_tensor(y, mesh, [Shard(0)]))
    loss.backward()
    factors = (sharded.grad.full_tensor() / x.grad)[:, 0]
    return loss.full_tensor().item() - plain.item(), [round(f, 3) for f in factors.tolist()]


for name in ("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"):
    error, factors = beside_plain(getattr(F, name), 4)
    if first:
        print(f"{name}: loss {error:+.1e} off, gradients are those of the plain loss times", factors)
    assert abs(error) < 1e-6 and factors == [2.0] * 4
error, factors = beside_plain(lambda x, y: (x - y).square().mean(), 4)
if first:
    print(f"the same by hand, (x - y).square().mean(): loss {error:+.1e} off, times", factors)
assert abs(error) < 1e-6 and factors == [1.0] * 4
error, factors = beside_plain(F.mse_loss, 5)
if first:
    print(f"mse_loss of 5 rows on 2 ranks: loss {error:+.1e} off, times", factors)
assert abs(error) > 1e-5 and factors == [1.667, 1.667, 1.667, 2.5, 2.5]
dist.destroy_process_group()
PYTHON
python -c "import torch; print('torch', torch.__version__)"
torchrun --standalone --nproc-per-node 2 "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
