"""One load, from the committed checkpoint into the state in memory. Every rank of the group calls it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zarrckpt._commit.discovery import load_root_document
from zarrckpt._commit.stored_documents import parse_root_document
from zarrckpt._errors import LoadMismatchError, warn
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.root import Root
from zarrckpt._jobs import Progress, run_jobs
from zarrckpt._load.aliases import refuse_conflicts, separate_targets
from zarrckpt._load.fill import TensorReads, TensorTarget
from zarrckpt._load.match import Saved
from zarrckpt._load.object_match import Findings, ObjectMatch
from zarrckpt._load.recheck import ReadEntries
from zarrckpt._load.rename import Rename, renamed
from zarrckpt._load.shared_reads import Shares, plan_shares
from zarrckpt._options import LoadOptions, checked_options
from zarrckpt._plan.all_descriptions import AllDescriptions, Asked
from zarrckpt._plan.holders import wanted
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.rounds import Rounds, joined
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import LoadReport
from zarrckpt._state.local_state import listed
from zarrckpt._state.objects import optimizers_and_modules
from zarrckpt._state.optimizers import SavedTensor
from zarrckpt._state.tensors import torch_dtype
from zarrckpt._store import StoreSpec, Url


@dataclass(frozen=True)
class LoadRequest:
    """The checked arguments of ``load``."""

    spec: StoreSpec
    strict: bool
    keys: Sequence[str] | None
    allow_pickle: bool
    allow_cast: bool
    options: LoadOptions
    progress: Progress | None
    droppable: frozenset[str] = frozenset()
    """The keys of the state whose dicts are referenced only by the call, so that loaded values would be lost."""
    rename: Rename | None = None

    @classmethod
    def from_arguments(
        cls,
        url: Url | None,
        options: LoadOptions | None = None,
        *,
        strict: bool = True,
        keys: str | Iterable[str] | None = None,
        rename: Rename | None = None,
        storage_options: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        allow_cast: bool = False,
        progress: Progress | None = None,
    ) -> LoadRequest:
        """Check the arguments of :func:`zarrckpt.load`. Raises TypeError or ValueError with the argument's name."""
        options = checked_options(options, LoadOptions)
        spec = StoreSpec(url, storage_options, concurrency=options.concurrency)
        patterns = [keys] if isinstance(keys, str) else None if keys is None else list(keys)
        if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
            raise TypeError(f"rename must be a dict of name prefixes or a callable, got a {type(rename).__name__}")
        return cls(spec, strict, patterns, allow_pickle, allow_cast, options, progress, rename=rename)


def run_load(state: dict[str, Any], request: LoadRequest, ranks: Ranks) -> LoadReport:
    """Load into a state, in place. An error on one rank is raised on all."""
    began = time.monotonic()
    with joined(ranks, f"the load from {request.spec.url}", request.options.timeout) as rounds:
        load = _load_together(state, request, rounds)
    match = load.match
    return LoadReport(
        url=request.spec.url,
        save_id=load.catalog.root.save_id,
        loaded=tuple(match.loaded),
        missing=tuple(match.missing),
        unexpected=tuple(match.unexpected),
        nbytes=load.bytes_read,
        seconds=time.monotonic() - began,
        changed=load.changed,
    )


def _load_together(state: dict[str, Any], request: LoadRequest, rounds: Rounds) -> _Load:
    root = _root_of_all(request, rounds)
    load = _Load(state, request, root, rounds)
    asked, taken = rounds.merge("what they load", load.matched, load.check_all)
    shares = _shares(load, asked, rounds) if asked is not None else None
    rounds.merge("what they read", partial(load.read, shares, taken), lambda _: None, load.stop)
    # After all ranks have read, so that an error on one rank leaves the objects of all ranks unchanged.
    rounds.merge("their objects' load_state_dict", lambda: load.match.restore(state), lambda _: None)
    if request.options.check_after != "off":
        # In a separate round, because state_dict() may be a collective, which needs all ranks to have restored.
        rounds.merge("the comparison with what they read", load.check, lambda _: None)
    load.warn_of_dropped()
    return load


