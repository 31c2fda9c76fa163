"""`qkscope join`: correlations over few models against scipy and brute force; the published case; what is refused."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qkscope.cli.main import main
from qkscope.errors import InputError
from qkscope.join import statistics as of
from qkscope.join.inputs import Measures, Scores, load_published_models, measures_of, published_scores, scores_of
from qkscope.join.table import (
    GOES_WITH,
    NOT_SHOWN,
    PREDICTS,
    UNKNOWN,
    between_families,
    differences,
    failures,
    join,
    of_differences,
    within_families,
    within_models,
)
from qkscope.join.write import JoinRequest, join_card, join_scores, terminal_lines
from qkscope.words.blocks import to_markdown

NO_LENGTHS = pd.DataFrame({"model": [], "length": [], "score": []})


def measures(table, family=None, parameters=None, errors=None, source="mine"):
    frame = pd.DataFrame(table)
    names = [f"m{i}" for i in range(len(frame))]
    frame.index = names
    error = pd.DataFrame(math.nan if errors is None else errors, index=names, columns=frame.columns)
    of_model = {} if family is None else dict(zip(names, family, strict=True))
    sizes = {} if parameters is None else dict(zip(names, parameters, strict=True))
    return Measures(source, frame, error, family=of_model, parameters=sizes)


def scores(values):
    return Scores("bench", {f"m{i}": float(value) for i, value in enumerate(values)}, NO_LENGTHS)


# --- statistics -------------------------------------------------------------------------------------

values = st.lists(st.integers(-5, 5), min_size=3, max_size=5)  # up to 120 orders


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(values, st.data())
def test_p_is_the_share_of_all_orders_that_are_as_far_from_zero(x, data):
    y = data.draw(st.lists(st.integers(-5, 5), min_size=len(x), max_size=len(x)))
    a, b = np.array(x, dtype=float), np.array(y, dtype=float)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(of.permutation_p(a, b))
        return
    for by_hand, ours in (
        (lambda v: stats.pearsonr(a, v)[0], of.permutation_p(a, b)),
        (lambda v: stats.spearmanr(a, v)[0], of.permutation_p(stats.rankdata(a), stats.rankdata(b))),
        (lambda v: stats.kendalltau(a, v)[0], of.permutation_p(a, b, of.kendall_of_orders)),
    ):
        seen = abs(by_hand(b))
        far = [abs(by_hand(np.array(order))) >= seen - 1e-9 for order in itertools.permutations(b)]
        assert ours == pytest.approx(np.mean(far), abs=1e-12)


def test_strata_change_places_within_themselves_only():
    x, y = np.array([1.0, 2, 3, 4, 5]), np.array([2.0, 1, 5, 3, 4])
    families = ["a", "a", "b", "b", "b"]
    seen, far = abs(stats.pearsonr(x, y)[0]), []
    for first in itertools.permutations(y[:2]):
        far += [abs(stats.pearsonr(x, [*first, *rest])[0]) >= seen - 1e-9 for rest in itertools.permutations(y[2:])]
    assert len(far) == 12
    assert of.permutation_p(x, y, strata=families) == pytest.approx(np.mean(far))
    mixed = ["b", "a", "b", "a", "b"]  # strata need not be neighbours
    order = [1, 3, 0, 2, 4]
    sorted_p = of.permutation_p(x[order], y[order], strata=[mixed[i] for i in order])
    assert of.permutation_p(x, y, strata=mixed) == pytest.approx(sorted_p)


def test_beyond_nine_models_orders_are_drawn_and_agree_with_the_t_test():
    generator = np.random.default_rng(3)
    x = generator.normal(size=40)
    y = 0.4 * x + generator.normal(size=40)
    p = of.permutation_p(x, y)
    assert p == of.permutation_p(x, y)  # the same draws each time
    assert p == pytest.approx(stats.pearsonr(x, y)[1], abs=0.005)
    assert of.permutation_p(x, x) == pytest.approx(1 / 100_001)  # never 0


def test_intervals_bars_and_corrections_are_those_of_the_books():
    low, high = of.fisher_interval(0.5, 28)
    theirs = stats.pearsonr(*_with_correlation(0.5, 28)).confidence_interval(0.95)
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert of.smallest_significant(7) == pytest.approx(0.754, abs=0.0005)
    assert all(math.isnan(end) for end in of.fisher_interval(0.5, 3))
    # Holm by hand: 0.01 x 3, 0.02 x 2, 0.04 x 1, each at least the one before.
    assert of.holm([0.04, math.nan, 0.01, 0.02]) == pytest.approx([0.04, math.nan, 0.03, 0.04], nan_ok=True)
    assert of.holm([0.5, 0.9]) == [1.0, 1.0]


def _with_correlation(r, n):
    generator = np.random.default_rng(0)
    x = generator.normal(size=n)
    rest = generator.normal(size=n)
    x = (x - x.mean()) / np.linalg.norm(x - x.mean())
    rest = rest - rest.mean()
    rest = rest - (rest @ x) * x
    return x, r * x + math.sqrt(1 - r * r) * rest / np.linalg.norm(rest)


def test_a_partial_correlation_is_that_of_residuals_with_its_degrees_of_freedom():
    generator = np.random.default_rng(5)
    x, y, z = generator.normal(size=(3, 12))
    y = y + x + 2 * z
    xy, xz, yz = (np.corrcoef(a, b)[0, 1] for a, b in ((x, y), (x, z), (y, z)))
    expected = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
    r, p = of.partial_correlation(x, y, z)
    assert r == pytest.approx(expected)
    design = np.column_stack([np.ones(12), x, z])  # the t test of x in a regression of y on x and z is the same test
    beta, rest, *_ = np.linalg.lstsq(design, y, rcond=None)
    error = math.sqrt(float(rest[0]) / 9 * np.linalg.inv(design.T @ design)[1, 1])
    assert p == pytest.approx(2 * stats.t.sf(abs(beta[1] / error), 9))
    assert all(math.isnan(value) for value in of.partial_correlation(x, y, np.ones(12)))
    assert all(math.isnan(value) for value in of.partial_correlation(2 * z, y, z))  # nothing is left of x


def test_predictions_of_left_out_models_and_errors_of_measures():
    x, y = np.array([0.0, 1, 2, 4]), np.array([0.0, 1, 2, 4])
    assert of.prediction_r2(x, y) == pytest.approx(1.0)
    # By hand: without each in turn, a line through the others. y = (0, 1, 0, 1) at x = 0, 1, 2, 3.
    zigzag, at = np.array([0.0, 1, 0, 1]), np.arange(4.0)
    missed = [zigzag[i] - np.polyval(np.polyfit(np.delete(at, i), np.delete(zigzag, i), 1), at[i]) for i in range(4)]
    mean = [zigzag[i] - np.delete(zigzag, i).mean() for i in range(4)]
    assert of.prediction_r2(at, zigzag) == pytest.approx(1 - np.square(missed).sum() / np.square(mean).sum())
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(2, 8))
    errors = np.full(8, 1e-4)
    moved = [np.corrcoef(x + generator.normal(size=8) * errors, y)[0, 1] for _ in range(4000)]
    assert of.error_of_correlation(x, y, errors) == pytest.approx(np.std(moved), rel=0.05)
    assert math.isnan(of.error_of_correlation(x, y, np.array([math.nan, *errors[1:]])))


# --- the published case -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    shipped = load_published_models().measures
    chosen = Measures(
        shipped.source, shipped.means[["ap_drop", "ap", "ap_last", "bias_strength"]],
        shipped.errors[["ap_drop", "ap", "ap_last", "bias_strength"]], shipped.windows, shipped.family,
        shipped.parameters,
    )  # fmt: skip
    return join(chosen, published_scores("longbench-pro"))


@pytest.mark.parametrize(
    ("measure", "r", "low", "high", "p", "spearman", "without_llama"),
    [
        ("ap_drop", -0.67, -0.95, 0.16, 0.067, -0.64, -0.36),
        ("ap", 0.71, -0.10, 0.95, 0.091, 0.36, -0.02),
        ("ap_last", 0.72, -0.08, 0.95, 0.061, 0.46, 0.24),
        ("bias_strength", -0.17, -0.82, 0.67, 0.80, -0.30, -0.38),
        ("parameters", 0.80, 0.11, 0.97, 0.013, 0.90, 0.90),
    ],
)
def test_the_published_correlations_come_out_again(published, measure, r, low, high, p, spearman, without_llama):
    row = published.table.set_index("measure").loc[measure]
    assert row["n"] == 7
    assert row["exact"]
    found = (row["r"], row["r_low"], row["r_high"], row["spearman"])
    assert found == pytest.approx((r, low, high, spearman), abs=0.006)
    assert row["p"] == pytest.approx(p, abs=0.003)
    assert row["smallest_r"] == pytest.approx(0.754, abs=0.0005)
    points = published.points[published.points["model"] != "llama3.2-3b"]
    x = np.log(points["parameters"]) if measure == "parameters" else points[measure]
    assert np.corrcoef(x, points["score"])[0, 1] == pytest.approx(without_llama, abs=0.0051)
    ends = (row["without_model_low"], row["without_model_high"])
    assert ends[0] - 0.0051 <= without_llama <= ends[1] + 0.0051


def test_nothing_is_said_to_predict_in_the_published_case(published):
    measured = published.table[published.table["role"] == "measure"]
    assert set(measured["verdict"]) == {NOT_SHOWN}
    assert list(measured["p_holm"]) == pytest.approx([0.2429, 0.2429, 0.2429, 0.7976], abs=0.001)  # 4 x 0.0607
    written = to_markdown(join_card(published))
    assert "None of 4 measures significantly correlates with published:longbench-pro over 7 models" in written
    assert "Predicts" not in written
    assert all("7 models" in failures(row) for row in published.rows("measure"))
    assert "no |r| below 0.75 significant" in " ".join(terminal_lines(published))


def test_rank_correlations_have_exact_p_values_which_a_t_test_only_approximates(published):
    """The published recomputation has 0.12 and 0.006, by a t test; over all 5040 orders they are larger."""
    for measure, by_t, exact in (("ap_drop", 0.12, 0.14), ("parameters", 0.006, 0.013)):
        row = published.table.set_index("measure").loc[measure]
        statistic = abs(row["spearman"]) * math.sqrt(5 / (1 - row["spearman"] ** 2))
        assert 2 * stats.t.sf(statistic, 5) == pytest.approx(by_t, abs=0.006 if by_t > 0.1 else 0.0006)
        assert row["spearman_p"] == pytest.approx(exact, abs=0.005 if exact > 0.1 else 0.0005)


def test_families_by_themselves_and_their_means_alone(published):
    inside = within_families(published.points, "ap_drop")
    assert set(inside) == {"Qwen3", "Ministral3"}  # one Llama has no correlation
    assert inside["Ministral3"] == (3, pytest.approx(0.02, abs=0.0051))
    assert inside["Qwen3"] == (3, pytest.approx(-1.00, abs=0.0051))
    families, rank, p = between_families(published.points, "ap_drop")
    assert (families, rank) == (3, pytest.approx(-1.0))
    assert p == pytest.approx(2 / 6)  # either direction; in the one that was expected, 1/6
    written = to_markdown(join_card(published))
    assert "Ministral3 0.02 (3 models)" in written
    assert "−1.00 (p = 0.333, 3 families)" in written


def test_what_one_model_decides_is_named(published):
    row = published.table.set_index("measure").loc["ap"]
    assert (row["low_without_model"], row["low_without_family"]) == ("llama3.2-3b", "Llama 3.2")
    assert row["without_model_low"] == pytest.approx(-0.016, abs=0.001)
    assert row["families"] == 3


def test_two_falling_curves_are_held_against_length_alone():
    shipped, ruler = load_published_models().measures, published_scores("ruler")
    within = within_models(shipped, ruler).set_index("model")
    assert within.loc["llama3.1-8b", "n"] == 6
    assert within.loc["llama3.1-8b", "r"] == pytest.approx(0.95, abs=0.0051)
    assert within.loc["llama3.1-8b", "r_log_length_score"] == pytest.approx(-0.97, abs=0.0051)
    across = of_differences(differences(shipped, ruler))
    assert set(across["n"]) <= {1, 2}
    assert across["r"].isna().all()  # two models have no correlation, whatever their curves do
    whole = join(_only(shipped, "ap"), ruler)
    assert whole.table["verdict"].iloc[0] == UNKNOWN
    written = to_markdown(join_card(whole))
    assert "| ap | 4,096 … 8,192 | 2 | undefined (–) | – |" in written
    assert "Mistral v0.2 was measured as an instruct model" in written
    assert "Qwen3" not in written  # notes are about the models of the join


def _only(found, name):
    return Measures(
        found.source, found.means[[name]], found.errors[[name]], found.windows, found.family, found.parameters,
        found.by_length, found.notes,
    )  # fmt: skip


# --- verdicts ---------------------------------------------------------------------------------------


def world(n=18, noise=0.05, seed=0, families=3):
    generator = np.random.default_rng(seed)
    x, size = generator.normal(size=n), generator.uniform(8, 11, size=n)
    y = x + 0.5 * size + noise * generator.normal(size=n)
    return x, y, 10**size, [f"f{i % families}" for i in range(n)]


@pytest.mark.slow
def test_a_measure_that_meets_every_requirement_predicts():
    x, y, size, family = world()
    found = join(measures({"x": x}, family, size), scores(y))
    assert found.table["verdict"].iloc[0] == PREDICTS
    assert "Predicts bench beyond what parameters do: x." in to_markdown(join_card(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["few models", "two families", "no parameters", "parameters explain it", "no family"]
)
def test_each_requirement_alone_refuses_the_word(change):
    x, y, size, family = world(families=2 if change == "two families" else 3)
    if change == "few models":
        x, y, size, family = x[:9], y[:9], size[:9], family[:9]
    if change == "parameters explain it":
        generator = np.random.default_rng(1)
        y = np.log10(size)
        x = y + 0.3 * generator.normal(size=len(y))
        y = y + 0.01 * generator.normal(size=len(y))
    found = join(
        measures({"x": x}, None if change == "no family" else family, None if change == "no parameters" else size),
        scores(y),
    )
    assert found.table["verdict"].iloc[0] == GOES_WITH
    assert "short of predicting" in to_markdown(join_card(found))


@pytest.mark.slow
def test_more_measures_make_each_less_certain():
    generator = np.random.default_rng(8)
    x, y, size, family = world(n=12, noise=1.0, seed=2)
    alone = join(measures({"x": x}, family, size), scores(y)).table.set_index("measure").loc["x"]
    many = {"x": x, **{f"noise{i}": generator.normal(size=12) for i in range(9)}}
    among = join(measures(many, family, size), scores(y)).table.set_index("measure").loc["x"]
    assert among["p"] == alone["p"] == alone["p_holm"]
    assert among["p_holm"] == pytest.approx(10 * among["p"])


def test_changes_between_lengths_are_compared_between_models():
    """All models fall with length alike; only what differs between them may count."""
    generator = np.random.default_rng(4)
    lengths, rows, measured = (1024, 4096), [], []
    for i in range(8):
        extra = generator.normal()
        for step, length in enumerate(lengths):
            rows.append((f"m{i}", length, 90 - 10 * step - 2 * extra * step))
            measured.append((f"m{i}", length, 0.7 - 0.2 * step - 0.05 * extra * step))
    table = scores_of(pd.DataFrame(rows, columns=["model", "length", "score"]), "bench", "bench")
    by_length = pd.DataFrame(measured, columns=["model", "length", "x"])
    mine = measures({"x": np.arange(8.0)})
    mine = Measures(mine.source, mine.means, mine.errors, by_length=by_length)
    across = of_differences(differences(mine, table)).iloc[0]
    assert (across["n"], across["short"], across["long"]) == (8, 1024, 4096)
    assert across["r"] == pytest.approx(1.0)
    shuffled = by_length.assign(x=[0.7 if length == 1024 else 0.5 for length in by_length["length"]])
    flat = Measures(mine.source, mine.means, mine.errors, by_length=shuffled)
    assert math.isnan(of_differences(differences(flat, table)).iloc[0]["r"])  # all fall alike: nothing differs


# --- files, and what is refused ---------------------------------------------------------------------


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def table(tmp_path):
    rows = "".join(f"m{i},fam{i % 2},{(i + 1) * 10**9},{i * i},{0.1 * i}\n" for i in range(6))
    return write(tmp_path / "mine.csv", f"model,family,parameters,x,x_se\n{rows}")


def test_a_join_of_two_files_writes_everything(table, tmp_path, capsys):
    given_scores = write(tmp_path / "bench.csv", "model,score\n" + "".join(f"m{i},{10 - i}\n" for i in range(6)))
    assert main(["join", table, "--scores", given_scores, "--out", str(tmp_path / "out")]) == 0
    assert "null model" in capsys.readouterr().out
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {"join.csv", "points.csv", "join.png", "join.svg", "README.md"}
    row = pd.read_csv(tmp_path / "out/join.csv").iloc[0]
    assert row["r"] == pytest.approx(np.corrcoef(np.arange(6) ** 2, 10 - np.arange(6))[0, 1])
    assert row["r_se_documents"] > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,score\nm0,1\nm1,2\nm2,3\nsomebody,4\n", "scores 'somebody', which"),
        ("model,score\nm0,1\n", "1 of the 6 models"),
        ("model,score\nm0,5\nm1,5\nm2,5\nm3,5\n", "all 4 models have the same score"),
        ("model,score\nm0,1\nm0,2\nm1,3\n", "twice"),
        ("model,score\nm0,good\n", "line 2: score is 'good'"),
        ("model,score\nm0,inf\n", "not a finite number"),
        ("model,points\nm0,1\n", "has no column 'score'"),
        ("model,score,judge\nm0,1,me\n", "judge is 'me'"),
        ("model,score,seed\nm0,1,0\n", "has unknown columns: 'seed'"),
        ("model,score\n", "no rows"),
        ("model,length,score\nm0,0,1\n", "above 0"),
        ("", "cannot be read as a CSV table"),
    ],
)
def test_scores_that_cannot_be_joined_are_refused(table, tmp_path, text, message):
    bad = write(tmp_path / "bench.csv", text)
    with pytest.raises(InputError, match=message.replace("(", "\\(")):
        join_scores(JoinRequest(table, bad), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_there_is_said(table, tmp_path):
    good = write(tmp_path / "bench.csv", "model,score\nm0,1\nm1,2\nm2,4\n")
    for request, message in (
        (JoinRequest(str(tmp_path / "nowhere"), good), "no such results folder or file"),
        (JoinRequest(table, str(tmp_path / "nothing.csv")), "no such file"),
        (JoinRequest(table, good, ["y"]), "has no such measure; it has x"),
        (JoinRequest("published:nothing", good), "published measures are"),
        (JoinRequest(table, "published:../x"), "there are no published scores"),
    ):
        with pytest.raises(InputError, match=message):
            join_scores(request, tmp_path / "out")
    with pytest.raises(InputError, match="--out"):
        join_scores(JoinRequest(table, good))


def test_equal_measures_are_undefined_and_not_zero(tmp_path):
    found = join(measures({"x": np.ones(6), "y": np.arange(6.0)}), scores([1, 3, 2, 5, 4, 6]))
    row = found.table.set_index("measure").loc["x"]
    assert math.isnan(row["r"])
    assert row["verdict"] == UNKNOWN
    assert found.table.set_index("measure").loc["y", "p_holm"] == found.table.set_index("measure").loc["y", "p"]


def test_three_models_can_show_nothing():
    found = join(measures({"x": [1.0, 2, 3]}), scores([1, 2, 3]))
    assert found.table.iloc[0]["r"] == pytest.approx(1.0)
    assert found.table.iloc[0]["p"] == pytest.approx(2 / 6)
    assert found.table.iloc[0]["verdict"] == UNKNOWN


def test_measures_that_nothing_could_have_shown_are_not_given_a_bar():
    """Five models, eight measures: 8 x 2/120 is above 0.05, so no r at all passes Holm's correction."""
    generator = np.random.default_rng(0)
    many = {"best": np.arange(5.0), **{f"noise{i}": generator.normal(size=5) for i in range(7)}}
    found = join(measures(many), scores(range(5)))
    assert found.table["smallest_p"].iloc[0] == found.table["p"].iloc[0] == pytest.approx(2 / 120)
    assert set(found.table["verdict"]) == {UNKNOWN}
    said = " ".join(terminal_lines(found))
    assert "none can be significant, whatever its r. With these models at most 2 measures may be tried" in said
    assert "Nothing can be known from 5 models: no order of so few is rare enough" in said
    two = join(measures({"best": np.arange(5.0), "noise": many["noise0"]}), scores(range(5)))
    assert two.table["verdict"].iloc[0] == GOES_WITH


