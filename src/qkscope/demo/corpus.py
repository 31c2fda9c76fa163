"""The standard library's sources as training text and held-out documents.

Whole files are held out, never parts, so no document shares a source with the training text. A document is an
excerpt from inside its file: were it to start where the file does, its first tokens would always be a
docstring and imports, and a head that reads content would seem to read position.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qkscope.demo.settings import DemoSettings, Mix
from qkscope.errors import InputError

# Not the library itself, or made for one machine, or tests, of which there is three times as much as library.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
# Tables, applications and legacy code: only in the broad mix of stage 1, as web text is in a real first stage.
BROAD_ONLY_FOLDERS = {"encodings", "idlelib", "distutils", "lib2to3", "tkinter", "turtledemo", "unittest"}
LINE_MARGIN = 4096  # bytes that a held-out file has beyond its excerpt, so that the start can be chosen


@dataclass(frozen=True)
class LibraryFile:
    """One file of the library."""

    path: str  # relative to the library, with forward slashes
    text: str  # newlines as \n

    @property
    def core(self) -> bool:
        """Whether the later phases read it too."""
        return self.path.split("/")[0] not in BROAD_ONLY_FOLDERS


@dataclass(frozen=True)
class SourceText:
    """A held-out excerpt and the file it was cut from."""

    source: LibraryFile
    text: str


@dataclass(frozen=True)
class DemoCorpus:
    """Training sources and held-out documents, with no file in both."""

    training: tuple[LibraryFile, ...]
    documents: tuple[SourceText, ...]

    def training_bytes(self, mix: Mix) -> bytes:
        """The training text of a mix: files in order of their names, one after the other."""
        return "\n".join(source.text for source in self.training if mix == "broad" or source.core).encode()

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of all texts: another Python version is another corpus."""
        digest = hashlib.sha256()
        for text in (*(source.text for source in self.training), *(document.text for document in self.documents)):
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()[:16]

    def write_documents(self, folder: Path) -> None:
        """One UTF-8 text file per document, named after its module: `email.message.txt`."""
        for document in self.documents:
            module = document.source.path.removesuffix(".py").replace("/", ".")
            (folder / f"{module}.txt").write_bytes(document.text.encode())


def split_library(settings: DemoSettings, library: Path | None = None) -> DemoCorpus:
    """Read the library and split it: the same on every machine that has the same Python sources."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    sources = read_sources(library)
    length = settings.longest_context
    candidates = [source for source in sources if source.core and len(source.text) >= length + LINE_MARGIN]
    if len(candidates) < 2 * settings.documents:
        raise InputError(
            f"demo: {library} has {len(candidates)} Python sources of {length + LINE_MARGIN} characters or more, and "
            f"{2 * settings.documents} are needed; is this Python installed without its library's sources?"
        )
    draw = random.Random(settings.split_seed)
    held_out = sorted(draw.sample(candidates, settings.documents), key=lambda source: source.path)
    documents = tuple(SourceText(source, excerpt(source.text, length, draw)) for source in held_out)
    held_out_paths = {source.path for source in held_out}
    return DemoCorpus(tuple(source for source in sources if source.path not in held_out_paths), documents)


def read_sources(library: Path) -> list[LibraryFile]:
    """The library's sources sorted by name, each text once: a copy elsewhere must not leak a held-out file."""
    sources = []
    seen: set[str] = set()
    for path in sorted(_source_files(library), key=lambda path: path.relative_to(library).as_posix()):
        try:
            text = path.read_text(encoding="utf-8")  # universal newlines
        except (UnicodeDecodeError, OSError):
            continue  # a few files show off other encodings
        if text.strip() and text not in seen:
            seen.add(text)
            sources.append(LibraryFile(path.relative_to(library).as_posix(), text))
    return sources


def _source_files(library: Path) -> Iterator[Path]:
    """Every .py file that is part of the library; installed packages can be many, so they are not even listed."""

    def wanted(names: list[str]) -> list[str]:
        return [name for name in names if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)]

    for folder, subfolders, names in os.walk(library):
        subfolders[:] = wanted(subfolders)
        yield from (Path(folder, name) for name in wanted(names) if name.endswith(".py"))


def excerpt(text: str, length: int, draw: random.Random) -> str:
    """At least `length` characters of whole lines, from a line chosen at random."""
    start = text.rfind("\n", 0, draw.randrange(len(text) - length)) + 1
    end = text.find("\n", start + length)
    return text[start:] if end < 0 else text[start : end + 1]
