"""No test of this folder waits for ever."""

import faulthandler
from collections.abc import Iterator

import pytest

SECONDS = 60


@pytest.fixture(autouse=True)
def _no_waiting_for_ever() -> Iterator[None]:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
