#!/usr/bin/env bash
# model.to(bfloat16) rounds rotary frequencies, from_pretrained in bfloat16 keeps them in float32: equal state dicts, other logits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
pip install --quiet transformers==5.23.0
cat > "$folder/show.py" <<'PYTHON'
import tempfile, torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
model, ids = LlamaForCausalLM(config).eval(), torch.randint(64, (1, 256))
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
cast = model.to(torch.bfloat16)
a, b = cast.state_dict(), loaded.state_dict()
assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
print("the state dicts of model.to(bfloat16) and from_pretrained(dtype=bfloat16) are equal, bit by bit")
f, g = cast.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq
print("rotary frequencies:", f.dtype, "and", g.dtype)
with torch.no_grad(): d = (cast(ids).logits - loaded(ids).logits).abs().max().item()
print(f"largest difference of logits: {d:.4f}")
assert f.dtype == torch.bfloat16 and g.dtype == torch.float32 and d > 0
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch transformers'.split()))"
python show.py