def _root_of_all(request: LoadRequest, rounds: Rounds) -> Root:
    """Return the root document that the coordinator reads. The other ranks parse its bytes and make no request."""
    read: list[Root] = []

    def read_document(_: object) -> bytes:
        document, root = load_root_document(request.spec.open())
        read.append(root)
        return bytes(document)

    document = rounds.merge("the root document", lambda: None, read_document)
    return read[0] if read else parse_root_document(document, request.spec.url)


def _shares(load: _Load, asked: Asked, rounds: Rounds) -> Shares:
    """Return this rank's part of the shared reads. Each rank plans from the descriptions of all targets."""
    packed = rounds.merge(
        "the descriptions of their targets",
        lambda: load.description.packed if rounds.rank in asked.senders else None,
        lambda found: [data for data in found if data is not None],
    )
    gathered = AllDescriptions.sent(packed, asked.given, rounds.members)
    limit = max(1, load.request.options.max_inflight_bytes // 4)
    shares = plan_shares((rounds.rank,), load.catalog.root.tensors, wanted(gathered), rounds.size, limit)
    return shares[rounds.rank]


class _Load:
    """One rank's part of a load."""

    def __init__(self, state: dict[str, Any], request: LoadRequest, root: Root, rounds: Rounds) -> None:
        self.request = request
        self._state = state
        self._rounds = rounds
        self.catalog = Catalog(request.spec, root)
        self._reads: TensorReads | None = None
        self._stopped = False
        self._read = ReadEntries(full=request.options.check_after == "full", allow_cast=request.allow_cast)
        self.bytes_read = 0
        self.changed: tuple[str, ...] = ()
        """The entries that the objects hold differently than they were read."""

    def matched(self) -> tuple[Findings, bytes]:
        """Match this rank's targets with the entries. Returns the findings and the digest of the targets."""
        request = self.request
        saved = saved_entries(self.catalog)
        if request.rename is not None:
            saved = renamed(saved, request.rename, optimizers_and_modules(self._state))
        self.match = ObjectMatch(
            saved,
            self._state,
            request.keys,
            strict=request.strict,
            allow_cast=request.allow_cast,
        )
        self._targets = self._separate_targets()
        if self._rounds.size == 1:
            return self.match.findings(), b""
        self.description = self.match.description()
        return self.match.findings(), self.description.digest

    def _separate_targets(self) -> list[TensorTarget]:
        """Return targets to fill that do not share memory. Raises KeyMismatchError if their contents conflict."""
        match, limit = self.match, self.request.options.max_inflight_bytes
        targets, conflicts = separate_targets(self.catalog, [*match.tensors()], limit)
        for optimizers in (False, True):
            if conflicts:
                match.make_private((name for group in conflicts for name in group), optimizers=optimizers)
                targets, conflicts = separate_targets(self.catalog, [*match.tensors()], limit)
        refuse_conflicts(conflicts)
        return targets

    def check_all(self, found: Sequence[tuple[Findings, bytes]]) -> tuple[Asked | None, np.ndarray[Any, Any]]:
        """Raise KeyMismatchError if an entry or pattern must have a target and no rank has one.

        Returns the ranks that send descriptions (None if ranks do not share reads), and a mask of the entries that
        ranks load in addition, see :meth:`ObjectMatch.take`.
        """
        taken = self.match.check_all([findings for findings, _ in found])
        if len(found) == 1 or not self.request.options.shares(self.catalog.store.is_local):
            return None, taken
        return Asked.by([digest for _, digest in found]), taken

    def read(self, shares: Shares | None, taken: np.ndarray[Any, Any]) -> None:
        """Read this rank's values and fill its tensors. ``taken`` is the mask that :meth:`check_all` returned."""
        catalog, match = self.catalog, self.match
        known = {*match.loaded}
        match.take(taken)
        # Added entries go into new tensors, which share no memory with other targets.
        targets = self._targets + [target for target in match.tensors() if target.name not in known]
        names = match.values()
        read = partial(catalog.read_object, allow_pickle=self.request.allow_pickle)
        # In parallel, because each blob is a request.
        values = run_jobs((partial(read, match.stored(fqn)) for fqn in names), catalog.store.max_concurrency)
        with catalog.explaining_damage():
            reads = self._reads = TensorReads(
                catalog,
                targets,
                self.request.options.max_inflight_bytes,
                self.request.progress,
                self._rounds.progressed,
            )
            if self._stopped:
                reads.stop()
            try:
                if shares:
                    reads.share(shares, self._rounds.pieces())
                reads.read()
            finally:
                self.bytes_read = reads.bytes_read
        found = dict(zip(names, values, strict=True))
        if self.request.options.check_after != "off":
            match.record(self._read, found)
        match.finish(found)

    def check(self) -> None:
        """Compare the state with the entries that were read.

        If strict, raises LoadMismatchError if an entry of a tensor, container, module or optimizer differs, or if an
        entry is missing in the state. Warns of other differences.
        """
        now = self.match.current_state(self._state)
        for optimizer in self.match.plain.optimizers:
            self._read.record_groups(optimizer)
        changed, gone = self._read.differences(now)
        self.changed = tuple(sorted([*changed, *gone]))
        own = [fqn for fqn in changed if not now.is_of_stateful(fqn)]
        faults = [f"{fqn!r} {changed[fqn]}" for fqn in own]
        faults += [f"{fqn!r} was read, but is missing in the state" for fqn in gone]
        if faults and self.request.strict:
            raise LoadMismatchError(
                f"{len(faults)} entries of {self.request.spec.url} were read, but the state does not hold them after "
                f"the load:{listed(faults)}\nCorrect load_state_dict() of these objects, or skip the entries with "
                "keys=[...]. strict=False makes this a warning. LoadOptions(check_after='off') skips the check"
            )
        others = [f"{fqn!r} {changed[fqn]}" for fqn in changed.keys() - {*own}]
        if faults or others:
            warn(
                f"{len(faults) + len(others)} entries of {self.request.spec.url} were read, but objects of the state "
                f"hold different contents after their load_state_dict():{listed([*faults, *sorted(others)])}"
            )
        for prefix, err in now.unreadable.items():
            warn(
                f"{prefix[:-1]!r} was loaded, but could not be checked: its state_dict() raised "
                f"{type(err).__name__}: {err}"
            )

    def warn_of_dropped(self) -> None:
        """Warn if values and new tensors were stored in a dict that is lost when the call returns."""
        for key in self.request.droppable:
            lost = [fqn for fqn, path in self.match.replaced() if path.keys[0] == key and len(path) > 1]
            if lost:
                warn(
                    f"{key!r} is a dict without other references, so the {len(lost)} values and new tensors that were "
                    f"stored in it are lost, for example {lost[:3]}. Pass the object itself (an optimizer, not its "
                    f"state_dict()), or keep the dict and pass it to load_state_dict() afterwards"
                )

    def stop(self) -> None:
        """Make :meth:`read` end soon, with an error. Called in a different thread."""
        self._stopped = True
        if self._reads is not None:
            self._reads.stop()


def saved_entries(catalog: Catalog) -> Saved:
    """Return the entries of a checkpoint in the form that :class:`Match` needs."""
    root = catalog.root
    entries = {
        fqn: SavedTensor(entry.grid.shape, torch_dtype(entry)) if isinstance(entry, ArrayNode) else None
        for fqn, entry in root.entries.items()
    }
    return Saved(entries, {fqn: root.state_path(fqn) for fqn in entries}, catalog.read_object)
