"""The rendezvous of the ranks of a call, over the default group's store, before they are connected.

Each rank that arrives writes a new token. The coordinator (position 0) answers each token with the same new name, under
which all ranks connect. Names from counters would differ after one rank skipped a call. Names from the members only
would find the keys of an earlier call.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from zarrckpt._errors import CheckpointError, log
from zarrckpt._ranks import call_group as call_groups
from zarrckpt._ranks.call_group import ALONE, CallGroup
from zarrckpt._ranks.errors import MAX_TEXT, escape_text
from zarrckpt._ranks.links import Addresses, clone_store, create_gloo_group, default_store

_NAME = re.compile(r"zarrckpt/[0-9a-f]{32}")
"""The name of a mesh."""


@contextlib.contextmanager
def connect_group(call_group: CallGroup, cancelled: Callable[[], bool]) -> Iterator[tuple[Any, Addresses]]:
    """Yield a new gloo group of the ranks of a call. Every member calls it. A missing one raises CheckpointError.

    The first connections must be made within the block. Later ones use the connection to the store that training uses,
    with short requests for existing keys.
    """
    default = default_store()
    store = clone_store(default)
    rendezvous = _Rendezvous(call_group, store, cancelled)
    with rendezvous.refusing(), _store_errors(call_group.call):
        addresses = Addresses(rendezvous.agreed_name(), store)
        group = create_gloo_group(addresses, call_group.position, len(call_group.members), lazy=True)
        rendezvous.complete(addresses.name)
    yield group, addresses
    addresses.store = default


class _Rendezvous:
    """The wait of the ranks of one call for each other."""

    def __init__(self, call_group: CallGroup, store: Any, cancelled: Callable[[], bool]) -> None:
        self._call_group = call_group
        self._store = store
        self._cancelled = cancelled
        who = repr((call_group.members, call_group.queue))
        self._base = f"zarrckpt/{hashlib.sha256(who.encode()).hexdigest()[:16]}"
        self._token = uuid.uuid4().hex
        self._token_keys = [f"{self._base}/{position}" for position in range(len(call_group.members))]
        self._answered = {self._token}
        self._name: str | None = None
        self._next_look = 0.0

    def agreed_name(self) -> str:
        """Return the coordinator's name for the mesh. Raises CheckpointError if ranks are missing."""
        self._store.set(self._token_keys[self._call_group.position], self._token)
        arrivals = f"{self._base}/arrivals"
        known = self._store.add(arrivals, 1)
        mine = f"{self._base}/{self._token}"
        waits_for_all = self._call_group.position == 0
        self._until(
            lambda: self._store.check([mine]) or (waits_for_all and self._store.check(self._token_keys)),
            arrivals,
            known,
            lambda: self._absent(self._token_keys),
        )
        if self._store.check([mine]):
            answer = _shown_text(self._store.get(mine))
            self._store.delete_key(mine)
            if answer.startswith("!"):
                raise Refused(answer[1:])
            if not _NAME.fullmatch(answer):
                raise CheckpointError(
                    f"{self._call_group.call}: the process group's store has the name {answer!r:.200} for the "
                    "connections, expected zarrckpt/ and 32 hexadecimal digits. No other process may access it, and "
                    "all ranks need the same version of zarrckpt"
                )
            name = answer
        else:
            name = f"zarrckpt/{uuid.uuid4().hex}"
            self._answer(name)
        self._name = name
        self._withdraw()
        return name

    def complete(self, name: str) -> None:
        """Wait until all ranks have published their addresses. No rank connects or leaves before."""
        here = [f"{name}/at/{position}" for position in range(len(self._call_group.members))]
        done, failed, joined = f"{name}/complete", f"{name}/failed", f"{name}/joined"
        self._store.set(here[self._call_group.position], "")
        known = self._store.add(joined, 1)
        if known == len(here):
            self._store.set(done, "")

        def over() -> bool:
            if self._call_group.position == 0:
                self._answer_late(name)
            return bool(self._store.check([done]) or self._store.check([failed]))

        self._until(over, joined, known, lambda: self._absent(here))
        if not self._store.check([done]):
            raise Refused(_shown_text(self._store.get(failed)))
        self._store.delete_key(here[self._call_group.position])

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """End the wait of the other ranks if this rank's wait ends with an error."""
        try:
            yield
        except Refused as err:
            self._withdraw()
            raise CheckpointError(str(err)) from None
        except BaseException as err:
            rank = self._call_group.rank
            own = isinstance(err, CheckpointError)
            text = f"{self._call_group.call}: rank {rank} was interrupted ({type(err).__name__})"
            text = str(err)[:MAX_TEXT] if own else text
            with contextlib.suppress(RuntimeError):
                self._answer("!" + text)
                if self._name is not None:
                    self._store.set(f"{self._name}/failed", text)
            self._withdraw()
            raise

    def _until(self, done: Callable[[], bool], counter: str, known: int, absent: Callable[[], list[int]]) -> None:
        """Wait until ``done``. Raises CheckpointError if no rank arrived within the timeout."""
        call_group = self._call_group
        # The timeouts are staggered, so that one rank finds the missing ranks for all, instead of ten thousand.
        patience = call_group.timeout + 0.2 * min(call_group.position, 10)
        began = since = time.monotonic()
        warned = False
        while not done():
            if self._cancelled():
                raise CheckpointError(f"{call_group.call}: rank {call_group.rank} has left")
            now = time.monotonic()
            if now - since > patience:
                count = self._store.add(counter, 0)
                if count == known and (missing := absent()):
                    raise CheckpointError(self._absent_text(missing))
                known, since = count, now
            if now - began > call_groups.WARN_SECONDS and call_group.position == 0 and not warned:
                warned = True
                missing_ranks = call_group.format_positions(absent())
                log.warning("%s: waiting for %s to make this call. %s", call_group.call, missing_ranks, ALONE)
            time.sleep(min(0.5, max(0.002, (now - began) / 10)))

    def _absent_text(self, missing: list[int]) -> str:
        call_group = self._call_group
        return (
            f"{call_group.call}: {call_group.format_positions(missing)} did not make this call within "
            f"{call_group.timeout:g} s. All ranks must make it. {ALONE}. See the logs of these ranks, or set a larger "
            "timeout in SaveOptions or LoadOptions"
        )

    def _absent(self, keys: list[str], first: int = 0) -> list[int]:
        """Return the positions of missing keys."""
        if self._store.check(keys):
            return []
        if len(keys) == 1:
            return [first]
        half = len(keys) // 2
        return self._absent(keys[:half], first) + self._absent(keys[half:], first + half)

    def _answer(self, answer: str) -> None:
        """Answer all tokens that have no answer yet."""
        absent = {*self._absent(self._token_keys)}
        for position, key in enumerate(self._token_keys):
            if position in absent or position == self._call_group.position:
                continue
            token = self._value(key)
            if token is not None and token not in self._answered:
                self._answered.add(token)
                self._store.set(f"{self._base}/{token}", answer)

    def _answer_late(self, name: str) -> None:
        """Answer new tokens from time to time, because a restarted rank replaces the token of its predecessor."""
        now = time.monotonic()
        if self._next_look == 0:
            self._next_look = now + 0.5
        elif now > self._next_look:
            self._answer(name)
            self._next_look = now + 1.0

    def _value(self, key: str) -> str | None:
        # Check first, because a get of a deleted key would wait for it.
        if not self._store.check([key]):
            return None
        return _shown_text(self._store.get(key))

    def _withdraw(self) -> None:
        key = self._token_keys[self._call_group.position]
        with contextlib.suppress(RuntimeError):
            if self._value(key) == self._token:
                self._store.delete_key(key)


def _shown_text(value: bytes) -> str:
    """Return a value of the store as a text for display, because any process with access can have written it."""
    return escape_text(str(value[: 4 * MAX_TEXT], "utf-8", "replace"))


class Refused(Exception):
    """Another rank ended the wait. Never raised to users."""


@contextlib.contextmanager
def _store_errors(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as err:
        raise CheckpointError(
            f"{call}: the ranks could not be connected: {str(err).splitlines()[0]}. Check that rank 0's process runs, "
            "because it has the default process group's store, and that the hosts reach each other. If they are not "
            "in the network of the store, set GLOO_SOCKET_IFNAME to the interface"
        ) from err
