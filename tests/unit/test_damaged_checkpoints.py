"""Damaged and crafted checkpoints: nothing in them is run, nothing wrong is loaded, and the template is unharmed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import functional_fsdp as fsdp
from functional_fsdp._io.foreign import opened
from functional_fsdp._io.manifest import parts_of
from functional_fsdp._io.pieces import _Sink

Bits = dict[str, torch.Tensor]


def state_of(seed: int = 0) -> fsdp.State:
    """One rank; weights of two dtypes, moments, a buffer, extras without dims, without elements, transposed."""
    generator = torch.Generator().manual_seed(seed)
    params = {
        "w": torch.randn(9, 5, generator=generator),
        "b": torch.randn(3, generator=generator, dtype=torch.float64),
    }
    state = fsdp.shard(
        params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=0.1), buffers={"seen": torch.tensor([True, False])}
    )
    state = fsdp.step(fsdp.reduce(*fsdp.unshard(state)))
    extras = {
        "scale": torch.randn((), generator=generator).bfloat16(),
        "nothing": torch.zeros(0, 3),
        "turned": torch.randn(2, 3, generator=generator).t(),
        "complex": torch.randn(2, generator=generator, dtype=torch.complex64),
    }
    return fsdp.replace_extras(state, **extras)


def bits(state: fsdp.State) -> Bits:
    return {part.name: part.tensor.clone() for part in parts_of(state)}


def same(a: Bits, b: Bits) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype is b[key].dtype for key in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint; tests change a copy of it."""
    return fsdp.save(state_of(), tmp_path_factory.mktemp("whole") / "saved")


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "saved"))


def refused(folder: Path, kind: type[Exception] = fsdp.CheckpointError) -> str:
    """What `load` says; the template keeps its bits and goes on."""
    template = state_of(1)
    before = bits(template)
    with pytest.raises(kind) as error:
        fsdp.load(folder, like=template)
    assert same(before, bits(template))
    assert int(fsdp.step(fsdp.reduce(*fsdp.unshard(template))).count) == 2
    return str(error.value)


def tried(template: fsdp.State, folder: Path) -> tuple[str, fsdp.State | None]:
    try:
        return "", fsdp.load(folder, like=template)
    except (fsdp.CheckpointError, fsdp.SpecError) as error:
        return str(error), None


def note_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "layout.json").read_text())


def rewrite(folder: Path, **changes: Any) -> None:
    """Change `layout.json`, its digest included, as somebody would who knows how it is made."""
    note = {**note_of(folder), **changes}
    note.pop("digest", None)
    digest = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()
    (folder / "layout.json").write_text(json.dumps({**note, "digest": digest}))


def test_torch_reads_what_was_written(whole: Path) -> None:
    wanted = {name: torch.zeros_like(tensor) for name, tensor in bits(state_of()).items()}
    assert {"extras.turned", "count", "buffers.seen", "main.w", "opt.mean.w"} <= wanted.keys()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, checkpoint_id=str(whole), no_dist=True)  # type: ignore[attr-defined]
    assert all(torch.equal(tensor, bits(state_of())[name]) for name, tensor in wanted.items())


# ---------------------------------------------------------------- what would run code


class Evil:
    def __init__(self, what: Callable[..., Any], *args: Any) -> None:
        self.what, self.args = what, args

    def __reduce__(self) -> Any:
        return self.what, self.args


def test_nothing_is_unpickled(saved: Path, tmp_path: Path) -> None:
    """`.metadata` is for torch's tools: `load` compares its digest, and goes by `layout.json`."""
    command = f"touch {tmp_path / 'ran'}"
    (saved / ".metadata").write_bytes(data := pickle.dumps(Evil(os.system, command)))
    assert f"{saved / '.metadata'} has " in refused(saved)
    files = {**note_of(saved)["files"], ".metadata": len(data)}
    rewrite(saved, files=files)
    assert f"{saved / '.metadata'} is damaged: its digest is another" in refused(saved)
    rewrite(saved, metadata=hashlib.sha256(data).hexdigest())
    assert same(bits(fsdp.load(saved, like=state_of(1))), bits(state_of()))
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- what names other places


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "x\0", ".metadata", 3, None])
def test_files_elsewhere_are_refused(saved: Path, name: Any) -> None:
    (saved.parent / "x").write_bytes((saved / "__0_0.distcp").read_bytes())
    tensors = note_of(saved)["tensors"]
    for _, _, chunks in tensors.values():
        for chunk in chunks:
            chunk[2] = name
    rewrite(saved, tensors=tensors)
    assert "which is no file of this checkpoint" in refused(saved)
    if isinstance(name, str) and name != ".metadata":
        rewrite(saved, files={**note_of(saved)["files"], name: (saved.parent / "x").stat().st_size})
        assert "expected the name of a file in that folder" in refused(saved)


