"""Would the drafter accept more if its files said something else? Measure it.

An engine that reads the same wrong file as we do agrees with us; neither accepts what the drafter
could. So each likely mistake is undone in memory, one at a time, and the drafter decodes the same
prompts: where that accepts clearly more, the mistake has a name. Greedy answers are the target's
own whatever is drafted, so all are measured on the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..dflash.config import DFlashConfig
from ..dflash.draft import DFlashDraft
from ..dspark.config import HEAD_KEYS, DSparkConfig
from ..dspark.draft import DSparkDraft
from ..eval.decode import speculate
from ..eval.drafter import NetworkDrafter
from ..target.mask_token import suggest_mask_token
from ..target.model import Target
from .parity import acceptance

THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # of published models
# A mistake costs more than chance: so many tokens a step, and such a share of the length.
LEAST_GAIN = 0.15
LEAST_SHARE = 0.06


@dataclass(frozen=True)
class Variant:
    """The drafter with one thing read otherwise."""

    what: str  # as the change reads: "target_layer_ids [0, 1, 2] instead of [1, 2, 3]"
    mistake: str
    cure: str
    make: Callable[[], DFlashDraft]


@dataclass(frozen=True)
class Measured:
    """What a variant accepts. Keeps no weights, as the target may need their place."""

    what: str
    mistake: str
    cure: str
    acceptance_length: float


@dataclass(frozen=True)
class Probe:
    """The acceptance length as read, and with each variant; same prompts, same loop."""

    acceptance_length: float
    variants: list[Measured]

    @property
    def better(self) -> list[Measured]:
        """Variants that accept clearly more, best first."""
        least = self.acceptance_length + max(LEAST_GAIN, LEAST_SHARE * self.acceptance_length)
        found = [each for each in self.variants if each.acceptance_length >= least]
        return sorted(found, key=lambda each: -each.acceptance_length)

    def to_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.acceptance_length,
            "variants": {each.what: each.acceptance_length for each in self.variants},
        }


def probe(
    draft: DFlashDraft, target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> Probe:
    """Decode the prompts with the drafter as it was read and with each likely mistake undone."""

    def length(one: DFlashDraft) -> float:
        decoded = speculate(
            target,
            NetworkDrafter(one, target),
            prompts,
            max_new_tokens=max_new_tokens,
            batch_size=len(prompts),
            stop_token_ids=(),
        )
        return acceptance(decoded, one.config.num_draft_tokens)

    measured = [
        Measured(each.what, each.mistake, each.cure, length(each.make()))
        for each in variants(draft, target)
    ]
    return Probe(length(draft), measured)


def variants(draft: DFlashDraft, target: Target) -> list[Variant]:
    """One a likely mistake of this drafter; each drafts as many tokens as it does."""
    found = [*_layers(draft), *_slots(draft), *_rope(draft, target), *_block(draft, target)]
    return found + _weights(draft) + _heads(draft)


def _rebuilt(draft: DFlashDraft, config: DFlashConfig, **changed: Tensor) -> DFlashDraft:
    """A drafter of another config with the same weights; those of heads it lacks are left out."""
    made = DSparkDraft(config) if isinstance(config, DSparkConfig) else DFlashDraft(config)
    state = {**draft.state_dict(), **changed}
    made.load_state_dict({name: state[name] for name in made.state_dict()})
    return made.to(device=draft.device, dtype=draft.dtype).eval()


def _config_variant(
    draft: DFlashDraft, mistake: str, cure: str, what: str, **changes: Any
) -> Variant:
    return Variant(what, mistake, cure, lambda: _rebuilt(draft, replace(draft.config, **changes)))


def _layers(draft: DFlashDraft) -> list[Variant]:
    ids, n = draft.config.target_layer_ids, draft.config.num_target_layers
    found: list[Variant] = []
    for step, why in (
        (-1, "counts them from the embedding, as speculators does"),
        (1, "counts one too low"),
    ):
        moved = tuple(k + step for k in ids)
        if moved[0] >= 0 and moved[-1] <= n - 2:
            found.append(
                _config_variant(
                    draft,
                    f"target_layer_ids {list(ids)} name the wrong layers: whoever wrote them {why}",
                    f"write {list(moved)}, or run spec import on the original directory",
                    f"target_layer_ids {list(moved)} instead of {list(ids)}",
                    target_layer_ids=moved,
                )
            )
    fc = draft.state_dict()["fc.weight"]
    blocks = fc.unflatten(1, (len(ids), -1))
    turned = {
        "fc's columns in descending layer order": blocks.flip(1).flatten(1),
        "fc transposed, layer by layer": blocks.transpose(0, 2).flatten(1),
    }
    for what, weight in turned.items():
        if not torch.equal(weight, fc):
            found.append(
                Variant(
                    what,
                    "fc.weight is stored wrongly",
                    "store fc as [hidden, layers x hidden], the layers ascending",
                    lambda weight=weight: _rebuilt(draft, draft.config, **{"fc.weight": weight}),
                )
            )
    return found


def _slots(draft: DFlashDraft) -> list[Variant]:
    """The other algorithm's slots, for the same number of drafted tokens."""
    config = draft.config
    drafts = config.num_draft_tokens
    own = {field.name: getattr(config, field.name) for field in fields(DFlashConfig)}
    if isinstance(config, DSparkConfig):
        other = DFlashConfig(**{**own, "block_size": drafts + 1})
        mistake = "the slots are shifted: it is labelled DSpark and drafts as DFlash does"
    else:
        heads = dict.fromkeys(HEAD_KEYS, False) | {"markov_rank": 0, "markov_head_type": "vanilla"}
        other = DSparkConfig(**{**own, "block_size": drafts, **heads})
        mistake = "the slots are shifted: it is labelled DFlash and drafts as DSpark does"
    return [
        Variant(
            "slots one token " + ("earlier" if isinstance(config, DSparkConfig) else "later"),
            mistake,
            "correct architectures and block_size, or train it with the labels of its algorithm",
            lambda: _rebuilt(draft, other),
        )
    ]


