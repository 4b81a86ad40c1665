"""Rewrite messages of the Python API for users of the command line."""

from __future__ import annotations

import re

import click

_FLAGS = re.compile(r"\b(allow_pickle|overwrite|stopped)=True\b")
_OPTIONS = re.compile(r"storage_options=\{([^{}]*)\}")
_PAIRS = re.compile(r"'(\w+)': *'?([^,']+)'?")


def in_options(message: str, command: click.Command | None) -> str:
    """Return a message with the options of a command instead of the arguments of functions."""
    names = {param.name for param in command.params} if command is not None else set()

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}" if found[1] in names else f"{found[0]} (in Python)"

    def options(found: re.Match[str]) -> str:
        pairs = (
            (name, value.lower() if value in ("True", "False") else value) for name, value in _PAIRS.findall(found[1])
        )
        return " ".join(f"--storage-option {name}={value}" for name, value in pairs)

    text = re.sub(r"storage_options\['(\w+)'\]", r"--storage-option \1", _OPTIONS.sub(options, message))
    text = text.replace("storage_options", "--storage-option").replace("zarrckpt.remove", "zarrckpt rm")
    if "--storage-option" in text and "target_options" in names:
        text += ". -o is for the first url, -t for the second"
    return _FLAGS.sub(flag, text)
