"""Card of the kernels: which distances heads prefer, which planes carry that, and whether the buckets agree."""

import numpy as np

from qkscope.lenses.card import Card, Subject, opening
from qkscope.lenses.named_entries import opening_place, place
from qkscope.lenses.rope import kernel, planes
from qkscope.lenses.rope.card import HELD
from qkscope.lenses.rope.chosen import HeadKernel, chosen_heads
from qkscope.lenses.tell import errors_said, joined
from qkscope.results.read import Entry
from qkscope.text import counted
from qkscope.words.blocks import Block, Strong, paragraph
from qkscope.words.phrases import label, listed, percent, plus_minus, shortened, tokens

MEANING = (
    "A head's kernel is its mean score against the distance from the query back to the key: the mean query and key "
    "before rotation, turned by RoPE. It is one cosine for each plane, and nothing in it depends on how far the model "
    "was run, so it is known beyond the context, too (grey). Single scores scatter about it by content; one standard "
    "deviation of that is the grey bar."
)
NAMED = 3  # planes of a head


def rope_kernel_card(subject: Subject) -> Card:
    """Kernels of a few heads, and of all."""
    heads = chosen_heads(subject.at)
    entries = [c for c in subject.checkpoints if c.name in {each.model for each in heads}]
    all_heads = [text for entry in entries for text in _all_heads(subject, entry)]
    every = [text for entry in entries for text in (*_all_heads(subject, entry), _beyond(subject, entry))]
    checks = [_check(subject, entry) for entry in entries]
    shows: list[Block | str] = [
        opening(
            subject,
            f"Above: the kernels of {counted(len(heads), 'head')} whose kernel moves most against the scatter of their "
            "scores, averaged over a quarter of each distance (thin: over a hundredth). Dots are mean scores measured "
            "between position buckets, circles the kernel averaged over the same pairs. Below: the share of each plane "
            "in the kernel's variance over the window, at the plane's wavelength. Right: every head of "
            f"{listed([label(entry) for entry in entries])}, about its mean over the window, in standard deviations of "
            "its scores.",
        ),
        MEANING,
        *(paragraph(Strong(_name(subject, each)), " ", _head(each)) for each in heads),
        paragraph(Strong("All heads."), " ", joined(every)),
        paragraph(Strong("Check."), " ", joined(checks)),
        errors_said(subject.table(kernel.FILE), HELD) + " Shares of planes, counts of heads and spreads of scores are "
        "stated without errors.",
    ]
    steps = [
        ("Kernel", "mean query times mean key before rotation, plane by plane; spreads from both covariances, with "
         "queries and keys taken as independent."),
        ("Check", "products of the mean query and the mean key of each pair of position buckets, by distance."),
    ]  # fmt: skip
    headline = "Positional Kernels"
    return Card(headline, shows, kernel.FILE, steps, [*all_heads, *checks])


def _name(subject: Subject, each: HeadKernel) -> str:
    """Which head it is; of seeds and models also whose."""
    of = "" if subject.study.one_run else f"{shortened(subject.study.labels[each.model])}, "
    name = f"{of}layer {each.layer}, head {each.head}."
    return f"{name[0].upper()}{name[1:]}" if subject.study.one_run else name


def _head(each: HeadKernel) -> str:
    """Where a head's mean score is highest, and which planes make it so."""
    inside = each.rows[(each.rows["distance"] <= each.window) & each.rows["kernel"].notna()]
    best, worst = inside.iloc[int(inside["kernel"].argmax())], inside.iloc[int(inside["kernel"].argmin())]
    gap = each.scale * float(best["kernel"] - worst["kernel"])
    strongest = each.planes.sort_values("kernel_share", ascending=False, kind="stable")[:NAMED]
    shares = [(float(row["kernel_share"]), float(row["wavelength"])) for _, row in strongest.iterrows()]
    carried = listed([f"{percent(share)} by wavelength {length:,.0f}" for share, length in shares if share > 0.005])
    at = f"{plus_minus(each.scale * best['kernel'], each.scale * best['kernel_se'])}"
    return (
        f"Of the distances in the table its mean score is highest at {best['distance']:,.0f} ({at}) and lowest at "
        f"{worst['distance']:,.0f}, {gap:.2g} below: {gap / each.spread:.2g} standard deviations of its scores. The "
        f"kernel's variance over the window is carried {carried}."
    )


