"""How the ranks of a call find each other: over the default group's store, before they are connected.

Names from counters would differ after one rank skipped a call, and names from members alone would meet what an earlier
call left behind. So who arrives writes a fresh token, and the coordinator (position 0) answers each token with a fresh
name, under which all of them connect.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zarrckpt._errors import CheckpointError, log
from zarrckpt._ranks.errors import MAX_TEXT, cleaned
from zarrckpt._ranks.links import Addresses, cloned, default_store, gloo_group

WARN_SECONDS = 30.0
"""Who is waited for longer than this is named in the log."""


_NAME = re.compile(r"zarrckpt/[0-9a-f]{32}")
"""The name of a mesh."""


@dataclass(frozen=True)
class Party:
    """The ranks of a call, by global number in the order of their group, as one of them sees them."""

    members: tuple[int, ...]
    position: int
    lane: str
    """Calls of the same ranks in different lanes go on side by side; in one lane they come one after the other."""
    call: str
    timeout: float

    def named(self, positions: Sequence[int]) -> str:
        return ranks_text([self.members[position] for position in positions])


def ranks_text(ranks: Sequence[int], most: int = 16) -> str:
    """'rank 3', 'ranks 1, 2'; of many, the first."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:most])) + more


@contextlib.contextmanager
def connected(party: Party, cancelled: Callable[[], bool]) -> Iterator[tuple[Any, Addresses]]:
    """A fresh gloo group of the party. Every member must call it; raises CheckpointError where one does not.

    The first connections are to be made within the block: later ones use the connection to the store that training
    uses, in short requests for what is there.
    """
    default = default_store()
    store = cloned(default)
    lobby = _Lobby(party, store, cancelled)
    with lobby.refusing(), _store_errors(party.call):
        addresses = Addresses(lobby.agreed_name(), store)
        group = gloo_group(addresses, party.position, len(party.members), lazy=True)
        lobby.complete(addresses.name)
    yield group, addresses
    addresses.store = default


