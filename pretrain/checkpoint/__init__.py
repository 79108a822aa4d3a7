"""Checkpoints: flat fp32 ranges by parameter name, of any ranks and ZeRO stage, published last or not at all."""

from pretrain.checkpoint.listing import CheckpointInfo, list_checkpoints, verify_checkpoint
from pretrain.checkpoint.memory import COPIES, MemoryCopy, MemoryTier
from pretrain.checkpoint.restore import Restored, restore
from pretrain.checkpoint.retention import prune
from pretrain.checkpoint.save import SaveHandle, save
from pretrain.checkpoint.weights import (
    Difference,
    diff_checkpoints,
    newest_checkpoint,
    read_weights,
    weights_sha256,
)

__all__ = [
    "COPIES",
    "CheckpointInfo",
    "Difference",
    "MemoryCopy",
    "MemoryTier",
    "Restored",
    "SaveHandle",
    "diff_checkpoints",
    "list_checkpoints",
    "newest_checkpoint",
    "prune",
    "read_weights",
    "restore",
    "save",
    "verify_checkpoint",
    "weights_sha256",
]
