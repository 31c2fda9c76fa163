"""`qk.csv` from datasets of raw vectors (`analyze --vectors`): local folders or Hub datasets, one per model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from qkscope.errors import InputError, first_line, located
from qkscope.kinds import StudyKind
from qkscope.lenses.position import OWN, warn_undefined
from qkscope.lenses.rows import finished, layer_rows
from qkscope.lenses.sums import layer_sums
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
from qkscope.validation.layout import VectorsError, stored_sample
from qkscope.validation.read import VectorDataset, open_vectors

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
    with lock_folder(out):
        tables: list[pd.DataFrame] = []
        records: list[CheckpointRecord] = []
        for source in parsed:
            with located(f"vectors {source.name!r}"):
                folder = source.fetch()
                _note_log_uniform(source.name, folder, events)
                vectors = open_vectors(folder, group_size, n_layers)
                tables.append(table_from_vectors(vectors, model=source.name, components=components, window=window))
                records.append(_record(source, folder, vectors))
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


def _note_log_uniform(name: str, folder: Path, events: Listener) -> None:
    """Note it where early positions are over-represented: r is then over other positions than those of a text."""
    sample = stored_sample(folder)
    if sample is not None and sample.per_doubling:
        events.noted(
            f"{name}: a log-uniform sample ({sample.per_doubling} tokens each time that the position doubles): r is "
            "over positions as they were sampled, most of them early, and not to be compared with that of all tokens"
        )


def _record(source: VectorSource, folder: Path, vectors: VectorDataset) -> CheckpointRecord:
    """What a dataset states about itself, and which version of it was read."""
    values = {
        "name": source.name,
        "label": source.name,
        "phase": None,
        "repository": source.repo,
        "revision": source.revision,
        "commit": folder.name if source.repo else None,  # the cache keeps a dataset under its commit
        **vectors.provenance,
    }
    return CheckpointRecord.of(values)


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