@pytest.mark.parametrize("name", ["layout.json", ".metadata", "__0_0.distcp"])
def test_links_pipes_and_folders_are_refused(saved: Path, name: str) -> None:
    (saved / name).rename(saved.parent / "elsewhere")
    (saved / name).symlink_to(saved.parent / "elsewhere")
    assert f"{saved / name} is a link" in refused(saved)
    (saved / name).unlink()
    os.mkfifo(saved / name)
    assert f"{saved / name} is no regular file" in refused(saved)
    (saved / name).unlink()
    (saved / name).mkdir()
    assert f"{saved / name} is no regular file" in refused(saved)


def test_a_folder_by_a_link_is_fine(saved: Path) -> None:
    (saved.parent / "link").symlink_to(saved)
    assert same(bits(fsdp.load(saved.parent / "link", like=state_of(1))), bits(state_of()))


# ---------------------------------------------------------------- what does not fit


def put(place: int, value: Any) -> Callable[[Any], Any]:
    """Change the only chunk of the entry: start, stop, file, offset, length, data, sums."""

    def do(entry: Any) -> Any:
        entry[2][0][place] = value(entry[2][0][place]) if callable(value) else value
        return entry

    return do


OTHER = [
    (put(3, -1), "expected whole numbers"),
    (put(3, "0"), "expected whole numbers"),
    (put(3, 1.5), "expected whole numbers"),
    (put(3, 1 << 70), "beyond its place"),
    (put(4, 1 << 40), "beyond its place"),
    (put(4, 0), "beyond its place"),
    (put(5, 1 << 40), "beyond its place"),
    (put(5, lambda n: n + 4), "is damaged where 'extras.turned' lies"),
    (put(3, lambda n: n + 1), "is damaged where 'extras.turned' lies"),
    (put(6, []), "has 0 sums for 24 bytes"),
    (put(6, [1, 2]), "is damaged where 'extras.turned' lies"),
    (put(6, ["a", 2]), "expected whole numbers"),
    (put(0, 1), "has no chunk for its elements from 0 on"),
    (put(1, 5), "has 2 sums for 20 bytes|chunks for 5 of its 6"),
    (put(1, 7), "chunks for 7 of its 6 elements"),
    (lambda e: [e[0], [2, 3], e[2]], "as torch.float32 [2, 3]; this state has torch.float32 [3, 2]"),
    (lambda e: [e[0], [6], e[2]], "as torch.float32 [6]"),
    (lambda e: [e[0], [-3, -2], e[2]], "expected a dtype and a shape"),
    (lambda e: ["int32", *e[1:]], "as torch.int32 [3, 2]; this state has torch.float32"),
    (lambda e: ["save", *e[1:]], "expected a dtype and a shape"),
    (lambda e: [7, *e[1:]], "expected a dtype and a shape"),
    (lambda e: [*e[:2], []], "chunks for 0 of its 6 elements"),
    (lambda e: [*e[:2], e[2] * 2], "from 6 on, or two"),
    (lambda e: [*e[:2], [[0]]], "No save has written this"),
    (lambda e: None, "No save has written this"),
    (lambda e: 7, "No save has written this"),
]


@pytest.mark.parametrize(("change", "said"), OTHER)
def test_entries_that_do_not_fit(saved: Path, change: Any, said: str) -> None:
    tensors = note_of(saved)["tensors"]
    rewrite(saved, tensors={**tensors, "extras.turned": change(tensors["extras.turned"])})
    text = refused(saved)
    assert any(one in text for one in said.split("|"))
    assert text.count("Load another checkpoint") <= 1


def test_other_names(saved: Path) -> None:
    tensors = note_of(saved)["tensors"]
    lacks = {name: one for name, one in tensors.items() if name != "extras.turned"}
    rewrite(saved, tensors=lacks)
    assert "'extras.turned' is here only" in refused(saved, fsdp.TreeError)
    rewrite(saved, tensors={**tensors, "extras.more": tensors["extras.turned"]})
    assert "'extras.more' is there only" in refused(saved, fsdp.TreeError)


