"""Two hosts on one machine: namespaces joined by virtual interfaces, each with its own name, processes and memory.

    host 0   10.213.0.1  veth ──── veth  10.213.0.2   host 1

The package takes ranks for ranks of one host if they have the same kernel and PID namespace, for only then can one see
the other's process and memory. Here they have the kernel in common, and nothing else but the files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from .commands import ROOT

LINK = "veth"
SPACES = ("--net", "--pid", "--ipc", "--uts", "--mount")


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if lacking := [name for name in ("ip", "unshare", "nsenter") if not shutil.which(name)]:
        return f"network namespaces need the commands {', '.join(lacking)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts():
            return ""
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {error} {getattr(error, 'stderr', '')}"


class Hosts:
    """`with Hosts() as hosts:`; they end with the processes that hold them, however that comes about."""

    def __enter__(self) -> Hosts:
        self.started: list[subprocess.Popen[bytes]] = []
        self.holders = [
            subprocess.Popen(
                [
                    "unshare",
                    *SPACES,
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    "sh",
                    "-c",
                    f"hostname host{i}; exec sleep 600",
                ],
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        try:
            self.pids = [_child(holder) for holder in self.holders]
            _do("ip", "link", "add", LINK, "netns", str(self.pids[0]), "type", "veth", "peer", "name", LINK,
                "netns", str(self.pids[1]))  # fmt: skip
            for i in range(2):
                _do(*self.on(i, "ip", "address", "add", f"{address(i)}/24", "dev", LINK))
                _do(*self.on(i, "ip", "link", "set", LINK, "up"))
                _do(*self.on(i, "ip", "link", "set", "lo", "up"))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for holder in self.holders:
            holder.kill()  # and with it, by --kill-child, every process there
            holder.wait()
            assert holder.stderr
            holder.stderr.close()
        for process in self.started:
            process.wait()

    def on(self, host: int, *line: str) -> list[str]:
        """A command, as one on this host."""
        return ["nsenter", "--target", str(self.pids[host]), *SPACES, *line]

    def cut(self) -> None:
        """The second host's interface is switched off: nothing arrives any more, and no connection is closed."""
        _do(*self.on(1, "ip", "link", "set", LINK, "down"))

    def start(
        self, host: int, line: Sequence[str | Path], env: Mapping[str, str], out: Path
    ) -> subprocess.Popen[bytes]:
        """A python command on a host, what it prints in a file."""
        settings = {
            **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'examples'}",
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **env,
        }
        with out.open("wb") as file:
            whole = self.on(host, sys.executable, *map(str, line))
            self.started.append(subprocess.Popen(whole, env=settings, stdout=file, stderr=file, cwd=ROOT))
        return self.started[-1]


def address(host: int) -> str:
    return f"10.213.0.{host + 1}"


def sent() -> int:
    """How many bytes this host has sent to the other."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{LINK}:"))


def _child(holder: subprocess.Popen[str]) -> int:
    """The process that holds the namespaces: the first one of its own, which `unshare` has forked."""
    children, end = Path(f"/proc/{holder.pid}/task/{holder.pid}/children"), time.monotonic() + 10
    while holder.poll() is None and time.monotonic() < end:
        for pid in children.read_text().split():
            if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                return int(pid)
        time.sleep(0.01)
    holder.kill()
    assert holder.stderr
    raise RuntimeError(f"unshare ended with {holder.wait()}: {holder.stderr.read()}")


def _do(*line: str) -> None:
    subprocess.run(line, check=True, capture_output=True, text=True, timeout=20)
