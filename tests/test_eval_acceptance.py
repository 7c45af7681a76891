"""The definitions of acceptance on numbers worked by hand."""

import itertools

import pytest

from spec.eval.acceptance import (
    Acceptance,
    Rounds,
    check_identity,
    leading_matches,
    measure,
    of_histogram,
)


def rounds(*accepted: int, drafted: int = 3) -> Rounds:
    return Rounds(accepted, [drafted] * len(accepted), sum(accepted) + len(accepted) + 1)


def test_only_leading_matches_count() -> None:
    assert leading_matches([1, 0, 1, 0]) == 1
    assert leading_matches([0, 1, 1]) == 0
    assert leading_matches([True, True]) == 2


def test_worked_numbers() -> None:
    """Rounds of 3, 2, 1, 0 kept of 3: survival 3/4, 2/4, 1/4; conditional 3/4, 2/3, 1/2."""
    result = measure([rounds(3, 2, 1, 0)], 3)
    assert result.num_rounds == 4
    assert result.num_drafted == 12
    assert result.num_accepted == 6
    assert result.acceptance_length == 2.5
    assert result.acceptance_rate == 0.5
    assert result.survival_at == [0.75, 0.5, 0.25]
    assert result.conditional_acceptance_at == [0.75, pytest.approx(2 / 3), 0.5]


def test_the_mean_does_not_depend_on_how_rounds_are_grouped() -> None:
    """Mean num_accepted of 3, 2, 1, 0 is 1.5 however they are split; means of means differ."""
    values = [3, 2, 1, 0]
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(1, 4), n) for n in range(4)
    ):
        edges = [0, *cuts, 4]
        split = [rounds(*values[a:b]) for a, b in itertools.pairwise(edges)]
        assert measure(split, 3).acceptance_length == 2.5
    # A mean of the two requests' means would say 1 + (3 + 1) / 2 = 3.
    assert measure([rounds(3), rounds(2, 1, 0)], 3).acceptance_length == 2.5


def test_positions_are_counted_over_rounds_that_drafted_them() -> None:
    """Drafts of 3, 1, 0 tokens: k = 1 over two rounds, k = 2 and 3 over one, k = 4 over none."""
    result = measure([Rounds([2, 1, 0], [3, 1, 0], 6)], 4)
    assert result.survival_at == [1.0, 1.0, 0.0, None]
    assert result.conditional_acceptance_at == [1.0, 1.0, 0.0, None]
    assert result.acceptance_length == 2.0
    assert result.acceptance_rate == 0.75


def test_every_draft_kept_gives_the_maximum() -> None:
    result = measure([rounds(7, 7, drafted=7), rounds(7, drafted=7)], 7)
    assert result.acceptance_length == 8
    assert result.acceptance_length_ci95 == (8, 8)


def test_nothing_counted_is_none_not_nan() -> None:
    for requests in ([], [Rounds([], [], 1)]):
        result = measure(requests, 2)
        assert result.acceptance_length is None
        assert result.acceptance_length_ci95 is None
        assert result.survival_at == [None, None]


def test_the_interval_resamples_requests_and_repeats() -> None:
    """Two kinds of request, all rounds alike within one: rounds drawn singly would look certain."""
    requests = [rounds(*[3] * 50)] * 5 + [rounds(*[0] * 50)] * 5
    first, second = measure(requests, 3), measure(requests, 3)
    assert first == second
    assert first.acceptance_length_ci95 is not None
    low, high = first.acceptance_length_ci95
    assert low < 1.7 < 2.5 < 3.3 < high


def test_the_identity_is_checked() -> None:
    good = measure([rounds(3, 2, 1, 0)], 3)
    check_identity(good, 3)
    broken = Acceptance(**{**good.to_json(), "acceptance_length": 2.6})
    with pytest.raises(AssertionError, match="sum of survival"):
        check_identity(broken, 3)


@pytest.mark.parametrize(
    "bad",
    [Rounds([2], [1], 3), Rounds([1], [4], 3), Rounds([1, 0], [3], 3), Rounds([-1], [3], 1)],
)
def test_impossible_rounds_are_refused(bad: Rounds) -> None:
    with pytest.raises(ValueError, match="request 0: accepted"):
        measure([bad], 3)


def test_a_histogram_gives_the_figures_of_its_rounds() -> None:
    """3, 2, 1, 0 accepted: mean 1.5; an engine counts them as one round each."""
    length, survival = of_histogram([1, 1, 1, 1])
    assert length == 2.5 and survival == [3 / 4, 2 / 4, 1 / 4]
    measured = measure([Rounds([3, 2, 1, 0], [3] * 4, 10)], 3)
    assert (length, survival) == (measured.acceptance_length, measured.survival_at)
    assert of_histogram([0, 0]) == (1.0, [0.0])
    assert of_histogram([4]) == (1.0, [])
