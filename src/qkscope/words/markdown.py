"""Names and values inside hand-made Markdown (tables, which blocks do not have)."""

from qkscope.words.blocks import Code, markdown_text
from qkscope.words.phrases import NAME_CHARACTERS, shortened


def escape(text: str, characters: int = NAME_CHARACTERS) -> str:
    """Text of a study as plain Markdown text, in a table too: one line, shortened, nothing in it is markup."""
    return markdown_text(shortened(text, characters), starts_line=True).replace("|", "\\|")


def code(text: str) -> str:
    """Text of a study as a Markdown code span."""
    return markdown_text([Code(shortened(text, 4096))])
