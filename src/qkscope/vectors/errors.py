"""What can be wrong with a dataset of vectors."""

from qkscope.errors import InputError


class VectorsError(InputError):
    """A dataset of vectors cannot be read or written as it is; the message names the file and the way out."""


def first_line(error: BaseException) -> str:
    """A library's message without the pages that can follow it."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
