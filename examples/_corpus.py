"""A corpus that every machine has: the source text of Python's own standard library, as bytes.

Whole files are held out, chosen by a hash of their name, so that the split is the same on every rank, in every run and
on every machine with the same Python. Left out are tests, installed packages, and tables that a program wrote.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),  # generated: mostly tables of characters
}


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # uint8 [bytes]
    held_out: Tensor  # uint8 [bytes]
    files: tuple[int, int]  # how many files each of the two holds
    unigram: float  # entropy of a byte of the held-out text, in nats
    bigram: float  # entropy of such a byte given the one before it, in nats


def load(fraction: float = 0.1) -> Corpus:
    """Read the standard library, and hold out about this fraction of its files."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(_sources(root))
    if not names:
        raise FileNotFoundError(f"{root} holds no *.py files: this Python came without the source of its library")
    chance = {name: int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32 for name in names}
    trained = [name for name in names if chance[name] >= fraction]
    kept = [name for name in names if chance[name] < fraction]
    held_out = _read(root / name for name in kept)
    return Corpus(_read(root / name for name in trained), held_out, (len(trained), len(kept)), *entropies(held_out))


def _sources(root: Path) -> Iterator[str]:
    """Paths below the root, by way of no folder that is left out: there may be ten thousands of files in those."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py"))


def _read(files: Iterable[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def entropies(text: Tensor) -> tuple[float, float]:
    """Nats in a byte, and in a byte given the one before it: the losses of tables counted on this very text.

    >>> entropies(torch.tensor([0, 1] * 8 + [0]))[1]  # the next byte is certain
    0.0
    """
    first, second = text[:-1].long(), text[1:].long()
    pairs = torch.bincount(first * 256 + second, minlength=256 * 256).double().view(256, 256) / len(first)
    alone = torch.bincount(text.long(), minlength=256).double() / len(text)
    return _entropy(alone), _entropy(pairs) - _entropy(pairs.sum(1))


def _entropy(p: Tensor) -> float:
    return float(-torch.special.xlogy(p, p).sum())


def batch(text: Tensor, size: int, context: int, seed: int, step: int, rank: int, ranks: int) -> Tensor:
    """A rank's part of a batch of `size` random windows of the text, int64 [size / ranks, context + 1].

    The batch is a pure function of (seed, step), however many ranks share it. So a run that resumes goes on in the data
    where it stopped, on any number of ranks.
    """
    if size % ranks:
        raise ValueError(
            f"a batch of {size} windows does not divide among {ranks} ranks, and unequal parts would change the mean: "
            f"give a --batch that is a multiple of {ranks}, or start another number of processes"
        )
    key = hashlib.sha256(f"{seed} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little"))
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)[rank::ranks]
    return text[starts + torch.arange(context + 1)].long()


def windows(text: Tensor, count: int, context: int) -> Tensor:
    """Windows at equal distances over the whole text, int64 [count, context + 1]."""
    starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()[:, None]
    return text[starts + torch.arange(context + 1)].long()
