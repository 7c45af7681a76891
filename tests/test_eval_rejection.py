"""What is emitted is distributed as the target's own, for any drafter and verification length.

The target is a table: what follows a token depends on it alone, so that the joint distribution of
neighbouring tokens is known. Shapes: B answers, K drafted tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from spec.eval import rejection
from spec.eval.rejection import keep_or_replace, residual
from spec.target.sampling import Sampling, distribution, draw

V, K, TOKENS = 8, 4, 4  # tokens of an answer that are looked at
SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.3": Sampling(0.3),
    "T=1.5": Sampling(1.5),
    "top-p": Sampling(1.0, top_p=0.8),
    "top-k": Sampling(1.0, top_k=3),
    "both": Sampling(1.5, top_p=0.8, top_k=5),
}

# Distribution of the drafter after a token [V, V] and whether it tells it or is a point mass.
Toy = tuple[Tensor, bool]


def target_table() -> Tensor:
    """Logits [V, V] of the token after each token."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(11)) * 1.5


def drafters(sampling: Sampling) -> dict[str, Toy]:
    """Good, bad and hostile ones, as p_d of the sampled kind or as point masses."""
    table = target_table()
    p = distribution(table, sampling)
    noise = torch.randn(V, V, generator=torch.Generator().manual_seed(12))
    blind = p.clone().scatter_(1, p.argmax(1, keepdim=True), 0.0)
    blind = (blind + 1e-3).scatter_(1, p.argmax(1, keepdim=True), 0.0)
    return {
        "the target itself": (p, True),
        "good": (distribution(table + 0.5 * noise, sampling), True),
        "bad": (distribution(noise, sampling), True),
        "untempered": (torch.softmax(table + noise, dim=-1), True),
        "zero where the target is large": (blind / blind.sum(1, keepdim=True), True),
        "sure of a wrong token": (one_hot(p.argmin(1)), True),
        "argmax": (one_hot(p.argmax(1)), False),
        "least likely": (one_hot(p.argmin(1)), False),
        "second": (one_hot(p.topk(2).indices[:, 1]), False),
    }


def one_hot(tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, V).float()


NAMES = tuple(drafters(Sampling(1.0)))


