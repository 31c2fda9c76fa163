"""The package is typed. A test, so that it is checked beside the others and not before them."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_mypy_finds_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
