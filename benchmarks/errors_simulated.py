"""Do 95 % intervals cover what they should? A population of documents whose true numbers are known.

Tokens of one document resemble each other: every document has its own mean and its own drift with position (random
effects), and neighbouring tokens are correlated (AR). Documents differ in length. Two checkpoints read the same
documents. Their vectors go the whole way of a study: Moments, tables with errors, draws, HeadPanel. The truth is what
the same way gives for very many documents.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np
import pandas as pd
from scipy.signal import lfilter

from qkscope.layers import LayerFacts
from qkscope.lenses.categories import POSITION_DOMINATED as DOMINATED
from qkscope.lenses.draws import drawn_heads
from qkscope.lenses.position.table import OWN, REPLICATES
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.taxonomy.table import with_category
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments
from qkscope.stats.jackknife import quantile
from qkscope.stats.noise import HeadPanel, Part

CONTEXT, WIDTH, KEY_HEADS = 32, 6, 8
HEADS = 2 * KEY_HEADS
DOCUMENTS, GROUPS = 32, 8
MANY = 24_000  # documents that stand for all
AT_ONCE = 50  # samples that are measured together
STRONG, WEAK, ZERO = 0, 1, 2  # heads by their r_q
TARGETS = np.array([0.9, 0.25, 0.0, *np.linspace(0.4, 0.92, HEADS - 3)])  # r_q of each head, about
KEY_TARGETS = np.linspace(0.75, 0.95, KEY_HEADS) * np.where(np.arange(KEY_HEADS) % 3 == 0, -1, 1)
LATER = 1.15  # the second checkpoint drifts so many times as much
IN_COMMON = 0.8  # the share of a token's noise that both checkpoints see
SCALES = np.geomspace(1.0, 0.3, WIDTH)
MEAN_SPREAD, DRIFT_SPREAD, MEMORY = 0.4, 0.5, 0.7  # of documents' means and drifts; of AR
COVERAGE = 0.95
Documents = tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]

ROWS = ("r, strong", "r, weak", "r, zero", "mean r over heads", "share of heads", "difference of two checkpoints")


@dataclass(frozen=True)
class Estimate:
    """A number on the scale of its interval, with its error."""

    value: float
    error: float


def _drift(r: np.ndarray) -> np.ndarray:
    """The slope over the whole context that gives about this correlation."""
    noise = 1.0 + MEAN_SPREAD**2 + DRIFT_SPREAD**2 / 12
    return r / np.sqrt(1 - r**2) * np.sqrt(12 * noise)


def _noise(rng: np.random.Generator, documents: int, heads: int) -> np.ndarray:
    """(documents, heads, tokens, width): each document's own mean and drift, and tokens that remember the last one."""
    fresh = rng.standard_normal((documents, heads, CONTEXT, WIDTH))
    fresh[:, :, 0] /= np.sqrt(1 - MEMORY**2)  # as far from 0 as all later ones
    tokens = lfilter([np.sqrt(1 - MEMORY**2)], [1.0, -MEMORY], fresh, axis=2)
    own = rng.standard_normal((2, documents, heads, 1, WIDTH))
    return SCALES * (tokens + MEAN_SPREAD * own[0] + DRIFT_SPREAD * own[1] * _time())


def _time() -> np.ndarray:
    return ((np.arange(CONTEXT) + 0.5) / CONTEXT - 0.5)[:, None]


