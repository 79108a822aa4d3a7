"""Three hosts for the tests here; what is missing is said by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, missing
from tests.cluster.machines import Machines
from tests.missing import did_not_run


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three, each with an address, a name and a /dev/shm of its own."""
    lacking = missing()
    if lacking:
        did_not_run(lacking)
    hosts = Hosts(3)
    yield hosts
    hosts.close()


@pytest.fixture
def machines(hosts: Hosts, tmp_path: Path) -> Iterator[Machines]:
    found = Machines(hosts, tmp_path)
    yield found
    found.close()
