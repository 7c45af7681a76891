"""The prefix scheduler: worked numbers, brute force, order; the static threshold; cost tables."""

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spec.dspark.calibration import survival
from spec.dspark.schedule import CostTable, prefix, prefix_schedule, static_threshold

Floats = NDArray[np.float64]


def random_survival(seed: int, num_requests: int, num_slots: int) -> Floats:
    conditional = np.random.default_rng(seed).beta(3, 1, size=(num_requests, num_slots))
    return np.cumprod(conditional, axis=1, dtype=np.float64)


def brute_force(survivals: Floats, rate: CostTable) -> list[int]:
    """The rule of DESIGN section 5, word by word."""
    num_requests, num_slots = survivals.shape
    pairs = itertools.product(range(num_requests), range(num_slots))
    ranked = sorted(pairs, key=lambda rj: (-survivals[rj], rj[1], rj[0]))
    lengths, expected, size = [0] * num_requests, float(num_requests), num_requests
    best = expected * float(rate(np.array(size)))
    for r, j in ranked:
        expected, size = expected + survivals[r, j], size + 1
        throughput = expected * float(rate(np.array(size)))
        if throughput < best:
            break
        best = throughput
        assert lengths[r] == j
        lengths[r] = j + 1
    return lengths


def test_a_worked_example() -> None:
    # Two requests; a step of n tokens takes 4 + n. Admitting in the order .9 .8 .7 .3 .1 .05:
    # 2/6 = .333, 2.9/7 = .414, 3.7/8 = .4625, 4.4/9 = .489, 4.7/10 = .47 < .489: stop after three.
    survivals = np.array([[0.9, 0.7, 0.1], [0.8, 0.3, 0.05]])
    assert prefix_schedule(survivals, lambda n: 1 / (4 + n)).tolist() == [2, 1]


def test_it_stops_at_the_first_decrease_though_more_would_pay() -> None:
    # 1 * 1 = 1, 1.9 * .5 = .95, 2.7 * .5 = 1.35: the best budget is two, the rule stops at none.
    rates = np.array([np.nan, 1.0, 0.5, 0.5])
    assert prefix_schedule(np.array([[0.9, 0.8]]), lambda n: rates[n]).tolist() == [0]


def test_equal_survival_goes_to_the_earlier_slot_then_the_earlier_request() -> None:
    survivals = np.full((3, 2), 0.5)
    for budget, lengths in ((1, [1, 0, 0]), (3, [1, 1, 1]), (4, [2, 1, 1])):
        found = prefix_schedule(survivals, lambda n, most=3 + budget: np.where(n <= most, 1, 0.01))
        assert found.tolist() == lengths


def test_free_steps_admit_all_and_dear_ones_nothing() -> None:
    survivals = random_survival(0, 5, 7)
    assert prefix_schedule(survivals, lambda n: 100.0).tolist() == [7] * 5
    # Equal throughput is no decrease.
    assert prefix_schedule(np.zeros((2, 3)), lambda n: 100.0).tolist() == [3, 3]
    # Seconds grow with the square of the tokens: one more token costs more than it brings.
    assert prefix_schedule(survivals, lambda n: 1 / n**2).tolist() == [0] * 5


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_a_brute_force_in_any_order_of_requests(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_requests, num_slots = int(rng.integers(1, 9)), int(rng.integers(1, 8))
    survivals = random_survival(seed, num_requests, num_slots)
    seconds = np.cumsum(rng.uniform(0, 0.4, size=8)) + 3
    rate = CostTable((1, 2, 4, 8, 16, 24, 40, 64), tuple(1 / seconds))
    lengths = prefix_schedule(survivals, rate)
    assert lengths.tolist() == brute_force(survivals, rate)
    order = rng.permutation(num_requests)
    assert prefix_schedule(survivals[order], rate).tolist() == lengths[order].tolist()


def test_a_slot_is_admitted_whatever_comes_after_it() -> None:
    # Non-anticipating: raising or lowering later survivals never moves an earlier decision.
    survivals = random_survival(3, 4, 6)
    rate = lambda n: 1 / (6 + n)  # noqa: E731
    lengths = prefix_schedule(survivals, rate)
    r = int(np.argmax(lengths < 5))
    kept = int(lengths[r])
    for later in (0.0, float(survivals[r, kept])):
        changed = survivals.copy()
        changed[r, kept + 1 :] = later
        assert prefix_schedule(changed, rate).tolist() == lengths.tolist()


def test_rising_survival_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="only falls"):
        prefix_schedule(np.array([[0.5, 0.6]]), lambda n: 1.0)


def test_schedules_take_logits_and_give_lengths() -> None:
    # sigmoid(ln 3) = 3/4: prefixes survive with .75, .5625, .42.
    logits = torch.full((2, 3), math.log(3))
    logits[1] = -40
    assert static_threshold(0.5)(logits).tolist() == [2, 0]
    assert static_threshold(0.0)(logits).tolist() == [3, 3]
    assert static_threshold(1.0)(logits).tolist() == [0, 0]
    # ln 3 / 2 at slot 2: sqrt(3) / (1 + sqrt(3)) = .634; .75 * .634 = .475 falls below one half.
    assert static_threshold(0.5, [1, 2, 1])(logits).tolist() == [1, 0]
    lengths = prefix(lambda n: 1 / (4 + n))(logits)
    assert lengths.tolist() == [3, 0]
    assert (lengths.dtype, lengths.device) == (torch.int64, logits.device)
    # Temperature 0.1 makes sure of it: sigmoid(11) ~ 1.
    cold = prefix(lambda n: 1 / (1 + n), [1, 0.1, 0.1])(logits[:1])
    assert cold.tolist() == [3]


def test_no_number_means_nothing_is_verified() -> None:
    logits = torch.tensor([[5.0, math.nan, 5.0], [math.inf, 5.0, -math.inf]])
    assert static_threshold(0.1)(logits).tolist() == [1, 2]
    assert prefix(lambda n: 1 / (100 + n))(logits).tolist() == [1, 2]


def test_temperatures_of_another_drafter_and_bad_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 temperatures for 3 slots"):
        survival(np.zeros((1, 3)), [1, 1])
    with pytest.raises(ValueError, match="threshold is 1.5"):
        static_threshold(1.5)


def test_a_cost_table_runs_straight_in_seconds() -> None:
    table = CostTable((2, 4, 8), (10.0, 5.0, 2.5))  # 0.1, 0.2 and 0.4 seconds
    rates = table(np.array([1, 2, 3, 4, 6, 8, 10]))
    assert 1 / rates == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5])
    assert CostTable((4,), (2.0,))(np.array([1, 100])).tolist() == [2.0, 2.0]


def test_a_cost_table_survives_the_file_and_names_what_is_wrong() -> None:
    table = CostTable((1, 4), (9.5, 3.0))
    content = table.to_json()
    assert content == {
        "sample_batch_tokens": [1, 4],
        "sample_steps_per_sec": [9.5, 3.0],
        "max_batch_tokens": 4,
    }
    assert CostTable.from_json(content) == table
    for wrong, message in (
        ([], "found list"),
        ({"bias_seconds": 1.0}, "bias_seconds"),
        ({**content, "sample_batch_tokens": [4, 1]}, "strictly increasing"),
        ({**content, "sample_batch_tokens": [1]}, "as many of both"),
        ({**content, "sample_steps_per_sec": [0.0, 1.0]}, "positive"),
        ({**content, "sample_steps_per_sec": ["a", 1.0]}, "list of numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            CostTable.from_json(wrong)
