"""An ablation from a study file to its table: which heads, which documents, what is kept, what is refused."""

import json
import multiprocessing
import signal
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode

from conftest import cut_documents, small_world
from families import tiny
from qkscope.ablate.measure import loss_outcomes, needle_outcome, position_parts
from qkscope.ablate.study import AblationOptions, ablate_study, prepare_ablation
from qkscope.ablate.tables import ablation_table, course_table, groups_table, unit_doses
from qkscope.ablate.work import (
    NEAREST,
    UNITS,
    AblationSettings,
    CheckpointAblation,
    HeadChoice,
    dose_matched_controls,
    matched_controls,
    resolve_heads,
    units_of,
)
from qkscope.capture.load import load_backbone
from qkscope.cli.main import main
from qkscope.cost import ablation_cost, pass_flops
from qkscope.errors import InputError
from qkscope.results.folder import ablation_path
from qkscope.run.engines import Placement
from qkscope.run.execute import run_study
from qkscope.run.progress import Events
from qkscope.run.stopping import Stopped
from qkscope.stats import significance
from test_documents import byte_tokenizer

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
    assert resolve_heads(HeadChoice(("L2H3", "L0H1")), HEADS) == [(0, 1), (2, 3)]
    assert resolve_heads(HeadChoice(("position-dominated",)), HEADS) == [(0, 0), (1, 0), (2, 0)]
    assert resolve_heads(HeadChoice(top=2), HEADS) == [(2, 0), (2, 1)]
    assert resolve_heads(HeadChoice(("position-dominated",), top=2), HEADS) == [(1, 0), (2, 0)]
    assert len(resolve_heads(HeadChoice(), HEADS)) == len(resolve_heads(HeadChoice(("all",)), HEADS)) == 12
    assert resolve_heads(HeadChoice(top=1), HEADS.assign(r_q=-HEADS["r_q"])) == [(2, 0)]  # the largest in size


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (HeadChoice(("L9H0",)), r"no head L9H0; heads go from L0H0 to L2H3"),
        (HeadChoice(("K-positional",)), r"'K-positional' is neither .* occurs here: mixed, position-dominated"),
        (HeadChoice(top=2, by="r_qq"), r"no numeric column 'r_qq'; is it r_q\?"),
    ],
)
def test_a_head_that_is_not_there_is_refused_with_what_is(choice, message):
    with pytest.raises(InputError, match=message):
        resolve_heads(choice, HEADS)


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
    name = "top 2 by r_q of all"
    assert [(unit.name, unit.role, unit.group) for unit in units] == [
        (name, "chosen", name), (f"{name}: control 1", "control", name), (f"{name}: control 2", "control", name),
    ]  # fmt: skip


@given(
    st.lists(st.floats(0, 10), min_size=24, max_size=24), st.sets(st.sampled_from(everyone), min_size=1, max_size=10)
)
def test_dose_matched_controls_are_others_each_near_a_chosen_head(doses, chosen):
    """With one chosen head, the control is one of the nearest, by brute force; with several, all are other heads."""
    of = dict(zip(everyone, doses, strict=True))
    for group in dose_matched_controls(sorted(chosen), of, 3, seed=0):
        assert len(set(group)) == len(chosen)
        assert not set(group) & chosen
    (one, *_) = chosen
    nearest = sorted(abs(of[head] - of[one]) for head in everyone if head != one)[:NEAREST]
    for (drawn,) in dose_matched_controls([one], of, 8, seed=1):
        assert abs(of[drawn] - of[one]) <= nearest[-1]


def test_strong_heads_are_compared_with_the_next_strongest():
    """By hand: the two strongest of eight. Matched by layer, controls have a third of their dose; by dose, far more."""
    of = {(0, 0): 10.0, (0, 1): 1.0, (0, 2): 1.0, (1, 0): 9.0, (1, 1): 1.0, (1, 2): 1.0, (2, 0): 8.0, (2, 1): 8.0,
          (2, 2): 7.0, (2, 3): 7.0, (2, 4): 7.5, (3, 0): 0.5}  # fmt: skip
    for group in dose_matched_controls([(0, 0), (1, 0)], of, 5, seed=3):
        assert {layer for layer, _ in group} == {2}
    choice = HeadChoice(("L0H0", "L1H0"), together=True, controls=2, match_dose=True)
    heads = pd.DataFrame(list(of), columns=["layer", "head"])
    units = units_of(choice, heads, of)
    assert units[0].name == "L0H0 L1H0, dose-matched"
    doses = unit_doses(units, of)
    assert doses[units[0].name] == 19.0
    assert all(14.0 <= doses[unit.name] <= 16.0 for unit in units[1:])


