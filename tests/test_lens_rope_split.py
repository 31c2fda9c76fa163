"""The split of a change into window, base and weights: games with known values, and heads turned by brute force."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from qkscope.layers import Rotation
from qkscope.lenses.kind_of_layer import kind_name
from qkscope.lenses.position import LEADING
from qkscope.lenses.rope.predict import base_of, rebased
from qkscope.lenses.rope.split import FILE, HEADS_FILE, QUANTITIES, SplitStep, shapley, split_study, together
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.lenses.sums import EntrySums, StudySums, layer_sums
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.results.provenance import CheckpointRecord
from qkscope.stats.jackknife import scaled_correlations
from rope_world import HALVES, HEADS, WIDTH, brute, capture, cloud, facts, heads, turn

OLD, NEW = HALVES, replace(HALVES, angles=(1.0, 0.08, 0.006, 0.0004), scale=1.2)
GROUPS = (0, 1, 2, 3, 4, 0)
SAME = {"documents": 6, "corpus": {"fingerprint": "sha256:1"}}


def game(value):
    """Eight values of a function of (window, base, weights), each 0 or 1."""
    return np.array([[[value(t, b, w) for w in (0, 1)] for b in (0, 1)] for t in (0, 1)], dtype=float)


def test_parts_that_do_not_meet_have_their_own_values_whatever_the_order():
    found = shapley(game(lambda t, b, w: 5 + 2 * t - 3 * b + 0.5 * w))
    np.testing.assert_allclose(found.shares, [2, -3, 0.5])
    np.testing.assert_allclose(found.spread, 0, atol=1e-15)


def test_what_needs_two_parts_is_shared_by_them_and_the_orders_say_so():
    """Only both together give 1: each has it in half of the orders."""
    found = shapley(game(lambda t, b, w: t * b))
    np.testing.assert_allclose(found.shares, [0.5, 0.5, 0])
    np.testing.assert_allclose(found.spread, [1, 1, 0])
    np.testing.assert_allclose(together(game(lambda t, b, w: t * b)).shares, [1, 0])
    np.testing.assert_allclose(together(game(lambda t, b, w: t * b)).spread, 0)
    # All three together: a third each; window and base at once, and the weights: a half each.
    np.testing.assert_allclose(shapley(game(lambda t, b, w: t * b * w)).shares, [1 / 3] * 3)
    np.testing.assert_allclose(together(game(lambda t, b, w: t * b * w)).shares, [0.5, 0.5])
    # A longer window takes 1 away, a larger base gives it back.
    undone = game(lambda t, b, w: -t * (1 - b))
    np.testing.assert_allclose(shapley(undone).shares, [-0.5, 0.5, 0])
    np.testing.assert_allclose(together(undone).shares, [0, 0])


def test_shares_add_up_to_the_change():
    values = np.random.default_rng(0).normal(size=(2, 2, 2, 3, 5))
    change = values[1, 1, 1] - values[0, 0, 0]
    np.testing.assert_allclose(shapley(values).shares.sum(axis=0), change)
    np.testing.assert_allclose(together(values).shares.sum(axis=0), change)


# --- a run of three checkpoints ---------------------------------------------------------------------


def entry(folder, name, rotation, seed, context, *, record=SAME, of=None, groups=GROUPS):
    """A checkpoint of its own rotation, context and vectors; NEW has its factor in the vectors, as a kernel gets it."""
    q, k = (x * rotation.scale if rotation else x for x in heads(seed, length=context))
    layout = capture_layout(context, buckets=8, groups=5, common=16)
    moments = capture(rotation, q, k, layout=layout, of=of, groups=groups)
    moments.save(folder / f"{name}.safetensors")
    moments = Moments.load(folder / f"{name}.safetensors")  # what serves errors is float16 in a file
    file = folder / f"{name}.safetensors"
    return moments, EntrySums(name, file, context, CheckpointRecord.read({"name": name, **record}))


def study(parts, **changes):
    entries = tuple(each for _, each in parts)
    tables = [
        checkpoint_rows(moments, [LEADING], RowSettings(own=each.window, common=16), model=each.name)["replicates"]
        for moments, each in parts
    ]
    return StudySums(
        entries,
        "checkpoints",
        RowSettings(common=16, **changes),
        lambda file, windows: (rows[rows["window"].isin(windows)] for rows in tables),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One step of training, then another base and a longer context."""
    folder = tmp_path_factory.mktemp("run")
    parts = [
        entry(folder, "one", OLD, 1, 32), entry(folder, "two", OLD, 2, 32), entry(folder, "three", NEW, 3, 64),
    ]  # fmt: skip
    return parts, split_study(study(parts))


