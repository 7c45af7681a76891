"""Whether a drafter and a target belong together, as far as the drafter's file tells."""

import torch
from torch import Tensor

from ..dflash.draft import DFlashDraft
from ..target.model import Target

COMPARED_ROWS = 8192  # of a carried matrix at once


def check_pair(draft: DFlashDraft, target: Target) -> None:
    """Raise ValueError unless the drafter was made for this target.

    That is its shape, and the target's embedding and head where the file carries them along; those
    are forgotten afterwards.
    """
    config = draft.config
    for what, drafter_has, target_has in (
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("hidden size", config.hidden_size, target.hidden_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    ):
        if drafter_has != target_has:
            raise ValueError(
                f"the drafter's {what} is {drafter_has}, that of {target.name} is {target_has}; "
                "evaluate it with the target it was trained for"
            )
    for name, own in (("embed_tokens.weight", target.embedding), ("lm_head.weight", target.head)):
        carried = draft.carried.get(name)
        if carried is not None and not same_weights(carried, own):
            raise ValueError(
                f"the drafter was trained with another embedding or head than {target.name}'s: its "
                f"file carries another {name}; evaluate it with the target it was trained for"
            )
    draft.carried.clear()  # as large as the target's own, and checked


@torch.no_grad()
def same_weights(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices are equal but for the rounding to their types; part by part."""
    if a.shape != b.shape or not a.is_floating_point():
        return False
    step = max(torch.finfo(x.dtype).eps for x in (a, b))
    return all(
        torch.allclose(x.to(y.device, torch.float32), y.float(), rtol=step, atol=1e-6)
        for x, y in zip(a.split(COMPARED_ROWS), b.split(COMPARED_ROWS), strict=True)
    )
