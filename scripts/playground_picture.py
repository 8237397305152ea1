"""A picture of the playground of a running server, for the documents.

    specdec serve demo --draft demo -k 4
    python -m scripts.playground_picture http://127.0.0.1:8000 docs/playground.png

It needs the extra `test-browser` and a browser of the Chromium family.
"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
INSTALL = (
    f"no browser: none of {', '.join(NAMES)} is on the path; on Debian: "
    "apt-get install chromium-headless-shell"
)
QUIET = ("no-first-run", "disable-background-networking", "disable-component-update")
ARGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-sync"]
ARGS += [f"--{name}" for name in QUIET]
SIZE = {"width": 1360, "height": 840}


@contextmanager
def open_browser() -> Iterator[Browser]:
    """One that loads nothing but what a page asks for; SystemExit if there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise SystemExit(INSTALL)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        try:
            yield browser
        finally:
            browser.close()


def compare(page: Page, prompt: str, **options: object) -> None:
    """Let the page write a text with speculation and without, and wait for its verdict."""
    page.get_by_label("Compare").check(force=True)
    for name, value in options.items():
        page.fill(f"#{name}", str(value))
    page.fill("#prompt", prompt)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".verdict")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the server")
    parser.add_argument("file", type=Path, help="a PNG")
    parser.add_argument("--prompt", default="class Stack:")
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with open_browser() as browser:
        page = browser.new_page(viewport=SIZE, color_scheme=args.theme)
        page.goto(args.url)
        page.get_by_label("Completion").check(force=True)
        sampling = {"temperature": args.temperature, "seed": args.seed}
        compare(page, args.prompt, max_tokens=args.max_tokens, **sampling)
        page.screenshot(path=args.file)


if __name__ == "__main__":
    main()
