"""What was measured, in a few plain words: the first lines of the page."""

from collections.abc import Iterable, Sequence
from typing import Any

from qkscope.kinds import MODELS
from qkscope.lenses.kind_of_layer import kinds_in_order, with_layer_kind
from qkscope.results.read import ResultsFolder
from qkscope.text import without_local_paths

NOT_RECORDED = "not recorded"
LISTED = 3


def facts(results: ResultsFolder) -> list[list[str]]:
    """Pairs of a short title and what there is to say."""
    checkpoints = results.study.checkpoints
    one_run, noun = results.study.one_run, results.study.noun
    phases = _distinct(c.phase for c in checkpoints)
    amount = f"{len(checkpoints):,}"
    if phases and one_run:
        amount += f" in {len(phases)} phase{'s' if len(phases) > 1 else ''}"
    if results.unmeasured:
        amount += f", {len(results.unmeasured)} more not measured yet"
    return [
        ["Models" if results.study.kind == MODELS else "Model", _model(results)],
        [f"{noun.title()}s" if one_run else f"{noun.title()}s compared", amount],
        ["Heads", _heads(results)],
        ["Tokens", _tokens(results)],
        ["Window", _windows(results)],
        ["Corpus", _corpus(results)],
    ]


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(value for value in values if value is not None))


def _known(values: Iterable[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _model(results: ResultsFolder) -> str:
    kinds = _distinct(c.record.model_type for c in results.study.checkpoints)
    layers = _known(c.record.n_layers for c in results.study.checkpoints)
    name = results.study.title
    shown = kinds[:LISTED] + ([f"{len(kinds) - LISTED} more"] if len(kinds) > LISTED else [])
    parts = [", ".join(shown)] if shown else []
    parts += [f"{_span(layers)} layers"] if layers else []
    return f"{name} ({'; '.join(parts)})" if parts else name


def _heads(results: ResultsFolder) -> str:
    per = results.heads.groupby("model").size()
    text = _span([int(n) for n in per])
    if not results.study.one_run:
        return f"{text} query heads"
    named = with_layer_kind(results.heads)
    last = named.loc[named["model"] == results.study.names[-1], "layer_kind"]
    kinds = kinds_in_order(last)
    parts = [f"{int((last == kind).sum()):,} in {kind} layers" for kind in kinds]
    return f"{text} query heads" + (f": {'; '.join(parts)}" if len(kinds) > 1 else "")


def _tokens(results: ResultsFolder) -> str:
    counts = _known(c.record.tokens for c in results.study.checkpoints)
    if not counts:
        return NOT_RECORDED
    return f"{_span(counts)} per {results.study.noun}, {sum(counts):,} in all" if len(counts) > 1 else f"{counts[0]:,}"


def _windows(results: ResultsFolder) -> str:
    known = [int(w) for w in results.heads["window"].dropna().unique()]
    if not known:
        return NOT_RECORDED
    text = f"{_span(known)} tokens"
    if results.common is not None:
        common = [int(w) for w in results.common["window"].dropna().unique()]
        text += f"; common window {_span(common)}" if common else ""
    return text


def _corpus(results: ResultsFolder) -> str:
    corpus = results.provenance.corpus
    documents = _known(c.record.documents for c in results.study.checkpoints)
    text = without_local_paths((corpus.source if corpus else None) or NOT_RECORDED)
    return f"{text}, {_span(documents)} documents" if documents else text
