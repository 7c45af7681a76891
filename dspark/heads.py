"""The sequential heads: what the token drafted before adds to a slot's logits, and how likely the
slot survives.

A Markov head adds `W2 u` to a slot's logits. The latent u [r] is made of the token drafted before,
e = W1[x], of the slot's hidden state h and, for the rnn, of a state s that starts at 0:
    vanilla  u = e
    gated    u = sigmoid(G [h; e]) * e
    rnn      (g, c, o) = J [s; e; h], g' = sigmoid(g), next s = g' s + (1 - g') tanh(c), u = tanh(o)
Only W2 knows the vocabulary; the loss multiplies by it tile by tile. DSpark (2026), the section on
semi-autoregressive generation.

Shapes: A blocks, D drafted slots, H hidden, r rank, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DSparkConfig, MarkovHeadType


class MarkovHead(nn.Module):
    """The vanilla head, and what all of them share."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.vocab_size, bias=False)

    @torch.no_grad()
    def initialize(self) -> None:
        """W1 wide and W2 zero: the bias starts at nothing and learns fast.

        The bias is their product: with both small, each one's gradient is small as well.
        """
        nn.init.normal_(self.markov_w1.weight)
        nn.init.zeros_(self.markov_w2.weight)

    @torch.no_grad()
    def describe_tokens(self, embedding: Tensor) -> None:
        """Start W1 from the target's embedding [V, H]: its principal directions, unit variance.

        Tokens that are alike to the target then begin with alike biases, those that are rare in the
        data as well.
        """
        centred = embedding.float() - embedding.float().mean(0)
        directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, : self.rank]
        rows = centred @ directions
        width = rows.shape[1]  # a rank above the embedding's width leaves the rest random
        self.markov_w1.weight[:, :width] = rows / rows.std(0).clamp_min(1e-6)

    def start(self, like: Tensor) -> Tensor:
        """The state before a block's first slot, [..., r] for hidden states [..., H]."""
        return like.new_zeros(*like.shape[:-1], self.rank)

    def step(self, embeds: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot while decoding: embeddings of the tokens before [B, r], hidden states [B, H]
        and the state [B, r] -> latents [B, r] and the next state."""
        return self.latents(embeds[:, None], hidden[:, None])[:, 0], state

    def latents(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """All slots of blocks whose tokens are known: [A, D, r] and [A, D, H] -> [A, D, r]."""
        return embeds


class GatedMarkovHead(MarkovHead):
    """The hidden state decides how much of each channel passes."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)

    def latents(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embeds], dim=-1))) * embeds


class RNNHead(MarkovHead):
    """A state carries the block's earlier tokens along."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)

    @torch.no_grad()
    def initialize(self) -> None:
        """Starts as the vanilla head, but for the tanh: the output reads the token before."""
        super().initialize()
        self.joint_proj.weight[2 * self.rank :, self.rank : 2 * self.rank] += torch.eye(self.rank)

    def step(self, embeds: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self._advance(self._inputs(embeds, hidden), state)

    def latents(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        inputs, state = self._inputs(embeds, hidden), self.start(hidden[:, 0])
        latents: list[Tensor] = []
        for inputs_Ar in inputs.unbind(1):
            latent, state = self._advance(inputs_Ar, state)
            latents.append(latent)
        return torch.stack(latents, dim=1)

    def _inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The part of `J z` that does not wait for the state, [..., 3r]."""
        weight = self.joint_proj.weight[:, self.rank :]
        return F.linear(torch.cat([embeds, hidden], dim=-1), weight, self.joint_proj.bias)

    def _advance(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        z = inputs + F.linear(state, self.joint_proj.weight[:, : self.rank])
        gate, candidate, output = z.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """`w [h_k (; e)] + b`, the logit of slot k surviving once the slots before it have."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, embeds: Tensor | None) -> Tensor:
        """Hidden states [..., H], embeddings of the tokens before [..., r] -> logits [...]."""
        if self.with_markov:
            assert embeds is not None
            hidden = torch.cat([hidden, embeds], dim=-1)
        return self.proj(hidden)[..., 0].float()


MARKOV_HEADS: dict[MarkovHeadType, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RNNHead,
}
