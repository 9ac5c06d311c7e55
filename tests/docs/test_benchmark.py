"""The benchmark as a user runs it, on gloo with small models, and what it makes of figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import EXAMPLES, TORCHAO, command

import _benchmark_mixed  # isort: skip
import _benchmark_models  # isort: skip
import _benchmark_report  # isort: skip
from _benchmark_report import Row, Table, agree, merged  # isort: skip
import benchmark as command_line  # isort: skip
import benchmark_scaling  # isort: skip

SHORT = ["--ranks", "2", "--rounds", "1", "--steps", "1", "--warmup", "1"]


def benchmark(folder: Path, *flags: str, **env: str) -> dict[str, Any]:
    """What a short run wrote and printed, its rows by name."""
    done = command(sys.executable, EXAMPLES / "benchmark.py", *SHORT, *flags, "--json", folder / "table.json", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "table.json").read_text())
    return found | {"printed": done.stdout, "rows": {row["name"]: row for row in found["rows"]}}


@pytest.mark.large
def test_a_hugging_face_llama_beside_its_peers(tmp_path: Path) -> None:
    rows = "driven,FSDP2,DDP,unit by unit,Megatron-FSDP"
    found = benchmark(tmp_path, "--model", "tiny-llama", "--only", rows, "--chart", str(tmp_path / "chart.png"))
    assert [*found["rows"]] == ["driven", "FSDP2", "DDP"]
    assert "unit by unit is left out: tiny-llama is no chain of stages; driven takes any module." in found["printed"]
    assert "Megatron-FSDP is left out: " in found["printed"]
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    ours, peer, ddp = (found["rows"][name] for name in ("driven", "FSDP2", "DDP"))
    assert ours["ratio"] == pytest.approx(peer["step_ms"] / ours["step_ms"])  # one round
    assert peer["ratio"] == 1
    assert ours["loss"] == pytest.approx(ddp["loss"], rel=1e-5)
    assert ours["peak_bytes"] < ddp["peak_bytes"]


@pytest.mark.large
def test_a_mixture_of_experts_and_units_that_stay_gathered(tmp_path: Path) -> None:
    rows = "driven,budget,kept,FSDP2,FSDP2 kept,resident"
    found = benchmark(tmp_path, "--model", "tiny-moe", "--only", rows)["rows"]
    assert [*found] == rows.split(",")
    assert found["driven"]["peak_bytes"] < found["kept"]["peak_bytes"]
    for row in found.values():
        assert row["to_bound"] == pytest.approx(row["step_ms"] / found["resident"]["step_ms"])
        assert row["bound"] == "resident"
        assert row["by_hand"] is None


@pytest.mark.large
def test_llama_3_8b_in_small_with_its_loss_in_chunks(tmp_path: Path) -> None:
    rows = "driven,driven chunked loss,FSDP2,FSDP2 chunked loss"
    sizes = ["--layers", "2", "--hidden", "64", "--vocab", "4096", "--seq", "64"]
    found = benchmark(tmp_path, "--model", "llama3-8b", *sizes, "--only", rows)
    plain, some, peer, its = found["rows"].values()
    assert found["config"]["depth"] == 2
    assert found["config"]["width"] == 64
    for chunked, whole in ((some, plain), (its, peer)):
        assert chunked["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert chunked["peak_bytes"] < whole["peak_bytes"]
    for row in found["rows"].values():
        assert row["tokens_s"] == pytest.approx(64e3 / row["step_ms"])
        assert row["tflops"] * 1e12 == pytest.approx(row["tokens_s"] * 6 * (found["parameters"] + 2 * 64 * 64))
        assert row["sixth_s"] > 0
        assert row["share"] is None  # of a GPU's peak
    assert "| tokens/s | TFLOP/s | sixth step s |" in found["printed"]


def test_sizes_go_by_the_width() -> None:
    config = _benchmark_models.MODELS["llama3-8b"]
    small = config.sized(2, 64, 512)
    assert (small.depth, small.width, small.heads, small.kv_heads, small.hidden, small.vocab) == (2, 64, 2, 1, 224, 512)
    assert config.sized(None, None, None) == config


def test_matrix_products_in_turn_are_saved_by_selective_checkpoints() -> None:
    """The same loss and gradients, and layers whose forward runs again."""
    import _benchmark_peers

    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)) for _ in range(2)]
    x = torch.randn(4, 8, requires_grad=True)
    want = torch.autograd.grad(layers[1](layers[0](x)).square().sum(), x)
    calls: list[int] = []
    layers[0].register_forward_pre_hook(lambda *_: calls.append(0))
    layers[0][1].register_forward_pre_hook(lambda *_: calls.append(1))
    _benchmark_peers.selective([*layers])
    found = torch.autograd.grad(layers[1](layers[0](x)).square().sum(), x)
    assert torch.equal(found[0], want[0])
    assert calls.count(1) == 2


def grid() -> Any:
    import predict_grid

    return predict_grid


def test_a_grid_has_forty_settings_and_says_what_the_choice_costs() -> None:
    cases = grid().grid(False)
    assert len({*cases}) == 40
    assert {case.prefetch for case in cases[:12]} == {1}
    choice, small = (grid().Case(graph=True, said=f"tune's choice: {name}") for name in ("zero3", "recomputed"))
    rows = [(choice, 12.0, 100.0), (cases[0], 10.0, 100.0), (cases[1], 9.0, 300.0), (choice, 11.0, 100.0)]
    said = grid().beside_choices(rows, {choice: 2 << 30, small: 50})
    assert (
        "2.0 GiB a rank: choice / best 1.222, rank 3 of 3 that fit, 2 faster by more than 3 %; best: zero3, g" in said
    )
    assert "0.0 GiB a rank: the choice was not measured, or is over the budget" in said
    assert "| zero3, graph, recomputed | 9.00 | 0 |" in said
    said = grid().beside_choices([*rows, (small, 20.0, 40.0), (cases[2], 19.0, 50.0)], {choice: 200, small: 50})
    assert "choice / best 1.100, rank 2 of 3 that fit, 1 faster by more than 3 %; best: zero3, graph" in said
    assert "choice / best 1.053, rank 2 of 2 that fit, 1 faster" in said


def test_a_step_is_cut_into_what_the_bound_does_and_what_it_does_not() -> None:
    import benchmark_gap as gap

    def events(*some: tuple[str, float, float]) -> list[Any]:
        return [gap.Event(name, gap.kind_of(name), begin, end) for name, begin, end in some]

    bound = events(("nvjet_hsh", 0, 10), ("flash_fwd", 10, 15), ("multi_tensor_apply_kernel<FusedAdam>", 15, 17))
    here = events(
        ("nvjet_hsh", 0, 12), ("Memcpy PtoP", 1, 11), ("flash_fwd", 13, 18), ("FusedAdam", 17, 20), ("Memset", 21, 22),
        ("ncclDevKernel", 10, 12.5),
    )  # fmt: skip
    parts = gap.in_parts(here, 1)
    assert parts["compute"] == 17
    assert parts["alone: update"] == 2
    assert parts["alone: other copies"] == 1
    assert parts["alone: copies between GPUs"] == 0.5
    assert parts["idle"] == 1.5
    assert sum(parts.values()) == 22
    assert gap.in_parts(bound, 1)["idle"] == 0
    assert gap.by_kind(here, 2)["update"] == [0.5, 1.5, 0.5]
    more = gap.slowed(here, bound, 1)
    assert more["matrix products, beside copies between GPUs"] == [1, 10, 2]
    assert more["attention, beside mostly nothing"] == [1, 5, 0]


def test_the_ways_of_a_choice_are_those_of_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def noted(name: str) -> Any:
        def call(model: Any, *paths: str, **parts: Any) -> Any:
            done.append((name, paths, parts))
            return model

        return call

    for name in ("remat", "offload"):
        monkeypatch.setattr(grid().T, name, noted(name))
    ways = {"b.0": "kept", "b.1": "moved", "b.2": "recomputed", "b.3": "recomputed, but attn, mlp kept"}
    ways["b.4"] = "recomputed, but attn kept; mlp moved"
    grid().treated(None, tuple(ways.items()))
    none: dict[str, Any] = {"save": (), "offload": (), "products": ()}
    assert done == [
        ("offload", ("b.1",), {}),
        ("remat", ("b.2",), none),
        ("remat", ("b.3",), none | {"save": ("attn", "mlp")}),
        ("remat", ("b.4",), none | {"save": ("attn",), "offload": ("mlp",)}),
    ]


@pytest.mark.large
def test_hybrid_rows_beside_fsdp2s(tmp_path: Path) -> None:
    """Two replicas of two ranks; losses are compared."""
    rows = "hsdp,hfsdp,FSDP2 hsdp"
    found = benchmark(tmp_path, "--ranks", "4", "--only", rows, "--batch", "1", "--seq", "16")["rows"]
    assert [*found] == rows.split(",")
    assert found["hfsdp"]["peak_bytes"] < found["hsdp"]["peak_bytes"]  # its optimizer's state is a quarter, not a half
    assert found["hsdp"]["best_peer"] == "FSDP2 hsdp"


@pytest.mark.large
@pytest.mark.parametrize(("row", "group"), [("copy engine", "copies"), ("traced", "traced")])
def test_groups_apart_have_the_yardsticks_beside_them(row: str, group: str, tmp_path: Path) -> None:
    flags = ["--ranks", "1", "--apart", "--only", f"{row},DDP", "--batch", "1", "--seq", "16"]
    found = benchmark(tmp_path, *flags)
    assert [*found["rows"]] == [row, "DDP", "FSDP2"]
    assert f"processes 1 of 2 ({group}): {row},FSDP2" in found["printed"]
    assert "FSDP2 in the sets of processes after: " in found["printed"]
    assert [row["processes"] for row in found["rows"].values()] == [1, 2, 1]
    beside = found["rows"][row]
    assert beside["ratio"] == pytest.approx(found["rows"]["FSDP2"]["step_ms"] / beside["step_ms"])


def test_a_set_of_processes_that_fails_leaves_the_others_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "traced,FSDP2" in line:
            return subprocess.CompletedProcess(line, 1, "loading\nout of memory\n")
        Table(ABOUT, [row("driven", 5, ratio=1.2), row("FSDP2", 6, ratio=1.0)]).write(Path(line[-1]))
        return subprocess.CompletedProcess(line, 0, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--device", "cpu", "--only", "traced,driven", "--apart"])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code
    printed = capsys.readouterr().out
    assert "| driven |     5.0 |" in printed
    assert "traced,FSDP2 did not run through: out of memory" in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "driven,FSDP3"], "--only: 'FSDP3' is none of whole tree,"),
        (["--only", "driven,none"], "--only: 'none' is none of whole tree,"),
        (["--only", "hsdp", "--ranks", "3"], "hsdp is left out: 3 ranks are no multiple of 2 replicas (--replicas)."),
        (["--placement", "hsdp", "--ranks", "4", "--replicas", "3"], "--replicas 3: expected a divisor of the 4 ranks"),
        (["--only", "Megatron-FSDP"], "--only: no row is left. Megatron-FSDP is left out: "),
    ],
)
def test_rows_that_there_are_not(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--device", "cpu", *flags])
    with pytest.raises(SystemExit):
        command_line.arguments()
    assert said in capsys.readouterr().err


def test_all_means_all_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--device", "cpu", "--only", "all", "--model", "moe", "--apart"])
    args = command_line.arguments()
    assert {"driven", "driven compiled", "FSDP2 tuned", "resident compiled"} < {*args.only}
    assert not {"unit by unit", "traced", "Megatron-FSDP", "Megatron-FSDP compiled"} & {*args.only}
    assert args.yardsticks == ["FSDP2", "resident compiled"]
    assert len([note for note in args.notes if "needs" not in note]) == 6


def row(name: str, step: float, loss: float = 2.0, **others: Any) -> Row:
    figures: dict[str, Any] = {"host_ms": None, "peak_bytes": 3 << 20, "reserved_bytes": None, "device_bytes": None}
    return Row(name, step, step - 1, step + 1, loss=loss, **{**figures, **others})


ABOUT: dict[str, Any] = {
    "machine": "here", "torch": "2", "functional_fsdp": "1", "ranks": 2, "parameters": 10**6, "dtype": "float32",
    "config": {"batch": 4, "seq": 8},
    "arguments": {"model": "tiny", "placement": "zero3", "rounds": 2, "steps": 3, "warmup": 1},
}  # fmt: skip


def test_columns_without_figures_are_left_out() -> None:
    assert "host ms" not in str(Table(ABOUT, [row("driven", 5)]))
    text = str(Table(ABOUT, [row("driven", 5, host_ms=1.25), row("FSDP2", 6, host_ms=None)])).splitlines()
    assert text[-4:] == [
        "|        | step ms | spread ms | host ms | peak MiB |   loss |",
        "|--------|--------:|----------:|--------:|---------:|-------:|",
        "| driven |     5.0 | 4.0 – 6.0 |     1.2 |        3 | 2.0000 |",
        "| FSDP2  |     6.0 | 5.0 – 7.0 |       - |        3 | 2.0000 |",
    ]


def test_merged_tables_keep_what_each_row_was_compared_with() -> None:
    first = Table(ABOUT, [row("driven", 5, ratio=1.2, best_peer="DDP"), row("FSDP2", 6), row("DDP", 4)])
    second = Table(ABOUT, [row("traced", 8, ratio=1.5), row("FSDP2", 12)])
    table = merged([first, second], ["traced", "driven", "DDP"])
    assert [(one.name, one.step_ms, one.processes) for one in table.rows] == [
        ("traced", 8, 2), ("driven", 5, 1), ("DDP", 4, 1), ("FSDP2", 6, 1),
    ]  # fmt: skip
    assert table.rows[0].ratio == 1.5
    assert table.notes == ["best peer beside driven, FSDP2, DDP: DDP", "FSDP2 in the sets of processes after: 12.0 ms"]


def test_a_chart_of_every_kind_of_row(tmp_path: Path) -> None:
    rows = [row("driven", 5, ratio=1.2), row("FSDP2", 6, ratio=1.0), row("resident", 4), row("resident compiled", 3)]
    _benchmark_report.chart(Table(ABOUT, rows), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_rates_over_numbers_of_ranks_as_a_table_and_back(tmp_path: Path) -> None:
    tables = {2: Table(ABOUT, [row("driven", 4), row("FSDP2", 5)]), 1: Table(ABOUT, [row("driven", 2), row("DDP", 8)])}
    found = benchmark_scaling.rates(tables)
    assert found == {"driven": {2: 8000, 1: 16000}, "FSDP2": {2: 6400}, "DDP": {1: 4000}}  # 32 tokens a rank
    text = benchmark_scaling.text(found, "driven").splitlines()
    assert text[:3] == ["| tok/s/GPU | 1 | 2 |", "|---|---:|---:|", "| driven | 16,000 | 8,000 |"]
    assert text[5:] == ["| driven / FSDP2 | - | 0.800 |", "| driven / DDP | 0.250 | - |"]
    assert benchmark_scaling.read("\n".join(["before", "", *text, "", "after"])) == found
    benchmark_scaling.chart(found, "title", tmp_path / "chart.png", "rank")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.large
def test_the_same_benchmark_on_one_rank_and_two(tmp_path: Path) -> None:
    flags = ["--ranks", "2,1", "--chart", str(tmp_path / "chart.png"), "--", *SHORT[2:]]
    done = command(sys.executable, EXAMPLES / "benchmark_scaling.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    found = benchmark_scaling.read(done.stdout)
    assert {name: sorted(of) for name, of in found.items()} == {"unit by unit": [1, 2], "FSDP2": [1, 2]}
    assert min(rate for of in found.values() for rate in of.values()) > 0


def test_losses_must_agree_to_3_digits() -> None:
    agree([row("driven", 5, loss=2.001), row("FSDP2", 6), row("resident", 4, loss=3.0)])
    with pytest.raises(AssertionError, match="the losses do not agree to 3 digits"):
        agree([row("driven", 5, loss=2.01), row("FSDP2", 6)])
    agree([row("driven", 5, loss=2.01), row("float8", 6), row("FSDP2", 6, loss=2.01)])
    with pytest.raises(AssertionError, match="the losses do not agree to 2 digits"):
        agree([row("driven", 5), row("float8", 6, loss=2.03)])


@pytest.mark.large
def test_driving_beside_the_plain_module() -> None:
    flags = ("--width", "64", "--depth", "1", "--batch", "1", "--seq", "8", "--steps", "1")
    done = command(sys.executable, EXAMPLES / "benchmark_driving.py", *flags)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"width 64, .* driven / plain \d+\.\d{3}; the last losses differ by (\S+)\n", done.stdout)
    assert found
    assert float(found[1]) < 1e-5


@pytest.mark.parametrize("family", ["Qwen3", "GPTNeoX", "Gemma2"])
def test_units_of_other_families_are_found(family: str) -> None:
    config = _benchmark_models.named(f"hf:{family}", False)
    with torch.device("meta"):
        model = config.build()
    units, paths = config.units(), [path for path, _ in model.named_parameters()]
    begins = [tuple(f"{part}." for part in some) for some in units.values()]
    inside = [[path for path in paths if path.startswith(some)] for some in begins]
    assert sorted(path for some in inside for path in some) == sorted(paths)  # each in one
    assert [len(some) for some in inside[1:-1]] == [len(inside[1])] * config.depth
    assert type(model).__name__ == f"{family}ForCausalLM"


def test_a_model_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"'hf:Qwen': expected one of tiny, .*, or hf: and a family, as hf:Qwen3"):
        _benchmark_models.named("hf:Qwen", False)


@pytest.mark.large
def test_the_compiled_peer_and_float8_have_the_losses_of_the_others(tmp_path: Path) -> None:
    rows = "driven,float8,float8 gathered,FSDP2,SimpleFSDP"
    path = os.pathsep.join([str(TORCHAO), os.environ.get("PYTHONPATH", "")])
    found = benchmark(tmp_path, "--only", rows, "--batch", "2", "--seq", "32", PYTHONPATH=path)["rows"]  # compares them
    assert [*found] == rows.split(",")
    assert found["SimpleFSDP"]["loss"] == pytest.approx(found["driven"]["loss"], rel=1e-5)
    assert found["float8"]["loss"] != found["driven"]["loss"]
    assert found["float8 gathered"]["loss"] == found["float8"]["loss"]  # of float32, cast before it is gathered


@pytest.mark.large
def test_a_mixed_stack_beside_fsdp2(tmp_path: Path) -> None:
    rows = "unit by unit,driven,FSDP2"
    found = benchmark(tmp_path, "--model", "tiny-mixed", "--only", rows, "--batch", "1", "--seq", "80")["rows"]
    assert [*found] == rows.split(",")
    assert found["driven"]["loss"] == pytest.approx(found["FSDP2"]["loss"], rel=1e-5)


def test_a_scan_by_chunks_is_the_recurrence() -> None:
    torch.manual_seed(0)
    x, b, c = (torch.randn(2, 37, *shape, dtype=torch.float64) for shape in ((3, 5), (4,), (4,)))
    decay, state, expected = -torch.rand(2, 37, 3, dtype=torch.float64), torch.zeros(2, 3, 5, 4).double(), []
    for t in range(37):
        state = decay[:, t, :, None, None].exp() * state + x[:, t, :, :, None] * b[:, t, None, None]
        expected.append((state * c[:, t, None, None]).sum(-1))
    for chunk in (8, 64):  # several, the last one shorter; and one
        found = _benchmark_mixed.scan(x, decay, b, c, chunk)
        torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("room", "full"), [(4.0, False), (0.5, True)])
def test_experts_take_as_many_tokens_as_they_have_room_for(room: float, full: bool) -> None:
    torch.manual_seed(0)
    layer = _benchmark_mixed.Experts(6, 5, 4, room).double()
    h = torch.randn(2, 8, 6, dtype=torch.float64)
    x, most = layer.norm(h).flatten(0, 1), int(room * 2 * 16 / 4)
    shares, chosen = (t.tolist() for t in layer.router(x).float().softmax(-1).topk(2))
    expected, taken = h.flatten(0, 1).clone(), [0] * 4
    for choice in range(2):
        for i, token in enumerate(x):
            expert = chosen[i][choice]
            taken[expert] += 1
            if taken[expert] <= most:
                gate, up = (token @ layer.gate_up[expert]).chunk(2)
                out = (torch.nn.functional.silu(gate) * up) @ layer.down[expert]
                expected[i] += shares[i][choice] / sum(shares[i]) * out
    assert (max(taken) > most) == full
    torch.testing.assert_close(layer(h, None).flatten(0, 1), expected, rtol=1e-6, atol=1e-6)  # shares are float32


def test_a_mixed_stack_reads_nothing_on_the_host() -> None:
    """On the meta device there is nothing to read, and no shape that hangs on values."""
    config = _benchmark_models.MODELS["mixed"]
    with torch.device("meta"):
        # named once more: where transformers loads a model first, torch.device no longer knows linspace in this process
        model = config.build().to("meta", torch.bfloat16)
        loss = config.loss(model, torch.empty(config.batch, config.seq + 1, dtype=torch.long))
    assert all(grad is not None for grad in torch.autograd.grad(loss, [*model.parameters()], allow_unused=True))


@pytest.mark.large
def test_families_train_beside_fsdp2(tmp_path: Path) -> None:
    """As Hugging Face gives them: one without tokens, one with an encoder and a decoder."""
    flags = ("--families", "vit,whisper", "--ways", "driven,FSDP2", "--steps", "7")
    done = command(sys.executable, EXAMPLES / "benchmark_families.py", *flags)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[:2] for row in rows] == [[f, way] for f in ("vit", "whisper") for way in ("driven", "FSDP2")]
    for ours, theirs in ((rows[0], rows[1]), (rows[2], rows[3])):
        assert abs(float(ours[2]) - float(theirs[2])) <= 2e-5
        assert 1 < float(ours[2]) < 8


@pytest.mark.large
def test_two_axes_beside_fsdp2_with_parallelize_module() -> None:
    done = command(sys.executable, EXAMPLES / "benchmark_axes.py", "--data", "1")
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["FSDP2", "DTensors", "collectives"], done.stderr
    assert len({tuple(row[-2:]) for row in rows}) == 1  # losses
