"""Do 95 % intervals cover what they should? Samples of documents from a population whose true numbers are known.

Every sample is a study of its own: its documents are drawn anew, their vectors go through Moments, tables with errors,
draws and HeadPanel, and each interval is compared with the truth. Samples are made in blocks, which are kept, so that a
run that was stopped goes on where it was.
"""

from collections.abc import Iterable
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import errors_population as population
import numpy as np
import pandas as pd
from errors_population import (
    CHECKPOINTS,
    COMMON,
    CONTEXT,
    HEADS,
    KEY_HEADS,
    SHORT,
    STRONG,
    WEAK,
    WIDTH,
    ZERO,
    Documents,
)

from qkscope.layers import LayerFacts
from qkscope.lenses import measures, position
from qkscope.lenses.categories import MIXED, POSITION_DOMINATED, with_category
from qkscope.lenses.concordance import with_concordance
from qkscope.lenses.draws import drawn_heads
from qkscope.lenses.long_tables import paired_changes
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.layout import Layout, capture_layout
from qkscope.moments.moments import Moments
from qkscope.stats.jackknife import interval
from qkscope.stats.means import HeadPanel

DOCUMENTS, GROUPS = 32, 8
BLOCK = 50  # samples that are kept together
SEED = 20_000
TABLES = (position.OWN, position.COMMON, position.LEADING, measures.TABLE)
BEFORE, AFTER = CHECKPOINTS
CHOSEN = {"strong": STRONG, "weak": WEAK, "zero": ZERO}
MEANS = {
    "mean r_q over heads": "r_q",
    "mean r_k over heads": "r_k",
    "fraction position-dominated": POSITION_DOMINATED,
    "fraction mixed": MIXED,
    "fraction discordant": "discordant",
}
# Heads whose sign is not sure are not called discordant, and more documents make more of them sure: there is no truth
# for all numbers of documents, and samples are compared with their own mean.
MOVING = ("fraction discordant", "change of fraction discordant")
EACH = "r_q of each head"  # all heads in one row
MEASURES = ("decode", "share", "shape")
WINDOWS = {CONTEXT: "", COMMON: ", common window", SHORT: ", other window (first order)"}
Number = tuple[float, float]  # its value and its error, correlations on Fisher's scale


# --- one sample --------------------------------------------------------------------------------------


def layout(groups: int = GROUPS) -> Layout:
    """The buckets and groups of a sample."""
    return capture_layout(CONTEXT, buckets=4, groups=groups, common=COMMON)


def tables(parts: Iterable[Documents], groups: int = GROUPS) -> dict[str, pd.DataFrame]:
    """The tables of both checkpoints, by name."""
    facts = LayerFacts(layer=0, q_heads=HEADS, kv_heads=KEY_HEADS, head_dim=WIDTH)
    both = {name: Moments(layout(groups), [facts], way="device") for name in CHECKPOINTS}
    for documents in parts:
        of_rows = [i % groups for i in range(len(documents.positions))]
        for name, moments in both.items():
            moments.add(0, *documents.vectors[name], positions=documents.positions, groups=of_rows)
    settings = RowSettings(common=COMMON, components=1)
    made = [checkpoint_rows(moments, TABLES, settings, model=name) for name, moments in both.items()]
    return {name: pd.concat([part[name] for part in made], ignore_index=True) for name in made[0]}


