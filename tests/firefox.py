"""Firefox by its own remote protocol, Marionette: Playwright cannot drive Debian's, and there is no geckodriver here.

Messages are JSON with their length before them, `LENGTH:[0, number, command, parameters]`; answers are
`[1, number, error, result]`.
"""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("firefox-esr", "firefox")
PATIENCE = 120.0  # seconds
SETTINGS = {
    "marionette.port": 0,  # any that is free
    "app.update.enabled": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "ui.prefersReducedMotion": 1,
}


def find_firefox() -> str | None:
    """The first Firefox that PATH has."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Firefox:
    """A connection to a running Firefox."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._received = b""
        self._number = 0
        self._read()  # it introduces itself
        self.send("WebDriver:NewSession", capabilities={})

    def _read(self) -> Any:
        while b":" not in self._received:
            self._received += self._more()
        length, _, rest = self._received.partition(b":")
        while len(rest) < int(length):
            rest += self._more()
        self._received = rest[int(length) :]
        return json.loads(rest[: int(length)])

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("Firefox closed the connection")
        return data

    def send(self, command: str, **parameters: Any) -> Any:
        """A command's result; an error that Firefox reports is raised."""
        self._number += 1
        message = json.dumps([0, self._number, command, parameters]).encode()
        self._socket.sendall(str(len(message)).encode() + b":" + message)
        _, _, error, result = self._read()
        if error:
            raise RuntimeError(f"{command}: {error.get('message')}")
        return result.get("value") if isinstance(result, dict) else result

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script of the page returns."""
        return self.send("WebDriver:ExecuteScript", script=script, args=list(arguments))

    def until(self, script: str) -> Any:
        """Wait until a script returns something that counts as true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.05)
        raise TimeoutError(f"never came true: {script}")


@contextmanager
def opened(program: str, profile: Path) -> Iterator[Firefox]:
    """A Firefox without a window, in a profile of its own; it ends with the block."""
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in SETTINGS.items()]
    (profile / "user.js").write_text("\n".join(lines))
    command = [program, "--headless", "--marionette", "--no-remote", "--profile", str(profile)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        told, end = profile / "MarionetteActivePort", time.monotonic() + PATIENCE
        while not (told.exists() and told.read_text()):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{program} did not start")
            time.sleep(0.05)
        yield Firefox(int(told.read_text()))
    finally:
        process.terminate()
        process.wait(30)
