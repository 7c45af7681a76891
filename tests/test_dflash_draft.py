"""A drafter directory: written, read back strictly, and what in a config.json is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_drafter import SHAPE, dflash_config, edit
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from spec.dflash.draft import DFlashDraft, copy_layers
from spec.dflash.files import read_weights
from spec.train.optim import Masters

ROPE = SHAPE["rope_parameters"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    DFlashDraft(dflash_config()).save(tmp_path / "draft")
    return tmp_path / "draft"


def test_saved_and_loaded_is_the_same_drafter(saved: Path) -> None:
    draft = DFlashDraft.load(saved)
    torch.manual_seed(0)
    original = DFlashDraft(dflash_config())
    assert draft.config == original.config
    assert all(
        torch.equal(a, b) for a, b in zip(draft.parameters(), original.parameters(), strict=True)
    )
    cache, other = draft.new_cache(1, 8), original.new_cache(1, 8)
    features, embeds, slot = torch.randn(1, 5, 64), torch.randn(1, 4, 32), torch.tensor([0])
    draft.extend(cache, slot, features, torch.tensor([5]))
    original.extend(other, slot, features, torch.tensor([5]))
    assert torch.equal(draft.hidden(cache, slot, embeds), original.hidden(other, slot, embeds))


def test_the_file_says_what_engines_ask_and_nothing_of_the_target(saved: Path) -> None:
    data = json.loads((saved / "config.json").read_text())
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["model_type"] == "qwen3"
    assert (data["block_size"], data["num_target_layers"], data["is_causal"]) == (4, 6, False)
    assert data["dflash_config"]["target_layer_ids"] == [1, 3]
    assert data["dflash_config"]["mask_token_id"] == 63
    assert data["layer_types"] == ["full_attention"] * 2
    assert data["rope_parameters"] == ROPE
    names = set(load_file(saved / "model.safetensors"))
    assert "fc.weight" in names
    assert "hidden_norm.weight" in names
    assert "layers.1.self_attn.q_norm.weight" in names
    assert not [name for name in names if "embed" in name or "lm_head" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_dtype_equals_the_configs(tmp_path: Path, dtype: torch.dtype) -> None:
    DFlashDraft(dflash_config()).save(tmp_path, dtype=dtype)
    stated = json.loads((tmp_path / "config.json").read_text())["dtype"]
    assert {str(value.dtype) for value in load_file(tmp_path / "model.safetensors").values()} == {
        f"torch.{stated}"
    }
    assert DFlashDraft.load(tmp_path).dtype == dtype


def test_missing_and_unexpected_tensors_are_both_listed(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["extra.weight"] = tensors.pop("layers.0.self_attn.q_norm.weight")
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"missing \['layers.0.self_attn.q_norm.weight'\]; unexpected \['extra.weight'\]",
    ):
        DFlashDraft.load(saved)


def test_a_wrong_shape_is_named(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc.weight is \[64, 32\], the config says \[32, 64\]"):
        DFlashDraft.load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.to(torch.int8), "float32, int8"),
        (lambda value: value.to(torch.float8_e4m3fn), "float32, float8_e4m3fn"),
        (lambda value: value * float("nan"), "holds NaN"),
    ],
)
def test_weights_that_accept_nothing_are_refused(
    saved: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    tensors = load_file(saved / "model.safetensors")
    changed = {k: change(v) if "proj" in k else v for k, v in tensors.items()}
    save_file(changed, saved / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        DFlashDraft.load(saved)


def test_broken_files_are_named(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"model.safetensors: not a whole safetensors file"):
        DFlashDraft.load(saved)
    (saved / "config.json").write_text('{"block_size": ')
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        DFlashDraft.load(saved)


def test_the_published_layout_loads(saved: Path) -> None:
    """z-lab's files.

    Keys of the head of `dflash_config` only, flat RoPE, a `model.` prefix, no is_causal.
    """
    plain = DFlashDraft.load(saved)
    tensors = load_file(saved / "model.safetensors")
    save_file(
        {f"model.{name}": value for name, value in tensors.items()}, saved / "model.safetensors"
    )
    edit(
        saved,
        dflash_config={"mask_token_id": 63, "target_layer_ids": [1, 3]},
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=50000.0,
        is_causal=None,
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        sliding_window=None,
    )
    draft = DFlashDraft.load(saved)
    assert draft.config == plain.config
    assert all(
        torch.equal(a, b) for a, b in zip(draft.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_size": None, "dflash_config": {"target_layer_ids": [1], "mask_token_id": 2}},
            "lacks block_size",
        ),
        ({"rope_theta": 1.0}, "rope_theta is 1.0 but rope_parameters says 50000.0"),
        ({"rope_theta": None, "rope_parameters": None}, "states no RoPE"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"speculators_model_type": "dflash"}, "speculators checkpoint"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "expected \\['DFlashDraftModel'\\]"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only full_attention"),
        ({"markov_rank": 0}, "read it as DSpark"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"block_size": 16}, "block_size is 16 at the top and 4 in dflash_config"),
        ({"is_causal": "false"}, "expected true or false"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"dflash_config": [1]}, "expected an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling beside rope_parameters",
        ),
        ({"rope_parameters": None, "partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "rope_type": "yarn"}},
            "rope_scaling names",
        ),
        ({"rope_theta": 0, "rope_parameters": None}, "rope_theta is 0"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], expected an object"),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "'factor'",
        ),
        ({"architectures": 5}, "architectures is 5"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True"),
        ({"layer_types": ["full_attention"]}, "one for each of 2 layers"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    edit(saved, **changes)
    with pytest.raises(ValueError, match=message):
        DFlashDraft.load(saved)


@pytest.mark.parametrize("ids", [(), (3, 1), (1, 1), (-1, 2), (1, 5)])
def test_layer_ids_rise_and_leave_out_the_last_layer(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rise strictly within 0..4"):
        dflash_config(target_layer_ids=ids)


@pytest.mark.parametrize(
    "changes", [{"block_size": 1}, {"mask_token_id": 64}, {"num_key_value_heads": 3}]
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        dflash_config(**changes)


@pytest.mark.parametrize(
    "rope",
    [
        ROPE,
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
)
def test_rope_from_the_json_alone_equals_the_librarys(tmp_path: Path, rope: dict[str, Any]) -> None:
    torch.manual_seed(0)
    trained = DFlashDraft(dflash_config(rope_parameters=rope, max_position_embeddings=512))
    trained.save(tmp_path)
    loaded = DFlashDraft.load(tmp_path)
    positions = torch.arange(512)
    for a, b in zip(trained.rope(positions), loaded.rope(positions), strict=True):
        assert torch.equal(a, b)
    engine = Qwen3Config(
        **{
            k: v
            for k, v in json.loads((tmp_path / "config.json").read_text()).items()
            if k != "dtype"
        }
    )
    cos, sin = Qwen3RotaryEmbedding(engine)(torch.zeros(1), positions[None])
    torch.testing.assert_close(loaded.rope(positions)[0][:, 0], cos[0])
    torch.testing.assert_close(loaded.rope(positions)[1][:, 0], sin[0])


@pytest.mark.parametrize("how", ["cast", "train"])
def test_a_cast_drafter_rotates_as_the_loaded_one(tmp_path: Path, how: str) -> None:
    """Frequencies rounded to bfloat16 would turn position 500 by most of a radian."""
    draft = DFlashDraft(dflash_config(head_dim=64, rope_parameters=ROPE))
    draft = draft.to(torch.bfloat16) if how == "cast" else draft
    if how == "train":
        Masters(draft, torch.bfloat16)
    draft.save(tmp_path)
    loaded = DFlashDraft.load(tmp_path)
    positions = torch.arange(600)
    for a, b in zip(draft.rope(positions), loaded.rope(positions), strict=True):
        assert torch.equal(a, b)
    exact = DFlashDraft(dflash_config(head_dim=64, rope_parameters=ROPE)).rope(positions)[0]
    torch.testing.assert_close(draft.rope(positions)[0].float(), exact, atol=4e-3, rtol=0.0)


def test_sharded_weights_are_read_through_the_index(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, saved / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (saved / "model.safetensors").unlink()
    assert read_weights(saved).keys() == tensors.keys()
    DFlashDraft.load(saved)


def test_no_drafter_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no config.json"):
        DFlashDraft.load(tmp_path)


def test_layers_are_copied_whole_or_not_at_all() -> None:
    source = DFlashDraft(dflash_config())
    state = {k: v + 1 for k, v in source.layers[0].state_dict().items()}
    no_norms = {k: v for k, v in state.items() if "q_norm" not in k and "k_norm" not in k}
    misfit = {**state, "mlp.gate_proj.weight": torch.zeros(40, 32)}
    draft = DFlashDraft(dflash_config())
    before = draft.layers[1].mlp.up_proj.weight.clone()
    copied = copy_layers(draft, [no_norms, misfit])
    assert torch.equal(draft.layers[0].self_attn.q_proj.weight, state["self_attn.q_proj.weight"])
    assert torch.equal(draft.layers[0].self_attn.q_norm.weight, torch.ones(8))
    assert torch.equal(draft.layers[1].mlp.up_proj.weight, before)
    assert all(name.startswith("layers.0.") for name in copied)


@pytest.mark.parametrize("scale", [0.0, "a", float("nan")])
def test_an_embedding_scale_that_is_no_factor_is_refused(saved: Path, scale: object) -> None:
    nested = json.loads((saved / "config.json").read_text())["dflash_config"]
    edit(saved, dflash_config={**nested, "input_embedding_scale": scale})
    with pytest.raises(ValueError, match="input_embedding_scale is"):
        DFlashDraft.load(saved)


def test_a_tensor_stored_twice_is_refused(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    double = {"model.norm.weight": torch.zeros(32)}
    save_file({**tensors, **double}, saved / "model.safetensors")
    with pytest.raises(ValueError, match="norm.weight is stored twice"):
        DFlashDraft.load(saved)


@pytest.mark.parametrize(
    "index", ["[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}', "{"]
)
def test_a_shard_index_names_files_beside_it(saved: Path, index: str) -> None:
    (saved / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="files beside it"):
        DFlashDraft.load(saved)


def test_others_can_read_what_was_saved(saved: Path) -> None:
    assert (saved / "model.safetensors").stat().st_mode & 0o777 == 0o644
