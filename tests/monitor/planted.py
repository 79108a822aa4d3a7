"""A rank of a run that goes wrong in known ways: `python -m tests.monitor.planted`, as the agents' rank command.

takes → the variable PLANTED, JSON: `stall` (step, seconds: rank 0's rows come late), `slow_s` (rank 1's forward passes
take so much longer), `kill` (step at which rank 1 of the first attempt kills itself), `pace_s` (of every step of later
attempts, so that they can be looked at); and GUILTY as in tests/train/guilty: a spike.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from pretrain.__main__ import main
from pretrain.data.loader import Loader, StepData
from pretrain.model.decoder import Decoder
from tests.train import guilty


def install(rank: int, attempt: int, plan: dict[str, Any]) -> None:
    """Plants the faults of this rank."""
    guilty.install()
    read, forward = Loader.read, Decoder.forward
    stall_step, stall_s = plan["stall"]

    def late(self: Loader, step: int, state: Any, *more: Any) -> StepData:
        if rank == 1 and attempt == 1 and step + 1 == plan["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and attempt == 1 and step + 1 == stall_step:
            time.sleep(stall_s)
        return read(self, step, state, *more)

    def slow(self: Decoder, batch: Any) -> Any:
        if self.training:
            time.sleep((plan["slow_s"] if rank == 1 else 0.0) + (plan["pace_s"] if attempt > 1 else 0.0))
        return forward(self, batch)

    Loader.read = late  # type: ignore[method-assign]
    Decoder.forward = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    install(int(os.environ["RANK"]), int(sys.argv[sys.argv.index("--attempt") + 1]), json.loads(os.environ["PLANTED"]))
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
