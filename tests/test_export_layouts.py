"""Layouts of a drafter directory: what is written, read back, asked for and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_drafter import SHAPE, dflash_config, dspark_config, edit

from spec.dflash.config import DFlashConfig
from spec.dflash.draft import DFlashDraft
from spec.dspark.draft import DSparkDraft
from spec.export import checkpoint
from spec.export.checkpoint import Given, check_rope, read, same_bits, verify, write
from spec.export.layouts import LAYOUTS, LayoutName, detect, expected_shapes
from spec.recipes.algorithms import load_draft

GOLDEN = Path(__file__).parent / "golden"
NO_MARKOV = {"markov_rank": 0, "confidence_head_with_markov": False}
CONFIGS: dict[str, DFlashConfig] = {
    "dflash": dflash_config(),
    "vanilla": dspark_config(),
    "gated": dspark_config(markov_head_type="gated", confidence_head_with_markov=False),
    "rnn": dspark_config(
        markov_head_type="rnn", enable_confidence_head=False, confidence_head_with_markov=False
    ),
    "rank0": dspark_config(**NO_MARKOV),
}
# Which layouts describe which drafters.
WRITTEN: list[tuple[str, LayoutName]] = [
    *(("dflash", name) for name in ("sglang", "zlab", "vllm")),
    *(
        (kind, name)
        for kind in ("vanilla", "gated", "rnn")
        for name in ("sglang", "deepspec", "vllm")
    ),
    *(("rank0", name) for name in ("deepspec", "vllm")),
]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def tensors_of(config: DFlashConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = expected_shapes(config).items()
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes}


def carried(name: LayoutName) -> dict[str, Tensor] | None:
    """A tied embedding: both names share one memory."""
    weight = torch.arange(64 * 32.0).reshape(64, 32) / 2048
    both = {"embed_tokens.weight": weight, "lm_head.weight": weight}
    return both if LAYOUTS[name].carries_target else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "name"), WRITTEN)
def test_there_and_back_is_the_same_drafter_bit_for_bit(
    tmp_path: Path, kind: str, name: LayoutName, dtype: torch.dtype
) -> None:
    config, theirs = CONFIGS[kind], carried(name)
    tensors = tensors_of(config, dtype)
    if theirs:
        theirs = {key: value.to(dtype) for key, value in theirs.items()}
    write(config, tensors, tmp_path / "there", LAYOUTS[name], target_name="toy", carried=theirs)
    there = read(tmp_path / "there")
    assert (there.layout.name, there.config) == (name, config)
    assert there.carried.keys() == (theirs or {}).keys()
    write(there.config, there.tensors, tmp_path / "back", LAYOUTS["sglang"])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[key], value) for key, value in tensors.items())
    draft = load_draft(tmp_path / "back")
    assert (draft.config, draft.dtype) == (config, dtype)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config.to_json(
        str(dtype).removeprefix("torch.")
    )


@pytest.mark.parametrize(("kind", "name"), [pair for pair in WRITTEN if pair[0] != "rnn"])
def test_config_files_stay_as_they_are(kind: str, name: LayoutName) -> None:
    """A changed golden file means that every engine reads something new: change it on purpose."""
    written = LAYOUTS[name].to_json(CONFIGS[kind], "bfloat16", "toy/target")
    golden = GOLDEN / f"{name}_{kind}.json"
    assert written == json.loads(golden.read_text())


@pytest.mark.parametrize(("kind", "name"), WRITTEN)
def test_layer_ids_count_as_the_layout_counts(kind: str, name: LayoutName) -> None:
    written = LAYOUTS[name].to_json(CONFIGS[kind], "float32", None)
    if name == "vllm":
        assert written["aux_hidden_state_layer_ids"] == [2, 4]
        assert written["sample_from_anchor"] is (kind != "dflash")
        method = written["speculators_config"]["proposal_methods"][0]
        assert method["speculative_tokens"] == (3 if kind == "dflash" else 4)
    elif kind == "dflash":
        assert written["dflash_config"]["target_layer_ids"] == [1, 3]
    else:
        assert written["target_layer_ids"] == [1, 3]
        assert written["markov_rank"] == (0 if kind == "rank0" else 8)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1000000}, YARN])
@pytest.mark.parametrize("name", ["sglang", "zlab", "vllm"])
def test_rope_survives_every_layout(tmp_path: Path, name: LayoutName, rope: dict[str, Any]) -> None:
    config = dflash_config(rope_parameters=rope, max_position_embeddings=512)
    write(config, tensors_of(config), tmp_path / "out", LAYOUTS[name])
    assert read(tmp_path / "out").config.rope_parameters == rope


def test_a_rope_that_the_file_would_change_is_refused() -> None:
    config = dflash_config()
    check_rope(config, config.to_json("float32"))
    with pytest.raises(ValueError, match="builds from it are not those of"):
        check_rope(config, {**config.to_json("float32"), "rope_parameters": YARN})


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("dflash", "deepspec", "it is DFlash; what DeepSpec calls dflash is DSpark"),
        ("vanilla", "zlab", "it is DSpark"),
        ("rank0", "zlab", "it is DSpark"),
        ("rank0", "sglang", "markov_rank is 0"),
    ],
)
def test_what_a_layout_cannot_say(kind: str, name: LayoutName, reason: str) -> None:
    obstacle = LAYOUTS[name].obstacle(CONFIGS[kind])
    assert obstacle is not None and obstacle.startswith(reason)


@pytest.mark.parametrize("name", ["deepspec", "vllm"])
@pytest.mark.parametrize("change", [{"is_causal": True}, {"input_embedding_scale": 2.0}])
def test_keys_that_a_layout_does_not_have(name: LayoutName, change: dict[str, Any]) -> None:
    obstacle = LAYOUTS[name].obstacle(dspark_config(**change))
    assert obstacle is not None and next(iter(change)) in obstacle


def test_deepspecs_dflash_stays_dspark(tmp_path: Path) -> None:
    """Its slots predict one token later than DFlash's, whatever it is called."""
    config = CONFIGS["rank0"]
    theirs = carried("deepspec")
    write(config, tensors_of(config), tmp_path / "out", LAYOUTS["deepspec"], carried=theirs)
    found = read(tmp_path / "out")
    assert (found.config.first_slot, found.config.num_draft_tokens) == (0, 4)


