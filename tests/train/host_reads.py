"""Prelude of a rank that counts, by step, the values that its loop asks a tensor for: each would wait for a GPU."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from torch.overrides import TorchFunctionMode

from pretrain.errors import ExitCode
from pretrain.train import rank
from pretrain.train.build import Training
from pretrain.train.watch import Heartbeat

_READS = frozenset({"item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__"})
# The engine's own decision whether a step counts, and what ranks tell each other, which are host tensors.
_ELSEWHERE = ("/pretrain/engine/", "/deepspeed/")


class _Counted(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and not _is_elsewhere():
            self.count += 1
        return func(*args, **(kwargs or {}))


def _is_elsewhere() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _ELSEWHERE):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def install() -> None:
    """Writes reads by step (the step that ended with them) to the file HOST_READS at the end."""
    train, phase = rank.train, Heartbeat.phase
    counted, reads, seen = _Counted(), {}, [0]

    def counting(training: Training) -> ExitCode:
        with counted:
            code = train(training)
        with open(os.environ["HOST_READS"], "w") as file:
            json.dump(reads, file)
        return code

    def noted(self: Heartbeat, name: str, step: int, **more: Any) -> None:
        if name in ("data", "save", "validate", "done"):
            reads[step] = reads.get(step, 0) + counted.count - seen[0]
            seen[0] = counted.count
        phase(self, name, step, **more)

    rank.train = counting
    Heartbeat.phase = noted  # type: ignore[method-assign]
