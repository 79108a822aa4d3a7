"""What Weights & Biases keeps beside a run's records, by choice (`metrics.wandb.artifacts`).

Takes an open wandb run and the run's directory -> artifacts `NAME-config`, `NAME-tokenizer` and `NAME-checkpoint` (the
manifest of each durable checkpoint, with where it lies; no tensors), and `NAME-model` for what `pretrain checkpoint
export` wrote. Files are copied to `RUN/wandb/artifacts` first: offline, wandb reads them only when it is synced, and by
then a checkpoint may be pruned. Trouble with an artifact is one warning.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.log import Log
from pretrain.metrics.queued import first_line
from pretrain.metrics.sinks import MetricsHome
from pretrain.metrics.wandb_run import start_run, teardown
from pretrain.store import NotFoundError, make_scratch

LOOK_EVERY_S = 10.0
_CONFIG, _TOKENIZER, _MANIFEST = "run.yaml", "tokenizer.json", "MANIFEST.json"


class Artifacts:
    """Those of one attempt; for the thread that owns the wandb run alone."""

    def __init__(self, config: RunConfig, home: MetricsHome, log: Log) -> None:
        self._name, self._home, self._log = config.name, home, log
        self._wanted = set(config.metrics.wandb.artifacts)
        self._sent: set[str] = set()
        self._looked_at = -LOOK_EVERY_S

    def begin(self, run: Any) -> None:
        """Config and tokenizer, and the checkpoints that earlier attempts left."""
        for kind, key in (("config", _CONFIG), ("tokenizer", _TOKENIZER)):
            if kind in self._wanted:
                self._try(kind, lambda key=key, kind=kind: self._send(run, kind, key, self._home.store.get(key)))
        self.look(run)

    def look(self, run: Any, *, now: bool = False) -> None:
        """Sends manifests of checkpoints that are new; at most every `LOOK_EVERY_S` seconds, or `now`."""
        if "checkpoints" in self._wanted and (now or time.monotonic() - self._looked_at >= LOOK_EVERY_S):
            self._looked_at = time.monotonic()
            self._try("checkpoints", lambda: self._send_manifests(run))

    def _send_manifests(self, run: Any) -> None:
        store = self._home.checkpoints
        for name in sorted(set(store.names()) - self._sent):
            try:
                data = store.get(f"{name}/{_MANIFEST}")
            except NotFoundError:  # not published yet, or pruned already
                continue
            body = json.loads(data)["body"]
            size = sum(int(file["bytes"]) for file in body["files"])
            told = {"checkpoint": name, "step": body["step"], "bytes": size, "url": f"{store.url}/{name}"}
            self._send(run, "checkpoint", _MANIFEST, data, aliases=["latest", name], folder=name, **told)
            self._sent.add(name)

    def _send(
        self,
        run: Any,
        kind: str,
        file: str,
        data: bytes,
        *,
        aliases: list[str] | None = None,
        folder: str = ".",
        **told: Any,
    ) -> None:
        place = artifacts_root(self._home) / folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        artifact = _artifact(self._name, kind, told)
        artifact.add_file(str(place), name=file, policy="immutable", skip_cache=True)
        run.log_artifact(artifact, aliases=aliases)

    def _try(self, kind: str, send: Any) -> None:
        try:
            send()
        except Exception as error:
            self._wanted.discard(kind)
            self._log.warning(f"wandb gets no more artifacts of {kind} in this attempt: {first_line(error)}")


def send_export(config: RunConfig, home: MetricsHome, directory: Path, log: Log, **told: Any) -> None:
    """An exported model as the artifact `NAME-model` of the run's wandb run; its files stay where they are.

    Trouble ends in a warning: the export is there.
    """
    scratch = make_scratch("wandb")
    try:
        run = start_run(config, home, scratch=scratch, log=log)
        artifact = _artifact(config.name, "model", told)
        artifact.add_dir(str(directory.absolute()), policy="immutable", skip_cache=True)
        run.log_artifact(artifact)
        run.finish()
    except Exception as error:
        log.warning(f"wandb has not got the export: {first_line(error)}. {directory} is there")
    finally:
        teardown()
        shutil.rmtree(scratch, ignore_errors=True)


def _artifact(name: str, kind: str, told: dict[str, Any]) -> Any:
    import wandb

    return wandb.Artifact(f"{name}-{kind}", type=kind, metadata={"run": name, **told})


def artifacts_root(home: MetricsHome) -> Path:
    """Where copies lie: beside wandb's own files."""
    return (home.store.local_path("") or Path()).absolute() / "wandb" / "artifacts"
