"""Errors at every doubling of the window against a full jackknife, on pretrained models.

Each document's vectors are summed twice: by the tool, with document groups, and in float64 in sums of the document's
own. Adding up the latter without one group's documents gives replicates that need no sketch and no group: the full
jackknife. All ratios are the tool's standard error over that one, of every head of a few layers.
"""

import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path

import numpy as np
import rope_alone
import torch

from qkscope.capture.collect import collect_moments, make_batch
from qkscope.lenses.base import HeadTable
from qkscope.lenses.plasticity import TABLE as PLASTICITY
from qkscope.lenses.position import OWN
from qkscope.lenses.rope.table import TABLE as ROPE
from qkscope.lenses.rope.table import prediction_of
from qkscope.lenses.score.table import TABLE as SCORE
from qkscope.lenses.sums import LayerSums, layer_sums
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.stats.jackknife import jackknife_error
from qkscope.stats.significance import is_significant

DOCUMENTS, CONTEXT, BUCKETS, GROUPS = 24, 1024, 16, 8
SHARED = ", buckets as in the whole"  # what ratios would be if buckets differed in covariance as in the whole
OTHER_LAYERS = 2  # in which the columns of other tables are compared too
NAMES = ("r_q", "r_k", "explained_variance")
CORRELATIONS = {"r_q", "r_k", "r_q_rope", "r_k_rope"}
OTHERS = ((SCORE, ("preference_share",)), (PLASTICITY, ("ap", "ap_content")), (ROPE, ("r_q_rope", "r_k_rope")))


@dataclass(frozen=True)
class Case:
    """A model, what it reads, and the layers that are looked at."""

    model: str
    corpus: str
    layers: tuple[int, ...]


CASES = (
    Case("smollm2-135m", "code", (3, 9, 15, 21, 27)),
    Case("gemma3-270m", "speeches", (2, 5, 8, 11, 14)),
)


@dataclass(frozen=True)
class Captured:
    """The sums of all documents as the tool makes them, and those of each document alone."""

    moments: Moments
    alone: list[Moments]

    @cached_property
    def without(self) -> list[Moments]:
        """The sums of all documents but those of each group in turn."""
        left = [[each for n, each in enumerate(self.alone) if n % GROUPS != group] for group in range(GROUPS)]
        return [reduce(Moments.merge, parts) for parts in left]


def captured(case: Case) -> Captured:
    """Run every document once."""
    model, rows = _model(case)
    layout = capture_layout(CONTEXT, buckets=BUCKETS, groups=GROUPS, common=CONTEXT)
    # Which tokens are summed before rotation depends on the group; of the others' sketches nothing is needed.
    single = replace(layout, sketched=0, unrotated_sketched=0)
    alone: list[Moments] = []

    def add(call, batch) -> None:
        (document,) = batch.documents
        if call.layer in case.layers:
            alone[document].add(call.layer, call.query.double(), call.key.double(), groups=document % GROUPS)

    def batches():
        for number, row in enumerate(rows):
            alone.append(Moments(single, [facts for facts in probe.layers if facts.layer in case.layers]))
            yield make_batch([row], [number % GROUPS], [f"document {number}"], [number])

    from qkscope.capture.probe import probe_model

    probe = probe_model(model, context=CONTEXT)
    moments = collect_moments(model, batches(), layout, probe=probe, last_layer=max(case.layers), on_call=add)
    moments.settle()
    return Captured(moments, alone)


