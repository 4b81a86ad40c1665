r"""Names of Zarr nodes for the names in a state dict.

One level of a state dict (``"layers.0.weight"``) becomes one component of a node path. ASCII letters, digits, ``.``,
``_``, ``-`` and most characters beyond ASCII are not changed, because all stores, servers, urls and readers accept
them. Each other character is escaped: ``=`` and two uppercase hexadecimal digits for each byte of its UTF-8 form. A
name with a lone surrogate has no UTF-8 form and is refused.

======================================== ================================================================
escaped                                  reason
======================================== ================================================================
``=``                                    it introduces an escaped byte
``%``                                    HTTP clients decode it, some of them twice
``/ \ ? # : @``                          they separate the parts of paths and urls; a leading ``@`` marks
                                         this package's own groups below the root
``" * < > |``                            Windows does not allow them in file names
``[ ] { } ^ ~`` and the backtick         obstore and some S3 clients encode them in keys
``! $ & ' ( ) + , ;`` and white space    servers, clients and shells decode them differently
U+0000-001F, U+007F-009F, U+FFFE, U+FFFF control characters, and characters that XML listings cannot contain
the first ``_`` of a leading ``__``      Zarr reserves these names
a leading ``.``                          ``..``, ``.zarray``, helper files; some servers hide such names
a trailing ``.``                         Windows removes it
the ``.`` of ``zarr.json``               the node's own document has this name
======================================== ================================================================

Escaped characters never contain the mark ``==``. The mark alone is the empty name. The mark with 32 hexadecimal digits
at the end is a shortened name. Components have at most 255 bytes, the limit of most filesystems. A longer component
keeps its beginning and gets the first 128 bits of the SHA-256 of the original's UTF-8 form. Names are never decoded,
because the root document has the original of each changed name. No path has a percent sign, so a reader that decodes a
path too often still requests the right object.

Names such as ``c`` or ``c.0.1`` are not changed. They look like chunks of an array, but the children of a group are
other objects (``c.0.1/zarr.json``). A group has no chunks, and an array has no children. Names that differ only in case
or in Unicode normalization are different names. Filesystems that treat them as equal are not supported. The device
names of Windows (``aux``, ``nul``) are not supported on Windows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from zarrckpt._errors import CorruptCheckpointError, UnsupportedValueError
from zarrckpt._format.state_path import KEY_BITS, is_unicode

MAX_COMPONENT_BYTES = 255
MAX_COMPONENTS = 128
"""Maximum number of components of a path. Deeper entries are refused."""

_MARK = "=="
_KEPT_BYTES = MAX_COMPONENT_BYTES - len(_MARK) - 32

# Without white space, and without characters that XML cannot contain.
_BEYOND_ASCII = (
    r"\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\ud7ff\ue000-\ufefe\uff00-\ufffd"
    r"\U00010000-\U0010ffff"
)
_UNCHANGED = rf"A-Za-z0-9._\-{_BEYOND_ASCII}"
_ESCAPED = re.compile(rf"[^{_UNCHANGED}]|\A_(?=_)|\A\.|\.\Z|(?<=\Azarr)\.(?=json\Z)")
_COMPONENT = rf"(?!__|\.|zarr\.json(?:[/\n]|\Z))[={_UNCHANGED}]++(?<!\.)"
_SOUND = re.compile(_COMPONENT)
"""A possible result of :func:`escape`. Unlike the names of this package's own groups, it never begins with "@"."""
_PATH = rf"{_COMPONENT}(?:/{_COMPONENT}){{0,{MAX_COMPONENTS - 1}}}+"
_PATHS = re.compile(rf"{_PATH}(?:\n{_PATH})*+")
"""Sound paths, one a line. No path has a line feed."""


