"""Event files for TensorBoard, in the run's directory: `tensorboard --logdir RUN/tensorboard`.

Takes records -> one folder per attempt, so that steps which a later attempt did again are a line of their own there and
none is lost. An event is flushed with its record. The package `tensorboard` alone is needed, no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.errors import UserError
from pretrain.log import Log
from pretrain.metrics.queued import Numbered, QueuedSink, flatten
from pretrain.metrics.sinks import MetricsHome


def open_sink(config: RunConfig, home: MetricsHome, attempt: int, log: Log) -> QueuedSink:
    """See `sinks._TRACKERS`."""
    return QueuedSink("tensorboard", lambda records: _track(home, attempt, records), log=log)


def _track(home: MetricsHome, attempt: int, records: Iterator[Numbered]) -> None:
    folder = home.store.local_path(f"tensorboard/attempt-{attempt:03d}")
    if folder is None:
        raise UserError(
            f"metrics.tensorboard=true with the run in {home.store.url}. Event files are written to a local directory. "
            "Leave it out; the JSON lines have all."
        )
    writer = _writer(folder)
    try:
        for _, record in records:
            writer.add_event(_event(record))
            writer.flush()
    finally:
        writer.close()


def _writer(folder: Path) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise UserError(
            "metrics.tensorboard=true, but tensorboard is not installed. pip install 'pretrain[trackers]'"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    return EventFileWriter(str(folder), flush_secs=3600)


def _event(record: dict[str, Any]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=name, simple_value=value)
        for name, value in flatten(record).items()
        if name not in ("step", "t") and isinstance(value, int | float)
    ]
    return Event(wall_time=float(record.get("t") or 0.0), step=record["step"], summary=Summary(value=values))
