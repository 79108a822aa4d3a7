"""Checkpoints: flat fp32 ranges by parameter name, of any ranks and ZeRO stage, published last or not at all."""

from pretrain.checkpoint.copy import prepare_copy
from pretrain.checkpoint.holds import pin, reading, unpin
from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints, verify_checkpoint
from pretrain.checkpoint.memory import COPIES, MemoryCopy, MemoryTier
from pretrain.checkpoint.restore import Restored, restore
from pretrain.checkpoint.retention import Best, Retention, discard_after, prune
from pretrain.checkpoint.save import SaveHandle, save
from pretrain.checkpoint.weights import (
    Difference,
    StoredWeights,
    diff_checkpoints,
    newest_checkpoint,
    open_verified,
    open_weights,
    read_state,
    read_weights,
    weights_sha256,
)

__all__ = [
    "COPIES",
    "Best",
    "CheckpointInfo",
    "Difference",
    "MemoryCopy",
    "MemoryTier",
    "Restored",
    "Retention",
    "SaveHandle",
    "StoredWeights",
    "diff_checkpoints",
    "discard_after",
    "list_checkpoints",
    "newest_checkpoint",
    "open_verified",
    "open_weights",
    "pin",
    "prepare_copy",
    "prune",
    "read_state",
    "read_weights",
    "reading",
    "restore",
    "save",
    "unpin",
    "verify_checkpoint",
    "weights_sha256",
]
