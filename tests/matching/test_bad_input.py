"""Bad input raises an error of ours that names the model, what was found and what is expected."""

from __future__ import annotations

import numpy as np
import pytest

import nafi

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
    "text": (([GOOD, [["a", "b", "c"]]],), {}, r"model 1: expected real numbers"),
    "ragged": (([[[1, 2], [3]]],), {}, r"model 0: expected real numbers"),
    "complex": (([GOOD * 1j],), {}, r"model 0: expected real numbers.*complex"),
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
    "mass": (([GOOD],), {"mass": 0}, r"mass: found 0, expected a finite number above 0"),
    "penalty": (([GOOD],), {"penalty": -1}, r"penalty: found -1, expected .* at least 0"),
    "penalty text": (([GOOD],), {"penalty": "0.1"}, r"penalty: found '0.1'"),
    "sweeps": (([GOOD],), {"sweeps": -1}, r"sweeps: found -1"),
    "seed": (([GOOD],), {"seed": None}, r"seed: found None"),
    "overflow": (([GOOD * 1e200, GOOD * 1e200],), {}, r"costs overflow"),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_error_names_the_culprit(name: str) -> None:
    args, options, message = CASES[name]
    with pytest.raises(nafi.NafiError, match=message):
        nafi.match(*args, **options)  # type: ignore[arg-type]


def test_no_penalties_on_a_path() -> None:
    with pytest.raises(nafi.InputError, match="penalties: found none"):
        nafi.match_path([GOOD], [])


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
