"""Cards as blocks of plain text: what the page needs to show them without ever interpreting HTML.

Only what `report.cards` writes is understood: headings, paragraphs, numbered and bulleted lists (bullets may sit
below a number), `**strong**`, code spans and backslash escapes. Everything else is text.
"""

import re
import string
from typing import Any

Inline = list[list[str]]  # [kind, text] with kind text | strong | code
Block = dict[str, Any]

_HEADING = re.compile(r"(#{1,6}) (.*)")
_NUMBER = re.compile(r"\d+\. (.*)")
_BULLET = re.compile(r"( *)- (.*)")
_ESCAPABLE = frozenset(string.punctuation)  # as Markdown has it


def inline(text: str) -> Inline:
    """One line of Markdown as runs of text."""
    runs: Inline = []
    plain: list[str] = []
    strong = False
    place = 0

    def flush() -> None:
        if plain:
            runs.append(["strong" if strong else "text", "".join(plain)])
            plain.clear()

    while place < len(text):
        letter = text[place]
        if letter == "\\" and place + 1 < len(text) and text[place + 1] in _ESCAPABLE:
            plain.append(text[place + 1])
            place += 2
        elif text.startswith("**", place) and (strong or text.find("**", place + 2) > 0):
            flush()
            strong = not strong
            place += 2
        elif letter == "`" and (found := _code(text, place)) is not None:
            flush()
            runs.append(["code", found[0]])
            place = found[1]
        else:
            plain.append(letter)
            place += 1
    flush()
    return runs


def _code(text: str, place: int) -> tuple[str, int] | None:
    """The code span that starts here, and where it ends; None where its fence is never closed."""
    fence = re.match("`+", text[place:])
    assert fence is not None
    ticks = fence.group()
    closing = re.compile(rf"(?<!`){ticks}(?!`)").search(text, place + len(ticks))
    if closing is None:
        return None
    inside = text[place + len(ticks) : closing.start()]
    if inside.startswith(" ") and inside.endswith(" ") and inside.strip():
        inside = inside[1:-1]
    return inside, closing.end()


def blocks(text: str) -> list[Block]:
    """A card as blocks: {kind: heading | paragraph | item, ...} in order."""
    found: list[Block] = []
    paragraph: list[str] = []

    def flush() -> None:
        if paragraph:
            found.append({"kind": "paragraph", "runs": inline(" ".join(paragraph))})
            paragraph.clear()

    for line in text.splitlines():
        heading, number, bullet = _HEADING.fullmatch(line), _NUMBER.fullmatch(line), _BULLET.fullmatch(line)
        if heading or number or bullet or not line.strip():
            flush()
        if heading:
            found.append({"kind": "heading", "level": len(heading[1]), "runs": inline(heading[2])})
        elif number:
            found.append({"kind": "item", "numbered": True, "level": 0, "runs": inline(number[1])})
        elif bullet:
            found.append({"kind": "item", "numbered": False, "level": int(bool(bullet[1])), "runs": inline(bullet[2])})
        elif line.strip():
            paragraph.append(line.strip())
    flush()
    return found