@pytest.mark.parametrize("y", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 7], [0, 0, 1, 2, 5], [0, 0, 1, 2, 2], [3, 1, 4, 1, 5]])
def test_no_measure_has_a_smaller_p_than_the_smallest(y):
    """Scores that are not symmetric allow 1/n!, symmetric ones 2/n!; ties allow less."""
    scored = np.array(y, dtype=float)
    smallest = of.smallest_p(scored)
    assert of.permutation_p(scored, scored) == pytest.approx(smallest)
    generator = np.random.default_rng(1)
    tried = [of.permutation_p(generator.normal(size=5), scored) for _ in range(200)]
    assert min(tried) >= smallest - 1e-12


def test_how_many_measures_may_be_tried_is_what_holm_allows():
    for n in range(4, 9):
        smallest = 2 / math.factorial(n)
        most = of.most_measures(smallest)
        assert not most or of.holm([smallest] * most)[0] < 0.05
        assert not of.holm([smallest] * (most + 1))[0] < 0.05


def test_what_is_undefined_is_said_to_be_unknown_and_not_to_fail():
    found = join(measures({"x": [1.0, 2, math.nan]}), scores([1, 2, 3]))
    written = to_markdown(join_card(found))
    assert "nan" not in written
    assert "p after Holm unknown" in written
    assert "R² for others unknown" in written
    assert any("2  undefined" in line for line in terminal_lines(found))


