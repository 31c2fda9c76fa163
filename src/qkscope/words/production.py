"""What produced a report, from its provenance. What that does not state is "not recorded"."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qkscope.results.entries import Entry, phase_segments
from qkscope.results.folder import PROVENANCE_JSON
from qkscope.results.provenance import CorpusRecord
from qkscope.results.read import ResultsFolder
from qkscope.results.schema import NOPE
from qkscope.text import counted, without_local_paths
from qkscope.words.blocks import Block, Code, Run, Strong, bullet
from qkscope.words.phrases import listed, shortened

NOT_RECORDED = "not recorded"
_LISTED_CHECKPOINTS = 12


def produced(results: ResultsFolder) -> list[Block]:
    """Data, models, heads, checkpoints and corpus of a report, one item each."""
    one_run, noun = results.study.one_run, results.study.noun
    return [
        bullet(Strong("Model" if one_run else "Models"), ": ", *_models(results.study.checkpoints)),
        bullet(Strong("Heads"), f": {_heads(results)}"),
        bullet(Strong("Checkpoints in order" if one_run else f"{noun.title()}s compared"), ":"),
        *(bullet(line, level=1) for line in _order(results)),
        bullet(Strong("Corpus and tokens"), ": ", *_corpus(results)),
        bullet(Strong("Command"), ": ", Code("qkscope report RESULTS"), "; provenance: ", Code(PROVENANCE_JSON)),
    ]


def _distinct(values: Iterable[object]) -> list[Any]:
    distinct: list[Any] = []
    for value in values:
        if value is not None and value not in distinct:
            distinct.append(value)
    return distinct


def _models(checkpoints: Sequence[Entry]) -> list[Run]:
    sources = _distinct(without_local_paths(c.record.model) for c in checkpoints if c.record.model)
    if not sources:
        return [f"{NOT_RECORDED}."]
    names: list[Run] = [Code(source) for source in sources]
    layouts = _distinct(_layout(c) for c in checkpoints)
    layout = f", {layouts[0]}" if len(layouts) == 1 else ""
    types = _distinct(c.record.dtype for c in checkpoints)
    precision = f", computed in {listed([shortened(t) for t in types])}" if types else ""
    return [
        *_listed_runs(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]),
        f"{layout}{precision}.",
    ]


def _listed_runs(runs: Sequence[Run]) -> list[Run]:
    """`a`, `a and b`, `a, b and c`, of runs."""
    between = ["", *[", "] * (len(runs) - 2), " and "] if len(runs) > 1 else [""]
    return [part for joint, run in zip(between, runs, strict=True) for part in (joint, run)]


def _layout(checkpoint: Entry) -> str | None:
    layers, n = checkpoint.record.layers, checkpoint.record.n_layers
    if not layers:
        return None if n is None else f"{n} layers"
    nope = sum(entry.get("rotary") == NOPE for entry in layers)
    parts = [f"{len(layers) if n is None else n} layers"]
    parts[0] += f" ({nope} of them without rotary position)" if nope else ""
    for key, noun in (("q_heads", "query heads"), ("kv_heads", "KV heads")):
        values = _distinct(entry.get(key) for entry in layers)
        if len(values) == 1:
            parts.append(f"{shortened(str(values[0]))} {noun}")
    return ", ".join(parts)


def _heads(results: ResultsFolder) -> str:
    per = results.heads.groupby("model").size()
    low, high = int(per.min()), int(per.max())
    noun = results.study.noun
    amount = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    choice = results.provenance.study.heads if results.provenance.study else None
    if isinstance(choice, Mapping) and "sample" in choice:
        how = f"sampled with seed {shortened(str(choice.get('seed', NOT_RECORDED)))}"
    elif choice == "all":
        how = "all heads that can be compared"
    else:
        how = f"how they were chosen is {NOT_RECORDED}"
    return f"{amount} query heads per {noun} ({how})."


def _order(results: ResultsFolder) -> list[str]:
    checkpoints = results.study.checkpoints
    lines = []
    for phase, first, last in phase_segments(checkpoints):
        group = checkpoints[first : last + 1]
        title = shortened(phase) if phase else "All" if len(group) == len(checkpoints) else "No phase"
        lines.append(f"{title}: {_names(group)} ({_settings(group)})")
    if results.unmeasured:
        lines.append(f"Not measured: {listed([shortened(name) for name in results.unmeasured[:6]])}")
    return lines


def _names(group: Sequence[Entry]) -> str:
    names = [shortened(c.label) for c in group]
    if len(names) > _LISTED_CHECKPOINTS:
        return f"{counted(len(names), 'checkpoint')} from {names[0]} to {names[-1]}"
    return listed(names)


def _settings(group: Sequence[Entry]) -> str:
    contexts = _distinct(c.context for c in group)
    thetas = _distinct(_theta(c.record.rope_theta) for c in group)
    limits = _distinct(c.record.max_position_embeddings for c in group)
    context = listed([f"{c:,}" for c in contexts]) + " tokens" if contexts else NOT_RECORDED
    theta = listed(thetas) if thetas else NOT_RECORDED
    limit = listed([f"{v:,}" if isinstance(v, int) else shortened(str(v)) for v in limits]) or NOT_RECORDED
    return f"context {context}, rope_theta {theta}, max_position_embeddings {limit}"


def _theta(value: object) -> str | None:
    if isinstance(value, Mapping):
        parts = [f"{_theta(v) or NOT_RECORDED} for {shortened(str(k))} layers" for k, v in list(value.items())[:8]]
        return listed(parts) or None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return f"{value:,.0f}" if value == int(value) else f"{value:,g}"


def _corpus(results: ResultsFolder) -> list[Run]:
    corpus = results.provenance.corpus or CorpusRecord()
    records = [c.record for c in results.study.checkpoints]
    documents = [record.documents for record in records if record.documents is not None]
    totals = [record.tokens for record in records if record.tokens is not None]
    runs: list[Run] = [Code(without_local_paths(corpus.source)) if corpus.source else f"corpus {NOT_RECORDED}"]
    if corpus.fingerprint:
        runs += [" (fingerprint ", Code(corpus.fingerprint[:19]), ")"]
    runs.append(f"; {_range(documents, 'document')}, {_range(totals, 'token')} per {results.study.noun}")
    skipped = results.provenance.analysis.skip_positions if results.provenance.analysis else None
    if skipped:
        runs.append(f"; the first {counted(skipped, 'position')} of each document left out")
    return [*runs, "."]


def _range(values: Sequence[int], noun: str) -> str:
    if not values:
        return f"{noun}s {NOT_RECORDED}"
    low, high = min(values), max(values)
    return counted(low, noun) if low == high else f"{low:,} to {high:,} {noun}s"
