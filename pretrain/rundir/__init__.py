"""The run's directory is the run: its layout, config, journal, lease, requests and status.

Ranks and `launch` share it. Everything goes through `store/`; what is read back has a checksum.
"""

from pretrain.rundir.directory import Request, ResumeMode, RunDirectory, home_url, list_runs
from pretrain.rundir.journal import Event, EventKind, JournalWriter
from pretrain.rundir.lease import Lease
from pretrain.rundir.process import ProcessIdentity, identify_process, is_alive, this_process, wait_until_gone
from pretrain.rundir.records import DamagedFileError
from pretrain.rundir.status import RunState, RunStatus

__all__ = [
    "DamagedFileError",
    "Event",
    "EventKind",
    "JournalWriter",
    "Lease",
    "ProcessIdentity",
    "Request",
    "ResumeMode",
    "RunDirectory",
    "RunState",
    "RunStatus",
    "home_url",
    "identify_process",
    "is_alive",
    "list_runs",
    "this_process",
    "wait_until_gone",
]