def test_a_model_twice_or_no_measure_is_refused():
    with pytest.raises(InputError, match="twice"):
        measures_of(pd.DataFrame({"model": ["a", "a"], "x": [1.0, 2.0]}), "mine")
    with pytest.raises(InputError, match="no measure"):
        measures_of(pd.DataFrame({"model": ["a", "b"], "parameters": [1.0, 2.0]}), "mine")


# --- results folders --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_results_folder_is_joined_by_means_over_heads(published_folder, tmp_path):
    heads = pd.read_csv(published_folder / "qk.csv")
    means = heads[heads["pc"] == 0].groupby("model", sort=False)["r_q"].mean()
    given_scores = write(
        tmp_path / "bench.csv", "model,score\n" + "".join(f"{m},{i**2}\n" for i, m in enumerate(means.index))
    )
    sizes = write(tmp_path / "models.csv", "model,family,parameters\n" + "".join(f"{m},S,3e9\n" for m in means.index))
    request = JoinRequest(str(published_folder), given_scores, ["r_q"], sizes, common=False)
    found = join_scores(request, tmp_path / "out").joined
    row = found.table.iloc[0]
    assert row["r"] == pytest.approx(np.corrcoef(means, np.arange(len(means)) ** 2)[0, 1])
    assert list(found.points["model"]) == list(means.index)
    assert math.isnan(row["partial_r"])  # one size: nothing to hold equal
    with pytest.raises(InputError, match="no such measure of heads"):
        join_scores(JoinRequest(str(published_folder), given_scores, ["nonsense"]), tmp_path / "out")


def test_a_run_stands_among_the_published_models_with_its_window(published_folder, tmp_path, capsys):
    assert main(["among", str(published_folder), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    table = pd.read_csv(tmp_path / "out/points.csv")
    rows = table[table["measure"] == "r_q"]
    assert set(rows["published_models"]) == {11}
    assert rows["published_low"].iloc[0] == pytest.approx(0.761)
    assert "no rank is given there" in said
    assert rows["above"].isna().all()  # 4K, 32K and 64K; the eleven are at 128K
    text = (tmp_path / "out/README.md").read_text()
    assert "same text weights" in text
