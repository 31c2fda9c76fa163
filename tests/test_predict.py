"""`qkscope predict`: heads at a window and base that were not run, against vectors turned there; what is refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import qkscope
from qkscope.cli.main import main
from qkscope.errors import InputError
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.categories import classify
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.stats.jackknife import jackknife_error
from rope_world import HEADS, KEY_HEADS, WIDTH, brute, cloud, heads, turn

CONTEXT, OLD, NEW = 64, 50.0, 3000.0


def rotation(base, planes=4, scale=1.0):
    angles = tuple(float(np.float32(base ** (-plane / planes))) for plane in range(planes))
    return Rotation(tuple((i, i + planes) for i in range(planes)), angles, scale)


def save(folder, name, layers, about=None, seed=0, context=CONTEXT):
    (folder / "moments").mkdir(parents=True, exist_ok=True)
    facts = [
        LayerFacts(i, HEADS, KEY_HEADS, WIDTH, "nope" if by is None else "rotary", rotation=by, score_scale=0.5)
        for i, by in enumerate(layers)
    ]
    moments = Moments(capture_layout(context, buckets=4, groups=5), facts, {"name": name, **(about or {})})
    for each in facts:
        q, k = heads(seed + each.layer, length=context)
        t = np.arange(context)
        parts = [x if each.rotation is None else turn(x, t, each.rotation) for x in (q, k)]
        moments.add(each.layer, *parts, groups=[0, 1, 2, 3, 4, 0])
    moments.save(folder / f"moments/{name}.safetensors")
    return moments


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints without tables: `short` with a NoPE layer, `long` with another base and a longer context."""
    place = tmp_path_factory.mktemp("results")
    save(place, "short", [rotation(OLD), None], {"rope_theta": OLD})
    save(place, "long", [rotation(NEW), None], {"rope_theta": NEW}, seed=5, context=128)
    return place


