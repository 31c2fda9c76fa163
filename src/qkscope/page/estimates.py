"""A number with its error as the first screen writes them: the same decimals for both, one minus sign."""

import math

MOST = 4  # decimals


def estimate(value: float, error: float, *, least: int = 2, sign: bool = False) -> str:
    """`+0.661 ± 0.004`: at least so many decimals, more where the error needs them for one digit."""
    if not math.isfinite(value):
        return "undefined"
    decimals = least
    if math.isfinite(error) and error > 0:
        decimals = min(MOST, max(least, -math.floor(math.log10(error))))
    text = f"{value:{'+' if sign else ''}.{decimals}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    known = f" ± {error:.{decimals}f}" if math.isfinite(error) else ""
    return text.replace("-", "−") + known
