"""Words that every part of the package shares."""


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """`1 document`, `3 documents`, `1,200 heads`; the plural where it is not the noun with an s."""
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def are(n: int) -> str:
    """`is` for one, `are` for any other number."""
    return "is" if n == 1 else "are"
