"""Errors on the page: what the tables say, packed and in a real browser; none where the tables have none."""

import json
import re

import numpy as np
import pandas as pd
import pytest

import shared
from known_errors import FAR, HEADS, write_known
from qkscope.lenses.views import build_tables
from qkscope.page.arrays import add_tables
from qkscope.page.errors import add_errors
from qkscope.page.pack import Pack
from qkscope.report.write import write_report
from qkscope.results.read import load_results
from qkscope.stats.means import Part
from test_page_browser import drawn, middle, over_cell, swept, unfold
from unpacking import unpack
from written import put, table_of


@pytest.fixture(scope="module")
def known():
    return shared.once("known errors", write_reported)


@pytest.fixture(scope="module")
def bare():
    return shared.once("no known errors", lambda folder: write_reported(folder, errors=False))


def write_reported(folder, **options):
    write_known(folder, windows=True, **options)
    write_report(folder, figures=False)


def packed(results):
    pack = Pack()
    grid, _ = add_tables(pack, results)
    add_errors(pack, grid, build_tables(results))
    return pack


def test_errors_and_flags_are_packed_by_head(tmp_path):
    results = write_known(tmp_path)
    pack = packed(results)
    text = pack.text()
    expected = {
        "r_q_se": [(1 - r_q**2) * FAR for r_q, _, _, _ in HEADS.values()],
        "r_k_se": [(1 - r_k**2) * FAR for _, r_k, _, _ in HEADS.values()],
        "explained_variance_se": [FAR] * 4,
        "unstable": [0, 1, 0, 0],
        "category_share": [0.5, 1, 1, 1],
        "sign_unknown": [0, 0, 0, 0],
        "undecided": [1, 0, 0, 1],  # 0.71 is within 3.18 errors (four groups) of 0.7, and 0.2 of 0.3
    }
    for name, values in expected.items():
        assert pack.index[f"own.{name}"]["type"] == "float16"
        np.testing.assert_allclose(unpack(text, pack.index, f"own.{name}"), [values, values], rtol=1e-3)
    trajectory = build_tables(results).own.mean_table(("r_q",))
    assert list(unpack(text, pack.index, "own.mean.r_q_se")) == list(trajectory["r_q_se"])


def test_results_without_errors_pack_none(tmp_path):
    pack = packed(write_known(tmp_path, errors=False))
    assert not [name for name in pack.index if name.endswith("_se") or "mean" in name or name == "own.undecided"]


# --- in a browser -----------------------------------------------------------------------------------


def panel(page):
    """The head panel's terms and texts."""
    terms = page.locator("#head dl.facts-small").first
    return dict(zip(terms.locator("dt").all_inner_texts(), terms.locator("dd").all_inner_texts(), strict=True))


def shown(page):
    return {(d["layer"], d["head"]) for d in page.evaluate("qkscope.dots()") if d["shown"]}


def test_a_head_is_shown_with_its_error(visit, known):
    # FAR = 0.034641: 0.71 has (1 - 0.71^2) FAR = 0.01718, 0.9 has 0.00658, and explained variance FAR itself
    with visit(known / "report.html", "#head=0.0") as page:
        told = panel(page)
        assert told["r_q"] == "0.710 ± 0.017"
        assert told["r_k"] == "0.9000 ± 0.0066"
        assert told["explained variance"] == "0.500 ± 0.035"
        assert told["confidence"] == (
            "50% of other samples of documents give this category; undecided: another category is within the "
            "confidence interval"
        )
        row = page.locator("#numbers tbody tr", has_text="L0H0").inner_text()
        assert "0.710 ± 0.017" in row
        assert "50%" in row
        page.locator("#view-map").scroll_into_view_if_needed()
        over_cell(page, page.locator("#view-map canvas"), 0, 0, heads=2)
        tooltip = page.locator(".tooltip").inner_text().splitlines()
        assert tooltip[0] == "Layer 0, head 0"
        assert {"r_q 0.710 ± 0.017", "r_k 0.9000 ± 0.0066", "explained variance 0.500 ± 0.035"} <= set(tooltip)
        assert tooltip[-1].startswith("undecided")


def test_a_table_without_errors_shows_none(visit, bare):
    with visit(bare / "report.html", "#head=0.0") as page:
        assert panel(page)["r_q"] == "0.7100"
        assert "confidence" not in panel(page)
        assert "±" not in page.locator("#numbers").inner_text()
        assert page.locator("#numbers thead").inner_text().count("same category") == 0
        assert page.locator("[data-filter=unsure]").count() == 0
        page.locator("#view-signal").scroll_into_view_if_needed()
        page.locator("#view-signal svg text", has_text="mean r_q").first.wait_for()
        assert "SE over documents" not in page.locator("#view-signal svg").text_content()


def test_unsure_heads_can_be_left_out_and_sorted(visit, known):
    with visit(known / "report.html") as page:
        page.locator("#filters summary").click()
        page.get_by_label("unstable component").uncheck()
        assert shown(page) == set(HEADS) - {(0, 1)}
        page.get_by_label("undecided category").uncheck()
        assert shown(page) == {(1, 0)}
        assert "without unstable, undecided heads" in page.locator("#selection").inner_text()
        page.locator("#clear").click()
        assert shown(page) == set(HEADS)
        page.get_by_role("button", name="same category").click()
        page.get_by_role("button", name="same category").click()  # rising: the least sure first
        assert page.locator("#numbers tbody tr").first.inner_text().startswith("L0H0")