def expected_cube(before, after, windows, head):
    """(r_q, r_k) of a head with every combination, from clouds of vectors that are turned to every position."""
    cube = np.empty((2, 2, 2, 2))
    for t, b, w in itertools.product((0, 1), repeat=3):
        moments, window = (before, after)[w][0], windows[w]
        own, other = (OLD, NEW)[windows_base(before, after, w)], (OLD, NEW)[windows_base(before, after, b)]
        clouds = []
        for kind, index in (("q", head), ("k", head // 2)):
            at = moments.before_rotation(0, kind, window)
            clouds.append(cloud(at.mean[index], at.cov[index]) * other.scale / own.scale)
        found = brute(*clouds, range(windows[t]), other)
        cube[t, b, w] = found["r_q_rope"], found["r_k_rope"]
    return np.moveaxis(cube, -1, 0)


def windows_base(before, after, which):
    return int((before, after)[which][1].file.layers[0].rotation == NEW)


@pytest.mark.parametrize(("choice", "windows"), [("own", (32, 64)), ("common", (16, 16))])
def test_parts_of_a_step_are_those_of_vectors_turned_by_hand(run, choice, windows):
    parts, tables = run
    rows = tables[HEADS_FILE].set_index(["windows", "from_model", "to_model", "head", "quantity"])
    for head in range(HEADS):
        cube = expected_cube(parts[1], parts[2], windows, head)
        for place, quantity in enumerate(("r_q", "r_k")):
            row = rows.loc[(choice, "two", "three", head, quantity)]
            found = shapley(cube[place])
            np.testing.assert_allclose(row[["window", "base", "weights"]].astype(float), found.shares, atol=1e-9)
            spread = row[["window_spread", "base_spread", "weights_spread"]].astype(float)
            np.testing.assert_allclose(spread, found.spread, atol=1e-9)
            np.testing.assert_allclose(
                row[["joint", "joint_weights"]].astype(float), together(cube[place]).shares, atol=1e-9
            )
            assert row["before_rope"] == pytest.approx(cube[place][0, 0, 0], abs=1e-9)
            assert row["after_rope"] == pytest.approx(cube[place][1, 1, 1], abs=1e-9)
            total = row[["window", "base", "weights", "unexplained"]].sum()
            assert total == pytest.approx(row["change"], abs=1e-12)
            assert row["change"] == pytest.approx(row["after"] - row["before"], abs=1e-12)


@pytest.mark.parametrize(("choice", "windows"), [("own", (32, 64)), ("common", (16, 16))])
def test_what_was_measured_is_that_of_the_windows_that_are_compared(run, choice, windows):
    parts, tables = run
    rows = tables[HEADS_FILE].set_index(["windows", "from_model", "to_model", "quantity", "head"]).sort_index()
    for quantity in ("r_q", "r_k"):
        found = rows.loc[(choice, "two", "three", quantity)]
        for end, (moments, _), window in zip(("before", "after"), parts[1:], windows, strict=True):
            measured = getattr(layer_sums(moments, 0, range(HEADS), window).principal, quantity)[:, 0]
            np.testing.assert_allclose(found[end], measured, atol=1e-12)


def test_what_did_not_change_has_no_part(run):
    _, tables = run
    means = tables[FILE].set_index(["windows", "from_model", "to_model", "quantity"]).sort_index()
    first = means.loc[("own", "one", "two")]
    np.testing.assert_array_equal(first[["window", "base", "window_spread", "base_spread", "joint"]], 0)
    assert (first["weights"].abs() > 1e-3).any()
    assert (means.loc["common"]["window"] == 0).all()
    assert (means.loc[("common", "two", "three")]["base"].abs() > 1e-4).any()


def test_every_step_and_the_whole_way_are_there_with_windows_and_bases(run):
    _, tables = run
    own = tables[FILE][tables[FILE]["windows"] == "own"].drop_duplicates(["from_model", "to_model"])
    steps = own[["from_model", "to_model", "from_window", "to_window"]].to_numpy().tolist()
    assert steps == [["one", "two", 32, 32], ["two", "three", 32, 64], ["one", "three", 32, 64]]
    assert own[["from_base", "to_base"]].isna().all(axis=None)  # these angles are of no base
    assert set(tables[FILE]["heads_of"]) == {"all"}
    assert set(tables[FILE]["quantity"]) == {"r_q", "r_k", "position_dominated"}


def oriented(pairs, sizes):
    """Draws of r_q with the sign that the published rule gives each: above 0, or by r_k where r_q is below 0.05."""
    r_q, r_k = (scaled_correlations(whole, without, sizes) for whole, without in pairs)
    sign = np.where(np.abs(r_q) < 0.05, np.sign(r_k), np.sign(r_q))
    return sign * r_q


def test_means_are_over_heads_and_their_errors_over_documents_in_pairs(run):
    """Errors by hand: each group's documents left out of both checkpoints at once, scaled up to another sample."""
    parts, tables = run
    means = tables[FILE].set_index(["windows", "from_model", "to_model", "quantity"])
    by_head = tables[HEADS_FILE].set_index(["windows", "from_model", "to_model", "quantity"])
    row = means.loc[("own", "two", "three", "r_q")]
    for name in ("before", "after", "change", "window", "base", "weights", "unexplained", "joint"):
        assert row[name] == pytest.approx(by_head.loc[("own", "two", "three", "r_q"), name].mean(), abs=1e-12)
    assert row["heads"] == HEADS
    assert row["errors"] == "jackknife, paired, covariances before rotation by first order"

    measured, predicted = [], []
    for (moments, each), seed, rotation in ((parts[1], 2, OLD), (parts[2], 3, NEW)):
        replicates = checkpoint_rows(moments, [LEADING], RowSettings(), model="m")["replicates"]
        replicates = replicates[replicates["window"] == each.window]
        sizes = [2, 1, 1, 1, 1]
        own = [(replicates[n], np.stack([replicates[f"{n}_without_{g}"] for g in range(5)])) for n in ("r_q", "r_k")]
        measured.append(oriented(own, sizes).mean(axis=1))
        q, k = (x * rotation.scale for x in heads(seed, length=each.window))
        r = []
        for left in (None, *range(5)):
            kept = np.array(GROUPS) != left
            of_heads = []
            for head in range(HEADS):
                pre_rope = [x[kept, own, 1:].reshape(-1, WIDTH) for x, own in ((q, head), (k, head // 2))]
                clouds = [cloud(x.mean(axis=0), np.cov(x.T, bias=True)) for x in pre_rope]
                found = brute(*clouds, range(each.window), rotation)
                of_heads.append((found["r_q_rope"], found["r_k_rope"]))
            r.append(np.transpose(of_heads))
        predicted.append(oriented([(r[0][i], np.array(r[1:])[:, i]) for i in (0, 1)], sizes).mean(axis=1))
    changes = {"change": measured[1] - measured[0]}
    changes["unexplained"] = changes["change"] - (predicted[1] - predicted[0])
    for name, draws in changes.items():
        # Measured: float16 in the file. Predicted: covariances count to first order, of six documents.
        close = 2e-2 if name == "change" else 5e-2
        assert row[f"{name}_se"] == pytest.approx(draws.std(), rel=close), name
    assert row["change_se"] > 0


@pytest.mark.parametrize(
    ("rotary", "kinds", "told"),
    [
        (["rotary"] * 4, ["rotary, full"] * 4, {"all": 2.5}),
        (["rotary", "rotary", "nope", "nope"], ["rotary, full"] * 2 + ["NoPE, full"] * 2,
         {"all": 2.5, "rotary": 1.5, "nope": 3.5}),
        (["rotary"] * 4, ["rotary, full"] + ["rotary, sliding 512"] * 3,
         {"all": 2.5, "rotary, full": 1.0, "rotary, sliding 512": 3.0}),
    ],
)  # fmt: skip
def test_means_are_apart_for_kinds_of_layers(rotary, kinds, told):
    """Heads with r_q 1, 2, 3 and 4 before a step that changes nothing."""
    values = {name: np.array([[1.0, 2.0, 3.0, 4.0]]) for name in QUANTITIES}
    predicted = {name: np.zeros((2, 2, 2, 1, 4)) for name in QUANTITIES}
    numbers = {name: (values[name], values[name], predicted[name]) for name in QUANTITIES}
    step = SplitStep({}, np.array([np.arange(4), np.zeros(4, int)]), np.array(rotary), np.array(kinds), numbers)
    found = [row for row in step.means() if row["quantity"] == "r_q"]
    assert {row["heads_of"]: row["before"] for row in found} == told
    assert kind_name("rotary", "sliding", 512) == "rotary, sliding 512"
    assert kind_name("nope", "full", None) == "NoPE, full"


def test_checkpoints_of_other_documents_have_a_split_without_errors(tmp_path):
    parts = [
        entry(tmp_path, "one", OLD, 1, 32),
        entry(tmp_path, "two", NEW, 2, 32, record={**SAME, "documents": 7}),
    ]
    found = split_study(study(parts))[FILE]
    assert found["window"].notna().all()
    assert found[["window_se", "change_se", "unexplained_se"]].isna().all(axis=None)
    assert set(found["errors"]) == {"none: the checkpoints are not known to have read the same documents"}


def test_too_few_groups_leave_errors_empty(tmp_path):
    parts = [entry(tmp_path, name, OLD, seed, 32, groups=(0, 1, 2, 0, 1, 2)) for seed, name in enumerate("ab")]
    found = split_study(study(parts))[FILE]
    assert set(found["errors"]) == {"none: 3 document groups, fewer than 4"}
    assert found["weights"].notna().all()
    assert found["weights_se"].isna().all()


def test_a_layer_that_lost_its_rotation_is_a_change_of_base(tmp_path):
    """From rotary to NoPE: RoPE alone then predicts 0, and only the base can be what took it away."""
    parts = [entry(tmp_path, "one", OLD, 1, 32), entry(tmp_path, "two", None, 1, 32)]
    found = split_study(study(parts))[FILE].query("windows == 'own'").set_index("quantity")
    for quantity in ("r_q", "r_k"):
        assert found.loc[quantity, "base"] == pytest.approx(-found.loc[quantity, "before_rope"], abs=0.02)
        assert found.loc[quantity, "after_rope"] == pytest.approx(0, abs=1e-9)


def test_layers_that_cannot_be_predicted_are_counted_and_left_out(tmp_path):
    parts = [
        entry(tmp_path, "one", OLD, 1, 32, of=facts(None, rotary="unknown")),
        entry(tmp_path, "two", OLD, 2, 32, of=facts(None, rotary="unknown")),
    ]
    assert split_study(study(parts)) == {}


def test_the_first_position_can_be_left_out(tmp_path):
    parts = [entry(tmp_path, "one", OLD, 1, 32), entry(tmp_path, "two", OLD, 2, 64)]
    found = split_study(study(parts, skip=1))[HEADS_FILE].set_index(["windows", "head", "quantity"])
    moments = parts[0][0]
    before = [cloud(at.mean[i], at.cov[i]) for at, i in ((moments.before_rotation(0, "q", 32, 1), 3),
                                                        (moments.before_rotation(0, "k", 32, 1), 1))]  # fmt: skip
    expected = brute(*before, range(1, 32), OLD)["r_q_rope"]
    assert found.loc[("own", 3, "r_q"), "before_rope"] == pytest.approx(expected, abs=1e-9)


# --- bases --------------------------------------------------------------------------------------------


def spectrum(base, planes, factor=1.0):
    angles = np.float32(factor) / np.float32(base) ** (np.arange(planes, dtype=np.float32) / np.float32(planes))
    return Rotation(tuple((i, i + planes) for i in range(planes)), tuple(float(a) for a in angles))


@pytest.mark.parametrize("base", [10_000, 50_000, 500_000, 1e6, 5e6])
@pytest.mark.parametrize("planes", [2, 8, 64])
def test_the_base_of_float32_angles_is_found_and_another_one_gives_its_angles(base, planes):
    rotation = spectrum(base, planes)
    assert base_of(rotation) == base
    other = rebased(rotation, 2_000_000.0)
    np.testing.assert_allclose(other.angles, spectrum(2e6, planes).angles, rtol=3e-6)
    assert other.pairs == rotation.pairs
    reversed_planes = Rotation(rotation.pairs, rotation.angles[::-1])
    np.testing.assert_allclose(rebased(reversed_planes, 2e6).angles, other.angles[::-1], rtol=1e-7)


def test_interpolated_positions_keep_their_factor():
    rotation = spectrum(10_000, 8, factor=0.25)
    assert base_of(rotation) == 10_000
    np.testing.assert_allclose(rebased(rotation, 1e6).angles, spectrum(1e6, 8, 0.25).angles, rtol=3e-6)


def test_angles_that_are_stretched_unevenly_are_of_no_base():
    angles = np.array(spectrum(500_000, 8).angles)
    angles[4:] /= 8  # as Llama 3 does with its slow planes
    stretched = Rotation(spectrum(500_000, 8).pairs, tuple(angles))
    assert base_of(stretched) is None
    assert rebased(stretched, 1e6) is None
    assert base_of(None) is None
    assert base_of(Rotation(((0, 1),), (1.0,))) is None


def test_turning_by_another_rotation_takes_its_factor_and_leaves_the_old():
    from qkscope.lenses.rope.predict import KindPreRope
    from qkscope.lenses.rotated_moments import Planes

    old = Rotation(((0, 1),), (0.5,), 2.0)
    new = Rotation(((2, 1),), (0.25,), 3.0)
    x = np.array([2.0, 4.0, 5.0])  # coordinates 0 and 1 have the factor 2 in them
    at = KindPreRope(Planes.of(old, 3), x[Planes.of(old, 3).order][None, None], np.eye(3)[None])
    moved = at.under(new)
    back = np.argsort(moved.planes.order)
    np.testing.assert_allclose(moved.mean[0, 0][back], [1.0, 6.0, 15.0])
    np.testing.assert_allclose(np.diag(moved.cov[0])[back], [0.25, 2.25, 9.0])
    np.testing.assert_allclose(turn(x, 0.0, old), x)
