"""Trackio: a local tracker with a page of its own (`trackio show`), in the folder that TRACKIO_DIR names.

Takes records -> one trackio run over all attempts. As with wandb the record of number i over all attempts is logged
under trackio's own count i, with `step` and `attempt` beside it, and an attempt first sends what trackio lacks of the
earlier ones: nothing is lost where a run goes back to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from pretrain.config.schema import RunConfig
from pretrain.errors import UserError
from pretrain.log import Log
from pretrain.metrics.history import records_before
from pretrain.metrics.queued import Numbered, QueuedSink, flatten
from pretrain.metrics.sinks import MetricsHome


def open_sink(config: RunConfig, home: MetricsHome, attempt: int, log: Log) -> QueuedSink:
    """See `sinks._TRACKERS`."""
    return QueuedSink("trackio", lambda records: _track(config, home, attempt, records), log=log)


def _track(config: RunConfig, home: MetricsHome, attempt: int, records: Iterator[Numbered]) -> None:
    try:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
    except ImportError:
        raise UserError(
            "metrics.trackio.project is set, but trackio is not installed. pip install 'pretrain[trackers]'"
        ) from None
    project = str(config.metrics.trackio.project)
    last = SQLiteStorage.get_max_step_for_run(project, home.name)
    known = 0 if last is None else last + 1
    run = trackio.init(
        project, home.name, config=config.model_dump(mode="json"), resume="allow", embed=False, auto_log_gpu=False,
        auto_log_cpu=False,
    )  # fmt: skip
    earlier = records_before(home.store, attempt)
    for count, (of_attempt, record) in enumerate(earlier[known:], start=known):
        run.log({**flatten(record), "attempt": of_attempt}, step=count)
    first = max(known, len(earlier))
    for number, record in records:
        run.log({**flatten(record), "attempt": attempt}, step=first + number)
    run.finish()
