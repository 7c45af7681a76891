"""What `spec inspect` says is what the loaded target turns out to be."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from spec.target.inspect import inspect_target, suggest_mask_token
from spec.target.mask_token import free_mask_tokens
from spec.target.model import Target
from spec.target.tiny import tiny_config, tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


def save(directory: Path, config: Any, *, tokenizer: bool = True) -> Path:
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    if tokenizer:
        tiny_tokenizer().save_pretrained(directory)
    return directory


def test_facts_of_a_small_model(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    config = Qwen3Config(**SIZES, head_dim=16, rope_parameters=rope, tie_word_embeddings=False)
    facts = inspect_target(save(tmp_path / "mine", config))
    assert facts.supported, facts.why
    assert (facts.name, facts.architecture) == ("mine", "Qwen3ForCausalLM")
    assert (facts.layers, facts.hidden_size, facts.embedding_rows) == (8, 32, 272)
    assert (facts.heads, facts.key_value_heads, facts.head_dim) == (4, 2, 16)
    assert (facts.vocab_size_config, facts.tokenizer_length) == (272, 272)
    assert facts.tied is False and facts.norm == "plain" and facts.recurrent_state is False
    assert facts.rope == rope
    assert facts.sliding_window is None
    assert facts.stop_tokens == ("258 <|im_end|>",)
    assert facts.default_layer_ids == (1, 2, 3, 4, 5)
    assert facts.suggested_mask_token_id == 259
    assert facts.free_mask_tokens[0] == "259 <|reserved_0|>"
    # Five features of 32 numbers: 2 bytes each, or 1 byte each and one fp32 scale.
    assert facts.feature_bytes_per_token_bf16 == 320
    assert facts.feature_bytes_per_token_fp8 == 164
    parameters = sum(p.numel() for p in Target.load(tmp_path / "mine").model.parameters())
    assert facts.parameters == parameters
    assert facts.weight_bytes == {"F32": 4 * parameters}
    assert facts.load_bytes_bf16 == 2 * parameters
    json.dumps(dataclasses.asdict(facts))


def test_norm_kinds(tmp_path: Path) -> None:
    gemma = Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=30.0, sliding_window=64)
    facts = inspect_target(save(tmp_path / "gemma", gemma))
    assert (facts.norm, facts.logit_softcap, facts.sliding_window) == ("1+w", 30.0, 64)
    gpt2 = GPT2Config(vocab_size=272, n_embd=32, n_layer=6, n_head=4)
    facts = inspect_target(save(tmp_path / "gpt2", gpt2))
    assert (facts.norm, facts.layers, facts.tied) == ("layernorm", 6, True)


def test_unsupported_says_why(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"] * 4
    config = Qwen3Config(**SIZES, head_dim=16)
    directory = save(tmp_path / "hybrid", config, tokenizer=False)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, "layer_types": kinds}))
    facts = inspect_target(directory)
    assert not facts.supported and facts.recurrent_state
    assert "roll back" in facts.why and "tokenizer" in facts.why
    shallow = LlamaConfig(**{**SIZES, "num_hidden_layers": 3})
    facts = inspect_target(save(tmp_path / "shallow", shallow))
    assert "3 layers leave no default feature layer" in facts.why


def test_no_weights_are_needed(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    facts = inspect_target(tmp_path)
    assert "no *.safetensors" in facts.why
    assert (facts.layers, facts.default_layer_ids) == (5, (1, 2))
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 5


TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
BY_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}" + TURNS
)
SYSTEM = "{% set s = messages[0]['content'] if messages|length > 1 else '' %}"
FOLDED = SYSTEM + "<system and user>{{ s }}{{ messages[-1]['content'] }}"
BARE = SYSTEM + "<start>{{ s }}<user>{{ messages[-1]['content'] }}"
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS
MARKED = (
    "{% for m in messages %}{%- generation -%}{{ m['content'] }}{%- endgeneration -%}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "adds_system", "marks"),
    [
        (TURNS, False, False),
        (BY_DEFAULT, True, False),
        (FOLDED, False, False),
        (BARE, False, False),
        (REFUSING, False, False),
        (MARKED, False, True),
    ],
)
def test_chat_templates(tmp_path: Path, template: str, adds_system: bool, marks: bool) -> None:
    tiny_config().save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    facts = inspect_target(tmp_path)
    assert facts.chat_template
    assert (facts.default_system_message, facts.marks_generation) == (adds_system, marks)


def without_reserved(*specials: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with its reserved rows replaced by other special tokens."""
    core = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    core["added_tokens"] = core["added_tokens"][:3]
    names = {token["content"] for token in core["added_tokens"]}
    vocabulary = core["model"]["vocab"]
    core["model"]["vocab"] = {k: v for k, v in vocabulary.items() if v < 256 or k in names}
    from_json = type(tiny_tokenizer().backend_tokenizer).from_str(json.dumps(core))
    from_json.add_special_tokens([AddedToken(name, special=True) for name in specials])
    template = tiny_tokenizer().chat_template
    return PreTrainedTokenizerFast(
        tokenizer_object=from_json,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=template,
    )


def test_mask_token_order() -> None:
    tokenizer = without_reserved("<filename>", "<empty_output>")
    # Rows beyond the tokenizer are safest; among specials, the ones added last.
    assert free_mask_tokens(tokenizer, 263) == [261, 262, 260, 259]
    assert suggest_mask_token(tokenizer, 261) == 260
    assert suggest_mask_token(without_reserved("<filename>", "<|mask|>"), 263) == 260


def test_mask_token_is_never_a_control_token() -> None:
    tokenizer = without_reserved("<|eot_id|>", "<|image_pad|>", "<tool_call>", "<|end_of_turn|>")
    assert free_mask_tokens(tokenizer, 263) == []
    with pytest.raises(ValueError, match=r"draft\.mask_token_id"):
        suggest_mask_token(tokenizer, 263)


def test_published_mask_tokens_come_first() -> None:
    tokenizer = tiny_tokenizer()  # free rows from 259 on, and everything above 271
    assert suggest_mask_token(tokenizer, 151936) == 151669
    assert suggest_mask_token(tokenizer, 163840) == 163838
    assert suggest_mask_token(tokenizer, 154880) == 154856
    assert suggest_mask_token(tokenizer, 129280) == 128799
    assert suggest_mask_token(tokenizer, 272) == 259
