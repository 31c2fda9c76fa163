"""Keep a sample of a capture's vectors in the predecessor's layout.

Each attention call's kept rows are appended to one spool file per layer and kind, so memory holds one call and no
file stays open. `close` sorts a layer by (document, position) and writes its heads row group by row group. The files
therefore do not depend on how documents were batched. Everything happens in a hidden folder next to the target,
which takes the target's name at the very end: a dataset is whole or not there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import ActivationError
from qkscope.layers import LayerFacts
from qkscope.vectors.card import vectors_card
from qkscope.vectors.errors import VectorsError
from qkscope.vectors.layout import DATA_FILE, FileFacts, HeadName, Kind, arrow_schema
from qkscope.vectors.sample import Integers, VectorSampler

if TYPE_CHECKING:
    from torch import Tensor

    from qkscope.capture.tap import AttentionCall

ROW_GROUP_ROWS = 8192
ROW_GROUP_BYTES = 64 << 20  # of all heads of a layer together: what `close` holds at once
KINDS: tuple[Kind, Kind] = ("q", "k")
TokenTexts = Callable[[Integers, Integers], list[str]]  # of documents and positions


@dataclass(frozen=True)
class _Layer:
    facts: FileFacts
    heads: Mapping[Kind, list[int]]

    def names(self) -> Iterator[HeadName]:
        for kind in KINDS:
            yield from (HeadName(self.facts.layer.layer, head, kind) for head in self.heads[kind])


class VectorWriter:
    """A context manager: `observe` attention calls, and the dataset is in `folder` when the block is left.

    `heads` chooses query heads per layer (all by default); the key heads they read come along. With `tokens`,
    each row has the text of its token.
    """

    def __init__(
        self,
        folder: Path | str,
        sampler: VectorSampler,
        layers: Iterable[LayerFacts],
        *,
        n_layers: int,
        heads: Mapping[int, Collection[int]] | None = None,
        tokens: TokenTexts | None = None,
    ) -> None:
        self._tokens = tokens
        self.folder = Path(folder).resolve()
        self.sampler = sampler
        self._layers = {facts.layer: self._chosen(facts, n_layers, heads) for facts in layers}
        self._layers = {layer: each for layer, each in self._layers.items() if each.heads["q"]}
        if not self._layers:
            raise VectorsError(f"{self.folder}: no head was chosen whose vectors are to be kept")
        self._staging = self.folder.parent / f".{self.folder.name}.partial.tmp"
        self._closed = self._discarded = False
        with self._writing():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise VectorsError(f"{self.folder}: already exists; give a new folder, or remove it first")
            if self._staging.is_symlink():
                raise VectorsError(f"{self._staging}: is a symbolic link, and nothing is written there: remove it")
            shutil.rmtree(self._staging, ignore_errors=True)  # what a killed run left
            self._spool.mkdir(parents=True)

    def _chosen(self, facts: LayerFacts, n_layers: int, heads: Mapping[int, Collection[int]] | None) -> _Layer:
        queries = sorted(set(range(facts.q_heads) if heads is None else heads.get(facts.layer, ())))
        if queries and not 0 <= queries[0] <= queries[-1] < facts.q_heads:
            raise VectorsError(f"layer {facts.layer} has query heads 0 … {facts.q_heads - 1}, not {queries}")
        keys = sorted({facts.kv_head(head) for head in queries})
        of = self.sampler
        about = FileFacts(facts, n_layers, of.layout.context, of.rate, of.seed, of.per_doubling)
        return _Layer(about, {"q": queries, "k": keys})

    @property
    def _spool(self) -> Path:
        return self._staging / ".spool"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()

    def observe(self, call: AttentionCall, documents: Sequence[int], positions: Integers | None = None) -> None:
        """Keep the sampled tokens of one call; `documents` has the corpus index of each row, padding is position -1."""
        if self._closed:
            raise VectorsError(f"{self.folder}: vectors arrived after the dataset was closed")
        layer = self._layers.get(call.layer)
        if layer is None:
            return
        if len(documents) != call.query.shape[0]:
            raise VectorsError(f"{len(documents)} documents for {call.query.shape[0]} rows")
        kept = self.sampler.positions(documents, call.query.shape[2], call.layer, positions)
        rows, tokens = np.nonzero(kept >= 0)
        if not len(rows):
            return
        where = np.stack([np.asarray(documents, dtype=np.int64)[rows], kept[rows, tokens]], axis=1)
        states: dict[Kind, Tensor] = {"q": call.query, "k": call.key}
        vectors = {kind: _gather(states[kind], rows, tokens, layer.heads[kind], layer.facts.layer) for kind in KINDS}
        for kind in KINDS:
            _require_finite(vectors[kind], call.layer, kind, layer.heads[kind], where)
        self._append({f"{call.layer}.rows": where, **{f"{call.layer}.{kind}": vectors[kind] for kind in KINDS}})

    def close(self) -> None:
        """Write every head's file and give the dataset its name; on any failure nothing is left."""
        if self._discarded:
            raise VectorsError(f"{self.folder}: its vectors were discarded, so there is nothing to close")
        if self._closed:
            return
        try:
            with self._writing():
                for layer in self._layers.values():
                    self._write_layer(layer)
                card = vectors_card((name for layer in self._layers.values() for name in layer.names()), self.sampler)
                (self._staging / "README.md").write_text(card, encoding="utf-8")
                shutil.rmtree(self._spool)
                if self.folder.exists():
                    self.folder.rmdir()  # it was empty; if it no longer is, this fails and nothing is overwritten
                os.replace(self._staging, self.folder)
        except BaseException:
            self.discard()
            raise
        self._closed = True

    def discard(self) -> None:
        """Forget everything that was observed."""
        self._closed = self._discarded = True
        shutil.rmtree(self._staging, ignore_errors=True)

    def _append(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        try:
            with self._writing():
                for name, array in arrays.items():
                    with (self._spool / name).open("ab") as file:
                        file.write(np.ascontiguousarray(array).data)
        except BaseException:
            self.discard()  # rows and vectors no longer match
            raise

    def _write_layer(self, layer: _Layer) -> None:
        facts = layer.facts.layer
        spool = self._spool / f"{facts.layer}.rows"
        if not spool.is_file():
            raise VectorsError(
                f"no token of layer {facts.layer} was kept: the layer was not captured, or a rate of "
                f"{self.sampler.rate:g} is too low for these documents"
            )
        where = np.fromfile(spool, dtype=np.int64).reshape(-1, 2)
        order = np.lexsort((where[:, 1], where[:, 0]))
        where = where[order]
        double = np.flatnonzero((np.diff(where, axis=0) == 0).all(axis=1))
        if len(double):
            document, position = where[double[0]]
            raise VectorsError(f"layer {facts.layer}: document {document}, position {position} was captured twice")
        for kind in KINDS:
            self._write_kind(layer, kind, where, order)

    def _write_kind(self, layer: _Layer, kind: Kind, where: Integers, order: NDArray[np.intp]) -> None:
        """All heads of one kind at once: one pass over the spool, one open file per head."""
        import pyarrow.parquet as pq

        facts, heads = layer.facts.layer, layer.heads[kind]
        spool = self._spool / f"{facts.layer}.{kind}"
        vectors = np.memmap(spool, dtype=np.float32, mode="r", shape=(len(order), len(heads), facts.head_dim))
        schema = arrow_schema(facts.head_dim, layer.facts, tokens=self._tokens is not None)
        step = max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // (4 * len(heads) * facts.head_dim)))
        with ExitStack() as stack:
            writers = []
            for head in heads:
                path = self._staging / HeadName(facts.layer, head, kind).folder / DATA_FILE
                path.parent.mkdir()
                options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
                writers.append(stack.enter_context(pq.ParquetWriter(path, schema, **options)))
            for start in range(0, len(order), step):
                part = slice(start, start + step)
                chunk = vectors[order[part]]  # (rows, heads, width)
                for index, writer in enumerate(writers):
                    writer.write_table(self._table(schema, facts, where[part], chunk[:, index]))
        del vectors
        spool.unlink()

    def _table(self, schema: Any, facts: LayerFacts, where: Integers, vectors: NDArray[np.float32]) -> Any:
        import pyarrow as pa

        window = facts.attention_window if facts.attention == "sliding" else None
        columns = [
            pa.array(self.sampler.buckets(where[:, 1]), pa.int32()),
            pa.array(where[:, 0], pa.int32()),
            pa.array(where[:, 1], pa.int32()),
            pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), facts.head_dim),
            pa.array([window] * len(where), pa.int64()),
        ]
        if self._tokens is not None:
            columns.append(pa.array(self._tokens(where[:, 0], where[:, 1]), pa.string()))
        return pa.Table.from_arrays(columns, schema=schema)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise VectorsError(f"{self.folder}: cannot be written ({error.strerror or error})") from error


