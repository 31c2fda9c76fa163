"""The standard library's sources as training text and held-out documents.

Whole files are held out, so no document shares a source with the training text. A document is an excerpt from inside
its file: first tokens that are always a docstring and imports would make a head that reads content seem to read
position.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
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
class DemoCorpus:
    """Texts by the path of their file in the library: training sources and held-out excerpts, with no file in both."""

    training: dict[str, str]
    documents: dict[str, str]

    def training_bytes(self, mix: Mix) -> bytes:
        """The training text of a mix: files in order of their names, one after the other."""
        return "\n".join(text for path, text in self.training.items() if mix == "broad" or _is_core(path)).encode()

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of all texts: another Python version is another corpus."""
        texts = (*self.training.values(), *self.documents.values())
        return hashlib.sha256(b"".join(hashlib.sha256(text.encode()).digest() for text in texts)).hexdigest()[:16]

    def write_documents(self, folder: Path) -> None:
        """One UTF-8 text file per document, named after its module: `email.message.txt`."""
        for path, text in self.documents.items():
            (folder / f"{path.removesuffix('.py').replace('/', '.')}.txt").write_bytes(text.encode())


def split_library(settings: DemoSettings, library: Path | None = None) -> DemoCorpus:
    """Read the library and split it: the same on every machine that has the same Python sources."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    sources = read_sources(library)
    length = settings.longest_context
    candidates = [path for path, text in sources.items() if _is_core(path) and len(text) >= length + LINE_MARGIN]
    if len(candidates) < 2 * settings.documents:
        raise InputError(
            f"demo: {library} has {len(candidates)} Python sources of {length + LINE_MARGIN} characters or more, and "
            f"{2 * settings.documents} are needed; is this Python installed without its library's sources?"
        )
    draw = random.Random(settings.split_seed)
    held_out = sorted(draw.sample(candidates, settings.documents))
    documents = {path: excerpt(sources[path], length, draw) for path in held_out}
    return DemoCorpus({path: text for path, text in sources.items() if path not in documents}, documents)


def _is_core(path: str) -> bool:
    """Whether the later phases read a file too."""
    return path.split("/")[0] not in BROAD_ONLY_FOLDERS


def read_sources(library: Path) -> dict[str, str]:
    """The library's sources by path, sorted, each text once: a copy elsewhere must not leak a held-out file."""

    def wanted(names: list[str]) -> list[str]:
        return [name for name in names if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)]

    paths: list[Path] = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = wanted(subfolders)  # installed packages can be many, so they are not even listed
        paths += [Path(folder, name) for name in wanted(names) if name.endswith(".py")]
    texts: dict[str, str] = {}  # path by text
    for path in sorted(paths, key=lambda path: path.relative_to(library).as_posix()):
        try:
            text = path.read_text(encoding="utf-8")  # universal newlines
        except (UnicodeDecodeError, OSError):
            continue  # a few files show off other encodings
        if text.strip():
            texts.setdefault(text, path.relative_to(library).as_posix())
    return {path: text for text, path in texts.items()}


def excerpt(text: str, length: int, draw: random.Random) -> str:
    """At least `length` characters of whole lines, from a line chosen at random."""
    start = text.rfind("\n", 0, draw.randrange(len(text) - length)) + 1
    end = text.find("\n", start + length)
    return text[start:] if end < 0 else text[start : end + 1]
