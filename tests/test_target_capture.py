"""Captured features are the target's own hidden states, whatever else is captured beside them."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from spec.target.capture import Capture, capture, default_layer_ids
from spec.target.model import Target


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return Target.of(Qwen3ForCausalLM(config), None, name="random")


def sequences(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 100, (n,), generator=generator).tolist() for n in lengths]


def test_batch_of_four_lengths_equals_four_runs(target: Target) -> None:
    rows = sequences(5, 17, 33, 64)
    together = capture(target, rows, [1, 3])
    for row, features in zip(rows, together, strict=True):
        (alone,) = capture(target, [row], [1, 3])
        assert torch.equal(features.context, alone.context)
        assert torch.equal(features.last, alone.last)
        assert features.context.shape == (len(row), 2 * 48)


def test_two_calls_are_equal(target: Target) -> None:
    (row,) = sequences(40)
    first, second = (capture(target, [row], [0, 4])[0] for _ in range(2))
    assert torch.equal(first.context, second.context)


def test_features_equal_hidden_states(target: Target) -> None:
    (row,) = sequences(23)
    (features,) = capture(target, [row], [1, 3])
    with torch.no_grad():
        out = target.model(input_ids=torch.tensor([row]), output_hidden_states=True)
    states = out.hidden_states
    assert torch.equal(features.context, torch.cat([states[2], states[4]], dim=-1)[0])
    assert torch.equal(target.logits(features.last), out.logits[0])


def test_each_forward_pass_replaces_the_features(target: Target) -> None:
    first, second = (torch.tensor([row]) for row in sequences(8, 9))
    hooks = [module._forward_hooks for module in (target.layers[2], target.final_norm)]
    target.model(input_ids=first)  # transformers leaves hooks of its own at the first pass
    before = [list(of_module) for of_module in hooks]
    with torch.no_grad(), Capture(target, [2]) as captured:
        target.model(input_ids=first)
        kept = captured.context
        target.model(input_ids=second)
        assert captured.context.shape[1] == 9
        assert kept.shape[1] == 8
        assert [list(of_module) for of_module in hooks] != before
    assert [list(of_module) for of_module in hooks] == before


@pytest.mark.parametrize("ids", [[], [3, 1], [2, 2], [-1, 2], [1, 5], [6]])
def test_impossible_layer_ids(target: Target, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="expected strictly rising ids from 0 to 4"):
        Capture(target, ids)


def test_default_layer_ids() -> None:
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)  # the published ones of Qwen3-4B
    assert default_layer_ids(30, 4) == (1, 10, 18, 27)
    assert default_layer_ids(5, 2) == (1, 2)
    assert default_layer_ids(4, 1) == (1,)
    for layers in range(4, 80):
        for n in range(1, layers - 2):
            ids = default_layer_ids(layers, n)
            assert len(set(ids)) == n and list(ids) == sorted(ids)
            assert ids[0] >= 1 and ids[-1] <= layers - 3
    with pytest.raises(ValueError, match="expected 1 to 2"):
        default_layer_ids(5, 3)
