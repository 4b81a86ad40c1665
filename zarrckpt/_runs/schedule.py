"""``StepSequence``: the steps of a training loop, and which of them to save. No I/O, no torch."""

from __future__ import annotations


class StepSequence:
    """The steps that a training loop passes to its manager. They ascend, and a failed one may be passed again."""

    def __init__(self, save_every: int | None) -> None:
        self._save_every = save_every
        self.last = -1
        """The greatest step that was saved or passed to :meth:`begin`."""
        self._before = -1
        """The value of ``last`` before the current step."""
        self._done = -1
        """The step of the last :meth:`end`."""

    def begin(self, step: int) -> None:
        """Begin a step. Raises ValueError if it is not greater than the last one, unless that has not ended."""
        is_repeated = step == self.last and self.last > self._done
        if not is_repeated:
            _refuse_below(self.last + 1, step)
            self._before, self.last = self.last, step

    def is_due(self, step: int) -> bool:
        """Whether a multiple of ``save_every`` was reached since the step before."""
        every = self._save_every
        return every is not None and step // every > max(self._before, 0) // every

    def end(self, step: int) -> None:
        """End a step that needs no other attempt."""
        self._done = step

    def note_save(self, step: int) -> None:
        """Record a save. Steps before it are refused."""
        self.last = max(step, self.last)

    def restart(self, step: int | None) -> None:
        """Continue after a restored step, or anew for None."""
        self.last = self._before = self._done = -1 if step is None else step

    def refuse_earlier(self, step: int) -> None:
        """Raise ValueError if a step is less than the last one."""
        _refuse_below(self.last, step)


def _refuse_below(minimum: int, step: int) -> None:
    if step < max(minimum, 0):
        raise ValueError(
            f"step must be at least {max(minimum, 0)}, got {step}, because steps must ascend. To return to an earlier "
            "step: restore(state, step=..., rewind=True)"
        )
