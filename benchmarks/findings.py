"""docs/findings.md, written from the tables of the study of real models (`benchmarks/results/study`).

Every number is a mean over heads with its standard error over documents. A sentence is written only where what it
claims exceeds two errors, and which sentence it is the numbers decide; what does not exceed them is said not to.
`python benchmarks/findings.py` writes the page again from the tables.
"""

from __future__ import annotations

from pathlib import Path

import findings_effects
import findings_position
from findings_numbers import Place, Tables, section, spoken, table

from qkscope.words.phrases import listed

ROOT = Path(__file__).parent.parent
TITLES = {
    "position": "Position in queries and keys",
    "rope": "How much of r RoPE alone predicts",
    "scores": "What scores are made of",
    "mechanism": "Bias and plasticity",
    "ablation": "What ablation says",
    "texts": "What depends on the text",
    "claims": "The published claims in this light",
}
TEXTS = {
    "speeches": "Speeches are the longest State of the Union addresses.",
    "code": "Code is the longest modules of SymPy 1.13.3, without its tests and without tables of numbers.",
    "novel": "The novel is Moby-Dick in eight parts of about equal length, each beginning with a chapter.",
}
QUICK = "> **A quick run**: short windows, to see that everything works. Its numbers are not findings.\n\n"


def page(folder: Path, *, quick: bool = False) -> str:
    """The whole page."""
    tables = Tables(folder)
    makers = {**findings_position.SECTIONS, **findings_effects.SECTIONS}
    parts = {name: makers[name](tables) for name in TITLES}
    short = [f"- {sentence}" for name in TITLES for sentence in parts[name].short]
    return "".join(
        [
            head(tables, quick),
            section("In short", "\n".join(short)),
            *(section(title, *parts[name].text) for name, title in TITLES.items()),
            section("Errors and limits", limits(tables)),
            section("How it was made", made(tables)),
        ]
    )


def head(tables: Tables, quick: bool) -> str:
    """What was run."""
    rows = []
    for model, label in tables.models.items():
        there = [place for place in tables.places() if place.model == model]
        row = tables.rows("entries", there[0]).iloc[0]
        documents = [f"{place.corpus} {int(tables.number('entries', 'documents', place).value)}" for place in there]
        rows.append([label, f"{row['parameters'] / 1e6:.0f} M, {row['weights_kept']}", f"{int(row['layers'])}",
                     f"{int(row['heads'])}", f"{tables.window(there[0]):,}", ", ".join(documents)])  # fmt: skip
    columns = ["model", "parameters", "layers", "heads", "own context", "documents"]
    texts = " ".join(TEXTS[corpus] for corpus in tables.corpora if corpus in TEXTS)
    where = listed([spoken(corpus) for corpus in tables.corpora])
    return (
        "# Findings in real models\n\n<!-- Written by `make study` from benchmarks/results/study: do not edit. -->\n\n"
        + (QUICK if quick else "")
        + f"What position is in the heads of {_number_word(len(tables.models))} pretrained models that anybody can "
        f"fetch, on {where}. `make study` makes all of it. Numbers are means over all heads of a model, ± one standard "
        "error over documents; a sentence claims only what exceeds two. A case is a model on a corpus. Words: "
        "[glossary.md](glossary.md).\n\n"
        + table(columns, rows)
        + f"\n\n{texts} Of each document the first tokens are read, as many as the own context, without special "
        "tokens.\n"
    )


def _number_word(count: int) -> str:
    return {1: "one", 2: "two", 3: "three", 4: "four"}.get(count, str(count))


def limits(tables: Tables) -> str:
    """What these numbers do not say."""
    small = [label for model, label in tables.models.items() if "4-bit" in _weights(tables, model)]
    lines = [
        f"{len(tables.models)} small models: what happens here can happen; how large it is elsewhere, this does not "
        "say. Nothing is correlated over models ([join.md](join.md) says why).",
        f"{listed(small)} {'is' if len(small) == 1 else 'are'} quantised to four bits and computed in float32." if small
        else "",
        "stories15M was trained on short stories: these texts are foreign to it." if "stories15m" in tables.models
        else "",
        "Errors are over documents of the same kind, from a jackknife over eight groups: one comparison in twelve is "
        "beyond two errors by chance, and there are many on this page. They hold the model fixed, and all heads of a "
        "model are measured, so heads are no sample. Those of scores and plasticity also hold covariances within "
        "position buckets fixed, those of predictions the covariances before rotation ([errors.md](errors.md)).",
        "Differences between windows, corpora, or queries and keys are judged with errors as if independent. Windows "
        "of one model share documents, so their differences are surer than said.",
        "Tokens are each model's own: equal windows in tokens are not equal texts.",
        "Documents are cut at their beginning; nothing is known of what comes later in them.",
        _short_ablations(tables),
        "The parts of the novel are of one author and one book: its errors say nothing of other novels."
        if "novel" in tables.corpora else "",
        "Plasticity is the closed form from moments, which takes keys of a bucket as Gaussian "
        "([lenses/plasticity.md](lenses/plasticity.md)).",
        "A share without an error does not change whichever group of documents is left out.",
        "A mean over heads says little about single heads: the tables of the run have every head.",
    ]  # fmt: skip
    return "\n".join(f"- {line}" for line in lines if line)


def _short_ablations(tables: Tables) -> str:
    """Where edits were measured over fewer tokens than heads were chosen by."""
    rows = tables.table("ablation")
    if rows.empty:
        return ""
    tokens, longest = int(rows["tokens"].max()), max(tables.window(place) for place in tables.places())
    return (
        f"Ablations read {tokens:,} tokens of a document, while heads are chosen by r over up to {longest:,}: what "
        "position does over longer distances, they do not show ([ablation.md](ablation.md) has longer ones of one "
        "model)."
    )


def _weights(tables: Tables, model: str) -> str:
    place = next(place for place in tables.places() if place.model == model)
    return str(tables.rows("entries", place).iloc[0]["weights_kept"])


def made(tables: Tables) -> str:
    """Versions, hashes and time."""
    first = tables.entries.iloc[0]
    rows = [
        [label, f"`{tables.rows('entries', _first(tables, model)).iloc[0]['weights_sha256'][:12]}`"]
        for model, label in tables.models.items()
    ]
    hashes = tables.entries.groupby("corpus")["documents_sha256"].first()
    documents = [f"{spoken(corpus)} `{hashes[corpus][:12]}`" for corpus in tables.corpora]
    return (
        f"`make study` (qkscope {first['qkscope']}, torch {first['torch']}, transformers {first['transformers']}, "
        f"{first['dtype']}): `qkscope run`, `ablate`, `report` and `among` on each corpus, without special tokens. "
        f"{_took(tables)}Tables: `benchmarks/results/study`. "
        f"Beginnings of sha256: of the texts, {listed(documents)}; of the weights:\n\n"
        + table(["model", "weights"], rows)
    )


def _took(tables: Tables) -> str:
    """Processor time by command; that does not depend on what else the machine did."""
    times = tables.table("times")
    if times.empty:
        return ""
    hours = times.groupby("command", sort=False)["processor"].sum() / 3600
    parts = [f"`{command}` {hours[command]:.1f}" for command in hours.index if hours[command] >= 0.05]
    return f"It took {hours.sum():.1f} hours of processor time: {listed(parts)}. "


def _first(tables: Tables, model: str) -> Place:
    return next(place for place in tables.places() if place.model == model)


def main() -> int:
    """Write the page again from the tables that are kept."""
    (ROOT / "docs/findings.md").write_text(page(ROOT / "benchmarks/results/study"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
