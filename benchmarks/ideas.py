"""Alternatives side by side, in turn and in one process: what was tried for the tap, the sums and the analysis.

`python benchmarks/ideas.py [products] [sums] [tap] [rest] [accuracy] [thread] [eigen] [load]` prints medians of
processor time (of all threads) and of wall-clock time; `accuracy` prints distances from float64 instead.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from common import WORK, document_ids, layout_of, load_model, one_document_batches

from qkscope.capture.collect import collect_moments
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.position import qk_table
from qkscope.moments import first_batch
from qkscope.moments.moments import Moments

HEADS, BUCKETS, TOKENS, WIDTH = 12, 16, 128, 64  # one layer of SmolLM2-135M, 2048 tokens


def compare(title: str, cases: dict, repeats: int = 15) -> None:
    spent = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            spent[name].append((time.process_time() - processor, time.perf_counter() - wall))
    print(f"\n{title} (median ms: processor, wall)")
    for name, both in spent.items():
        processor, wall = 1000 * np.median(both, axis=0)
        print(f"  {name:58s} {processor:9.2f} {wall:9.2f}")


def products() -> None:
    cells = HEADS * BUCKETS
    x32 = torch.randn(cells, TOKENS, WIDTH)
    x64, a = x32.double(), x32[..., : WIDTH // 2]
    ones, steps = torch.ones(cells, TOKENS, 1), torch.randn(cells, TOKENS, 1)
    wide = torch.cat([x32, ones, steps], dim=2)
    rest = wide[..., WIDTH // 2 :]
    out32, out64 = torch.empty(cells, WIDTH, WIDTH), torch.empty(cells, WIDTH, WIDTH, dtype=torch.float64)
    square = torch.empty(cells, WIDTH + 2, WIDTH + 2)
    lower, corner = torch.empty(cells, WIDTH // 2 + 2, WIDTH), torch.empty(cells, WIDTH // 2, WIDTH // 2)
    array = x64.numpy()
    numpy_out = np.empty((cells, WIDTH, WIDTH))

    def halves():
        torch.bmm(rest.transpose(1, 2), wide[..., :WIDTH], out=lower)
        torch.bmm(a.transpose(1, 2), a, out=corner)

    together = torch.empty(cells, lower[0].numel() + corner[0].numel())
    of_lower = together[:, : lower[0].numel()].view(lower.shape)
    of_corner = together[:, lower[0].numel() :].view(corner.shape)

    def cell_by_cell():
        torch.bmm(rest.transpose(1, 2), wide[..., :WIDTH], out=of_lower)
        torch.bmm(a.transpose(1, 2), a, out=of_corner)

    def blocks(block=32):
        for start in range(0, TOKENS, block):
            here = slice(start, start + block)
            for left, right, out in ((rest, wide[..., :WIDTH], lower), (a, a, corner)):
                torch.baddbmm(out, left[:, here].transpose(1, 2), right[:, here], beta=start > 0, out=out)

    def per_bucket():
        by_bucket = x32.view(HEADS, BUCKETS, TOKENS, WIDTH)
        for bucket in range(BUCKETS):
            torch.bmm(by_bucket[:, bucket].transpose(1, 2), by_bucket[:, bucket])

    compare(
        "products of one layer's queries and keys",
        {
            "float64, one batched product": lambda: torch.bmm(x64.transpose(1, 2), x64, out=out64),
            "float64, numpy (symmetric: half the work, one thread)": lambda: np.matmul(
                array.transpose(0, 2, 1), array, out=numpy_out
            ),
            "float32, one batched product": lambda: torch.bmm(x32.transpose(1, 2), x32, out=out32),
            "float32, one product per bucket": per_bucket,
            "float32, queries and keys apart": lambda: (
                torch.bmm(x32[:144].transpose(1, 2), x32[:144]),
                torch.bmm(x32[144:].transpose(1, 2), x32[144:]),
            ),
            "float32, ones and positions on both sides": lambda: torch.bmm(wide.transpose(1, 2), wide, out=square),
            "float32, concatenated each time": lambda: torch.bmm(
                torch.cat([x32, ones, steps], dim=2).transpose(1, 2), x32
            ),
            "float32, halves, ones and positions on one side (chosen)": halves,
            "the same in blocks of 32 tokens (chosen at first)": blocks,
            "the same, both into one buffer cell by cell": cell_by_cell,
        },
    )


def sums() -> None:
    """Products added to 30 layers' float64 sums, or straight into float32 ones that float64 would take over later."""
    cells, layers, blocks = HEADS * BUCKETS, 30, TOKENS // 32
    columns = torch.randn(cells, TOKENS, WIDTH + 2)
    shapes = ((cells, WIDTH // 2 + 2, WIDTH), (cells, WIDTH // 2, WIDTH // 2))
    products = [torch.empty(shape) for shape in shapes]
    widened = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
    in_float64 = [[torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(layers)]
    in_float32 = [[torch.zeros(shape) for shape in shapes] for _ in range(layers)]
    half, x = columns[..., : WIDTH // 2], columns[..., :WIDTH]
    factors = ((columns[..., WIDTH // 2 :].transpose(1, 2), x), (half.transpose(1, 2), half))

    def multiply(into, fresh):
        for block in range(blocks):
            here = slice(32 * block, 32 * (block + 1))
            for (left, right), out in zip(factors, into, strict=True):
                torch.baddbmm(out, left[..., here], right[:, here], beta=block > 0 or not fresh, out=out)

    def float64():
        for state in in_float64:
            multiply(products, True)
            for total, copy, product in zip(state, widened, products, strict=True):
                total.add_(copy.copy_(product))

    def float32():
        for state in in_float32:
            multiply(state, False)

    compare("one document's products and 30 layers' sums", {"float64 (chosen)": float64, "float32": float32})


def tap() -> None:
    """A document's 30 layers through the tap: the first one with its pivots, and later ones, also summed at rest."""
    half = WIDTH // 2
    rotation = Rotation(tuple((i, i + half) for i in range(half)), tuple(10000.0 ** (-i / half) for i in range(half)))
    facts = [LayerFacts(layer, 9, 3, WIDTH, rotary="rotary", rotation=rotation) for layer in range(30)]
    q, k = (torch.randn(1, 2048, count, WIDTH).transpose(1, 2) for count in (9, 3))
    pre_rope = layout_of(2048)
    not_at_rest = replace(pre_rope, unrotated_every=0)

    def document(moments):
        for layer in range(30):
            moments.add(layer, q, k)

    def first(pivot_tokens):
        kept, first_batch.PIVOT_TOKENS = first_batch.PIVOT_TOKENS, pivot_tokens
        document(Moments(not_at_rest, facts))
        first_batch.PIVOT_TOKENS = kept

    later = {layout: Moments(layout, facts) for layout in (not_at_rest, pre_rope)}
    whole = replace(not_at_rest, edges=(0, *not_at_rest.edges[2:]))  # position 0 among the others
    later[whole] = Moments(whole, facts)
    for moments in later.values():
        document(moments)
    compare(
        "one document's 30 layers",
        {
            "first document, pivot from 256 tokens (chosen)": lambda: first(256),
            "first document, pivot from all tokens": lambda: first(10**9),
            "later document": lambda: document(later[not_at_rest]),
            "later document, position 0 in no bucket of its own": lambda: document(later[whole]),
            "later document, one token in eight also at rest (chosen)": lambda: document(later[pre_rope]),
        },
        5,
    )


def rest() -> None:
    """How tokens are turned back: coordinates change places in runs, or one by one."""
    chosen, order = torch.randn(HEADS, 256, WIDTH), torch.arange(WIDTH).roll(WIDTH // 2)
    strided = torch.randn(1, 2048, HEADS, WIDTH).transpose(1, 2)
    rows, tokens = torch.zeros(256, dtype=torch.int64), torch.arange(0, 2048, 8)
    compare(
        "one layer's tokens at rest",
        {
            "partners in runs (chosen)": lambda: torch.cat([chosen[..., WIDTH // 2 :], chosen[..., : WIDTH // 2]], -1),
            "partners one by one": lambda: chosen.index_select(-1, order),
            "evenly spaced tokens, a copied view (chosen)": lambda: torch.cat([strided[0, :, ::8]]),
            "evenly spaced tokens, gathered": lambda: torch.cat([strided.permute(1, 0, 2, 3)[:, rows, tokens]]),
        },
        200,
    )


def accuracy() -> None:
    """Distance of qk.csv from float64 throughout, real activations: block lengths, with and without a float64 start."""
    ids, kept = document_ids(8, 2048)[:4], {}

    def keep(call, batch):
        kept.setdefault(call.layer, []).append((call.query.clone(), call.key.clone()))

    moments = collect_moments(load_model(), one_document_batches(ids), layout_of(2048), on_call=keep)

    def table(dtype, together=1):
        again = Moments(moments.layout, moments.layers.values(), moments.provenance)
        for layer, pairs in kept.items():
            for first in range(0, len(pairs), together):
                q, k = (torch.cat(part).to(dtype) for part in zip(*pairs[first : first + together], strict=True))
                again.add(layer, q, k)
        return qk_table(again, model="m")

    def show(what, found):
        off = {name: (found[name].abs() - exact[name].abs()).abs().max() for name in ("r_q", "r_k")}
        print(what, ", ".join(f"{name} {value:.1e}" for name, value in off.items()))

    exact = table(torch.float64)
    for together in (1, 2, 4):
        show(f"float32 products, {together} documents in a batch:", table(torch.float32, together))


def thread() -> None:
    """Sums on a side thread while the next layer runs, or in between."""
    heads, moments = (9, 3), Moments(layout_of(2048), [LayerFacts(0, 9, 3, 64)])
    q, k = (torch.randn(1, 2048, count, 64).transpose(1, 2) for count in heads)
    hidden, weight = torch.randn(2048, 576), torch.randn(576, 6144)
    pool = ThreadPoolExecutor(1)

    def layer():
        for _ in range(3):
            hidden @ weight

    def inline():
        for _ in range(5):
            moments.add(0, q, k)
            layer()

    def aside():
        waiting = []
        for _ in range(5):
            waiting.append(pool.submit(moments.add, 0, q, k))
            layer()
        for each in waiting:
            each.result()

    inline()
    compare(f"five layers and their sums, {torch.get_num_threads()} threads", {"in between": inline, "aside": aside})


def eigen() -> None:
    import scipy.linalg
    from scipy.linalg import lapack
    from threadpoolctl import threadpool_limits

    x = np.random.default_rng(0).normal(size=(270, 300, 64))
    pools = np.einsum("hnd,hne->hde", x, x)
    tensor = torch.from_numpy(pools)
    pool = ThreadPoolExecutor()

    def tridiagonal(matrix):
        reduced, diagonal, beside, tau, _ = lapack.dsytrd(matrix, lower=1, lwork=2048)
        _, values, vectors, _ = lapack.dstemr(diagonal, np.append(beside, 0.0), 2, 0.0, 0.0, 55, 64, compute_v=1)
        turned, _, _ = lapack.dormqr("L", "N", reduced[1:, :-1], tau, vectors[1:, :10], 320)
        return values[:10], np.concatenate([vectors[:1, :10], turned])

    with threadpool_limits(1, user_api="blas"):
        compare(
            "eigenvectors of 270 heads, d = 64",
            {
                "numpy, batched": lambda: np.linalg.eigh(pools),
                "numpy, batched, a thread per core (chosen)": lambda: list(
                    pool.map(np.linalg.eigh, np.array_split(pools, 30))
                ),
                "scipy, dsytrd and dstemr for the top 10": lambda: [tridiagonal(m) for m in pools],
                "the same, a thread per core": lambda: list(pool.map(tridiagonal, pools)),
                "torch, batched": lambda: torch.linalg.eigh(tensor),
                "scipy, top 10 (syevr)": lambda: [
                    scipy.linalg.eigh(m, subset_by_index=(54, 63), driver="evr") for m in pools
                ],
            },
            5,
        )


def load() -> None:
    from safetensors import safe_open

    moments = Moments(layout_of(2048), [LayerFacts(layer, 9, 3, 64) for layer in range(30)], {"n_layers": 30})
    for layer in range(30):
        moments.add(layer, torch.randn(1, 9, 2048, 64), torch.randn(1, 3, 2048, 64))
    path = WORK / "ideas.safetensors"
    moments.save(path)

    def mapped():
        with safe_open(path, framework="numpy") as file:
            return [file.get_tensor(name) for name in file.keys() if name.endswith("buckets.xx")]  # noqa: SIM118

    size = f"{path.stat().st_size / 1e6:.0f} MB"
    compare(
        f"a moments file of {size}",
        {"read, checked (chosen)": lambda: Moments.load(path), "bucket sums only, through a memory map": mapped},
        5,
    )


if __name__ == "__main__":
    parts = {part.__name__: part for part in (products, sums, tap, rest, accuracy, thread, eigen, load)}
    for name in sys.argv[1:] or parts:
        parts[name]()
