"""``recover`` and ``remove``: delete what saves left behind, and nothing else. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from zarrckpt._commit import protocol
from zarrckpt._commit.listings import list_below
from zarrckpt._commit.marker import CLAIM_KEY, REMOVAL_KEY, removal_bytes
from zarrckpt._commit.protocol import Below, Leftovers
from zarrckpt._errors import CheckpointError, CheckpointNotFoundError
from zarrckpt._jobs import run_jobs
from zarrckpt._ops.verify import verify
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import count_text, time_text
from zarrckpt._store import Store, StoreSpec, Url

_PLACES_AT_ONCE = 4
"""So many checkpoints of a folder are recovered side by side; each makes many requests at a time."""


@dataclass(frozen=True)
class RecoverReport:
    """What :func:`recover` did at a url."""

    url: str
    objects: int
    """How many objects were deleted."""
    removed: tuple[str, ...]
    """The ids of the saves whose objects were deleted."""
    kept: tuple[str, ...]
    """The ids of saves that may still be running, see there."""
    checkpoints: tuple[RecoverReport, ...] = ()
    """Of a folder of checkpoints: a report of each, in order of names; the numbers above are their sums."""
    error: str = ""
    """Of one in a folder: why nothing was done there."""


def recover(
    url: Url,
    *,
    stopped: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> RecoverReport:
    """Delete what saves that never committed, or were replaced, left at a url. What is committed stays.

    One exception: a removal that was begun and has not ended is finished, and the checkpoint goes. Where it is pinned,
    CheckpointPinnedError is raised; with ``stopped``, the removal is given up instead.

    The next save to the url does the same by itself; call this where there will be none. Only keys that a save's own
    marker names are deleted. A save that could still commit is left alone: one that was begun when nothing, or the
    checkpoint that is there now, was committed, and that has not failed by its own record. Nobody can tell such a save
    from a dead one, except who knows that none is running. The claim stays, so that nothing a dead rank still writes
    can meet a later save's objects.

    Args:
        url: of a checkpoint, or of a folder of checkpoints: then of each right below it.
        stopped: no save to this url is running, anywhere: also delete what could still commit otherwise, and what a
            save that was begun by mistake in a folder of checkpoints left, which then is one again. If a save is
            running all the same, what it commits is damaged.

    The other arguments are those of :func:`open`. Costs a listing for each name below the url that a marker has.

    Raises ForeignObjectsError where the url holds objects that no save of this package wrote; nothing is deleted then.
    CorruptCheckpointError where the root document is damaged. In a folder of checkpoints the others are gone on with,
    also if a folder cannot be read.
    """
    spec = StoreSpec(url, storage_options)
    store = spec.open()
    listed = list_below(store)
    begun = [] if listed.has_save else protocol.find_begun(store, listed.folders)
    if all(below.unreadable for below in begun):
        if listed.is_run and not listed.has_save and not begun:
            return RecoverReport(spec.url, 0, (), ())  # a run that has saved nothing yet
        return _recovered(spec, stopped)
    reports = run_jobs((partial(_recovered_below, spec, below, stopped) for below in begun), _PLACES_AT_ONCE)
    return RecoverReport(
        spec.url,
        sum(report.objects for report in reports),
        tuple(save_id for report in reports for save_id in report.removed),
        tuple(save_id for report in reports for save_id in report.kept),
        tuple(reports),
    )


def _recovered_below(spec: StoreSpec, below: Below, stopped: bool) -> RecoverReport:
    """Recover a folder right below a url; errors are in the report."""
    place = spec.child(below.name)
    try:
        if below.damage is not None:
            raise below.damage
        return _recovered(place, stopped)
    except CheckpointError as err:
        return RecoverReport(place.url, 0, (), (), error=str(err))


def _recovered(spec: StoreSpec, stopped: bool) -> RecoverReport:
    place = spec.open()
    found = protocol.leftovers(place, folder=stopped)
    if found.removal and stopped and found.root_bytes is not None and protocol.pins(place):
        # It was broken off before it could see the pin, and nothing has been deleted.
        place.delete([REMOVAL_KEY])
        found = protocol.leftovers(place, folder=True)
    if found.removal:
        removed = tuple(marker.save_id for marker in found.markers)
        return RecoverReport(place.url, remove_found(place, found), removed, ())
    dead = [marker for marker in found.others if stopped or not found.may_commit(marker)]
    kept = [marker.save_id for marker in found.others if marker not in dead]
    # An attempt that began beside a removal may name what another one has begun to write since.
    spared = [marker for marker in found.markers if marker not in dead]
    # A save begun by mistake in a folder of checkpoints must not stay in the way of what is done with them.
    folder = stopped and found.root_bytes is None and protocol.holds_checkpoints(place)
    finished = [marker.save_id for marker in dead] if stopped else []
    objects = protocol.clean(place, dead, finished=finished, spared=spared)
    if found.root_bytes is None:
        # Of a checkpoint that was removed while somebody was about to pin it.
        place.delete(found.pins)
    if stopped:
        place.delete([*found.probes, CLAIM_KEY] if folder else found.probes)
        protocol.sweep(place)
    return RecoverReport(place.url, objects, tuple(marker.save_id for marker in dead), tuple(kept))


@dataclass(frozen=True)
class Examination:
    """What :func:`examine` found at a url, in words."""

    url: str
    state: str
    findings: tuple[str, ...]
    """What is not as it should be, or is left over."""
    advice: tuple[str, ...]
    """Commands that help."""
    notes: tuple[str, ...] = ()
    """What is as it should be and yet worth knowing."""
    empty: bool = False
    """Whether nothing is there at all."""


def examine(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Examination:
    """Say what is at a url: a checkpoint, unfinished saves, leftovers, damage that a listing shows. Reads no chunk.

    The arguments are those of :func:`open`. Raises ForeignObjectsError where the url holds anything else.
    """
    spec = StoreSpec(url, storage_options)
    place = spec.open()
    found = protocol.leftovers(place, damaged=True)
    pinned = tuple(f"pinned: {one.note!r:.200} (pin {one.pin_id})" for one in protocol.pins(place))
    if found.removal:
        finding = "the removal has not ended: it still runs, or was broken off"
        state = f"{place.url}: a checkpoint that is being removed"
        held = " --stopped    (only if it is not running: the checkpoint is pinned, and stays)" if pinned else ""
        return Examination(place.url, state, (finding,), (f"zarrckpt recover {place.url}{held}",), pinned)
    findings: list[str] = []
    advice: list[str] = []
    notes: list[str] = []
    if found.root is not None:
        ranks = count_text(found.root.world_size, "rank")
        state = f"{place.url}: a checkpoint, committed {time_text(found.root.created)} by {ranks}"
        report = verify(Catalog(spec, found.root), quick=True, max_inflight_bytes=1 << 28, progress=None)
        if not report:
            findings.append(f"{count_text(len(report.damages), 'object')} missing, or of another size")
            advice.append(f"zarrckpt verify {place.url}")
    elif found.root_bytes is not None:
        # Which save it was of is not known: no save's objects can be told from leftovers.
        state = f"{place.url}: a damaged checkpoint"
        findings.append("the root document is not what was saved: restore zarr.json from a copy, or save again")
        return Examination(place.url, state, tuple(findings), (f"zarrckpt rm {place.url}",), pinned)
    else:
        state = f"{place.url}: " + ("no checkpoint; a save was begun" if found.begun else "nothing is there")
    dead = [marker for marker in found.others if not found.may_commit(marker)]
    others = [marker for marker in found.markers if marker not in dead]
    left = {marker.save_id: protocol.count_stored(place, marker, others) for marker in dead}
    for marker in found.others:
        what = f"save {marker.save_id}, begun {time_text(marker.started)}"
        ended = "failed" if marker.failed else "can commit no more, or was replaced"
        if marker.save_id not in left:
            findings.append(f"{what}, could still commit, if it runs")
        elif left[marker.save_id]:
            findings.append(f"{what}, {ended}; {count_text(left[marker.save_id], 'object')} of it left")
        else:
            notes.append(f"{what}, {ended}; only its marker is left: ranks that were cut off may still write")
    if found.probes:
        findings.append(f"{count_text(len(found.probes), 'object')} left of a try of the store's conditional puts")
    if any(left.values()):
        advice.append(f"zarrckpt recover {place.url}")
    if len(dead) < len(found.others) or notes or found.probes:
        advice.append(f"zarrckpt recover {place.url} --stopped    (only if no save to it is running)")
    empty = found.root is None and not found.begun
    return Examination(place.url, state, tuple(findings), tuple(advice), (*notes, *pinned), empty)


def remove(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Delete the checkpoint at a url, damaged or whole, with all that saves left there; return the number of objects.

    First that is recorded, so that whoever comes after a crash can finish it: another :func:`remove`, or
    :func:`recover`. Then the root document goes: from then on nothing opens there, and who has the checkpoint open gets
    CheckpointRemovedError. Only keys that documents of saves name are deleted; of local files the url's own folder,
    too, where it is empty then, no link and no mount. No save to the url may be running or beginning: it would commit
    what was deleted. One that begins when the removal is recorded is refused. The arguments are those of :func:`open`.

    Raises CheckpointNotFoundError where no save ever began, ForeignObjectsError where the url holds anything else,
    CheckpointPinnedError where the checkpoint is pinned, StorageError where the root document cannot be deleted:
    nothing is deleted then.
    """
    place = StoreSpec(url, storage_options).open()
    found = protocol.leftovers(place, damaged=True)
    if not found.begun:
        raise CheckpointNotFoundError(f"there is no checkpoint at {place.url}, and no save was begun; check the path")
    return remove_found(place, found)


