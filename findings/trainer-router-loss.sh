#!/usr/bin/env bash
# With gradient accumulation transformers' Trainer adds up the router losses of microbatches, and averages the rest of the loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet transformers==5.23.0 accelerate==1.15.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import os, torch, transformers
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments

print("torch", torch.__version__, "transformers", transformers.__version__)
torch.manual_seed(0)
row = torch.randint(0, 50, (8,))
rows = [{"input_ids": row, "labels": row}] * 4  # equal rows: a batch of four and four of one are the same loss
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kw):
        self.router = model.model.layers[0].mlp.gate.weight.grad.clone()


def router(batch, accumulate, coefficient):
    torch.manual_seed(0)
    config = MixtralConfig(**sizes, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=coefficient)
    keep = Gradients()
    args = TrainingArguments(
        os.environ["TMPDIR"], per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate, max_steps=1,
        max_grad_norm=0, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )
    Trainer(MixtralForCausalLM(config), args, train_dataset=rows, callbacks=[keep]).train()
    return keep.router


parts = {}
for accumulate in (1, 2, 4):
    without = router(4 // accumulate, accumulate, 0.0)
    parts[accumulate] = (without, router(4 // accumulate, accumulate, 1.0) - without)
for accumulate, (rest, aux) in parts.items():
    size = [(x.norm() / y.norm()).item() for x, y in zip((rest, aux), parts[1])]
    print(f"{accumulate} microbatches of {4 // accumulate}: the router's gradient beside that of one batch: "
          f"of the cross entropy {size[0]:.3f} times, of the router loss {size[1]:.3f} times")
    assert abs(size[0] - 1) < 1e-3 and abs(size[1] - accumulate) < 0.01 * accumulate
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
