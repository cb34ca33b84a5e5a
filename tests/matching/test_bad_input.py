"""Bad input raises an error of ours that names the model, what was found and what is expected."""

from __future__ import annotations

import numpy as np
import pytest

import nafi
from nafi.matching import DIVERGENCES

GOOD = np.ones((2, 3))
NAN = np.array([[1.0, np.nan, 0.0]])
INF = np.array([[1.0, 0.0, np.inf]])

CASES = {
    "empty list": (([],), {}, r"neurons: found an empty list, expected at least one"),
    "one array": ((GOOD,), {}, r"neurons: found ndarray, expected a list"),
    "zero neurons": (([GOOD, np.ones((0, 3))],), {}, r"model 1: found shape \(0, 3\)"),
    "zero columns": (([np.ones((3, 0))],), {}, r"model 0: found shape \(3, 0\)"),
    "other columns": (([GOOD, np.ones((2, 4))],), {}, r"model 1: found 4 columns, expected 3"),
    "nan": (([GOOD, NAN],), {}, r"model 1: found nan at \(0, 1\).*finite"),
    "infinity": (([GOOD, GOOD, INF],), {}, r"model 2: found inf at \(0, 2\)"),
    "1-D": (([GOOD, np.ones(3)],), {}, r"model 1: .*shape \(3,\), expected two dimensions"),
    "text": (
        ([GOOD, [["a", "b", "c"]]],),
        {},
        r"model 1: found list of dtype <U1, expected real numbers",
    ),
    "ragged": (([[[1, 2], [3]]],), {}, r"model 0: expected real numbers"),
    "complex": (([GOOD * 1j],), {}, r"model 0: found ndarray of dtype complex128"),
    "negative precision": (
        ([GOOD, GOOD],),
        {"precisions": [1.0, [1, -2, 1]]},
        r"precisions of model 1: found -2 at column 1, expected values of at least 0",
    ),
    "nan precision": (([GOOD],), {"precisions": [np.nan]}, r"precisions of model 0: found nan"),
    "too few precisions": (([GOOD, GOOD],), {"precisions": [1.0]}, r"found 1 entries, .* 2 models"),
    "precision shape": (([GOOD],), {"precisions": [[1, 1]]}, r"model 0: found shape \(2,\)"),
    "precisions None": (([GOOD],), {"precisions": None}, r"precisions: found NoneType"),
    "prior precision 0": (([GOOD],), {"prior_precision": 0}, r"prior_precision: found 0 .*above 0"),
    "prior mean shape": (([GOOD],), {"prior_mean": [0, 0]}, r"prior_mean: found shape \(2,\)"),
    "max_width": (
        ([GOOD, np.ones((5, 3))],),
        {"max_width": 4},
        r"max_width: found 4, expected at least 5, the neurons of model 1",
    ),
    "max_width float": (([GOOD],), {"max_width": 2.5}, r"max_width: found 2.5, expected a whole"),
    "divergence": (([GOOD],), {"divergence": "js"}, r"found 'js', expected one of kl, reverse_kl"),
    "compat": (([GOOD],), {"compat": "fedma"}, r"found 'fedma', expected one of paper, pfnm-code"),
    "mass": (([GOOD],), {"mass": 0}, r"mass: found 0, expected 1e-50 to 1e\+50"),
    "penalty": (([GOOD],), {"penalty": -1}, r"penalty: found -1, expected 0 to 1e\+50"),
    "penalty text": (([GOOD],), {"penalty": "0.1"}, r"penalty: found '0.1'"),
    "sweeps": (([GOOD],), {"sweeps": -1}, r"sweeps: found -1"),
    "seed": (([GOOD],), {"seed": None}, r"seed: found None"),
    "too large": (([GOOD, GOOD * 1e200],), {}, r"model 1: found 1e\+200 at \(0, 0\).*at most 1e"),
    "prior too small": (([GOOD],), {"prior_precision": 1e-300}, r"found 1e-300 .*at least 1e-50"),
    "masked": (([np.ma.masked_equal(GOOD, 1)],), {}, r"model 0: found a masked array"),
    "precisions dict": (([GOOD],), {"precisions": {0: 1.0}}, r"precisions: found dict"),
    "precisions bytes": (([GOOD, GOOD],), {"precisions": b"kl"}, r"precisions: found bytes"),
    "precisions 0-d": (([GOOD],), {"precisions": np.array("x")}, r"precisions: .*dtype <U1"),
    "penalty bool": (([GOOD],), {"penalty": True}, r"penalty: found True, expected a number"),
    "huge penalty": (([GOOD],), {"penalty": 10**400}, r"penalty: found 1000"),
    "divergence list": (([GOOD],), {"divergence": []}, r"divergence: found \[\]"),
    "compat list": (([GOOD],), {"compat": []}, r"compat: found \[\]"),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.filterwarnings("error")
def test_error_names_the_culprit(name: str) -> None:
    args, options, message = CASES[name]
    with pytest.raises(nafi.NafiError, match=message):
        nafi.match(*args, **options)  # type: ignore[arg-type]


def test_no_penalties_on_a_path() -> None:
    with pytest.raises(nafi.InputError, match="penalties: found none"):
        nafi.match_path([GOOD], [])
    with pytest.raises(nafi.InputError, match=r"penalties: found 0\.1, expected a list"):
        nafi.match_path([GOOD], 0.1)  # type: ignore[arg-type]
    with pytest.raises(nafi.InputError, match=r"penalties\[1\]: found -1"):
        nafi.match_path([GOOD], [0.1, -1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("divergence", list(DIVERGENCES))
@pytest.mark.parametrize(
    "options",
    [
        {"precisions": 1e40},
        {"precisions": 1e-40},
        {"prior_precision": 1e-40},
        {"prior_precision": 1e40},
        {"prior_mean": 1e40},
        {"penalty": 1e40},
        {"mass": 1e-50, "max_width": 5},
        {"mass": 1e50},
    ],
)
def test_extreme_but_accepted_numbers_give_finite_results(
    divergence: str, options: dict[str, float]
) -> None:
    rng = np.random.default_rng(0)
    neurons = [rng.normal(size=(width, 3)) for width in (5, 2, 4)]
    found = nafi.match(neurons, divergence=divergence, **options)  # type: ignore[arg-type]
    assert np.isfinite(found.means).all()
    assert np.isfinite(found.precisions).all()
    assert all(np.isfinite(sweep.objective) for sweep in found.history)


def test_other_real_types_are_taken() -> None:
    import torch

    expected = nafi.match([np.eye(3), np.eye(3)]).means
    for given in (
        [torch.eye(3), torch.eye(3)],
        [np.eye(3, dtype=np.float32), np.eye(3, dtype=np.int8)],
        np.stack([np.eye(3), np.eye(3)]),
        [np.eye(3).tolist(), np.eye(3).tolist()],
    ):
        np.testing.assert_allclose(nafi.match(given).means, expected)  # type: ignore[arg-type]


def test_inputs_are_left_as_they_were() -> None:
    neurons = [np.arange(6.0).reshape(2, 3), np.ones((3, 3))]
    copies = [w.copy() for w in neurons]
    precisions = [np.array([1.0, 0, 2]), np.array([2.0, 1, 0])]
    nafi.match(neurons, precisions=precisions)
    for before, after in zip(copies, neurons, strict=True):
        np.testing.assert_array_equal(before, after)
