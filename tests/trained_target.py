"""A target that has learned something, prompts for it and its plain answers; made once a session.

The tiny target of the docs (about 15 CPU-seconds); the prompts include one that is copied from.
"""

import itertools
from functools import cache
from tempfile import TemporaryDirectory

from spec.target.generate import generate
from spec.target.grammar import samples
from spec.target.model import Target
from spec.target.tiny import make_tiny_target

NEW_TOKENS = 128


@cache
def trained_target() -> Target:
    with TemporaryDirectory() as folder:
        return Target.load(make_tiny_target(f"{folder}/tiny"))


@cache
def prompts() -> list[list[int]]:
    """61 requests of the target's kind, a list of names with its copy begun, and two repeats."""
    tokenizer = trained_target().require_tokenizer()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": sample.request}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for sample in itertools.islice(samples("heldout", seed=3), 61)
    ]
    names = "alpha_one, beta_two, gamma_three, delta_four\n"
    texts.insert(5, names * 3 + names[:12])
    texts.insert(9, texts[0])
    texts.append(texts[0])
    return [list(tokenizer(str(text), add_special_tokens=False).input_ids) for text in texts]


@cache
def plain(first: int | None = None) -> list[list[int]]:
    """The answers to the first so many prompts, one at a time."""
    some = prompts()[:first]
    results = generate(trained_target(), some, max_new_tokens=NEW_TOKENS, batch_size=1)
    return [r.output_ids for r in sorted(results, key=lambda r: r.index)]
