"""The wandb run of a run directory: one id over all attempts, online or offline, opened without a question.

Takes a config and the run's directory -> an open wandb run. wandb is imported here and nowhere else.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from pathlib import Path
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.errors import UserError
from pretrain.log import Log
from pretrain.metrics.queued import first_line
from pretrain.metrics.sinks import MetricsHome
from pretrain.store import NotFoundError, Store, UnsupportedError

ID_KEY = "metrics/wandb.json"
INIT_TIMEOUT_S = 15.0


def start_run(
    config: RunConfig, home: MetricsHome, *, scratch: Path, init_timeout_s: float = INIT_TIMEOUT_S, log: Log
) -> Any:
    """The wandb run of this directory, with `step` as the x axis; offline, with a warning, where no server answers.

    Args:
        scratch: folder for what wandb leaves lying about.
    """
    wandb_id = obtain_id(home.store)
    mode = config.metrics.wandb.mode
    try:
        run = _init(config, home, wandb_id, mode, scratch, init_timeout_s)
    except BaseException as error:
        if mode != "online":
            raise
        teardown()  # the service keeps a failed id "in use"
        run = _init(config, home, wandb_id, "offline", scratch, init_timeout_s)
        log.warning(
            f"wandb is offline for this attempt: {first_line(error)}. "
            f"Send its records later with: wandb sync {run.settings.sync_dir}"
        )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _init(config: RunConfig, home: MetricsHome, wandb_id: str, mode: str, scratch: Path, init_timeout_s: float) -> Any:
    wandb = _import_into(scratch)
    if mode == "online" and not wandb.login(prompt=False, verify=False):  # init would ask a person at the terminal
        raise UserError("no API key is configured (wandb login, or WANDB_API_KEY)")
    root = home.store.local_path("")
    settings = wandb.Settings(
        init_timeout=init_timeout_s,
        console="off",  # the rank's output is the agent's
        disable_git=True,
        silent=True,
        root_dir=str(root) if root else ".",
    )
    choice = config.metrics.wandb
    return wandb.init(
        mode=mode,
        project=choice.project,
        entity=choice.entity,
        id=wandb_id,
        resume="allow",
        name=config.name,
        config=config.model_dump(mode="json"),
        settings=settings,
    )


def obtain_id(store: Store) -> str:
    """The wandb id of this run directory, drawn at the first call and the same ever after.

    Raises:
        StoreError: the file cannot be read or written.
    """
    drawn = uuid.uuid4().hex[:16]
    body = json.dumps({"id": drawn}).encode()
    try:
        if store.put_if_absent(ID_KEY, body):
            return drawn
    except UnsupportedError:  # only the holder of the lease writes metrics, so looking first is enough
        try:
            store.get(ID_KEY)
        except NotFoundError:
            store.put(ID_KEY, body)
            return drawn
    return str(json.loads(store.get(ID_KEY))["id"])


def _import_into(scratch: Path) -> Any:
    """wandb, which makes temporary folders when it is imported and removes them only at an orderly exit of Python."""
    before, tempfile.tempdir = tempfile.tempdir, str(scratch)
    try:
        import wandb
    finally:
        tempfile.tempdir = before
    return wandb


def teardown() -> None:
    """Ends wandb's service process."""
    try:
        import wandb

        wandb.teardown()
    except BaseException:
        return  # nothing is left to end
