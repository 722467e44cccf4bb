"""A real browser without a window, for the tests of the page."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

HOW_TO_INSTALL = "apt-get install -y chromium chromium-driver"


def _found(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Chromium, driven by selenium. In CI it must be there; elsewhere its tests are skipped without
    it.
    """
    chromium, driver = (
        _found("chromium", "chromium-browser", "google-chrome"),
        _found("chromedriver"),
    )
    if chromium is None or driver is None:
        missing = f"no chromium with a chromedriver is installed: {HOW_TO_INSTALL}"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    folder: Path = tmp_path_factory.mktemp("chromium")
    for argument in (
        "--headless=new",
        "--no-sandbox",  # its own needs a kernel that containers rarely allow; the pages are ours
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--force-device-scale-factor=1",
        "--hide-scrollbars",
        "--window-size=1360,900",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driven = webdriver.Chrome(options=options, service=Service(driver))
    driven.set_page_load_timeout(60)
    yield driven
    driven.quit()
