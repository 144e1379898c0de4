"""What the tests in real Chromium share. A file at a time: Playwright's event loop runs in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Playwright

    from tests.support.extension import Sites


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    from tests.support.extension import https_sites

    with https_sites(tmp_path_factory.mktemp("sites")) as served:
        yield served
