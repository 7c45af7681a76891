"""What is drawn from, and that draws follow it."""

import random

import pytest
import torch

from spec.target.sampling import GREEDY, Sampling, choose, distribution, draw


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.7), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.8)],
    ids=["plain", "temperature", "top_k", "top_p"],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_k:
        probabilities[torch.tensor([2, 3])] = 0  # the two lowest of five
    if sampling.top_p < 1:
        # Descending: 0.563, 0.207, 0.126, ...: the mass before the third is 0.77, before the fourth
        # 0.90.
        probabilities[torch.tensor([2, 3])] = 0
    probabilities /= probabilities.sum()
    n = 20000
    draws = choose(logits.expand(n, -1), sampling, [random.Random(i) for i in range(n)])
    counts = torch.bincount(torch.tensor(draws), minlength=5).double()
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept].double() * n
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom at 0.1 %


def test_top_k_comes_before_top_p() -> None:
    # Before the third of 0.4, 0.3, 0.2, 0.1 lies 0.7; of the first three, renormalized, 7/9. So
    # top_p 0.75 keeps three of all four, but two of the three.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    cases = {
        (0, 1.0): [0.1, 0.4, 0.2, 0.3],
        (3, 1.0): [0, 4 / 9, 2 / 9, 3 / 9],
        (0, 0.8): [0, 4 / 9, 2 / 9, 3 / 9],
        (3, 0.75): [0, 4 / 7, 0, 3 / 7],
        (0, 0.75): [0, 4 / 9, 2 / 9, 3 / 9],
        (1, 0.5): [0, 1, 0, 0],
        (9, 1.0): [0.1, 0.4, 0.2, 0.3],
    }
    for (top_k, top_p), expected in cases.items():
        found = distribution(logits, Sampling(1.0, top_p, top_k))
        torch.testing.assert_close(
            found, torch.tensor([expected], dtype=torch.float32), msg=f"{top_k} {top_p}"
        )


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    sharp = torch.randn(1, 2000).round() * 4  # many equal logits
    flat = torch.zeros(1, 2000)  # its nucleus is wider than the few that are looked at first
    sampling = Sampling(1.0, top_p=0.9)
    alone = distribution(sharp, sampling)
    both = distribution(torch.cat([sharp, flat, sharp]), sampling)
    assert torch.equal(both[0], alone[0]) and torch.equal(both[2], alone[0])
    assert int((both[1] > 0).sum()) == 1800
    torch.testing.assert_close(both.sum(dim=-1), torch.ones(3))


def test_draws_never_land_on_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]])
    at = torch.tensor([0.0, 0.2499, 0.25, 0.999999, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights.expand(5, -1), at).tolist() == [1, 1, 3, 3, 3]


def test_temperature_0_takes_the_first_of_the_highest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])
    assert choose(logits, GREEDY, [random.Random(0)] * 2) == [1, 0]


@pytest.mark.parametrize(
    "values", [(-1.0, 1.0, 0), (float("nan"), 1.0, 0), (1.0, 0.0, 0), (1.0, 1.0, -1)]
)
def test_an_impossible_sampling_is_refused(values: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="expected temperature >= 0"):
        Sampling(*values)


@pytest.mark.parametrize(
    "sampling", [Sampling(1e-40), Sampling(1.0, top_p=1e-50), Sampling(1e-38, top_k=3)]
)
def test_extreme_options_are_the_argmax(sampling: Sampling) -> None:
    logits = 10 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    probs = distribution(logits, sampling)
    assert torch.equal(probs.argmax(1), logits.argmax(1))
    torch.testing.assert_close(probs.sum(1), torch.ones(4))