def test_means_have_their_error_until_a_filter_chooses_heads(visit, known):
    table = build_tables(load_results(known)).own.mean_table(("r_q",))
    with visit(known / "report.html", "#kinds=together") as page:
        signal = page.locator("#view-signal")
        signal.scroll_into_view_if_needed()
        signal.locator("svg text", has_text="± 1 SE over documents").wait_for()
        page.mouse.move(*middle(swept(drawn(page, "view-signal")), lambda _, lines: lines[:1] == ["Late"]))
        assert float(table["r_q"].iloc[-1]) == pytest.approx(0.3775)  # of 0.71, 0.5, 0.1 and 0.2
        error = float(table["r_q_se"].iloc[-1])
        assert f"mean r_q 0.378 ± {error:.3f}, SD over heads" in page.locator(".tooltip").inner_text()
        page.locator("#filters summary").click()
        page.get_by_label("unstable component").uncheck()
        signal.scroll_into_view_if_needed()
        signal.locator("svg text", has_text="± 1 SE over documents").wait_for(state="detached")
        assert "not for this selection" in signal.inner_text()


def test_replicates_are_not_a_lens_of_their_own(visit, known):
    with visit(known / "report.html", "#head=0.0") as page:
        assert page.locator(".lens-facts").count() == 0


def test_means_by_depth_shares_and_comparisons_have_their_errors(visit, known):
    tables = build_tables(load_results(known)).own
    with visit(known / "report.html") as page:
        depth = swept(drawn(page, "view-depth-rq"))
        page.mouse.move(*middle(depth, lambda _, lines: lines[:2] == ["Early", "layer 0"]))
        error = tables.panel.error("r_q", tables.names[0], Part(layer=0))
        assert f"± {error:.2g}" in page.locator(".tooltip").inner_text()
        unfold(page)
        # Two categories of each checkpoint change with the documents: position-dominated and mixed.
        assert drawn(page, "view-stack").locator("[data-part=error]").count() == 4
        rows = dict(
            row.split("\t", 1) for row in page.locator("#measures table tbody tr").all_inner_texts() if "\t" in row
        )
        r_q = tables.panel.error("r_q", tables.names[0])
        assert rows["mean r_q"].count(f"± {r_q:.2g}") == 2
        assert rows["mean r_q"].endswith(f"0.000 ± {np.sqrt(2) * r_q:.3f} (unpaired)")  # what they read is not recorded
        assert "B − A is unpaired" in page.locator("#measures .note").inner_text()


@pytest.fixture(scope="module")
def same_documents(tmp_path_factory):
    """Both checkpoints read the same documents; the late one moves with them three times as far."""
    folder = tmp_path_factory.mktemp("same")
    write_known(folder)
    rows = table_of(folder, "replicates")
    late = rows["model"] == "late"
    for name in ("r_q", "r_k", "explained_variance"):
        for group in range(4):
            moved = rows[f"{name}_without_{group}"] - rows[name]
            rows.loc[late, f"{name}_without_{group}"] = (rows[name] + 3 * moved)[late]
    put(folder, "replicates", rows)
    record = json.loads((folder / "provenance.json").read_text())
    for entry in record["checkpoints"]:
        entry |= {"documents": 40, "corpus": {"fingerprint": "the same"}}
    (folder / "provenance.json").write_text(json.dumps(record))
    write_report(folder, figures=False)
    return folder


def test_what_documents_do_to_both_checkpoints_cancels_in_their_difference(visit, same_documents):
    with visit(same_documents / "report.html") as page:
        rows = dict(
            row.split("\t", 1) for row in page.locator("#measures table tbody tr").all_inner_texts() if "\t" in row
        )
        # Three heads move with the documents by FAR and one against: the mean by FAR / 2, at the late checkpoint by
        # 3 FAR / 2. Paired, the difference moves by FAR = 0.0346; unpaired it would be sqrt(1 + 9) / 2 FAR = 0.055.
        assert rows["mean explained variance"].endswith("0.000 ± 0.035")
        assert "paired: both read the same documents" in page.locator("#measures .note").inner_text()
        changes = pd.read_parquet(same_documents / "tables/head_changes.parquet")
        row = changes.query("windows == 'own' and layer == 0 and head == 1").iloc[0]
        canvas = page.locator("#view-difference canvas")
        canvas.scroll_into_view_if_needed()
        canvas.focus()
        page.keyboard.press("ArrowRight")  # from the first head to its neighbour
        told = page.locator("#live").text_content()
        assert told.startswith("Layer 0, head 1, Early → Late, r_k ")
        error = float(re.search(r"± ([\d.]+)", told)[1])
        assert error == pytest.approx(row["r_k_change_se"], rel=0.05)  # one byte, two digits
        assert "unpaired" not in told
        assert told.endswith("not significant")


def test_heads_of_unknown_sign_can_be_left_out(visit, tmp_path):
    write_known(tmp_path)
    table = pd.read_csv(tmp_path / "qk.csv")
    table.loc[(table["layer"] == 0) & (table["head"] == 1), "sign_sure"] = 0.0
    table.to_csv(tmp_path / "qk.csv", index=False)
    write_report(tmp_path, figures=False)
    with visit(tmp_path / "report.html") as page:
        page.locator("#filters summary").click()
        page.get_by_label("unknown sign of r_k").uncheck()
        assert shown(page) == set(HEADS) - {(0, 1)}
        assert "without sign unknown heads" in page.locator("#selection").inner_text()
