#!/usr/bin/env bash
# PEFT saves a DoRA vector and an embedding's adapters under names without .weight, which a linear's adapters have.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet peft==0.21.2 transformers==5.23.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import os, tempfile, torch, torch.nn as nn, peft
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
print("torch", torch.__version__, "peft", peft.__version__)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.q = nn.Embedding(10, 8), nn.Linear(8, 8)
    def forward(self, x): return self.q(self.embed(x))
def names(**options):
    model = get_peft_model(Model(), LoraConfig(r=2, **options))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(os.path.join(folder, "adapter_model.safetensors"))
    trained = {n.replace(".default", "") for n, p in model.named_parameters() if p.requires_grad}
    return sorted(saved), sorted(trained - set(saved))
saved, other = names(target_modules=["q"], use_dora=True)
print("DoRA, in the file:", saved, "| in the model under another name:", other)
assert other == ["base_model.model.q.lora_magnitude_vector.weight"]
assert "base_model.model.q.lora_magnitude_vector" in saved and "base_model.model.q.lora_A.weight" in saved
saved, other = names(target_modules=["embed"])
print("embedding, in the file:", saved)
assert saved == ["base_model.model.embed.lora_embedding_A", "base_model.model.embed.lora_embedding_B"]
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