def test_heads_without_a_dose_or_without_others_are_not_matched():
    with pytest.raises(InputError, match="the dose of L1H0 is not known"):
        dose_matched_controls([(0, 0), (1, 0)], {(0, 0): 1.0, (0, 1): 1.0}, 2, 0)
    with pytest.raises(InputError, match="only 1 others"):
        dose_matched_controls([(0, 0), (1, 0)], {(0, 0): 1.0, (1, 0): 1.0, (2, 0): 1.0}, 2, 0)


# --- outcomes ---------------------------------------------------------------------------------------


def test_outcomes_are_means_of_differences_token_by_token():
    # Five tokens, four losses; the edit adds 1, 2, 3, 4; the second and the last repeat something.
    before, after = np.array([1.0, 1, 1, 5]), np.array([2.0, 3, 4, 9])
    assert loss_outcomes(before, after, np.array([False, True, False, True]), parts=2) == [
        ("all", 2.0, 2.5),
        ("repeated", 3.0, 3.0),
        ("new", 1.0, 2.0),
        ("positions 1 to 2", 1.0, 1.5),
        ("positions 3 to 4", 3.0, 3.5),
    ]


def test_the_outcome_of_a_needle_is_the_probability_of_its_whole_answer():
    # Two tokens with probabilities 1/2 and 1/4 become 1/4 and 1/8: -ln 1/8 and -ln 1/32.
    before, after = np.log([9.0, 2, 4]), np.log([9.0, 4, 8])
    name, found, delta = needle_outcome(before, after, 0.25, 2)
    assert (name, found, delta) == ("needle at 25 %", pytest.approx(np.log(8)), pytest.approx(np.log(4)))


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
        "group": "",
        "layer": 0,
        "head": 0,
        "heads": 1,
    }
    return pd.DataFrame([{**same, **about, "document": i, "before": 2.0, "delta": d} for i, d in enumerate(deltas)])


def test_the_error_is_that_of_a_mean_of_documents():
    # 1, 2, 3, 6: mean 3, sum of squares about it 14, so sqrt(14 / 3 / 4).
    (found,) = ablation_table(rows([1.0, 2, 3, 6])).to_dict("records")
    assert (found["delta"], found["documents"]) == (3.0, 4)
    assert found["delta_se"] == pytest.approx(np.sqrt(14 / 12))
    (few,) = ablation_table(rows([1.0, 2, 3])).to_dict("records")
    assert few["delta"] == 2.0
    assert np.isnan(few["delta_se"])


def group_of_heads(chosen, *controls, name="top"):
    """Rows of a chosen group and of its controls."""
    parts = [rows(chosen, unit=name, role="chosen", group=name)]
    parts += [rows(each, unit=f"{name}: {i}", role="control", group=name) for i, each in enumerate(controls)]
    return pd.concat(parts)


def test_chosen_heads_are_compared_with_their_controls_over_documents_and_draws():
    # Over the mean control (2, 3, 4, 5): 3, 4, 1, 4, mean 3, variance 2. Draws have means 2.5 and 4.5, variance 2.
    (found,) = groups_table(group_of_heads([5.0, 7, 5, 9], [1.0, 2, 3, 4], [3.0, 4, 5, 6]), {}).to_dict("records")
    assert (found["chosen"], found["controls"], found["excess"]) == (6.5, 3.5, 3.0)
    assert (found["documents"], found["draws"], found["exceeds"]) == (4, 2, 2)
    documents, draws = 2 / 4, 2 / 2
    assert found["excess_se"] == pytest.approx(np.sqrt(documents + draws))
    freedom = (documents + draws) ** 2 / (documents**2 / 3 + draws**2 / 1)
    assert found["high"] - 3.0 == pytest.approx(stats.t.ppf(0.975, freedom) * np.sqrt(1.5))
    assert found["high"] - 3.0 == pytest.approx(3.0 - found["low"])


