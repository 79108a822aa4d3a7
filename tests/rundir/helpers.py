"""A run to act on, other processes that hold it, and a clock that need not be waited for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pretrain.config import RunConfig, config_from_dict
from pretrain.rundir import ProcessIdentity, RunDirectory, this_process
from pretrain.rundir.lease import Clock
from pretrain.rundir.lease_file import LeaseRecord, lease_key
from pretrain.rundir.records import encode_record
from pretrain.store import Store
from tests.config.base import values


def config(name: str = "tiny") -> RunConfig:
    return config_from_dict({**values(), "name": name})


def new_run(home: Path, name: str = "tiny") -> RunDirectory:
    run, _ = RunDirectory.claim(config(name), resume="never", home=str(home))
    return run


class FakeClock(Clock):
    """Sleeping passes the time at once; `during_sleep` is what happens meanwhile."""

    def __init__(self, now: float = 1_000_000.0, during_sleep: Callable[[], None] = lambda: None) -> None:
        self.time = now
        self.slept = 0.0
        self._during_sleep = during_sleep

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.slept

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.slept += seconds
        self._during_sleep()


ELSEWHERE = ProcessIdentity(host="node7", boot_id="another-boot/pid:[1]", pid=4711, start_time=5.0)


def put_lease(
    store: Store, holder: ProcessIdentity, renewed_at: float, *, number: int = 1, released: bool = False
) -> None:
    """The file of a lease that some process left."""
    record = LeaseRecord(number, f"uuid-{number}", holder, "training", renewed_at, released)
    store.put(lease_key(number), encode_record(record.to_json()))


HOLDER = """
import sys, time
from pretrain.rundir import Lease
from pretrain.store import open_store
lease = Lease.acquire(open_store(sys.argv[1]), purpose="training")
lease.start_renewing()
print(lease.token, flush=True)
time.sleep(60)
"""


def start_holder(store: Store) -> tuple[subprocess.Popen[str], str]:
    """Another process that holds the run until it is killed; and the token of its lease."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, store.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def flip_bits(path: Path, every: int = 1) -> list[bytes]:
    """All contents of a file with one bit flipped (of each `every`-th byte)."""
    content = path.read_bytes()
    return [
        content[:index] + bytes([content[index] ^ (1 << bit)]) + content[index + 1 :]
        for index in range(0, len(content), every)
        for bit in range(8)
    ]


def gone_process() -> ProcessIdentity:
    """A process of this host that has ended."""
    here = this_process()
    return ProcessIdentity(here.host, here.boot_id, 2**22 + 12345, 1.0)
