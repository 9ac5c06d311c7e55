"""Damaged and crafted checkpoints: nothing in them is run, nothing wrong is loaded, and the template is unharmed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

import functional_fsdp as fsdp
from functional_fsdp._parts import parts_of
from functional_fsdp._writer import _Sink

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
        fsdp.load(template, folder)
    assert same(before, bits(template))
    assert int(fsdp.step(fsdp.reduce(*fsdp.unshard(template))).count) == 2
    return str(error.value)


def tried(template: fsdp.State, folder: Path) -> tuple[str, fsdp.State | None]:
    try:
        return "", fsdp.load(template, folder)
    except (fsdp.CheckpointError, fsdp.SpecError) as error:
        return str(error), None


def note_of(folder: Path) -> dict[str, Any]:
    note: dict[str, Any] = json.loads((folder / "layout.json").read_text())
    return note


def rewrite(folder: Path, **changes: Any) -> None:
    """Change `layout.json`, its digest included, as somebody would who knows how it is made."""
    note = {**note_of(folder), **changes}
    note.pop("digest", None)
    digest = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()
    (folder / "layout.json").write_text(json.dumps({**note, "digest": digest}))


def craft(folder: Path, metadata: Any) -> None:
    """Another `.metadata`, with a `layout.json` that fits it."""
    data = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(data)
    files = {**note_of(folder).get("files", {}), ".metadata": len(data)}
    rewrite(folder, files=files, metadata=hashlib.sha256(data).hexdigest())


def metadata_of(folder: Path) -> Any:
    return FileSystemReader(folder).read_metadata()


def test_the_same_bits_come_back(whole: Path) -> None:
    assert same(bits(fsdp.load(state_of(1), whole)), bits(state_of()))


def test_torch_reads_what_was_written(whole: Path) -> None:
    held = {name: torch.zeros_like(tensor) for name, tensor in bits(state_of()).items() if not name.startswith("main")}
    wanted = {name: tensor for name, tensor in held.items() if name in metadata_of(whole).state_dict_metadata}
    assert {"extras.turned", "count.", "buffers.seen"} <= wanted.keys()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, checkpoint_id=str(whole), no_dist=True)  # type: ignore[attr-defined]
    assert all(torch.equal(tensor, bits(state_of())[name]) for name, tensor in wanted.items())


# ---------------------------------------------------------------- what would run code


class Evil:
    def __init__(self, what: Callable[..., Any], *args: Any) -> None:
        self.what, self.args = what, args

    def __reduce__(self) -> Any:
        return self.what, self.args


def test_a_command_in_the_metadata_is_not_run(saved: Path, tmp_path: Path) -> None:
    craft(saved, Evil(os.system, f"touch {tmp_path / 'ran'}"))
    text = refused(saved)
    assert "asks for posix.system, which does not belong in the metadata of a checkpoint" in text
    assert str(saved / ".metadata") in text
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (Evil(eval, "1"), "builtins.eval"),
        (Evil(getattr, "torch", "load"), "builtins.getattr"),
        (Evil(torch.load, "x"), "torch.serialization.load"),
        (b"ctorch\nload\n.", "torch.load"),
        (b"ctorch.distributed.checkpoint.metadata\nos\n.", "torch.distributed.checkpoint.metadata.os"),
        (b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", "torch.os.system"),
    ],
)
def test_names_that_do_not_belong_there(saved: Path, what: Any, name: str) -> None:
    craft(saved, what)
    assert f"asks for {name}" in refused(saved)


def test_a_file_changes_no_class_of_torch(saved: Path) -> None:
    """BUILD on a class sets its attributes."""
    before = dict(vars(md.Metadata))
    craft(saved, b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x07versionK\x05stb.")
    assert "is damaged" in refused(saved)
    assert dict(vars(md.Metadata)) == before


def test_other_objects_than_tensors_are_refused(saved: Path, tmp_path: Path) -> None:
    metadata = metadata_of(saved)
    with open(saved / "__0_0.distcp", "ab") as file:
        start = file.tell()
        torch.save(Evil(os.system, f"touch {tmp_path / 'ran'}"), file)
        length = file.tell() - start
    for name in ("count.", "more"):
        metadata.state_dict_metadata[name] = md.BytesStorageMetadata()
        metadata.storage_data[md.MetadataIndex(name)] = _StorageInfo("__0_0.distcp", start, length)
    rewrite(saved, files={**note_of(saved).get("files", {}), "__0_0.distcp": start + length})
    craft(saved, metadata)
    assert "expected a tensor, since reading another object could run code" in refused(saved)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- what names other places


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "x\0", ".metadata", 3, None])
def test_files_elsewhere_are_refused(saved: Path, name: Any) -> None:
    (saved.parent / "x").write_bytes((saved / "__0_0.distcp").read_bytes())
    metadata = metadata_of(saved)
    for place in metadata.storage_data.values():
        place.relative_path = name
    craft(saved, metadata)
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
    assert same(bits(fsdp.load(state_of(1), saved.parent / "link")), bits(state_of()))


# ---------------------------------------------------------------- what does not fit


def changed(change: Callable[[Any, Any, Any], Any]) -> Callable[[Path], None]:
    """Change the entry of `extras.turned` in the metadata: (metadata, its description, its place)."""

    def do(folder: Path) -> None:
        metadata = metadata_of(folder)
        index = next(index for index in metadata.storage_data if index.fqn == "extras.turned")
        change(metadata, metadata.state_dict_metadata["extras.turned"], metadata.storage_data[index])
        craft(folder, metadata)

    return do


def put(**changes: Any) -> Callable[[Any], None]:
    def do(thing: Any) -> None:
        for name, value in changes.items():
            setattr(thing, name, value)

    return do


OTHER = [
    (lambda m, t, p: put(offset=-1)(p), "bytes -1 + "),
    (lambda m, t, p: put(offset=1 << 70)(p), "which has"),
    (lambda m, t, p: put(length=1 << 40)(p), "which has"),
    (lambda m, t, p: put(length=0)(p), "+ 0 of"),
    (lambda m, t, p: put(offset="0")(p), "which has"),
    (lambda m, t, p: put(offset=p.offset + 1)(p), "is damaged where 'extras.turned' lies"),
    (lambda m, t, p: put(length=p.length - 1)(p), "is damaged where 'extras.turned' lies"),
    (lambda m, t, p: put(transform_descriptors=["zlib"])(p), "transformed by ['zlib']"),
    (lambda m, t, p: put(size=torch.Size([2, 3]))(t), "in the parts"),
    (lambda m, t, p: put(chunks=[])(t), "in the parts []"),
    (lambda m, t, p: put(chunks=t.chunks * 2)(t), "expected one part"),
    (lambda m, t, p: put(offsets=torch.Size([1, 0]))(t.chunks[0]), "expected one part"),
    (lambda m, t, p: (put(size=torch.Size([6]))(t), put(sizes=torch.Size([6]))(t.chunks[0])), "expected one part"),
    (lambda m, t, p: put(dtype=torch.float64)(t.properties), "as torch.float64 [3, 2]; this state has torch.float32"),
    (lambda m, t, p: put(dtype="float32")(t.properties), "as float32"),
    (lambda m, t, p: m.storage_data.clear(), "does not say where"),
    (lambda m, t, p: m.state_dict_metadata.pop("extras.turned"), "has no 'extras.turned', which this state has"),
    (lambda m, t, p: put(storage_data=None)(m), "is damaged: AttributeError"),
    (lambda m, t, p: put(state_dict_metadata=7)(m), "is damaged: AttributeError"),
    (lambda m, t, p: put(properties=None)(t), "is damaged: AttributeError"),
]


@pytest.mark.parametrize(("change", "said"), OTHER)
def test_entries_that_do_not_fit(saved: Path, change: Any, said: str) -> None:
    changed(change)(saved)
    assert said in refused(saved)


def test_a_tensor_in_the_place_of_another(saved: Path) -> None:
    """Of other bytes; with as many, only a checksum of each could tell, and only a forger would write it."""

    def swap(metadata: Any, about: Any, place: Any) -> None:
        other = next(info for index, info in metadata.storage_data.items() if index.fqn == "extras.scale")
        place.offset, place.length = other.offset, other.length

    changed(swap)(saved)
    assert "BadZipFile: 2 bytes of data; expected 24" in refused(saved)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is no JSON"),
        ("{", "it is no JSON"),
        ("\ud800", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it holds a list; expected an object"),
        ("null", "it holds a NoneType"),
        ("{}", "has no 'step'"),
        ('{"step": 1}', "has no 'save'"),
    ],
)
def test_a_note_that_is_none(saved: Path, text: str, said: str) -> None:
    (saved / "layout.json").write_bytes(text.encode(errors="surrogatepass"))
    text = refused(saved)
    assert said in text
    assert str(saved / "layout.json") in text


@pytest.mark.parametrize("key", ["step", "save", "placement", "tree", "files", "metadata", "digest"])
def test_a_note_that_lacks_a_key_or_has_another_type(saved: Path, key: str) -> None:
    note = note_of(saved)
    wrong: tuple[Any, ...] = (None, [], 1.5, True)
    for value in wrong:
        (saved / "layout.json").write_text(json.dumps({**note, key: value}))
        assert f"as '{key}': a {type(value).__name__}; expected" in refused(saved)
    note.pop(key)
    (saved / "layout.json").write_text(json.dumps(note))
    assert f"has no '{key}'" in refused(saved)


@pytest.mark.parametrize("change", [{"step": -1}, {"files": {}}, {"files": {".metadata": "9"}}, {"save": "0" * 12}])
def test_a_note_that_no_save_has_written(saved: Path, change: dict[str, Any]) -> None:
    rewrite(saved, **change)
    text = refused(saved)
    assert "which no save has written" in text or "is not the file that was written there" in text


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert "is not a complete checkpoint (it has no layout.json)" in refused(tmp_path, FileNotFoundError)
    assert "is not a complete checkpoint" in refused(tmp_path / "nowhere", FileNotFoundError)


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
def test_a_flipped_byte_is_found_or_does_no_harm(saved: Path, name: str) -> None:
    """In tensors, too: torch.save keeps their CRC."""
    data, good, found = (saved / name).read_bytes(), bits(state_of()), 0
    chosen = random.Random(name)
    template = state_of(1)
    for at in sorted(chosen.sample(range(len(data)), 80)):
        damaged = bytearray(data)
        damaged[at] ^= chosen.randrange(1, 256)
        (saved / name).write_bytes(damaged)
        text, loaded = tried(template, saved)
        found += loaded is None
        assert str(saved) in text if loaded is None else same(bits(loaded), good) and loaded.steps == 1
    assert found > (40 if name.endswith("distcp") else 60)


def test_files_of_another_checkpoint(saved: Path) -> None:
    other = fsdp.save(state_of(2), saved.parent / "other")
    assert (other / ".metadata").read_bytes() == (saved / ".metadata").read_bytes()  # the same layout
    for name in ("layout.json", "__0_0.distcp"):
        shutil.copy(saved / name, saved.parent / "kept")
        shutil.copy(other / name, saved / name)
        assert "__0_0.distcp is not the file that was written there: it begins with b'functional_fsdp " in refused(
            saved
        )
        shutil.copy(saved.parent / "kept", saved / name)
    assert same(bits(fsdp.load(state_of(1), saved)), bits(state_of()))


def test_torchs_writer_never_meets_an_error_of_the_disk() -> None:
    """It aborts the process if it does while it is being destroyed."""

    class Full:
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    sink = _Sink(Full())  # type: ignore[arg-type]
    torch.save(torch.ones(3), sink)  # type: ignore[arg-type]
    assert isinstance(sink.error, OSError)
    assert sink.write(b"more") == 4
