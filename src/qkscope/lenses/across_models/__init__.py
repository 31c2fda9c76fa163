"""Several models side by side: who they are, what each component is for, and heads by family."""

from qkscope.lenses.across_models import card
from qkscope.lenses.across_models.table import ENTRIES, ROLES, entries_at, roles_at
from qkscope.lenses.base import Figure, Lens, Summary, later

_FIGURES = "qkscope.lenses.across_models.figure"

LENS = Lens(
    name="across_models",
    title="Across models",
    question="Which components carry position in which models?",
    summaries=(Summary(ENTRIES, entries_at, at_common_window=False), Summary(ROLES, roles_at)),
    figures=(
        Figure("pc_roles", later(f"{_FIGURES}:draw_roles"), card.roles, needs=(ROLES,), at_common_window=True),
        Figure(
            "explained_by_component",
            later(f"{_FIGURES}:draw_explained"),
            card.explained,
            needs=(ROLES,),
            at_common_window=True,
        ),
        Figure(
            "family_scatter", later(f"{_FIGURES}:draw_families"), card.families, needs=(ROLES,), at_common_window=True
        ),
    ),
)
