"""The lowest versions that pyproject.toml claims, as constraints for pip: `python tests/lowest.py`."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"

# torch alone is not at its claimed lowest: its wheels are on an index of their own, and of the builds for a CPU that
# index may offer one version only. What `make setup` installs is what is tested.
NOT_AT_ITS_LOWEST = {"torch"}


def requirements() -> list[str]:
    """What the package and its extras need; what only its tests and checks need is not claimed to users."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(each for name in sorted(extras) if name != "dev" for each in extras[name])]


def lowest(requirement: str) -> str:
    """`numpy>=2.0` to `numpy==2.0`."""
    found = re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement)
    if found is None:
        raise SystemExit(f"pyproject.toml: {requirement!r} does not claim a lowest version as `name>=1.2`")
    return f"{found[1]}=={found[2]}"


def main() -> None:
    """One line per requirement."""
    pins = [lowest(each) for each in requirements()]
    sys.stdout.write("".join(f"{pin}\n" for pin in pins if pin.split("==")[0] not in NOT_AT_ITS_LOWEST))


if __name__ == "__main__":
    main()
