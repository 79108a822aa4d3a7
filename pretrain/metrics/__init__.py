"""What a run measures: definitions with units, sinks, throughput and MFU, progress line, loss plot."""

from pretrain.metrics.history import history, read_attempts
from pretrain.metrics.plot import plot_losses
from pretrain.metrics.progress import format_progress
from pretrain.metrics.sinks import JsonlSink, Sink, open_sinks
from pretrain.metrics.throughput import Rates, Throughput

__all__ = [
    "JsonlSink",
    "Rates",
    "Sink",
    "Throughput",
    "format_progress",
    "history",
    "open_sinks",
    "plot_losses",
    "read_attempts",
]
