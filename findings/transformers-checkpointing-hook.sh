#!/usr/bin/env bash
# transformers: gradient_checkpointing_enable leaves a hook on the embedding after gradient_checkpointing_disable, and torch.func.grad fails on it.
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
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
transformers.logging.set_verbosity_error()
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(config)
hooks = lambda: len(model.get_input_embeddings()._forward_hooks)
a = hooks(); model.gradient_checkpointing_enable(); b = hooks(); model.gradient_checkpointing_disable(); c = hooks()
print("forward hooks on the embedding: at first", a, "| with gradient checkpointing", b, "| after it was disabled", c)
assert (a, b, c) == (0, 1, 1)
try:
    torch.func.functional_call(model, dict(model.named_parameters()), (torch.zeros(1, 4, dtype=torch.long),))
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (torch.zeros(1, 4, dtype=torch.long),)).logits.sum())(dict(model.named_parameters()))
except RuntimeError as e:
    print("torch.func.grad of the model after that raises:", str(e).splitlines()[0][:110])
else:
    raise AssertionError("torch.func.grad works")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch transformers'.split()))"
python show.py
