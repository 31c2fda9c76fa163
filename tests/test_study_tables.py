"""Tables about a study as a whole: made once all head tables are there, read back, and gone where they do not apply."""

import shutil

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file

from qkscope.errors import MomentsFileError, TableError
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.base import HeadTable, Lens, Measure, StudyBuild, StudyTable
from qkscope.lenses.registry import register, with_lens
from qkscope.lenses.views import build_tables
from qkscope.moments import file as whole_file
from qkscope.moments.file import PreRopeFile
from qkscope.moments.layout import Layout, capture_layout
from qkscope.moments.moments import Moments
from qkscope.moments.replicates import before_rotation
from qkscope.results.read import load_results
from qkscope.run.progress import Events
from qkscope.tables.from_moments import analyze_folder

WHO = ("windows", "from_model", "to_model")
STEPS = StudyTable("steps.csv", (Measure("tokens", "More.", error=None), Measure("r_q", "Mean r_q.")), WHO, WHO)
HEADS = StudyTable("steps_heads.csv", STEPS.columns, STEPS.key, STEPS.texts, detail=True)


def steps(study):
    """How many tokens before rotation the second entry has more than the first, at each choice of windows."""
    asked = {window for _, windows in study.windows for window in windows}
    heads, (one, two) = pd.concat(study.head_table("qk", asked)), study.entries
    assert set(heads["window"]) <= asked
    rest = [entry.file.layer(0).unrotated["q"].n.sum() for entry in (one, two)]
    rows = [
        {
            "windows": choice, "from_model": one.name, "to_model": two.name, "r_q": heads["r_q"].mean(),
            "r_q_se": np.nan,
            "tokens": rest[1] - rest[0] + windows[1],
        }
        for choice, windows in study.windows
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    return {STEPS.file: table, HEADS.file: table.assign(other=1)}


LENS = Lens("steps", "Steps", "?", of_study=(StudyBuild((STEPS, HEADS), steps),))


@pytest.mark.slow
def test_a_table_of_the_study_is_written_and_read_at_its_choice_of_windows(finished, tmp_path):
    with with_lens(LENS):
        out = analyze_folder(finished(), Events(), "analyze", out=tmp_path / "out")
        table = pd.read_csv(out / STEPS.file)
        tables = build_tables(load_results(out))
    assert list(table.columns) == ["windows", "from_model", "to_model", "tokens", "r_q", "r_q_se"]
    one, two = (Moments.load(finished() / f"moments/{name}.safetensors") for name in ("one", "two"))
    more = sum(each.layer_moments(0)["q"].unrotated.n.sum() * sign for each, sign in ((two, 1), (one, -1)))
    assert dict(zip(table["windows"], table["tokens"], strict=True)) == {"own": more + 256, "common": more + 64}
    assert table["r_q"][0] == pytest.approx(pd.read_csv(finished() / "qk.csv")["r_q"].mean(), rel=1e-12)
    assert tables.own.table(STEPS.file)["tokens"].tolist() == [more + 256]
    assert tables.common.table(STEPS.file)["tokens"].tolist() == [more + 64]
    assert tables.own.has(HEADS.file)


@pytest.mark.slow
def test_what_no_longer_applies_is_removed(finished, tmp_path):
    out = tmp_path / "out"
    with with_lens(LENS):
        for changes, there in (({}, {STEPS, HEADS}), ({"detail": False}, {STEPS}), ({"kind": "models"}, set())):
            analyze_folder(finished(), Events(), "analyze", out=out, **changes)
            assert {table for table in (STEPS, HEADS) if (out / table.file).exists()} == there


@pytest.mark.slow
def test_a_damaged_table_of_the_study_is_refused_by_name(finished, tmp_path):
    with with_lens(LENS):
        out = analyze_folder(finished(), Events(), "analyze", out=tmp_path / "out")
        table = pd.read_csv(out / STEPS.file)
        for changed, problem in (
            (table.assign(to_model="three"), "checkpoints that qk.csv does not have: 'three'"),
            (table.assign(tokens="many"), "tokens is 'many', which is not a finite number"),
            (pd.concat([table, table]), "repeated row"),
            (table.drop(columns="r_q"), "missing column 'r_q'"),
        ):
            changed.to_csv(out / STEPS.file, index=False)
            with pytest.raises(TableError, match=problem):
                build_tables(load_results(out))


def test_its_file_is_taken_like_that_of_a_head_table():
    other = Lens("other", "t", "q", tables=(HeadTable(STEPS.file, (), None),))
    with with_lens(LENS), pytest.raises(ValueError, match=r"'steps.csv' is taken"):
        register(other)


# --- reading a part of a moments file ---------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    rotation = Rotation(((0, 2), (1, 3)), (1.0, 0.1))
    facts = LayerFacts(1, 4, 2, 6, "rotary", 4, rotation=rotation), LayerFacts(3, 4, 2, 6, "unknown")
    moments = Moments(capture_layout(32, buckets=4, groups=3, common=16), facts, {"name": "a"})
    rng = np.random.default_rng(0)
    for each in facts:
        q, k = rng.normal(size=(3, 4, 32, 6)), rng.normal(size=(3, 2, 32, 6))
        moments.add(each.layer, q, k, groups=[0, 1, 2])
    moments.save(tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_what_was_before_rotation_is_read_without_the_rest(path, monkeypatch):
    loaded = Moments.load(path)
    monkeypatch.setattr(whole_file, "load_moments", None)
    rest = PreRopeFile(path)
    assert (rest.layout, rest.layers, rest.provenance) == (loaded.layout, loaded.layers, loaded.provenance)
    found = rest.layer(1)
    for kind in ("q", "k"):
        np.testing.assert_array_equal(found.n[kind], loaded.layer_moments(1)[kind].crossed.n)
        for without in (None, 2):
            here = before_rotation(found.unrotated[kind], slice(1, 4), without)
            there = loaded.before_rotation(1, kind, 24, 1, without=without)
            for name in ("n", "mean", "cov", "bucket_n", "bucket_mean"):
                np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
    assert rest.layer(3).unrotated == {"q": None, "k": None}  # its rotation is not known


def test_numbers_that_are_none_are_refused_where_they_are_read(path):
    arrays = load_file(path)
    with path.open("rb") as file:
        import json

        about = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    arrays["1.k.unrotated.x"][0, 1, 0] = np.nan
    save_file(arrays, path, metadata=about)
    rest = PreRopeFile(path)
    with pytest.raises(MomentsFileError, match=r"a.safetensors: 1.k holds values that are not numbers"):
        rest.layer(1)
    shutil.copyfile(path, path.with_name("b.safetensors"))
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(MomentsFileError, match=r"a.safetensors: "):
        PreRopeFile(path)


def test_a_layout_without_common_window_reads_the_same(tmp_path):
    moments = Moments(Layout((0, 8), 1, unrotated_every=1), [LayerFacts(0, 1, 1, 2, "nope")])
    x = np.arange(16.0).reshape(1, 1, 8, 2)
    moments.add(0, x, x)
    moments.save(tmp_path / "m.safetensors")
    found = before_rotation(PreRopeFile(tmp_path / "m.safetensors").layer(0).unrotated["q"], slice(0, 1))
    np.testing.assert_allclose(found.mean, x[:, 0, 1:].mean(axis=1))  # all but position 0
