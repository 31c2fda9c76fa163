"""What the published account says of such figures, tested on the study at hand.

`tables/claims.csv` has every claim with its number, error and verdict; the cards of the figures concerned say them
under "Does it hold here?" (`words.held`).
"""

from qkscope.lenses.base import Lens, Summary, later

LENS = Lens(
    name="claims",
    title="The account, tested",
    question="Do the published claims hold here?",
    summaries=(Summary("claims", later("qkscope.lenses.claims.account:claims_at")),),
)
