#!/usr/bin/env bash
# position_ids that begin anew keep packed documents apart only where the cache is off; by default it is on, and they attend to each other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet transformers==5.23.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
print("torch", torch.__version__, "transformers", transformers.__version__)
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
for family, config in ((LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)):
    torch.manual_seed(0)
    model = family(config(**sizes)).train()
    one, two = torch.randint(0, 50, (1, 5)), torch.randint(0, 50, (1, 4))
    packed = {"input_ids": torch.cat([one, two], 1), "position_ids": torch.cat([torch.arange(5), torch.arange(4)])[None]}
    alone, off = model(two).logits, {}
    for name, options in (("default", {}), ("use_cache=False", {"use_cache": False})):
        off[name] = (model(**packed, **options).logits[:, 5:] - alone).abs().max().item()
    mask = torch.ones_like(packed["input_ids"])
    off["use_cache=False, a mask of ones"] = (model(**packed, attention_mask=mask, use_cache=False).logits[:, 5:] - alone).abs().max().item()
    model.gradient_checkpointing_enable()
    off["gradient checkpointing"] = (model(**packed).logits[:, 5:] - alone).abs().max().item()
    print(f"{family.__name__}: logits of the second document less those of it alone:", {k: f"{v:.0e}" for k, v in off.items()})
    a, b, c, d = off.values()
    assert a > 1e-3 and b < 1e-6 and c > 1e-3 and d < 1e-6
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