def derived(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with their categories and concordance."""
    return with_concordance(with_category(heads))


def numbers(found: dict[str, pd.DataFrame]) -> dict[str, Number]:
    """What is checked, by name."""
    heads, replicates = found[position.OWN.table], found["replicates"]
    replicates = replicates[replicates["window"] == CONTEXT].reset_index(drop=True)
    panel = HeadPanel(derived(heads), True, [derived(d) for d in drawn_heads(heads, replicates)], sampled=False)
    rows = {
        CONTEXT: heads,
        COMMON: found[position.COMMON.table],
        SHORT: found[position.LEADING.table].query(f"window == {SHORT}"),
    }
    made: dict[str, Number] = {}
    for window, words in WINDOWS.items():
        before = rows[window][rows[window]["model"] == BEFORE]
        r, error = (before[name].to_numpy(float) for name in ("r_q", "r_q_se"))
        z = np.arctanh(r), error / (1 - r**2)
        made |= {f"r_q, {name}{words}": (z[0][head], z[1][head]) for name, head in CHOSEN.items()}
        made |= {f"{EACH}{words} {head}": (z[0][head], z[1][head]) for head in range(HEADS)}
    strong = heads.iloc[STRONG]
    made["explained variance"] = (strong["explained_variance"], strong["explained_variance_se"])
    whole = found[measures.TABLE.table].query(f"model == '{BEFORE}' and window == {CONTEXT}")
    for measure, (name, head) in product(MEASURES, CHOSEN.items()):
        one = whole.iloc[head]
        made[f"{measure} of queries, {name}"] = (one[f"{measure}_q"], one[f"{measure}_q_se"])
    made |= {words: (panel.mean(name, BEFORE), panel.error(name, BEFORE)) for words, name in MEANS.items()}
    made |= _changes(panel, heads, replicates)
    return made


def _changes(panel: HeadPanel, heads: pd.DataFrame, replicates: pd.DataFrame) -> dict[str, Number]:
    """Paired differences: of single heads, and of means and fractions over heads."""
    single = paired_changes(heads, replicates, [(BEFORE, AFTER)])
    assert single is not None
    steps = single.set_index("head")[["r_q_change", "r_q_change_se"]]
    made = {f"change of r_q, {name}": tuple(steps.loc[head]) for name, head in CHOSEN.items()}
    for words, name in MEANS.items():
        change = panel.change(name, BEFORE, AFTER)
        made[f"change of {words}"] = (change.difference, change.error)
    return made


def truth() -> dict[str, float]:
    """The same numbers of the population."""
    edges = layout().edges
    parts = {(name, window): population.truth(name, window, edges) for name in CHECKPOINTS for window in WINDOWS}
    heads = {
        name: derived(_heads(name, parts[name, CONTEXT].r_q, parts[name, CONTEXT].r_k)).mean(numeric_only=True)
        for name in CHECKPOINTS
    }
    step = parts[AFTER, CONTEXT].r_q - parts[BEFORE, CONTEXT].r_q
    found = {"explained variance": float(parts[BEFORE, CONTEXT].explained_variance[STRONG])}
    for window, words in WINDOWS.items():
        z = np.arctanh(parts[BEFORE, window].r_q)
        found |= {f"r_q, {name}{words}": z[head] for name, head in CHOSEN.items()}
        found |= {f"{EACH}{words} {head}": z[head] for head in range(HEADS)}
    for measure, (name, head) in product(MEASURES, CHOSEN.items()):
        found[f"{measure} of queries, {name}"] = float(parts[BEFORE, CONTEXT].measures[measure][head])
    found |= {f"change of r_q, {name}": step[head] for name, head in CHOSEN.items()}
    found |= {words: heads[BEFORE][name] for words, name in MEANS.items()}
    found |= {f"change of {words}": heads[AFTER][name] - heads[BEFORE][name] for words, name in MEANS.items()}
    return found


def _heads(model: str, r_q: population.Array, r_k: population.Array) -> pd.DataFrame:
    return pd.DataFrame({"model": model, "head": np.arange(HEADS), "r_q": r_q, "r_k": r_k, "sign_sure": 1.0})


# --- many samples ------------------------------------------------------------------------------------


def sample(number: int) -> dict[str, Number]:
    """One study of its own; samples of other numbers are independent of it."""
    rng = np.random.default_rng((SEED, number))
    return numbers(tables([population.drawn_documents(rng, DOCUMENTS)]))


def block(number: int, folder: Path | None = None) -> pd.DataFrame:
    """BLOCK samples: a row for each, a column for each number's value and error. Read where it is kept already."""
    kept = folder and folder / f"samples-{number:03}.csv"
    if kept and kept.exists():
        return pd.read_csv(kept, header=[0, 1], index_col=0)
    places = range(number * BLOCK, (number + 1) * BLOCK)
    made = pd.DataFrame([_flat(sample(place)) for place in places], index=places)
    made.columns = pd.MultiIndex.from_tuples(made.columns)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(".part")
        made.to_csv(unfinished)
        unfinished.replace(kept)
    return made


def _flat(found: dict[str, Number]) -> dict[tuple[str, str], float]:
    return {(name, part): value for name, pair in found.items() for part, value in zip(PARTS, pair, strict=True)}


PARTS = ("value", "error")


def many_samples(count: int, processes: int = 1, folder: Path | None = None) -> pd.DataFrame:
    """So many samples, or a few more to fill a block, on several processes."""
    blocks, one = range(-(-count // BLOCK)), partial(block, folder=folder)
    if processes == 1:
        return pd.concat([one(number) for number in blocks])
    made = []
    with get_context("spawn").Pool(processes) as pool:
        for part in pool.imap(one, blocks):
            made.append(part)
            print(f"{sum(map(len, made))} samples", flush=True)
    return pd.concat(made)


def takes_in_bias(name: str) -> bool:
    """Whether a number's error is about its distance from the truth, bias and all."""
    return name.startswith(MEASURES)


def coverage(samples: pd.DataFrame, true: dict[str, float]) -> pd.DataFrame:
    """For each number: its truth, bias and spread of its estimates, the errors they claim, how often intervals hold."""
    values, errors = (samples.xs(part, axis=1, level=1) for part in PARTS)
    low, high = interval(values, errors, GROUPS)
    true = true | {name: float(values[name].mean()) for name in MOVING}
    of_truth = np.array([true[name] for name in values.columns])
    inside = pd.DataFrame((low <= of_truth) & (of_truth <= high), values.index, values.columns)
    aside = values - of_truth
    rows = {}
    for name in values.columns:
        if name.startswith(EACH):
            continue
        folded = name.startswith("r_q, zero")  # a measured r_q is never much below 0
        rows[name] = {
            "truth": true[name],
            "bias": np.nan if folded else aside[name].mean(),
            "spread": np.sqrt((aside[name] ** 2).mean()) if folded or takes_in_bias(name) else aside[name].std(ddof=1),
            "error": np.sqrt((errors[name] ** 2).mean()),
            "covered": inside[name].mean(),
        }
    for words in WINDOWS.values():
        columns = [f"{EACH}{words} {head}" for head in range(HEADS)]
        rows[EACH + words] = {"covered": inside[columns].mean(axis=None)}
    return pd.DataFrame.from_dict(rows, orient="index")
