"""What `spec check` says of a drafter directory, and what it knows of one."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..target.tensors import Stored
from .layouts import Layout

Severity = Literal["defect", "warning", "note"]
WORST_FIRST: tuple[Severity, ...] = ("defect", "warning", "note")
Engine = Literal["sglang", "vllm", "zlab", "deepspec"]
Reader = Literal["SGLang", "vLLM", "z-lab", "DeepSpec", "spec", "all"]
READERS: dict[Engine, Reader] = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "zlab": "z-lab",
    "deepspec": "DeepSpec",
}


@dataclass(frozen=True)
class Finding:
    """One thing that somebody who serves this drafter should know.

    A defect is served wrongly or not at all; a warning may be meant; a note is no fault.
    """

    severity: Severity
    what: str
    engine: Reader
    cure: str


@dataclass(frozen=True)
class Subject:
    """A directory as it lies there, however broken."""

    directory: Path
    data: dict[str, Any]  # config.json
    own: dict[str, Any]  # the same by native keys, dflash_config above the top level
    layout: Layout
    labelled_dspark: bool  # by its architectures
    tensors: dict[str, Stored] = field(default_factory=dict)  # by the name in the file
    broken: tuple[str, ...] = ()  # names of tensors with NaN or infinity
    refusal: str | None = None  # why config.json has no native form; then `own` says little

    @property
    def is_dspark(self) -> bool:
        """Whether it is DSpark by its label or by its keys."""
        return self.labelled_dspark or self.own.get("markov_rank") is not None

    def whole(self, key: str) -> int | None:
        """A whole number of the config; None where there is none."""
        value = self.own.get(key)
        return value if type(value) is int else None

    @property
    def layer_ids(self) -> list[int] | None:
        """`target_layer_ids` in native counting; None where they are no list of numbers."""
        ids = self.own.get("target_layer_ids")
        good = isinstance(ids, list) and ids and all(type(k) is int for k in ids)
        return ids if good else None


def defect(what: str, cure: str, engine: Reader = "all") -> Finding:
    return Finding("defect", what, engine, cure)


def warning(what: str, cure: str, engine: Reader = "all") -> Finding:
    return Finding("warning", what, engine, cure)


def note(what: str, cure: str, engine: Reader = "all") -> Finding:
    return Finding("note", what, engine, cure)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, each kind in the order given."""
    return sorted(findings, key=lambda finding: WORST_FIRST.index(finding.severity))


def has_defect(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "defect" for finding in findings)
