#!/usr/bin/env bash
# torchdata's StatefulDataLoader finds its place with shuffle=True; with a sampler that has a generator rows come twice, and with its own StatefulDistributedSampler, stopped between epochs, an epoch is empty.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet torchdata==0.11.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import copy, torch, torchdata
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

print("torch", torch.__version__, "torchdata", torchdata.__version__)
data = list(range(20))
seed = lambda: torch.Generator().manual_seed(7)
makers = {
    "shuffle=True": lambda: StatefulDataLoader(data, batch_size=4, shuffle=True),
    "RandomSampler(generator=)": lambda: StatefulDataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=seed())),
    "DistributedSampler": lambda: StatefulDataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0)),
    "StatefulDistributedSampler": lambda: StatefulDataLoader(data, batch_size=2, sampler=StatefulDistributedSampler(data, 2, 0)),
}


def epoch_of(loader, epoch):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    return iter(loader)


def stopped(make, after):
    """Epoch 1 of a run that stops in it after so many batches (0: between epochs) and goes on in another process's loader."""
    torch.manual_seed(0)
    first, rows, place = make(), [], None
    list(epoch_of(first, 0))
    if not after:
        place = copy.deepcopy(first.state_dict())
    for at, batch in zip(range(after), epoch_of(first, 1)):
        rows += batch.tolist()
        place = copy.deepcopy(first.state_dict())
    torch.manual_seed(0)
    again = make()
    again.load_state_dict(place)
    for batch in epoch_of(again, 1):
        rows += batch.tolist()
    return rows


found = {}
for name, make in makers.items():
    inside, between = stopped(make, 2), stopped(make, 0)
    found[name] = len(inside), len(set(inside)), len(between), len(set(between))
    print(f"{name}: epoch 1 stopped after 2 of 5 batches: {len(inside)} rows, {len(set(inside))} distinct; "
          f"stopped before it: {len(between)} rows, {len(set(between))} distinct")
assert found["shuffle=True"] == (20, 20, 20, 20)
assert found["RandomSampler(generator=)"][0] == 20 and found["RandomSampler(generator=)"][1] < 20
assert found["DistributedSampler"] == (10, 10, 10, 10)
assert found["StatefulDistributedSampler"] == (10, 10, 0, 0)
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
