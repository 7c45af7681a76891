"""How far answering has come: counts, and a line about them every few seconds."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .rows import Row

PROGRESS_SECONDS = 5.0


@dataclass
class AnswerProgress:
    """Counts of a call of `answer`, and a line about them now and then."""

    num_wanted: int
    started: float
    say: Callable[[str], None]
    num_rows: int = 0
    num_tokens: int = 0
    num_generated: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    last: float = 0.0

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def add(self, row: Row, finish_reason: str) -> None:
        self.num_rows += 1
        self.num_tokens += len(row.input_ids)
        self.num_generated += row.num_supervised
        self.finish_reasons[finish_reason] += 1
        if self.seconds - self.last >= PROGRESS_SECONDS:
            self.report()

    def report(self) -> None:
        self.last = self.seconds
        left = self.seconds / max(self.num_rows, 1) * (self.num_wanted - self.num_rows)
        self.say(
            f"answers {self.num_rows}/{self.num_wanted}, {self.num_generated} tokens, "
            f"{self.num_generated / self.seconds:.0f} tokens/s, about {left:.0f} s left"
        )


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
