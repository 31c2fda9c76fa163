"""Forks of a process that has imported much are what a new Python would be: descriptors, folder, variables, end."""

import json
import os
import signal
import subprocess

import pytest

import template

ABOUT = """
import json, os, signal, sys
imported = "wave" in sys.modules
main = (__name__, sorted(set(globals()) & {"__file__", "template", "serve"}), sys.argv)
usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler and signal.getsignal(signal.SIGCHLD) == 0
told = dict(imported=imported, main=main, usual=usual, folder=os.getcwd(), word=os.environ.get("WORD"))
print(json.dumps({**told, "read": sys.stdin.readline(), "child": os.system("exit 3")}))
print("told", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    running = template.start(folder, "wave")
    yield folder / template.LAUNCHER
    running.communicate()
    assert running.returncode == 0


def test_a_fork_is_what_a_new_python_would_be_but_has_imported_already(launcher, tmp_path):
    asked = {"input": "a line\n", "cwd": tmp_path, "env": {**os.environ, "WORD": "heard"}, "text": True}
    found = subprocess.run([launcher, "-u", "-c", ABOUT], capture_output=True, check=True, **asked)
    assert json.loads(found.stdout) == {
        "imported": True, "main": ["__main__", [], ["-c"]], "usual": True, "folder": str(tmp_path), "word": "heard",
        "read": "a line\n", "child": 3 << 8,
    }  # fmt: skip
    assert found.stderr == "told\n"


def test_other_descriptors_keep_their_numbers(launcher):
    read, write = os.pipe()
    code = f"import os; os.write({write}, b'through the pipe')"
    subprocess.run([launcher, "-c", code], check=True, pass_fds=[write])
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"through the pipe"  # and nobody holds the other end


def test_the_end_of_a_fork_is_seen_however_it_ends(launcher):
    code = f"import os; print('here', flush=True); os.kill(os.getpid(), {signal.SIGKILL})"
    assert subprocess.run([launcher, "-c", code], capture_output=True, check=False).stdout == b"here\n"


def test_forks_do_not_share_what_they_change(launcher):
    code = "import wave; print(hasattr(wave, 'mark')); wave.mark = 1"
    told = [subprocess.run([launcher, "-c", code], capture_output=True, check=True).stdout for _ in range(2)]
    assert told == [b"False\n"] * 2


def test_what_tests_import_is_found_in_their_files():
    found = {*template.imported()}
    assert {"numpy", "transformers:AutoModelForCausalLM", "qkscope.run.execute:run_study"} <= found
    template.preload(["no_such_module", "json:no_such_name"])  # told by the tests that need it