def _gather(
    states: Tensor, rows: NDArray[np.intp], tokens: NDArray[np.intp], heads: list[int], facts: LayerFacts
) -> NDArray[np.float32]:
    """The chosen tokens of the chosen heads as (tokens, heads, width) float32 on the host."""
    import torch

    if states.shape[1] <= heads[-1] or states.shape[3] != facts.head_dim:
        raise VectorsError(f"layer {facts.layer}: got vectors of shape {tuple(states.shape)}, expected {facts}")
    row, token = (torch.from_numpy(index).to(states.device) for index in (rows, tokens))
    chosen = states.detach()[row, :, token]  # (tokens, all heads, width)
    if len(heads) != states.shape[1]:
        chosen = chosen[:, heads]
    return np.asarray(chosen.to(device="cpu", dtype=torch.float32).contiguous().numpy())


def _require_finite(vectors: NDArray[np.float32], layer: int, kind: str, heads: Sequence[int], where: Integers) -> None:
    bad = ~np.isfinite(vectors).all(axis=2)
    if bad.any():
        row, index = (int(i) for i in np.argwhere(bad)[0])
        name = "query" if kind == "q" else "key"
        document, position = where[row]
        raise ActivationError(
            f"document {document}: a {name} of layer {layer}, head {heads[index]}, position {position} is not finite"
        )
