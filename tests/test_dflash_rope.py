"""The RoPE of a config.json in all its spellings: read as transformers reads it, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_drafter import dflash_config, edit, saved
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import spec.dflash.config
from spec.dflash.layers import rope_frequencies
from spec.dflash.rope import read_rope
from spec.export.check import check
from spec.export.checkpoint import check_rope
from spec.export.convert import import_draft

YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
READ = {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}
SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    "spelled",
    [
        {"rope_parameters": READ},
        {"rope_parameters": {"type": "yarn", "rope_theta": 10000.0, **YARN}},
        {"rope_parameters": {**READ, "type": "yarn"}},
        {"rope_parameters": {"type": "yarn", **YARN}, "rope_theta": 10000.0},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 512,
        },
    ],
)
def test_every_spelling_is_read_as_transformers_reads_it(spelled: dict[str, Any]) -> None:
    assert read_rope(spelled, where="config.json") == READ
    table = Qwen3RotaryEmbedding(Qwen3Config(**SHAPE, max_position_embeddings=2048, **spelled))
    config = dflash_config(rope_parameters=READ, max_position_embeddings=2048)
    inverse, scale = rope_frequencies(config)
    assert isinstance(table.inv_freq, torch.Tensor) and torch.equal(table.inv_freq, inverse)
    assert table.attention_scaling == scale != 1.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"rope_parameters": {**READ, "type": "linear"}},
            r"rope_parameters names \['yarn', 'linear'\] as rope_type and type; keep the one",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}},
            "RoPE of rope_type 'default' has no factor; write the rope_type it was trained with",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", **YARN}},
            "'linear' has no original_max_position_embeddings",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_theta": 1e6, **YARN}},
            "rope_theta is 10000.0 but rope_scaling says 1000000.0",
        ),
        (
            {"rope_parameters": READ, "original_max_position_embeddings": 64},
            "original_max_position_embeddings is 64 at the top and 512 in rope_parameters",
        ),
        (
            {
                "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
                "partial_rotary_factor": 0.5,
            },
            "partial_rotary_factor is 0.5 at the top and 1.0 in rope_parameters",
        ),
    ],
)
def test_two_things_said_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope(data, where="config.json")


def test_a_key_of_another_kind_is_no_config() -> None:
    with pytest.raises(ValueError, match="'default' has no factor"):
        dflash_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "factor": 4.0})
    # A null says nothing.
    dflash_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "factor": None})


def test_a_yarn_drafter_is_imported_as_one(tmp_path: Path) -> None:
    rope = {"type": "yarn", "rope_theta": 10000.0, **YARN}
    edit(saved(tmp_path / "in"), rope_parameters=rope, rope_theta=None)
    assert check(tmp_path / "in").findings == []
    import_draft(tmp_path / "in", tmp_path / "out")
    assert check(tmp_path / "out").facts["rope"] == READ


def test_a_key_of_another_kind_is_a_defect(tmp_path: Path) -> None:
    edit(saved(tmp_path), rope_parameters={"rope_theta": 50000.0, "factor": 4.0})
    (found,) = check(tmp_path).findings
    assert (found.severity, found.engine) == ("defect", "all")
    assert "'default' has no factor" in found.what and "as it was trained" in found.cure


def test_what_was_read_is_held_against_the_file_itself() -> None:
    """Not against its own reading: a misread kind of RoPE would agree with itself."""
    config = dflash_config(max_position_embeddings=2048)
    check_rope(config, config.to_json("float32"))
    for key in ("type", "rope_type"):
        file = {**config.to_json("float32"), "rope_parameters": {key: "yarn", **YARN}}
        with pytest.raises(ValueError, match="tables that transformers builds from it are not"):
            check_rope(config, file)
    with pytest.raises(ValueError, match="transformers refuses its RoPE"):
        check_rope(config, {**file, "rope_parameters": {"rope_type": "linear"}})


def test_a_misread_file_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(saved(tmp_path / "in"), rope_parameters=READ, rope_theta=None)
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    monkeypatch.setattr(spec.dflash.config, "read_rope", lambda data, where: plain)
    with pytest.raises(ValueError, match="tables that transformers builds from it are not"):
        import_draft(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
