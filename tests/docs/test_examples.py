"""The examples as a user runs them: as commands, in processes of their own, with warnings as errors. In `make test` all
but one run in this process, on simulated ranks."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import _corpus
import convert
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _report import Log
from safetensors.torch import load_file
from support.commands import EXAMPLES, as_command, command, here
from support.tables import FULL
from support.watched import SCRIPT as WATCHED
from support.watched import hashes, windows
from torch.distributed.checkpoint.filesystem import FileSystemReader

import functional_fsdp as fsdp
from functional_fsdp import launch

PYTHON = [sys.executable, "-W", "error"] if FULL else None  # None: in this process
DROPOUT = ("--dropout", "0.1")


def torchrun(ranks: int, *flags: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *flags]


def run(script: str, *flags: str | Path, by: list[str] | None, **env: str) -> str:
    """What it prints; by None, in this process."""
    if by is None:
        assert not env
        return here(script, *flags)
    done = command(*by, EXAMPLES / script, *flags, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(out: Path, *flags: str, by: list[str] | None = PYTHON, **env: str) -> dict[str, Any]:
    """Figures of a run of train_gpt with 8 steps and a tiny model."""
    printed = run("train_gpt.py", "--tiny", "--steps", "8", "--out", out, *flags, by=by, **env)
    figures: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert figures["weights"] in printed.splitlines()[-1]
    return figures | {"printed": printed}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 2 ranks without interruption; tests that change its folder work on a copy."""
    out = tmp_path_factory.mktemp("straight")
    return out, train(out, "--ranks", "2", *DROPOUT)


LATER = [pytest.param(f"{one}.py", marks=pytest.mark.large) for one in ("by_hand", "lion", "moe")]


@pytest.mark.parametrize("script", ["convert.py", *LATER])
def test_an_example_is_a_command(script: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "w.pt")
    flags, said = ([tmp_path / "w.pt"], "1 leaves, 24 B") if script == "convert.py" else ([], "\n")
    assert said in as_command(script, *flags)


def test_train_gpt_learns_and_leaves_its_figures(straight: tuple[Path, dict[str, Any]]) -> None:
    out, figures = straight
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6", "step_8"]
    assert len(figures["losses"]) == 8
    assert figures["losses"][-1] < figures["losses"][0]
    assert 1 < figures["bigram"] < figures["unigram"] < 5
    curve = json.loads((out / "curve.json").read_text())
    assert curve["losses"] == figures["losses"]
    assert len([norm for norm in curve["norms"] if 0.1 < norm < 100]) == 8
    assert sorted(map(int, curve["held_out"])) == [2, 4, 6, 8]
    assert curve["held_out"]["8"] < curve["held_out"]["2"]
    assert f"held out   {figures['held_out']:.3f} nats" in figures["printed"]
    assert f"bigram entropy {figures['bigram']:.3f}" in figures["printed"]
    assert figures["sample"].startswith("def ")


def of_eight_steps() -> dict[int, Counter[str]]:
    """The windows of train_gpt's batches, by step, which do not depend on the ranks that share them."""
    text = _corpus.load().train
    return {step: hashes(_corpus.batch(text, 12, 32, seed=0, step=step, rank=0, ranks=1)) for step in range(8)}


@pytest.mark.parametrize(
    ("killed", "resumed"),
    [
        pytest.param("1 5", 4, id="another-rank", marks=pytest.mark.large),
        pytest.param("0 6 save", 4, id="the-writer-in-a-save", marks=pytest.mark.large),
        pytest.param("0 1", 0, id="before-a-checkpoint", marks=pytest.mark.large),
    ],
)
def test_a_rank_of_train_gpt_is_killed_and_torchrun_goes_on_with_the_same_bits(
    straight: tuple[Path, dict[str, Any]], killed: str, resumed: int, tmp_path: Path
) -> None:
    out, watched = tmp_path / "out", tmp_path / "watched"
    shutil.copytree(straight[0], out)  # an older run, which must not be taken for this one
    watched.mkdir()
    by = [*torchrun(2, "--max-restarts", "2"), str(WATCHED)]
    figures = train(out, *DROPOUT, by=by, WATCHED=str(watched), KILLED=killed)
    assert figures["printed"].count("resumed    after step") == (resumed > 0)
    assert not resumed or f"resumed    after step {resumed} " in figures["printed"]
    for same in ("weights", "losses", "held_out", "sample"):
        assert figures[same] == straight[1][same]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6", "step_8"]
    found, data = windows(watched), of_eight_steps()
    assert {step: set(some) for step, some in found.items()} == {step: set(some) for step, some in data.items()}
    assert {step for step in data if found[step] == data[step]} >= set(range(resumed))  # those were not taken again


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("without_dropout")
    return out, train(out, by=torchrun(2))


