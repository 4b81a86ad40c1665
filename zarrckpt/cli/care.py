"""The commands ``verify``, ``doctor``, ``recover`` and ``rm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, TypeVar

import click

import zarrckpt
from zarrckpt._errors import CheckpointError
from zarrckpt._reports import count_text, size_text
from zarrckpt.cli import _output as out
from zarrckpt.cli import _params as params
from zarrckpt.cli._params import argument, flag
from zarrckpt.cli._wording import in_options

if TYPE_CHECKING:
    from zarrckpt._ops.recover import RecoverReport

T = TypeVar("T")

_STOPPED = "Delete all uncommitted saves. Only if no save to this url is running anywhere."


@params.command("verify")
def verify_command(
    url: params.Url,
    quick: Annotated[bool, flag("Only list the objects, and find missing ones and wrong sizes.")],
    header: params.Header,
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
    **in_run: params.InRun,
) -> None:
    """Check all objects of a checkpoint for damage. Exits with 1 if there is any.

    For a run, check its newest checkpoint, or the one of --step or --best. Exits with 1 also if a newer one cannot be
    opened because of damage.

    \b
    Examples:
      zarrckpt verify s3://bucket/run/step-100 --quick
      zarrckpt verify run/step-100 --json
      zarrckpt verify run --best val_loss
    """
    ckpt = params.call_in_run(zarrckpt.open, url, storage_options, **in_run)
    with out.progress_bar("verifying") as progress:
        report = ckpt.verify(quick=quick, progress=progress)
    if as_json:
        out.print_json(report)
    else:
        out.print_table(
            ("object", "entry", "damage"), [(d.key, d.fqn or "-", d.reason) for d in report.damages], header
        )
        how = "listed" if quick else "read and checked"
        state = "whole" if report else f"{len(report.damages)} damaged"
        objects = count_text(report.objects, "object")
        out.print_line(f"{state}: {objects}, {size_text(report.nbytes)}, {how}", err=not report)
    click.get_current_context().exit(0 if report and not params.skipped_damage() else 1)


@params.command("doctor")
def doctor_command(
    url: params.Url, storage_options: params.StorageOptions, as_json: params.AsJson, **in_run: params.InRun
) -> None:
    """Describe a url: its checkpoint, damage, unfinished saves and leftovers, and the commands to run.

    Lists the objects, and reads no chunk. Exits with 1 if there is anything to do. For a run, describe its newest
    checkpoint, or the one of --step or --best.

    \b
    Examples:
      zarrckpt doctor s3://bucket/run/step-100
      zarrckpt doctor run --step 100
    """
    from zarrckpt._ops.recover import examine

    found = params.call_in_run(examine, url, storage_options, **in_run)
    if as_json:
        out.print_json(found)
    else:
        out.print_line(found.state)
        for line in found.findings or (() if found.advice else ("Nothing to do.",)):
            out.print_line(f"  {line}")
        for note in found.notes:
            out.print_line(f"  {note}")
        for advice in found.advice:
            out.print_line(f"  run: {advice}")
    click.get_current_context().exit(1 if found.findings or params.skipped_damage() else 0)


@params.command("recover")
def recover_command(
    url: params.Url,
    stopped: Annotated[bool, flag(_STOPPED)],
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
) -> None:
    """Delete the objects of dead saves, or finish an interrupted removal. The checkpoint stays.

    URL can also be a folder of checkpoints. Then each checkpoint directly below it is recovered. If one of them has an
    error, it is printed, the others are recovered, and the exit code is 3.

    \b
    Examples:
      zarrckpt recover s3://bucket/run/step-100 --stopped
      zarrckpt recover s3://bucket/run
    """
    report = zarrckpt.recover(url, stopped=stopped, storage_options=storage_options)
    if as_json:
        out.print_json(report)
    for part in report.checkpoints or (report,):
        name = f"{part.url.rpartition('/')[2]}: " if report.checkpoints else ""
        for line in _recovered_lines(part) if part.error or not as_json else ():
            out.print_line(f"{name}{line}", err=bool(part.error))
    if any(part.error for part in report.checkpoints):
        click.get_current_context().exit(3)


def _recovered_lines(report: RecoverReport) -> Iterator[str]:
    """Yield lines that describe the recovery of one url."""
    if report.error:
        yield in_options(report.error, click.get_current_context().command)
        return
    if report.objects:
        yield f"{count_text(report.objects, 'object')} of {count_text(len(report.removed), 'save')} deleted"
    elif not report.kept:
        yield "nothing to delete"
    for save_id in report.kept:
        yield f"kept {save_id}: it could still commit. If it is not running: zarrckpt recover {report.url} --stopped"


@params.command("rm")
def rm_command(
    urls: Annotated[tuple[str, ...], argument("URL...", nargs=-1, required=True)],
    yes: Annotated[bool, flag("Do not ask.", "--yes", "-y")],
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
) -> None:
    """Delete checkpoints, even damaged ones, with the objects of all their saves. Refuses a url without a checkpoint.

    If one URL has an error, it is printed, the others are deleted, and the exit code is 3.

    \b
    Examples:
      zarrckpt rm s3://bucket/run/step-100 --yes
      zarrckpt rm run/step-1??
    """
    from zarrckpt._ops.recover import examine

    failed: dict[str, str] = {}
    context = click.get_current_context()

    def attempt(call: Callable[..., T], url: str) -> T | None:
        try:
            return call(url, storage_options=storage_options)
        except CheckpointError as err:
            if len(urls) == 1:
                raise
            failed[url] = f"{type(err).__name__}: {in_options(str(err), context.command)}"
            out.print_line(f"{url}: {failed[url]}", err=True)
            return None

    if not yes:
        found = [attempt(examine, url) for url in urls]
        states = [item.state for item in found if item is not None and not item.empty]
        for state in states:
            out.print_line(state, err=True)
        if states:
            click.confirm("Delete it?" if len(states) == 1 else f"Delete these {len(states)}?", abort=True, err=True)
    removed = []
    for url in urls:
        count = None if url in failed else attempt(zarrckpt.remove, url)
        removed.append({"url": url, "objects": count or 0} | ({"error": failed[url]} if url in failed else {}))
        if count is not None and not as_json:
            out.print_line(f"{f'{url}: ' if len(urls) > 1 else ''}{count_text(count, 'object')} deleted")
    if as_json:
        out.print_json(removed[0] if len(urls) == 1 else removed)
    if failed:
        context.exit(3)