class _Lobby:
    """Where the members of one party wait for each other."""

    def __init__(self, party: Party, store: Any, cancelled: Callable[[], bool]) -> None:
        self._party = party
        self._store = store
        self._cancelled = cancelled
        who = repr((party.members, party.lane))
        self._base = f"zarrckpt/{hashlib.sha256(who.encode()).hexdigest()[:16]}"
        self._token = uuid.uuid4().hex
        self._places = [f"{self._base}/{position}" for position in range(len(party.members))]
        self._answered = {self._token}
        self._name: str | None = None
        self._next_look = 0.0

    def agreed_name(self) -> str:
        """What the coordinator calls the mesh. Raises CheckpointError where some do not come."""
        self._store.set(self._places[self._party.position], self._token)
        arrivals = f"{self._base}/arrivals"
        known = self._store.add(arrivals, 1)
        mine = f"{self._base}/{self._token}"
        waits_for_all = self._party.position == 0
        self._until(
            lambda: self._store.check([mine]) or (waits_for_all and self._store.check(self._places)),
            arrivals,
            known,
            lambda: self._absent(self._places),
        )
        if self._store.check([mine]):
            answer = _shown_text(self._store.get(mine))
            self._store.delete_key(mine)
            if answer.startswith("!"):
                raise Refused(answer[1:])
            if not _NAME.fullmatch(answer):
                raise CheckpointError(
                    f"{self._party.call}: the process group's store names the connections {answer!r:.200}, expected "
                    "zarrckpt/ and 32 hexadecimal digits. No other process may reach that store, and all ranks need "
                    "the same version of zarrckpt"
                )
            name = answer
        else:
            name = f"zarrckpt/{uuid.uuid4().hex}"
            self._answer(name)
        self._name = name
        self._withdraw()
        return name

    def complete(self, name: str) -> None:
        """Wait until all have published their addresses. Nobody connects, or hangs up, before."""
        here = [f"{name}/at/{position}" for position in range(len(self._party.members))]
        done, failed, joined = f"{name}/complete", f"{name}/failed", f"{name}/joined"
        self._store.set(here[self._party.position], "")
        known = self._store.add(joined, 1)
        if known == len(here):
            self._store.set(done, "")

        def over() -> bool:
            if self._party.position == 0:
                self._answer_late(name)
            return bool(self._store.check([done]) or self._store.check([failed]))

        self._until(over, joined, known, lambda: self._absent(here))
        if not self._store.check([done]):
            raise Refused(_shown_text(self._store.get(failed)))
        self._store.delete_key(here[self._party.position])

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Whatever ends this rank's wait ends the others' too."""
        try:
            yield
        except Refused as err:
            self._withdraw()
            raise CheckpointError(str(err)) from None
        except BaseException as err:
            rank = self._party.members[self._party.position]
            own = isinstance(err, CheckpointError)
            said = f"{self._party.call}: rank {rank} was interrupted ({type(err).__name__})"
            said = str(err)[:MAX_TEXT] if own else said
            with contextlib.suppress(RuntimeError):
                self._answer("!" + said)
                if self._name is not None:
                    self._store.set(f"{self._name}/failed", said)
            self._withdraw()
            raise

    def _until(self, done: Callable[[], bool], counter: str, known: int, absent: Callable[[], list[int]]) -> None:
        """Wait until it is done, or nobody has come for the timeout. The last that came is the first to tell."""
        party = self._party
        # One after the other, so that one tells all, and not each of ten thousand looks for who is absent.
        patience = party.timeout + 0.2 * min(party.position, 10)
        began = since = time.monotonic()
        warned = False
        while not done():
            if self._cancelled():
                raise CheckpointError(f"{party.call}: rank {party.members[party.position]} has left")
            now = time.monotonic()
            if now - since > patience:
                count = self._store.add(counter, 0)
                if count == known and (missing := absent()):
                    raise CheckpointError(self._absent_text(missing))
                known, since = count, now
            if now - began > WARN_SECONDS and party.position == 0 and not warned:
                warned = True
                log.warning("%s: waiting for %s to come", party.call, party.named(absent()))
            time.sleep(min(0.5, max(0.002, (now - began) / 10)))

    def _absent_text(self, missing: list[int]) -> str:
        party = self._party
        return (
            f"{party.call}: {party.named(missing)} did not come within {party.timeout:g} s. All ranks must make this "
            "call; see what they do instead in their logs, or wait longer with a larger timeout in SaveOptions or "
            "LoadOptions"
        )

    def _absent(self, keys: list[str], first: int = 0) -> list[int]:
        """Which of the keys are not there, by position."""
        if self._store.check(keys):
            return []
        if len(keys) == 1:
            return [first]
        half = len(keys) // 2
        return self._absent(keys[:half], first) + self._absent(keys[half:], first + half)

    def _answer(self, answer: str) -> None:
        """Answer all tokens that were not answered yet."""
        absent = {*self._absent(self._places)}
        for position, place in enumerate(self._places):
            if position in absent or position == self._party.position:
                continue
            token = self._value(place)
            if token is not None and token not in self._answered:
                self._answered.add(token)
                self._store.set(f"{self._base}/{token}", answer)

    def _answer_late(self, name: str) -> None:
        """A token may be of a rank that is gone: the one that came in its place has written another since."""
        now = time.monotonic()
        if self._next_look == 0:
            self._next_look = now + 0.5
        elif now > self._next_look:
            self._answer(name)
            self._next_look = now + 1.0

    def _value(self, key: str) -> str | None:
        # A get of a key that was deleted just now would wait for it.
        if not self._store.check([key]):
            return None
        return _shown_text(self._store.get(key))

    def _withdraw(self) -> None:
        place = self._places[self._party.position]
        with contextlib.suppress(RuntimeError):
            if self._value(place) == self._token:
                self._store.delete_key(place)


def _shown_text(value: bytes) -> str:
    """Return a value of the store, which any process that reaches it may have put, as it may be shown."""
    return cleaned(str(value[: 4 * MAX_TEXT], "utf-8", "replace"))


class Refused(Exception):
    """Another rank has ended the wait. Never raised to users."""


@contextlib.contextmanager
def _store_errors(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as err:
        raise CheckpointError(
            f"{call}: the ranks could not be connected: {str(err).splitlines()[0]}. It takes rank 0's process, which "
            "holds the default process group's store, and a network between the hosts, whose interface "
            "GLOO_SOCKET_IFNAME names where it is not the one towards the store"
        ) from err
