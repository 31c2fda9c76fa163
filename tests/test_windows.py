"""Errors at every window, against tables made without each group of documents, and which windows are long enough."""

import json

import numpy as np
import pandas as pd
import pytest

from known_errors import moved, write_known
from published_table import window_heads
from qkscope.layers import LayerFacts
from qkscope.lenses.position import LEADING, OWN
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.views import build_tables
from qkscope.lenses.windows import FEWEST_DOCUMENTS, FEWEST_TOKENS, is_shown, window_dependence
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.page.arrays import add_tables
from qkscope.page.errors import add_windows
from qkscope.page.pack import Pack
from qkscope.report.write import write_report
from qkscope.results.read import load_results
from qkscope.stats.jackknife import jackknife_error
from unpacking import unpack
from written import put, table_of

CONTEXT, WIDTH, GROUPS, DOCUMENTS, COUNT = 64, 4, 8, 24, 6
FACTS = LayerFacts(0, COUNT, COUNT, WIDTH)
GROUP_OF = np.arange(DOCUMENTS) % GROUPS


def vectors():
    """Heads whose first direction drifts, and documents with offsets and drifts of their own."""
    rng, t = np.random.default_rng(5), np.arange(CONTEXT)[:, None] / CONTEXT
    scales = np.array([2.0, 1.0, 0.7, 0.4])
    drift = np.array([12.0, 0, 0, 0]) * rng.uniform(0.5, 1.5, size=(1, COUNT, 1, 1))
    found = []
    for _ in range(2):
        own = rng.normal(size=(2, DOCUMENTS, 1, 1, WIDTH))  # heads read the same documents
        noise = rng.normal(size=(DOCUMENTS, COUNT, CONTEXT, WIDTH))
        found.append(scales * (noise + 0.5 * own[0] + 1.5 * t * own[1]) + t * drift)
    return found


def correlations(q, k, window, directions=None):
    """r of queries on PC0 of each head, by singular vectors; along given directions the closest one, with its sign."""
    t, found, axes = np.tile(np.arange(window), len(q)), [], []
    for head in range(COUNT):
        x, y = (z[:, head, :window].reshape(-1, WIDTH) for z in (q, k))
        pool = np.vstack([x, y])
        basis = np.linalg.svd(pool - pool.mean(axis=0), full_matrices=False)[2]
        overlap = basis @ directions[head] if directions is not None else np.eye(WIDTH)[0]
        v = basis[np.argmax(np.abs(overlap))] * np.sign(overlap[np.argmax(np.abs(overlap))])
        r = np.corrcoef(x @ v, t)[0, 1]
        sign = 1.0 if directions is not None else np.sign(r)
        found.append(sign * r)
        axes.append(sign * v)
    return np.array(found), np.array(axes)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A study of one checkpoint, all the way from its sums to its summary."""
    folder, (q, k) = tmp_path_factory.mktemp("windows"), vectors()
    moments = Moments(capture_layout(CONTEXT, buckets=8, groups=GROUPS, common=16), [FACTS])
    moments.add(0, q, k, groups=[int(group) for group in GROUP_OF])
    settings = RowSettings(common=16, skip=0, components=2)
    for name, table in checkpoint_rows(moments, [OWN, LEADING], settings, model="m").items():
        put(folder, name, table)
    (folder / "provenance.json").write_text(json.dumps({"checkpoints": [{"name": "m", "label": "m"}]}))
    return build_tables(load_results(folder)).own.table("window_dependence").set_index("window")


@pytest.mark.parametrize(("window", "within"), [(8, 0.1), (16, 0.03), (32, 0.05), (64, 0.03)])
def test_means_have_the_error_of_a_full_jackknife_at_every_doubling(measured, window, within):
    """Exact at the context and the common window, but for Fisher's scale; elsewhere to first order."""
    q, k = vectors()
    whole, axes = correlations(q, k, window)
    assert measured.loc[window, "r_q"] == pytest.approx(whole.mean(), abs=1e-9)
    kept = [group != GROUP_OF for group in range(GROUPS)]
    without = [correlations(q[keep], k[keep], window, axes)[0].mean() for keep in kept]
    expected = float(jackknife_error(whole.mean(), without, np.bincount(GROUP_OF)))
    assert measured.loc[window, "r_q_se"] == pytest.approx(expected, rel=within)


def test_the_table_says_which_errors_are_exact(measured):
    estimated = "jackknife, first order"
    assert measured["errors"].to_dict() == {8: estimated, 16: "jackknife", 32: estimated, 64: "jackknife"}
    assert measured["explained_variance_se"].notna().all()


# --- enough ---------------------------------------------------------------------------------------


def windows_of(tokens, documents, **columns):
    """Two heads of one checkpoint, a window for each pair of tokens and documents."""
    rows = [
        {"model": "m", "window": 16 * 2**i, "layer": 0, "head": head, "n_q": n + head, "n_k": n, "documents": d}
        for i, (n, d) in enumerate(zip(tokens, documents, strict=True))
        for head in (0, 1)
    ]
    return pd.DataFrame(rows).assign(**{"r_q": 0.5, "r_k": 0.5, "explained_variance": 0.4, **columns})