@pytest.mark.large
@pytest.mark.parametrize("ranks", [1, 3])
def test_train_gpt_resumes_with_the_same_data_on_another_number_of_processes(
    without_dropout: tuple[Path, dict[str, Any]], ranks: int, tmp_path: Path
) -> None:
    out, watched = tmp_path / "out", tmp_path / "watched"
    stopped_after_step_4(without_dropout[0], out)
    watched.mkdir()
    figures = train(out, "--resume", by=[*torchrun(ranks), str(WATCHED)], WATCHED=str(watched))
    assert "resumed    after step 4" in figures["printed"]
    assert figures["losses"] == pytest.approx(without_dropout[1]["losses"], abs=1e-5)
    assert figures["held_out"] == pytest.approx(without_dropout[1]["held_out"], abs=1e-5)
    assert windows(watched) == {step: some for step, some in of_eight_steps().items() if step >= 4}


def stopped_after_step_4(run: Path, out: Path) -> None:
    """A copy of a run's folder, as if it had been stopped."""
    shutil.copytree(run, out)
    for newer in ("step_6", "step_8"):
        shutil.rmtree(out / "checkpoints" / newer)
    (out / "result.json").unlink()


def test_train_gpt_refuses_to_resume_another_run(straight: tuple[Path, dict[str, Any]]) -> None:
    log = Log(Namespace(out=straight[0], steps=9, seed=0, batch=12, resume=True), rank=0)
    said = "has {'steps': 8, 'seed': 0, 'batch': 12}, this one {'steps': 9, 'seed': 0, 'batch': 12}"
    with pytest.raises(ValueError, match=said):
        log.latest()


class Writer:
    """In the place of TensorBoard's, which is no dependency: what it is given, a line each."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)  # once: by one rank
        self.file = (Path(folder) / "scalars").open("w")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        print(json.dumps([name, value, step]), file=self.file)

    def close(self) -> None:
        self.file.close()


def test_train_gpt_logs_to_tensorboard_from_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = ModuleType("tensorboard")
    package.__spec__ = ModuleSpec("tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    figures = train(tmp_path / "run", "--ranks", "2", "--tensorboard", str(tmp_path / "board"), by=None)
    lines = [json.loads(line) for line in (tmp_path / "board" / "scalars").read_text().splitlines()]
    found = {(name, step): value for name, value, step in lines}
    assert len(found) == len(lines)
    assert [found["loss", step + 1] for step in range(8)] == figures["losses"]
    assert {name for name, _ in found} == {"loss", "norm", "learning_rate", "tokens_per_second", "held_out"}
    assert found["learning_rate", 8] == pytest.approx(
        3e-3 * (1 + math.cos(7 * math.pi / 8)) / 2, rel=1e-5
    )  # of float32


def test_train_gpt_without_tensorboard_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else find(name, *a))
    with pytest.raises(SystemExit):
        here("train_gpt.py", "--tensorboard", "runs/board")
    assert "--tensorboard needs a package that is not installed: pip install tensorboard" in capsys.readouterr().err


@pytest.mark.large
def test_train_gpt_under_torchrun_with_ddp_gives_the_bits_of_zero3(
    straight: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    figures = train(tmp_path, "--placement", "ddp", *DROPOUT, by=torchrun(2))
    assert figures["weights"] == straight[1]["weights"]
    assert figures["losses"] == straight[1]["losses"]


def test_train_gpt_equals_unsharded_training(tmp_path: Path) -> None:
    figures = train(tmp_path, "--ranks", "2", "--placement", "hfsdp", "--check", "--dtype", "float64", by=None)
    assert figures["check"]["losses"] < 1e-9
    assert figures["check"]["weights"] < 1e-9
    assert "check      largest differences from unsharded training" in figures["printed"]


WHOLE = ("--lora", "0", "--accumulate", "2", "--remat")
TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def finetune(out: Path, *flags: str | Path, by: list[str] | None = PYTHON, **env: str) -> dict[str, Any]:
    """Figures of a run of finetune_hf with 8 steps."""
    sizes = ["--steps", "8", "--batch", "12", "--context", "32", "--lr", "1e-2"]
    printed = run("finetune_hf.py", *sizes, "--out", out, *flags, by=by, **env)
    figures: dict[str, Any] = json.loads((out / "result.json").read_text())
    return figures | {"printed": printed}


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Full fine-tuning of a model that is no more than a configuration; its folder `saved` has what came of it."""
    import transformers

    out = tmp_path_factory.mktemp("finetuned")
    transformers.LlamaConfig(**TINY).save_pretrained(out / "model")
    return out, finetune(out, "--model", out / "model", *WHOLE, "--ranks", "2", "--save", out / "saved", by=None)