def remove_found(place: Store, found: Leftovers) -> int:
    """Delete all that saves left at a url, or go on with that. Returns the number of objects.

    Of several processes that do so, the one that put its record last goes on. Each of the others stops when it sees
    that: all is deleted then, or going to be, and a save may have begun.
    """
    own = removal_bytes("" if found.root is None else found.root.save_id, protocol.new_id())
    objects = 0
    with suppress(protocol.RemovalEndedError):
        record, first = protocol.record_removal(place, own, begun=found.removal)
        try:
            # Again: what is found now is what the record is of, and no save begins after it.
            found = protocol.leftovers(place, damaged=True)
            protocol.delete_root(place, found.root_bytes, record)
        except CheckpointError:
            # Of several, an earlier one may have seen no pin, and be about to delete: the record must stay then.
            if first:
                _take_back(place, found, own)
            raise
        objects = len(found.markers) + (found.root_bytes is not None) + found.claimed
        finished = [marker.save_id for marker in found.markers]
        objects += protocol.clean(place, found.markers, finished=finished, removal=record)
        pins = protocol.pin_keys(place)
        protocol.check_removal(place, record)
        place.delete([*found.probes, *pins, CLAIM_KEY])
        protocol.sweep(place)
        protocol.check_removal(place, record)
        # Last: as long as anything is left, it says so.
        place.delete([REMOVAL_KEY])
        place.remove_folder()
    return objects


def _take_back(place: Store, found: Leftovers, own: bytes) -> None:
    """Delete the record of a removal that could not delete anything: the checkpoint is no other than before."""
    with suppress(CheckpointError):
        unchanged = found.root is None or protocol.read_root(place).save_id == found.root.save_id
        if unchanged and protocol.removal_record(place) == own:
            place.delete([REMOVAL_KEY])
