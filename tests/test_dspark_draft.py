"""DSpark drafters: heads against their formulas, decoding against training, files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_drafter import dflash_config, dspark_config

from spec.dflash.draft import DFlashDraft
from spec.dflash.loss import Head
from spec.dflash.objective import PackedSequence
from spec.dflash.vocabulary import SampledHead
from spec.dspark.config import DSparkConfig
from spec.dspark.draft import DSparkDraft
from spec.dspark.heads import GatedMarkovHead, RNNHead
from spec.dspark.loss import Terms
from spec.dspark.objective import DSparkLossOptions, sequence_loss
from spec.recipes.algorithms import algorithm_of, load_draft

KINDS = ["vanilla", "gated", "rnn"]
NO_MARKOV = {"markov_rank": 0, "confidence_head_with_markov": False}
HEADS: list[dict[str, Any]] = [
    *({"markov_head_type": kind} for kind in KINDS),
    {"confidence_head_with_markov": False},
    {"enable_confidence_head": False, "confidence_head_with_markov": False},
    NO_MARKOV,
    {**NO_MARKOV, "enable_confidence_head": False},
]


def make(seed: int = 0, **changes: Any) -> DSparkDraft:
    torch.manual_seed(seed)
    return DSparkDraft(dspark_config(**changes)).eval()


def embedding_and_head() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(64, 32, generator=g), torch.randn(64, 32, generator=g)


def test_every_slot_drafts_a_token() -> None:
    assert dspark_config().num_draft_tokens == 4
    assert dspark_config().first_slot == 0
    assert (dflash_config().num_draft_tokens, dflash_config().first_slot) == (3, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_latents_follow_the_formulas_slot_by_slot(kind: str) -> None:
    head = make(markov_head_type=kind).markov_head
    assert head is not None
    e, h = torch.randn(2, 4, 8), torch.randn(2, 4, 32)
    state = torch.zeros(2, 8)
    rows: list[Tensor] = []
    for k in range(4):
        if kind == "vanilla":
            u = e[:, k]
        elif kind == "gated":
            assert isinstance(head, GatedMarkovHead)
            gate = torch.cat([h[:, k], e[:, k]], 1) @ head.gate_proj.weight.T + head.gate_proj.bias
            u = torch.sigmoid(gate) * e[:, k]
        else:
            assert isinstance(head, RNNHead)
            z = torch.cat([state, e[:, k], h[:, k]], 1)
            g, c, o = (z @ head.joint_proj.weight.T + head.joint_proj.bias).split(8, dim=1)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            u = torch.tanh(o)
        rows.append(u)
    torch.testing.assert_close(head.latents(e, h), torch.stack(rows, 1))
    state, steps = head.start(h[:, 0]), list[Tensor]()
    for k in range(4):
        u, state = head.step(e[:, k], h[:, k], state)
        steps.append(u)
    torch.testing.assert_close(torch.stack(steps, 1), torch.stack(rows, 1))


@pytest.mark.parametrize("heads", HEADS)
def test_training_sees_the_logits_that_decoding_draws_from(heads: dict[str, Any]) -> None:
    """Drafts fed back as labels are all hits, and their confidence is the one trained."""
    draft, (embedding, weight) = make(**heads), embedding_and_head()
    features, ids = torch.randn(12, 64), torch.randint(0, 60, (12,))
    cache = draft.new_cache(1, 12)
    slot = torch.tensor([0])
    draft.extend(cache, slot, features[None, :7], torch.tensor([7]))
    proposal = draft.propose(
        cache, slot, ids[7:8], embedding=embedding, head=lambda h: F.linear(h, weight)
    )
    assert (proposal.confidence is None) == (draft.confidence_head is None)
    ids[8:12] = proposal.tokens[0]
    sequence = PackedSequence(
        input_ids=ids,
        loss_mask=torch.ones(12),
        starts=torch.zeros(12, dtype=torch.long),
        ends=torch.full((12,), 12),
        features=features,
        teacher=torch.randn(12, 32),
    )
    terms = Terms(ce=1.0, l1=0.0, renyi=0.0, soft=False)
    options = DSparkLossOptions("decay", None, 0.5, terms, confidence=1.0)
    anchors = torch.tensor([7])
    out = sequence_loss(
        draft, sequence, anchors=anchors, embedding=embedding, head=Head(weight), options=options
    )
    assert out.num_slots == 4
    assert out.num_accepted == 4


def test_a_chosen_token_conditions_the_next_slot() -> None:
    draft, (embedding, weight) = make(), embedding_and_head()
    cache, slot = draft.new_cache(1, 8), torch.tensor([0])
    draft.extend(cache, slot, torch.randn(1, 5, 64), torch.tensor([5]))
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def propose(first: int) -> Tensor:
        def choose(k: int, logits: Tensor) -> tuple[Tensor, Tensor]:
            if k in seen:
                seen[k].append(logits)
            token = torch.tensor([first]) if k == 0 else logits.argmax(-1)
            return token, logits.softmax(-1)

        proposal = draft.propose(
            cache,
            slot,
            torch.tensor([3]),
            embedding=embedding,
            head=lambda h: F.linear(h, weight),
            choose=choose,
        )
        assert proposal.probs is not None and proposal.probs.shape == (1, 4, 64)
        assert proposal.tokens[0, 0] == first
        return proposal.tokens

    for first in (5, 9):
        propose(first)
    w1, w2 = draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight  # type: ignore[union-attr]
    assert torch.equal(seen[0][0], seen[0][1])
    change = (w2 @ (w1[9] - w1[5])).detach()
    torch.testing.assert_close(seen[1][1] - seen[1][0], change[None], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("drawn", [31, 5])
def test_a_sampled_head_takes_the_same_rows_of_the_markov_head(drawn: int) -> None:
    """With all other rows drawn the loss is the full one; with some, near it, gradients too."""
    draft, (embedding, weight) = make(), embedding_and_head()
    sequence = PackedSequence(
        input_ids=torch.arange(12) + 20,
        loss_mask=torch.ones(12),
        starts=torch.zeros(12, dtype=torch.long),
        ends=torch.full((12,), 12),
        features=torch.randn(12, 64),
        teacher=torch.randn(12, 32),
    )
    options = DSparkLossOptions("dpace", None, 0.5, Terms(0.1, 0.9, 0.0, soft=False), 1.0)
    sampled = SampledHead(Head(weight), torch.arange(33), drawn)
    grads: list[Tensor] = []
    for head, rows in (
        (Head(weight), None),
        (sampled.draw(torch.Generator().manual_seed(0)), sampled.row_of_label),
    ):
        draft.zero_grad()
        out = sequence_loss(
            draft,
            sequence,
            anchors=torch.tensor([2, 3, 7]),
            embedding=embedding,
            head=head,
            options=options,
            row_of_label=rows,
        )
        out.loss.backward()
        assert draft.markov_head is not None
        grad = draft.markov_head.markov_w2.weight.grad
        assert grad is not None
        grads.append(grad.to_dense())
    if drawn == 31:
        torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=1e-4)
    else:
        assert int(grads[1].any(1).sum()) == 33 + drawn  # only the rows in the head


@pytest.mark.parametrize("heads", HEADS)
def test_saved_and_loaded_is_the_same_drafter(heads: dict[str, Any], tmp_path: Path) -> None:
    draft = make(**heads)
    draft.save(tmp_path)
    again = load_draft(tmp_path)
    assert isinstance(again, DSparkDraft)
    assert again.config == draft.config
    for name, value in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_the_file_has_the_engines_names(tmp_path: Path) -> None:
    make(markov_head_type="rnn").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert "dflash_config" not in config
    assert (config["block_size"], config["markov_rank"]) == (4, 8)
    assert config["markov_head_type"] == "rnn"
    assert (config["target_layer_ids"], config["mask_token_id"]) == ([1, 3], 63)
    shapes = {
        name: list(value.shape)
        for name, value in load_file(tmp_path / "model.safetensors").items()
        if "head" in name
    }
    assert shapes == {
        "markov_head.markov_w1.weight": [64, 8],
        "markov_head.markov_w2.weight": [64, 8],
        "markov_head.joint_proj.weight": [24, 48],
        "markov_head.joint_proj.bias": [24],
        "confidence_head.proj.weight": [1, 40],
        "confidence_head.proj.bias": [1],
    }


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": None}, "lacks markov_head_type"),
        ({"markov_rank": None}, "lacks markov_rank"),
        ({"confidence_head_with_markov": None}, "lacks confidence_head_with_markov"),
        ({"enable_confidence_head": None}, "lacks enable_confidence_head"),
        ({"markov_head_type": "gru"}, "expected one of vanilla, gated, rnn"),
        ({"markov_rank": 1024}, "from 0 to 512"),
        ({"markov_rank": "8"}, "whole number"),
        ({"markov_rank": 0}, "needs a Markov embedding"),
        ({"markov_head_type": "gated"}, r"missing \['markov_head.gate_proj.bias'"),
        ({"sample_from_anchor": False}, "anchor slot"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"architectures": ["DFlashDraftModel"]}, "read it as DSpark"),
        ({"target_layer_ids": [-1, 3]}, "must rise strictly within 0..4"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make().save(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path)


def test_a_dflash_directory_is_told_from_a_dspark_one(tmp_path: Path) -> None:
    DFlashDraft(dflash_config()).save(tmp_path / "dflash")
    make().save(tmp_path / "dspark")
    assert algorithm_of(tmp_path / "dflash") == "dflash"
    assert algorithm_of(tmp_path / "dspark") == "dspark"
    with pytest.raises(ValueError, match="architectures"):
        DSparkDraft.load(tmp_path / "dflash")


@pytest.mark.parametrize("rank", [8, 0])
def test_deepspecs_layout(rank: int, tmp_path: Path) -> None:
    """Its files carry the target's embedding and head; its "dflash" is DSpark with rank 0."""
    heads = {} if rank else {**NO_MARKOV, "enable_confidence_head": False}
    draft = make(**heads)
    draft.save(tmp_path)
    changes: dict[str, Any] = {"num_anchors": 512, "is_causal": None, "input_embedding_scale": None}
    if not rank:
        changes |= {"markov_head_type": None, "confidence_head_with_markov": None}
    edit(tmp_path, **changes)
    embedding, weight = embedding_and_head()
    tensors = load_file(tmp_path / "model.safetensors")
    carried = {"embed_tokens.weight": embedding, "lm_head.weight": weight}
    save_file({**tensors, **carried}, tmp_path / "model.safetensors")
    again = load_draft(tmp_path)
    assert isinstance(again.config, DSparkConfig)
    assert again.config.markov_rank == rank
    assert again.config.num_draft_tokens == 4
    assert again.carried.keys() == carried.keys()
    for name, value in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_alike_tokens_start_with_alike_markov_embeddings() -> None:
    head = make(markov_rank=16).markov_head
    assert head is not None
    g = torch.Generator().manual_seed(3)
    embedding = torch.randn(64, 16, generator=g)
    embedding[7] = embedding[9] + 0.01 * torch.randn(16, generator=g)
    head.describe_tokens(embedding)
    w1 = head.markov_w1.weight.detach()
    torch.testing.assert_close(w1.std(0), torch.ones(16))
    distances = (w1 - w1[9]).norm(dim=1)
    assert distances.argsort()[1] == 7
    assert distances[7] < 0.1 * distances.median()


def test_a_rank_above_the_embeddings_width_keeps_random_columns() -> None:
    head = make(markov_rank=40).markov_head
    assert head is not None
    before = head.markov_w1.weight.detach().clone()
    head.describe_tokens(torch.randn(64, 32))
    assert torch.equal(head.markov_w1.weight[:, 32:], before[:, 32:])
    assert not torch.equal(head.markov_w1.weight[:, :32], before[:, :32])