def _model(case: Case) -> tuple[torch.nn.Module, list[list[int]]]:
    from transformers import AutoModel, AutoTokenizer

    weights = rope_alone.weights_of(next(each for each in rope_alone.CASES if each.name == case.model))
    source = {"gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **source)
    model = AutoModel.from_pretrained(weights.parent, dtype=torch.float32, **source)
    rows: list[list[int]] = []
    for text in _texts(case.corpus):
        ids = tokenizer(text[: 8 * CONTEXT], verbose=False)["input_ids"]
        if len(ids) >= CONTEXT:
            rows.append(list(ids[:CONTEXT]))
        if len(rows) == DOCUMENTS:
            return model, rows
    raise SystemExit(f"{len(rows)} documents of {CONTEXT} tokens, fewer than {DOCUMENTS}")


def _texts(corpus: str) -> Iterable[str]:
    if corpus == "speeches":
        return rope_alone.speeches()
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    order = np.random.default_rng(0).permutation(len(paths))
    return (paths[i].read_text(encoding="utf-8", errors="replace") for i in order)


@dataclass(frozen=True)
class Ratios:
    """The tool's errors over those of the full jackknife, by column; and which heads' component 0 is unstable."""

    by_column: Mapping[str, np.ndarray]
    unstable: np.ndarray
    flagged: np.ndarray


Columns = tuple[HeadTable, Sequence[str]]
Rows = Callable[[LayerSums], Mapping[str, np.ndarray]]


def ratios(
    found: Captured, layer: int, window: int, tables: Sequence[tuple[HeadTable, Sequence[str]]]
) -> Ratios | None:
    """Of one layer's heads at one window; None where a group has fewer tokens than the head has dimensions."""
    heads = range(found.moments.layers[layer].q_heads)
    sums = layer_sums(found.moments, layer, heads, window, 2)
    if sums.replication.method == "none":
        return None
    full = [layer_sums(each, layer, heads, window, 2) for each in found.without]
    columns, unstable, flagged = {}, np.zeros(len(heads), bool), np.zeros(len(heads), bool)
    for table, names in tables:
        # Components are matched to the whole's; what is no component is computed as if it were another study.
        matched = [replace(each, whole=sums) for each in full] if table is OWN else full
        whole = _numbers(table.rows, sums, names)
        own = [each.alone if table.own_buckets else each for each in sums.replicates]
        tool = jackknife_error(whole, [_numbers(table.rows, each, names) for each in own], _sizes(sums))
        replicates = [_numbers(table.rows, each, names) for each in matched]
        if table is ROPE:  # the sign rule may have turned another study's component
            replicates = [_predicted_sign(each, sums) * of for each, of in zip(full, replicates, strict=True)]
        exact = jackknife_error(whole, replicates, _sizes(sums))
        columns.update(dict(zip(names, tool / exact, strict=True)))
        if table.own_buckets:
            shared = [_numbers(table.rows, each, names) for each in sums.replicates]
            shared = jackknife_error(whole, shared, _sizes(sums)) / exact
            columns.update({f"{name}{SHARED}": ratio for name, ratio in zip(names, shared, strict=True)})
        if table is OWN:
            gap = sums.principal.gap[:, 0]
            errors = (each[names.index("gap")] for each in (exact, tool))
            unstable, flagged = (is_significant(gap, error, GROUPS - 1) == 0 for error in errors)
    return Ratios(columns, unstable, flagged)


def _predicted_sign(other: LayerSums, sums: LayerSums) -> np.ndarray:
    """1 where the predicted components of both point the same way, -1 where they do not."""
    one, two = (each.once(prediction_of)[1].directions for each in (other, sums))
    return np.sign((one * two).sum(axis=1))


def _sizes(sums: LayerSums) -> np.ndarray:
    return np.array(sums.replication.sizes)


def _numbers(rows: Rows, sums: LayerSums, names: Sequence[str]) -> np.ndarray:
    """(names, heads) of component 0, correlations on Fisher's scale."""
    found = rows(sums)
    numbers = [np.asarray(found[name], dtype=float) for name in names]
    numbers = [each[:, 0] if each.ndim == 2 else each for each in numbers]
    return np.stack([np.arctanh(x) if name in CORRELATIONS else x for name, x in zip(names, numbers, strict=True)])


def of_case(case: Case, others: bool = True) -> dict[tuple[str, int], list[Ratios]]:
    """Ratios of all layers, by table and window."""
    found = captured(case)
    result: dict[tuple[str, int], list[Ratios]] = {}
    for layer in case.layers:
        for window in found.moments.layout.windows():
            wanted = others and window == CONTEXT and layer in case.layers[:OTHER_LAYERS]
            part = ratios(found, layer, window, [(OWN, (*NAMES, "gap")), *(OTHERS if wanted else ())])
            result.setdefault((case.model, window), []).extend([part] if part is not None else [])
    return {key: parts for key, parts in result.items() if parts}


def described(values: np.ndarray) -> str:
    """Median, 5 to 95 %, and the share of heads within 10 %."""
    known = values[np.isfinite(values)]
    low, middle, high = np.quantile(known, [0.05, 0.5, 0.95])
    return f"{middle:.2f} ({low:.2f}–{high:.2f}; {np.mean(np.abs(known - 1) < 0.1):.0%})"


def table_of(cases: Sequence[Case] = CASES) -> str:
    """The section of the page: a row for each model and window, then the columns of other tables."""
    columns = " | ".join(f"`{name}`" for name in NAMES)
    lines = [
        f"| model | window | {columns} | unstable heads, flagged of them |",
        f"|---|---|{'---|' * (len(NAMES) + 1)}",
    ]
    others: list[str] = []
    for case in cases:
        for (model, window), parts in of_case(case).items():
            unstable, flagged = (np.concatenate([getattr(part, n) for part in parts]) for n in ("unstable", "flagged"))
            of = {name: np.concatenate([part.by_column[name] for part in parts])[~unstable] for name in NAMES}
            cells = " | ".join(described(each) for each in of.values())
            lines.append(f"| {model} | {window} | {cells} | {unstable.sum()}, {(unstable & flagged).sum()} |")
            print(lines[-1], flush=True)
            for name in (name for _, names in OTHERS for name in names if name in parts[0].by_column):
                found = [
                    described(np.concatenate([part.by_column[each] for part in parts if each in part.by_column]))
                    for each in (name, f"{name}{SHARED}")
                    if each in parts[0].by_column
                ]
                others.append(f"| {model} | `{name}` | {found[0]} | {found[1] if len(found) > 1 else ''} |")
                print(others[-1], flush=True)
    head = ["| model | column | ratio | with shared bucket covariances |", "|---|---|---|---|"]
    return "\n".join([*lines, "", *head, *others])


if __name__ == "__main__":
    import sys

    print(table_of([case for case in CASES if case.model in sys.argv[1:] or not sys.argv[1:]]))
