"""What the tests of the page share: one browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import browser, missing

WITHOUT = missing()


def pytest_runtest_setup() -> None:
    # In CI a missing browser is an error: there, `context` fails.
    if WITHOUT is not None and os.environ.get("CI") != "true":
        pytest.skip(WITHOUT)


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    assert WITHOUT is None, WITHOUT
    with browser(tmp_path_factory.mktemp("chromium")) as context:
        yield context
