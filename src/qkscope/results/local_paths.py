"""Absolute paths in texts that others will read: found wherever they stand, and shortened to their last part.

A path shows who you are and how your disks are laid out, and is of no use on another machine. `/home/ann/run/*.txt`
becomes `…/run/*.txt`, `C:\\Users\\ann\\study.yaml` becomes `…/study.yaml`. Addresses such as `https://…` stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

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