def saved_model(folder: Path) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@cache
def held_out_windows() -> torch.Tensor:
    return _corpus.windows(_corpus.load().held_out, 16 * 12, 32)


@torch.no_grad()
def held_out_loss(model: Any) -> float:
    loss: torch.Tensor = model(input_ids=held_out_windows(), labels=held_out_windows()).loss
    return loss.item()


def in_checkpoint(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of all weights that are trained, and of all that are frozen, without the zeros that pad them."""
    metadata: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(about.size) for name, about in metadata.items() if name.startswith("main.")}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    parts: tuple[list[torch.Tensor], ...] = ([], [])
    for name, tensor in tensors.items():
        parts[name.replace("main.", "opt.mean.", 1) not in metadata].append(tensor[tensor != 0])
    trained, frozen = (torch.cat(some) if some else torch.empty(0) for some in parts)
    return trained, frozen


def test_finetune_hf_learns_and_its_folder_loads_with_from_pretrained(finetuned: tuple[Path, dict[str, Any]]) -> None:
    out, figures = finetuned
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6", "step_8"]
    assert figures["losses"][-1] < figures["losses"][0] - 0.5
    assert f"held out   {figures['held_out']:.3f} nats" in figures["printed"]
    assert figures["sample"].startswith("def ")
    model = saved_model(out / "saved")
    assert held_out_loss(model) == pytest.approx(figures["held_out"], abs=1e-5)  # float32, in another order
    ids = model.generate(torch.tensor([[*b"def "]]), max_new_tokens=100, do_sample=False)
    assert bytes(ids[0].tolist()).decode(errors="replace") == figures["sample"]


@pytest.mark.large
def test_a_rank_of_finetune_hf_is_killed_and_torchrun_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    import transformers

    transformers.LlamaConfig(**TINY, attention_dropout=0.1).save_pretrained(tmp_path / "model")
    flags: list[Any] = ["--model", tmp_path / "model", *WHOLE]
    straight = finetune(tmp_path / "straight", *flags, "--ranks", "2")
    (tmp_path / "watched").mkdir()
    by, env = [*torchrun(2, "--max-restarts", "2"), str(WATCHED)], {"WATCHED": str(tmp_path / "watched")}
    figures = finetune(tmp_path / "out", *flags, by=by, KILLED="1 5", **env)
    assert "resumed    after step 4" in figures["printed"]
    for same in ("weights", "losses", "held_out", "sample"):
        assert figures[same] == straight[same]


@pytest.mark.large
@pytest.mark.parametrize("ranks", [1, 3])
def test_finetune_hf_resumes_with_the_same_losses_on_another_number_of_processes(
    finetuned: tuple[Path, dict[str, Any]], ranks: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stopped_after_step_4(finetuned[0], out)
    figures = finetune(out, "--model", out / "model", *WHOLE, "--resume", by=torchrun(ranks))
    assert "resumed    after step 4" in figures["printed"]
    assert figures["losses"] == pytest.approx(finetuned[1]["losses"], abs=1e-5)
    assert figures["held_out"] == pytest.approx(finetuned[1]["held_out"], abs=1e-5)


@pytest.mark.large
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the checkpoint is read without ranks
def test_finetune_hf_trains_adapters_and_nothing_else(finetuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    flags = ["--lora", "4", "--layers", "*", "--lr", "3e-2", "--ranks", "2"]
    figures = finetune(tmp_path, "--model", finetuned[0] / "saved", *flags, "--save", tmp_path / "saved")
    assert figures["held_out"] < finetuned[1]["held_out"] - 0.1
    base, merged = saved_model(finetuned[0] / "saved"), saved_model(tmp_path / "saved")
    early, late = (in_checkpoint(tmp_path / "checkpoints" / step) for step in ("step_2", "step_8"))
    assert not torch.equal(early[0], late[0])
    for _, frozen in (early, late):  # bit for bit, though the checkpoint has them in an order of its own
        values = torch.cat([p.detach().flatten() for p in base.parameters()])
        assert torch.equal(frozen.sort().values, values.sort().values)
    for (path, before), after in zip(base.named_parameters(), merged.parameters(), strict=True):
        if "norm" in path or "embed" in path:
            assert torch.equal(after, before)
        else:
            assert torch.linalg.matrix_rank(after - before, rtol=1e-3) == 4
    assert held_out_loss(merged) == pytest.approx(figures["held_out"], abs=1e-5)


def test_finetune_hf_merges_adapters_into_the_same_logits(tmp_path: Path) -> None:
    import finetune_hf
    import transformers

    transformers.LlamaConfig(**TINY).save_pretrained(tmp_path)
    args = Namespace(model=tmp_path, dtype="float64", seed=0, lora=4, layers="*_proj", save=tmp_path / "saved")
    module = finetune_hf.build(args)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        start = module(ids).logits
        assert torch.equal(start, finetune_hf.build(Namespace(**{**vars(args), "lora": 0}))(ids).logits)
        for path, parameter in module.named_parameters():
            if path.endswith(".B"):
                parameter.normal_()
        finetune_hf.export(args, module.state_dict())
        logits, merged = module(ids).logits, saved_model(tmp_path / "saved")(ids).logits
    assert (logits - start).abs().max() > 0.1
    torch.testing.assert_close(merged, logits)


def test_the_corpus_is_split_by_file_and_its_entropies_are_those_of_counted_tables() -> None:
    corpus = _corpus.load()
    assert _corpus.load().files == corpus.files
    assert 0.03 < len(corpus.held_out) / len(corpus.train) < 0.3
    opening = bytes(corpus.held_out[:200].tolist())
    assert opening not in bytes(corpus.train.tolist())
    text = torch.randint(4, (100_000,), generator=torch.Generator().manual_seed(0)) // 2 * 2  # bytes 0 and 2, fair
    unigram, bigram = _corpus.entropies(text)
    assert unigram == pytest.approx(0.6931, abs=1e-3)
    assert bigram == pytest.approx(0.6931, abs=1e-3)


def test_the_batch_of_a_step_depends_on_seed_and_step_only_and_is_shared_among_the_ranks() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    whole = _corpus.batch(text, 12, 16, seed=0, step=7, rank=0, ranks=1)
    assert torch.equal(whole[:, 1:], whole[:, :-1] + 1)
    for other in ((1, 7), (0, 8)):
        assert not torch.equal(whole, _corpus.batch(text, 12, 16, *other, rank=0, ranks=1))
    for ranks in (2, 3, 12):
        parts = [_corpus.batch(text, 12, 16, 0, 7, rank, ranks) for rank in range(ranks)]
        assert {len(part) for part in parts} == {12 // ranks}
        assert hashes(torch.cat(parts)) == hashes(whole)
    with pytest.raises(ValueError, match=r"a batch of 12 windows does not divide among 5 ranks.* a multiple of 5"):
        _corpus.batch(text, 12, 16, 0, 7, rank=0, ranks=5)
    windows = _corpus.windows(text, 3, 16)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 249


# ---------------------------------------------------------------- files into other files


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def fsdp2(folder: str) -> dict[str, torch.Tensor]:
    """What torch's FSDP2 saves by torch.distributed.checkpoint, with its optimizer's state; and the whole weights."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Two()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mesh=fsdp.local_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)  # type: ignore[attr-defined]
    return whole


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_convert_goes_from_fsdp2_to_a_checkpoint_to_safetensors_and_back(tmp_path: Path) -> None:
    def converted(*line: Any) -> Path:
        return convert.main([*map(str, line)])

    whole = launch(fsdp2, (str(tmp_path / "fsdp2"),), nprocs=2)[0]
    assert converted(tmp_path / "fsdp2", tmp_path / "ours", "--prefix", "model.") == tmp_path / "ours"
    converted(tmp_path / "ours", tmp_path / "tensors")
    converted(tmp_path / "tensors", tmp_path / "again")
    converted(tmp_path / "again", tmp_path / "half", "--dtype", "bfloat16")
    found = load_file(tmp_path / "tensors" / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in whole.items())
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors .* is no checkpoint of a known format"):
        converted(tmp_path, tmp_path / "nothing")
    with pytest.raises(fsdp.SpecError, match=r"has no weights below .module\.."):
        converted(tmp_path / "fsdp2", tmp_path / "nothing", "--prefix", "module.")


@pytest.mark.large
def test_a_model_generates_beside_its_training_with_weights_swapped_between_batches() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "serve_beside.py", "--steps", "120", "--every", "20"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = [line.split(": ") for line in done.stdout.splitlines() if line.startswith("step")]
    steps = [int(step.removeprefix("step ")) for step, _ in said]
    assert steps == sorted(steps)
    assert {0, 120} < {*steps} <= {*range(0, 121, 20)}
    assert said[-1][1] == str([*range(20, 29)])  # it has learnt to count


def test_qlora_keeps_its_base_packed_and_learns(tmp_path: Path) -> None:
    printed = run(
        "qlora.py", "--steps", "8", "--batch", "4", "--length", "32", "--out", tmp_path / "tuned", by=None
    ).splitlines()
    layers = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 192 * 3)  # of a Llama: q, o; k, v; gate, up, down
    found = re.match(r"(\d+) elements of the base in nf4: (\d+) bytes on each of 2 ranks", printed[0])
    assert found is not None
    assert int(found[1]) == layers
    packed = layers // 2 + layers // 64
    assert packed // 2 < int(found[2]) < 1.1 * packed // 2
    losses = [float(line.split()[1]) for line in printed[2:]]
    assert losses[-1] < losses[0] - 0.02
    written = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    assert len(written) == 2 * 7 * 2
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in written
    assert json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_wires_prints_what_feedback_is_worth() -> None:
    printed = run("wires.py", "--wire", "nf4", "--steps", "6", "--width", "16", by=None).splitlines()[1:]
    far = [float(line.split()[-1]) for line in printed]
    assert far[0] == 0 < far[1] < far[2] < far[3]


@pytest.mark.large  # two processes; above it runs in this one
def test_convert_is_a_command(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "w.pt")

    def said(*args: Any) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "functional_fsdp.convert", *map(str, args)]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    looked = said(tmp_path / "w.pt")
    assert looked.returncode == 0
    assert "torch.save: 1 leaves, 24 B" in looked.stdout
    (tmp_path / "empty").mkdir()
    wrong = said(tmp_path / "empty", tmp_path / "ours")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith(f"FileNotFoundError: weights: {tmp_path / 'empty'} has no *.safetensors")
