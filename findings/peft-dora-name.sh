#!/usr/bin/env bash
# PEFT writes DoRA's magnitude vector under a name without the .weight that it has in the module.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
pip install --quiet transformers==5.23.0 psutil
pip install --quiet --no-deps peft==0.21.2 accelerate==1.15.0
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.nn as nn, peft
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
    def forward(self, x): return self.proj(x)
m = peft.get_peft_model(M(), peft.LoraConfig(target_modules=["proj"], r=2, use_dora=True))
inside = [k for k in m.state_dict() if "lora" in k]
saved = list(peft.get_peft_model_state_dict(m))
print("names in the module:", *inside, sep="\n  ")
print("names in the saved adapter:", *saved, sep="\n  ")
plain = lambda names: {n.replace(".default", "") for n in names}
left = plain(inside) - plain(saved)
print("after the adapter's name is taken out, not in the file:", left)
assert len(left) == 1 and next(iter(left)).endswith("lora_magnitude_vector.weight")
assert any(n.endswith("lora_magnitude_vector") for n in saved)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch transformers peft'.split()))"
python show.py