def escape(component: str) -> str:
    """Return the node name for one level of a state dict, escaped as in the table above.

    Different names have different results. For shortened names this depends on their SHA-256.
    """
    if not component:
        return _MARK
    escaped = _ESCAPED.sub(lambda match: "".join(f"={byte:02X}" for byte in match[0].encode()), component)
    encoded = escaped.encode()
    if len(encoded) <= MAX_COMPONENT_BYTES:
        return escaped
    digest = hashlib.sha256(component.encode()).hexdigest()[:32]
    kept = encoded[:_KEPT_BYTES].decode("utf-8", "ignore")  # without an incomplete character
    kept = re.sub(r"=[0-9A-F]?\Z", "", kept)  # without an incomplete escaped byte
    return f"{kept}{_MARK}{digest}"


def node_path(components: Sequence[str | int]) -> str:
    """Return the node path of an entry, relative to its tree: escaped names joined by ``/``, integers in decimal.

    Keys that are equal in Python (1 and True, a str and an equal StrEnum member) have the same path. Without components
    the path is empty. Raises UnsupportedValueError for keys of other types, lone surrogates and too many components.
    """
    if len(components) > MAX_COMPONENTS:
        raise UnsupportedValueError(
            f"the entry {list(components)!r:.200} is nested {len(components)} levels deep, expected at most "
            f"{MAX_COMPONENTS}"
        )
    return "/".join(map(_node_name, components))


def _node_name(component: str | int) -> str:
    if isinstance(component, str) and is_unicode(component):
        return escape(component)
    if not isinstance(component, int):
        found = f"{component!r:.100} of type {type(component).__name__}"
    elif component.bit_length() > KEY_BITS:  # not shown, because Python may refuse its repr
        found = f"an int of {component.bit_length()} bits"
    else:
        return format(int(component), "d")
    raise UnsupportedValueError(
        f"the key {found} cannot be stored, expected a str of Unicode characters, or an int of up to {KEY_BITS} bits"
    )


def unique_paths(entries: Iterable[Sequence[str | int]]) -> dict[tuple[str | int, ...], str]:
    """Return the node path of each entry, in order. Repeated entries are included once.

    Raises UnsupportedValueError if two entries would have the same path (the keys 1 and "1"), or if the path of one
    entry would be a parent group of another. The message names both. Time grows with the total number of components.
    """
    owners: dict[str, tuple[str | int, ...]] = {}
    for entry in entries:
        components = tuple(entry)
        owner = owners.setdefault(node_path(components), components)
        if owner != components:
            raise _clash(owner, components)
    for path, components in owners.items():
        parent = path.rpartition("/")[0]
        while parent:
            if parent in owners:
                raise _clash(owners[parent], components)
            parent = parent.rpartition("/")[0]
    return {components: path for path, components in owners.items()}


def check_paths(paths: Sequence[str], where: str) -> None:
    """Check the node paths in a stored document before they become parts of keys.

    Accepts relative paths of one or more components without special meaning in any store or filesystem. Otherwise
    raises CorruptCheckpointError. ``where`` is the name of the document.
    """
    text = "\n".join(paths)
    longest = max(map(len, text.encode("utf-8", "replace").replace(b"/", b"\n").split(b"\n")))
    if longest <= MAX_COMPONENT_BYTES and text.count("\n") == len(paths) - 1 and _PATHS.fullmatch(text):
        return
    for path in paths:
        components = path.split("/", MAX_COMPONENTS)
        deep = f"it has more than {MAX_COMPONENTS} names" if len(components) > MAX_COMPONENTS else None
        if fault := deep or next(filter(None, map(_name_fault, components)), None):
            raise CorruptCheckpointError(f"{where}: {path!r:.300} is not a node path: {fault}")


def _name_fault(component: str) -> str | None:
    if not component:
        return "found an empty name, expected names joined by single '/'"
    if not _SOUND.fullmatch(component):
        # A marker with the name of one of this package's own groups would make clean-ups delete other saves' objects.
        return f"found the name {component!r:.100}, expected one with each special character as '=XX'"
    if len(component.encode()) > MAX_COMPONENT_BYTES:
        return f"a name in it is longer than {MAX_COMPONENT_BYTES} bytes"
    return None


def _clash(one: tuple[str | int, ...], other: tuple[str | int, ...]) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"the entries {list(one)!r:.500} and {list(other)!r:.500} would be stored under clashing node paths "
        f"{node_path(one)!r} and {node_path(other)!r}. Rename one of them"
    )