def test_the_interval_reaches_as_far_as_the_one_rule_of_significance(monkeypatch):
    monkeypatch.setattr(significance, "critical_value", lambda freedom: 10.0)
    (found,) = groups_table(group_of_heads([5.0, 7, 5, 9], [1.0, 2, 3, 4], [3.0, 4, 5, 6]), {}).to_dict("records")
    assert found["high"] - found["excess"] == pytest.approx(10 * found["excess_se"])


def test_a_comparison_with_one_draw_or_few_documents_has_no_interval():
    for few in (group_of_heads([1.0, 2, 3, 4], [0.0, 1, 0, 1]), group_of_heads([1.0, 2], [0.0, 1], [1.0, 0])):
        (found,) = groups_table(few, {}).to_dict("records")
        assert np.isfinite(found["excess"])
        assert np.isnan([found["excess_se"], found["low"], found["high"]]).all()
    assert groups_table(rows([1.0, 2]), {}).empty


def test_groups_of_one_folder_are_compared_each_with_its_own_controls():
    both = pd.concat([group_of_heads([1.0] * 4, [0.0] * 4), group_of_heads([9.0] * 4, [7.0] * 4, name="other")])
    assert dict(groups_table(both, {})[["group", "excess"]].to_numpy().tolist()) == {"top": 1.0, "other": 2.0}


