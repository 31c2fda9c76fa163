"""Errors that a user can act on.

Inside the package code raises briefly; each boundary (study, documents, checkpoint, file) adds where it
happened. The command line prints the message alone and exits with `exit_code`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class QkscopeError(Exception):
    """Something failed that a person has to know about. Exit code 1."""

    exit_code = 1

    def within(self, where: str) -> "QkscopeError":
        """The same error, with its place put in front: `checkpoint 'a': layer 3: ...`."""
        return type(self)(f"{where}: {self}")


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
        failure = cls(f"document {name}: {reason}; leave it out of the study, or give --skip-bad-documents")
        failure.documents, failure.name, failure.reason = (document,), name, reason
        return failure


class ActivationError(DocumentFailure):
    """A query or key is NaN or infinite."""


class MomentsFileError(InputError):
    """A moments file is damaged, foreign, or of another schema version."""


class StorageError(QkscopeError):
    """A file cannot be written: no space, no permission."""


class TableError(InputError):
    """A results table is missing something that the next stage needs."""


class QkscopeWarning(UserWarning):
    """Something is undefined or unusual but the run can go on; the message says what and why."""


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
        # The class is made anew by each library and can be imported from none.
        if type(error).__name__ != "PanicException" or isinstance(error, Exception):
            raise
        raise LibraryPanic(str(error)) from error