def expected(moments, layer, head, by, window, skip=0):
    parts = []
    for kind, index in (("q", head), ("k", head // 2)):
        at = moments.before_rotation(layer, kind)
        parts.append(cloud(at.mean[index], at.cov[index]))
    return brute(*parts, range(skip, window), by)


def test_heads_are_those_of_vectors_turned_at_a_window_and_base_that_were_not_run(folder):
    moments = Moments.load(folder / "moments/short.safetensors")
    found = qkscope.predict(folder / "moments/short.safetensors", window=200, rope_theta=NEW)
    assert list(found["layer"]) == [0] * HEADS + [1] * HEADS
    for head in range(HEADS):
        want = expected(moments, 0, head, rotation(NEW), 200)
        row = found.iloc[head]
        for name in ("r_q_rope", "r_k_rope", "explained_rope", "bias_rope"):
            assert row[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name  # angles are rounded to float32
        assert row["category_rope"] == classify([want["r_q_rope"]], [want["r_k_rope"]])[0]
    nope = found[found["layer"] == 1]
    np.testing.assert_allclose(nope[["r_q_rope", "r_k_rope"]], 0, atol=1e-12)
    assert set(nope["category_rope"]) == {"content-focused"}
    assert set(found.loc[found["layer"] == 0, "base"]) == {NEW}


def test_errors_are_over_documents(folder):
    moments = Moments.load(folder / "moments/short.safetensors")
    found = qkscope.predict(folder / "moments/short.safetensors", window=100)
    without = []
    for group in range(5):
        parts = [
            cloud(at.mean[i], at.cov[i])
            for at, i in ((moments.before_rotation(0, kind, without=group), i) for kind, i in (("q", 1), ("k", 0)))
        ]
        without.append(brute(*parts, range(100), rotation(OLD))["r_q_rope"])
    error = jackknife_error(found["r_q_rope"][1], np.array(without), [2, 1, 1, 1, 1], "fisher")
    assert found["r_q_rope_se"][1] == pytest.approx(float(error), rel=1e-2)  # covariances count to first order


def test_the_first_position_can_be_left_out(folder):
    moments = Moments.load(folder / "moments/short.safetensors")
    found = qkscope.predict(folder / "moments/short.safetensors", window=100, skip_positions=1)
    want = expected(moments, 0, 2, rotation(OLD), 100, skip=1)
    assert found["r_q_rope"][2] == pytest.approx(want["r_q_rope"], abs=1e-9)


# --- the command ------------------------------------------------------------------------------------


def run(capsys, *arguments):
    code = main(["predict", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_command_writes_heads_and_kernels_and_prints_means(folder, tmp_path, capsys):
    code, out, _ = run(capsys, folder, "--checkpoint", "short", "--window", 256, "--rope-theta", NEW, "--out", tmp_path)
    assert code == 0
    heads = pd.read_csv(tmp_path / "prediction.csv")
    assert (len(heads), set(heads["model"]), set(heads["window"])) == (2 * HEADS, {"short"}, {256})
    assert "short: 256 tokens, base 3,000 (was run at 64 tokens, base 50)" in out
    assert f"{heads['r_q_rope'].mean():.3f} ± " in out
    kernels = pd.read_csv(tmp_path / "prediction_kernel.csv")
    assert kernels["distance"].max() == 4 * 256
    moments = Moments.load(folder / "moments/short.safetensors")
    q, k = (moments.before_rotation(0, kind).mean for kind in ("q", "k"))
    here = kernels[(kernels["layer"] == 0) & (kernels["head"] == 3)]
    for row in here.itertuples():
        score = turn(q[3], row.distance, rotation(NEW)) @ k[1]
        assert row.kernel == pytest.approx(score, rel=1e-4, abs=1e-3)
        assert row.kernel_scaled == pytest.approx(0.5 * row.kernel)


def test_a_place_that_cannot_be_written_is_one_message(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, told = run(capsys, folder, "--window", 100, "--out", tmp_path / "file")
    assert code == 1
    assert "file/prediction.csv: cannot be written" in told


def test_every_checkpoint_and_the_rotation_of_another(folder, tmp_path, capsys):
    _, out, _ = run(capsys, folder, "--rotation-of", "long", "--out", tmp_path)
    rows = pd.read_csv(tmp_path / "prediction.csv")
    assert set(rows["model"]) == {"long", "short"}
    assert set(rows.loc[rows["rotary"] == "rotary", "base"]) == {NEW}
    assert "long: 128 tokens" in out
    moments = Moments.load(folder / "moments/short.safetensors")
    want = expected(moments, 0, 0, rotation(NEW), 64)
    row = rows[(rows["model"] == "short") & (rows["layer"] == 0)].iloc[0]
    assert row["r_q_rope"] == pytest.approx(want["r_q_rope"], abs=1e-6)


def test_a_checkpoint_that_was_trained_there_stands_beside_the_prediction(folder, tmp_path, capsys):
    import shutil

    from qkscope.tables.from_moments import analyze_files
    from lens_worlds import Silent  # isort: skip

    place = shutil.copytree(folder, tmp_path / "results")
    files = [place / f"moments/{name}.safetensors" for name in ("short", "long")]
    analyze_files(files, Silent(), "test", out=place, kind="checkpoints", detail=False)
    _, out, _ = run(capsys, place, "--checkpoint", "short", "--window", 128, "--rope-theta", NEW)
    measured = pd.read_csv(place / "qk.csv").query("pc == 0").groupby("model")["r_q"].mean()
    line = next(line for line in out.splitlines() if "mean r_q" in line)
    assert f" {measured['short']:.3g} " in line
    assert line.endswith(f" {measured['long']:.3g}")
    assert "long" in out.splitlines()[1]
    # Predicted columns end in _rope; r_q, r_k and category are measured, as in qk.csv and heads.csv.
    heads = pd.read_csv(place / "prediction.csv").sort_values(["layer", "head"])
    table = pd.read_csv(place / "qk.csv").query("pc == 0 and model == 'short'").sort_values(["layer", "head"])
    np.testing.assert_allclose(heads["r_q"], table["r_q"])
    np.testing.assert_allclose(heads["r_k"], table["r_k"])
    assert list(heads["category"]) == list(classify(table["r_q"].to_numpy(), table["r_k"].to_numpy()))
    known = heads[heads["r_q_rope"].notna()]
    words = classify(known["r_q_rope"].to_numpy(), known["r_k_rope"].to_numpy())
    assert list(known["category_rope"]) == list(words)
    again = qkscope.predict(place, window=128, rope_theta=NEW).query("model == 'short'")
    pd.testing.assert_frame_equal(again.reset_index(drop=True), pd.read_csv(place / "prediction.csv"), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "predict what?"),
        (["--window", "1"], "a window of 1 tokens"),
        (["--rope-theta", "many"], "--rope-theta many: write a number, or OLD=NEW"),
        (["--rope-theta", "0.5"], "a RoPE base is above 1"),
        (["--rope-theta", "5", "--rope-theta", "6=7"], "write OLD=NEW for every base"),
        (["--rope-theta", "99=7"], "no layer has base 99; there is "),
        (["--rope-theta", "7", "--rotation-of", "long"], "not both"),
        (["--window", "99", "--checkpoint", "none"], "no moments of a checkpoint 'none'; there is long, short"),
        (["--rotation-of", "none"], "no moments of a checkpoint 'none'"),
    ],
)
def test_questions_that_cannot_be_answered(folder, capsys, arguments, problem):
    code, _, err = run(capsys, folder, *arguments)
    assert code == 2
    assert problem in " ".join(err.split())


def test_spectra_that_are_not_of_one_base_are_refused_and_another_rotation_helps(tmp_path):
    stretched = replace(rotation(OLD), angles=(1.0, 0.4, 0.02, 0.001))
    save(tmp_path, "yarn", [stretched])
    with pytest.raises(InputError, match=r"angles of layer 0 are not those of one RoPE base .* --rotation-of NAME"):
        qkscope.predict(tmp_path / "moments/yarn.safetensors", rope_theta=1e6)
    assert len(qkscope.predict(tmp_path / "moments/yarn.safetensors", window=128)) == HEADS


def test_layers_of_several_bases_need_to_be_told_apart(tmp_path, capsys):
    save(tmp_path, "two", [rotation(OLD), rotation(NEW)])
    path = tmp_path / "moments/two.safetensors"
    with pytest.raises(InputError, match=r"several bases \(50, 3000\); write OLD=NEW"):
        qkscope.predict(path, rope_theta=1e6)
    run(capsys, tmp_path, "--rope-theta", "3000=100000")
    rows = pd.read_csv(tmp_path / "prediction.csv")
    assert rows.groupby("layer")["base"].first().to_dict() == {0: OLD, 1: 100_000.0}


def test_angles_that_contradict_the_config_are_not_rebased(tmp_path):
    """Angles spaced as if there were more planes: they look like another base than the config's."""
    save(tmp_path, "proportional", [rotation(OLD)], {"rope_theta": 2500.0})
    with pytest.raises(InputError, match="look like base 50, its config says 2500"):
        qkscope.predict(tmp_path / "moments/proportional.safetensors", rope_theta=1e6)


@pytest.mark.parametrize(("given", "problem"), [({"window": 1}, "window"), ({"rope_theta": "big"}, "rope_theta")])
def test_python_says_what_to_write(folder, given, problem):
    with pytest.raises(InputError, match=problem):
        qkscope.predict(folder / "moments/short.safetensors", **given)
    with pytest.raises(InputError, match="path of a moments file"):
        qkscope.predict(3)
