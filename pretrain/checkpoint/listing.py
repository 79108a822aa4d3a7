"""What checkpoints there are, and whether one is good.

takes -> store of a run's checkpoints; gives -> infos, newest first, and the problems of one. Offline:
no engine, no process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from pretrain.checkpoint.digests import num_threads
from pretrain.checkpoint.files import content_problem, read_manifest, size_problem
from pretrain.checkpoint.format import FileEntry, Manifest, parse_name
from pretrain.checkpoint.holds import PIN_FILE, SET_ASIDE_FILE, reading, why_set_aside
from pretrain.errors import CheckpointError, PretrainError
from pretrain.rundir.records import read_record
from pretrain.store import NotFoundError, Store


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A folder that bears a checkpoint's name.

    Attributes:
        problem: why it does not count; None when its manifest is whole and all sizes match.
        pinned: kept until it is unpinned.
        validation: metrics measured at its step, by source; empty when none were.
    """

    UNFINISHED: ClassVar[str] = "no manifest: it was never published"

    name: str
    step: int
    attempt: int
    ranks: int | None
    bytes: int | None
    problem: str | None
    pinned: bool = False
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)

    def metric(self, source: str, metric: str) -> float | None:
        """A validation metric at its step; None where it was not measured or is no number."""
        value = self.validation.get(source, {}).get(metric)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def list_checkpoints(store: Store, progress: Callable[[], None] = lambda: None) -> list[CheckpointInfo]:
    """All of them, newest (largest attempt, then step) first; looks at sizes, reads no tensors.

    Args:
        progress: called for each file that is looked at.

    Raises:
        StoreError: the store cannot be listed.
    """
    named = [(parse_name(name), name) for name in store.names()]
    found = sorted(((order, name) for order, name in named if order), reverse=True)
    return [_inspect(store, name, attempt, step, progress) for (attempt, step), name in found]


def verify_checkpoint(store: Store, name: str, *, sidecars: bool = True) -> list[str]:
    """Problems of a checkpoint after reading and hashing every byte; an empty list means it is good.

    Args:
        sidecars: look at the files too that only the save itself read.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not store.names(name):
        names = ", ".join(info.name for info in list_checkpoints(store)) or "none"
        raise CheckpointError(f"checkpoint={name} does not exist in {store.url}. There are: {names}. Name one of them.")
    manifest = _manifest(store, name)
    if isinstance(manifest, str):
        return [manifest]
    with reading(store, name, "verify"):
        found = [problem for file in manifest.files if (problem := content_problem(store, name, file, num_threads()))]
        return [*found, *(_sidecar_problems(store, name, manifest) if sidecars else [])]


def _sidecar_problems(store: Store, name: str, manifest: Manifest) -> list[str]:
    """Sidecars that are there and do not say what the manifest says. They served the save only; their disk is bad."""
    problems = []
    for file in manifest.files:
        sidecar = f"{name}/{file.name.removesuffix('.safetensors')}.json"
        try:
            body = read_record(store, sidecar, "It is not needed any more.")
            wrong = body.get("save_id") == manifest.save_id and FileEntry.from_json(body) != file
        except NotFoundError:
            continue
        except (PretrainError, KeyError, TypeError, ValueError):
            wrong = True
        if wrong:
            problems.append(f"{sidecar.partition('/')[2]} is not what was written")
    return problems


def _inspect(store: Store, name: str, attempt: int, step: int, progress: Callable[[], None]) -> CheckpointInfo:
    progress()
    entries = store.names(name)
    pinned, manifest = PIN_FILE in entries, _manifest(store, name)
    if isinstance(manifest, str):
        return CheckpointInfo(name, step, attempt, None, None, manifest, pinned)
    problems = []
    for file in manifest.files:
        problem = size_problem(store, name, file)
        problems += [problem] if problem else []
        progress()
    if SET_ASIDE_FILE in entries:
        problems.append(f"set aside: {why_set_aside(store, name)}")
    ranks, validation = manifest.origin.get("ranks"), manifest.origin.get("validation", {})
    return CheckpointInfo(
        name, step, attempt, ranks, manifest.total_bytes, "; ".join(problems) or None, pinned, validation
    )


def _manifest(store: Store, name: str) -> Manifest | str:
    """The manifest, or why there is none to use."""
    try:
        return read_manifest(store, name)
    except NotFoundError:
        return CheckpointInfo.UNFINISHED
    except CheckpointError as error:
        return str(error)
