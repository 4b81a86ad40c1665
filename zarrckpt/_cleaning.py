"""``recover`` and ``remove``: delete what saves left behind, and nothing else. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zarrckpt import _commit
from zarrckpt._catalog import Catalog
from zarrckpt._commit import CLAIM_KEY
from zarrckpt._documents import NODE
from zarrckpt._errors import CheckpointNotFoundError
from zarrckpt._store import StoreSpec
from zarrckpt._verify import verify


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


def recover(
    url: str | os.PathLike[str] | None = None,
    *,
    stopped: bool = False,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
) -> RecoverReport:
    """Delete what saves that never committed, or were replaced, left at a url. The committed checkpoint stays.

    The next save to the url does the same by itself; call this where there will be none. Only keys that a save's own
    marker names are deleted. A save that could still commit is left alone: one that was begun when nothing, or the
    checkpoint that is there now, was committed. Nobody can tell such a save from a dead one, except who knows that
    none is running. The claim stays, so that nothing a dead rank still writes can meet a later save's objects.

    Args:
        stopped: no save to this url is running, anywhere: also delete what could still commit otherwise. If one is
            running all the same, what it commits is damaged.

    The other arguments are those of :func:`open`. Costs a listing for each name below the url that a marker has.

    Raises ForeignObjectsError where the url holds objects that no save of this package wrote; nothing is deleted then.
    CorruptCheckpointError where the root document is damaged.
    """
    place = StoreSpec(url, store, storage_options, credential_provider).open()
    found = _commit.leftovers(place)
    dead = [marker for marker in found.others if stopped or not found.may_commit(marker)]
    kept = [marker.attempt for marker in found.others if marker not in dead]
    # Their markers go too where nobody can write what they name any more.
    committed = None if found.root is None else found.root.marker()
    finished = [marker.attempt for marker in dead] if stopped else []
    objects = _commit.clean(place, dead, finished=finished, committed=committed)
    if stopped:
        place.delete(found.probes)
        _commit.sweep(place)
    return RecoverReport(place.url, objects, tuple(marker.attempt for marker in dead), tuple(kept))


@dataclass(frozen=True)
class Examination:
    """What :func:`examine` found at a url, in words."""

    url: str
    state: str
    findings: tuple[str, ...]
    """What is not as it should be, or is left over."""
    advice: tuple[str, ...]
    """Commands that help."""


def examine(
    url: str | os.PathLike[str] | None = None,
    *,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
) -> Examination:
    """Say what is at a url: a checkpoint, unfinished saves, leftovers, damage that a listing shows. Reads no chunk.

    The arguments are those of :func:`open`. Raises ForeignObjectsError where the url holds anything else.
    """
    spec = StoreSpec(url, store, storage_options, credential_provider)
    place = spec.open()
    found = _commit.leftovers(place, damaged=True)
    findings, advice = [], []
    if found.root is not None:
        state = f"{place.url}: a checkpoint, committed at {found.root.created} by {found.root.world_size} ranks"
        report = verify(Catalog(spec, found.root), quick=True, max_inflight_bytes=1 << 28, progress=None)
        if not report:
            findings.append(f"{len(report.damages)} objects are missing or have another size")
            advice.append(f"zarrckpt verify {place.url}")
    elif found.root_bytes is not None:
        state = f"{place.url}: a damaged checkpoint"
        findings.append("the root document is not what was saved")
        advice.append(f"zarrckpt rm {place.url}")
    else:
        state = f"{place.url}: " + ("no checkpoint; a save was begun" if found.begun else "nothing")
    for marker in found.others:
        running = found.may_commit(marker)
        kind = "could still commit, if it runs" if running else "can commit no more, or was replaced"
        findings.append(f"save {marker.attempt}, begun at {marker.started}, {kind}")
    if any(not found.may_commit(marker) for marker in found.others):
        advice.append(f"zarrckpt recover {place.url}")
    if any(found.may_commit(marker) for marker in found.others) or found.probes:
        advice.append(f"zarrckpt recover {place.url} --stopped    (only if no save to it is running)")
    return Examination(place.url, state, tuple(findings), tuple(advice))


def remove(
    url: str | os.PathLike[str] | None = None,
    *,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
) -> int:
    """Delete the checkpoint at a url, damaged or whole, with all that saves left there; return the number of objects.

    The root document goes first: from then on nothing opens there. Only keys that documents of saves name are deleted.
    No save to the url may be running: it would commit what was deleted. The arguments are those of :func:`open`.

    Raises CheckpointNotFoundError where no save ever began, ForeignObjectsError where the url holds anything else:
    nothing is deleted then.
    """
    place = StoreSpec(url, store, storage_options, credential_provider).open()
    found = _commit.leftovers(place, damaged=True)
    if not found.begun:
        raise CheckpointNotFoundError(f"there is no checkpoint at {place.url}, and no save was begun; check the path")
    place.delete([NODE])
    markers = found.markers
    objects = _commit.clean(place, markers, finished=[marker.attempt for marker in markers])
    place.delete([*found.probes, CLAIM_KEY])
    _commit.sweep(place)
    return objects + len(markers) + (found.root_bytes is not None) + found.claimed
