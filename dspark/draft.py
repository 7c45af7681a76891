"""The DSpark network: DFlash's backbone, a Markov head over its logits, a confidence head.

The backbone computes all slots at once; the tokens are then drawn left to right, each slot's logits
corrected by the token drawn before it. Shapes: B requests, D drafted slots, H hidden, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dflash.draft import Choose, DFlashDraft, DraftCache, Proposal
from .config import DSparkConfig
from .heads import MARKOV_HEADS, ConfidenceHead, MarkovHead


class DSparkDraft(DFlashDraft):
    """A DSpark drafter. Parameters carry the names of its file (DESIGN section 7)."""

    # DeepSpec's checkpoints carry the target's own embedding and head along.
    target_tensors: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")
    config: DSparkConfig
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = (
            MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        )
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    def initialize(self) -> None:
        """As DFlash, and the sequential head as it learns fastest."""
        super().initialize()
        if self.markov_head is not None:
            self.markov_head.initialize()

    @classmethod
    def load_config(cls, directory: str | Path) -> DSparkConfig:
        """The config of a DSpark drafter."""
        return DSparkConfig.load(directory)

    @torch.inference_mode()
    def propose(
        self,
        cache: DraftCache,
        slots: Tensor,
        anchors: Tensor,
        *,
        embedding: Tensor,
        head: Callable[[Tensor], Tensor],
        choose: Choose | None = None,
    ) -> Proposal:
        """Tokens after anchors [B], left to right: `choose`'s pick at each slot, or the argmax."""
        hidden = self._hidden_of_anchors(cache, slots, anchors, embedding)
        base = head(hidden).float()
        markov, confidence = self.markov_head, self.confidence_head
        state = markov.start(hidden[:, 0]) if markov else hidden[:, 0]
        tokens, probs, logits_BD = [anchors], list[Tensor](), list[Tensor]()
        for k in range(self.config.num_draft_tokens):
            logits, embeds = base[:, k], None
            if markov is not None:
                embeds = markov.markov_w1(tokens[-1])
                latent, state = markov.step(embeds, hidden[:, k], state)
                logits = logits + markov.markov_w2(latent).float()
            if confidence is not None:
                logits_BD.append(confidence(hidden[:, k], embeds))
            token, drawn_from = (logits.argmax(-1), None) if choose is None else choose(k, logits)
            tokens.append(token)
            if drawn_from is not None:
                probs.append(drawn_from)
        return Proposal(
            torch.stack(tokens[1:], dim=1),
            torch.stack(probs, dim=1) if probs else None,
            torch.stack(logits_BD, dim=1) if logits_BD else None,
        )

    def embed_previous(self, previous: Tensor) -> Tensor | None:
        """`W1[x]` of the tokens before each slot [...] -> [..., r]; None without a Markov head."""
        if self.markov_head is None:
            return None
        # Sparse: a step reads few of the table's rows.
        return F.embedding(previous, self.markov_head.markov_w1.weight, sparse=True)
