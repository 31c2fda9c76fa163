"""Are the errors of a real model right? Jackknife against bootstrap, and two halves of the documents.

SmolLM2-135M reads 48 of Python's own modules, 512 tokens each, once; every document is a group of its own, so the sums
of any sample of these documents are a sum of groups. All numbers are of component 0, matched by direction.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qkscope.lenses.measures import measures
from qkscope.lenses.pca import HeadComponents, head_components, matched_components, pooled_eigen
from qkscope.lenses.sums import layer_sums
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments
from qkscope.moments.second_moments import SecondMoments, Statistics
from qkscope.stats.jackknife import jackknife_error

ROOT = Path(__file__).parent.parent
DOCUMENTS, CONTEXT = 48, 512
GROUPS = 8  # as a study has
LAYERS = range(0, 30, 3)
BOOTSTRAPS, SPLITS, DEALS = 200, 10, 20  # DEALS: of the documents into GROUPS groups
NAMES = ("r_q", "r_k", "explained_variance")
MEASURES = tuple(f"{name}_{kind}" for name in ("decode", "share", "shape") for kind in "qk")


def captured(kept: Path | None = None) -> Moments:
    """The sums of every document, each a group of its own. Position 0 is not apart: so all replicates are exact.

    They are read from the file `kept`, or written there.
    """
    if kept and kept.exists():
        return Moments.load(kept)
    import torch
    from transformers import AutoModel, AutoTokenizer

    from qkscope.capture.collect import collect_moments, make_batch

    found = sorted((ROOT / ".cache/smollm2").rglob("*.gguf"))
    if not found:
        raise SystemExit("SmolLM2's weights are missing: run `make weights`")
    source = {"gguf_file": found[0].name}
    tokenizer = AutoTokenizer.from_pretrained(found[0].parent, **source)
    model = AutoModel.from_pretrained(found[0].parent, dtype=torch.float32, **source)
    rows = list(_documents(tokenizer))
    batches = (make_batch([row], [i], [f"document {i}"], [i]) for i, row in enumerate(rows))
    layout = Layout(bucket_edges(CONTEXT, 16), groups=DOCUMENTS)
    moments = collect_moments(model, batches, layout, stage="post_rope", provenance={})
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        moments.save(kept)
    return moments


def _documents(tokenizer) -> Iterator[list[int]]:
    """The first tokens of the standard library's modules in a fixed random order, as far as they are long enough."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    count = 0
    for i in np.random.default_rng(0).permutation(len(paths)):
        ids = tokenizer(paths[i].read_text(encoding="utf-8", errors="replace"), verbose=False)["input_ids"]
        if len(ids) >= CONTEXT:
            yield list(ids[:CONTEXT])
            count += 1
        if count == DOCUMENTS:
            return
    raise SystemExit(f"{count} documents of {CONTEXT} tokens, fewer than {DOCUMENTS}")


