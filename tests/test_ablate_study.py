"""An ablation from a study file to its table: which heads, which documents, what is kept, what is refused."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import cut_documents, small_world
from qkscope.ablate.choice import HeadChoice, chosen_heads, matched_controls, units_of
from qkscope.ablate.outcomes import against_controls, outcomes_of, over_documents, position_parts
from qkscope.ablate.run import AblationSettings, ablate_documents
from qkscope.ablate.study import ablate_study, prepare_ablation
from qkscope.capture.load import load_backbone
from qkscope.cli.main import main
from qkscope.documents.tokens import group_of
from qkscope.errors import InputError
from qkscope.moments.moments import Moments
from qkscope.results.folder import ablation_path, moments_path
from qkscope.run.execute import run_study

HEADS = pd.DataFrame(
    [
        (layer, head, "mixed" if head else "position-dominated", layer - 0.1 * head)
        for layer in range(3)
        for head in range(4)
    ],
    columns=["layer", "head", "category", "r_q"],
)


# --- which heads ------------------------------------------------------------------------------------


def test_heads_are_chosen_by_name_by_category_and_by_any_number():
    assert chosen_heads(HeadChoice(("L2H3", "L0H1")), HEADS) == [(0, 1), (2, 3)]
    assert chosen_heads(HeadChoice(("position-dominated",)), HEADS) == [(0, 0), (1, 0), (2, 0)]
    assert chosen_heads(HeadChoice(top=2), HEADS) == [(2, 0), (2, 1)]
    assert chosen_heads(HeadChoice(("position-dominated",), top=2), HEADS) == [(1, 0), (2, 0)]
    assert len(chosen_heads(HeadChoice(), HEADS)) == len(chosen_heads(HeadChoice(("all",)), HEADS)) == 12
    assert chosen_heads(HeadChoice(top=1), HEADS.assign(r_q=-HEADS["r_q"])) == [(2, 0)]  # the largest in size


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (HeadChoice(("L9H0",)), r"no head L9H0; heads go from L0H0 to L2H3"),
        (HeadChoice(("K-positional",)), r"'K-positional' is neither .* occurs here: mixed, position-dominated"),
        (HeadChoice(top=2, by="r_qq"), r"no numbers 'r_qq'; is it r_q\?"),
    ],
)
def test_a_head_that_is_not_there_is_refused_with_what_is(choice, message):
    with pytest.raises(InputError, match=message):
        chosen_heads(choice, HEADS)


everyone = [(layer, head) for layer in range(4) for head in range(6)]


@given(chosen=st.sets(st.sampled_from(everyone), min_size=1, max_size=12), seed=st.integers(0, 5))
def test_controls_have_as_many_heads_in_each_layer_and_are_others_where_there_are(chosen, seed):
    for group in matched_controls(sorted(chosen), everyone, 3, seed):
        assert len(set(group)) == len(group) == len(chosen)
        for layer in range(4):
            mine = {head for head in chosen if head[0] == layer}
            theirs = {head for head in group if head[0] == layer}
            assert len(theirs) == len(mine)
            assert len(theirs & mine) == max(0, 2 * len(mine) - 6)  # only where a layer has too few others


def test_controls_differ_between_draws_and_repeat_with_their_seed():
    chosen = [(0, 0), (1, 0), (2, 0), (3, 0)]
    first, again, other = (matched_controls(chosen, everyone, 4, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len(set(first)) > 1
    units = units_of(HeadChoice(("all",), top=2, together=True, controls=2), HEADS)
    assert [(unit.name, unit.role) for unit in units] == [
        ("chosen", "chosen"), ("control 1", "control"), ("control 2", "control"),
    ]  # fmt: skip


# --- outcomes ---------------------------------------------------------------------------------------


def test_outcomes_are_means_of_differences_token_by_token():
    # Five tokens, four losses; the edit adds 1, 2, 3, 4; the second and the last repeat something.
    before, after = np.array([1.0, 1, 1, 5]), np.array([2.0, 3, 4, 9])
    found = outcomes_of(before, after, np.array([False, True, False, True]), parts=2)
    assert found == {
        "all": [2.0, 2.5],
        "repeated": [3.0, 3.0],
        "new": [1.0, 2.0],
        "positions 1 to 2": [1.0, 1.5],
        "positions 3 to 4": [3.0, 3.5],
    }


@given(tokens=st.integers(2, 200), parts=st.integers(1, 8))
def test_parts_of_a_document_cover_every_predicted_token_once(tokens, parts):
    places = [place for _, part in position_parts(tokens, parts) for place in range(*part.indices(tokens - 1))]
    assert places == list(range(tokens - 1))


def rows(deltas, **about):
    """A row per document."""
    same = {
        "model": "m",
        "edit": "zero",
        "unit": "L0H0",
        "outcome": "all",
        "role": "head",
        "layer": 0,
        "head": 0,
        "heads": 1,
    }
    return pd.DataFrame([{**same, **about, "document": i, "loss": 2.0, "delta": d} for i, d in enumerate(deltas)])


def test_the_error_is_that_of_a_mean_of_documents():
    # 1, 2, 3, 6: mean 3, sum of squares about it 14, so sqrt(14 / 3 / 4).
    (found,) = over_documents(rows([1.0, 2, 3, 6])).to_dict("records")
    assert (found["delta"], found["documents"]) == (3.0, 4)
    assert found["delta_se"] == pytest.approx(np.sqrt(14 / 12))
    (few,) = over_documents(rows([1.0, 2, 3])).to_dict("records")
    assert few["delta"] == 2.0
    assert np.isnan(few["delta_se"])


def test_chosen_heads_are_compared_with_their_controls_document_by_document():
    table = pd.concat(
        [
            rows([5.0, 6, 7, 8], unit="chosen", role="chosen"),
            rows([1.0, 2, 3, 4], unit="control 1", role="control"),
            rows([3.0, 4, 5, 6], unit="control 2", role="control"),
        ]
    )
    (found,) = against_controls(table).to_dict("records")
    assert (found["chosen"], found["controls"], found["excess"], found["excess_se"]) == (6.5, 3.5, 3.0, 0.0)


# --- a study ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(tmp_path_factory, checkpoints):
    """Twelve documents in four groups, captured and analysed."""
    folder = tmp_path_factory.mktemp("ablation")
    write = small_world(folder, checkpoints)
    cut_documents(folder / "docs", 12, 300, 300)
    path = write(groups=4)
    run_study(path, folder / "out")
    return path, folder / "out"


SETTINGS = AblationSettings(
    edits=("nothing", "kernel", "zero"), heads=HeadChoice(("L0H0", "L2H3")), documents=6, tokens=48, only=("one",)
)


def test_an_ablation_gives_a_row_per_edit_head_and_outcome_with_errors(study):
    path, out = study
    ablate_study(path, out, SETTINGS)
    table = pd.read_csv(out / "ablation.csv")
    whole = table[table["outcome"] == "all"].set_index(["edit", "unit"])
    assert set(whole.index) == {(edit, unit) for edit in SETTINGS.edits for unit in ("L0H0", "L2H3")}
    assert set(whole["documents"]) == {6}
    assert (whole.loc["zero", "delta"].abs() > 0).all()
    assert (whole.loc["nothing", "delta"].abs() < 1e-5).all()  # what rounding does
    assert table["delta_se"].notna().all()
    about = json.loads((out / "ablation.json").read_text())
    assert about["edits"]["zero"] == "The head puts out zeros: what it is worth at all."
    assert about["checkpoints"][0]["tokens"] == 48


def test_documents_are_spread_over_groups_and_no_document_has_a_part_in_its_own_edit(study, monkeypatch):
    path, out = study
    _, (work,) = prepare_ablation(path, out, SETTINGS)
    groups = [group_of(document, 4) for document in work.documents]
    assert {groups.count(group) for group in range(4)} <= {1, 2}
    seen = []
    from qkscope.ablate import run

    made = run.edits_of

    def watched(edit, sums, tokens, seed):
        seen.append(sums.left_out)
        return made(edit, sums, tokens, seed)

    monkeypatch.setattr(run, "edits_of", watched)
    for document in work.documents:
        ablation_path(out, "one", document).unlink(missing_ok=True)
    model = load_backbone(work.plan.source, work.plan.config, head=True)
    asked = []
    ablate_documents(
        work, model, Moments.load(moments_path(out, "one")), out, lambda document, _: asked.append(document)
    )
    assert sorted(asked) == sorted(work.documents)
    assert set(seen) == set(groups)


def test_a_stopped_ablation_goes_on_and_ends_in_the_same_bytes(study):
    path, out = study
    ablate_study(path, out, SETTINGS)
    expected = (out / "ablation.csv").read_bytes()
    _, (work,) = prepare_ablation(path, out, SETTINGS)
    kept = {d: ablation_path(out, "one", d).stat().st_mtime_ns for d in work.documents}
    gone = work.documents[2]
    ablation_path(out, "one", gone).write_text('{"fingerprint": ')  # killed while it was written by another tool
    ablate_study(path, out, SETTINGS)
    assert (out / "ablation.csv").read_bytes() == expected
    again = {d: ablation_path(out, "one", d).stat().st_mtime_ns for d in work.documents}
    assert {d for d in kept if kept[d] != again[d]} == {gone}


def test_bad_input_is_refused_before_a_model_is_loaded(study, capsys):
    path, out = study
    for arguments, message in (
        (["--heads", "L7H0"], "there is no head L7H0"),
        (["--edit", "kernal"], "'kernal' is no edit; there is kernel"),
        (["--checkpoint", "three"], "there is no checkpoint 'three'"),
        (["--documents", "0"], "at least one document"),
        (["--tokens", "1"], "at least two tokens"),
    ):
        assert main(["ablate", str(path), "--out", str(out), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["ablate", str(path), "--out", str(out / "empty")]) == 2
    assert "qk.csv: not found" in capsys.readouterr().err


def test_too_few_groups_are_refused_with_what_to_do(finished, checkpoints, tmp_path):
    """Three groups: moments without one of them cannot be had."""
    path = small_world(tmp_path, checkpoints)()
    run_study(path, tmp_path / "out")
    with pytest.raises(InputError, match=r"3 document groups, fewer than 4; capture more documents, or more `groups`"):
        ablate_study(path, tmp_path / "out", SETTINGS)


def test_the_estimate_counts_passes_and_runs_nothing(study, capsys):
    path, out = study
    assert main(["ablate", str(path), "--out", str(out), "--estimate", "--documents", "4", "--tokens", "32"]) == 0
    said = capsys.readouterr().out
    assert "one: 16 units x 2 edits x 4 documents of 32 tokens: at most 132 passes (4,224 tokens)" in said
