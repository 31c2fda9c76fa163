"""Programs for the tests that no Python package brings, from Debian: `python tests/debian.py PROGRAM ...`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence


class CannotInstall(Exception):
    """Why apt-get is of no help here."""


def install(packages: Sequence[str]) -> None:
    """Debian packages through apt-get, as root or by sudo without a password."""
    if shutil.which("apt-get") is None:
        raise CannotInstall("there is no apt-get")
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if as_root and shutil.which("sudo") is None:
        raise CannotInstall("this is neither root, nor is there sudo")
    apt = [*as_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    for step in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        done = subprocess.run([*apt, *step], capture_output=True, text=True)
        if done.returncode:
            raise CannotInstall(f"`apt-get {step[0]}` failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    """Nothing where the programs are; where they cannot be had, the tests that need them are skipped and say so."""
    missing = [program for program in sys.argv[1:] if shutil.which(program) is None]
    if missing:
        try:
            install(missing)
        except CannotInstall as why:
            sys.stderr.write(f"no {', '.join(missing)} ({why}); tests that need it will be skipped\n")


if __name__ == "__main__":
    main()
