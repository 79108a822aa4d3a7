"""Checkpoints: flat fp32 ranges by parameter name, of any ranks and ZeRO stage, published last or not at all."""

from pretrain.checkpoint.average import average_weights, last_checkpoints, open_mean
from pretrain.checkpoint.copy import file_bytes, prepare_copy
from pretrain.checkpoint.holds import pin, reading, take_back, unpin
from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints, verify_checkpoint
from pretrain.checkpoint.memory import COPIES, MemoryCopy, MemoryTier
from pretrain.checkpoint.restore import Restored, restore
from pretrain.checkpoint.retention import Best, Retention, discard_after, prune
from pretrain.checkpoint.save import SaveHandle, save
from pretrain.checkpoint.start import Selection, Started, start_from
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
    "Selection",
    "Started",
    "StoredWeights",
    "average_weights",
    "diff_checkpoints",
    "discard_after",
    "file_bytes",
    "last_checkpoints",
    "list_checkpoints",
    "newest_checkpoint",
    "open_mean",
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
    "start_from",
    "take_back",
    "unpin",
    "verify_checkpoint",
    "weights_sha256",
]
