"""Heads sorted into categories by how their queries and keys follow position, and how they move between them."""

from qkscope.lenses.base import Figure, Lens, Summary, later
from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.taxonomy.card import taxonomy_evolution
from qkscope.lenses.taxonomy.table import counts_at, fractions_at, transitions_at, with_category

LENS = Lens(
    name="taxonomy",
    title="Categories",
    question="Which heads are position-dominated, and when did they become so?",
    derive=with_category,
    summaries=(
        Summary("taxonomy_counts", counts_at),
        Summary("taxonomy_fractions", fractions_at, means=CATEGORIES),
        Summary("transitions", transitions_at),
    ),
    figures=(
        Figure(
            "taxonomy_evolution",
            later("qkscope.lenses.taxonomy.figure:draw_taxonomy_evolution"),
            taxonomy_evolution,
            needs=("trajectory", "taxonomy_fractions"),
            at_common_window=True,
            number=2,
            leads=1,
        ),
    ),
)
