"""A results folder never mixes settings: what was made from other tables is removed, and nothing else is."""

import pandas as pd
import pytest

from qkscope.cli.main import main
from qkscope.report.write import write_report
from qkscope.run.execute import run_study
from test_finished import Told

REPORT = ("report.html", "tables/means.csv", "tables/head_changes.parquet", "tables/portraits.csv",
          "figures/01_position_signal/figure.png", "figures/99_renumbered/README.md")  # fmt: skip
OUTCOMES = ("ablation.csv", "ablation.json", "ablation_heads.csv", "prediction.csv", "comparison/published/heads.csv",
            "join/scores/join.csv", "collage/a/collage.png")  # fmt: skip
MINE = ("figures/01_position_signal/notes.txt", "tables/mine.csv", "figures/mine/figure.png", "comparison/notes.txt",
        "report.txt")  # fmt: skip


@pytest.fixture
def study(world, checkpoints):
    """One checkpoint, under the name `two`, and changes."""

    def write(context=256, label=None, **changes):
        one = {"name": "two", "model": str(checkpoints / "long"), "context": context}
        return world(checkpoints=[{**one, "label": label} if label else one], **changes)

    return write


@pytest.fixture
def reported(checkpoints, results):
    """Results of context 256 with a report, files as other commands name theirs, and files of the user's own."""
    out = results(checkpoints=[{"name": "two", "model": str(checkpoints / "long"), "context": 256}])
    write_report(out, figures=False)
    for name in (*REPORT, *OUTCOMES, *MINE):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    return out


def there(out, names):
    return [name for name in names if (out / name).exists()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "outcomes_stay"),
    [
        ({"context": 128}, False),
        ({"heads": {"sample": 2, "seed": 1}}, False),
        ({"layers": [0]}, False),
        ({"skip_positions": 1}, False),
        ({"common_window": 64}, False),
        ({"components": 1}, True),
        ({"label": "another label"}, True),
    ],
)
def test_other_settings_remove_what_earlier_tables_made_and_say_so_once(study, reported, changes, outcomes_stay):
    told = Told()
    run_study(study(**changes), reported, told)
    assert told.documents == 0  # the sums answer for all of these
    assert there(reported, REPORT) == []
    assert there(reported, OUTCOMES) == (list(OUTCOMES) if outcomes_stay else [])
    assert there(reported, MINE) == list(MINE)
    (note,) = [note for note in told.notes if "removed" in note]
    assert "report.html" in note
    assert f"`qkscope report {reported}`" in note
    assert ("ablation.csv" in note) is not outcomes_stay
    for name in there(reported, OUTCOMES):
        (reported / name).unlink()  # they are empty
    write_report(reported, figures=False)
    qk, means = pd.read_csv(reported / "qk.csv"), pd.read_csv(reported / "tables/means.csv")
    own = means[means["windows"].str.startswith("own") & (means["layer_type"] == "all") & (means["measure"] == "r_q")]
    assert (own["window"].tolist(), own["heads"].tolist()) == ([qk["window"].max()], [(qk["pc"] == 0).sum()])


@pytest.mark.slow
def test_the_same_settings_remove_nothing(study, reported):
    told = Told()
    run_study(study(), reported, told)
    run_study(study(batch_tokens=64), reported, told)
    assert there(reported, (*REPORT[1:], *OUTCOMES, *MINE)) == [*REPORT[1:], *OUTCOMES, *MINE]
    assert not [note for note in told.notes if "removed" in note]


@pytest.mark.slow
def test_links_in_the_place_of_outputs_are_left_alone(study, reported, tmp_path):
    for number, name in enumerate(("figures/01_position_signal", "comparison/published", "join", "collage/a")):
        (reported / name).rename(tmp_path / f"elsewhere-{number}")
        (reported / name).symlink_to(tmp_path / f"elsewhere-{number}")
    before = [path for path in tmp_path.glob("elsewhere-*/**/*") if path.is_file()]
    run_study(study(context=128), reported)
    assert len(before) == 5
    assert all(path.exists() for path in before)
    assert there(reported, OUTCOMES[:4]) == []


@pytest.mark.slow
def test_tables_with_many_rows_per_head_go_when_they_are_not_made_any_more(study, reported):
    detail = [f"{name}.parquet" for name in ("buckets", "parts", "planes", "distances", "pairs")]
    assert there(reported, detail) == detail
    run_study(study(detail=False), reported)
    assert there(reported, detail) == []
    assert there(reported, ("qk.csv", "heads.csv")) == ["qk.csv", "heads.csv"]


@pytest.mark.slow
def test_a_remark_about_several_checkpoints_is_one_line(world, checkpoints, results, capsys):
    both = [
        {"name": f"at-{theta}", "model": str(checkpoints / "long"), "context": 256, "config": {"rope_theta": theta}}
        for theta in (1000.0, 2000.0)
    ]
    out = results(checkpoints=both)
    shorter = world(checkpoints=[{**each, "context": 128} for each in both])
    assert main(["run", str(shorter), "--out", str(out)]) == 0
    errors = capsys.readouterr().err
    assert errors.count("sums over context 256 are there") == 1
    assert "2 checkpoints: document groups have full squares over 256 tokens" in errors
