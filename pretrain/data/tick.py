"""How a stage tells its progress: bytes of text and tokens done since the last call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Tick: TypeAlias = Callable[[int, int], None]
