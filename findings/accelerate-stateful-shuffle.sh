#!/usr/bin/env bash
# A shuffled StatefulDataLoader that Accelerate prepared goes on in another order: of the epoch some rows come twice, others never.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet accelerate==1.15.0 torchdata==0.11.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import accelerate, copy, torch, torchdata
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

print("torch", torch.__version__, "accelerate", accelerate.__version__, "torchdata", torchdata.__version__)


def loader(by, seedable=False):
    set_seed(0)  # the same in the run that stops and in the one that goes on
    if by == "torchdata":
        return StatefulDataLoader(range(20), batch_size=4, shuffle=True)
    options = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)
    return Accelerator(cpu=True, dataloader_config=options).prepare(DataLoader(range(20), batch_size=4, shuffle=True))


def distinct(*how, last, set_epoch=False):
    first, rows = loader(*how), []
    for epoch in range(last + 1):
        if set_epoch:
            first.set_epoch(epoch)
        for at, batch in enumerate(first, 1):
            if epoch == last:
                rows += batch.tolist()
                if at == 2:
                    place = copy.deepcopy(first.state_dict())
                    break
    again = loader(*how)
    again.load_state_dict(place)
    if set_epoch:
        again.set_epoch(last)
    for batch in again:
        rows += batch.tolist()
    assert len(rows) == 20
    return len(set(rows))


shown = {
    "torchdata": [distinct("torchdata", last=e) for e in (0, 1)],
    "accelerate": [distinct("accelerate", last=e) for e in (0, 1)],
    "accelerate, use_seedable_sampler": [distinct("accelerate", True, last=e) for e in (0, 1)],
    "accelerate, use_seedable_sampler, set_epoch": [distinct("accelerate", True, last=e, set_epoch=True) for e in (0, 1)],
}
for name, found in shown.items():
    print(f"{name}: stopped after 2 of 5 batches of epoch 0 and of epoch 1; distinct rows of 20: {found}")
a, b, c, d = shown.values()
assert a == [20, 20] and max(b) < 20 and c[0] == 20 and c[1] < 20 and d == [20, 20]
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
