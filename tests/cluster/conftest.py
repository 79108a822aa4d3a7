"""Three hosts for the tests here; what is missing is said by name."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts, missing


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three, each with an address, a name and a /dev/shm of its own."""
    lacking = missing()
    if lacking:
        message = f"did not run: {lacking}"
        if os.environ.get("CI") == "true":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    hosts = Hosts(3)
    yield hosts
    hosts.close()
