"""Saves that reuse chunks of a base which other processes change meanwhile, one operation at a time, in any order.

The content of the store has two folders, "base" and "new". ``python tests/harness/interleaving_reuse.py --schedules
20000`` plays more random schedules than the tests do.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

import zarrckpt
from harness.interleaving import Agent, Exploration, Faults, Found, Played, is_document, play
from harness.internals import Store
from harness.one_at_a_time import ROOT, AskedStore, Broken, Content, Judge, Shelf, one_thread, running, save_id
from zarrckpt import StorageError
from zarrckpt._commit.stored_documents import parse_root_document

OPTIONS = zarrckpt.SaveOptions(max_chunk_bytes=2, reuse="on")
BASE, NEW, NEXT = 1, 2, 8
"""The numbers of the save that made the base, and of those that reuse it. Others save at the base's url."""

Code = Callable[[Store], str]


def state(number: int) -> dict[str, Any]:
    """Return two chunks, a value and a blob. The base and the new checkpoint differ in the second chunk and the value.

    All others have other bytes of equal sizes.
    """
    shared = BASE if number in (NEW, NEXT) else number
    return {"w": torch.tensor([shared, shared, number, number]).byte(), "step": number, "blob": b"%d" % shared}


def _at(store: Store, folder: str) -> AskedStore:
    assert isinstance(store, AskedStore)
    return store.at(folder)


def _ended(action: Callable[[], object], name: str) -> str:
    """Run an action and return its outcome."""
    try:
        action()
    except StorageError:
        return "failed"
    except zarrckpt.IncompleteSaveError:
        return "incomplete"
    except zarrckpt.CheckpointPinnedError:
        return "pinned"
    except (zarrckpt.CheckpointNotFoundError, zarrckpt.CheckpointExistsError, zarrckpt.CheckpointRemovedError):
        return "refused"
    return name


def save_with_base(store: Store, number: int = NEW) -> str:
    """Save to "new" and reuse chunks of "base"."""
    running.number = number
    new, base = _at(store, "new"), _at(store, "base")
    return _ended(lambda: zarrckpt.save(state(number), new, base=base, overwrite=True, options=OPTIONS), "saved")


def _save_at_base(store: Store, number: int) -> None:
    running.number = number
    zarrckpt.save(state(number), _at(store, "base"), overwrite=True, options=OPTIONS)


def _remove(store: Store) -> None:
    running.number = 5
    zarrckpt.remove(_at(store, "base"))


def overwrite(store: Store) -> str:
    """Replace the base."""
    return _ended(lambda: _save_at_base(store, 3), "overwritten")


def remove(store: Store) -> str:
    """Remove the base."""
    return _ended(lambda: _remove(store), "removed")


def save_again(store: Store) -> str:
    """Remove the base and save other bytes to the same keys."""

    def both() -> None:
        _remove(store)
        _save_at_base(store, 4)

    return _ended(both, "saved again")


def pin(store: Store) -> str:
    """Pin the base."""
    running.number = 6
    return _ended(lambda: zarrckpt.pin(_at(store, "base")), "pinned")


def recover(store: Store) -> str:
    """Delete leftovers in the base's folder, and finish its removal."""
    running.number = 7
    return _ended(lambda: zarrckpt.recover(_at(store, "base"), stopped=True), "recovered")


NO_FAULTS = Faults()
CHANGES: Sequence[tuple[Code, ...]] = [(save_again,), (overwrite,), (remove, recover), (remove, pin), (save_again, pin)]


def committed_base() -> Content:
    """Return the content with a committed base."""
    shelf = Shelf({})
    _save_at_base(shelf.store, BASE)
    return shelf.content


class ReuseJudge(Judge):
    """Checks both folders. Each committed checkpoint must have the bytes of its own save."""

    def committed(self, content: Content) -> str:
        for folder in ("base/", "new/"):
            stored = {key[len(folder) :]: data for key, data in content.items() if key.startswith(folder)}
            if ROOT in stored and (key := frozenset(stored.items())) not in self._known:
                self._known[key] = self._checked(stored)
        return ""

    @staticmethod
    def _checked(stored: Content) -> str:
        committed = parse_root_document(stored[ROOT], "").save_id
        (number,) = (number for number in range(10) if save_id(number) == committed)
        checkpoint, expected = zarrckpt.open(Shelf(stored).store), state(number)
        if not (report := checkpoint.verify()):
            raise Broken(f"save {number} is committed, but damaged: {report.damages}")
        found = checkpoint.read()["w"]
        right = np.array_equal(found, expected["w"].numpy()) and checkpoint["blob"] == expected["blob"]
        if not right or checkpoint["step"] != number:
            raise Broken(f"save {number} is committed with {found}, {checkpoint['blob']!r}")
        return committed

    def can_save(self, content: Content) -> None:
        """Check that the next save commits, with whatever is left of the base."""
        shelf = Shelf(content)
        if save_with_base(shelf.store, NEXT) != "saved":
            raise Broken("the next save did not commit")
        self.committed(shelf.content)


def explore_reuse(changes: Sequence[Code], *, faults: Faults = NO_FAULTS, most: int = 10**9) -> Found:
    """Explore every interleaving of a save with a base and of changes of this base, until ``most`` states are seen.

    Without faults the save must end with a checkpoint.
    """
    judge = ReuseJudge()
    agents = [Agent(code) for code in (save_with_base, *changes)]
    exploration = Exploration(agents, committed_base(), faults, is_document, None)

    def at_end(content: Content, ends: list[str]) -> None:
        if ends[0] != "saved" and not (faults.failures and ends[0] in ("failed", "incomplete")):
            raise Broken(f"the save ended with {ends[0]!r}")

    return exploration.run(judge.committed, at_end, most)


def play_reuse(seeds: Iterable[int]) -> Played:
    """Play random schedules of a save with a base and of changes to it: processes die, requests fail and repeat."""
    judge, played, base = ReuseJudge(), Played(), committed_base()
    for seed in seeds:
        codes = (save_with_base, *CHANGES[seed % len(CHANGES)])
        try:
            # A deletion that arrives again after a removal may delete an object of the next save at that url.
            content, ends, operations = play(seed, base, codes, 0, judge, repeated_deletes=0)
            judge.can_save(content)
        except AssertionError as err:
            raise Broken(f"seed {seed}: {err}") from err
        played.add(operations, ends)
    return played


def main() -> None:
    """Play more schedules, and explore more interruptions, than the tests do."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=10000)
    parser.add_argument("--states", type=int, default=200_000, help="maximum states of each exploration")
    args = parser.parse_args()
    logging.disable()
    with one_thread():
        began = time.monotonic()
        print(f"by chance: {play_reuse(range(args.schedules))}, {time.monotonic() - began:.0f} s", flush=True)
        for faults, changes in itertools.product((NO_FAULTS, Faults(1, 0, 0, 1)), CHANGES):
            began = time.monotonic()
            found = explore_reuse(changes, faults=faults, most=args.states)
            names = ", ".join(change.__name__ for change in changes)
            print(f"{names}, {faults}: {found}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
