"""How a command is added to the parser: its help, and a function that is imported when it runs."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose commands have a one-line summary, and which suggests the command that was probably meant."""

    summary = ""

    def error(self, message: str) -> NoReturn:
        """Name the closest command instead of listing all of them."""
        unknown = re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if unknown:
            known = re.findall(r"[a-z]+", unknown[2])
            close = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.5)
            hint = f"did you mean `qkscope {close[0]}`?" if close else "`qkscope --help` lists the commands"
            self.exit(2, f"qkscope: there is no command {unknown[1]!r}; {hint}\n")
        super().error(message)


def add_command(
    commands: Any, name: str, run: str, summary: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """A command whose work `run` does: a function of `qkscope.cli.commands`, or `module:function`."""
    parser: Parser = commands.add_parser(
        name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.summary = summary
    parser.add_argument("-v", "--verbose", action="store_true", help="list every file that is written")
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