class Layer:
    """One layer's numbers over any sample of the documents."""

    def __init__(self, moments: Moments, layer: int) -> None:
        facts = moments.layers[layer]
        self._scale = moments.layout.scale
        self._heads = {
            "q": np.arange(facts.q_heads),
            "k": np.array([facts.kv_head(head) for head in range(facts.q_heads)]),
        }
        self._pivot, self._parts = {}, {}
        for kind in self._heads:
            whole = moments.window(layer, kind)
            rest = [moments.without_group(layer, kind, group) for group in range(DOCUMENTS)]
            self._pivot[kind] = whole.pivot
            self._parts[kind] = {
                name: np.stack([getattr(whole, name) - getattr(part, name) for part in rest])
                for name in ("n", "u", "uu", "x", "xu", "xx")
            }
        self._whole = head_components(*self._statistics(np.ones(DOCUMENTS)), 1)

    def _statistics(self, times: np.ndarray) -> tuple[Statistics, Statistics]:
        found = []
        for kind, heads in self._heads.items():
            sums = {name: np.tensordot(times, parts, axes=1) for name, parts in self._parts[kind].items()}
            found.append(SecondMoments(self._pivot[kind], **sums).statistics(self._scale).take(heads))
        return found[0], found[1]

    def of(self, times: np.ndarray) -> np.ndarray:
        """(numbers, heads) over documents taken so many times each."""
        q, k = self._statistics(times)
        found: HeadComponents = matched_components(q, k, self._whole, pooled_eigen(q, k))
        return np.stack([getattr(found, name)[:, 0] for name in NAMES])

    def jackknife(self, times: np.ndarray, groups: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The numbers over these documents, correlations on Fisher's scale, their errors from these groups, their bias.

        Groups are of one size. The bias is the jackknife's: how far replicates lie aside on average, times G - 1.
        """
        without = []
        for group in groups:
            left = times.copy()
            left[group] = 0
            without.append(_fisher(self.of(left)))
        whole = _fisher(self.of(times))
        error = jackknife_error(whole, np.stack(without), [times[group].sum() for group in groups])
        return whole, error, (len(groups) - 1) * (np.mean(without, axis=0) - whole)


def _fisher(numbers: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arctanh(numbers[:2]), numbers[2:]])


def measured(moments: Moments) -> dict[str, dict[str, float]]:
    """For each number, over all heads: jackknife errors over bootstrap errors, differences of halves, and the bias."""
    parts = []
    for number in LAYERS:
        parts.append(of_layer(Layer(moments, number)))
        middle = {name: np.median(part, axis=1).round(2).tolist() for name, part in parts[-1].items()}
        print(f"layer {number}: {middle}", flush=True)
    every = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    return {
        name: {
            "one document each": float(np.median(every["one document each"][i])),
            "8 groups": float(np.median(every["8 groups"][i])),
            "halves": float(np.sqrt(np.mean(every["halves"][i] ** 2))),
            "bias": float(np.median(np.abs(every["bias"][i]))),
            "largest bias": float(np.abs(every["bias"][i]).max()),
        }
        for i, name in enumerate(NAMES)
    }


def measures_bias(moments: Moments) -> dict[str, dict[str, float]]:
    """The bias, in errors, of the measures that are fitted in all dimensions at once; each document is a group."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in MEASURES}
    for number in LAYERS:
        sums = layer_sums(moments, number, range(moments.layers[number].q_heads))
        whole, without = measures(sums), [measures(replicate) for replicate in sums.replicates]
        for name, found in parts.items():
            values = np.stack([part[name] for part in without])
            bias = (DOCUMENTS - 1) * (values.mean(axis=0) - whole[name])
            found.append(bias / jackknife_error(whole[name], values, np.ones(DOCUMENTS)))
    every = {name: np.abs(np.concatenate(found)) for name, found in parts.items()}
    return {name: {"bias": float(np.median(b)), "largest bias": float(b.max())} for name, b in every.items()}


def of_layer(layer: Layer) -> dict[str, np.ndarray]:
    """(numbers, heads) of one layer; of the halves (numbers, heads times splits)."""
    rng = np.random.default_rng(1)
    samples = [rng.multinomial(DOCUMENTS, np.full(DOCUMENTS, 1 / DOCUMENTS)).astype(float) for _ in range(BOOTSTRAPS)]
    splits = [rng.permutation(DOCUMENTS) for _ in range(SPLITS)]
    deals = [rng.permutation(DOCUMENTS) for _ in range(DEALS)]
    every = np.ones(DOCUMENTS)
    bootstrap = np.std([_fisher(layer.of(times)) for times in samples], axis=0, ddof=1)
    _, alone, bias = layer.jackknife(every, [np.array([i]) for i in range(DOCUMENTS)])
    # One deal's error is itself uncertain by a quarter, alike for all heads: they have their documents in common.
    grouped = [layer.jackknife(every, [order[group::GROUPS] for group in range(GROUPS)])[1] for order in deals]
    return {
        "one document each": alone / bootstrap,
        "8 groups": np.sqrt(np.mean(np.square(grouped), axis=0)) / bootstrap,
        "halves": np.concatenate([_standardised(layer, order) for order in splits], axis=1),
        "bias": bias / alone,
    }


def _standardised(layer: Layer, order: np.ndarray) -> np.ndarray:
    """(numbers, heads): the difference between two halves of the documents over its error."""
    found = []
    for half in np.split(order, 2):
        times = np.zeros(DOCUMENTS)
        times[half] = 1
        found.append(layer.jackknife(times, [np.array([i]) for i in half]))
    (one, error, _), (other, other_error, _) = found
    return (one - other) / np.hypot(error, other_error)
