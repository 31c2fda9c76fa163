"""What can be wrong with a dataset of vectors."""

from qkscope.errors import InputError


class VectorsError(InputError):
    """A dataset of vectors cannot be read or written as it is; the message names the file and the way out."""