def test_enough_is_a_number_of_tokens_and_of_documents():
    tokens = [FEWEST_TOKENS - 1, FEWEST_TOKENS, 4000, 4000]
    table = window_dependence(windows_of(tokens, [40, 40, FEWEST_DOCUMENTS - 1, FEWEST_DOCUMENTS]), ["m"])
    assert table["tokens"].tolist() == tokens  # of the head and the kind that has fewest
    assert table["enough"].tolist() == [0, 1, 0, 1]
    assert table.loc[table["enough"] == 1, "window"].min() == 32
    unknown = window_dependence(windows_of([500, 4000], [np.nan, np.nan]), ["m"])
    assert unknown["enough"].tolist() == [0, 1]  # tokens alone decide
    elsewhere = windows_of([500, 4000], [9, 9]).drop(columns=["n_q", "n_k", "documents"])
    assert window_dependence(elsewhere, ["m"])["enough"].isna().all()


def test_a_window_that_is_too_short_is_shown_with_its_error_or_not_at_all():
    table = pd.DataFrame({"enough": [0, 0, 1, np.nan], "r_q_se": [np.nan, 0.1, np.nan, np.nan]})
    assert is_shown(table, "r_q").tolist() == [False, True, True, True]


def long_and_short(folder, replicates_at):
    """The known study with windows 32 and 64; replicates at some of them. 64 has enough tokens, 32 has not."""
    write_known(folder, windows=True)
    table = table_of(folder, "heads")
    table["n_q"] = table["n_k"] = np.where(table["window"] == 64, 5000, 900)
    put(folder, "heads", table.assign(documents=40))
    known = table_of(folder, "replicates")
    parts = [known]
    if 32 in replicates_at:
        halves = {name: known[name] / 2 for name in known.columns if name == "r_q"}
        for group in range(4):  # the same steps on Fisher's scale about half the r_q
            step = np.arctanh(known[f"r_q_without_{group}"]) - np.arctanh(known["r_q"])
            halves[f"r_q_without_{group}"] = moved(known["r_q"] / 2, step)
        parts.append(known.assign(window=32, **halves))
    put(folder, "replicates", pd.concat(parts))
    return build_tables(load_results(folder))


def test_windows_of_published_tables_do_not_say_how_many_tokens_they_have(tmp_path):
    table = window_dependence(window_heads().drop(columns=["n_q", "n_k"], errors="ignore"), ["S3-4.7M"])
    assert table["enough"].isna().all()
    assert is_shown(table.assign(r_q_se=np.nan), "r_q").all()


# --- the page -------------------------------------------------------------------------------------


def test_the_page_has_the_errors_of_every_window(tmp_path):
    tables = long_and_short(tmp_path, [32, 64])
    pack = Pack()
    grid, data = add_tables(pack, tables.files)
    enough = add_windows(pack, grid, tables.own, data["windows"])
    assert enough == {"tokens": FEWEST_TOKENS, "documents": FEWEST_DOCUMENTS}
    assert data["windows"] == [[0, 32], [0, 64], [1, 32], [1, 64]]
    text = pack.text()
    assert list(unpack(text, pack.index, "windows.enough")) == [0, 1, 0, 1]
    table = tables.own.table("window_dependence")
    table = table[table["layer_kind"] == "all"]  # a page has one row for each entry and window
    assert list(unpack(text, pack.index, "windows.r_q_se")) == list(table["r_q_se"])
    assert list(unpack(text, pack.index, "windows.position-dominated_se")) == list(table["position_dominated_se"])
    assert unpack(text, pack.index, "windows.sign_sure").shape == (4, 4)


def test_the_page_draws_short_windows_with_their_errors_only(visit, tmp_path):
    long_and_short(tmp_path, [32, 64])
    write_report(tmp_path, figures=False)
    with visit(tmp_path / "report.html") as page:
        view = page.locator("#view-windows")
        view.scroll_into_view_if_needed()
        view.locator("svg circle").first.wait_for()
        assert view.locator("svg circle").count() == 4
        note = view.locator("figcaption").inner_text()
        assert "Smallest window with at least 1,000 tokens per head and 8 documents: 64 tokens." in note
        assert "Shorter windows are drawn with their errors." in note
        page.locator("#filters summary").click()
        page.get_by_label("unstable component").uncheck()  # no errors for a selection
        view.scroll_into_view_if_needed()
        view.locator("figcaption", has_text="Shorter windows have no errors here and are left out.").wait_for()
        assert view.locator("svg circle").count() == 2


def test_a_head_of_unsure_sign_is_not_discordant_on_the_page(visit, tmp_path):
    """As in the tables: of four heads one has an r_k of -0.5, and its r_q is within two errors of 0."""
    write_known(tmp_path, windows=True)
    for name in ("qk", "heads"):
        table = table_of(tmp_path, name)
        table.loc[(table["layer"] == 0) & (table["head"] == 1), "sign_sure"] = 0.0
        put(tmp_path, name, table)
    write_report(tmp_path, figures=False)
    own = build_tables(load_results(tmp_path)).own
    assert [own.panel.mean("discordant", name) for name in own.names] == [0.0, 0.0]
    with visit(tmp_path / "report.html") as page:
        assert page.evaluate("qkscope.summary(0).discordant") == 0
