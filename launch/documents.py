"""What a run has read: the documents behind a step, for `pretrain data explain` and the dashboard.

Takes a run directory and a step -> gives rows with their documents, by the data state of the newest checkpoint, so that
stages, skips and masked blocks are as the run had them. Read-only; needs no cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pretrain.errors import UserError

if TYPE_CHECKING:
    from pretrain.data.state import DataState
    from pretrain.rundir import RunDirectory

_MOST_CHARACTERS = 2000  # of a document's text in an answer for a page


def newest_data_state(directory: RunDirectory) -> DataState | None:
    """The data state of the newest whole checkpoint; None before the first one."""
    from pretrain.checkpoint import list_checkpoints
    from pretrain.checkpoint.files import read_manifest
    from pretrain.train.state import TrainingState

    for info in list_checkpoints(directory.checkpoints):
        if info.problem is None:
            body = read_manifest(directory.checkpoints, info.name).training_state
            return TrainingState.from_json(body).data
    return None


def documents_of_step(directory: RunDirectory, step: int, *, most_rows: int) -> dict[str, Any]:
    """The first rows that optimizer step `step` (from 1, as in metrics) was computed from.

    Args:
        most_rows: rows that are shown; the answer tells how many the step has.

    Raises:
        UserError: there is no such step in the run.
        DataError, StoreError: the run's data is not there any more, or is not what it was.
    """
    from pretrain.data.explain import explain_step

    config = directory.config()
    last = config.schedule.total_steps
    if not 1 <= step <= last:
        raise UserError(f"step={step} is not in this run. Its steps are 1 to {last}. Choose one of these.")
    found = explain_step(config, step - 1, state=newest_data_state(directory), most_rows=most_rows)
    rows = [item.to_json() for item in found]
    for row in rows:
        for part in row["documents"]:
            part["cut"] = len(part["text"]) > _MOST_CHARACTERS
            part["text"] = part["text"][:_MOST_CHARACTERS]
            part["source_text"] = part["source_text"] and part["source_text"][:_MOST_CHARACTERS]
    return {"step": step, "rows": rows, "rows_in_step": found[0].rows_in_step}
