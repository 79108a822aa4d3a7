"""Files that a command was asked to write. Those of a run are written by its store instead."""

from __future__ import annotations

from pathlib import Path

from pretrain.errors import UserError


def write_output(option: str, path: str | Path, content: bytes | str) -> None:
    """Writes the file that `option` names, with the folders that it needs.

    Raises:
        UserError: it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(
            f"{option}={path} cannot be written: {error.strerror}. "
            "It must be a file in a folder that can be written to."
        ) from None
