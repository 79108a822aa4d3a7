"""Several hosts on one: a network namespace per host with its own address, name and /dev/shm, over a bridge.

Takes a number of hosts → places to run commands in, whose processes can be killed and whose links can be cut and
mended. What one command starts shares one mount namespace, so its tmpfs is its own and is gone with the last of it.
Needs root and iproute2. Everything goes with `close`: processes by the namespace they are in, interfaces, folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

_SETUP = """
ip link set lo up
hostname {name}
mount -t tmpfs -o size=600m,mode=1777 tmpfs /dev/shm
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
{more}
exec "$@"
"""


def missing() -> str:
    """What this machine lacks, or an empty string."""
    if os.getuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed (Debian: iproute2, util-linux)"
    name = f"pt{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Hosts:
    """See the module. Hosts are numbered from 1 and called node1, node2, …

    Attributes:
        folder: for files of the hosts, short and gone in the end.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.folder = Path(tempfile.mkdtemp(prefix="ptn", dir="/tmp"))
        self._subnet = _free_subnet()
        self._tag = f"pt{self._subnet.replace('.', '')[2:]}"
        self._bridge = f"{self._tag}br"
        self._write_names()
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("address", "add", f"{self.gateway}/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for host in range(1, count + 1):
                self._wire(host)
        except BaseException:
            self.close()
            raise

    @property
    def gateway(self) -> str:
        """Address of this machine that all hosts reach."""
        return f"{self._subnet}.254"

    def address(self, host: int) -> str:
        return f"{self._subnet}.{host}"

    def inside(self, host: int, more: str = ":") -> list[str]:
        """What a command must begin with to run as that host.

        Args:
            more: shell lines that prepare its mounts.
        """
        setup = _SETUP.format(name=f"node{host}", folder=self.folder, more=more)
        return [*self.in_network(host), "unshare", "--mount", "--uts", "sh", "-euc", setup, "node"]

    def in_network(self, host: int) -> list[str]:
        """The same with nothing of the host but its network."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def pids(self, host: int) -> list[int]:
        """Processes of a host."""
        found = subprocess.run(["ip", "netns", "pids", self._namespace(host)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def cut(self, host: int) -> None:
        """Nothing goes in or out."""
        ip("link", "set", self._port(host), "down")

    def mend(self, host: int) -> None:
        ip("link", "set", self._port(host), "up")

    def kill(self, host: int) -> None:
        """It loses power: its processes are gone, and no packet tells of it or answers until it is mended."""
        self.cut(host)
        self.kill_processes(host)

    def kill_processes(self, host: int) -> None:
        deadline = time.monotonic() + 10.0
        while (pids := self.pids(host)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.02)
        self.reap()
        assert not self.pids(host)

    def reap(self) -> None:
        """Whoever starts processes in hosts takes their exit codes here: a zombie still counts as one of the host."""

    def close(self) -> None:
        """Ends all processes, removes interfaces and the folder."""
        for host in range(1, self.count + 1):
            with contextlib.suppress(AssertionError):
                self.kill_processes(host)
            subprocess.run(["ip", "netns", "delete", self._namespace(host)], capture_output=True)
            subprocess.run(["ip", "link", "delete", self._port(host)], capture_output=True)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _namespace(self, host: int) -> str:
        return f"{self._tag}n{host}"

    def _port(self, host: int) -> str:
        return f"{self._tag}v{host}"

    def _wire(self, host: int) -> None:
        namespace, port, inner = self._namespace(host), self._port(host), f"{self._tag}e{host}"
        ip("netns", "add", namespace)
        ip("link", "add", port, "type", "veth", "peer", "name", inner)
        ip("link", "set", inner, "netns", namespace, "name", "eth0")
        ip("link", "set", port, "master", self._bridge)
        ip("link", "set", port, "up")
        ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")

    def _write_names(self) -> None:
        """Without names every reverse look-up waits 10 s for a name server that does not answer."""
        lines = ["127.0.0.1 localhost", *(f"{self.address(host)} node{host}" for host in range(1, self.count + 1))]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "resolv.conf").write_text("")


def ip(*words: str) -> None:
    """The program; its words in the error."""
    result = subprocess.run(["ip", *words], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {result.stderr.strip()}")


def _free_subnet() -> str:
    taken = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True).stdout
    for third in range(256):
        subnet = f"10.77.{(os.getpid() + third) % 256}"
        if f"{subnet}." not in taken:
            return subnet
    raise RuntimeError("no free subnet of 10.77.0.0/16")
