"""A small trained tokenizer, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.data.tokenizer import Tokenizer, train_bpe
from tests.data_build.corpus import WORDS


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe([" ".join(WORDS) + " naïve <|pad|>\n"] * 3, 300).save(path)
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: str) -> Tokenizer:
    return Tokenizer.load(tokenizer_path)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A directory to put input files in."""
    directory = tmp_path / "texts"
    directory.mkdir()
    return directory
