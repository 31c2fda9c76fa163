"""The browser that opens the page in tests: where it is, how it starts, and how to get it where there is none."""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from debian import CannotInstall, install

# The headless shell comes first: it is the same engine without the windows, which take as long as the pages.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGES = NAMES[:2]  # of Debian, the first that there is
FONTS = "fonts-dejavu-core"  # without any font, text has no width and nothing can be measured
ADVICE = (
    "install Chromium (Debian: `apt-get install chromium-headless-shell`) or set QKSCOPE_CHROMIUM to the path of one"
)

# The sandbox needs rights that containers lack, and the tests open only our own pages. The rest keeps Chromium from
# reaching for the network by itself.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)

AXE = Path(__file__).parents[1] / ".cache" / "node" / "node_modules" / "axe-core" / "axe.min.js"


class BrowserMissing(Exception):
    """There is nothing to open a page with; the message says what to do."""


def find_chromium() -> str:
    """The path of the browser: the one that QKSCOPE_CHROMIUM names, else the first that PATH has."""
    chosen = os.environ.get("QKSCOPE_CHROMIUM")
    if chosen:
        if not os.access(chosen, os.X_OK) or not Path(chosen).is_file():
            raise BrowserMissing(f"QKSCOPE_CHROMIUM is {chosen!r}, which is no program: {ADVICE}")
        return chosen
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise BrowserMissing(f"no {', '.join(NAMES)} in PATH: {ADVICE}")
    return found


def axe_script() -> Path:
    """The accessibility checker, to be added to an open page."""
    if not AXE.is_file():
        raise BrowserMissing(f"{AXE} is not there: run `make npm`")
    return AXE


def main() -> None:
    """What `make browser` runs: nothing where there is a browser."""
    try:
        find_chromium()
    except BrowserMissing as missing:
        if os.environ.get("QKSCOPE_CHROMIUM"):
            sys.exit(f"make browser: {missing}")
        try:
            _install_one()
            find_chromium()
        except CannotInstall as why:
            sys.exit(f"make browser: no browser, and none can be installed ({why}): {ADVICE}")
        except BrowserMissing as failed:
            sys.exit(f"make browser: {failed}")


def _install_one() -> None:
    """The first package that can be installed; older releases lack some."""
    for package in PACKAGES[:-1]:
        with suppress(CannotInstall):
            return install((package, FONTS))
    return install((PACKAGES[-1], FONTS))


if __name__ == "__main__":
    main()
