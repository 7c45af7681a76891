"""The probe's variants: each is a drafter that loads and drafts as many tokens, with one change."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_drafter import HEADS, SHAPE
from toy_run import write_target

from spec.dflash.config import DFlashConfig
from spec.dflash.draft import DFlashDraft
from spec.dflash.fp8 import Quantization
from spec.dspark.config import DSparkConfig
from spec.dspark.draft import DSparkDraft
from spec.export.fp8 import quantize_draft
from spec.export.probe import Measured, Probe, probe, variants
from spec.recipes.algorithms import load_draft
from spec.target.model import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(write_target(tmp_path_factory.mktemp("target") / "t"))


def fitting(target: Target) -> dict[str, object]:
    """The toy shape for this target."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    ids = {"num_target_layers": target.num_layers, "target_layer_ids": (1, 2)}
    return {**SHAPE, **sizes, **ids, "mask_token_id": target.vocab_size - 1}


def drafters(target: Target) -> list[DFlashDraft]:
    torch.manual_seed(0)
    shape = fitting(target)
    made: list[DFlashDraft] = [DFlashDraft(DFlashConfig(**shape))]  # pyright: ignore[reportArgumentType]
    for kind in ("vanilla", "gated", "rnn"):
        heads = {**HEADS, "markov_head_type": kind}
        made.append(DSparkDraft(DSparkConfig(**shape, **heads)))  # pyright: ignore[reportArgumentType]
    for draft in made:
        for weight in draft.parameters():
            torch.nn.init.normal_(weight, std=0.1)  # a head starts at zero, as if left out
        draft.eval()
    return made


def test_each_variant_changes_one_thing_and_drafts_as_many(target: Target) -> None:
    for draft in drafters(target):
        found = variants(draft, target)
        assert len({each.what for each in found}) == len(found) >= 10
        for each in found:
            made = each.make()
            assert made.config.num_draft_tokens == draft.config.num_draft_tokens
            same_config = made.config == draft.config
            state, own = made.state_dict(), draft.state_dict()
            same_weights = all(torch.equal(state[name], own[name]) for name in state)
            assert same_config != same_weights, each.what


def test_layers_move_within_what_can_be_captured(target: Target) -> None:
    """Five layers: the last that can be captured is 3."""
    draft = drafters(target)[0]
    moved = [
        v.make().config.target_layer_ids for v in variants(draft, target) if "layer_ids" in v.what
    ]
    assert moved == [(0, 1), (2, 3)]


def test_the_other_algorithms_slots_keep_the_weights(target: Target) -> None:
    dflash, dspark, *_ = drafters(target)
    later = next(v for v in variants(dflash, target) if v.what.startswith("slots")).make()
    earlier = next(v for v in variants(dspark, target) if v.what.startswith("slots")).make()
    assert isinstance(later, DSparkDraft) and later.config.block_size == 3
    assert not isinstance(earlier, DSparkDraft) and earlier.config.block_size == 5


def test_an_fp8_drafter_is_probed_too(target: Target, tmp_path: Path) -> None:
    drafters(target)[0].save(tmp_path / "d")
    quantize_draft(tmp_path / "d", tmp_path / "q", Quantization("channel"), name="d", gate=None)
    draft = load_draft(tmp_path / "q")
    found = probe(draft, target, [[40, 41, 42]], max_new_tokens=4)
    assert len(found.variants) == len(variants(draft, target))
    for each in variants(draft, target):
        kinds = {n: v.dtype for n, v in each.make().state_dict().items()}
        own = {n: v.dtype for n, v in draft.state_dict().items()}
        assert kinds == {n: own[n] for n in kinds}, each.what


def test_only_what_is_clearly_better_counts() -> None:
    """At 2.0 a variant needs 0.15 more, at 5.0 six per cent: 0.3."""

    def better(own: float, *others: float) -> list[float]:
        measured = [Measured(str(x), "", "", x) for x in others]
        return [each.acceptance_length for each in Probe(own, measured).better]

    assert better(2.0, 2.14, 2.16, 1.0, 2.5) == [2.5, 2.16]
    assert better(5.0, 5.29, 5.31) == [5.31]


def test_a_mask_that_is_suggested_already_is_no_variant(target: Target) -> None:
    draft = drafters(target)[0]
    suggested = [v.make().config.mask_token_id for v in variants(draft, target) if "mask" in v.what]
    assert len(suggested) == 1
    config = replace(draft.config, mask_token_id=suggested[0])
    right = DFlashDraft(config)
    right.load_state_dict(draft.state_dict())
    assert not [v for v in variants(right, target) if "mask" in v.what]
