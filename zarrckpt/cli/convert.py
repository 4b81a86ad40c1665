"""The commands ``export`` and ``import``, for files of other libraries."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any

import click

import zarrckpt
from zarrckpt._reports import count_text, size_text
from zarrckpt.cli import _output as out
from zarrckpt.cli import _params as params
from zarrckpt.cli._params import argument, flag, option
from zarrckpt.cli.copy import POSITIVE, dtype, pattern_option, print_uncast

_TORCH_SUFFIXES = {".pt", ".pth", ".bin"}
_FORMATS = ("safetensors", "torch", "dcp")
_DEFAULT = "Default: torch if TARGET ends in .pt, .pth or .bin, otherwise safetensors."
_STRIP = "Remove it from the names: model.embed -> embed."
_CAST = "Cast floating tensors, as in cp. Only for safetensors."
_MAX_FILE = "Maximum size of each safetensors file in a folder."
_PREFIX = "Save all entries below a key: embed -> model.embed."


@params.command("export")
def export_command(
    url: params.Url,
    target: Annotated[str, argument()],
    patterns: params.Patterns,
    format_: Annotated[str | None, option(_DEFAULT, "--format", type=click.Choice(_FORMATS))],
    exclude: params.Exclude,
    strip: Annotated[str, option(_STRIP, default="", metavar="PREFIX")],
    dtypes: Annotated[Any, pattern_option(_CAST, "--dtype", parse=dtype, metavar="[PATTERN=]DTYPE")],
    max_file_gb: Annotated[float, option(_MAX_FILE, type=POSITIVE, default=5.0, show_default=True)],
    overwrite: Annotated[bool, flag("Replace existing files.")],
    allow_pickle: Annotated[bool, flag("Run the code of values that were saved pickled.")],
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
    **in_run: params.InRun,
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
    ckpt = params.call_in_run(zarrckpt.open, url, storage_options, allow_pickle=allow_pickle, **in_run)
    part = ckpt.select(*patterns, exclude=exclude)
    options: dict[str, Any] = {"strip": strip, "overwrite": overwrite}
    with out.progress_bar("exporting") as progress:
        if kind == "safetensors":
            options |= {"max_file_bytes": int(max_file_gb * 1e9), "progress": progress}
            with out.warnings_as_lines():
                report = zarrckpt.to_safetensors(part, target, dtype=dtypes, **options)
        else:
            export = zarrckpt.to_torch_save if kind == "torch" else zarrckpt.to_dcp
            report = export(part, target, progress=progress, **options)
    if as_json:
        out.print_json(report)
        return
    values = f", {count_text(report.values, 'value')}" if report.values else ""
    files = ", ".join(report.files) if len(report.files) <= 3 else count_text(len(report.files), "file")
    out.print_line(
        f"{count_text(report.tensors, 'tensor')}{values}, {size_text(report.nbytes)}, in {report.folder}: {files}"
    )
    print_uncast(report.uncast)


@params.command("import")
def import_command(
    source: Annotated[str, argument()],
    url: params.Url,
    patterns: params.Patterns,
    prefix: Annotated[str, option(_PREFIX, default="", metavar="KEY")],
    compression: Annotated[str | None, option("Compress the tensors.", type=click.Choice(["zstd", "blosc"]))],
    portable_dtypes: params.Portable,
    overwrite: params.Replace,
    allow_pickle: Annotated[bool, flag("Run the code of values (torch.save, DCP) that need it.")],
    storage_options: params.StorageOptions,
    as_json: params.AsJson,
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
    with out.progress_bar("importing") as progress:
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
        out.print_json(report)
    else:
        out.print_line(f"{size_text(report.nbytes)} saved to {report.url}")
