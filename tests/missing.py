"""What a machine lacks for a test: said by name, and with CI=true a failure."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def did_not_run(why: str) -> NoReturn:
    """Ends the test as skipped, in continuous integration as failed: nothing may be left out there unseen."""
    message = f"did not run: {why}"
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
