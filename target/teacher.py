"""What a position whose next token was generated leaves for soft labels, [H].

"expected": the expected head row `softmax(logits) @ head`. "last": the last hidden state (the final
norm's output), from which the head gives the logits.
"""

from typing import Literal

Teacher = Literal["expected", "last"]
