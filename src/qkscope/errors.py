"""Errors that a user can act on.

Inside the package code raises briefly; each boundary (study, documents, checkpoint, file) adds where it happened.
Advice comes in two forms: for Python with arguments, for the command line with flags. The command line prints the
message alone and exits with `exit_code`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class QkscopeError(Exception):
    """Something failed that a person has to know about. Exit code 1."""

    exit_code = 1
    advice: tuple[tuple[str, str], ...] = ()  # what to do: in Python, and at the command line

    def __str__(self) -> str:
        return "; ".join([super().__str__(), *(python for python, _ in self.advice)])

    def for_command_line(self) -> str:
        """The message as the command line shows it."""
        return "; ".join([super().__str__(), *(command for _, command in self.advice)])

    def advised(self, *, python: str, command: str) -> Self:
        """The same error with advice, for Python and for the command line."""
        return self._again(super().__str__(), (*self.advice, (python, command)))

    def within(self, where: str) -> Self:
        """The same error, with its place put in front: `checkpoint 'a': layer 3: ...`."""
        return self._again(f"{where}: {super().__str__()}", self.advice)

    def _again(self, message: str, advice: tuple[tuple[str, str], ...]) -> Self:
        """A copy with all that is known; subclasses may be made from other arguments than a message."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, advice=advice)
        copy.args = (message,)
        return copy


class InputError(QkscopeError):
    """What the user gave cannot be used as it is: a file, a key, a value, a model. Exit code 2."""

    exit_code = 2


class StudyError(InputError):
    """The study file, or what it asks for, is not right."""


class DocumentError(InputError):
    """The documents cannot be read, or none is long enough."""


class ModelError(InputError):
    """The checkpoint cannot be loaded safely, or is not what the study expects."""


class CaptureError(InputError):
    """The model's queries and keys cannot be captured without doubt about what they are."""


class BatchError(QkscopeError):
    """The model failed on a batch; `documents` are the corpus indices of what was in it."""

    documents: tuple[int, ...] = ()


class OutOfMemory(BatchError):
    """A batch does not fit into the device's memory."""


class DocumentFailure(BatchError):
    """The model fails on one document, and which one is known."""

    name: str = ""
    reason: str = ""

    @classmethod
    def of(cls, document: int, name: str, reason: str) -> Self:
        """The failure of the document with this index in the corpus."""
        failure = cls(f"document {name}: {reason}")
        failure.documents, failure.name, failure.reason = (document,), name, reason
        return failure


class ActivationError(DocumentFailure):
    """A query or key is NaN or infinite."""


class EveryDocumentFails(BatchError):
    """The model fails on each document it is shown: the checkpoint is bad, not the documents."""


class MomentsFileError(InputError):
    """A moments file is damaged, foreign, or of another schema version."""


class StorageError(QkscopeError):
    """A file cannot be written: no space, no permission."""


class TableError(InputError):
    """A results table is missing something that the next stage needs."""


class QkscopeWarning(UserWarning):
    """Something is undefined or unusual but the run can go on; the message states what and why."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` in front of any QkscopeError that leaves the block."""
    try:
        yield
    except QkscopeError as error:
        raise error.within(where) from error


class LibraryPanic(Exception):
    """A library written in Rust gave up (a bug of it, or input it was not made for); never seen by users as such."""


@contextmanager
def panics_raised() -> Iterator[None]:
    """Turn a panic of Rust code into an exception: PyO3 derives it from BaseException, which passes every handler."""
    try:
        yield
    except BaseException as error:
        # Each library defines its own class, and none exports it.
        if type(error).__name__ != "PanicException" or isinstance(error, Exception):
            raise
        raise LibraryPanic(str(error)) from error


def first_line(error: BaseException) -> str:
    """The first line of another library's error, short enough to be part of a message; its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
