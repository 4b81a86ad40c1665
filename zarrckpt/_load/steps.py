"""One load, from the committed checkpoint into the state in memory. Every rank of the group calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zarrckpt._commit.discovery import load_root_document
from zarrckpt._commit.stored_documents import parse_root_document
from zarrckpt._errors import LoadMismatchError, warn
from zarrckpt._events import EventSender
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.root import Root
from zarrckpt._jobs import Progress, run_jobs
from zarrckpt._load.aliases import refuse_conflicts, separate_targets
from zarrckpt._load.coverage import Findings, Mask, check_coverage, find_coverage, names_in
from zarrckpt._load.fill import TensorReads, TensorTarget
from zarrckpt._load.object_match import ObjectMatch
from zarrckpt._load.recheck import ReadEntries
from zarrckpt._load.rename import Rename, check_rename, rename_entries
from zarrckpt._load.shared_reads import Shares, plan_shares
from zarrckpt._options import LoadOptions, checked_options
from zarrckpt._plan.all_descriptions import AllDescriptions, DescriptionRequest
from zarrckpt._plan.description import Description
from zarrckpt._plan.global_state import gather_boxes
from zarrckpt._ranks.calls import call_on_all, call_on_coordinator
from zarrckpt._ranks.group import Ranks, global_rank
from zarrckpt._ranks.rounds import Rounds, open_rounds
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import LoadReport, count_text
from zarrckpt._state.local_state import format_lines
from zarrckpt._state.objects import convert_for_check, optimizers_and_modules
from zarrckpt._state.saved_entries import SavedEntries, SavedTensor
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
    rename: Rename | None
    unreferenced: frozenset[str]
    """The keys of the state whose dicts only the call references, so that values loaded into them are lost."""
    step: int | None = None
    """The step in a run that is loaded."""

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
        unreferenced: frozenset[str] = frozenset(),
    ) -> LoadRequest:
        """Check the arguments of :func:`zarrckpt.load`. Raises TypeError or ValueError with the argument's name.

        ``url`` is None if the caller chooses the checkpoint later. ``unreferenced`` is described at the field.
        """
        options = checked_options(options, LoadOptions)
        spec = StoreSpec(url, storage_options, concurrency=options.concurrency)
        if isinstance(keys, str):
            keys = [keys]
        patterns = None if keys is None else list(keys)
        check_rename(rename)
        return cls(spec, strict, patterns, allow_pickle, allow_cast, options, progress, rename, unreferenced)


def load_on_ranks(state: dict[str, Any], request: LoadRequest, ranks: Ranks) -> LoadReport:
    """Load into a state, in place. An error on one rank is raised on all."""
    events = EventSender.begin(request.options.on_event, "load", request.spec.url, global_rank(), request.step)
    with (
        events.sending_failure(),
        open_rounds(ranks, f"the load from {request.spec.url}", request.options.timeout) as rounds,
    ):
        request.spec.open().on_repeat = events.send_repeat
        root = _read_root(request, rounds)
        load = _RankLoad(state, request, root, rounds)
        description_request, accepted = rounds.merge(
            "what they load", on_each_rank=load.match_targets, on_coordinator=load.check_all
        )
        shares = load.plan_own_shares(description_request) if description_request is not None else None
        call_on_all(rounds, "what they read", lambda: load.read(shares, accepted), load.stop)
        # After all ranks have read, so that an error on one rank leaves the objects of all ranks unchanged.
        call_on_all(rounds, "their objects' load_state_dict", load.restore)
        if request.options.check_after != "off":
            # In a separate round, because state_dict() may be a collective, which needs all ranks to have restored.
            call_on_all(rounds, "the comparison with what they read", load.check)
        load.warn_of_lost_values()
        load.warn_of_unset_buffers()
    state_match = load.object_match.state_match
    report = LoadReport(
        url=request.spec.url,
        save_id=load.catalog.root.save_id,
        loaded=tuple(state_match.loaded),
        missing=tuple(state_match.missing),
        unexpected=tuple(state_match.unexpected),
        nbytes=load.bytes_read,
        seconds=events.seconds,
        changed=load.changed,
    )
    events.send_loaded(report.nbytes, report, is_coordinator=rounds.rank == 0)
    return report


def _read_root(request: LoadRequest, rounds: Rounds) -> Root:
    """Return the root document that the coordinator reads. The other ranks parse its bytes and make no request."""
    parsed: Root | None = None

    def read_document() -> bytes:
        nonlocal parsed
        document, parsed = load_root_document(request.spec.open())
        return bytes(document)

    document = call_on_coordinator(rounds, "the root document", read_document)
    return parsed or parse_root_document(document, request.spec.url)


class _RankLoad:
    """The steps of one load on one rank."""

    def __init__(self, state: dict[str, Any], request: LoadRequest, root: Root, rounds: Rounds) -> None:
        self._request = request
        self._state = state
        self._rounds = rounds
        self.catalog = Catalog(request.spec, root)
        self.object_match: ObjectMatch
        """The targets and their entries, from :meth:`match_targets` on, like the next two."""
        self._tensors: list[TensorTarget]
        self._description: Description
        self._tensor_reads: TensorReads | None = None
        self._stopped = False
        self._read_entries = ReadEntries(full=request.options.check_after == "full", allow_cast=request.allow_cast)
        self.bytes_read = 0
        self.changed: tuple[str, ...] = ()
        """Names of the entries whose contents in the state differ from the loaded ones."""

    def match_targets(self) -> tuple[Findings, bytes]:
        """Match this rank's targets with the entries. Returns the findings and the digest of the targets."""
        request = self._request
        saved = _saved_entries(self.catalog)
        if request.rename is not None:
            saved = rename_entries(saved, request.rename, optimizers_and_modules(self._state))
        self.object_match = ObjectMatch(
            saved, self._state, request.keys, strict=request.strict, allow_cast=request.allow_cast
        )
        self._tensors = self._separate_tensors()
        if self._rounds.size == 1:
            return find_coverage(self.object_match), b""
        self._description = self.object_match.description()
        return find_coverage(self.object_match), self._description.digest

    def _separate_tensors(self) -> list[TensorTarget]:
        """Return tensors to fill that do not share memory. Raises KeyMismatchError if their contents conflict."""
        object_match, limit = self.object_match, self._request.options.max_inflight_bytes
        tensors, conflicts = separate_targets(self.catalog, [*object_match.tensors()], limit)
        # Objects get their tensors by load_state_dict, so tensors of Stateful objects can be replaced by new ones that
        # share no memory. Tensors of optimizers are replaced only if that does not suffice.
        for optimizers in (False, True):
            if conflicts:
                object_match.replace_by_new_tensors(
                    (name for group in conflicts for name in group), optimizers=optimizers
                )
                tensors, conflicts = separate_targets(self.catalog, [*object_match.tensors()], limit)
        refuse_conflicts(conflicts)
        return tensors

    def check_all(self, found: Sequence[tuple[Findings, bytes]]) -> tuple[DescriptionRequest | None, Mask]:
        """Raise KeyMismatchError if an entry or pattern must have a target and no rank has one.

        Returns the ranks that send descriptions (None if ranks do not share reads), and the accepted offers, see
        :func:`check_coverage`. Called on the coordinator.
        """
        accepted = check_coverage(self.object_match, [findings for findings, _ in found], strict=self._request.strict)
        if len(found) == 1 or not self._request.options.shares_reads(is_local=self.catalog.store.is_local):
            return None, accepted
        return DescriptionRequest.from_digests([digest for _, digest in found]), accepted

    def plan_own_shares(self, request: DescriptionRequest) -> Shares:
        """Return this rank's part of the shared reads. Each rank plans from the descriptions of all targets."""
        rounds, description = self._rounds, self._description
        packed = rounds.merge(
            "the descriptions of their targets",
            on_each_rank=lambda: description.packed if rounds.rank in request.senders else None,
            on_coordinator=lambda found: [data for data in found if data is not None],
        )
        boxes = gather_boxes(AllDescriptions.from_packed(packed, request.numbers, rounds.members))
        limit, nodes = max(1, self._request.options.max_inflight_bytes // 4), self.catalog.root.tensors
        self.catalog.refuse_too_many_chunks(*(nodes[fqn] for fqn in boxes))
        return plan_shares((rounds.rank,), nodes, boxes, rounds.size, limit)[rounds.rank]

    def read(self, shares: Shares | None, accepted: Mask) -> None:
        """Read this rank's values and fill its tensors. ``accepted`` are the accepted offers of all ranks."""
        catalog, options = self.catalog, self._request.options
        object_match, state_match = self.object_match, self.object_match.state_match
        matched = {*state_match.loaded}
        state_match.add_offered(names_in(object_match, accepted))
        # Offered entries go into new tensors, which share no memory with other targets.
        tensors = self._tensors + [target for target in object_match.tensors() if target.name not in matched]
        names = state_match.value_names()
        read = partial(catalog.read_non_tensor, allow_pickle=self._request.allow_pickle)
        # In parallel, because each blob is a request.
        jobs = (partial(read, object_match.saved.stored_name(name)) for name in names)
        values = dict(zip(names, run_jobs(jobs, catalog.store.max_concurrency), strict=True))
        with catalog.explaining_damage():
            reads = self._tensor_reads = TensorReads(
                catalog, tensors, options.max_inflight_bytes, self._request.progress, self._rounds.report_alive
            )
            if self._stopped:
                reads.stop()
            try:
                if shares:
                    reads.share(shares, self._rounds.channel())
                reads.read()
            finally:
                self.bytes_read = reads.bytes_read
        if options.check_after != "off":
            object_match.record(self._read_entries, values, catalog)
        state_match.finish({name: object_match.saved.rename_parameters(name, value) for name, value in values.items()})

    def stop(self) -> None:
        """Make :meth:`read` end soon, with an error. Called in a different thread."""
        self._stopped = True
        if self._tensor_reads is not None:
            self._tensor_reads.stop()

    def restore(self) -> None:
        """Pass the loaded state dicts to the objects of the state."""
        self.object_match.restore(self._state)

    def check(self) -> None:
        """Compare the state with the entries that were read.

        If strict, raises LoadMismatchError if an entry of a tensor, container, module or optimizer differs, or if an
        entry is missing in the state. Warns of other differences, except those of modules that converted entries of
        another version.
        """
        plain = self.object_match.plain
        now = convert_for_check(self._state, plain, self.object_match.per_rank_sources.choose_rank)
        for optimizer in plain.optimizers:
            self._read_entries.record_groups(optimizer)
        changed, gone = self._read_entries.differences(now)
        self.changed = tuple(sorted([*changed, *gone]))
        is_converted = self.object_match.state_match.is_converted
        changed = {fqn: change for fqn, change in changed.items() if not is_converted(fqn)}
        # A Stateful may change what it loads, so its changes are only warned of.
        of_statefuls = {fqn for fqn in changed if now.is_of_stateful(fqn)}
        faults = [f"{fqn!r} {changed[fqn]}" for fqn in changed if fqn not in of_statefuls]
        faults += [f"{fqn!r} was read, but is missing in the state" for fqn in gone if not is_converted(fqn)]
        if faults and self._request.strict:
            raise LoadMismatchError(
                f"{len(faults)} entries of {self._request.spec.url} were read, but the state does not hold them after "
                f"the load:{format_lines(faults)}\nCorrect load_state_dict() of these objects, or skip the entries "
                "with keys=[...]. strict=False makes this a warning. LoadOptions(check_after='off') skips the check"
            )
        others = [f"{fqn!r} {changed[fqn]}" for fqn in of_statefuls]
        if faults or others:
            warn(
                f"{len(faults) + len(others)} entries of {self._request.spec.url} were read, but objects of the state "
                f"hold different contents after their load_state_dict():{format_lines([*faults, *sorted(others)])}"
            )
        for prefix, err in now.unreadable.items():
            warn(
                f"{prefix[:-1]!r} was loaded, but could not be checked: its state_dict() raised "
                f"{type(err).__name__}: {err}"
            )

    def warn_of_lost_values(self) -> None:
        """Warn if values and new tensors were stored in a dict that is lost when the call returns."""
        for key in self._request.unreferenced:
            if lost := self.object_match.list_names_stored_in(key):
                warn(
                    f"{key!r} is a dict without other references, so the {len(lost)} values and new tensors that were "
                    f"stored in it are lost, for example {lost[:3]}. Pass the object itself (an optimizer, not its "
                    f"state_dict()), or keep the dict and pass it to load_state_dict() afterwards"
                )

    def warn_of_unset_buffers(self) -> None:
        """Warn if buffers of modules that no checkpoint has were left without values."""
        modules = self.object_match.plain.modules.items()
        if unset := [f"{prefix}{path}" for prefix, module in modules for path in module.unset_buffers()]:
            warn(
                f"the loaded modules have {count_text(len(unset), 'buffer')} on the meta device or with NaN: "
                f"{unset[:3]}. They have persistent=False, so no checkpoint has them, and to_empty() leaves them "
                "uninitialized. Compute them as the constructor does, for example in the module's reset_parameters()"
            )


def _saved_entries(catalog: Catalog) -> SavedEntries:
    """Return the entries of a checkpoint with the form of each tensor."""
    root = catalog.root
    entries = {
        fqn: SavedTensor(entry.grid.shape, torch_dtype(entry), entry.order) if isinstance(entry, ArrayNode) else None
        for fqn, entry in root.entries.items()
    }
    paths = {fqn: root.state_path(fqn) for fqn in entries}
    read = catalog.read_non_tensor
    return SavedEntries(entries, paths, read, optimizers=root.optimizers, versions=root.module_versions)
