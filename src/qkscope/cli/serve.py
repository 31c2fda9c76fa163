"""`qkscope report --serve`: the report in a browser, served on this machine only.

Only the files of a report are served, by their names: the page, pictures, cards and tables. There are no listings, and
links are not followed. Requests must be for a name of this machine, because another site could point its own name here
and read along (DNS rebinding), and nothing that is served may load anything from elsewhere. A client that sends nothing
is dropped after `TIMEOUT` seconds; beyond `MAX_CONNECTIONS`, the newest one replaces the oldest.
"""

from __future__ import annotations

import http.server
import shutil
import socket
import sys
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from qkscope.errors import InputError
from qkscope.foreign import opened
from qkscope.results.folder import REPORT_HTML, served_file

ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_BYTES = 2**30  # of a page or a picture
MAX_CONNECTIONS = 64  # at a time; a browser opens about six
TIMEOUT = 20  # seconds without a byte from or to a client
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
NO_CONTENT_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PICTURE_POLICY = f"{NO_CONTENT_POLICY}; style-src 'unsafe-inline'; img-src data:; sandbox"  # SVG has inline styles


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves one report folder."""

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, folder: Path, port: int) -> None:
        from qkscope.page.write import page_policy

        super().__init__((ADDRESS, port), _Handler)
        self.folder = folder
        self.page_policy = f"{page_policy()}; frame-ancestors 'none'"
        self._connections: list[Any] = []  # oldest first
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; where too many connections are open, end the oldest one first."""
        with self._lock:
            self._connections.append(request)
            oldest = self._connections.pop(0) if len(self._connections) > MAX_CONNECTIONS else None
        if oldest is not None:
            with suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end of the request, and ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock, suppress(ValueError):  # it was replaced already
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that leave before they have everything."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def is_own_name(self, host: str) -> bool:
        """Whether a request's Host is a name of this machine, with our port."""
        port = self.server_address[1]
        names = {f"{name}:{port}" for name in HOSTS} | (set(HOSTS) if port == 80 else set())  # browsers leave out 80
        return host.strip().lower() in names


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer
    timeout = TIMEOUT
    _policy = NO_CONTENT_POLICY

    def do_GET(self) -> None:
        """One file of the report."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """The same without its contents."""
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        self._policy = NO_CONTENT_POLICY
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.is_own_name(hosts[0]):
            self.send_error(403, "this report is served on this machine only")
            return
        place = unquote(self.path.partition("?")[0].removeprefix("/")) or REPORT_HTML
        try:
            path = served_file(self.server.folder, place)
            if path is None:
                raise InputError("not part of the report")
            with opened(path, MAX_BYTES) as file:
                self._policy = self.server.page_policy if path.name == REPORT_HTML else PICTURE_POLICY
                self.send_response(200)
                self.send_header("Content-Type", TYPES[path.suffix])
                self.send_header("Content-Length", str(file.seek(0, 2)))
                self.end_headers()
                file.seek(0)
                if body:
                    shutil.copyfileobj(file, self.wfile)
        except InputError:
            self.send_error(404, "not part of the report")

    def end_headers(self) -> None:
        """Headers of every answer, errors included."""
        self.send_header("Content-Security-Policy", self._policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")  # the report may be drawn again
        super().end_headers()

    def version_string(self) -> str:
        """Do not reveal the Python version."""
        return "qkscope"

    def log_message(self, format: str, *arguments: object) -> None:
        """Do not log requests."""


def report_server(folder: Path, port: int) -> ReportServer:
    """A server of this folder; port 0 takes any that is free."""
    try:
        return ReportServer(folder, port)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--serve {port}: cannot listen there ({error}); choose another port, or 0 for any free one"
        ) from None


def serve(folder: Path, port: int, *, open_browser: bool = True) -> None:
    """Serve until interrupted."""
    with report_server(folder, port) as server:
        address = f"http://{ADDRESS}:{server.server_address[1]}/{REPORT_HTML}"
        print(f"serving: {address} (this machine only; Ctrl-C stops it)", flush=True)
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
