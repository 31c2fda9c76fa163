"""Test processes that start in a moment: each is a fork of one process that has imported what tests import.

Torch, transformers and what else tests import take each process ten seconds of a core, and `make test` starts several,
some with a server of processes of their own (`warm.py`). One process, the template, imports it all once. Whoever wants
a Python with all that runs the file that `launcher` writes, with the arguments of Python's `-c`; it asks the template
for a fork, which gets the descriptors, the folder and the variables of whoever asked.
"""

import ast
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).parent
FOLDER = "QKSCOPE_TESTS_TEMPLATE"  # the environment variable that names the folder of a template that runs
SOCKET, LAUNCHER = "socket", "python"
MOST_DESCRIPTORS = 64
LONGEST_ADDRESS = 108  # bytes, of a socket's file
FREE = 512  # a descriptor above all that are asked for
# What tests import later: within functions, or within what they call.
PRELOADED = [
    "numpy", "pandas", "yaml", "pydantic", "rich.progress", "pyarrow.parquet", "safetensors.torch", "scipy.optimize",
    "sympy", "torch", "torch._dynamo", "torch.distributed.tensor", "transformers.models.smollm3.modeling_smollm3",
    "qkscope.cli.commands", "qkscope.run.progress", "qkscope.run.execute", "qkscope.run.runner",
]  # fmt: skip
# pytest rewrites assertions in packages that bring plugins, which it cannot where they are imported before it starts.
LEFT_TO_PYTEST = ("pytest", "_pytest", "hypothesis", "xdist")
AS_IT_IS = "PYTEST_DONT_REWRITE"  # says so in the docstring of one that something else imports


def works_in(folder: Path) -> bool:
    """Whether a template can answer there: elsewhere than on Linux a fork of a loaded process may not be safe."""
    return sys.platform == "linux" and len(str(folder / SOCKET)) < LONGEST_ADDRESS


def start(folder: Path, *names: str) -> subprocess.Popen[bytes]:
    """Start a template that answers in `folder`; it ends when its standard input is closed.

    It imports `names`, or whatever the tests import.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / SOCKET))  # before it runs, so that whoever asks early waits
    listener.listen(16)
    launcher = folder / LAUNCHER
    launcher.write_text(f"#!{sys.executable} -SE\n{CLIENT.format(socket=str(folder / SOCKET))}")
    launcher.chmod(0o700)
    with listener:
        number = listener.fileno()
        command = [sys.executable, __file__, str(number), *names]
        return subprocess.Popen(command, pass_fds=[number], stdin=subprocess.PIPE)


# Light: it imports nothing of the environment, gives away its descriptors and lives as long as the fork that has them.
CLIENT = """
import json, os, signal, socket, sys
given = [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{{number}}")]
signal.signal(signal.SIGINT, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({socket!r})
    wanted = dict(arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ), numbers=given)
    text = json.dumps(wanted).encode()
    socket.send_fds(asked, [len(text).to_bytes(8, "big")], given)
    asked.sendall(text)
    empty = os.open(os.devnull, os.O_RDWR)
    for number in given:
        os.dup2(empty, number)  # or whoever reads would wait for this process too
    asked.recv(1)
"""


def imported() -> Iterator[str]:
    """What the files of the tests import when they are imported, but for each other."""
    for path in sorted(TESTS.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from (f"{node.module}:{alias.name}" for alias in node.names)


def preload(names: Iterable[str]) -> None:
    """Import them; what cannot be imported is told by the tests that need it."""
    for name in names:
        module, _, attribute = name.partition(":")
        top = module.partition(".")[0]
        if top in LEFT_TO_PYTEST or (TESTS / f"{top}.py").exists():
            continue
        with contextlib.suppress(Exception):
            found = importlib.import_module(module)
            if attribute:
                getattr(found, attribute, None)  # transformers imports many of its modules when they are asked for


def serve(listener: socket.socket) -> str:
    """Fork for everybody who asks. Returns in forks only, what to run; ends when standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return become(asked)
        asked.close()


def become(asked: socket.socket) -> str:
    """Take over the descriptors, folder, variables and arguments of who asked; returns what it is to run."""
    size, given, _, _ = socket.recv_fds(asked, 8, MOST_DESCRIPTORS)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += asked.recv(1 << 16)
    wanted = json.loads(text)
    kept = fcntl.fcntl(asked.detach(), fcntl.F_DUPFD_CLOEXEC, FREE)  # open until this process ends
    above = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FREE) for number in given]
    os.closerange(3, FREE)
    for number, wanted_number in zip(above, wanted["numbers"], strict=True):
        os.dup2(number, wanted_number)
        os.close(number)
    assert kept >= FREE
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    *_, code = wanted["arguments"]
    sys.argv, sys.path[0] = ["-c"], ""
    return str(code)


if __name__ == "__main__":
    preload(sys.argv[2:] or [*imported(), *PRELOADED])
    for name in {"anyio"} & set(sys.modules):
        sys.modules[name].__doc__ = AS_IT_IS
    gc.collect()
    gc.freeze()  # what is never collected is not copied into forks
    code = serve(socket.socket(fileno=int(sys.argv[1])))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)
