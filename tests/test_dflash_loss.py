"""The streamed head loss against the plain formulas, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spec.dflash import loss as loss_module
from spec.dflash.block import position_weights
from spec.dflash.loss import Head, dpace_weights, expected_row, slot_loss
from spec.dflash.vocabulary import SampledHead


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and several row chunks even at toy sizes."""
    monkeypatch.setattr(loss_module, "TILE", 7)
    monkeypatch.setattr(loss_module, "ROWS", 4)


def toy(**head: object) -> tuple[Tensor, Head, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 6, generator=g, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(33, 6, generator=g)
    return hidden, Head(weight, **head), torch.randint(0, 33, (10,), generator=g)  # type: ignore[arg-type]


def plain_logits(hidden: Tensor, head: Head) -> Tensor:
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.25},
        {"softcap": 3.0},
        {"scale": 2.0, "softcap": 5.0},
        {"bias": torch.linspace(-2, 2, 33)},
    ],
)
def test_hard_labels_equal_cross_entropy(options: dict[str, object]) -> None:
    hidden, head, labels = toy(**options)
    mix = torch.linspace(0.1, 2.0, 10)
    got = slot_loss(hidden, head, labels)
    (grad,) = torch.autograd.grad((got.nll * mix).sum(), hidden)
    logits = plain_logits(hidden, head)
    want = F.cross_entropy(logits, labels, reduction="none")
    (want_grad,) = torch.autograd.grad((want * mix).sum(), hidden)
    torch.testing.assert_close(got.nll, want)
    torch.testing.assert_close(grad, want_grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.label_logprob, -want)
    assert torch.equal(got.hit, logits.argmax(1) == labels)


def test_expected_row_gives_the_soft_label_loss() -> None:
    hidden, head, labels = toy(scale=0.5)
    teacher_hidden = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    teacher = plain_logits(teacher_hidden, head).softmax(1)
    got = slot_loss(hidden, head, labels, expected_row(teacher_hidden, head))
    (grad,) = torch.autograd.grad(got.nll.sum(), hidden)
    want = -(teacher * plain_logits(hidden, head).log_softmax(1)).sum(1)
    (want_grad,) = torch.autograd.grad(want.sum(), hidden)
    torch.testing.assert_close(got.nll, want)
    torch.testing.assert_close(grad, want_grad, atol=1e-5, rtol=1e-4)


def test_soft_labels_need_a_plain_head() -> None:
    hidden, head, labels = toy(softcap=3.0)
    with pytest.raises(ValueError, match="loss.labels=hard"):
        slot_loss(hidden, head, labels, torch.zeros(10, 6))


def test_no_slots_give_no_loss_and_no_gradient() -> None:
    hidden, head, labels = toy()
    got = slot_loss(hidden[:0], head, labels[:0])
    (grad,) = torch.autograd.grad(got.nll.sum(), hidden, allow_unused=True)
    assert got.nll.shape == (0,)
    assert grad is None or not grad.any()


def test_large_logits_stay_finite() -> None:
    _, head, labels = toy()
    hidden = torch.full((10, 6), 300.0, requires_grad=True)
    got = slot_loss(hidden, head, labels)
    got.nll.sum().backward()
    assert got.nll.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_dpace_by_hand() -> None:
    q = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    supervised = torch.tensor([[True, True, True], [True, True, False]])
    # Survival 1/2, 1/4, 1/8: a slot's weight is what it and the later ones still bring.
    want = torch.tensor([[0.875, 0.375, 0.125], [0.75, 0.25, 0.0]])
    torch.testing.assert_close(dpace_weights(q, supervised, 0.0), want)
    # alpha = 1 forgets the confidence: every survival is 1.
    torch.testing.assert_close(dpace_weights(q, supervised, 1.0)[0], torch.tensor([3.0, 2.0, 1.0]))


def test_position_weights_decay() -> None:
    torch.testing.assert_close(position_weights(3, 2.0), torch.tensor([1.0, 0.6065307, 0.3678794]))
    assert torch.equal(position_weights(3, None), torch.ones(3))


def test_a_sampled_head_is_the_full_one_when_all_rows_are_drawn() -> None:
    hidden, head, labels = toy()
    sampled = SampledHead(head, labels.unique(), 33)
    got = slot_loss(hidden, sampled.draw(torch.Generator()), sampled.row_of_label[labels])
    torch.testing.assert_close(got.nll, slot_loss(hidden, head, labels).nll)


def test_a_sampled_heads_sum_is_right_on_average() -> None:
    """exp(nll) is the sum over the vocabulary, up to a factor that no draw changes."""
    hidden, head, labels = toy(scale=0.5)
    sampled = SampledHead(head, labels.unique(), 6)
    generator = torch.Generator().manual_seed(0)
    rows = sampled.row_of_label[labels]
    sums = [
        slot_loss(hidden, sampled.draw(generator), rows).nll.detach().exp() for _ in range(4000)
    ]
    torch.testing.assert_close(
        torch.stack(sums).mean(0), slot_loss(hidden, head, labels).nll.exp(), rtol=0.05, atol=0.0
    )


def test_a_sampled_head_keeps_every_label_and_draws_each_other_row_at_times() -> None:
    _, head, labels = toy()
    sampled = SampledHead(head, labels.unique(), 3)
    seen: set[float] = set()
    for seed in range(60):
        drawn = sampled.draw(torch.Generator().manual_seed(seed))
        assert torch.equal(drawn.weight[sampled.row_of_label[labels]], head.weight[labels])
        seen |= set(drawn.weight[:, 0].tolist())
    assert seen == set(head.weight[:, 0].tolist())
