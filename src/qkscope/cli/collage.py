"""`qkscope collage`: its options, and what it does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qkscope.cli.command import add_command
from qkscope.errors import InputError

ABOUT = """\
Draw single heads from the vectors that a run kept (--vectors): queries and keys along two components, or in the plane
of drift and separation, coloured by position. The tokens farthest from a line in position are labelled.
"""
EXAMPLES = """\
examples:
  qkscope collage results/models --checkpoint smollm2 --head L5H3 --head L5H4
  qkscope collage results/models --checkpoint smollm2 --plane --document 7
"""


def add_collage(commands: Any) -> None:
    """The command and its options."""
    summary = "draw single heads from kept vectors"
    parser = add_command(commands, "collage", "qkscope.cli.collage:collage", summary, ABOUT, EXAMPLES)
    parser.add_argument("results", metavar="RESULTS", help="a results folder with moments/ and vectors/")
    parser.add_argument("--checkpoint", required=True, metavar="NAME", help="the checkpoint to draw")
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        metavar="LxHy",
        help="a head; may be repeated (default: four at random, seed 42)",
    )
    parser.add_argument(
        "--components", nargs=2, type=int, default=[0, 1], metavar="N", help="two components (default: 0 1)"
    )
    parser.add_argument("--plane", action="store_true", help="draw along axes a (drift) and b (separation) instead")
    parser.add_argument("--document", type=int, metavar="N", help="show this document in colour over the others")
    parser.add_argument("--out", metavar="DIR", help="where to write the picture (default: RESULTS/collage/...)")


def collage(options: argparse.Namespace) -> int:
    """`qkscope collage`."""
    from qkscope.report.drawings.collage import write_collage

    first, second = options.components
    if min(first, second) < 0 or first == second:
        raise InputError(f"--components {first} {second}: give two different components, counted from 0")
    axes = None if options.plane else (first, second)
    out = Path(options.out) if options.out else None
    place = write_collage(Path(options.results), options.checkpoint, options.head, axes, options.document, out)
    print(f"collage: {place}/")
    return 0
