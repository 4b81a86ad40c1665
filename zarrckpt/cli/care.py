"""``verify``, ``doctor``, ``recover``, ``rm``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zarrckpt.cli._common import (
    header_option,
    hints,
    json_option,
    opened,
    print_json,
    print_table,
    progress_bar,
    say,
    store_options,
)
from zarrckpt.cli._wording import in_options

if TYPE_CHECKING:
    from zarrckpt._ops.recover import RecoverReport

T = TypeVar("T")


@click.command("verify")
@click.argument("url")
@click.option("--quick", is_flag=True, help="Only list: what is missing, or has another size.")
@header_option
@json_option
@store_options
def verify_command(url: str, quick: bool, as_json: bool, storage_options: Any) -> None:
    """Check that everything is stored as it was saved. Exits with 1 where it is not.

    \b
    Examples:
      zarrckpt verify s3://bucket/run/step-100 --quick
      zarrckpt verify run/step-100 --json
    """
    from zarrckpt._reports import count_text, size_text

    ckpt = opened(url, storage_options)
    with progress_bar("verifying") as progress:
        report = ckpt.verify(quick=quick, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print_table(("object", "entry", "what is wrong"), [(d.key, d.fqn or "-", d.reason) for d in report.damages])
        how = "listed" if quick else "read and checked"
        state = "whole" if report else f"{len(report.damages)} damaged"
        objects = count_text(report.objects, "object")
        click.echo(f"{state}: {objects}, {size_text(report.nbytes)}, {how}", err=not report)
    click.get_current_context().exit(0 if report else 1)


@click.command("doctor")
@click.argument("url")
@json_option
@store_options
def doctor_command(url: str, as_json: bool, storage_options: Any) -> None:
    """Say what is at a url: a checkpoint, damage, unfinished saves, leftovers; and what to run.

    Lists, and reads no chunk. Exits with 1 where there is anything to do.

    \b
    Example:
      zarrckpt doctor s3://bucket/run/step-100
    """
    from zarrckpt._ops.recover import examine

    with hints(url):
        found = examine(url, storage_options=storage_options)
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        say(found.state)
        for line in found.findings or (() if found.advice else ("Nothing to do.",)):
            say(f"  {line}")
        for note in found.notes:
            say(f"  {note}")
        for command in found.advice:
            say(f"  run: {command}")
    click.get_current_context().exit(1 if found.findings else 0)


@click.command("recover")
@click.argument("url")
@click.option(
    "--stopped", is_flag=True, help="No save to this url is running, anywhere: remove all that never committed."
)
@json_option
@store_options
def recover_command(url: str, stopped: bool, as_json: bool, storage_options: Any) -> None:
    """Remove what dead saves left; the checkpoint stays. Finish a removal that was broken off.

    URL may also be a folder of checkpoints: then of each right below it. An error at one of them does not keep the
    others from being recovered; it is printed, and the exit code is 3.

    \b
    Examples:
      zarrckpt recover s3://bucket/run/step-100 --stopped
      zarrckpt recover s3://bucket/run
    """
    import zarrckpt

    report = zarrckpt.recover(url, stopped=stopped, storage_options=storage_options)
    if as_json:
        print_json(dataclasses.asdict(report))
    for part in report.checkpoints or (report,):
        name = f"{part.url.rpartition('/')[2]}: " if report.checkpoints else ""
        for line in _say_recovered(part) if part.error or not as_json else ():
            say(f"{name}{line}", err=bool(part.error))
    if any(part.error for part in report.checkpoints):
        click.get_current_context().exit(3)


def _say_recovered(report: RecoverReport) -> Iterator[str]:
    """What was done at one place, in lines."""
    from zarrckpt._reports import count_text

    if report.error:
        yield in_options(report.error, click.get_current_context().command)
        return
    if report.objects:
        yield f"{count_text(report.objects, 'object')} of {count_text(len(report.removed), 'save')} removed"
    elif not report.kept:
        yield "nothing to remove"
    for save_id in report.kept:
        yield f"kept {save_id}: it could still commit; if it is not running: zarrckpt recover {report.url} --stopped"


@click.command("rm")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@store_options
def rm_command(urls: tuple[str, ...], yes: bool, as_json: bool, storage_options: Any) -> None:
    """Delete checkpoints, damaged or whole, and what saves left there. Refuses what is none.

    An error at one URL does not keep the others from being deleted; it is printed, and the exit code is 3.

    \b
    Examples:
      zarrckpt rm s3://bucket/run/step-100 --yes
      zarrckpt rm run/step-1??
    """
    import zarrckpt
    from zarrckpt._errors import CheckpointError
    from zarrckpt._ops.recover import examine
    from zarrckpt._reports import count_text

    failed: dict[str, str] = {}
    context = click.get_current_context()

    def attempt(call: Callable[..., T], url: str) -> T | None:
        try:
            return call(url, storage_options=storage_options)
        except CheckpointError as err:
            if len(urls) == 1:
                raise
            failed[url] = f"{type(err).__name__}: {in_options(str(err), context.command)}"
            say(f"{url}: {failed[url]}", err=True)
            return None

    if not yes:
        found = [attempt(examine, url) for url in urls]
        states = [place.state for place in found if place is not None and not place.empty]
        for state in states:
            say(state, err=True)
        if states:
            click.confirm("Delete it?" if len(states) == 1 else f"Delete these {len(states)}?", abort=True, err=True)
    removed = []
    for url in urls:
        count = None if url in failed else attempt(zarrckpt.remove, url)
        removed.append({"url": url, "objects": count or 0} | ({"error": failed[url]} if url in failed else {}))
        if count is not None and not as_json:
            say(f"{f'{url}: ' if len(urls) > 1 else ''}{count_text(count, 'object')} deleted")
    if as_json:
        print_json(removed[0] if len(urls) == 1 else removed)
    if failed:
        context.exit(3)
