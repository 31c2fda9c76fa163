"""How a command is added to the parser: its help, and a function that is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any


def add_command(
    commands: Any, name: str, run: str, summary: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """A command whose work `run` does: a function of `qkscope.cli.commands`, or `module:function`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    parser.set_defaults(command=_later(run if ":" in run else f"qkscope.cli.commands:{run}"))
    return parser


def _later(place: str) -> Callable[[argparse.Namespace], int]:
    """Import the command's module only when it runs."""
    module, _, function = place.partition(":")

    def run(options: argparse.Namespace) -> int:
        result: int = getattr(import_module(module), function)(options)
        return result

    return run
