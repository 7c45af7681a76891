"""DSpark's streamed loss against the plain formulas, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spec.dflash.block import position_weights
from spec.dflash.loss import Head
from spec.dspark import loss as loss_module
from spec.dspark import tiles as tiles_module
from spec.dspark.loss import Plan, SlotTerms, TeacherRows, Terms, slot_terms

V, H, R = 33, 6, 4
SIZES = [3, 0, 1, 3, 2, 3]  # supervised slots of six blocks
# Blocks at ascending anchors, some of which share positions with the one before.
POSITIONS = [0, 1, 2, 2, 3, 4, 5, 8, 9, 9, 10, 11]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and several chunks even at toy sizes."""
    monkeypatch.setattr(tiles_module, "TILE", 7)
    monkeypatch.setattr(loss_module, "CHUNK", 5 * V)


def toy() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    unique, row_of_slot = torch.tensor(POSITIONS).unique(return_inverse=True)
    return {
        "hidden": randn(len(POSITIONS), H).requires_grad_(),
        "latent": randn(len(POSITIONS), R).requires_grad_(),
        "w2": randn(V, R).requires_grad_(),
        "weight": randn(V, H),
        "last": randn(len(unique), H),
        "row_of_slot": row_of_slot,
        "labels": torch.randint(0, V, (len(POSITIONS),), generator=g),
    }


def weigh_by_place(first: int, last: int, logprob: Tensor) -> Tensor:
    weights = position_weights(3, 2.0)
    return torch.cat([weights[:size] for size in SIZES[first:last]])


def streamed(t: dict[str, Tensor], head: Head, terms: Terms, *, markov: bool = True) -> SlotTerms:
    plan = Plan(
        head=head,
        labels=t["labels"],
        teacher=TeacherRows(t["last"], t["row_of_slot"]),
        terms=terms,
        sizes=SIZES,
        weigh=weigh_by_place,
    )
    latent, w2 = (t["latent"], t["w2"]) if markov else (None, None)
    return slot_terms(t["hidden"], latent, w2, plan)


def head_logits(hidden: Tensor, head: Head) -> Tensor:
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits


def plain(
    t: dict[str, Tensor], head: Head, terms: Terms, *, markov: bool = True
) -> tuple[Tensor, Tensor]:
    """The formulas of the module's docstring on whole rows: loss, and acceptance of each slot."""
    z = head_logits(t["hidden"], head)
    if markov:
        z = z + t["latent"] @ t["w2"].T
    y = head_logits(t["last"][t["row_of_slot"]], head)
    if head.log_share is not None:
        z, y = z + head.log_share, y + head.log_share
    p, q = z.softmax(1), y.softmax(1)
    ce = F.cross_entropy(z, q if terms.soft else t["labels"], reduction="none")
    l1 = (p - q).abs().sum(1)
    renyi = -2 * (p * q).sqrt().sum(1).log()
    slots = terms.ce * ce + terms.l1 * l1 + terms.renyi * renyi
    return (slots * weigh_by_place(0, len(SIZES), z)).sum(), 1 - l1.detach() / 2


L1 = Terms(ce=0.0, l1=1.0, renyi=0.0, soft=False)
PAPER = Terms(ce=0.1, l1=0.9, renyi=0.0, soft=False)


@pytest.mark.parametrize(
    "terms",
    [
        PAPER,
        Terms(ce=1.0, l1=0.0, renyi=0.0, soft=False),
        Terms(ce=1.0, l1=0.0, renyi=0.0, soft=True),
        L1,
        Terms(ce=0.0, l1=0.0, renyi=1.0, soft=False),
        Terms(ce=0.3, l1=0.5, renyi=0.7, soft=True),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.25},
        {"softcap": 3.0, "scale": 2.0},
        {"bias": torch.linspace(-2, 2, V)},
        {"log_share": torch.linspace(0, 3, V)},
    ],
)
@pytest.mark.parametrize("markov", [True, False])
def test_values_and_gradients(terms: Terms, options: dict[str, object], markov: bool) -> None:
    t = toy()
    head = Head(t["weight"], **options)  # type: ignore[arg-type]
    wanted = [t["hidden"], *([t["latent"], t["w2"]] if markov else [])]
    got = streamed(t, head, terms, markov=markov)
    grads = torch.autograd.grad(got.loss * 1.7, wanted)
    want, acceptance = plain(t, head, terms, markov=markov)
    want_grads = torch.autograd.grad(want * 1.7, wanted)
    torch.testing.assert_close(got.loss, want)
    torch.testing.assert_close(got.acceptance, acceptance)
    for grad, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-4)


def test_a_draft_equal_to_the_teacher_has_no_loss_but_the_labels() -> None:
    t = toy()
    t["hidden"] = t["last"][t["row_of_slot"]].clone().requires_grad_()
    head = Head(t["weight"])
    # L1 has no gradient at its minimum that rounding would not decide; Renyi's vanishes.
    assert streamed(t, head, L1, markov=False).loss.item() == pytest.approx(0, abs=1e-5)
    got = streamed(t, head, Terms(ce=0.0, l1=0.0, renyi=1.0, soft=False), markov=False)
    (grad,) = torch.autograd.grad(got.loss, t["hidden"])
    assert got.loss.item() == pytest.approx(0, abs=1e-5)
    assert grad.abs().max() < 1e-5
    torch.testing.assert_close(got.acceptance, torch.ones(len(POSITIONS)))


def test_each_position_meets_the_teacher_once(monkeypatch: pytest.MonkeyPatch) -> None:
    t, rows = toy(), list[int]()
    fill = tiles_module.Tiles.fill

    def counted(self: tiles_module.Tiles, first: int, hidden: Tensor, *args: object) -> object:
        if not args:  # the draft comes with its latents
            rows.append(len(hidden))
        return fill(self, first, hidden, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(tiles_module.Tiles, "fill", counted)
    streamed(t, Head(t["weight"]), PAPER)
    assert len(rows) > 1
    assert sum(rows) == len(t["last"])


def test_no_slot_no_loss() -> None:
    t = toy()
    plan = Plan(
        head=Head(t["weight"]),
        labels=torch.empty(0, dtype=torch.long),
        teacher=TeacherRows(t["last"][:0], torch.empty(0, dtype=torch.long)),
        terms=PAPER,
        sizes=[0, 0],
        weigh=weigh_by_place,
    )
    got = slot_terms(t["hidden"][:0], t["latent"][:0], t["w2"], plan)
    assert got.loss.item() == 0
    assert got.hit.shape == (0,)


def test_a_term_without_its_teacher_is_refused() -> None:
    t = toy()
    plan = Plan(Head(t["weight"]), t["labels"], None, PAPER, SIZES, weigh_by_place)
    with pytest.raises(ValueError, match="last hidden states"):
        slot_terms(t["hidden"], None, None, plan)
