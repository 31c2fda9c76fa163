"""How many digits are kept: of float32 products, and of a file, in r and in its standard errors."""

import numpy as np
import pytest
import torch

import qkscope
from qkscope.layers import LayerFacts
from qkscope.moments.file import round_as_stored
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments

WIDTH, DOCUMENTS, CONTEXT = 32, 16, 256
LAYOUT = capture_layout(CONTEXT, buckets=16, groups=8, common=64)


def documents(mean, heavy):
    """Queries of four heads and keys of two: spreads from 3 to 0.02, a drift, a common mean, a sink at position 0."""
    rng, drift = np.random.default_rng(0), np.sqrt(np.arange(CONTEXT) / CONTEXT)[:, None]
    kinds = [
        (rng.normal(size=(heads, WIDTH, WIDTH)) * np.geomspace(3, 0.02, WIDTH), *rng.normal(size=(2, heads, 1, WIDTH)))
        for heads in (4, 2)
    ]
    for _ in range(DOCUMENTS):
        vectors = []
        for mixing, direction, center in kinds:
            shape = (len(mixing), CONTEXT, WIDTH)
            z = rng.standard_t(3, size=shape) if heavy else rng.normal(size=shape)
            x = z @ mixing.swapaxes(1, 2) + rng.normal(1, 0.3) * 2 * drift * direction + mean * center
            x[:, 0] *= 15
            vectors.append(torch.from_numpy(x[None].astype(np.float32)))
        yield vectors


def measures(moments):
    heads = qkscope.analyze(moments)
    r = np.concatenate([heads[name] for name in ("r_q", "r_k", "explained_variance")])
    errors = np.concatenate([heads[name] for name in heads if name.endswith("_se")])
    assert np.isfinite(errors).all()
    return r, errors


def captured(dtype, mean, heavy, way):
    moments = Moments(LAYOUT, [LayerFacts(0, 4, 2, WIDTH)], {"name": "m"}, way=way)
    for number, (q, k) in enumerate(documents(mean, heavy)):
        moments.add(0, q.to(dtype), k.to(dtype), groups=number % 8)
    return moments


@pytest.mark.slow
@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize(("mean", "heavy"), [(0.0, False), (3.0, False), (100.0, False), (3.0, True)])
def test_r_has_five_digits_more_than_its_error_and_files_keep_seven(mean, heavy, way):
    """Float32 products against float64 ones: 1e-6 in r. A file against what it was written from: 1e-7, errors 1e-4."""
    single = captured(torch.float32, mean, heavy, way)
    r, errors = measures(single)
    exact, exact_errors = measures(captured(torch.float64, mean, heavy, way))
    np.testing.assert_allclose(r, exact, atol=1e-6)
    np.testing.assert_allclose(errors, exact_errors, rtol=1e-4)
    if mean < 100:  # there, position 0 is 500 standard deviations away
        stored, stored_errors = measures(round_as_stored(single))
        np.testing.assert_allclose(stored, r, atol=1e-7)
        off = np.abs(stored_errors / errors - 1)
        assert np.quantile(off, 0.99) < 1e-4
        assert off.max() < 3e-4
