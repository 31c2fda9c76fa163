"""The same ablation in a notebook: a model in memory, windows of token ids, tables back; nothing on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qkscope.ablate.choice import units_of
from qkscope.ablate.edits import kernel_spreads
from qkscope.ablate.measure import AblatedText, EditSource, Measurer
from qkscope.ablate.passes import EditableModel
from qkscope.ablate.tables import ablation_table, groups_table, outcome_records, unit_doses
from qkscope.ablate.work import AblationSettings
from qkscope.moments.moments import Moments

MODEL = "model"  # the name in the tables' first column


@dataclass(frozen=True)
class AblationTables:
    """What an ablation of a model in memory measured."""

    table: pd.DataFrame  # as `ablation.csv`: means over documents with errors
    controls: pd.DataFrame  # as `ablation_groups.csv`; empty unless heads were edited together
    documents: pd.DataFrame  # a row per document, edit, unit and outcome


def ablate_windows(
    model: Any,
    windows: Sequence[Any],
    moments: Moments,
    heads: pd.DataFrame,
    settings: AblationSettings,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> AblationTables:
    """Measure every window (tokens,); `heads` has a row per head with its numbers, from which the settings choose.

    `progress` gets how many passes over a window under an edit are done, and of how many.
    """
    everyone = list(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    together = settings.heads.together
    spreads = kernel_spreads(moments, everyone, moments.layout.context) if together else {}
    units = units_of(settings.heads, heads, spreads)
    source = EditSource(moments, moments.layout.context, settings.seed)
    records: list[dict[str, Any]] = []
    with EditableModel(model) as editable:
        measurer = Measurer(editable, source, settings, tokenizer)
        for document, window in enumerate(windows):
            text = AblatedText(document, document % moments.layout.groups, np.asarray(window, dtype=np.int64))
            for number, edit in enumerate(settings.edits, start=1):
                rows = measurer.measure(text, edit, units)
                records += outcome_records(MODEL, document, edit, units, rows)
                if progress is not None:
                    progress(document * len(settings.edits) + number, len(windows) * len(settings.edits))
    documents = pd.DataFrame(records)
    doses = {(MODEL, name): dose for name, dose in unit_doses(units, spreads).items()}
    return AblationTables(ablation_table(documents), groups_table(documents, doses), documents)
