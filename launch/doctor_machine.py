"""Checks of one machine for `pretrain doctor`: packages, compiler, shared memory, limits, clock, names, network.

Each check takes nothing → findings; what it measures is passed in by tests. They also run on every node of a
cluster (`doctor_cluster`), so they import nothing heavy and never raise.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import InvalidRequirement, Requirement

from pretrain.errors import PretrainError
from pretrain.rundir import home_url
from pretrain.store import open_store

LEAST_FILES, GOOD_FILES = 1024, 8192
LEAST_SHM_BYTES = 100 * 2**20
SLOW_LOOKUP_S, LONGEST_LOOKUP_S = 1.0, 12.0
# A lease of another host counts as silent after 30 s.
NOTED_SKEW_S, BAD_SKEW_S = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `ok`, `note` (works, but) or `bad` (training would fail)."""

    check: str
    verdict: str
    found: str
    remedy: str = ""


def check_python() -> list[Finding]:
    good = sys.version_info >= (3, 11)
    remedy = "" if good else "install Python 3.11 or newer"
    return [Finding("python", "ok" if good else "bad", sys.version.split()[0], remedy)]


def check_packages(required: list[str] | None = None) -> list[Finding]:
    """Everything that this package requires, in the versions that it requires."""
    if required is None:
        try:
            required = importlib.metadata.requires("pretrain") or []
        except importlib.metadata.PackageNotFoundError:
            return [Finding("pretrain", "bad", "not installed", "make install, or pip install -e .")]
    findings = []
    for text in required:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        findings.append(_package(requirement))
    return findings


def _package(requirement: Requirement) -> Finding:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, "bad", "not installed", "make install, or pip install -e .")
    if not requirement.specifier.contains(version.split("+")[0], prereleases=True):
        return Finding(requirement.name, "bad", version, f"install {requirement.name}{requirement.specifier}")
    return Finding(requirement.name, "ok", version)


def check_compiler() -> list[Finding]:
    """DeepSpeed builds operations at the first start of a machine, and torch.compile needs a compiler too."""
    missing = [
        name for names in (("g++", "c++", "clang++"), ("ninja",)) if not any(map(_program, names)) for name in names[:1]
    ]
    if not missing:
        compiler = next(name for name in ("g++", "c++", "clang++") if _program(name))
        return [Finding("compiler", "ok", f"{compiler}, ninja")]
    remedy = "apt-get install g++, pip install ninja; without them compile=off and slower communication on CPUs"
    return [Finding("compiler", "note", f"{', '.join(missing)} not found", remedy)]


def _program(name: str) -> str | None:
    """On the path, or beside the interpreter."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def check_shared_memory() -> list[Finding]:
    if not Path("/dev/shm").is_dir():
        return [Finding("/dev/shm", "note", "absent", "Ray uses the temporary folder instead")]
    free = shutil.disk_usage("/dev/shm").free
    remedy = "" if free >= LEAST_SHM_BYTES else "Ray wants 100 MB there; in a container use --shm-size=1g"
    return [Finding("/dev/shm", "ok" if not remedy else "note", f"{free / 1e6:.0f} MB free", remedy)]


def check_file_limits() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files"
    if soft == resource.RLIM_INFINITY or soft >= GOOD_FILES:
        return [Finding("file limit", "ok", found)]
    remedy = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}: Ray and sockets of ranks need many"
    return [Finding("file limit", "bad" if soft < LEAST_FILES else "note", found, remedy)]


def check_clock(skew_s: float | None = None) -> list[Finding]:
    """This machine's clock against that of the file system of the runs, which all nodes share."""
    if skew_s is None:
        skew_s = _skew_to_home()
    if skew_s is None:
        return [Finding("clock", "ok", "the runs are in an object store, whose clock is not asked")]
    return [skew_finding("clock", skew_s, "the file system of the runs")]


