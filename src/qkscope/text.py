"""Words that every part of the package shares."""

import difflib
from collections.abc import Sequence


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """`1 document`, `3 documents`, `1,200 heads`; the plural where it is not the noun with an s."""
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def are(n: int) -> str:
    """`is` for one, `are` for any other number."""
    return "is" if n == 1 else "are"


def short_number(number: float) -> str:
    """1.2M rather than 1234567."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return str(int(number))


def byte_size(number: float) -> str:
    """Bytes for people, in powers of ten as disks are sold."""
    short = short_number(number)
    return f"{short[:-1]} {short[-1]}B" if number >= 1e3 else f"{int(number)} bytes"


def clock(seconds: float) -> str:
    """1:02:03."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def visible(text: str) -> str:
    """Text of several lines in which control characters, which could steer a terminal, are spelled out: `\\x1b`."""
    return "\n".join(map(visible_line, text.split("\n")))


def visible_line(line: str) -> str:
    """One line, in which line ends are spelled out too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def closest(name: str, known: Sequence[object]) -> str:
    """The end of a message about an unknown name: `; did you mean 'norms'?`, or the names that there are."""
    texts = [str(each) for each in known]
    close = difflib.get_close_matches(name, texts, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(texts)}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with left-aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
