"""Cards as blocks of text, rendered as Markdown or as JSON for the page.

Names of a study go into sentences as they are; each renderer makes sure that nothing in them acts as markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qkscope.text import aligned


class Strong(str):
    """Text that stands out."""


class Code(str):
    """A file, a command, a value as it is typed."""


class OwnWords(str):
    """A sentence of qkscope's own, with no name in it and nothing that Markdown could mistake: `p < 0.05` stays so."""


Text = str | Sequence[str]  # a run, or several; the class of each says how it is shown


@dataclass(frozen=True)
class Block:
    """A heading, a paragraph, or an item of a list (bullets of level 1 are nested)."""

    kind: Literal["heading", "paragraph", "bullet"]
    text: Text
    level: int = 0


@dataclass(frozen=True)
class TableBlock:
    """Rows of cells under a row of column titles."""

    titles: Sequence[Text]
    rows: Sequence[Sequence[Text]]


def table_of(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], Text]]) -> TableBlock:
    """A table from records: `columns` has the text of each cell by the title of its column."""
    return TableBlock(tuple(columns), [tuple(cell(row) for cell in columns.values()) for row in rows])


@dataclass(frozen=True)
class Listing:
    """Lines of code."""

    language: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A picture by its path next to the document, and a page that it links to."""

    path: str
    title: str
    link: str


AnyBlock = Block | TableBlock | Listing | Picture


def heading(level: int, text: Text) -> Block:
    """A heading, 1 for the title."""
    return Block("heading", text, level)


def paragraph(*runs: str) -> Block:
    """A paragraph."""
    return Block("paragraph", runs)


def bullet(*runs: str, level: int = 0) -> Block:
    """An item of a bulleted list."""
    return Block("bullet", runs, level)


def to_terminal(blocks: Iterable[AnyBlock]) -> list[str]:
    """Tables and sentences as lines of text."""
    lines = []
    for block in blocks:
        if isinstance(block, TableBlock):
            lines += aligned([["".join(cell) for cell in row] for row in (block.titles, *block.rows)])
        elif isinstance(block, Block):
            lines.append("".join(block.text))
    return lines


# --- the page ---------------------------------------------------------------------------------------


def page_runs(text: Text) -> list[list[str]]:
    """[kind, text] of each run that is not empty, with kind text | strong | code."""
    kinds = {str: "text", OwnWords: "text", Strong: "strong", Code: "code"}
    return [[kinds[type(run)], str(run)] for run in _runs(text) if run]


def to_page(blocks: Iterable[AnyBlock]) -> list[dict[str, Any]]:
    """Blocks as JSON that the page shows without ever interpreting HTML."""
    return [_page_block(block) for block in blocks]


def _page_block(block: AnyBlock) -> dict[str, Any]:
    if isinstance(block, TableBlock):
        rows = [[page_runs(cell) for cell in row] for row in block.rows]
        return {"kind": "table", "titles": [page_runs(title) for title in block.titles], "rows": rows}
    if isinstance(block, Picture):
        return {"kind": "picture", **asdict(block)}
    if isinstance(block, Listing):
        return {"kind": "listing", "language": block.language, "lines": list(block.lines)}
    level = {} if block.kind == "paragraph" else {"level": block.level}
    return {"kind": "item" if block.kind == "bullet" else block.kind, **level, "runs": page_runs(block.text)}


def _runs(text: Text) -> Sequence[str]:
    return (text,) if isinstance(text, str) else text


# --- Markdown ---------------------------------------------------------------------------------------

_MARKUP = re.compile(r"[\\`*_\[\]<>~$&]")  # what starts markup anywhere in a line
_LINKS = re.compile(
    r"(?i)(?<=[a-z0-9]):(?=//)|(?<=\w)@(?=\w)|\bwww(?=\.)"
)  # what GitHub makes a link without being asked
_START = re.compile(r"^(\s*)(\d+(?=[.)](?:\s|$))|(?=[#>+\-|=:]))")  # what makes a line something else than text


def to_markdown(blocks: Iterable[AnyBlock]) -> str:
    """Blocks as a Markdown document."""
    lines: list[str] = []
    in_list = False
    for block in blocks:
        is_item = isinstance(block, Block) and block.kind == "bullet"
        if lines and not (is_item and in_list):
            lines.append("")
        in_list = is_item
        lines += _markdown_lines(block)
    return "\n".join(lines) + "\n"


def _markdown_lines(block: AnyBlock) -> list[str]:
    if isinstance(block, Picture):
        return [f"[![{markdown_text(block.title)}]({block.path})]({block.link})"]
    if isinstance(block, Listing):
        return [f"```{block.language}", *block.lines, "```"]
    if isinstance(block, TableBlock):
        titles, *rows = (
            "| " + " | ".join(markdown_text(cell, starts_line=True).replace("|", "\\|") for cell in row) + " |"
            for row in (block.titles, *block.rows)
        )
        return [titles, f"|{'---|' * len(block.titles)}", *rows]
    marks = {"heading": f"{'#' * block.level} ", "paragraph": "", "bullet": f"{'   ' * block.level}- "}
    return [f"{marks[block.kind]}{markdown_text(block.text, starts_line=block.kind != 'heading')}"]


def markdown_text(text: Text, *, starts_line: bool = False) -> str:
    """Runs as Markdown in which only the runs' own kinds are markup."""
    rendered = "".join(_markdown_run(run) for run in _runs(text))
    return _START.sub(lambda start: f"{start[0]}\\", rendered) if starts_line else rendered


def _markdown_run(run: str) -> str:
    if isinstance(run, OwnWords) or not run:
        return str(run)
    if isinstance(run, Code):
        line = " ".join(run.split()) or "?"
        longest = max((len(ticks) for ticks in re.findall("`+", line)), default=0)
        fence, pad = "`" * (longest + 1), " " if longest else ""
        return f"{fence}{pad}{line}{pad}{fence}"
    text = _MARKUP.sub(lambda mark: f"\\{mark[0]}", run)
    text = _LINKS.sub(lambda link: "www\\" if link[0].lower().startswith("www") else f"\\{link[0]}", text)
    return f"**{text}**" if isinstance(run, Strong) else text