def drawn_documents(rng: np.random.Generator, documents: int, samples: int = 1) -> Documents:
    """Positions of the tokens (-1: the document has ended), and queries and keys of both checkpoints.

    Samples lie side by side as heads: measured together they cost little more than one.
    """
    lengths = rng.integers(CONTEXT // 2, CONTEXT + 1, size=documents)
    places = np.arange(CONTEXT)
    positions = np.where(places < lengths[:, None], places, -1)
    checkpoints: list[list[np.ndarray]] = [[], []]
    for targets in (np.tile(TARGETS, samples), np.tile(KEY_TARGETS, samples)):
        first, other = (_noise(rng, documents, len(targets)) for _ in range(2))
        second = np.sqrt(IN_COMMON) * first + np.sqrt(1 - IN_COMMON) * other
        for made, noise, factor in zip(checkpoints, (first, second), (1.0, LATER), strict=True):
            noise[..., 0] += factor * _drift(targets)[:, None] * _time()[:, 0]
            made.append(noise)
    return positions, [(q, k) for q, k in checkpoints]


def tables(parts: Iterable[Documents], samples: int = 1) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Component 0 of every head of both checkpoints with its errors, and the replicates; a sample is a `layer`."""
    facts = LayerFacts(layer=0, q_heads=samples * HEADS, kv_heads=samples * KEY_HEADS, head_dim=WIDTH)
    both = [Moments(Layout(bucket_edges(CONTEXT, 4), GROUPS), [facts], way="device") for _ in range(2)]
    for positions, checkpoints in parts:
        groups = [i % GROUPS for i in range(len(positions))]
        for moments, (q, k) in zip(both, checkpoints, strict=True):
            moments.add(0, q, k, positions=positions, groups=groups)
    settings = RowSettings(components=1)
    wanted = (OWN, replace(REPLICATES, windows="own"))
    made = [checkpoint_rows(m, wanted, settings, model=name) for m, name in zip(both, "ab", strict=True)]
    heads, replicates = (pd.concat([part[t.file] for part in made], ignore_index=True) for t in wanted)
    return tuple(t.assign(layer=t["head"] // HEADS, head=t["head"] % HEADS) for t in (heads, replicates))


def estimates(heads: pd.DataFrame, replicates: pd.DataFrame) -> list[dict[str, Estimate]]:
    """What is checked, by its name in ROWS, for each sample."""
    draws = [with_category(draw) for draw in drawn_heads(heads, replicates)]
    panel = HeadPanel(with_category(heads), True, draws, same_documents=True, sampled=False)
    found = []
    for sample in range(heads["layer"].max() + 1):
        part = Part(layer=sample)
        r, error = panel.values("r_q", "a", part), panel.values("r_q_se", "a", part)
        change = panel.change("r_q", "a", "b", part)
        numbers = [
            *(Estimate(np.arctanh(r[head]), error[head] / (1 - r[head] ** 2)) for head in (STRONG, WEAK, ZERO)),
            *(Estimate(panel.mean(name, "a", part), panel.error(name, "a", part)) for name in ("r_q", DOMINATED)),
            Estimate(change.difference, change.error),
        ]
        found.append(dict(zip(ROWS, numbers, strict=True)))
    return found


def truth(documents: int = MANY) -> dict[str, Estimate]:
    """The same for documents so many that they are the population."""
    rng = np.random.default_rng(2**31)
    parts = (drawn_documents(rng, 1000) for _ in range(documents // 1000))
    (found,) = estimates(*tables(parts))
    return {**found, "r, zero": Estimate(0.0, 0.0)}  # by construction; a measured r_q is never below 0


def some_samples(seed: int, samples: int = AT_ONCE) -> list[dict[str, Estimate]]:
    """Samples of documents, all of the same lengths."""
    return estimates(*tables([drawn_documents(np.random.default_rng(seed), DOCUMENTS, samples)], samples))


def many_samples(count: int, processes: int = 1) -> list[dict[str, Estimate]]:
    """Samples of documents, on several processes."""
    seeds = range(-(-count // AT_ONCE))
    if processes == 1:
        return [sample for seed in seeds for sample in some_samples(seed)]
    with get_context("spawn").Pool(processes) as pool:
        return [sample for samples in pool.imap(some_samples, seeds) for sample in samples]


def coverage(samples: list[dict[str, Estimate]], true: dict[str, Estimate]) -> pd.DataFrame:
    """For each number: its truth, the spread of its estimates, the errors they claim, and how often intervals cover."""
    reach = quantile(GROUPS, COVERAGE)
    rows = []
    for name in ROWS:
        values, errors = (np.array([getattr(sample[name], part) for sample in samples]) for part in ("value", "error"))
        aside = values - true[name].value
        rows.append(
            {
                "number": name,
                "truth": true[name].value,
                "bias": aside.mean(),
                "spread": np.sqrt((aside**2).mean()) if name == "r, zero" else aside.std(ddof=1),
                "error": np.sqrt((errors**2).mean()),
                "covered": float((np.abs(aside) <= reach * errors).mean()),
            }
        )
    return pd.DataFrame(rows).set_index("number")
