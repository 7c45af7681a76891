"""Train a tiny byte-level target in seconds: the model of tests, docs and `recipes/tiny.yaml`.

Qwen3 architecture, about 0.4 million parameters, its own HF fast tokenizer with a chat template,
saved the way any engine loads a model. The same seed gives the same weights on the same machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .grammar import Sample, Split, distinct_samples, samples
from .saving import atomic_directory, quiet_progress

NUM_BYTES = 256
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_RESERVED = 13  # free rows: one of them can serve a drafter as its mask token
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

STEPS = 340
BATCH_SIZE = 8
POOL = 2  # batches drawn together and sorted by length: less padding, yet mixed kinds
ADAM_LEARNING_RATE = 1e-2  # embedding and norms
MATRIX_LEARNING_RATE = 0.015  # spectral norm of an update of a matrix
MOMENTUM = 0.95
WARMUP_STEPS = 20
IGNORED = -100


def make_tiny_target(out_dir: str | Path, *, seed: int = 0, steps: int = STEPS) -> Path:
    """Train the tiny target and save it at `out_dir`; about 15 CPU-seconds on one thread.

    A directory that already holds a target is left as it is and returned.
    """
    directory = Path(out_dir)
    if (directory / "config.json").exists():
        return directory
    tokenizer = tiny_tokenizer()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_config())
        _train(model, seed=seed, steps=steps)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=[end], pad_token_id=pad)
    with atomic_directory(directory) as building, quiet_progress():
        model.eval().save_pretrained(building)
        tokenizer.save_pretrained(building)
    return directory


def tiny_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=NUM_BYTES + 3 + NUM_RESERVED,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=NUM_BYTES + 2,
        pad_token_id=NUM_BYTES,
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, with the byte's value as its id; then pad, start, end and reserved rows."""
    alphabet = _byte_alphabet()
    core = Tokenizer(BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    names = [PAD, START, END] + [f"<|reserved_{i}|>" for i in range(NUM_RESERVED)]
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def tiny_prompts(split: Split, *, seed: int = 0, limit: int = 64) -> list[list[dict[str, str]]]:
    """`limit` different message lists; train and held-out ones never share a request."""
    drawn = distinct_samples(split, seed=seed, limit=limit)
    return [[{"role": "user", "content": sample.request}] for sample in drawn]


def _byte_alphabet() -> list[str]:
    """The printable stand-in that byte-level tokenizers use for each byte, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(NUM_BYTES + i) for i, byte in enumerate(others)}
    return [stand_in[byte] for byte in range(NUM_BYTES)]


def _train(model: Qwen3ForCausalLM, *, seed: int, steps: int) -> None:
    rows = (_encode(sample) for sample in samples("train", seed=seed))
    batches = _batches(rows, random.Random(seed))
    embedding = model.model.embed_tokens.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.dim() < 2 or p is embedding]
    adam = torch.optim.Adam(others, betas=(0.9, 0.95), fused=True)
    momenta = [torch.zeros_like(p) for p in matrices]
    model.train()
    for step in range(steps):
        input_ids, labels = next(batches)
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        # Only answer positions reach the head: slice hidden states, which are narrower than logits.
        where = labels[:, 1:] != IGNORED
        logits = model.lm_head(hidden[:, :-1][where])
        loss = F.cross_entropy(logits, labels[:, 1:][where])
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = _schedule(step, steps)
        for group in adam.param_groups:
            group["lr"] = ADAM_LEARNING_RATE * factor
        adam.step()
        _update_matrices(matrices, momenta, MATRIX_LEARNING_RATE * factor)


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then linear to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, (steps - step) / max(1, steps - WARMUP_STEPS))


@torch.no_grad()
def _update_matrices(
    matrices: Sequence[Tensor], momenta: Sequence[Tensor], learning_rate: float
) -> None:
    """Muon: step along the orthogonalized momentum. Copying names, the hard part of the language,
    is learned in about a third of the steps that Adam needs."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(tuple(matrix.shape), []).append(i)
    for (rows, columns), group in by_shape.items():
        gradient = torch.stack([_gradient(matrices[i]) for i in group])
        for i, new in zip(group, gradient, strict=True):
            momenta[i].lerp_(new, 1 - MOMENTUM)
        momentum = torch.stack([momenta[i] for i in group])
        update = _orthogonalize(gradient.lerp(momentum, MOMENTUM))
        scale = learning_rate * max(1.0, rows / columns) ** 0.5
        for i, direction in zip(group, update, strict=True):
            matrices[i].sub_(direction, alpha=scale)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _orthogonalize(stack: Tensor, *, iterations: int = 5) -> Tensor:
    """Singular values of each matrix to about 1, by the quintic Newton-Schulz iteration of Muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = stack.shape[-2] <= stack.shape[-1]
    x = stack if wide else stack.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def _encode(sample: Sample) -> tuple[list[int], int]:
    """Ids of request and answer with its end token, and where the answer starts."""
    start, end = NUM_BYTES + 1, NUM_BYTES + 2
    prompt = [start, *f"user\n{sample.request}".encode(), end, *b"\n", start, *b"assistant\n"]
    return [*prompt, *sample.answer.encode(), end], len(prompt)


def _batches(
    rows: Iterator[tuple[list[int], int]], rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless right-padded batches: ids and labels [B, L]; a pool is sorted by length, then cut."""
    while True:
        pool = sorted(islice(rows, POOL * BATCH_SIZE), key=lambda row: len(row[0]))
        cuts = list(range(0, len(pool), BATCH_SIZE))
        for cut in rng.sample(cuts, len(cuts)):
            yield _pad(pool[cut : cut + BATCH_SIZE])


def _pad(rows: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    # Padding stands on the right of a causal model: no attention mask is needed.
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), length), NUM_BYTES)
    labels = torch.full((len(rows), length), IGNORED)
    for i, (ids, start) in enumerate(rows):
        input_ids[i, : len(ids)] = torch.tensor(ids)
        labels[i, start : len(ids)] = torch.tensor(ids[start:])
    return input_ids, labels


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums split over threads round differently: one thread gives one result."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
