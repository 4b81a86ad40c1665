"""How often a failed request is repeated, and when: ``retry_config`` dealt between this package and obstore.

obstore's errors do not tell a busy server from a request that it will never like, but its own repeating does. So the
first attempts fail at once: whoever counts requests hears of it, and the pause before the next one is ours. What is
left of ``max_retries`` then goes to obstore, which repeats what can succeed and gives up at once on the rest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_QUICK = 3


@dataclass(frozen=True)
class Retries:
    """``retry_config`` in numbers; times in seconds."""

    most: int
    timeout: float
    first_pause: float
    longest_pause: float
    base: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Retries:
        """From the complete configuration that an obstore client tells."""
        pauses = config["backoff"]
        first, longest = pauses["init_backoff"].total_seconds(), pauses["max_backoff"].total_seconds()
        return cls(config["max_retries"], config["retry_timeout"].total_seconds(), first, longest, pauses["base"])

    @property
    def quick(self) -> int:
        """Attempts that fail at once: at least one."""
        return max(1, min(_QUICK, self.most))

    @property
    def left(self) -> int:
        """What obstore may repeat in the attempt after those; negative: there is none."""
        return self.most - self.quick

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each further attempt, with full jitter; ends where there is to be none."""
        deadline = time.monotonic() + self.timeout
        for number in range(min(self.quick, self.most)):
            if time.monotonic() > deadline:
                return
            yield random.uniform(0, min(self.longest_pause, self.first_pause * self.base**number))
