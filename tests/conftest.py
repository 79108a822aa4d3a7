"""What every test runs under: fixed threads and devices, checked shapes, and no process left behind.

The environment is set before anything heavy is imported, and rank subprocesses inherit it.
`PRETRAIN_NO_TYPE_HOOK=1` runs the tests without the shape and type checks.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_SILENT": "true",
    "MPLBACKEND": "Agg",
}.items():
    os.environ[_name] = _value
# Every process that a test starts carries this mark, also those that left its process tree.
os.environ["PRETRAIN_TEST_SESSION"] = _SESSION = uuid.uuid4().hex

# A shell that starts the tests in the background ignores SIGINT, and every process below would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

import psutil  # noqa: E402
import pytest  # noqa: E402

if not os.environ.get("PRETRAIN_NO_TYPE_HOOK"):
    from jaxtyping import install_import_hook

    # Not config: it is pydantic throughout, which checks at run time itself and whose generics beartype refuses.
    _ROOMS = "errors topology log sequence store rundir data model loss optim engine checkpoint metrics generate train"
    install_import_hook([f"pretrain.{room}" for room in _ROOMS.split()], "beartype.beartype")

# Tests that start ranks, agents or servers, or measure time, run one after another; beside them run the others.
_ONE_BY_ONE = {"chaos", "launch", "prove", "train"}
# What only computes, or starts ranks that have all the time in the world.
_BESIDE = {"test_catalogues.py", "test_experts_runs.py", "test_health.py", "test_lm_eval.py", "test_moves.py",
           "test_plan.py", "test_policy.py", "test_proof.py", "test_records.py", "test_render.py",
           "test_render_kuberay.py", "test_routing_watch.py", "test_simulation.py", "test_targets.py",
           "test_translations.py"}  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Deals whole files to the workers, and the folders above as if they were one file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            *_, folder, file = path.split("/")
            return "one by one" if folder in _ONE_BY_ONE and file not in _BESIDE else path

    return ByFolder(config, log)


_GRACE_S = 3.0
# Python's own helpers of multiprocessing, which live as long as the process that asked for them.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _started_here(known: set[int]) -> list[psutil.Process]:
    """Living processes that this session started, without those in `known`."""
    found = []
    for pid in psutil.pids():
        if pid in known or pid == os.getpid():
            continue
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get("PRETRAIN_TEST_SESSION") != _SESSION:
                continue
            if any(helper in word for word in process.cmdline() for helper in _HELPERS):
                continue
        except psutil.Error:
            continue
        found.append(process)
    return found


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fails a test that ends while a process that it started still lives, and ends that process."""
    before = set(psutil.pids())
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := _started_here(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not left:
        return
    names = []
    for process in left:
        try:
            names.append(f"{process.pid}: {' '.join(process.cmdline())[:160]}")
            process.kill()
        except psutil.Error:
            continue
    if names:
        pytest.fail("the test left processes behind:\n" + "\n".join(names), pytrace=False)


@pytest.fixture(scope="session")
def rank_pool() -> object:
    """A process that forks ranks with everything imported; see tests/ranks_pool.py."""
    from tests.ranks_pool import shared_pool

    return shared_pool()
