"""Real processes that start in a moment: forked off a server which has imported what takes seconds to import.

A process of its own is what signals, working folders, exit codes and the variables of huggingface_hub need; importing
torch again each time is not. huggingface_hub and whoever imports it read variables when they are imported: in a process
that is started with others than the server's they are read again.
"""

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.connection import Connection
from pathlib import Path

import template

READ_WHEN_IMPORTED = ("HF_", "HUGGING", "HOME", "XDG_")  # variables that begin so, by huggingface_hub
READERS = ("huggingface_hub", "transformers", "datasets", "qkscope")  # that may have taken over what was read
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(template.PRELOADED)


@functools.cache
def started() -> multiprocessing.context.ForkServerContext:
    """The context whose processes start in a moment; its server is a fork of the template where there is one."""
    resource_tracker.ensure_running()  # stays a small process
    if template.FOLDER in os.environ:
        usual = spawn.get_executable()
        multiprocessing.set_executable(os.path.join(os.environ[template.FOLDER], template.LAUNCHER))
        try:
            forkserver.ensure_running()
        finally:
            multiprocessing.set_executable(usual)
    return CONTEXT


def _read_again() -> None:
    """Let huggingface_hub read its variables again, for all who have its constants; a new import takes a second."""
    from huggingface_hub import constants, hf_api
    from transformers.utils import hub

    before = {name: value for name, value in vars(constants).items() if name.isupper()}
    before["HF_MODULES_CACHE"] = hub.HF_MODULES_CACHE
    importlib.reload(constants)
    after = {**vars(constants), "HF_MODULES_CACHE": os.path.join(constants.HF_HOME, "modules")}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] in READERS]:
        for name in before.keys() & vars(module).keys():
            if vars(module)[name] == before[name]:
                setattr(module, name, after[name])
    hf_api.api.endpoint = constants.ENDPOINT


def _run(
    script: str | None,
    arguments: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    session: bool,
    quick_workers: bool,
    *ends: Connection,
):
    """In the new process: become `python -m qkscope ARGUMENTS`, or `python SCRIPT ARGUMENTS`."""
    os.fsync = lambda descriptor: None  # as in conftest.py
    if session:
        os.setsid()
    if quick_workers:
        forking = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: forking
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where a shell has had it ignored
    for end, number in zip(ends, (1, 2), strict=True):
        os.dup2(end.fileno(), number)
        end.close()
    os.chdir(folder)
    changed = [name for name in {*os.environ, *environment} if os.environ.get(name) != environment.get(name)]
    os.environ.clear()
    os.environ.update(environment)
    if any(name.startswith(READ_WHEN_IMPORTED) for name in changed):
        _read_again()
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.argv = [script or "qkscope", *arguments]
    if script is None:
        runpy.run_module("qkscope", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


class Warm:
    """`python -m qkscope ARGUMENTS` while it runs, with the part of subprocess.Popen that the tests use.

    Or `python SCRIPT ARGUMENTS`, which imports what this process can.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: object,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        terminal: int | None = None,
        script: object | None = None,
        quick_workers: bool = False,
    ):
        """`terminal`: a descriptor that its errors go to, instead of a pipe.

        `quick_workers`: its own workers are forked off it, where it is not their start that a test is about.
        """
        (out, out_end), (err, err_end) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        if terminal is not None:
            err_end.close()
            err_end = Connection(os.dup(terminal), readable=False)
        environment = dict(os.environ if env is None else env)
        given = (list(map(str, arguments)), str(cwd), environment, start_new_session, quick_workers)
        file = None if script is None else str(script)
        self._process = started().Process(target=_run, args=(file, *given, out_end, err_end))
        self._process.start()
        self.pid = self._process.pid
        for end in (out_end, err_end):
            end.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno()), encoding="utf-8") for end in (out, err))
        for end in (out, err):
            end.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self) -> tuple[str, str]:
        """What is left to read of its output and of its errors, when it has ended."""
        texts: dict[str, str] = {}
        readers = [threading.Thread(target=lambda n=name: texts.update({n: getattr(self, n).read()}))
                   for name in ("stdout", "stderr")]  # fmt: skip
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self.wait()
        return texts["stdout"], texts["stderr"]

    def end(self) -> None:
        """Whatever became of it: not running and not holding anything any more."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        for file in (self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                file.close()


def run_warm(*arguments: object, cwd: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    """`subprocess.run` with its output captured as text."""
    process = Warm(*arguments, cwd=cwd, env=env)
    try:
        out, err = process.communicate()
        return subprocess.CompletedProcess(["qkscope", *map(str, arguments)], process.returncode, out, err)
    finally:
        process.end()


def two_ranks(script: Path, folder: Path) -> list[object]:
    """What each of two ranks, which meet over gloo, wrote into `folder`: SCRIPT RANK FOLDER makes RANK.json."""
    local = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(2):
        env = {**os.environ, **local, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(Warm(rank, folder, cwd=folder, script=script, env=env))
    try:
        for process in started:
            _, told = process.communicate()
            assert process.returncode == 0, told
    finally:
        for process in started:
            process.end()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