def skew_finding(check: str, skew_s: float, against: str) -> Finding:
    """How far a clock is off."""
    off = abs(skew_s)
    verdict = "bad" if off > BAD_SKEW_S else "note" if off > NOTED_SKEW_S else "ok"
    remedy = "" if verdict == "ok" else "run chrony or ntpd: leases and logs of several hosts are compared by time"
    return Finding(check, verdict, f"{skew_s:+.1f} s against {against}", remedy)


def _skew_to_home() -> float | None:
    try:
        path = open_store(home_url()).local_path("probe")
    except PretrainError:
        return None  # check_home says why
    if path is None:
        return None
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    try:
        before = time.time()
        probe.write_bytes(b"")
        skew = (before + time.time()) / 2 - probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return 0.0  # check_home says that it cannot be written
    return skew if abs(skew) > 0.1 else 0.0


def check_names() -> list[Finding]:
    """Reverse look-ups of this host's addresses: gloo and Ray make them at each start, 10 s each where they fail."""
    addresses = sorted({address for _, address in interfaces()})
    slow = {address: seconds for address in addresses if (seconds := lookup_seconds(address)) > SLOW_LOOKUP_S}
    if not slow:
        return [Finding("names", "ok", f"reverse look-ups of {len(addresses)} addresses are quick")]
    found = ", ".join(f"{address} takes {seconds:.0f} s" for address, seconds in slow.items())
    return [Finding("names", "note", found, "every start pays that: put all nodes into /etc/hosts, or mend the DNS")]


def lookup_seconds(address: str) -> float:
    """Time of one reverse look-up, whether it finds a name or not; bounded."""
    started = time.monotonic()
    done = threading.Event()

    def look() -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr(address)
        done.set()

    threading.Thread(target=look, daemon=True).start()
    done.wait(LONGEST_LOOKUP_S)
    return time.monotonic() - started


def interfaces() -> list[tuple[str, str]]:
    """Name and IPv4 address of every interface that is up, without the loopback."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    return [
        (name, address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in up and address.family == socket.AF_INET and not address.address.startswith("127.")
    ]


def check_interface(found: list[tuple[str, str]] | None = None, environ: dict[str, str] | None = None) -> list[Finding]:
    """What collectives between nodes would use."""
    found = interfaces() if found is None else found
    environ = dict(os.environ) if environ is None else environ
    names = {name for name, _ in found} | {"lo"}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = environ.get(variable, "")
        if (
            chosen
            and chosen[0] not in "^="
            and not any(name.startswith(part) for part in chosen.split(",") for name in names)
        ):
            remedy = f"unset it, or set cluster.nodes.interface to one of {', '.join(sorted(names))}"
            return [Finding("interface", "bad", f"{variable}={chosen} is not up here", remedy)]
    listed = ", ".join(f"{name} {address}" for name, address in found)
    if not found:
        return [Finding("interface", "note", "loopback only", "ranks of other nodes cannot be reached")]
    if len(found) > 1 and not environ.get("GLOO_SOCKET_IFNAME"):
        remedy = "several: set cluster.nodes.interface, or collectives may choose the slow one"
        return [Finding("interface", "note", listed, remedy)]
    return [Finding("interface", "ok", listed)]


def check_home(home: str | None = None) -> list[Finding]:
    """Whether runs can be written, read back and deleted, by this user from this machine."""
    place = home_url(home)
    if "://" not in place and not os.path.lexists(place):
        return [Finding("run directory", "ok", f"{place} is made by the first run")]
    key = f".doctor-{uuid.uuid4().hex}"
    try:
        store = open_store(place)
        store.put(key, b"doctor")
        whole = store.get(key) == b"doctor"
        store.delete(key)
    except (PretrainError, OSError) as error:
        return [
            Finding("run directory", "bad", f"{place}: {error}", "give this user the right to write, on every node")
        ]
    if not whole:
        return [Finding("run directory", "bad", f"{place} gives back other bytes than were written", "do not use it")]
    return [Finding("run directory", "ok", f"{place} can be written, read and deleted")]