def test_a_tensor_in_the_place_of_another(saved: Path) -> None:
    """Sums are of the bytes, so only a forger would write it."""
    tensors = note_of(saved)["tensors"]
    tensors["extras.turned"][2][0][3:6] = tensors["extras.complex"][2][0][3:6]
    rewrite(saved, tensors=tensors)
    assert "is damaged where 'extras.turned' lies" in refused(saved)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is no JSON"),
        ("{", "it is no JSON"),
        ("\ud800", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it holds a list; expected an object"),
        ("null", "it holds a NoneType"),
        ("{}", "has no 'format'"),
        ('{"format": 3, "step": 1}', "has no 'save'"),
        ('{"format": 4, "step": "1"}', "is of format 4; this version reads 3. Update this package"),
        ('{"format": 2}', "is of format 2; this version reads 3. Save it anew by the version that wrote it"),
    ],
)
def test_a_note_that_is_none(saved: Path, text: str, said: str) -> None:
    (saved / "layout.json").write_bytes(text.encode(errors="surrogatepass"))
    text = refused(saved)
    assert said in text
    assert str(saved / "layout.json") in text


@pytest.mark.parametrize("key", ["step", "save", "placement", "leaves", "files", "metadata", "digest"])
def test_a_note_that_lacks_a_key_or_has_another_type(saved: Path, key: str) -> None:
    note = note_of(saved)
    wrong: tuple[Any, ...] = (None, 1.5, True)
    for value in wrong:
        (saved / "layout.json").write_text(json.dumps({**note, key: value}))
        assert f"has {value!r} as '{key}'; expected" in refused(saved)
    note.pop(key)
    (saved / "layout.json").write_text(json.dumps(note))
    assert f"has no '{key}'" in refused(saved)


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"files": {}}, {"files": {".metadata": "9"}}, {"save": "0" * 12}, {"format": 4}]
)
def test_a_note_that_no_save_has_written(saved: Path, change: dict[str, Any]) -> None:
    rewrite(saved, **change)
    text = refused(saved)
    assert re.search("which no save has written|is not the file that was written there|is of format 4", text)


# ---------------------------------------------------------------- what time and disks do


FILES = ("layout.json", ".metadata", "__0_0.distcp")


@pytest.mark.parametrize("name", FILES)
def test_files_cut_short_too_long_or_missing(saved: Path, name: str) -> None:
    data = (saved / name).read_bytes()
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        (saved / name).write_bytes(data[:cut])
        assert str(saved / name) in refused(saved)
    (saved / name).write_bytes(data + b"\0")
    assert str(saved / name) in refused(saved)
    (saved / name).unlink()
    if name != "layout.json":
        assert f"{saved / name} is missing" in refused(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found(saved: Path, name: str) -> None:
    data = (saved / name).read_bytes()
    chosen = random.Random(name)
    template = state_of(1)
    for at in sorted(chosen.sample(range(len(data)), 80)):
        damaged = bytearray(data)
        damaged[at] ^= chosen.randrange(1, 256)
        (saved / name).write_bytes(damaged)
        text, loaded = tried(template, saved)
        assert loaded is None
        assert str(saved) in text


def test_files_of_another_checkpoint(saved: Path) -> None:
    other = fsdp.save(state_of(2), saved.parent / "other")
    assert (other / ".metadata").read_bytes() == (saved / ".metadata").read_bytes()  # the same leaves
    for name in ("layout.json", "__0_0.distcp"):
        shutil.copy(saved / name, saved.parent / "kept")
        shutil.copy(other / name, saved / name)
        assert "__0_0.distcp is not the file that was written there: it begins with b'functional_fsdp " in refused(
            saved
        )
        shutil.copy(saved.parent / "kept", saved / name)
    assert same(bits(fsdp.load(saved, like=state_of(1))), bits(state_of()))


def test_torchs_writer_never_meets_an_error_of_the_disk() -> None:
    """It aborts the process if it does while it is being destroyed."""

    class Full:
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    sink = _Sink(Full())  # type: ignore[arg-type]
    torch.save(torch.ones(3), sink)  # type: ignore[arg-type]
    assert isinstance(sink.error, OSError)
    assert sink.write(b"more") == 4


def test_a_file_that_the_disk_does_not_give_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise OSError("Input/output error")

    (tmp_path / "weights.pt").write_bytes(b"")
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(OSError, match="Input/output error"):
        opened(tmp_path / "weights.pt")
