"""`qkscope`: parse, dispatch, and turn every failure into one clear message and an exit code.

Nothing heavy is imported before a command runs, so `--help` is instant.
"""

from __future__ import annotations

import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkscope.cli.arguments import build_parser
from qkscope.cli.visible import visible
from qkscope.errors import InputError, QkscopeError, QkscopeWarning
from qkscope.run.stopping import terminable

INTERRUPTED = 130  # what a shell reports for Ctrl-C; SIGTERM brings its own code
OF_RESULTS = ("results", "inputs", "measures", "reference")  # arguments that name results, never a study file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failure, 2 for bad input."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    warnings.showwarning = _show_warning
    try:
        with terminable():
            refuse_study_files(options)
            return int(options.command(options) or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to say
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if options.debug:
            raise
        message, code = _explain(error)
        print(f"qkscope: {visible(message)}", file=sys.stderr)
        return code


def refuse_study_files(options: Namespace) -> None:
    """Name the results folder where a study file was given instead of it."""
    for name in OF_RESULTS:
        named = getattr(options, name, None) or ()
        for path in map(Path, [named] if isinstance(named, str) else named):
            if path.suffix.lower() in (".yaml", ".yml") and path.is_file():
                from qkscope.run.execute import results_folder
                from qkscope.study.load import load_study

                folder = results_folder(load_study(path), None)
                raise InputError(
                    f"{path} is a study file, not a results folder; its results are in {folder}/ once it has run"
                )


def _explain(error: BaseException) -> tuple[str, int]:
    if isinstance(error, QkscopeError):
        return error.for_command_line(), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        code = int(getattr(error, "exit_code", INTERRUPTED))
        how = "interrupted" if code == INTERRUPTED else "terminated"
        return f"{how}; everything finished is kept; run the same command to resume", code
    return f"unexpected {type(error).__name__}: {error} (run with --debug for the traceback)", 1


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Our own warnings are for the user; others are for developers of other packages."""
    if issubclass(category, QkscopeWarning):
        print(f"qkscope: note: {visible(str(message))}", file=sys.stderr)
