"""Drafters of the tiny target that have learned something, and prompts for them; about 20
CPU-seconds each, made once a session."""

import json
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import trained_target

from spec.recipes.load import load_recipe
from spec.target.grammar import samples
from spec.train.loop import train

KINDS = ("dflash", "vanilla", "gated", "rnn")  # DFlash, and DSpark by its sequential head
DSPARK = (
    *("draft.algorithm=dspark", "draft.block_size=7", "draft.markov_rank=64"),
    *("loss.ce=1", "loss.l1=0"),
)
SHORT = (
    *("data.max_prompts=400", "train.steps=80", "train.eval_every=80", "train.save_every=80"),
    *("eval.prompts=4", "eval.final_prompts=4", "eval.baselines=false"),
)


@cache
def _held() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="spec-drafters-")  # goes when the session ends


def folder() -> Path:
    """Where they lie; the tests of a session share them and change copies."""
    return Path(_held().name)


@cache
def target_directory() -> Path:
    """The tiny target, saved."""
    path = folder() / "target"
    target = trained_target.trained_target()
    target.model.save_pretrained(path)
    target.require_tokenizer().save_pretrained(path)
    return path


@cache
def trained_draft(kind: str) -> Path:
    """The run's `draft` directory; seven drafted tokens a round in each kind."""
    heads = () if kind == "dflash" else (*DSPARK, f"draft.markov_head_type={kind}")
    out = folder() / kind
    paths = (f"out={out}", "target.make=null", f"target.path={target_directory()}")
    train(load_recipe("tiny", [*paths, *SHORT, *heads]), resume=False)
    return out / "draft"


@cache
def prompt_file() -> Path:
    """Sixteen held-out prompts."""
    path = folder() / "prompts.jsonl"
    asked = islice(samples("heldout", seed=3), 16)
    path.write_text("".join(json.dumps({"turns": [each.request]}) + "\n" for each in asked))
    return path
