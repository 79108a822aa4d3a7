"""Three hosts for the tests here; what is missing is said by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts, missing
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
