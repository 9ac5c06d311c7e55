#!/usr/bin/env bash
# A ZeRO-1 checkpoint of DeepSpeed has the last rank's weights without padding, and its moments with it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy setuptools wheel hjson py-cpuinfo einops ninja msgpack pydantic tqdm psutil packaging
DS_BUILD_OPS=0 pip install --quiet --no-build-isolation --no-deps deepspeed==0.19.8
cat > "$folder/show.py" <<'PYTHON'
import glob, os, socket, tempfile, torch, torch.nn as nn, torch.multiprocessing as mp
def run(rank, world, port, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    import deepspeed
    deepspeed.init_distributed("gloo")
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))  # 35 elements
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    engine.save_checkpoint(folder)
if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (2, port, folder), 2)
    found = []
    for path in sorted(glob.glob(folder + "/**/*optim_states.pt", recursive=True)):
        saved = torch.load(path, weights_only=False)
        state = saved["optimizer_state_dict"]
        weights = state["single_partition_of_fp32_groups"][0].numel()
        found.append((weights, state["base_optimizer_state"][0]["exp_avg"].numel()))
    print("torch", torch.__version__, "deepspeed", saved["ds_version"], "| (weights, moments) of each rank:", found)
    assert found == [(18, 18), (17, 18)]
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
