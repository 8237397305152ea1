"""A browser of the Chromium family that loads nothing but what a page asks for."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
INSTALL = (
    f"no browser: none of {', '.join(NAMES)} is on the path; on Debian: "
    "apt-get install chromium-headless-shell"
)
QUIET = ("no-first-run", "disable-background-networking", "disable-component-update")
ARGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-sync"]
ARGS += [f"--{name}" for name in QUIET]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start one; SystemExit if there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise SystemExit(INSTALL)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        try:
            yield browser
        finally:
            browser.close()
