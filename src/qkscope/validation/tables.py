"""`qk.csv` from datasets of raw vectors (`analyze --vectors`): local folders or Hub datasets, one per model.

One head is read at a time and its vectors are added to sums at once, so the vectors may be larger than memory. Heads
need not have the same tokens. A dataset may hold some heads of a layer only (the published protocol samples 300): the
layer keeps its full numbering, and absent heads have no tokens.

Which key head each query head reads: grouped-query attention reads key head `h // g`. The group size g is given, or
written in the files (qkscope's own), or inferred, and inference is careful: either every layer shows heads 0 … n-1 and
0 … m-1 with one and the same n / m (a whole model), or the heads are a sample with exactly the keys they need and no
other g comes near. Everything else is refused: a wrong g pairs queries with foreign keys and still gives plausible
numbers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope.errors import InputError, QkscopeWarning, first_line, located
from qkscope.kinds import StudyKind
from qkscope.layers import AttentionKind, LayerFacts
from qkscope.lenses.position import OWN, warn_undefined
from qkscope.lenses.rows import finished, layer_rows
from qkscope.lenses.sums import layer_sums
from qkscope.moments.host_sums import KindMoments, concatenate_kind
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments
from qkscope.moments.second_moments import KINDS, Kind
from qkscope.results.csv_files import csv_text, write_csv
from qkscope.results.folder import head_table_path
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import SCHEMA, CheckpointRecord, Provenance, environment, write_provenance
from qkscope.results.remove import remove_head_table
from qkscope.results.schema import FILES
from qkscope.study.rows import COMPONENTS
from qkscope.study.values import file_safe
from qkscope.tables.from_moments import Listener
from qkscope.tables.outdated import remove_outdated
from qkscope.text import counted
from qkscope.validation.layout import HeadName, VectorFolders, VectorsError, find_vectors, stored_sample
from qkscope.validation.scan import HeadScan, head_sums, scan_tokens

BUCKETS = 16  # of the context; windows that are asked for end at one of their edges
MARGIN = 3  # head folders by which any other group size must fail: one or two could be lost files
HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>.+))?")


@dataclass(frozen=True)
class VectorSource:
    """A dataset and the name its rows get."""

    name: str
    folder: Path | None  # local, or
    repo: str | None = None  # on the Hub
    revision: str | None = None

    def fetch(self) -> Path:
        """The folder with the dataset; a Hub dataset is downloaded (or found in the cache)."""
        return self.folder if self.folder is not None else download_vectors(self.repo or "", self.revision)


def parse_source(text: str) -> VectorSource:
    """`[NAME=]DIR` or `[NAME=]org/dataset[@REVISION]`; what exists as a folder is a folder."""
    name, _, place = text.rpartition("=")
    hub, folder = HUB.fullmatch(place), Path(place)
    if folder.is_dir():
        source = VectorSource(name or folder.resolve().name, folder)
    elif hub:
        source = VectorSource(name or hub["revision"] or hub["id"], None, hub["id"], hub["revision"])
    else:
        raise InputError(f"--vectors {place}: there is no such folder, nor is it the id of a Hub dataset")
    source = replace(source, name=source.name.replace("/", "-"))
    try:
        file_safe(source.name)
    except ValueError as error:
        raise InputError(
            f"--vectors {text}: {source.name!r} cannot name a model ({error}); write NAME={place}"
        ) from None
    return source


def download_vectors(repo_id: str, revision: str | None = None) -> Path:
    """The local folder of a Hub dataset's Parquet files; its name is the commit hash of the revision.

    The cache (HF_HOME), tokens and HF_HUB_OFFLINE are those of huggingface_hub.
    """
    from huggingface_hub import errors, snapshot_download

    where = f"dataset {repo_id}" + (f", revision {revision}" if revision else "")
    try:
        folder = Path(snapshot_download(repo_id, repo_type="dataset", revision=revision, allow_patterns=["*.parquet"]))
    except errors.GatedRepoError:
        reason = "its owner asks for consent first: accept on its page, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "there is no such dataset, or it is private: check the name, or log in with a token that may read it"
    except errors.RevisionNotFoundError:
        reason = "there is no such revision: a dataset of vectors has one branch per model, see its page"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = "it is not in the cache and the Hub cannot be reached: go online once, or unset HF_HUB_OFFLINE"
    except (errors.HFValidationError, OSError) as error:
        reason = first_line(error)
    else:
        if not any(folder.rglob("*.parquet")):
            raise VectorsError(f"{where}: has no parquet files at that revision; give the revision of a model")
        return folder
    raise VectorsError(f"{where} cannot be downloaded: {reason}")


def analyze_vectors(
    sources: list[str],
    out: Path,
    events: Listener,
    command: str,
    *,
    components: int | None = None,
    window: int | None = None,
    kind: StudyKind | None = None,
    group_size: int | None = None,
    n_layers: int | None = None,
) -> Path:
    """Write `qk.csv` over the datasets' first `window` positions (or all), with its provenance, into `out`."""
    parsed = [parse_source(text) for text in sources]
    names, components = [source.name for source in parsed], components or COMPONENTS
    if len(set(names)) != len(names):
        raise InputError(f"two datasets are named {max(names, key=names.count)!r}; write NAME=DIR")
    tables: list[pd.DataFrame] = []
    records: list[CheckpointRecord] = []
    with lock_folder(out):
        for source in parsed:
            with located(f"vectors {source.name!r}"):
                folder = source.fetch()
                sample = stored_sample(folder)
                if sample is not None and sample.per_doubling:
                    events.noted(
                        f"{source.name}: a log-uniform sample ({sample.per_doubling} tokens each time that the "
                        "position doubles): r is over positions as they were sampled, most of them early, and not to "
                        "be compared with that of all tokens"
                    )
                vectors = open_vectors(folder, group_size, n_layers)
                tables.append(table_from_vectors(vectors, model=source.name, components=components, window=window))
                commit = folder.name if source.repo else None  # the cache keeps a dataset under its commit
                about = {"name": source.name, "label": source.name, "phase": None}
                place = {"repository": source.repo, "revision": source.revision, "commit": commit}
                records.append(CheckpointRecord.of({**about, **place, **vectors.provenance}))
        provenance = {
            "schema": SCHEMA,
            "qkscope": environment()["qkscope"],
            "command": command,
            "study": None,
            **({"kind": kind, "kind_stated": True} if kind else {}),
            "checkpoints": records,
            "analysis": {
                "components": components,
                "heads": "those in the dataset",
                "common_window": None,
                "window": window,
            },
            "environment": environment(),
        }
        _write(pd.concat(tables, ignore_index=True), Provenance.of(provenance), out, events)
    return out


