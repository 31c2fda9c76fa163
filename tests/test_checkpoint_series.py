"""Series of checkpoints: what a pattern finds, in which order, what is chosen of it, and every way to get it wrong."""

import itertools
import math
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qkscope.errors import StudyError
from qkscope.study.load import load_study, study_text
from qkscope.study.schema import Series
from qkscope.study.series import Member, select_members, state_of, why_incomplete
from qkscope.study.values import numbers_in, short, step_in, tokens_in
from saved import safetensors_bytes, save_stub

STEPS = (20, 100, 3, 40)


@pytest.fixture
def runs(tmp_path):
    for step in STEPS:
        save_stub(tmp_path / f"runs/a/checkpoint-{step}")
    return tmp_path


def load(folder, checkpoints, **changes):
    study = {"study": "x", "documents": {"files": "*.txt"}, "context": 64, "checkpoints": checkpoints, **changes}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    return load_study(path)


def names(file):
    return [checkpoint.name for checkpoint in file.study.checkpoints]


def test_a_series_is_in_the_order_of_its_numbers_with_step_label_and_place(runs):
    file = load(runs, {"folder": "runs/a/checkpoint-*"})
    assert names(file) == ["checkpoint-3", "checkpoint-20", "checkpoint-40", "checkpoint-100"]
    assert [c.step for c in file.study.checkpoints] == [3, 20, 40, 100]
    assert [c.label for c in file.study.checkpoints] == ["3", "20", "40", "100"]
    assert [c.model for c in file.study.checkpoints][:2] == ["runs/a/checkpoint-3", "runs/a/checkpoint-20"]
    assert {c.context for c in file.study.resolved_checkpoints()} == {64}
    assert file.notes == ()


@pytest.mark.parametrize(
    ("choice", "steps"),
    [
        ({"every": 2}, [3, 40]),
        ({"every": 1}, [3, 20, 40, 100]),
        ({"first": 2}, [3, 20]),
        ({"last": 1}, [100]),
        ({"first": 1, "last": 1}, [3, 100]),
        ({"every": 3, "last": 2}, [3, 40, 100]),
        ({"first": 9}, [3, 20, 40, 100]),
        ({"log": 3}, [3, 20, 100]),
        ({"log": 9}, [3, 20, 40, 100]),
        ({"log": 1}, [100]),
        ({"exclude": ["*-3", "*00"]}, [20, 40]),
    ],
)
def test_what_any_key_chooses_is_in(runs, choice, steps):
    assert [c.step for c in load(runs, {"folder": "runs/a/checkpoint-*", **choice}).study.checkpoints] == steps


@given(
    steps=st.lists(st.integers(0, 10**6), min_size=1, max_size=40, unique=True).map(sorted), count=st.integers(1, 20)
)
def test_log_spacing_takes_so_many_with_both_ends_and_is_close_to_even(steps, count):
    members = [Member(f"step-{step}", {}) for step in steps]
    picked = [step_in(member.name) for member in select_members(members, Series(folder="x", log=count))]
    assert len(picked) == min(count, len(steps)) == len(set(picked))
    assert picked == sorted(picked)
    if count > 1:
        assert {steps[0], steps[-1]} <= set(picked)


def test_log_spacing_is_even_where_there_are_enough_to_choose_from():
    dense = [Member(f"step-{step}", {}) for step in range(1, 2000)]
    places = [math.log1p(step_in(member.name)) for member in select_members(dense, Series(folder="x", log=5))]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert max(gaps) - min(gaps) < 0.1
    assert sum(gaps) / 4 == pytest.approx(math.log(2000 / 2) / 4)


