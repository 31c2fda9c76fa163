"""How much memory this machine has left."""

from __future__ import annotations

import os
import re
from pathlib import Path

ENOUGH = 2**33  # what is assumed of a system that does not say


def free_memory() -> int:
    """Bytes that can be taken without anything being swapped or killed, as far as the system says."""
    limits = [_available(), _left_of_group()]
    return min((each for each in limits if each is not None), default=ENOUGH)


def _available() -> int | None:
    try:
        line = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(line[1]) * 1024 if line else None
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _left_of_group() -> int | None:
    """What a container's limit leaves."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        return None if limit == "max" else max(0, int(limit) - used + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):
        return None
