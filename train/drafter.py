"""The drafter a run starts from.

Shaped by the recipe and the target, random, copied from target layers, or a warm start.
"""

import torch

from ..dflash.config import DFlashConfig
from ..dflash.draft import DFlashDraft, copy_layers
from ..eval.decode import check_pair
from ..recipes.schema import DraftSection
from ..target.capture import check_layer_ids, default_layer_ids
from ..target.inspect import suggest_mask_token
from ..target.model import Target

INIT_STD = 0.02


def make_config(section: DraftSection, target: Target) -> DFlashConfig:
    """The drafter's config.

    What the recipe leaves out follows the target; its RoPE theta is kept, its scaling is not.
    """
    text = target.config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or target.hidden_size // heads
    ids = section.target_layer_ids
    layer_ids = (
        tuple(ids)
        if ids is not None
        else default_layer_ids(target.num_layers, section.num_features)
    )
    check_layer_ids(layer_ids, target.num_layers)
    mask = section.mask_token_id
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=section.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        block_size=section.block_size,
        target_layer_ids=layer_ids,
        num_target_layers=target.num_layers,
        mask_token_id=suggest_mask_token(target.require_tokenizer(), target.vocab_size)
        if mask is None
        else mask,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(text)},
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        is_causal=section.is_causal,
    )


def rope_theta(config: object) -> float:
    """The target's theta, wherever its config keeps it; 10000 where it has none."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, rope.get("full_attention") or {}):
        if "rope_theta" in parameters:
            return float(parameters["rope_theta"])
    return float(getattr(config, "rope_theta", 10000.0))


def make_draft(section: DraftSection, target: Target, seed: int) -> DFlashDraft:
    """A float32 drafter ready to train; ValueError where a warm start does not fit the target."""
    if section.init_from is not None:
        draft = DFlashDraft.load(section.init_from, dtype=torch.float32, device=target.device)
        check_pair(draft, target)
        return draft.train()
    config = make_config(section, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = DFlashDraft(config)
        for module in draft.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=INIT_STD)
    if section.init == "target":
        last = [dict(layer.state_dict()) for layer in target.layers][-config.num_hidden_layers :]
        if not copy_layers(draft, last):
            raise ValueError(
                f"draft.init=target: no layer of {target.name} has a drafter layer's shapes; use "
                "init=random"
            )
    return draft.to(target.device)
