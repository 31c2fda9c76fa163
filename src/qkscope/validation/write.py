"""Keep a sample of a capture's vectors in the predecessor's layout.

Each attention call's kept rows are appended to one spool file per layer and kind, so memory holds one call and no
file stays open. At the end, each layer is sorted by (document, position) and its heads are written row group by row
group. The files therefore do not depend on how documents were batched. Everything happens in a hidden folder next to
the target, which takes the target's name at the very end: a dataset is complete or not there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import ActivationError, InputError
from qkscope.layers import LayerFacts
from qkscope.moments.layout import PADDING, Layout
from qkscope.moments.second_moments import KINDS, Kind
from qkscope.validation.layout import (
    DATA_FILE,
    TOKEN_COLUMN,
    FileFacts,
    HeadName,
    Integers,
    VectorSample,
    VectorsError,
    arrow_schema,
    sampled_positions,
)

if TYPE_CHECKING:
    from torch import Tensor

    from qkscope.capture.tap import AttentionCall

ROW_GROUP_ROWS = 8192
ROW_GROUP_BYTES = 64 << 20  # of all heads of a layer together: what is in memory at once when a layer is written
TokenTexts = Callable[[Integers, Integers], list[str]]  # of documents and positions

CARD = """# Query and key vectors

{heads} heads' queries and keys as attention multiplies them, written by qkscope. Each token was kept with
probability {probability} (seed {seed}), the same tokens for all heads of a layer, up to position {last}.

| column | what it is |
|---|---|
| `bucket` | which of {buckets} intervals of positions the token is in |
| `example_id` | the document's index in the corpus |
| `position` | the token's position in its document, from 0 |
| `vector` | float32, the head's query (`q`) or key (`k`) |
| `sliding_window` | tokens that the layer's attention sees; null if all |