@pytest.mark.parametrize(
    ("name", "step", "tokens", "numbers"),
    [
        ("checkpoint-500", 500, None, (500,)),
        ("stage1-step-40000", 40000, None, (1, 40000)),
        ("step1000-tokens4B", 1000, 4 * 10**9, (1000, 4 * 10**9)),
        ("stage1-step10000-tokens21B", 10000, 21 * 10**9, (1, 10000, 21 * 10**9)),
        ("lc-4k-to-32k-step-4000", 4000, None, (4000, 32000, 4000)),
        ("global_step143000", 143000, None, (143000,)),
        ("iter_0005000", 5000, None, (5000,)),
        ("step-1.5M", 1500000, None, (1500000,)),
        ("checkpoint-3-step-400", 400, None, (3, 400)),
        ("ckpt_7", 7, None, (7,)),
        ("model-7B-v2", None, None, (7 * 10**9, 2)),
        ("300B_tokens", 300 * 10**9, 300 * 10**9, (300 * 10**9,)),
        ("best", None, None, ()),
    ],
)
def test_what_names_say(name, step, tokens, numbers):
    assert (step_in(name), tokens_in(name), numbers_in(name)) == (step, tokens, numbers)


@given(st.integers(0, 10**15))
def test_short_numbers_are_exact(number):
    digits, suffix = re.fullmatch(r"([\d.]+)([KMBT]?)", short(number)).groups()
    assert round(float(digits) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[suffix]) == number


def test_what_is_not_whole_or_has_no_number_is_left_out_and_said(runs):
    save_stub(runs / "runs/a/checkpoint-500", cut=1)
    save_stub(runs / "runs/a/checkpoint-best")
    file = load(runs, {"folder": "runs/a/checkpoint-*"})
    assert names(file)[-1] == "checkpoint-100"
    assert "checkpoint-500 model.safetensors is cut short" in file.notes[0]
    assert "no number to order it by: 'checkpoint-best'" in file.notes[1]


def test_several_runs_are_told_apart_by_their_folders(runs):
    for step in (20, 100):
        save_stub(runs / f"runs/b/checkpoint-{step}")
    file = load(runs, {"folder": "runs/*/checkpoint-*", "last": 1}, kind="seeds")
    assert names(file) == ["a-checkpoint-100", "b-checkpoint-100"]
    assert [(c.run, c.label) for c in file.study.checkpoints] == [("a", "a 100"), ("b", "b 100")]


def test_series_and_single_checkpoints_stand_in_one_list_and_a_prefix_tells_series_apart(runs):
    save_stub(runs / "runs/b/checkpoint-20")
    entries = [
        {"folder": "runs/a/checkpoint-*", "last": 1, "phase": "one", "context": 32},
        {"folder": "runs/b/checkpoint-*", "prefix": "b-"},
        {"name": "final", "model": "some/model"},
    ]
    file = load(runs, entries)
    assert names(file) == ["checkpoint-100", "b-checkpoint-20", "final"]
    assert [c.label for c in file.study.resolved_checkpoints()] == ["100", "b-20", "final"]
    assert [c.context for c in file.study.resolved_checkpoints()] == [32, 64, 64]
    assert file.study.checkpoints[0].phase == "one"


def test_the_study_that_was_found_is_a_study_file(runs, tmp_path_factory):
    file = load(runs, {"folder": "runs/a/checkpoint-*"}, axis="step", expect={"rope_theta": 1.0})
    path = tmp_path_factory.mktemp("elsewhere") / "study.yaml"
    path.write_text(study_text(file.study, "as it was found"))
    assert load_study(path).study == file.study