def table_from_vectors(
    vectors: VectorDataset, *, model: str, components: int = COMPONENTS, window: int | None = None
) -> pd.DataFrame:
    """The rows of `qk.csv` of the query heads that are present, over the first `window` positions (all by default).

    The same as from a capture of these tokens; layers are read and analyzed one by one.
    """
    layers = []
    for facts, moments in vectors.layer_moments():
        sums = layer_sums(moments, facts.layer, sorted(vectors.pairs[facts.layer]), window, components)
        layers.append(layer_rows([OWN], sums, vectors.n_layers, window or vectors.layout.context))
    table = finished([OWN], layers, model, lambda tokens: "own")
    warn_undefined(table, model)
    return table


def _write(table: pd.DataFrame, record: Provenance, out: Path, events: Listener) -> None:
    """Write table and provenance, after removing what does not match them."""
    path = head_table_path(out, OWN.kind.file)
    same = path.is_file() and path.read_bytes() == csv_text(table).encode()
    removed = remove_outdated(out, record, same_tables=same)
    if removed is not None:
        events.noted(removed)
    for file in {*FILES} - {path.name}:  # of moments that were analyzed here before
        remove_head_table(out, file)
    write_csv(table, path)
    events.wrote(str(path))
    events.wrote(str(write_provenance(out, record)))


