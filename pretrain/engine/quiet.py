"""Loads DeepSpeed the way this product uses it: no compiler at start, no noise, no silent extras."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch

# What `deepspeed.initialize` imports when it is first called: 2 to 3 s of a rank's start (measured).
_IMPORTED_LATE = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "torch._dynamo",
)


def load_deepspeed(device: torch.device) -> ModuleType:
    """Imports deepspeed for `device` and binds it to the process group that is already up.

    Its shared-memory op is switched off: it would be compiled at start (30 s and a compiler) and serves
    inference only. Its log goes to stderr, errors only.
    """
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it, also in a process that nobody launched
    deepspeed = _import_deepspeed()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with silenced():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def import_ahead() -> None:
    """Imports all that an engine will need, for a process that trains later; no device, no process group."""
    _import_deepspeed()
    with silenced():
        for module in _IMPORTED_LATE:
            importlib.import_module(module)


def _import_deepspeed() -> ModuleType:
    # Old calls inside DeepSpeed; no user of this project can act on them.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"deepspeed(\.|$)")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed(\.|$)")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"deepspeed(\.|$)")
    with silenced():
        import deepspeed
        import deepspeed.comm

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Swallows what is printed to stdout inside, which belongs to the commands' own output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