MISTAKES = {
    "an unknown key": ({"folder": "runs/a/*", "evry": 2}, "unknown key 'checkpoints.evry'; did you mean 'every'"),
    "in a list": ([{"folder": "runs/a/*", "evry": 2}], r"unknown key 'checkpoints\[0\].evry'"),
    "both places": ({"folder": "a", "revisions": "b"}, "give either `folder` or `revisions`"),
    "a model beside folders": ({"folder": "a", "model": "m"}, "`folder` finds the models itself"),
    "no such folder": ({"folder": "runs/z-*"}, "'runs/z-.' finds no checkpoint, looking from"),
    "a folder of checkpoints": ({"folder": "runs/a"}, r"has no config.json; for a series write .*runs/a/checkpoint-\*"),
    "everywhere": ({"folder": "runs/**"}, "would look through every folder"),
    "every 0": ({"folder": "runs/a/*", "every": 0}, "checkpoints.every: .*greater than or equal to 1"),
    "a text": ({"folder": "runs/a/*", "last": "2"}, "checkpoints.last: .*valid integer"),
    "revisions of nothing": ({"revisions": "step*"}, "`revisions` needs the `model`"),
    "a bad prefix": ({"folder": "runs/a/*", "prefix": "../"}, "checkpoints.prefix: a name starts with"),
    "names twice": ([{"folder": "runs/a/*"}, {"folder": "runs/a/*"}], "2 checkpoints are named 'checkpoint-3'"),
    "excluding all": ({"folder": "runs/a/*", "exclude": ["*"]}, "finds no checkpoint"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_series_are_told(runs, mistake):
    checkpoints, message = MISTAKES[mistake]
    with pytest.raises(StudyError, match=message):
        load(runs, checkpoints)


def test_mistakes_around_a_series_are_told(runs):
    series = {"folder": "runs/a/checkpoint-*"}
    with pytest.raises(StudyError, match=r"'\./runs' is a path; write `folder:`"):
        load(runs, {"revisions": "x"}, model="./runs")
    with pytest.raises(StudyError, match="axis: tokens, but checkpoint 'checkpoint-3' has no `tokens`"):
        load(runs, series, axis="tokens")
    with pytest.raises(StudyError, match="'b' comes after 'a' and has no larger `step`"):
        load(runs, [{"name": "a", "step": 2, "model": "m"}, {"name": "b", "step": 2, "model": "n"}], axis="step")
    with pytest.raises(StudyError, match="'checkpoint-3' has no context, and neither its phase nor the study sets one"):
        load(runs, series, context=None)
    save_stub(runs / "two/1-2")
    save_stub(runs / "two/3-4")
    with pytest.raises(StudyError, match="log: '1-2' does not say its step"):
        load(runs, {"folder": "two/*", "log": 2})


# -- whole or not ------------------------------------------------------------------------------------------


def test_a_checkpoint_is_whole_when_all_that_it_names_is_there(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    assert why_incomplete(folder) == "has no config.json"
    (folder / "config.json").write_text("{}")
    assert why_incomplete(folder) == "has no .safetensors weights"
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors_bytes())
    assert "index.json is missing" in why_incomplete(folder)  # which is saved last
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safe')
    assert "index.json is missing or incomplete" in why_incomplete(folder)
    index.write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    assert why_incomplete(folder) == "model-00002-of-00002.safetensors is missing"
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors_bytes()[:-1])
    assert why_incomplete(folder) == "model-00002-of-00002.safetensors is cut short"
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors_bytes())
    assert why_incomplete(folder) is None
    (folder / "optimizer.pt").write_bytes(b"x")
    assert "trainer_state.json, which its trainer writes last, is missing" in why_incomplete(folder)
    (folder / "trainer_state.json").write_text("{}")
    assert why_incomplete(folder) is None


@given(cut=st.integers(1, len(safetensors_bytes())))
def test_weights_that_lack_any_bytes_are_not_whole(tmp_path_factory, cut):
    folder = save_stub(tmp_path_factory.mktemp("cut") / "x", cut)
    assert why_incomplete(folder) is not None


def test_a_folder_that_goes_away_has_no_state(tmp_path):
    folder = save_stub(tmp_path / "x")
    before = state_of(folder)
    assert [name for name, _, _ in before] == ["config.json", "model.safetensors"]
    (folder / "model.safetensors").write_bytes(safetensors_bytes(8))
    assert state_of(folder) != before
    assert state_of(tmp_path / "gone") is None
    assert "cannot be read" in why_incomplete(tmp_path / "gone")