@pytest.mark.slow
def test_the_interval_covers_in_simulation():
    """Chosen heads that are as random heads are on average: 95 % intervals hold 0 in at least 93 of 100 samples."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        deltas = rng.normal(size=(5, 8)) + rng.normal(size=8)  # documents are hard for all alike
        deltas[1:] += rng.normal(size=(4, 1))  # random heads differ
        (found,) = groups_table(group_of_heads(*deltas), {}).to_dict("records")
        held += found["low"] <= 0.0 <= found["high"]
    assert held / 400 >= 0.93


def test_the_mean_over_heads_has_an_error_over_documents():
    # Documents have means over the two heads of 2, 3, 4, 7: mean 4, sum of squares 14.
    both = pd.concat([rows([1.0, 2, 3, 6]), rows([3.0, 4, 5, 8], unit="L0H1", head=1)])
    (found,) = course_table(both).to_dict("records")
    assert (found["heads"], found["documents"], found["mean"]) == (2, 4, 4.0)
    assert found["mean_se"] == pytest.approx(np.sqrt(14 / 12))
    assert (found["costly"], found["gaining"]) == (1, 0)  # 3 and 5 against 3.18 x 1.08, of four documents


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
TOGETHER = HeadChoice(("L0H0", "L2H3"), together=True, controls=2)
ALONE = AblationOptions(replace=True)


class Told(Events):
    """Keeps what it is told."""

    def __init__(self):
        self.notes = []

    def noted(self, message):
        self.notes.append(message)


@pytest.mark.slow
def test_an_ablation_gives_a_row_per_edit_head_and_outcome_with_errors(study):
    path, out = study
    ablate_study(path, out, SETTINGS, options=ALONE)
    table = pd.read_csv(out / "ablation.csv")
    whole = table[table["outcome"] == "all"].set_index(["edit", "unit"])
    assert set(whole.index) == {(edit, unit) for edit in SETTINGS.edits for unit in ("L0H0", "L2H3")}
    assert set(whole["documents"]) == {6}
    assert (whole.loc["zero", "delta"].abs() > 0).all()
    assert (whole.loc["nothing", "delta"].abs() < 1e-5).all()  # what rounding does
    assert table["delta_se"].notna().all()
    about = json.loads((out / "ablation.json").read_text())
    assert about["edits"]["zero"] == "takes away the head's output"
    (request,) = about["requests"]
    assert request["checkpoints"][0]["tokens"] == 48


@pytest.mark.slow
def test_documents_are_spread_over_groups_and_no_document_has_a_part_in_its_own_edit(study, monkeypatch):
    path, out = study
    (work,) = prepare_ablation(path, out, SETTINGS)
    groups = [document % 4 for document in work.documents]
    assert {groups.count(group) for group in range(4)} <= {1, 2}
    seen = []
    from qkscope.ablate import measure

    made = measure.edits_of

    def watched(edit, sums, tokens, seed):
        seen.append(sums.left_out)
        return made(edit, sums, tokens, seed)

    monkeypatch.setattr(measure, "edits_of", watched)
    for shard in work.shards:
        ablation_path(out, "one", work.fingerprint(shard)).unlink(missing_ok=True)
    ablate_study(path, out, SETTINGS, options=ALONE)
    assert set(seen) == set(groups)


def parts_of(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / ".ablation/one").iterdir()}


@pytest.mark.slow
def test_a_stopped_ablation_goes_on_and_ends_in_the_same_bytes(study):
    path, out = study
    ablate_study(path, out, SETTINGS, options=ALONE)
    names = ("ablation.csv", "ablation_heads.csv", "ablation_course.csv", "ablation.json")
    expected = {name: (out / name).read_bytes() for name in names}
    before = parts_of(out)
    assert len(before) == 6 * 3  # documents x edits
    gone = sorted(before)[2]
    (out / ".ablation/one" / gone).write_text('{"rows": ')  # as a machine that lost power leaves it
    told = Told()
    ablate_study(path, out, SETTINGS, told, options=ALONE)
    assert "one: 18 of 18 shards done" in told.notes  # and nothing is left, not even a minute
    assert {name: (out / name).read_bytes() for name in names} == expected
    after = parts_of(out)
    assert {name for name in before if before[name] != after[name]} == {gone}


@pytest.mark.slow
def test_ctrl_c_lets_the_shard_in_flight_finish(study):
    path, out = study
    settings = replace(SETTINGS, seed=3)  # nothing of it is there
    written, write = [], CheckpointAblation.write_outcomes

    def interrupted(*arguments):
        written.append(arguments)
        signal.raise_signal(signal.SIGINT)
        write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointAblation, "write_outcomes", interrupted)
        with pytest.raises(Stopped, match="1 of 18 shards done: run the same command to resume"):
            ablate_study(path, out, settings)
    assert len(written) == 1


@pytest.mark.slow
def test_shards_are_blocks_of_units_that_depend_on_the_request_alone(study):
    path, out = study
    (work,) = prepare_ablation(path, out, replace(SETTINGS, heads=HeadChoice()))
    assert len(work.units) == 16 <= UNITS
    assert [shard.number for shard in work.shards] == list(range(18))
    many = replace(work, units=work.units * 3)
    assert [len(shard.units) for shard in many.shards][:2] == [UNITS, 16]
    assert len({work.fingerprint(shard) for shard in work.shards}) == 18
    other = replace(work, settings=replace(work.settings, attention=True))
    assert not {work.fingerprint(s) for s in work.shards} & {other.fingerprint(s) for s in other.shards}


@pytest.mark.slow
def test_ablations_of_one_folder_stand_beside_each_other(study):
    path, out = study
    ablate_study(path, out, SETTINGS, options=ALONE)
    alone = pd.read_csv(out / "ablation.csv")
    assert not (out / "ablation_groups.csv").exists()
    ablate_study(path, out, replace(SETTINGS, edits=("zero",), heads=TOGETHER))
    both = pd.read_csv(out / "ablation.csv")
    pd.testing.assert_frame_equal(both[both["role"] == "head"].reset_index(drop=True), alone, check_dtype=False)
    assert set(both["role"]) == {"head", "chosen", "control"}
    groups = pd.read_csv(out / "ablation_groups.csv")
    chosen = both[(both["role"] == "chosen") & (both["outcome"] == "all")]["delta"].item()
    assert groups.set_index("outcome").loc["all", "chosen"] == pytest.approx(chosen)
    spreads = pd.read_csv(out / "ablation_heads.csv")["kernel_spread"]
    assert groups["chosen_dose"].to_numpy() == pytest.approx(spreads.sum())
    assert (groups["controls_dose"] > 0).all()
    ablate_study(path, out, replace(SETTINGS, edits=("zero",), heads=replace(TOGETHER, match_dose=True)))
    assert set(pd.read_csv(out / "ablation_groups.csv")["group"]) == {"L0H0 L2H3", "L0H0 L2H3, dose-matched"}
    assert (out / "ablation_heads.csv").exists()
    ablate_study(path, out, replace(SETTINGS, edits=("zero",), heads=TOGETHER), options=ALONE)
    assert set(pd.read_csv(out / "ablation.csv")["role"]) == {"chosen", "control"}
    assert not (out / "ablation_heads.csv").exists()
    assert len(parts_of(out)) == 6  # what no table needs is gone


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["nonsense", {"heads": {"names": [1]}, "edits": ["kernal"]}, {"heads": {"x": 1}}])
def test_a_record_that_says_something_else_is_left_behind_with_a_note(study, settings):
    path, out = study
    ablate_study(path, out, SETTINGS, options=ALONE)
    (out / "ablation.json").write_text(json.dumps({"requests": [{"settings": settings, "command": 3}]}))
    told = Told()
    ablate_study(path, out, SETTINGS, told)
    assert any("removed an earlier ablation from ablation.csv" in note for note in told.notes)
    assert len(json.loads((out / "ablation.json").read_text())["requests"]) == 1


@pytest.mark.slow
def test_an_earlier_ablation_whose_outcomes_are_gone_leaves_the_table_with_a_note(study):
    path, out = study
    ablate_study(path, out, SETTINGS, options=ALONE)
    (out / ".ablation/one" / sorted(parts_of(out))[0]).unlink()
    told = Told()
    ablate_study(path, out, replace(SETTINGS, edits=("zero",), heads=TOGETHER), told)
    assert any("have changed since; run it again" in note for note in told.notes)
    assert set(pd.read_csv(out / "ablation.csv")["role"]) == {"chosen", "control"}


@pytest.mark.slow
def test_two_workers_make_the_same_bytes(study, quick_workers):
    path, out = study
    names = ("ablation.csv", "ablation_heads.csv")
    ablate_study(path, out, SETTINGS, options=ALONE)
    expected = [(out / name).read_bytes() for name in names]
    for part in (out / ".ablation/one").iterdir():
        part.unlink()
    ablate_study(path, out, SETTINGS, options=replace(ALONE, placement=Placement(workers=2)))
    assert [(out / name).read_bytes() for name in names] == expected


@pytest.mark.slow
@pytest.mark.faults
def test_a_worker_that_dies_is_replaced(study, quick_workers):
    path, out = study
    ablate_study(path, out, SETTINGS, options=ALONE)
    expected = (out / "ablation.csv").read_bytes()
    for part in (out / ".ablation/one").iterdir():
        part.unlink()
    from qkscope.ablate import study as room

    killed = []

    class Killing(room._Progress):
        def on_report(self, report):
            if not killed:
                killed.append(multiprocessing.active_children()[0])
                killed[0].kill()
            super().on_report(report)

    told = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_Progress", Killing)
        ablate_study(path, out, SETTINGS, told, options=replace(ALONE, placement=Placement(workers=2)))
    assert (out / "ablation.csv").read_bytes() == expected
    assert any("it is given to another worker" in note for note in told.notes)


@pytest.mark.slow
def test_needles_and_attention_are_outcomes_of_a_study(study):
    path, out = study
    settings = replace(SETTINGS, edits=("kernel",), tokens=None, only=("two",), needle=(0.5,), attention=True)
    ablate_study(path, out, settings, options=ALONE)
    table = pd.read_csv(out / "ablation.csv").set_index(["unit", "outcome"])
    assert set(table.loc["L0H0"].index) >= {"all", "needle at 50 %", "attention entropy", "attention distance"}
    needle = table.loc[("L2H3", "needle at 50 %")]
    assert needle["before"] > 5 * np.log(2)  # five digits, from a model that was never trained
    distance = table.loc[("L0H0", "attention distance")]
    assert 0 < distance["before"] < 255


@pytest.mark.slow
def test_bad_input_is_refused_before_a_model_is_loaded(study, capsys):
    path, out = study
    for arguments, message in (
        (["--heads", "L7H0"], "there is no head L7H0"),
        (["--edit", "kernal"], "'kernal' is not an edit; the edits are kernel"),
        (["--checkpoint", "three"], "there is no checkpoint 'three'"),
        (["--documents", "0"], "at least one document"),
        (["--documents", "3"], "3 documents are too few for an error: an ablation needs at least 4"),
        (["--tokens", "1"], "at least two tokens"),
        (["--needle", "1.5"], "depth is from 0 (the document's start) to 1 (its end), not 1.5"),
        (["--needle", "--tokens", "64"], "give more tokens, or leave the needle out"),
        (["--engine", "slurm"], "engine 'slurm' is not one of local, ray"),
    ):
        assert main(["ablate", str(path), "--out", str(out), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["ablate", str(path), "--out", str(out / "empty")]) == 2
    assert "qk.csv: not found" in capsys.readouterr().err


@pytest.mark.slow
def test_too_few_groups_are_refused_with_what_to_do(world, results):
    """Three groups: moments without one of them cannot be had."""
    with pytest.raises(InputError, match=r"\(3 document groups, fewer than 4\); capture more documents or `groups`"):
        ablate_study(world(), results(), SETTINGS)


@pytest.mark.slow
def test_edits_that_need_rotated_vectors_are_refused_where_the_study_has_none(checkpoints, tmp_path):
    write = small_world(tmp_path, checkpoints)
    cut_documents(tmp_path / "docs", 8, 300, 300)
    one = {"name": "one", "model": str(checkpoints / "short"), "context": 64}
    path = write(groups=4, stage="pre_rope", checkpoints=[one])
    run_study(path, tmp_path / "out")
    for edit in ("kernel", "kernel_measured", "flatten", "key_mean"):
        message = rf"the edit {edit} needs .*\(stage: pre_rope\); run a study without `stage`, or use zero or nothing"
        with pytest.raises(InputError, match=message):
            prepare_ablation(path, tmp_path / "out", replace(SETTINGS, edits=("zero", edit)))
    prepare_ablation(path, tmp_path / "out", replace(SETTINGS, edits=("zero",)))


@pytest.mark.slow
def test_a_family_that_cannot_be_edited_is_refused_with_its_checkpoint_and_the_reason(tmp_path):
    """Gemma 2 puts a soft cap on its scores."""
    tiny("gemma2", vocab_size=256, sliding_window=16, head_dim=16).save_pretrained(tmp_path / "capped")
    byte_tokenizer().save_pretrained(tmp_path / "capped")
    path = small_world(tmp_path, tmp_path)(groups=4, checkpoints=[{"name": "one", "model": "capped", "context": 64}])
    cut_documents(tmp_path / "docs", 8, 300, 300)
    run_study(path, tmp_path / "out")
    with pytest.raises(InputError, match=r"checkpoint 'one': layer 0: its kernel is given softcap, so an edit"):
        ablate_study(path, tmp_path / "out", replace(SETTINGS, edits=("zero",), documents=4))


def test_too_few_documents_have_no_error():
    (found,) = course_table(rows([1.0, 2, 3])).to_dict("records")
    assert np.isnan([found["mean_se"], found["costly"], found["gaining"]]).all()


@pytest.mark.slow
def test_the_estimate_counts_passes_and_runs_nothing(study, capsys):
    path, out = study
    assert main(["ablate", str(path), "--out", str(out), "--estimate", "--documents", "4", "--tokens", "32"]) == 0
    said = capsys.readouterr().out
    assert "one: 16 units x 2 edits x 4 documents of 32 tokens: at most 132 passes (4,224 tokens)" in said
    assert "FLOPs in 8 shards" in said
    assert main(["plan", str(path), "--out", str(out), "--estimate"]) == 0
    assert "`qkscope ablate` of each head alone (kernel and zero, up to 16 documents) takes" in capsys.readouterr().out


@pytest.mark.slow
def test_the_flops_of_a_pass_are_those_that_torch_counts(study):
    """Of all matrices, the language-model head among them; scores are counted by hand, two products of each pair."""
    path, out = study
    (work,) = prepare_ablation(path, out, SETTINGS)
    model = load_backbone(work.plan.source, work.plan.config, head=True)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 48, dtype=torch.long), use_cache=False)
    matrices = sum(count for kind, count in counter.get_flop_counts()["Global"].items() if str(kind) == "aten.mm")
    pairs = 48 * 49 // 2
    scores = 4 * 4 * 16 * pairs  # a layer: four heads of width 16
    assert pass_flops(work.plan, 48) == matrices + 4 * scores
    later = pass_flops(work.plan, 48, first=3)
    head = 2 * 48 * 256 * 64  # vocabulary x width
    assert later == pytest.approx((matrices - head) / 4 + head + scores)
    cost = ablation_cost([replace(work, units=work.units[:1], settings=replace(SETTINGS, edits=("zero",)))])
    explicit = 4 * 16 * 48 * 48
    assert cost.flops == pytest.approx(6 * (2 * pass_flops(work.plan, 48) + explicit))  # L0H0: a whole pass
    assert cost.passes == 12