def _all_heads(subject: Subject, entry: Entry) -> list[str]:
    """How much of all kernels slow planes carry, and how many prefer what is near."""
    table, window = subject.table(planes.FILE), subject.at.window_of(entry.name)
    here = table[(table["model"] == entry.name) & table["kernel_share"].notna()]
    if here.empty:
        return [f"No head of {label(entry)} has a kernel that varies."]
    slow = here[here["wavelength"] > window].groupby(["layer", "head"])["kernel_share"].sum()
    count = here.groupby(["layer", "head"]).ngroups
    curves = subject.table(kernel.FILE)
    inside = curves[(curves["model"] == entry.name) & (curves["distance"] <= window) & curves["kernel"].notna()]
    rotating = inside.set_index(["layer", "head"]).loc[here.set_index(["layer", "head"]).index.unique()].reset_index()
    best = rotating.loc[rotating.groupby(["layer", "head"])["kernel"].idxmax(), "distance"]
    near = int((best <= window / 16).sum())
    share = percent(float(slow.sum() / count))
    return [
        f"{opening_place(subject.study, entry)} planes that do not turn once within the window carry {share} of a "
        f"kernel's variance, the mean over {counted(count, 'head')} that rotate.",
        f"The mean score is highest within the nearest {tokens(window / 16)} (a sixteenth) in {near} of them.",
    ]


def _beyond(subject: Subject, entry: Entry) -> str:
    """Whether distances that were not run would be preferred to all that were."""
    curves, window = subject.table(kernel.FILE), subject.at.window_of(entry.name)
    here = curves[(curves["model"] == entry.name) & curves["kernel"].notna()]
    moving = here.groupby(["layer", "head"])["kernel"].transform("std") > 1e-9 * here["kernel"].abs().max()
    here = here[moving & (here["distance"] > 0)]
    if here.empty:
        return ""
    inside = here[here["distance"] <= window].groupby(["layer", "head"])["kernel"].max()
    outside = here[here["distance"] > window].groupby(["layer", "head"])["kernel"].max()
    above, of = int((outside > inside).sum()), counted(len(inside), "head")
    return (
        f"Beyond the window, up to {kernel.BEYOND} times as far, the kernel of {above} of {of} would rise above its "
        "largest value inside: such heads would turn to keys that far back."
    )


def _check(subject: Subject, entry: Entry) -> str:
    """How far kernels averaged over pairs of buckets are from the scores measured there."""
    curves = subject.table(kernel.FILE)
    here = curves[(curves["model"] == entry.name) & curves["measured"].notna() & curves["averaged"].notna()]
    if here.empty:
        return "There is only one position bucket in the window, so there are no pairs to check the kernel with."
    columns = ["averaged", "measured"]
    gap = ((here["averaged"] - here["measured"]) / here["kernel_sd"]).to_numpy(dtype=np.float64)
    both = here[columns] - here.groupby(["layer", "head"])[columns].transform("mean")
    whole = float((both["measured"] ** 2).sum())
    share = 1.0 - float(((both["averaged"] - both["measured"]) ** 2).sum()) / whole if whole > 0 else 0.0
    return (
        f"Over {len(here):,} pairs of head and distance {place(subject.study, entry)}, the kernel is off by "
        f"{np.sqrt(np.nanmean(gap**2)):.2g} standard deviations of a score, root mean square; of how a head's measured "
        f"scores differ between distances it explains {percent(share) if share > 0 else 'nothing'}."
    )
