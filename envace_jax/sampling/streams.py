"""The host's account of a sequence that is being decoded: what it may draw, what it has drawn."""

import numpy as np

from .params import Completion, SamplingParams
from .slots import Sampled


class Stream:
    """One sequence: `length` tokens so far, `budget` tokens to draw, `reason` None until it is finished."""

    def __init__(self, params: SamplingParams, length: int, budget: int):
        self.params, self.length, self.budget = params, length, budget
        self.drawn = 0
        self.reason: str | None = "length" if budget <= 0 else None
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def take(self, out: Sampled, row: int) -> None:
        count = int(out.counts[row])
        self.parts.append(tuple(x[row, :count].copy() for x in (out.tokens, out.logps, out.log_kept_mass)))
        self.drawn += count
        self.length += count
        if out.stopped[row]:
            self.reason = "stop"
        elif self.drawn >= self.budget:
            self.reason = "length"

    def completion(self) -> Completion:
        types = (np.int32, np.float32, np.float32)
        columns = [np.concatenate([np.zeros(0, t), *(p[i] for p in self.parts)]) for i, t in enumerate(types)]
        return Completion(*columns, finish_reason=self.reason)
