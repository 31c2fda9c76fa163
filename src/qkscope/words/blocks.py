"""Cards as blocks of plain text, and two ways to show them: Markdown, and what the page reads.

Text is text until it is rendered: names of a study go into sentences as they are, and each renderer sees to it that
nothing in them is markup. A run of text is plain, strong, emphasized or code; a block is a heading, a paragraph, an
item of a list, a table or a listing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qkscope.text import aligned


@dataclass(frozen=True)
class Strong:
    """Text that stands out."""

    text: str


@dataclass(frozen=True)
class Code:
    """A file, a command, a value as it is typed."""

    text: str


@dataclass(frozen=True)
class Emphasis:
    """Text that stands out from its neighbors."""

    text: str


@dataclass(frozen=True)
class OwnWords:
    """A sentence of qkscope's own, with no name in it and nothing that Markdown could mistake: `p < 0.05` stays so."""

    text: str


Run = str | Strong | Code | Emphasis | OwnWords
Text = str | Sequence[Run]


@dataclass(frozen=True)
class Block:
    """A heading, a paragraph, or an item of a list (bullets of level 1 sit below a numbered item)."""

    kind: Literal["heading", "paragraph", "bullet", "number"]
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


def paragraph(*runs: Run) -> Block:
    """A paragraph."""
    return Block("paragraph", runs)


def bullet(*runs: Run, level: int = 0) -> Block:
    """An item of a bulleted list."""
    return Block("bullet", runs, level)


def numbered(*runs: Run) -> Block:
    """An item of a numbered list; items that follow each other are counted."""
    return Block("number", runs)


def runs_of(text: Text) -> tuple[Run, ...]:
    """The runs of a text, empty ones left out."""
    runs = (text,) if isinstance(text, str) else tuple(text)
    return tuple(run for run in runs if (run if isinstance(run, str) else run.text))


def plain(text: Text) -> str:
    """The text without its runs' kinds."""
    return "".join(run if isinstance(run, str) else run.text for run in runs_of(text))


def to_terminal(blocks: Iterable[AnyBlock]) -> list[str]:
    """Tables and sentences as lines of text."""
    lines = []
    for block in blocks:
        if isinstance(block, TableBlock):
            lines += aligned([[plain(cell) for cell in row] for row in (block.titles, *block.rows)])
        elif isinstance(block, Block):
            lines.append(plain(block.text))
    return lines


# --- the page ---------------------------------------------------------------------------------------


def to_page(blocks: Iterable[AnyBlock]) -> list[dict[str, Any]]:
    """Blocks as JSON that the page shows without ever interpreting HTML."""
    return [_page_block(block) for block in blocks]


def page_runs(text: Text) -> list[list[str]]:
    """[kind, text] of each run, with kind text | strong | em | code."""
    kinds = {str: "text", OwnWords: "text", Strong: "strong", Emphasis: "em", Code: "code"}
    return [[kinds[type(run)], run if isinstance(run, str) else run.text] for run in runs_of(text)]


def _page_block(block: AnyBlock) -> dict[str, Any]:
    if isinstance(block, TableBlock):
        rows = [[page_runs(cell) for cell in row] for row in block.rows]
        return {"kind": "table", "titles": [page_runs(title) for title in block.titles], "rows": rows}
    if isinstance(block, Picture):
        return {"kind": "picture", "path": block.path, "title": block.title, "link": block.link}
    if isinstance(block, Listing):
        return {"kind": "listing", "language": block.language, "lines": list(block.lines)}
    runs = page_runs(block.text)
    if block.kind == "heading":
        return {"kind": "heading", "level": block.level, "runs": runs}
    if block.kind == "paragraph":
        return {"kind": "paragraph", "runs": runs}
    return {"kind": "item", "level": block.level, "numbered": block.kind == "number", "runs": runs}


# --- Markdown ---------------------------------------------------------------------------------------

_MARKUP = re.compile(r"[\\`*_\[\]<>~$&]")  # what starts markup anywhere in a line
_LINKS = re.compile(
    r"(?i)(?<=[a-z0-9]):(?=//)|(?<=\w)@(?=\w)|\bwww(?=\.)"
)  # what GitHub makes a link without being asked
_START = re.compile(r"^(\s*)(\d+(?=[.)](?:\s|$))|(?=[#>+\-|=:]))")  # what makes a line something else than text


def to_markdown(blocks: Iterable[AnyBlock]) -> str:
    """Blocks as a Markdown document."""
    lines: list[str] = []
    number, in_list = 0, False
    for block in blocks:
        is_item = isinstance(block, Block) and block.kind in ("bullet", "number")
        if lines and not (is_item and in_list):
            lines.append("")
        in_list = is_item
        if isinstance(block, Block):
            nested = block.kind == "bullet" and block.level > 0
            number = number + 1 if block.kind == "number" else number if nested else 0
            lines.append(_markdown_line(block, number))
            continue
        number = 0
        if isinstance(block, Picture):
            lines.append(f"[![{markdown_text(block.title)}]({block.path})]({block.link})")
        else:
            lines += _markdown_table(block) if isinstance(block, TableBlock) else _markdown_listing(block)
    return "\n".join(lines) + "\n"


def _markdown_table(table: TableBlock) -> list[str]:
    titles, *rows = (
        "| " + " | ".join(markdown_text(cell, starts_line=True).replace("|", "\\|") for cell in row) + " |"
        for row in (table.titles, *table.rows)
    )
    return [titles, f"|{'---|' * len(table.titles)}", *rows]


def _markdown_listing(listing: Listing) -> list[str]:
    return [f"```{listing.language}", *listing.lines, "```"]


def _markdown_line(block: Block, number: int) -> str:
    text = markdown_text(block.text, starts_line=block.kind != "heading")
    marks = {"heading": f"{'#' * block.level} ", "paragraph": "", "number": f"{number}. "}
    return f"{marks.get(block.kind, '   ' * block.level + '- ')}{text}"


def markdown_text(text: Text, *, starts_line: bool = False) -> str:
    """Runs as Markdown in which nothing but the runs' own kinds is markup."""
    rendered = "".join(_markdown_run(run) for run in runs_of(text))
    return _START.sub(lambda start: f"{start[0]}\\", rendered) if starts_line else rendered


def _markdown_run(run: Run) -> str:
    if isinstance(run, Code):
        return _code_span(run.text)
    if isinstance(run, OwnWords):
        return run.text
    text = _MARKUP.sub(lambda mark: f"\\{mark[0]}", run if isinstance(run, str) else run.text)
    text = _LINKS.sub(lambda link: "www\\" if link[0].lower().startswith("www") else f"\\{link[0]}", text)
    around = {Strong: "**", Emphasis: "*"}.get(type(run), "")
    return f"{around}{text}{around}"


def _code_span(text: str) -> str:
    """A code span, whatever backticks the text contains."""
    line = " ".join(text.split()) or "?"
    longest = max((len(ticks) for ticks in re.findall("`+", line)), default=0)
    fence, pad = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{pad}{line}{pad}{fence}"
