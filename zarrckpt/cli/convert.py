"""``cp``, ``export`` and ``import``: to other places, and to and from other libraries' files."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from zarrckpt.cli._common import json_option, opened, parsed_options, print_json, progress_bar, store_options


@click.command()
@click.argument("source", metavar="A")
@click.argument("target", metavar="B")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only these entries (repeatable).")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="All but these (repeatable).")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there.")
@click.option(
    "--target-option",
    "-t",
    "target_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=parsed_options,
    help="An option of B's store; -o is A's.",
)
@json_option
@store_options
def cp(
    source: str,
    target: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    overwrite: bool,
    target_options: Any,
    as_json: bool,
    storage_options: Any,
) -> None:
    """Copy a checkpoint between any stores, or some of its entries. Chunks stay as they are, and are checked.

    \b
    Examples:
      zarrckpt cp s3://bucket/run/step-100 /data/step-100
      zarrckpt cp run/step-100 gs://bucket/weights --include model --exclude '*.bias'
    """
    from zarrckpt._info import size_text

    ckpt = opened(source, storage_options).select(*include, exclude=exclude)
    with progress_bar("copying") as progress:
        report = ckpt.copy_to(target, overwrite=overwrite, storage_options=target_options, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        click.echo(f"{report.objects:,} chunks, {size_text(report.nbytes)}, copied to {report.url}")


@click.command()
@click.argument("url")
@click.argument("folder", type=click.Path(file_okay=False))
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--strip", default="", metavar="PREFIX", help="Take it off the names: model.embed -> embed.")
@click.option("--max-file-gb", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True)
@json_option
@store_options
def export(
    url: str,
    folder: str,
    patterns: tuple[str, ...],
    strip: str,
    max_file_gb: float,
    as_json: bool,
    storage_options: Any,
) -> None:
    """Write tensors as safetensors: one file, or several with Hugging Face's index. One tensor is in memory at a time.

    \b
    Example:
      zarrckpt export s3://bucket/run/step-100 out model --strip model
    """
    from zarrckpt._info import size_text

    ckpt = opened(url, storage_options)
    with progress_bar("exporting") as progress:
        report = ckpt.to_safetensors(
            folder, *patterns, strip=strip, max_file_bytes=int(max_file_gb * 1e9), progress=progress
        )
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        click.echo(f"{report.tensors:,} tensors, {size_text(report.nbytes)}, in {folder}: {', '.join(report.files)}")


@click.command("import")
@click.argument("source", type=click.Path(exists=True))
@click.argument("url")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--prefix", default="", metavar="KEY", help="Put everything below a key: embed -> model.embed.")
@click.option("--compression", type=click.Choice(["zstd", "blosc"]), help="Compress the tensors.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there.")
@click.option("--allow-pickle", is_flag=True, help="Run the code of a torch.save file that needs it.")
@json_option
@store_options
def import_(
    source: str,
    url: str,
    patterns: tuple[str, ...],
    prefix: str,
    compression: str | None,
    overwrite: bool,
    allow_pickle: bool,
    as_json: bool,
    storage_options: Any,
) -> None:
    """Save a safetensors file, a folder of them, or a torch.save file as a checkpoint. Needs PyTorch.

    \b
    Examples:
      zarrckpt import Llama-3-8B s3://bucket/llama --prefix model
      zarrckpt import old.pt run/imported
    """
    import zarrckpt
    from zarrckpt._info import size_text

    with progress_bar("importing") as progress:
        report = zarrckpt.import_checkpoint(
            source,
            url,
            prefix=prefix,
            keys=patterns,
            allow_pickle=allow_pickle,
            compression=compression,
            overwrite=overwrite,
            storage_options=storage_options,
            progress=progress,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        click.echo(f"{size_text(report.nbytes)} saved to {report.url}")
