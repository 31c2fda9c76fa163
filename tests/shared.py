"""What takes seconds to make is made once, in whichever test process needs it first; the others wait and read it.

`conftest.py` makes the folder before the test processes start, and removes it after they have ended. Outside of pytest
there is no such folder, and everybody makes their own.
"""

import atexit
import fcntl
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = "QKSCOPE_TESTS_SHARED"  # the environment variable that names the folder


@functools.cache
def _folder() -> Path:
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    made = tempfile.mkdtemp(prefix="qkscope-tests-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, which `make` filled when it was new. Nobody changes it afterwards.

    Where `make` fails, or its process dies, the next who needs the folder makes it anew.
    """
    place = _folder() / re.sub(r"\W+", "-", name)
    made = Path(f"{place}.made")
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when the file is closed, or its process dies
        if not made.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            made.touch()
    return place
