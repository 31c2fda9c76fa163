"""`qkscope report --serve`: the report folder on this machine only, in the reader's browser."""

from __future__ import annotations

import functools
import http.server
import threading
import webbrowser
from pathlib import Path

from qkscope.errors import InputError

ADDRESS = "127.0.0.1"  # never another machine's business


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, says nothing, and is not kept by the browser."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are nobody's news."""

    def end_headers(self) -> None:
        """A report that was drawn again should be seen."""
        self.send_header("Cache-Control", "no-store")
        super().end_headers()


def report_server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server of this folder; port 0 takes any that is free."""
    handler = functools.partial(_Quiet, directory=str(folder))
    try:
        return http.server.ThreadingHTTPServer((ADDRESS, port), handler)
    except (OSError, OverflowError) as error:
        raise InputError(f"--serve {port}: cannot listen there ({error}); give another port, or 0 for any") from None


def serve(folder: Path, page: str, port: int, *, open_browser: bool = True) -> None:
    """Serve until interrupted."""
    with report_server(folder, port) as server:
        address = f"http://{ADDRESS}:{server.server_address[1]}/{page}"
        print(f"serving: {address} (this machine only; Ctrl-C ends it)", flush=True)
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