# --- a dataset ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorDataset:
    """A checked dataset: every head's files have been inspected, no vector has been read."""

    root: Path
    layout: Layout
    layers: Mapping[int, LayerFacts]
    pairs: Mapping[int, Mapping[int, int]]  # layer -> query head -> its key head
    scans: Mapping[HeadName, HeadScan]
    n_layers: int  # of the model, for depths
    notes: tuple[str, ...]

    @property
    def provenance(self) -> dict[str, Any]:
        """What provenance.json states about where the numbers come from."""
        return {
            "vectors": str(self.root),
            "n_layers": self.n_layers,
            "context": self.layout.context,
            "skip_positions": self.layout.skip_positions,
            "heads_present": {str(layer): sorted(of) for layer, of in self.pairs.items()},
            "rows": sum(scan.rows for scan in self.scans.values()),
            "notes": list(self.notes),
        }

    def layer_moments(self) -> Iterator[tuple[LayerFacts, Moments]]:
        """Each layer with its sums, one after the other, so that a dataset needs the memory of one layer's."""
        for layer, facts in self.layers.items():
            heads = {"q": set(self.pairs[layer]), "k": set(self.pairs[layer].values())}
            sums: dict[Kind, KindMoments] = {}
            for kind, count in zip(KINDS, (facts.q_heads, facts.kv_heads), strict=True):
                scans = {head: self.scans[HeadName(layer, head, kind)] for head in heads[kind]}
                present = {head: head_sums(scan, self.layout) for head, scan in scans.items()}
                absent = deepcopy(next(iter(present.values())))  # of heads that are not there: no tokens
                for array in (*vars(absent.buckets).values(), *vars(absent.crossed).values(), absent.groups):
                    array[...] = 0
                sums[kind] = concatenate_kind([present.get(head, absent) for head in range(count)])
            yield facts, Moments.from_layers(self.layout, [facts], {layer: sums}, {})


def open_vectors(folder: Path | str, group_size: int | None = None, n_layers: int | None = None) -> VectorDataset:
    """Find a dataset's heads, pair them and check their files.

    `group_size` is query heads per key head, `n_layers` the model's layers; both are taken from the dataset by default.
    """
    folders = find_vectors(folder)
    scans = {name: scan_tokens(name, files)[0] for name, files in folders.files.items() if name.kind == "q"}
    sizes, how = _group_sizes(folders, scans, group_size)
    pairs, unread = pair_heads(folders, sizes)
    read = {HeadName(layer, key, "k") for layer, of_layer in pairs.items() for key in of_layer.values()}
    scans |= {name: scan_tokens(name, folders.files[name])[0] for name in sorted(read)}
    layers = {layer: _layer_facts(folders.root, layer, pairs[layer], sizes[layer], scans) for layer in pairs}
    facts = [scan.facts for scan in scans.values() if scan.facts is not None]
    context = max([scan.max_position + 1 for scan in scans.values()] + [each.context for each in facts])
    last = max(pairs) + 1
    count = n_layers or max([each.n_layers for each in facts], default=last)
    if count < last:
        raise VectorsError(f"{folders.root}: n_layers {count} was given, but there is a layer {last - 1}")
    notes = [how]
    if unsorted := [name.folder for name, scan in scans.items() if not scan.rising]:
        notes.append(f"unsorted rows, which change no sum, in {counted(len(unsorted), 'head')}, first {unsorted[0]}")
    if unread:
        what = f"{counted(len(unread), 'key head')} without a query head here, not read, first {unread[0].folder}"
        notes.append(what)
        warnings.warn(f"{folders.root}: {what}", QkscopeWarning, stacklevel=2)
    # One group of documents: groups only serve standard errors, which tables of vectors do not have.
    layout = Layout(bucket_edges(context, BUCKETS), groups=1)
    return VectorDataset(folders.root, layout, layers, pairs, scans, count, tuple(notes))


# --- which key head each query head reads -----------------------------------------------------------


def _group_sizes(
    folders: VectorFolders, scans: Mapping[HeadName, HeadScan], stated: int | None
) -> tuple[dict[int, int], str]:
    """Query heads per key head of each layer: given, written in the files, or inferred; and a note that says which."""
    layers = folders.layers()
    written = {
        name.layer: scan.facts.layer.q_heads // scan.facts.layer.kv_heads
        for name, scan in scans.items()
        if scan.facts is not None
    }
    if stated is not None:
        if stated < 1:
            raise VectorsError(f"group_size should be at least 1, not {stated}")
        for layer, size in written.items():
            if size != stated:
                raise VectorsError(
                    f"{folders.root}: group_size {stated} was given, but layer {layer}'s files say {size}"
                )
        return dict.fromkeys(layers, stated), f"group size {stated}, as given"
    if set(written) == set(layers):
        return written, "group size from the files"
    size = infer_group_size(folders)
    return dict.fromkeys(layers, size), f"group size {size}, inferred from the heads that are there"


