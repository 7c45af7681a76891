"""FP8 projections: worked numbers, edge values, config.json, a drafter that computes with them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_drafter import dflash_config, dspark_config, edit

from spec.dflash.config import DFlashConfig
from spec.dflash.draft import DFlashDraft
from spec.dflash.fp8 import (
    E4M3,
    FP8Linear,
    Part,
    Quantization,
    Scheme,
    dequantize,
    quantize_weight,
    round_activations,
)
from spec.dspark.draft import DSparkDraft

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
KEPT: list[tuple[Part, ...]] = [(), ("qkv",), ("qkv", "o"), ("gate_up", "down")]


def quantized(draft: DFlashDraft, quantization: Quantization) -> DFlashDraft:
    """The FP8 drafter of a draft, made here and not by what is tested elsewhere."""
    config = replace(draft.config, quantization=quantization)
    made = type(draft)(config)
    state = {}
    for name, value in draft.state_dict().items():
        words = name.split(".")
        if words[0] == "layers" and "proj" in words[-2] and quantization.covers(words[-2]):
            weight, scale = quantize_weight(value, quantization.scheme)
            state[name], state[f"{name[: -len('weight')]}{quantization.scale_name}"] = weight, scale
        else:
            state[name] = value
    made.load_state_dict(state, assign=True)
    return made.eval()


def toy(config: DFlashConfig, seed: int = 0) -> DFlashDraft:
    torch.manual_seed(seed)
    draft = (DSparkDraft if hasattr(config, "markov_rank") else DFlashDraft)(config)  # pyright: ignore[reportArgumentType]
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return draft.eval()


def test_channel_by_hand() -> None:
    # 448 / 224 = 2: the row is doubled. 3.3 * 2 = 6.6, between 6.5 and 7 of e4m3.
    weight, scale = quantize_weight(torch.tensor([[224.0, 3.3], [-0.875, 0.0]]), "channel")
    assert scale.tolist() == [[0.5], [0.875 / 448]]
    assert weight.float().tolist() == [[448.0, 6.5], [-448.0, 0.0]]
    assert dequantize(weight, scale).tolist() == [[224.0, 3.25], [-0.875, 0.0]]


def test_blocks_by_hand() -> None:
    full = torch.ones(129, 130)
    full[128:, 128:] = 28.0
    weight, scale = quantize_weight(full, "block")
    assert scale.shape == (2, 2) and scale.dtype == torch.float32
    assert torch.equal(scale * 448, torch.tensor([[1.0, 1.0], [1.0, 28.0]]))
    assert torch.equal(dequantize(weight, scale), full)


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize("shape", [(4, 16), (1, 40), (7, 1), (3, 13), (130, 300), (1, 300)])
def test_edge_values_stay_finite(scheme: Scheme, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    full = torch.randn(shape)
    full[0] = 0
    full[-1, 0] = 1e-12
    full[shape[0] // 2, -1] = 6e4
    weight, scale = quantize_weight(full, scheme)
    back = dequantize(weight, scale)
    assert scale.dtype == torch.float32 and weight.dtype == E4M3 and weight.shape == shape
    assert back.isfinite().all() and scale.isfinite().all() and (scale > 0).all()
    assert (back[full == 0] == 0).all()
    # Three bits of mantissa: a sixteenth, but for what is small beside the largest of its group.
    spread = full.abs().amax() if scheme == "block" else full.abs().amax(1, keepdim=True)
    assert ((back - full).abs() <= full.abs() / 16 + spread / 448 / 512).all()


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_zeros_and_tiny_values_alone(scheme: Scheme) -> None:
    for value in (0.0, 1e-12, 1e-40, 6e4):
        full = torch.full((2, 16), value)
        weight, scale = quantize_weight(full, scheme)
        torch.testing.assert_close(dequantize(weight, scale), full, rtol=1e-6, atol=1e-38)
        # Neither 0 nor a number that kernels flush to 0.
        assert (scale >= torch.finfo(torch.float32).tiny).all()
        assert value or (scale == 1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_weight(torch.tensor([[1.0, value]]), "channel")


def test_activations_by_token_and_by_group() -> None:
    x = torch.tensor([[448.0, 3.3], [0.0, 0.0], [1e-30, 2e-30]])
    by_token = round_activations(x, 2)
    assert by_token.tolist()[:2] == [[448.0, 3.25], [0.0, 0.0]]
    # Below 1e-12 the scale no longer follows: what is left rounds to zero.
    assert by_token.tolist()[2] == [0.0, 0.0]
    assert round_activations(x, 1)[0].tolist() == pytest.approx([448.0, 3.3])


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_the_linear_is_the_written_arithmetic(scheme: Scheme) -> None:
    torch.manual_seed(1)
    layer = FP8Linear(256, 384, Quantization(scheme))
    weight, scale = quantize_weight(torch.randn(384, 256), scheme)
    layer.load_state_dict({"weight": weight, Quantization(scheme).scale_name: scale}, assign=True)
    x = torch.randn(5, 256)
    group = 256 if scheme == "channel" else 128
    grouped = x.view(5, -1, group)
    s = grouped.abs().amax(-1, keepdim=True) / 448
    rounded = ((grouped / s).to(E4M3).float() * s).view(5, 256)
    wide = scale if scheme == "channel" else scale.repeat_interleave(128, 0)
    wide = wide if scheme == "channel" else wide.repeat_interleave(128, 1)
    assert torch.equal(layer(x), rounded @ (weight.float() * wide).t())
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    # The activations are rounded, too: without that it would be another number.
    assert not torch.equal(layer(x), x @ (weight.float() * wide).t())


def test_a_cast_leaves_weights_and_scales_alone() -> None:
    layer = FP8Linear(16, 8, Quantization("channel"))
    layer(torch.ones(1, 16))
    cast = torch.nn.Sequential(layer).to(torch.bfloat16)[0]
    assert (cast.weight.dtype, cast.weight_scale.dtype) == (E4M3, torch.float32)
    assert cast.dense is None  # moved with it, or made anew


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize("kept", KEPT)
def test_config_round_trip(scheme: Scheme, kept: tuple[Part, ...]) -> None:
    config = dflash_config(**WIDE, quantization=Quantization(scheme, kept))
    data = json.loads(json.dumps(config.to_json("bfloat16")))
    assert DFlashConfig.from_json(data) == config


def test_the_layout_that_engines_load() -> None:
    channel, block = (Quantization(s).to_json() for s in ("channel", "block"))
    group = channel["config_groups"]["group_0"]
    assert (channel["quant_method"], channel["format"]) == ("compressed-tensors", "float-quantized")
    assert group["targets"] == ["Linear"]
    assert (group["weights"]["strategy"], group["weights"]["dynamic"]) == ("channel", False)
    activations = group["input_activations"]
    assert (activations["strategy"], activations["dynamic"]) == ("token", True)
    assert (
        block.items()
        >= {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }.items()
    )


def test_names_with_a_path_leave_nothing_out() -> None:
    """SGLang knows a projection by its bare name only."""
    data = Quantization("channel").to_json()
    for pattern, kept in (
        ("layers.0.self_attn.q_proj", ()),
        ("re:layers.*qkv_proj", ()),
        ("qkv_proj", ("qkv",)),
        ("re:.*_proj", ("qkv", "o", "gate_up", "down")),
    ):
        found = Quantization.from_json({**data, "ignore": [pattern]}, "config.json")
        assert found is not None and found.kept == kept, pattern
    block = {**Quantization("block").to_json(), "modules_to_not_convert": ["model.o_proj"]}
    assert Quantization.from_json(block, "config.json") == Quantization("block", ("o",))


@pytest.mark.parametrize(
    "changes",
    [
        {"quant_method": "awq"},
        {"format": "pack-quantized"},
        {"config_groups": {}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}},
    ],
)
def test_other_quantizations_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the weights are quantized .* in another way"):
        Quantization.from_json({**Quantization("channel").to_json(), **changes}, "config.json")


def test_blocks_need_multiples_of_128() -> None:
    with pytest.raises(ValueError, match=r"hidden_size is 32, .*use the scheme channel"):
        dflash_config(quantization=Quantization("block"))
    wide = {**WIDE, "num_key_value_heads": 1}
    with pytest.raises(ValueError, match="the key-value heads' width is 64"):
        dflash_config(**wide, quantization=Quantization("block"))
    assert dflash_config(**wide, quantization=Quantization("block", ("qkv",)))


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize("make", [dflash_config, dspark_config])
def test_a_saved_drafter_loads_and_computes_the_same(
    tmp_path: Path, scheme: Scheme, make: Callable[..., DFlashConfig]
) -> None:
    draft = quantized(toy(make(**WIDE)), Quantization(scheme, ("qkv",)))
    draft.save(tmp_path, dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    assert {v.dtype for v in stored.values()} == {torch.float32, E4M3}
    assert stored["layers.0.self_attn.q_proj.weight"].dtype == torch.float32
    loaded = type(draft).load(tmp_path, dtype=torch.bfloat16)
    assert loaded.layers[0].mlp.up_proj.weight.dtype == E4M3
    assert loaded.dtype == torch.bfloat16
    loaded = type(draft).load(tmp_path)
    assert torch.equal(hidden(loaded), hidden(draft))


def hidden(draft: DFlashDraft) -> torch.Tensor:
    """Hidden states of one block after four positions of context."""
    generator = torch.Generator().manual_seed(3)
    c = draft.config
    cache, slots = draft.new_cache(1, 16), torch.tensor([0])
    features = torch.randn(1, 4, c.num_features, generator=generator)
    draft.extend(cache, slots, features, torch.tensor([4]))
    return draft.hidden(
        cache, slots, torch.randn(1, c.block_size, c.hidden_size, generator=generator)
    )


def test_context_keys_and_values_are_computed_in_fp8_too() -> None:
    """SGLang slices the joined projection only where it is not quantized."""
    draft = toy(dflash_config(**WIDE))
    caches = []
    for each in (draft, quantized(draft, Quantization("channel", ("o", "gate_up", "down")))):
        cache = each.new_cache(1, 16)
        features = torch.randn(1, 4, 256, generator=torch.Generator().manual_seed(3))
        each.extend(cache, torch.tensor([0]), features, torch.tensor([4]))
        caches.append(cache.keys.clone())
    difference = (caches[0] - caches[1]).abs().max() / caches[0].abs().max()
    assert 1e-4 < difference < 0.1


BROKEN: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scale": (lambda t: t.pop("layers.0.mlp.up_proj.weight_scale"), "missing .*up_proj"),
    "scale of another shape": (
        lambda t: t.update({"layers.0.mlp.up_proj.weight_scale": torch.ones(1)}),
        "up_proj.weight_scale is .1., the config says",
    ),
    "scale of another type": (
        lambda t: t.update(
            {"layers.0.mlp.up_proj.weight_scale": torch.ones(256, 1, dtype=torch.bfloat16)}
        ),
        "is torch.bfloat16",
    ),
    "scale 0": (lambda t: t["layers.0.mlp.up_proj.weight_scale"].zero_(), "at least 0, expected"),
    "scale NaN": (
        lambda t: t["layers.0.mlp.up_proj.weight_scale"].fill_(torch.nan),
        "holds NaN or infinity",
    ),
    "weight NaN": (
        lambda t: t.update(
            {"layers.0.mlp.up_proj.weight": torch.full((256, 128), torch.nan).to(E4M3)}
        ),
        "holds NaN or infinity",
    ),
    "weight not FP8": (
        lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(256, 128)}),
        "has a scale and is torch.float32",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, how: str) -> None:
    change, message = BROKEN[how]
    quantized(toy(dflash_config(**WIDE)), Quantization("channel")).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        DFlashDraft.load(tmp_path)


def test_fp8_weights_without_a_word_in_the_config_are_refused(tmp_path: Path) -> None:
    quantized(toy(dflash_config(**WIDE)), Quantization("channel")).save(tmp_path)
    edit(tmp_path, quantization_config=None)
    with pytest.raises(ValueError, match="unexpected .*weight_scale"):
        DFlashDraft.load(tmp_path)
