"""What is printed quotes what files say: what would steer a terminal is shown as what it is, `\\x1b`."""


def visible(text: str) -> str:
    """Text of several lines, every other control character spelled out."""
    return "\n".join(map(visible_line, text.split("\n")))


def visible_line(line: str) -> str:
    """One line, line ends in it spelled out too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
