"""Kept tokens of every head: which are shown, where they lie, what they are called; as a table and in the drawer."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import TOKEN_TEXTS
from qkscope.cli.main import main
from qkscope.lenses.sample import AXES, FAR, SPREAD, TOGETHER, far_rows, spread_rows
from written import put, table_of

HEADS = ((0, 1, 0), (3, 2, 1))  # layer, head, the key head that it reads


# --- which tokens -----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=90))
def test_the_even_sample_is_of_some_documents_alike(sizes):
    document = np.repeat(np.arange(len(sizes)) * 3, sizes)
    rows = spread_rows(document)
    assert 0 < len(rows) <= SPREAD
    assert (np.diff(rows) > 0).all()
    _, counts = np.unique(document[rows], return_counts=True)
    most = counts.max()
    for name, count in zip(*np.unique(document[rows], return_counts=True), strict=True):
        there = np.flatnonzero(document == name)
        assert count == min(most, len(there))  # a document has as many as the others, or all of its own
        assert {there[0], there[-1]} <= set(rows.tolist()) or count == 1
    if np.median(sizes) >= TOGETHER and len(sizes) >= SPREAD // TOGETHER:
        assert len(counts) == SPREAD // TOGETHER


def test_of_six_documents_four_are_shown_with_twelve_tokens_each():
    """By hand: places 0, 5/3, 10/3 and 5 of six documents; places 0, 31/11, 62/11, … of 32 tokens."""
    document = np.repeat(np.arange(6), 32)
    rows = spread_rows(document)
    assert np.unique(document[rows]).tolist() == [0, 2, 3, 5]
    assert rows[:12].tolist() == [0, 3, 6, 8, 11, 14, 17, 20, 23, 25, 28, 31]
    assert spread_rows(np.repeat([7], 3)).tolist() == [0, 1, 2]


def test_the_tokens_that_lie_far_out_are_added_and_no_token_twice():
    generator = np.random.default_rng(1)
    position = np.tile(np.arange(50), 4)
    clouds = generator.normal(size=(3, 200, 2)) + position[:, None] * np.array([0.5, 0.1])
    clouds[1, 23] += 40.0
    clouds[2, 101] -= 60.0
    spread = np.arange(0, 200, 4)
    far = far_rows(clouds, position, spread)
    assert {23, 101} <= set(far.tolist())
    assert len(far) == FAR
    assert not set(far.tolist()) & set(spread.tolist())
    on_a_line = position[:, None] * np.array([1.0, 2.0])
    assert far_rows([on_a_line], position, spread).tolist() == []


# --- the table --------------------------------------------------------------------------------------


def vectors_of(results, layer, head, key):
    """All queries and keys of a head as they were kept: every token, in order of document and position."""
    files = [
        results / f"vectors/one/l{layer:02d}h{at:02d}{kind}/data.parquet" for kind, at in (("q", head), ("k", key))
    ]
    rows = [pq.read_table(file).to_pandas().sort_values(["example_id", "position"]) for file in files]
    where = rows[0][["example_id", "position"]].to_numpy()
    return where, {kind: np.stack(each["vector"]).astype(float) for kind, each in zip("qk", rows, strict=True)}


def axes_by_hand(where, vectors):
    """Directions of a head from all of its tokens: components of the pool, drift, and separation at a right angle."""
    pool = np.concatenate([vectors["q"], vectors["k"]])
    t = np.tile(where[:, 1].astype(float), 2)
    _, directions = np.linalg.eigh(np.cov(pool.T, bias=True))
    axes = {f"pc{i}": directions[:, -1 - i] for i in range(10)}
    drift = (pool - pool.mean(0)).T @ (t - t.mean())
    axes["a"] = drift / np.linalg.norm(drift)
    offset = vectors["q"].mean(0) - vectors["k"].mean(0)
    apart = np.cov(vectors["q"].T, bias=True) + np.cov(vectors["k"].T, bias=True) + np.outer(offset, offset)
    flat = np.eye(len(drift)) - np.outer(axes["a"], axes["a"])
    axes["b"] = np.linalg.eigh(flat @ apart @ flat)[1][:, -1]
    axes["b"] *= np.sign(axes["b"] @ offset)
    return axes


def rows_of(results, layer, head):
    table = table_of(results, "tokens")
    return table[(table["layer"] == layer) & (table["head"] == head)].reset_index(drop=True)


@pytest.mark.parametrize(("layer", "head", "key"), HEADS)
def test_tokens_lie_where_the_axes_of_all_tokens_put_them(kept_tokens, layer, head, key):
    """Every token was kept, so that numpy has the same axes; those of components have a sign of their own."""
    mine = rows_of(kept_tokens, layer, head)
    where, vectors = vectors_of(kept_tokens, layer, head, key)
    place = {tuple(each): i for i, each in enumerate(where.tolist())}
    rows = [place[pair] for pair in zip(mine["document"], mine["position"], strict=True)]
    for axis, direction in axes_by_hand(where, vectors).items():
        both = np.concatenate([mine[f"{kind}_{axis}"] for kind in "qk"])
        expected = np.concatenate([vectors[kind][rows] @ direction for kind in "qk"])
        sign = 1.0 if axis in "ab" else np.sign(both @ expected)
        np.testing.assert_allclose(both, sign * expected, atol=1e-4 * np.abs(expected).max())


def far_by_hand(results, layer, heads):
    """How far each token lies out at most, over queries and keys of these heads in two planes."""
    farthest = 0.0
    for head, key in heads:
        where, vectors = vectors_of(results, layer, head, key)
        axes = axes_by_hand(where, vectors)
        t = where[:, 1].astype(float)
        for names in (("pc0", "pc1"), ("a", "b")):
            for each in vectors.values():
                xy = np.stack([each @ axes[name] for name in names], axis=1)
                line = np.stack([np.polyval(np.polyfit(t, xy[:, i], 1), t) for i in range(2)], axis=1)
                spread = np.linalg.inv(np.cov((xy - line).T, bias=True))
                farthest = np.maximum(farthest, np.einsum("ni,ij,nj->n", xy - line, spread, xy - line))
    return where, np.sqrt(farthest)


def test_a_layer_has_the_even_sample_and_the_tokens_that_lie_farthest_out(kept_tokens):
    mine = rows_of(kept_tokens, 0, 1)
    even, far = (mine[mine["spread"] == each] for each in (1, 0))
    assert len(even) == 48
    assert set(even["document"]) == {0, 2, 3, 5}
    where, farthest = far_by_hand(kept_tokens, 0, [(0, 0), (1, 0), (2, 1), (3, 1)])
    taken = set(zip(even["document"], even["position"], strict=True))
    order = [tuple(where[i]) for i in np.argsort(-farthest) if tuple(where[i]) not in taken]
    assert set(zip(far["document"], far["position"], strict=True)) == set(order[:8])


def test_tokens_have_their_text_as_it_was(kept_tokens):
    mine = table_of(kept_tokens, "tokens")
    assert not mine["text"].str.startswith(("=", "-", "+", "@")).any()  # nothing that a spreadsheet would compute
    for row in mine.itertuples():
        assert json.loads(row.text) == TOKEN_TEXTS[int(row.document)][int(row.position)]


def test_the_columns_are_those_that_are_declared(kept_tokens):
    assert set(AXES) == {*(f"pc{i}" for i in range(10)), "a", "b"}
    columns = table_of(kept_tokens, "tokens").columns
    assert {f"{kind}_{axis}" for kind in "qk" for axis in AXES} <= set(columns)


def test_tables_without_vectors_have_no_sample_and_an_old_one_goes(kept_tokens, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(kept_tokens, copy)
    shutil.rmtree(copy / "vectors")
    assert (copy / "tokens.csv").is_file()
    assert main(["analyze", str(copy)]) == 0
    assert not (copy / "tokens.csv").exists()
    assert main(["analyze", str(kept_tokens), "--no-detail", "--out", str(tmp_path / "short")]) == 0
    assert not (tmp_path / "short/tokens.csv").exists()


# --- the drawer -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_page(kept_tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("token_page")
    assert main(["report", str(kept_tokens), "--no-figures", "--out", str(out)]) == 0
    return out / "report.html"


def chart_of(page):
    chart = page.locator("#head [data-chart=sample]")
    chart.locator("circle").first.wait_for(state="attached")
    return chart


def marks(chart):
    """Colour, strength and place of each circle (queries), without the one of the key."""
    read = "nodes => nodes.map((n) => ['fill', 'opacity', 'cx', 'cy'].map((name) => n.getAttribute(name)))"
    return chart.locator("circle").evaluate_all(read)[:-1]


def test_the_drawer_shows_the_kept_tokens_of_a_head(kept_tokens, token_page, visit):
    """56 tokens: as many circles (queries) and squares (keys), and one of each in the key."""
    with visit(token_page, "#head=0.1") as page:
        chart = chart_of(page)
        circles = marks(chart)
        assert len(circles) == 56
        fills = chart.locator("path").evaluate_all("nodes => nodes.map((node) => node.getAttribute('fill'))")
        assert len([fill for fill in fills if fill not in (None, "none")]) == 57
        strength = [float(opacity or 1) for _, opacity, _, _ in circles]
        assert (min(strength), max(strength)) == (0.25, 1)
        assert_placed(circles, rows_of(kept_tokens, 0, 1), "pc0", "pc1")


def assert_placed(circles, rows, across, up):
    """Circles stand where the table says, on two straight scales: right and up is more."""
    for name, at, sign in ((f"q_{across}", 2, 1), (f"q_{up}", 3, -1)):
        places = np.array([float(each[at]) for each in circles])
        slope, start = np.polyfit(rows[name], places, 1)
        assert slope * sign > 0
        # Pixels: a point is one of 255 places between the outermost ones, of which the chart has less than 350.
        np.testing.assert_allclose(places, slope * rows[name] + start, atol=1.0)


def test_a_reader_chooses_any_two_axes_and_the_link_has_them(kept_tokens, token_page, visit):
    with visit(token_page, "#head=0.1") as page:
        chart = chart_of(page)
        menus = chart.locator("select")
        options = menus.nth(0).locator("option").all_inner_texts()
        assert options == [*(f"PC{i}" for i in range(10)), "a (drift)", "b (separation)"]
        menus.nth(0).focus()
        menus.nth(0).select_option("pc3")
        assert page.evaluate("document.activeElement.dataset.control") == "across"  # the keyboard stays where it was
        chart.locator("select").nth(1).select_option("b")
        assert_placed(marks(chart), rows_of(kept_tokens, 0, 1), "pc3", "b")
        assert "tokens=pc3+b" in page.url
        assert "PC3: " in chart.inner_text()
        chart.locator("select").nth(0).select_option("b")  # the other one's: they change places
        assert_placed(marks(chart), rows_of(kept_tokens, 0, 1), "b", "pc3")
    with visit(token_page, "#head=3.2&tokens=a+b") as page:
        assert_placed(marks(chart_of(page)), rows_of(kept_tokens, 3, 2), "a", "b")
        assert "PC" not in chart_of(page).locator("p.about").first.inner_text()


def farthest_by_hand(rows, across, up, document=None):
    """The three farthest queries and keys, by numpy: lines and spreads are of the even sample."""
    names = []
    for kind in "qk":
        xy = rows[[f"{kind}_{across}", f"{kind}_{up}"]].to_numpy()
        even, t = (rows["spread"] == 1).to_numpy(), rows["position"].to_numpy()
        line = np.stack([np.polyval(np.polyfit(t[even], xy[even, i], 1), t) for i in range(2)], axis=1)
        spread = np.linalg.inv(np.cov((xy - line)[even].T, bias=True))
        far = np.einsum("ni,ij,nj->n", xy - line, spread, xy - line)
        order = [i for i in np.argsort(-far) if document is None or rows["document"][i] == document]
        names += [(kind, int(rows["document"][i]), int(rows["position"][i])) for i in order[:3]]
    return names


def test_outliers_are_named_by_their_token(kept_tokens, token_page, visit):
    rows = rows_of(kept_tokens, 0, 1)
    kinds = {"q": "query", "k": "key"}
    with visit(token_page, "#head=0.1&tokens=a+b") as page:
        text = chart_of(page).inner_text()
        for kind, document, position in farthest_by_hand(rows, "a", "b"):
            spelled = json.dumps(TOKEN_TEXTS[document][position])[1:-1]
            assert f"{kinds[kind]} “{spelled}” (document {document}, position {position})" in text
    with visit(token_page, "#head=0.1&document=3") as page:
        text = chart_of(page).locator("p.about").last.inner_text()
        expected = farthest_by_hand(rows, "pc0", "pc1", document=3)
        assert all(f"(document {document}, position {position})" in text for _, document, position in expected)
        assert text.count("(document 3,") == 6


def test_one_document_is_drawn_over_the_corpus(kept_tokens, token_page, visit):
    rows = rows_of(kept_tokens, 0, 1)
    with visit(token_page, "#head=0.1") as page:
        chart = chart_of(page)
        blue = marks(chart)[0][0]
        menu = chart.locator("select[data-control=document]")
        counts = rows["document"].value_counts().sort_index()
        listed = [f"document {document:.0f} ({count} tokens)" for document, count in counts.items() if count > 1]
        assert set(listed) <= set(menu.locator("option").all_inner_texts())
        menu.select_option("2")
        circles = marks(chart)
        assert sum(fill == blue for fill, *_ in circles) == counts[2]
        assert len(circles) == 56  # the others are still there, in grey, and below
        assert all(fill != blue for fill, *_ in circles[: 56 - counts[2]])
        assert "document=2" in page.url
        chart.locator("select[data-control=document]").select_option("all")
        assert all(fill == blue for fill, *_ in marks(chart))
        assert "document=" not in page.url


def test_the_pointer_finds_a_token(kept_tokens, token_page, visit):
    with visit(token_page, "#head=0.1&document=5") as page:
        chart = chart_of(page)
        last = chart.locator("circle").nth(-2)
        last.scroll_into_view_if_needed()
        last.hover(force=True)
        tip = page.locator(".tooltip").inner_text()
        assert "document 5, position" in tip
        assert "PC0 " in tip


def test_tokens_whose_texts_were_not_kept_are_named_by_their_place(kept_tokens, visit, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(kept_tokens, copy)
    put(copy, "tokens", table_of(copy, "tokens").assign(text=""))
    assert main(["report", str(copy), "--no-figures"]) == 0
    _, document, position = farthest_by_hand(rows_of(kept_tokens, 0, 1), "pc0", "pc1")[0]
    with visit(copy / "report.html", "#head=0.1") as page:
        assert f"query at document {document}, position {position}" in chart_of(page).inner_text()


def test_a_link_to_axes_that_are_not_there_says_so_and_shows_others(token_page, visit):
    with visit(token_page, "#head=0.1&tokens=pc0+pc77&document=4444") as page:
        chart = chart_of(page)
        assert "tokens pc0 pc77" in page.locator("body").inner_text()
        assert chart.locator("select").evaluate_all("nodes => nodes.map((n) => n.value)") == ["pc0", "pc1", "all"]
