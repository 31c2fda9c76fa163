"""An axis of steps or tokens: entries stand where their numbers are, in every figure."""

import json
import shutil

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.axis import NumberAxis
from qkscope.lenses.views import build_tables
from qkscope.results.entries import Entries, Entry
from qkscope.results.provenance import CheckpointRecord
from qkscope.results.read import load_results
from reports import FIGURES, drawing


def entries(numbers, axis="step", scale="linear", **more):
    key = "step" if axis == "step" else "trained_tokens"
    listed = [Entry(f"c{k}", f"c{k}", "early" if k < 2 else "late", 64, CheckpointRecord.of({key: number}))
              for k, number in enumerate(numbers)]  # fmt: skip
    return Entries("T", tuple(listed), (), axis=axis, axis_scale=scale, **more)


def drawn(study):
    """Where each entry is drawn, as a share of the axis."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(len(study.checkpoints)), range(len(study.checkpoints)))
    style.checkpoint_axis(axes, study)
    style.finish(figure)
    pixels = axes.transData.transform([(k, 0.0) for k in range(len(study.checkpoints))])[:, 0]
    return axes, pixels


@pytest.mark.parametrize(("scale", "place"), [("linear", lambda n: n), ("log", np.log10)])
def test_distances_on_the_axis_are_those_of_the_numbers(scale, place):
    numbers = np.array([20, 40, 100, 1000, 1500])
    _, pixels = drawn(entries(numbers.tolist(), scale=scale))
    expected = (place(numbers) - place(numbers)[0]) / (place(numbers)[-1] - place(numbers)[0])
    np.testing.assert_allclose((pixels - pixels[0]) / (pixels[-1] - pixels[0]), expected, atol=1e-9)


def test_ticks_are_round_numbers_where_they_belong():
    axes, pixels = drawn(entries([0, 500, 2000]))
    texts = [tick.get_text() for tick in axes.get_xticklabels()]
    assert texts == ["0", "500", "1K", "1.5K", "2K"]
    places = axes.transData.transform([(x, 0.0) for x in axes.get_xticks()])[:, 0]
    np.testing.assert_allclose((places - pixels[0]) / (pixels[-1] - pixels[0]), [0, 0.25, 0.5, 0.75, 1], atol=1e-9)
    assert axes.get_xlabel() == "training step"


def test_zero_stands_before_the_first_number_of_a_logarithmic_axis():
    axes, pixels = drawn(entries([0, 1, 10, 100], axis="tokens", scale="log"))
    np.testing.assert_allclose(np.diff(pixels), np.diff(pixels)[0], rtol=1e-9)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "1", "10", "100"]
    assert axes.get_xlabel() == "training tokens (log)"


def test_there_and_back():
    axis = NumberAxis((1.0, 10.0, 15.0, 400.0), "x", log=True)
    at = np.linspace(-1, 4, 51)
    np.testing.assert_allclose(axis.index_of(axis.place_of(at)), at, atol=1e-9)


@pytest.mark.parametrize(
    "study",
    [
        entries([3, 2]),
        entries([1, None]),
        entries([1, 2], kind="seeds"),
        Entries("T", entries([1, 2]).checkpoints, ()),
        entries([5]),
    ],
    ids=["falling", "unknown", "seeds", "not asked for", "alone"],
)
def test_without_rising_numbers_entries_stand_one_beside_the_other(study):
    assert NumberAxis.of(study) is None
    axes, pixels = drawn(study)
    assert {tick.get_text() for tick in axes.get_xticklabels()} <= {"c0", "c1"}
    assert len({round(gap) for gap in np.diff(pixels)}) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_every_figure_of_a_study_can_have_it(published_folder, tmp_path, scale):
    shutil.copytree(published_folder, tmp_path, dirs_exist_ok=True)
    told = json.loads((tmp_path / "provenance.json").read_text())
    for number, checkpoint in enumerate(told["checkpoints"]):
        checkpoint["step"] = 1000 * 2**number
    told["study"] = {**(told.get("study") or {}), "axis": "step", "axis_scale": scale}
    (tmp_path / "provenance.json").write_text(json.dumps(told))
    tables = build_tables(load_results(tmp_path))
    named = []
    for name in FIGURES:
        figure = drawing(tables, name)
        named += [] if figure is None else [axes.get_xlabel() for axes in figure.axes]
    assert len([text for text in named if text.startswith("training step")]) >= 4
