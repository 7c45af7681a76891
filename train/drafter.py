"""The drafter a run starts from.

Shaped by the recipe and the target, random, copied from target layers, or a warm start.
"""

import torch
from torch import Tensor, nn

from ..dflash.config import DFlashConfig
from ..dflash.draft import DFlashDraft, copy_layers
from ..dspark.draft import DSparkDraft
from ..eval.pair import check_pair
from ..recipes.algorithms import ALGORITHMS, algorithm_of, load_draft
from ..recipes.schema import DraftSection
from ..target.capture import default_layer_ids
from ..target.inspect import suggest_mask_token
from ..target.model import Target

FC_NOISE = 0.1  # share of the random `fc` that stays beside the passed-through feature


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
    mask = section.mask_token_id
    parts = ALGORITHMS[section.algorithm]
    return parts.config(
        hidden_size=target.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * target.hidden_size,
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
        **parts.own_fields(section),
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
        found = algorithm_of(section.init_from)
        if found != section.algorithm:
            raise ValueError(
                f"draft.init_from is a {found} drafter and draft.algorithm is {section.algorithm}; "
                f"set draft.algorithm={found}"
            )
        draft = load_draft(section.init_from, dtype=torch.float32, device=target.device)
        if draft.config.quantization is not None:
            raise ValueError(
                f"draft.init_from {section.init_from} is quantized, and e4m3 weights do not train; "
                "start from the drafter it was made from, and quantize what comes out"
            )
        check_pair(draft, target)
        return draft.train()
    config = make_config(section, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = ALGORITHMS[section.algorithm].draft(config)
        draft.initialize()
    if section.init == "target":
        copy_from_target(draft, target)
    return draft.to(target.device)


@torch.no_grad()
def copy_from_target(draft: DFlashDraft, target: Target) -> None:
    """Start as the target's last layers: their weights, its final norm, `fc` passing one feature.

    With the deepest feature passed through, the first draft layer's context keys are nearly those
    of the target layer it was copied from.
    """
    if draft.config.num_hidden_layers > target.num_layers:
        raise ValueError(
            f"draft.init=target: {draft.config.num_hidden_layers} draft layers cannot come from "
            f"the {target.num_layers} layers of {target.name}; use fewer or init=random"
        )
    last = list(target.layers)[-draft.config.num_hidden_layers :]
    if not copy_layers(draft, [layer_state(layer) for layer in last]):
        raise ValueError(
            f"draft.init=target: no layer of {target.name} has a drafter layer's shapes; use "
            "init=random"
        )
    if isinstance(draft, DSparkDraft) and draft.markov_head is not None:
        draft.markov_head.describe_tokens(target.embedding)
    draft.norm.weight.copy_(norm_weight(target.final_norm, target.hidden_size))
    size = draft.config.hidden_size
    draft.fc.weight.mul_(FC_NOISE)
    draft.fc.weight[:, -size:] += torch.eye(size)


def layer_state(layer: nn.Module) -> dict[str, Tensor]:
    """A target layer under the drafter's names; a norm as the factor it really applies."""
    state = {name: value.detach() for name, value in layer.state_dict().items()}
    for name, module in layer.named_modules():
        weight = state.get(f"{name}.weight")
        if "norm" in name and weight is not None:
            state[f"{name}.weight"] = norm_weight(module, len(weight))
    # Gemma's norm of this name comes after the attention, not before the MLP.
    if hasattr(layer, "pre_feedforward_layernorm"):
        state["post_attention_layernorm.weight"] = state["pre_feedforward_layernorm.weight"]
    return state


def norm_weight(norm: nn.Module, size: int) -> Tensor:
    """What an RMSNorm multiplies by: its weight, or one plus it, seen on a vector of ones."""
    weight = next(norm.parameters())
    return norm(torch.ones(1, size, dtype=weight.dtype, device=weight.device))[0].float()