```python
datasets.load_dataset("path/of/this/folder", "{first}", split="train")
```
"""


class VectorWriter:
    """A context manager: `observe` attention calls, and the dataset is in `folder` when the block is left.

    With `tokens`, each row has the text of its token. After an exception nothing is left.
    """

    def __init__(
        self,
        folder: Path | str,
        sample: VectorSample,
        layout: Layout,
        layers: Iterable[LayerFacts],
        *,
        n_layers: int,
        tokens: TokenTexts | None = None,
    ) -> None:
        self.folder = Path(folder).resolve()
        self._layout, self._tokens = layout, tokens
        draw = sample.rate_at(layout.context), sample.seed, sample.per_doubling
        self._layers = {facts.layer: FileFacts(facts, n_layers, layout.context, *draw) for facts in layers}
        self._staging = self.folder.parent / f".{self.folder.name}.partial.tmp"
        self._spool = self._staging / ".spool"
        with self._writing():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise VectorsError(f"{self.folder}: already exists; give a new folder, or remove it first")
            if self._staging.is_symlink():
                raise VectorsError(f"{self._staging}: is a symbolic link, and nothing is written there: remove it")
            shutil.rmtree(self._staging, ignore_errors=True)  # what a killed run left
            self._spool.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with self._writing():
                    self._finish()
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def observe(self, call: AttentionCall, documents: Sequence[int], positions: Integers | None = None) -> None:
        """Keep the sampled tokens of one call; `documents` has the corpus index of each row, padding is position -1."""
        if call.layer not in self._layers:
            return
        about = self._layers[call.layer]
        facts = about.layer
        if len(documents) != call.query.shape[0]:
            raise VectorsError(f"{len(documents)} documents for {call.query.shape[0]} rows")
        kept = sampled_positions(
            documents,
            call.query.shape[2],
            layer=call.layer,
            rate=about.rate,
            seed=about.seed,
            positions=positions,
            per_doubling=about.per_doubling,
        )
        if kept.max(initial=PADDING) >= about.context:
            raise InputError(f"position {kept.max()} is outside the context of {about.context}")
        rows, tokens = np.nonzero(kept >= self._layout.skip_positions)
        if not len(rows):
            return
        where = np.stack([np.asarray(documents, dtype=np.int64)[rows], kept[rows, tokens]], axis=1)
        arrays = {"rows": where}
        for kind, states, heads in (("q", call.query, facts.q_heads), ("k", call.key, facts.kv_heads)):
            if (states.shape[1], states.shape[3]) != (heads, facts.head_dim):
                raise VectorsError(f"layer {call.layer}: got vectors of shape {tuple(states.shape)}, expected {facts}")
            arrays[kind] = _gather(states, rows, tokens)
            bad = np.argwhere(~np.isfinite(arrays[kind]).all(axis=2))
            if len(bad):
                row, head = bad[0]
                name, (document, position) = "query" if kind == "q" else "key", where[row]
                raise ActivationError(
                    f"document {document}: a {name} of layer {call.layer}, head {head}, position {position} is not "
                    "finite"
                )
        with self._writing():
            for name, array in arrays.items():
                with (self._spool / f"{call.layer}.{name}").open("ab") as file:
                    file.write(np.ascontiguousarray(array).data)

    def _finish(self) -> None:
        """Write every head's file, and give the dataset its name."""
        for about in self._layers.values():
            self._write_layer(about)
        (self._staging / "README.md").write_text(self._card(), encoding="utf-8")
        shutil.rmtree(self._spool)
        if self.folder.exists():
            self.folder.rmdir()  # it was empty; if it no longer is, this fails and nothing is overwritten
        os.replace(self._staging, self.folder)

    def _write_layer(self, about: FileFacts) -> None:
        layer, spool = about.layer.layer, self._spool / f"{about.layer.layer}.rows"
        if not spool.is_file():
            raise VectorsError(
                f"no token of layer {layer} was kept: the layer was not captured, or a rate of {about.rate:g} is too "
                "low for these documents"
            )
        where = np.fromfile(spool, dtype=np.int64).reshape(-1, 2)
        order = np.lexsort((where[:, 1], where[:, 0]))
        where = where[order]
        double = np.flatnonzero((np.diff(where, axis=0) == 0).all(axis=1))
        if len(double):
            document, position = where[double[0]]
            raise VectorsError(f"layer {layer}: document {document}, position {position} was captured twice")
        for kind in KINDS:
            self._write_kind(about, kind, where, order)

    def _write_kind(self, about: FileFacts, kind: Kind, where: Integers, order: NDArray[np.intp]) -> None:
        """All heads of one kind at once: one pass over the spool, one open file per head."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        facts, names = about.layer, _names(about.layer, kind)
        spool = self._spool / f"{facts.layer}.{kind}"
        vectors = np.memmap(spool, dtype=np.float32, mode="r", shape=(len(order), len(names), facts.head_dim))
        schema = arrow_schema(facts.head_dim, about, tokens=self._tokens is not None)
        step = max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // (4 * len(names) * facts.head_dim)))
        with ExitStack() as stack:
            writers = []
            for name in names:
                path = self._staging / name.folder / DATA_FILE
                path.parent.mkdir()
                options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
                writers.append(stack.enter_context(pq.ParquetWriter(path, schema, **options)))
            for start in range(0, len(order), step):
                part = slice(start, start + step)
                columns, chunk = self._token_columns(facts, where[part]), vectors[order[part]]  # (rows, heads, width)
                for head, writer in enumerate(writers):
                    flat = pa.array(chunk[:, head].reshape(-1))
                    columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, facts.head_dim)
                    writer.write_table(pa.table(columns, schema=schema))
        del vectors
        spool.unlink()

    def _token_columns(self, facts: LayerFacts, where: Integers) -> dict[str, Any]:
        """What all heads of a layer say of some tokens: arrow arrays by column."""
        import pyarrow as pa

        document, position = where.T
        window = facts.attention_window if facts.attention == "sliding" else None
        columns = {
            "bucket": pa.array(np.searchsorted(self._layout.edges, position, side="right") - 1, pa.int32()),
            "example_id": pa.array(document, pa.int32()),
            "position": pa.array(position, pa.int32()),
            "sliding_window": pa.array([window] * len(where), pa.int64()),
        }
        if self._tokens is not None:
            columns[TOKEN_COLUMN] = pa.array(self._tokens(document, position), pa.string())
        return columns

    def _card(self) -> str:
        """README.md, with one Hub configuration per head folder, so that `datasets` loads each head by name."""
        names = sorted(name for about in self._layers.values() for kind in KINDS for name in _names(about.layer, kind))
        configs = "".join(
            f"- config_name: {name.folder}\n  data_files:\n  - split: train\n    path: {name.folder}/*.parquet\n"
            for name in names
        )
        about = self._layers[names[0].layer]
        log_uniform = f"min(1, {about.per_doubling} / 2ⁿ) at positions 2ⁿ − 1 to 2ⁿ⁺¹ − 2"
        body = CARD.format(
            heads=sum(name.kind == "q" for name in names),
            probability=log_uniform if about.per_doubling else f"{about.rate:g}",
            seed=about.seed,
            last=about.context - 1,
            buckets=self._layout.buckets,
            first=names[0].folder,
        )
        return f"---\nconfigs:\n{configs}---\n\n{body}"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise VectorsError(f"{self.folder}: cannot be written ({error.strerror or error})") from error


def _names(facts: LayerFacts, kind: Kind) -> list[HeadName]:
    return [HeadName(facts.layer, head, kind) for head in range(facts.q_heads if kind == "q" else facts.kv_heads)]


def _gather(states: Tensor, rows: NDArray[np.intp], tokens: NDArray[np.intp]) -> NDArray[np.float32]:
    """The chosen tokens of all heads as (tokens, heads, width) float32 on the host."""
    import torch

    row, token = (torch.from_numpy(index).to(states.device) for index in (rows, tokens))
    chosen = states.detach()[row, :, token]
    return np.asarray(chosen.to(device="cpu", dtype=torch.float32).contiguous().numpy())
