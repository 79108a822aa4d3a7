"""Numbers and flags as people write them: `1e-4`, `5e8`, `off`, `30m`, `2GiB`.

Each type is a pydantic annotation. YAML and the command line hand over text or numbers; what a
person cannot have meant (`010`, `12:30`, `1.5` for a count) is refused, never guessed.
"""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?")
_DURATIONS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1000))
}


def _parse_number(value: Any) -> int | float:
    if isinstance(value, bool):
        raise ValueError("is a flag. The rule: a number")
    if isinstance(value, int | float):
        number = value
    elif isinstance(value, str):
        text = value.strip()
        if not re.search(r"\d", text) or not _NUMBER.fullmatch(text):
            raise ValueError("is not a number. Write 1000, 1e3 or 0.001")
        if re.fullmatch(r"[+-]?0\d+", text):
            raise ValueError("has a leading zero. Write it without, octal is not accepted")
        text = text.replace("_", "")
        number = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    else:
        raise ValueError(f"is {_a(value)}. The rule: a number")
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("is not finite. Write a finite number")
    return number


def _a(value: Any) -> str:
    names = {
        "NoneType": "empty",
        "list": "a list",
        "dict": "a mapping",
        "bool": "a flag",
        "int": "a number",
        "float": "a number",
    }
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def parse_count(value: Any) -> int:
    """A whole number: `1000`, `1e3`, `5e8`.

    Raises:
        ValueError: a fraction, text that is no number, a leading zero, a flag.
    """
    number = _parse_number(value)
    if number != int(number):
        raise ValueError("is not a whole number. Write 1000 or 1e3")
    return int(number)


def parse_real(value: Any) -> float:
    """A finite real number. Raises ValueError on anything else."""
    try:
        return float(_parse_number(value))
    except OverflowError:
        raise ValueError("is too large. Write a number below 1e308") from None


def parse_flag(value: Any) -> bool:
    """true/false, on/off, yes/no, as YAML 1.1 meant them. Raises ValueError on anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "on", "yes"):
        return True
    if isinstance(value, str) and value.strip().lower() in ("false", "off", "no"):
        return False
    raise ValueError("is not a flag. Write true or false (on, off, yes, no also work)")


def parse_text(value: Any) -> str:
    """Text; a number or flag that YAML recognised where a name was meant is refused, not guessed."""
    if isinstance(value, str):
        return value
    if value is None:
        raise ValueError("is empty. The rule: text. Write some or leave the key out")
    raise ValueError(f"is {_a(value)}, where text is wanted. Put it in quotes")


def mask_password(text: str) -> str:
    """The text with *** for the user and password of a URL in it."""
    return re.sub(r"://[^/@\s]*:[^/@\s]*@", "://***@", text)


def parse_location(value: Any) -> str:
    """A path, made absolute against the current directory and the home of `~`; a URL stays as it is.

    Raises:
        ValueError: not text, empty, or a URL with a password.
    """
    text = parse_text(value)
    if not text:
        raise ValueError("is empty. Write a path or a URL")
    if mask_password(text) != text:
        raise ValueError(
            "holds a password. Configs are copied into run directories and shown. Take it out of the URL and set it in "
            "the environment (for s3://, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or in the store's own file"
        )
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def parse_seconds(value: Any) -> float:
    """A duration in seconds: `30`, `"30s"`, `"5m"`, `"2h"`. Raises ValueError on anything else."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([\d._eE+-]+)\s*(ms|s|m|h|d)\s*", value)
        if match:
            return parse_real(match[1]) * _DURATIONS_S[match[2]]
    try:
        return parse_real(value)
    except ValueError:
        raise ValueError("is not a duration. Write seconds or 30s, 5m, 2h") from None


def parse_bytes(value: Any) -> int:
    """A size in bytes: `1000000`, `"24MB"`, `"2GiB"`. Raises ValueError on anything else."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([\d._eE+]+)\s*([KMGT]?i?B?)\s*", value)
        if match and match[2] in _SIZES:
            size = parse_real(match[1]) * _SIZES[match[2]]
            if size != int(size):
                raise ValueError("is not a whole number of bytes")
            return int(size)
    try:
        return parse_count(value)
    except ValueError:
        raise ValueError("is not a size. Write bytes or 24MB, 2GiB") from None


Count = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]
PositiveInt = Annotated[int, BeforeValidator(parse_count), Field(ge=1)]
Real = Annotated[float, BeforeValidator(parse_real)]
PositiveReal = Annotated[float, BeforeValidator(parse_real), Field(gt=0)]
NonNegativeReal = Annotated[float, BeforeValidator(parse_real), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(parse_real), Field(ge=0, le=1)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Port = Annotated[int, BeforeValidator(parse_count), Field(ge=0, le=65535)]
Flag = Annotated[bool, BeforeValidator(parse_flag)]
Text = Annotated[str, BeforeValidator(parse_text), Field(min_length=1)]
Location = Annotated[str, BeforeValidator(parse_location)]
