"""Errors beside the means and shares of a summary: over documents as `<column>_se`, over heads as `<column>_se_heads`.

Both come from the panel of heads. They are columns of every summary that has means or shares, and empty where results
have no replicates, or too few documents or heads, to tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