def _rope(draft: DFlashDraft, target: Target) -> list[Variant]:
    rope = draft.config.rope_parameters
    theirs = getattr(target.config, "rope_parameters", None) or {}
    thetas = [theirs.get("rope_theta"), *THETAS]
    others = sorted({float(t) for t in thetas if t} - {float(rope["rope_theta"])})
    return [
        _config_variant(
            draft,
            f"rope_theta {rope['rope_theta']:g} is not the one trained with",
            f"write rope_theta {theta:g} into config.json",
            f"rope_theta {theta:g} instead of {rope['rope_theta']:g}",
            rope_parameters={**rope, "rope_theta": theta},
        )
        for theta in others
    ]


def _block(draft: DFlashDraft, target: Target) -> list[Variant]:
    """What stands in the block's empty slots, and which of them see each other."""
    config = draft.config
    stated = "causal" if config.is_causal else "bidirectional"
    other = "bidirectional" if config.is_causal else "causal"
    found = [
        _config_variant(
            draft,
            f"the block is {stated} and was trained {other}",
            f"write is_causal: {str(not config.is_causal).lower()}",
            f"a {other} block instead of a {stated} one",
            is_causal=not config.is_causal,
        )
    ]
    if target.tokenizer is not None:
        try:
            mask = suggest_mask_token(target.tokenizer, target.vocab_size)
        except ValueError:
            mask = config.mask_token_id  # no free row: nothing to suggest
        if mask != config.mask_token_id:
            found.append(
                _config_variant(
                    draft,
                    f"mask_token_id {config.mask_token_id} is not the one trained with",
                    f"write mask_token_id {mask}",
                    f"mask_token_id {mask} instead of {config.mask_token_id}",
                    mask_token_id=mask,
                )
            )
    for scale in {1.0, config.hidden_size**0.5} - {config.input_embedding_scale}:
        found.append(
            _config_variant(
                draft,
                f"input_embedding_scale {config.input_embedding_scale:g} is not the one trained "
                "with",
                f"write input_embedding_scale {scale:g}",
                f"input_embedding_scale {scale:g} instead of {config.input_embedding_scale:g}",
                input_embedding_scale=scale,
            )
        )
    return found


def _weights(draft: DFlashDraft) -> list[Variant]:
    state = draft.state_dict()
    swapped = {
        name: state[
            name.replace("gate_proj", "up_proj")
            if "gate" in name
            else name.replace("up_proj", "gate_proj")
        ]
        for name in state
        if ".mlp.gate_proj." in name or ".mlp.up_proj." in name
    }
    return [
        Variant(
            "gate_proj and up_proj swapped",
            "gate_proj and up_proj stand in each other's place",
            "swap their names in model.safetensors",
            lambda: _rebuilt(draft, draft.config, **swapped),
        )
    ]


def _heads(draft: DFlashDraft) -> list[Variant]:
    """The sequential head left out, or its two tables swapped: a right one is worth something."""
    if not isinstance(draft, DSparkDraft) or draft.markov_head is None:
        return []
    state = draft.state_dict()
    w1, w2 = (f"markov_head.markov_{name}.weight" for name in ("w1", "w2"))
    return [
        Variant(
            "the sequential head left out",
            "the sequential head makes the drafts worse: its tensors are wrong or another "
            "drafter's",
            "export it again from the run that trained it",
            lambda: _rebuilt(draft, draft.config, **{w2: torch.zeros_like(state[w2])}),
        ),
        Variant(
            "markov_w1 and markov_w2 swapped",
            "markov_w1 and markov_w2 stand in each other's place",
            "swap their names in model.safetensors",
            lambda: _rebuilt(draft, draft.config, **{w1: state[w2], w2: state[w1]}),
        ),
    ]