def answers(
    sampling: Sampling,
    drafter: Toy,
    lengths: list[int],
    count: int,
    *,
    shared_draws: bool = False,
    shorten: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[count, TOKENS] tokens after token 0; answer i verifies lengths[i % len(lengths)] a round.

    The last two are mistakes: judging with the draft's own draws, lengths by the drafted tokens.
    """
    draws = torch.Generator().manual_seed(5)
    p, (q, tells) = distribution(target_table(), sampling), drafter
    output = torch.zeros(count, TOKENS + K + 1, dtype=torch.long)  # the last round may go beyond
    done = torch.zeros(count, dtype=torch.long)
    num_drafted = torch.tensor(lengths).repeat(count)[:count]
    while bool((going := (done < TOKENS).nonzero()[:, 0]).numel()):
        B = len(going)
        before = output[going, (done[going] - 1).clamp_min(0)]
        chain = [torch.where(done[going] > 0, before, 0)]
        at = torch.rand(B, K + 1, generator=draws, dtype=torch.float64)
        for k in range(K):
            chain.append(draw(q[chain[-1]], at[:, k]))
        tokens = torch.stack(chain, dim=1)
        verified = num_drafted[going] if shorten is None else shorten(tokens[:, 1:])
        kept, last = keep_or_replace(
            p[tokens],
            tokens[:, 1:],
            verified,
            at if shared_draws else torch.rand(at.shape, generator=draws, dtype=at.dtype),
            draft_probs=q[tokens[:, :-1]] if tells else None,
        )
        assert bool((kept <= verified).all())
        new = torch.cat([tokens[:, 1:], last[:, None]], dim=1)
        new = new.scatter(1, kept[:, None], last[:, None])
        for i in range(K + 1):
            row = going[i <= kept]
            output[row, done[row] + i] = new[i <= kept, i]
        done[going] += kept + 1
    return output[:, :TOKENS]


def p_values(sampling: Sampling, found: Tensor) -> dict[str, float]:
    """Of each token alone and of each neighbouring pair, against the target's table."""
    p = distribution(target_table(), sampling).double()
    alone, result = p[0], {}
    for i in range(TOKENS):
        result[f"token {i}"] = chi_square(torch.bincount(found[:, i], minlength=V), alone)
        if i + 1 < TOKENS:
            pairs = torch.bincount(found[:, i] * V + found[:, i + 1], minlength=V * V)
            result[f"tokens {i}, {i + 1}"] = chi_square(pairs, (alone[:, None] * p).flatten())
        alone = alone @ p
    return result


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of counts under probabilities; cells that expect fewer than 5 are one cell."""
    expected = probabilities * counts.sum()
    if bool(counts[probabilities == 0].any()):
        return 0.0
    rare = expected < 5
    pooled = torch.stack([counts[rare].sum().double(), expected[rare].sum()])
    cells = torch.stack([counts[~rare].double(), expected[~rare]])
    if pooled[1] > 0:
        cells = torch.cat([cells, pooled[:, None]], dim=1)
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    freedom = torch.tensor((cells.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if freedom > 0 else 1.0


def smallest_p(sampling: Sampling, lengths: list[int], names: Iterable[str], count: int) -> float:
    """The smallest p-value over drafters, tokens and pairs, times how many there are."""
    toys = drafters(sampling)
    found = [
        (value, name, what)
        for name in names
        for what, value in p_values(sampling, answers(sampling, toys[name], lengths, count)).items()
    ]
    value, name, what = min(found)
    print(f"{name}, {what}: p = {value:.2g}, the smallest of {len(found)}")
    return value * len(found)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_output_is_distributed_as_the_target(sampling: Sampling) -> None:
    assert smallest_p(sampling, list(range(K + 1)), NAMES, 2500) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("lengths", [[K], list(range(K + 1))], ids=["all", "mixed"])
def test_100_000_tokens(sampling: Sampling, lengths: list[int]) -> None:
    assert smallest_p(sampling, lengths, NAMES, 25_000) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("length", range(K))
def test_100_000_tokens_at_every_verification_length(length: int) -> None:
    names = ["good", "zero where the target is large", "argmax", "least likely"]
    assert smallest_p(SAMPLINGS["both"], [length], names, 25_000) > 0.01


@pytest.mark.parametrize("name", ["bad", "zero where the target is large", "argmax", "second"])
def test_without_the_residual_the_test_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    assert smallest_p(Sampling(1.0), list(range(K + 1)), [name], 2500) < 1e-6


def test_with_draws_that_the_draft_was_made_of_the_test_fails() -> None:
    sampling = Sampling(1.0)
    output = answers(sampling, drafters(sampling)["good"], [K], 2500, shared_draws=True)
    assert min(p_values(sampling, output).values()) < 1e-6


def test_with_a_length_that_depends_on_the_token_itself_the_test_fails() -> None:
    def shortsighted(tokens: Tensor) -> Tensor:
        """Verify only drafts that begin with a token of the upper half."""
        return torch.where(tokens[:, 0] < V // 2, 0, K)

    sampling = Sampling(1.0)
    output = answers(sampling, drafters(sampling)["good"], [K], 2500, shorten=shortsighted)
    assert min(p_values(sampling, output).values()) < 1e-6


def test_a_length_that_depends_on_earlier_tokens_changes_nothing() -> None:
    def by_the_token_before(tokens: Tensor) -> Tensor:
        return torch.where(tokens[:, 0] < V // 2, 1, K)

    sampling = Sampling(1.0)
    output = answers(sampling, drafters(sampling)["good"], [K], 5000, shorten=by_the_token_before)
    assert min(p_values(sampling, output).values()) > 0.001


def test_worked_numbers() -> None:
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]]).expand(4, -1, -1)
    q = torch.tensor([[[0.25, 0.75, 0.0]]]).expand(4, -1, -1)
    tokens = torch.tensor([[0], [1], [1], [1]])
    # Token 0 stays always (0.5 / 0.25), token 1 with probability 0.3 / 0.75 = 0.4. In its place
    # come (p - q)+ = [0.25, 0, 0.2]: token 0 up to 0.556. After what stays: 0.1, 0.2, 1.
    draws = torch.tensor([[0.99, 0.15], [0.39, 0.3], [0.41, 0.55], [0.41, 0.56]]).double()
    kept, last = keep_or_replace(p, tokens, torch.ones(4).long(), draws, draft_probs=q)
    assert (kept.tolist(), last.tolist()) == ([1, 1, 0, 0], [1, 2, 0, 2])
    # As a point mass token 1 stays with probability 0.3; in its place come 0.5 : 0.2, up to 0.714.
    draws = torch.tensor([[0.49, 0.05], [0.29, 0.05], [0.31, 0.71], [0.31, 0.72]]).double()
    kept, last = keep_or_replace(p, tokens, torch.ones(4).long(), draws)
    assert (kept.tolist(), last.tolist()) == ([1, 1, 0, 0], [0, 0, 0, 2])


def test_unverified_tokens_are_not_judged() -> None:
    p = torch.full((2, 3, 4), 0.25)
    p[:, 1:] = float("nan")  # nobody looked there
    draws = torch.zeros(2, 3).double()
    draws[:, 0] = torch.tensor([0.6, 0.1])
    kept, last = keep_or_replace(p, torch.ones(2, 2).long(), torch.tensor([0, 0]), draws)
    assert (kept.tolist(), last.tolist()) == ([0, 0], [2, 0])


def test_where_drafter_and_target_are_equal_up_to_rounding_the_target_is_drawn_from() -> None:
    p = torch.tensor([[0.25, 0.75]])
    assert torch.equal(residual(p, p + 1e-7), p)
    assert residual(p, torch.tensor([[0.0, 1.0]])).tolist() == [[0.25, 0.0]]
