"""`control/submitted.json`: a run was handed to a cluster, and whoever trains it has not begun yet.

Between `pretrain submit` and its driver's lease the journal still ends as the run ended before. The file holds the
newest lease of that moment: a newer one, of whoever, makes it past, so that nobody has to delete it in time.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from pretrain.rundir.records import encode_record, read_record
from pretrain.store import NotFoundError, Store

_KEY = "control/submitted.json"


@dataclass(frozen=True, slots=True)
class Submission:
    """A run in the hands of a cluster.

    Attributes:
        job: what the cluster calls it.
        t: when it was submitted, seconds since 1970.
        lease: number of the run's newest lease then, 0 if there was none.
    """

    job: str
    t: float
    lease: int


def write_submission(store: Store, job: str, *, lease: int) -> None:
    """Raises StoreError."""
    store.put(_KEY, encode_record(asdict(Submission(job, time.time(), lease))))


def read_submission(store: Store) -> Submission | None:
    """The last submission, past or not; None if there never was one. Raises DamagedFileError or StoreError."""
    try:
        body = read_record(store, _KEY, "Delete that file: it only says that a submitted run is about to begin.")
    except NotFoundError:
        return None
    return Submission(str(body["job"]), float(body["t"]), int(body["lease"]))


def forget_submission(store: Store) -> None:
    """The cluster will not train it. Raises StoreError."""
    store.delete(_KEY)
