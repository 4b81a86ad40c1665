"""The commands ``export`` and ``import``, for files of other libraries."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Any

import click

import zarrckpt
from zarrckpt._reports import count_text, size_text
from zarrckpt.cli._common import (
    call_in_run,
    portable_option,
    print_json,
    print_line,
    progress_bar,
    run_options,
    url_options,
    warnings_as_lines,
)
from zarrckpt.cli.copy import by_pattern, dtype, print_uncast

_TORCH_SUFFIXES = {".pt", ".pth", ".bin"}
_FORMATS = ("safetensors", "torch", "dcp")


@click.command("export")
@click.argument("url")
@click.argument("target")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option(
    "--format",
    "format_",
    type=click.Choice(_FORMATS),
    help="Default: torch if TARGET ends in .pt, .pth or .bin, otherwise safetensors.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="All except these (repeatable).")
@click.option("--strip", default="", metavar="PREFIX", help="Remove it from the names: model.embed -> embed.")
@click.option(
    "--dtype",
    "dtypes",
    metavar="[PATTERN=]DTYPE",
    multiple=True,
    callback=by_pattern(dtype),
    help="Cast floating tensors, as in cp. Only for safetensors.",
)
@click.option(
    "--max-file-gb",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Maximum size of each safetensors file in a folder.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@click.option("--allow-pickle", is_flag=True, help="Run the code of values that were saved pickled.")
@run_options
@url_options
def export_command(
    url: str,
    target: str,
    patterns: tuple[str, ...],
    format_: str | None,
    exclude: tuple[str, ...],
    strip: str,
    dtypes: Any,
    max_file_gb: float,
    overwrite: bool,
    allow_pickle: bool,
    as_json: bool,
    storage_options: Any,
) -> None:
    """Write entries as files of other libraries. TARGET appears when it is complete.

    \b
    safetensors  tensors only: one file if TARGET ends in .safetensors, otherwise a
                 folder, with Hugging Face's index if it has several files
    torch        a file for torch.load, with values. Needs PyTorch
    dcp          a folder for torch.distributed.checkpoint. Needs PyTorch

    The memory is bounded, except for torch, which has all entries in memory. If URL is a run, export its newest
    checkpoint, or the one of --step or --best.

    \b
    Examples:
      zarrckpt export s3://bucket/run/step-100 out model --strip model
      zarrckpt export run/step-100 step-100.pt
      zarrckpt export run best.safetensors --best val_loss
      zarrckpt export run/step-100 old-style --format dcp --exclude 'optim'
    """
    kind = format_ or ("torch" if PurePath(target).suffix in _TORCH_SUFFIXES else "safetensors")
    if dtypes and kind != "safetensors":
        raise click.UsageError("--dtype is only for safetensors: export a copy that zarrckpt cp --dtype made")
    ckpt = call_in_run(zarrckpt.open, url, storage_options, allow_pickle=allow_pickle)
    part = ckpt.select(*patterns, exclude=exclude)
    options: dict[str, Any] = {"strip": strip, "overwrite": overwrite}
    with progress_bar("exporting") as progress:
        if kind == "safetensors":
            options |= {"max_file_bytes": int(max_file_gb * 1e9), "progress": progress}
            with warnings_as_lines():
                report = zarrckpt.to_safetensors(part, target, dtype=dtypes, **options)
        else:
            export = zarrckpt.to_torch_save if kind == "torch" else zarrckpt.to_dcp
            report = export(part, target, progress=progress, **options)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    values = f", {count_text(report.values, 'value')}" if report.values else ""
    files = ", ".join(report.files) if len(report.files) <= 3 else count_text(len(report.files), "file")
    print_line(
        f"{count_text(report.tensors, 'tensor')}{values}, {size_text(report.nbytes)}, in {report.folder}: {files}"
    )
    print_uncast(report.uncast)


@click.command("import")
@click.argument("source")
@click.argument("url")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--prefix", default="", metavar="KEY", help="Save all entries below a key: embed -> model.embed.")
@click.option("--compression", type=click.Choice(["zstd", "blosc"]), help="Compress the tensors.")
@portable_option
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint.")
@click.option("--allow-pickle", is_flag=True, help="Run the code of values (torch.save, DCP) that need it.")
@url_options
def import_command(
    source: str,
    url: str,
    patterns: tuple[str, ...],
    prefix: str,
    compression: str | None,
    portable_dtypes: bool,
    overwrite: bool,
    allow_pickle: bool,
    as_json: bool,
    storage_options: Any,
) -> None:
    """Save other libraries' files as a checkpoint, in bounded memory. Needs PyTorch.

    SOURCE is a .safetensors file, a folder of them (with or without Hugging Face's index), a folder of
    torch.distributed.checkpoint (it has a .metadata), or a file of torch.save.

    \b
    Examples:
      zarrckpt import Llama-3-8B s3://bucket/llama --prefix model
      zarrckpt import old.pt run/imported
      zarrckpt import dcp-run/step-100 run/step-100
    """
    with progress_bar("importing") as progress:
        report = zarrckpt.import_checkpoint(
            source,
            url,
            prefix=prefix,
            keys=patterns,
            allow_pickle=allow_pickle,
            options=zarrckpt.SaveOptions(compression=compression, portable_dtypes=portable_dtypes),
            overwrite=overwrite,
            storage_options=storage_options,
            progress=progress,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print_line(f"{size_text(report.nbytes)} saved to {report.url}")
