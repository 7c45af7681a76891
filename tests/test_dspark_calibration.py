"""Temperatures, calibration error and rank statistic against data of known survival."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from spec.dspark.calibration import auc, ece, fit_sts, reliability, survival

Floats = NDArray[np.float64]


def rounds(num: int, slots: int, *, seed: int = 0) -> tuple[Floats, NDArray[np.int64]]:
    """Logits [N, K] that tell the truth, and how many tokens each round kept."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(2.0, 1.2, size=(num, slots))
    survives = rng.random((num, slots)) < 1 / (1 + np.exp(-logits))
    return logits, np.cumprod(survives, axis=1).sum(axis=1)


def errors(logits: Floats, accepted: NDArray[np.int64], temperatures: list[float]) -> list[float]:
    survivals = survival(logits, temperatures)
    return [ece(survivals[:, k], accepted > k) for k in range(logits.shape[1])]


def test_survival_is_a_product_and_never_rises() -> None:
    # sigmoid(ln 3) = 3/4, sigmoid(0) = 1/2, sigmoid(-ln 4) = 1/5.
    found = survival([math.log(3), 0.0, -math.log(4)])
    assert found == pytest.approx([0.75, 0.375, 0.075])
    # Twice the logit at temperature 2.
    assert survival([2 * math.log(3)], [2.0]) == pytest.approx([0.75])
    wild = survival(np.random.default_rng(0).normal(0, 300, size=(100, 16)))
    assert np.isfinite(wild).all() and (np.diff(wild) <= 0).all()


def test_calibrated_logits_keep_their_temperature() -> None:
    logits, accepted = rounds(20_000, 6)
    temperatures = fit_sts(logits, accepted)
    assert all(0.75 < t < 1.35 for t in temperatures), temperatures
    assert max(errors(*rounds(20_000, 6, seed=1), temperatures)) < 0.015


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_known_overconfidence_is_found(factor: float) -> None:
    logits, accepted = rounds(20_000, 6)
    temperatures = fit_sts(factor * logits, accepted)
    assert temperatures == pytest.approx([factor] * 6, rel=0.3)
    assert temperatures[0] == pytest.approx(factor, rel=0.13)  # one step of the grid
    # On other rounds than those it was fitted on.
    logits, accepted = rounds(20_000, 6, seed=1)
    before = errors(factor * logits, accepted, [1.0] * 6)
    after = errors(factor * logits, accepted, temperatures)
    assert max(after) < 0.02 < min(before)


def test_earlier_slots_stay_as_they_were_fitted() -> None:
    logits, accepted = rounds(3_000, 4)
    logits[:, 0] *= 3
    whole = fit_sts(logits, accepted)
    assert fit_sts(logits[:, :2], np.minimum(accepted, 2)) == whole[:2]
    assert whole[0] == pytest.approx(3.0, rel=0.25)
    assert whole[1] < 1.6  # it does not make good for its neighbour


def test_the_chosen_temperature_is_the_grids_best() -> None:
    logits, accepted = rounds(500, 1, seed=4)
    grid = [10 ** (-1 + i / 20) for i in range(41)]
    found = fit_sts(logits, accepted)[0]
    best = min(ece(survival(logits / t)[:, 0], accepted >= 1) for t in grid)
    assert ece(survival(logits, [found])[:, 0], accepted >= 1) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("accepted", [0, 3])
@pytest.mark.parametrize("num", [1, 2, 100])
def test_nothing_to_tell_apart_gives_finite_temperatures(accepted: int, num: int) -> None:
    logits = np.random.default_rng(0).normal(size=(num, 3))
    temperatures = fit_sts(logits, np.full(num, accepted))
    assert all(0.1 <= t <= 10.001 for t in temperatures)
    assert np.isfinite(survival(logits, temperatures)).all()


def test_a_slot_that_says_nothing_keeps_temperature_1() -> None:
    # Logit 0 is one half at any temperature.
    assert fit_sts(np.zeros((50, 2)), np.arange(50) % 3) == pytest.approx([1.0, 1.0])


def test_what_cannot_be_fitted_is_refused() -> None:
    for logits, accepted, message in (
        ([[0.0, math.nan]], [1], "slot 2 is nan"),
        ([[math.inf]], [1], "slot 1 is inf"),
        ([[0.0]], [2], "whole numbers from 0 to 1"),
        ([[0.0]], [0.5], "whole numbers"),
        ([[0.0]], [0, 1], "expected \\[rounds, slots\\]"),
        (np.zeros((0, 3)), [], "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_sts(logits, accepted)


def test_calibration_error_by_hand() -> None:
    # Bin 0 of 15 (below 1/15): two rounds, mean .04, one of them happened: |.04 - .5| * 2.
    # Bin 14: predicted 1.0 and .95, both happened: |.975 - 1| * 2. Of four rounds.
    assert ece([0.02, 0.06, 1.0, 0.95], [1, 0, 1, 1]) == pytest.approx((0.92 + 0.05) / 4)
    bins = reliability([0.02, 0.06, 1.0, 0.95], [1, 0, 1, 1])
    assert bins.count == [2, *[0] * 13, 2]
    assert bins.predicted[0] == pytest.approx(0.04)
    assert (bins.observed[0], bins.observed[1], bins.observed[14]) == (0.5, None, 1.0)


def test_rank_statistic_by_hand() -> None:
    # Happened: .9, .4; not: .4, .1. Of four pairs .9 wins two, .4 wins one and ties one.
    assert auc([0.9, 0.4, 0.4, 0.1], [1, 1, 0, 0]) == pytest.approx(3.5 / 4)
    assert auc([1, 2, 3], [0, 0, 1]) == 1.0
    assert auc([3, 2, 1], [0, 0, 1]) == 0.0
    assert auc([5, 5, 5], [0, 1, 1]) == 0.5
    assert auc([1, 2], [1, 1]) is None
