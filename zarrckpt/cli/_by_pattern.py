"""Options that hold for all tensors, or for those that a pattern means: ``VALUE`` or ``PATTERN=VALUE``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click


def by_pattern(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Sequence[str]], Any]:
    """A callback for a repeatable option: None, one value for all, or a mapping pattern -> value."""

    def parsed(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> Any:
        plain = [text for text in given if "=" not in text]
        if plain and len(given) > 1:
            raise click.BadParameter(
                f"{plain[0]!r} holds for all tensors: give it alone, or each as PATTERN={plain[0]}"
            )
        try:
            if plain:
                return parse(plain[0])
            pairs = [text.rpartition("=") for text in given]
            return {pattern: parse(value) for pattern, _, value in pairs} or None
        except (TypeError, ValueError) as err:
            raise click.BadParameter(str(err)) from err

    return parsed


def shape(text: str) -> tuple[int, ...]:
    """``1024,-1`` as a shape. Raises ValueError."""
    from zarrckpt._ops.copy_plan import parse_shape

    try:
        extents = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no shape such as 1024,-1") from None
    return parse_shape(extents)


def dtype(text: str) -> str:
    """A dtype's name. Raises ValueError and TypeError."""
    from zarrckpt._ops.copy_plan import parse_dtype

    return parse_dtype(text).name