def infer_group_size(folders: VectorFolders) -> int:
    """The one group size that explains the folders; VectorsError where there is none, or more than one."""
    heads = [(folders.heads(layer, "q"), folders.heads(layer, "k")) for layer in folders.layers()]
    whole = {_whole_ratio(queries, keys) for queries, keys in heads}
    if len(whole) == 1 and (ratio := whole.pop()) is not None:
        return ratio
    sizes = range(1, max(queries[-1] for queries, _ in heads) + 2)
    # Key heads that are needed and missing, or there and not needed.
    wrong = {size: sum(len({head // size for head in q} ^ set(k)) for q, k in heads) for size in sizes}
    best = min(sizes, key=lambda size: wrong[size])
    advice = "give group_size (--group-size), the model's query heads divided by its key heads"
    if wrong[best]:
        queries, keys = (sum(len(each[i]) for each in heads) for i in (0, 1))
        raise VectorsError(
            f"{folders.root}: its {queries} query and {keys} key heads fit no single group size: some are missing, or "
            f"they are a sample; {advice}"
        )
    for size in sizes:
        pairs_differ = any(head // best != head // size for queries, _ in heads for head in queries)
        if wrong[size] < MARGIN and pairs_differ:
            raise VectorsError(
                f"{folders.root}: these heads are a sample that fits a group size of {best}, but {size} is too close "
                f"to rule out; {advice}"
            )
    return best


def _whole_ratio(queries: tuple[int, ...], keys: tuple[int, ...]) -> int | None:
    """Query heads per key head of a layer that has all of both; None if it cannot be a whole layer."""
    complete = queries == tuple(range(len(queries))) and keys == tuple(range(len(keys)))
    return len(queries) // len(keys) if complete and keys and len(queries) % len(keys) == 0 else None


def pair_heads(folders: VectorFolders, sizes: Mapping[int, int]) -> tuple[dict[int, dict[int, int]], list[HeadName]]:
    """Per layer the key head of each query head, and the key heads that no query reads."""
    pairs = {layer: {head: head // size for head in folders.heads(layer, "q")} for layer, size in sizes.items()}
    unread = {name for name in folders.files if name.kind == "k"}
    for layer, of_layer in pairs.items():
        for head, key in of_layer.items():
            name = HeadName(layer, key, "k")
            if name not in folders.files:
                raise VectorsError(
                    f"{folders.root}: query head {HeadName(layer, head, 'q').folder} has no key partner: {name.folder} "
                    "is missing; add the key heads, remove the query heads, or correct group_size"
                )
            unread.discard(name)
    return dict(sorted(pairs.items())), sorted(unread)


# --- layers and sums --------------------------------------------------------------------------------


def _layer_facts(
    root: Path, layer: int, pairs: Mapping[int, int], size: int, scans: Mapping[HeadName, HeadScan]
) -> LayerFacts:
    """The layer as its files describe it; heads that contradict each other are refused."""
    names = [HeadName(layer, head, "q") for head in pairs] + [HeadName(layer, key, "k") for key in pairs.values()]
    first, *others = (scans[name] for name in names)
    for scan in others:
        for what in ("width", "sliding_window"):
            one, two = getattr(scan, what), getattr(first, what)
            if one != two:
                raise VectorsError(
                    f"{root}: {scan.name.folder} has {what} {one}, {first.name.folder} has {two}; heads of one layer "
                    "have the same"
                )
        if scan.facts != first.facts:
            raise VectorsError(f"{root}: {scan.name.folder} and {first.name.folder} were written by different captures")
    if first.facts is not None:
        return first.facts.layer
    kv_heads, window = max(pairs.values()) + 1, first.sliding_window
    attention: AttentionKind = "full" if window is None else "sliding"
    return LayerFacts(layer, kv_heads * size, kv_heads, first.width, attention=attention, attention_window=window)
