"""How much of the package a small run needs: modules before the capture, and functions in all.

A reader who follows `qkscope run` through the code meets what is counted here. To list it:
`python tests/test_footprint.py STUDY OUT`.
"""

import inspect
import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

MODULES = 110  # imported before the first checkpoint is loaded
FUNCTIONS = 1400  # called, without lambdas and comprehensions; a third of them belong to lenses
PACKAGE = str(Path(__file__).parents[1] / "src/qkscope")


def footprint(study: str, out: str) -> tuple[list[str], list[str]]:
    """Modules of ours that are imported before the capture, and functions of ours that a run calls."""
    codes, before = set(), []

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            if code.co_name == "load_backbone" and not before:
                before.extend(name for name in sys.modules if name.split(".")[0] == "qkscope")
            codes.add(code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        from qkscope.cli.main import main

        assert main(["run", study, "--out", out]) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    functions = {
        f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"
        for code in codes
        if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")  # no class bodies
    }
    return before, sorted(functions)


@pytest.mark.slow
def test_a_small_run_needs_few_modules_and_functions(world, tmp_path):
    command = [sys.executable, __file__, world(), tmp_path / "out"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert any("collect_moments" in function for function in found["functions"])
    assert len(found["modules"]) < MODULES, Counter(name.split(".")[1] for name in found["modules"] if "." in name)
    assert len(found["functions"]) < FUNCTIONS, Counter(name.split("/")[1] for name in found["functions"])


if __name__ == "__main__":
    imported, called = footprint(*sys.argv[1:])
    sys.stdout.write(json.dumps({"modules": imported, "functions": called}))
