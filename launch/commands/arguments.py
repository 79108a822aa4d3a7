"""Kinds of values on the command line, for `type=` of argparse."""

from __future__ import annotations

import argparse

from pretrain.config.units import parse_count


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        count = parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
    if not isinstance(count, int) or count < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return count
