"""`run.yaml`: the resolved config of a run, as text that carries its own sha256.

The first line is a comment with the hash of all that follows, so that the file is also a config that
can be trained again under another name, and an edit or a flipped bit is found.
"""

from __future__ import annotations

import hashlib
import re

from pretrain.config import RunConfig, config_from_dict, dump_yaml
from pretrain.config.yaml_text import parse_yaml
from pretrain.errors import ConfigError
from pretrain.rundir.records import DamagedFileError, damaged
from pretrain.store import Store

CONFIG_KEY = "run.yaml"
_HEADER = "# sha256 "
_NOTE = "# The resolved config of this run. Change it with: pretrain resume RUN key=value\n"
_TOTAL_STEPS = re.compile(r"^schedule:\n(?: +.*\n)*? +total_steps: (\d+)$", re.MULTILINE)
_REMEDY = "Undo the change or restore it from a backup; to change a config use pretrain resume RUN key=value."


def encode_config(config: RunConfig) -> bytes:
    """The file of a config."""
    text = _NOTE + dump_yaml(config)
    return f"{_HEADER}{_sha256(text)}\n{text}".encode()


def read_total_steps(store: Store) -> int:
    """`schedule.total_steps` alone, without parsing the rest: a list of a thousand runs reads that of each.

    Raises:
        DamagedFileError: the file does not match its sha256.
        NotFoundError: there is none.
    """
    found = _TOTAL_STEPS.search(_checked_text(store))
    return int(found[1]) if found else read_config(store).schedule.total_steps


def read_config(store: Store) -> RunConfig:
    """The config in a run's directory.

    Raises:
        DamagedFileError: it does not match its sha256, or does not fit this version's schema.
        NotFoundError: there is none.
    """
    where = f"{store.url}/{CONFIG_KEY}"
    values, problems = parse_yaml(_checked_text(store), where)
    try:
        if problems or not isinstance(values, dict):
            raise ConfigError(problems or ["it is not a mapping"])
        return config_from_dict(values)
    except ConfigError as error:
        raise DamagedFileError(
            f"{where} does not fit this version of pretrain: {error} Use the version that wrote it."
        ) from None


def _checked_text(store: Store) -> str:
    """What follows the first line, which holds its sha256."""
    where = f"{store.url}/{CONFIG_KEY}"
    first, _, rest = store.get(CONFIG_KEY).decode("utf-8", errors="replace").partition("\n")
    if not first.startswith(_HEADER):
        raise damaged(where, "its first line does not hold its sha256", _REMEDY)
    if first.removeprefix(_HEADER) != _sha256(rest):
        raise damaged(where, "its content does not match the sha256 in its first line", _REMEDY)
    return rest


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
