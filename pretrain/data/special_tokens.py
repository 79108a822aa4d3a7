"""Control tokens that objectives need, by the names that tokenizers give them.

Takes a tokenizer's special ids by name -> gives the ids of sentinels, fill-in-the-middle markers and modes, or
an error that names what is missing and the option of `pretrain tokenizer train` that adds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pretrain.errors import DataError

SENTINEL_NAME = "<extra_id_{}>"  # as T5's
# Ours first, then spellings of others: StarCoder; for the modes those of the published UL2.
_FIM_NAMES = (
    ("<|fim_prefix|>", "<fim_prefix>"),
    ("<|fim_suffix|>", "<fim_suffix>"),
    ("<|fim_middle|>", "<fim_middle>"),
)
_MODE_NAMES = {"R": ("<|mode_r|>", "[NLU]"), "S": ("<|mode_s|>", "[S2S]"), "X": ("<|mode_x|>", "[NLG]")}
FIM_TOKENS = tuple(names[0] for names in _FIM_NAMES)
MODE_TOKENS = tuple(names[0] for names in _MODE_NAMES.values())


@dataclass(frozen=True, slots=True)
class FimMarkers:
    """Ids in front of the three parts."""

    prefix: int
    suffix: int
    middle: int


@dataclass(frozen=True, slots=True)
class ExtraTokens:
    """Special tokens that a trained tokenizer gets beside end, padding and start."""

    sentinels: int = 0
    fill_in_the_middle: bool = False
    modes: bool = False

    def names(self) -> tuple[str, ...]:
        """In the order of their ids."""
        if self.sentinels < 0:
            raise DataError(f"sentinels={self.sentinels} is negative. It is a count. Give --sentinels 100 as T5 has.")
        fim, modes = FIM_TOKENS * self.fill_in_the_middle, MODE_TOKENS * self.modes
        return (*fim, *modes, *map(SENTINEL_NAME.format, range(self.sentinels)))


def sentinel_ids(special_ids: Mapping[str, int], count: int, why: str) -> tuple[int, ...]:
    """Ids of the first `count` sentinels.

    Raises:
        DataError: there are fewer; `why` says what needs them.
    """
    names = [SENTINEL_NAME.format(number) for number in range(count)]
    have = next((number for number, name in enumerate(names) if name not in special_ids), count)
    if have < count:
        raise DataError(
            f"the tokenizer has {have} sentinels ({SENTINEL_NAME.format(0)}, …), and {why} needs {count}. Each hidden "
            f"span of a document has its own. Train one with `pretrain tokenizer train … --sentinels {count}` and "
            "build the data with it, or set a shorter batch.sequence_length."
        )
    return tuple(special_ids[name] for name in names)


def all_sentinels(special_ids: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of as many sentinels as there are, in their order; none in most tokenizers."""
    names = itertools.takewhile(special_ids.__contains__, map(SENTINEL_NAME.format, itertools.count()))
    return tuple(special_ids[name] for name in names)


def fim_markers(special_ids: Mapping[str, int]) -> FimMarkers:
    """The three markers. Raises DataError where one is missing."""
    return FimMarkers(*(_first(special_ids, names, "--fill-in-the-middle") for names in _FIM_NAMES))


def mode_id(special_ids: Mapping[str, int], mode: str) -> int:
    """The token that names a denoising task. Raises DataError where it is missing."""
    return _first(special_ids, _MODE_NAMES[mode], "--modes")


def _first(special_ids: Mapping[str, int], names: Sequence[str], option: str) -> int:
    for name in names:
        if name in special_ids:
            return special_ids[name]
    raise DataError(
        f"the tokenizer has no special token {' or '.join(names)}. The objective marks parts of a document with it. "
        f"Train a tokenizer with `pretrain tokenizer train … {option}` and build the data with it."
    )
