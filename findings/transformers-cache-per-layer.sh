#!/usr/bin/env bash
# With labels given, models of transformers make a cache of keys and values by default: layers that are compiled go by their number, each is traced alone, and after eight the others run eagerly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy transformers==5.23.0
cat > "$folder/show.py" <<'PYTHON'
import torch
import transformers
from torch._dynamo.utils import counters

transformers.logging.set_verbosity_error()


def graphs(**words):
    torch._dynamo.reset()
    counters.clear()
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.Qwen2ForCausalLM(config).train()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    ids = torch.randint(64, (1, 8))
    model(input_ids=ids, labels=ids, **words).loss.backward()
    return counters["stats"]["unique_graphs"]


limit = torch._dynamo.config.recompile_limit
default, without = graphs(), graphs(use_cache=False)
print(f"12 layers, recompile limit {limit}: {default} graphs by default, {without} with use_cache=False")
assert (default, without) == (limit, 1), (default, without)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch transformers'.split()))"
python show.py
