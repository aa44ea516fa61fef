"""Fixtures of the tokenizer tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/paths.py


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    import transformers

    transformers.logging.set_verbosity_error()
    monkeypatch.setenv("CUFORMERS_QUIET", "1")


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    from tokenizer_folders import write_folders

    return write_folders(tmp_path_factory.mktemp("tokenizers"))
