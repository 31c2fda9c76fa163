"""Words that every part of the package shares."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


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


# -- absolute paths --------------------------------------------------------------------------------------------

# A path shows who you are and how your disks are laid out, and is of no use on another machine. `/home/ann/run/*.txt`
# becomes `…/run/*.txt`, `C:\Users\ann\study.yaml` becomes `…/study.yaml`. Addresses such as `https://…` stay.
_NAME = r"[^\s\"'`<>|,;()\[\]{}/\\]"  # of a path that stands in a text without quotes
_START = r"(?:file:/{1,3}|~(?:[A-Za-z_][\w.-]*)?[/\\]|[A-Za-z]:[/\\]|\\{2,}|/+)"
_BEFORE = r"(?<![\w.~…/\\*?<-])"  # not inside a relative path (a/b), a shortened one (…/b) or a tag (</b>)
_PATH = re.compile(
    r"(?P<address>\b(?!file:)[A-Za-z][A-Za-z0-9+.-]+://[^\s\"'`<>]*)"
    rf"|(?P<quote>[\"'`])(?P<quoted>{_START}[^\"'`\n]+)(?P=quote)"
    rf"|{_BEFORE}(?P<plain>{_START}{_NAME}(?:{_NAME}|[/\\])*)"
)
_WHOLE = re.compile(rf"{_START}[^\n]*|~(?:[A-Za-z_][\w.-]*)?")  # a text that is a path, spaces included
_HOME = re.compile(r"(?:[A-Za-z]:)?[/\\]+(?:home|Users)[/\\]+[^/\\]+|[/\\]root(?![^/\\])|~[^/\\]*", re.IGNORECASE)
_WILD = re.compile(r"[*?\[]")


def shortened_path(path: str) -> str:
    """The last part of an absolute path, with its folder where it is a pattern such as `*.txt`; `…` for a home."""
    path = _HOME.sub("", re.sub(r"^file:/{1,2}(?=/)|^file:", "", path), count=1)
    parts = [part for part in re.split(r"[/\\]+", path) if part and not part.endswith(":")]
    wild = next((at for at, part in enumerate(parts) if _WILD.search(part)), None)
    kept = parts[-1:] if wild is None else parts[max(0, wild - 1) :]
    return "/".join(["…", *kept])


def without_local_paths(text: str, short: Callable[[str], str] = shortened_path) -> str:
    """The text with every absolute path shortened."""
    if _WHOLE.fullmatch(text):
        return short(text)

    def replaced(match: re.Match[str]) -> str:
        if match["address"]:
            return match[0]
        if match["quoted"]:
            return f"{match['quote']}{short(match['quoted'])}{match['quote']}"
        return short(match["plain"])

    return _PATH.sub(replaced, text)


class PathShortener:
    """Shortens paths in JSON values; different paths stay different. `paths_by_key` lists what was shortened where."""

    def __init__(self) -> None:
        self.paths_by_key: dict[str, list[str]] = {}
        self._short: dict[str, str] = {}

    def value(self, value: Any, key: str) -> Any:
        """The value with every absolute path in its texts and keys shortened."""
        if isinstance(value, str):
            return self.text(value, key)
        if isinstance(value, Mapping):
            return {self.text(str(name), key): self.value(each, f"{key}.{name}") for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each, key) for each in value]
        return value

    def text(self, text: str, key: str) -> str:
        """The text with every absolute path shortened."""

        def short(path: str) -> str:
            self.paths_by_key.setdefault(key, [])
            if path not in self.paths_by_key[key]:
                self.paths_by_key[key].append(path)
            if path not in self._short:
                plain, taken = shortened_path(path), set(self._short.values())
                numbered = (f"{plain} ({number})" for number in range(2, len(taken) + 3))
                self._short[path] = plain if plain not in taken else next(n for n in numbered if n not in taken)
            return self._short[path]

        return without_local_paths(text, short)
