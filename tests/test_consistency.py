"""One number, one value: the summary, the page, the cards, and the tables state the same wherever they state the same.

Nothing here is compared with the code's own output alone: the means are computed from the rows of heads by pandas.
"""

import re

import pandas as pd
import pytest

from qkscope.page.write import modules, page_html
from qkscope.report.cards import drawable, figure_card
from qkscope.report.claims import claims_page
from qkscope.report.summary import summarize
from qkscope.report.write import write_long_tables
from qkscope.words.blocks import to_markdown
from study_types import TYPES, write_type


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("consistent")
    return folder, write_type(folder, TYPES["learns, then longer contexts"])


@pytest.fixture(scope="module")
def means(study):
    """Mean r_q and r_k of the rotary heads, by checkpoint and role of the window, from the rows themselves."""
    folder, _ = study
    own = pd.read_csv(folder / "qk.csv").assign(role="own")
    common = pd.read_csv(folder / "components.csv").assign(role="common")
    rotary = pd.concat([own, common]).query("rotary == 'rotary'")
    return rotary.groupby(["role", "model"])[["r_q", "r_k"]].mean()


def printed(text, pattern):
    """The numbers of every match, as printed."""
    return [tuple(float(each.replace("−", "-")) for each in match) for match in re.findall(pattern, text)]


def test_the_summary_prints_the_means_of_the_rows(study, means):
    text = re.sub(r"\s+", " ", str(summarize(study[1])))
    rise = printed(text, r"mean r_q of 8 rotary heads rises from ([\d.]+) \(c0\) to ([\d.]+) \(c2\)")
    assert rise == [(round(means.r_q["own", "c0"], 2), round(means.r_q["own", "c2"], 2))]
    fall = printed(text, r"Over the same 64 tokens, mean r_q of 8 rotary heads falls from ([\d.]+) \(c2\) to ([\d.]+)")
    assert fall == [(round(means.r_q["own", "c2"], 2), round(means.r_q["common", "l1"], 2))]


def test_cards_print_the_means_of_the_rows_at_both_windows(study, means):
    cards = {figure.name: to_markdown(figure_card(figure, study[1])) for figure in drawable(study[1])}
    row = next(line for line in cards["position_signal"].splitlines() if line.startswith(r"| r\_q (8 rotary heads)"))
    values = [float(cell.split("±")[0]) for cell in row.strip("| ").split("|")[1:]]
    expected = [means.r_q["own", "c0"], means.r_q["own", "l1"], means.r_q["own", "c0"], means.r_q["common", "l1"]]
    assert values == pytest.approx(expected, abs=0.006)
    end = f"{means.r_q['common', 'l1']:.2f}"
    assert f"ends at {end}" in cards["position_signal"] or f"to {end}" in cards["position_signal"]


def test_every_card_prints_a_measure_of_a_checkpoint_alike(study):
    """The same measure, population and checkpoint never have two values in two cards."""
    cells = {}
    for figure in drawable(study[1]):
        lines = [line for line in to_markdown(figure_card(figure, study[1])).splitlines() if line.startswith("|")]
        titles = [cell.strip() for cell in lines[0].strip("| ").split("|")] if lines else []
        for line in lines[2:]:
            name, *values = (cell.strip() for cell in line.strip("| ").split("|"))
            for title, value in zip(titles[1:], values, strict=True):
                cells.setdefault((name, title), set()).add(value)
    assert len(cells) > 20
    assert {place: values for place, values in cells.items() if len(values) > 1} == {}


def test_means_csv_has_the_means_of_the_rows(study, means):
    folder, results = study
    write_long_tables(results, folder)
    table = pd.read_csv(folder / "tables/means.csv").query("layer_type == 'rotary' and measure == 'r_q'")
    for row in table.itertuples():
        role = "common" if row.windows == "common" else "own"
        assert row.mean == pytest.approx(means.r_q[role, row.model], abs=1e-12)


def test_the_page_states_the_headline_and_findings_of_the_terminal(study):
    summary = summarize(study[1])
    html = page_html(study[1], summary.to_page(), [])
    about = html.split('<script type="application/json" id="about">')[1].split("</script>")[0]
    plain = about.encode().decode("unicode_escape", errors="ignore") if "\\u" in about else about
    for finding in summary.findings:
        assert finding.question in plain
    assert summary.headline in plain
    assert "first_screen.js" in modules()


def test_claims_name_their_population_and_both_standard_errors(study):
    text = to_markdown(claims_page(study[1]))
    supported = [line for line in text.splitlines() if re.search(r"\| (supported|contradicted) \(", line)]
    assert supported
    for line in supported:
        assert re.search(r"\([−\d.e+-]+ ± [\d.e-]+(, ± [\d.e-]+)?\)", line) or re.search(r"\([−\d.e+-]+, ± ", line)