def test_published_dflash_is_recognized() -> None:
    published = dict(LAYOUTS["zlab"].to_json(dflash_config(), "bfloat16", None))
    published.pop("is_causal")
    assert detect(published).name == "zlab"
    transformers_5 = {**published, "rope_parameters": SHAPE["rope_parameters"]}
    assert detect(transformers_5).name == "zlab"
    assert detect(dflash_config().to_json("bfloat16")).name == "sglang"


@pytest.mark.parametrize(
    "data",
    [{}, {"architectures": "DFlashDraftModel"}, {"architectures": ["DFlash2DraftModel"]}],
)
def test_other_drafters_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected one of DFlashDraftModel, Qwen3DSparkModel"):
        detect(data)


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    config = dflash_config()
    write(config, tensors_of(config), tmp_path / "vllm", LAYOUTS["vllm"], target_name="toy")
    return tmp_path / "vllm"


def test_qwen3s_defaults_may_be_left_out_of_speculators(vllm: Path) -> None:
    backbone = json.loads((vllm / "config.json").read_text())["transformer_layer_config"]
    for key in ("rms_norm_eps", "max_position_embeddings", "hidden_act", "layer_types"):
        backbone.pop(key)
    edit(vllm, transformer_layer_config=backbone)
    assert read(vllm).config == dflash_config()
    edit(vllm, transformer_layer_config={**backbone, "model_type": "llama"})
    with pytest.raises(ValueError, match="lacks rms_norm_eps, max_position_embeddings"):
        read(vllm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32 of 64"),
        ({"sample_from_anchor": True}, "dflash with sample_from_anchor True"),
        ({"speculators_model_type": "eagle3"}, "expected dflash or dspark"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None"),
        ({"aux_hidden_state_layer_ids": ["2", 4]}, "expected a list of layer numbers"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, r"target_layer_ids \[-1, 1\] must rise"),
        ({"aux_hidden_state_layer_ids": [2, 6]}, r"target_layer_ids \[1, 5\] must rise"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized"),
    ],
)
def test_speculators_that_are_not_ours_are_refused(
    vllm: Path, changes: dict[str, Any], message: str
) -> None:
    edit(vllm, **changes)
    with pytest.raises(ValueError, match=message):
        read(vllm)


def test_a_vocabulary_map_must_map_each_token_to_itself(vllm: Path) -> None:
    tensors = load_file(vllm / "model.safetensors")
    same = {"d2t": torch.zeros(64, dtype=torch.long), "t2d": torch.ones(64, dtype=torch.bool)}
    save_file({**tensors, **same}, vllm / "model.safetensors")
    assert read(vllm).carried == {}
    save_file({**tensors, **same, "d2t": torch.arange(64)}, vllm / "model.safetensors")
    with pytest.raises(ValueError, match="a vocabulary of its own"):
        read(vllm)


@pytest.mark.parametrize("nested", [True, False])
def test_what_a_config_leaves_out_is_asked_for(tmp_path: Path, nested: bool) -> None:
    DFlashDraft(dflash_config()).save(tmp_path)
    own = {"target_layer_ids": None, "mask_token_id": None} if nested else None
    edit(tmp_path, dflash_config=own, block_size=None, num_target_layers=None)
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    options = "--layer-ids, --mask-token-id, --block-size, --num-target-layers (or --target)"
    assert f"give {options} as it was trained" in str(error.value)
    given = Given(target_layer_ids=[1, 3], mask_token_id=63, block_size=4, num_target_layers=6)
    assert read(tmp_path, given).config == dflash_config()


def test_what_a_config_says_is_not_overruled(tmp_path: Path) -> None:
    DFlashDraft(dflash_config()).save(tmp_path)
    assert read(tmp_path, Given(mask_token_id=63)).config == dflash_config()
    with pytest.raises(ValueError, match="mask_token_id is 63, --mask-token-id says 5"):
        read(tmp_path, Given(mask_token_id=5))


def test_missing_and_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    DFlashDraft(dflash_config()).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fcc.weight"] = tensors.pop("fc.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['fc.weight'\]; unexpected \['fcc.weight'\]"):
        read(tmp_path)


def test_a_prefix_and_nested_heads_are_put_right(tmp_path: Path) -> None:
    config = dspark_config()
    DSparkDraft(config).save(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    save_file({f"model.{k}": v for k, v in tensors.items()}, tmp_path / "in" / "model.safetensors")
    edit(tmp_path / "in", markov_rank=None, dflash_config={"markov_rank": 8})
    found = read(tmp_path / "in")
    write(found.config, found.tensors, tmp_path / "out", LAYOUTS["sglang"])
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["markov_rank"] == 8


def test_all_or_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dflash_config()
    broken = {**tensors_of(config), "norm.weight": torch.full((32,), torch.nan)}
    with pytest.raises(ValueError, match=r"norm.weight holds NaN"):
        write(config, broken, tmp_path / "out", LAYOUTS["sglang"])
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="already exists"):
        write(config, tensors_of(config), tmp_path / "out", LAYOUTS["sglang"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_write_that_does_not_read_back_is_refused(tmp_path: Path) -> None:
    config = dflash_config()
    tensors = tensors_of(config)
    write(config, tensors, tmp_path / "out", LAYOUTS["sglang"])
    verify(tmp_path / "out", config, tensors)
    zero = {**tensors, "norm.weight": torch.zeros(32)}
    save_file(zero, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensors read back with other bits \(norm.weight\)"):
        verify(tmp_path / "out", config, {**zero, "norm.weight": -torch.zeros(32)})
    with pytest.raises(ValueError, match="reads back with another mask_token_id"):
        verify(tmp_path / "out", dflash_config(mask_token_id=62), zero)


def test_shards_and_what_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dspark_config()
    source = tmp_path / "source"
    DSparkDraft(config).save(source)
    for name in (*checkpoint.SIDE_FILES, "notes.txt"):
        (source / name).write_text("{}")
    monkeypatch.setattr(checkpoint, "MAX_SHARD", "20KB")
    found = read(source)
    write(found.config, found.tensors, tmp_path / "out", LAYOUTS["sglang"], beside=source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names > {"model.safetensors.index.json", "model-00001-of-00005.safetensors"}
    assert names > set(checkpoint.SIDE_FILES) and "notes.txt" not in names
    assert all(path.stat().st_mode & 0o044 for path in (tmp_path / "out").iterdir())
    assert load_draft(tmp_path / "out").config == config
