"""The parts of a target are found in every family, and give back the model's own logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from spec.target.capture import Capture
from spec.target.model import Target

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD: dict[str, Any] = {**SIZES, "head_dim": 8}
MLA: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 6,  # as many as the text model: the search must not take the wrong tower
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def family(name: str) -> PretrainedConfig:
    match name:
        case "llama":
            return LlamaConfig(**SIZES, tie_word_embeddings=True)
        case "qwen2":
            return Qwen2Config(**SIZES, tie_word_embeddings=False)
        case "qwen3":
            return Qwen3Config(**HEAD, tie_word_embeddings=False)
        case "gemma":
            return GemmaConfig(**HEAD)
        case "gemma2":
            return Gemma2Config(**HEAD, final_logit_softcapping=3.0, sliding_window=8)
        case "gemma3":
            text = {**HEAD, "sliding_window": 8, "final_logit_softcapping": 2.0}
            return Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
        case "glm4":
            return Glm4Config(**HEAD, tie_word_embeddings=False)
        case "deepseek_v3":
            sizes = {**SIZES, "num_key_value_heads": 4}
            return DeepseekV3Config(**sizes, **MLA, tie_word_embeddings=False)
        case "cohere":
            return CohereConfig(**SIZES, logit_scale=0.25)
        case "granite":
            return GraniteConfig(**SIZES, logits_scaling=4.0)
        case "gpt2":
            return GPT2Config(vocab_size=120, n_embd=32, n_layer=6, n_head=4, eos_token_id=2)
    raise AssertionError(name)


FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "glm4",
    "deepseek_v3",
    "cohere",
    "granite",
    "gpt2",
)
ONE_PLUS_W = ("gemma", "gemma2", "gemma3")


def save(name: str, directory: Path, *, max_shard_size: str = "5GB") -> Path:
    """A random model of a family; norm weights and biases too, so that leaving one out shows."""
    torch.manual_seed(1)
    config = family(name)
    loader = AutoModelForImageTextToText if name == "gemma3" else AutoModelForCausalLM
    model = loader.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


IDS = torch.tensor([[5, 9, 33, 7, 110, 64, 3, 8, 21, 40, 41, 42]])


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_and_teacher(name: str, directories: dict[str, Path]) -> None:
    target = Target.load(directories[name])
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 32, 120)
    assert target.stop_token_ids == (2,)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.check_teacher(IDS) <= 1e-5
    assert not target.has_recurrent_state


@pytest.mark.parametrize("name", FAMILIES)
def test_features_equal_hidden_states(name: str, directories: dict[str, Path]) -> None:
    target = Target.load(directories[name])
    with torch.no_grad(), Capture(target, [1, 3]) as captured:
        states = target.model(input_ids=IDS, output_hidden_states=True).hidden_states
    assert torch.equal(captured.context, torch.cat([states[2], states[4]], dim=-1))
    assert torch.equal(captured.last, states[6])  # HF's last hidden state is after the norm


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_hidden_state_gives_the_models_own_logits(
    name: str, directories: dict[str, Path]
) -> None:
    target = Target.load(directories[name])
    before_norm: list[torch.Tensor] = []
    target.final_norm.register_forward_hook(lambda _m, args, _out: before_norm.append(args[0]))
    with torch.no_grad():
        expected = target.model(input_ids=IDS).logits
        with Capture(target, [1, 3]) as captured:
            target.backbone(input_ids=IDS)
        normed = target.final_norm(before_norm[0])
        for last in (captured.last, normed):
            torch.testing.assert_close(target.logits(last), expected, rtol=1e-5, atol=1e-5)
        # What a cache in bfloat16 gives back: the same logits up to that rounding.
        rounded = target.logits(captured.last.bfloat16().float())
    largest = expected.abs().max().item()
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0.02 * largest)


def test_tied_and_untied(directories: dict[str, Path]) -> None:
    assert Target.load(directories["llama"]).tied
    assert not Target.load(directories["qwen3"]).tied


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_embedding_in_a_later_shard(
    name: str, tmp_path: Path, directories: dict[str, Path]
) -> None:
    save(name, tmp_path, max_shard_size="20KB")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    # Rename the shards so that the embedding's comes last, whatever order the writer chose.
    wanted = next(v for k, v in index["weight_map"].items() if k.endswith("embed_tokens.weight"))
    (tmp_path / wanted).rename(tmp_path / "zz-last.safetensors")
    moved = {k: "zz-last.safetensors" if v == wanted else v for k, v in index["weight_map"].items()}
    index_file.write_text(json.dumps({**index, "weight_map": moved}))
    target, whole = Target.load(tmp_path), Target.load(directories[name])
    assert torch.equal(target.embedding, whole.embedding)
    assert torch.equal(target.head, whole.head)
    assert target.check_teacher(IDS) <= 1e-5


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save("qwen3", tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        Target.load(tmp_path)


def test_a_missing_weight_is_refused_not_invented(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(tensors) if "mlp.up_proj" in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name):
        Target.load(tmp_path)


def test_teacher_mismatch_is_refused(directories: dict[str, Path]) -> None:
    target = Target.load(directories["gemma2"])
    target.config.final_logit_softcapping = None
    model_forward = target.model.forward

    def capped(**kwargs: object) -> object:
        out = model_forward(**kwargs)
        out.logits = torch.tanh(out.logits / 3.0) * 3.0
        return out

    target.model.forward = capped
    with pytest.raises(ValueError, match="differ from the target's"):
        target.check_teacher(IDS)


def test_recurrent_layers_are_noticed(directories: dict[str, Path]) -> None:
    target = Target.load(directories["qwen3"])
    target.require_rollback()
    target = Target.load(directories["qwen3"])
    target.config.layer_types = ["linear_attention", "full_attention"] * 3
    assert target.has_recurrent_state
    with pytest.raises(ValueError, match="roll back"):
        target.require_rollback()


def test_every_stop_token_counts(directories: dict[str, Path]) -> None:
    target = Target.load(directories["llama"])
    generation = target.model.generation_config
    assert generation is not None
    generation.eos_token_id = [7, 2, 9]
    assert target.stop_token_ids == (7, 2, 9)


def test_name_is_never_a_path(directories: dict[str, Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Some--Model-1B" / "snapshots" / "0a1b2c"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(directories["llama"])
    assert Target.load(directories["llama"]).name == directories["llama"].name
    copied = tmp_path / "models--Some--Model-2B" / "snapshots" / "0a1b2c"
    copied.mkdir(parents=True)
    for file in directories["llama"].iterdir():
        (copied / file.name).symlink_to(file)
    assert Target.load(copied).name == "Some/Model-2B"


def _error(path: Path | str) -> str:
    with pytest.raises(ValueError) as caught:
        Target.load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_errors_are_one_line_with_the_next_step(tmp_path: Path) -> None:
    assert "no such directory" in _error(tmp_path / "absent")
    assert "no config.json" in _error(tmp_path)
    family("llama").save_pretrained(tmp_path)
    assert "convert the weights" in _error(tmp_path)
    assert "hub" in _error("nobody/nothing")
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    assert "weights were refused" in _error(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "novel"}))
    assert "config.json was refused" in _error(tmp_path)


def test_missing_tokenizer_is_said_when_it_is_needed(directories: dict[str, Path]) -> None:
    target = Target.load(directories["llama"])
    assert target.tokenizer is None
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        target.require_tokenizer()
