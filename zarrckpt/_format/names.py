r"""Names of state-dict levels <-> names of Zarr nodes.

One level of a state dict (``"layers.0.weight"``) becomes one component of a node path. ASCII letters, digits, ``.``,
``_``, ``-`` and most characters beyond ASCII stay: every store, server, url and reader takes them unchanged. Each other
character is escaped: ``=`` and two uppercase hexadecimal digits for each byte of its UTF-8 form. A name with a lone
surrogate, which has no such form, is refused.

======================================== ================================================================
escaped                                  because
======================================== ================================================================
``=``                                    it introduces an escaped byte
``%``                                    clients of HTTP decode it, some of them twice
``/ \ ? # : @``                          they separate the parts of paths and urls; a leading ``@`` marks
                                         this package's own groups below the root
``" * < > |``                            Windows has no such file names
``[ ] { } ^ ~`` and the backtick         obstore and some clients of S3 encode them in keys
``! $ & ' ( ) + , ;`` and white space    servers, clients and shells differ in how they decode them
U+0000-001F, U+007F-009F, U+FFFE, U+FFFF control characters, and what the XML of a listing cannot hold
the first ``_`` of a leading ``__``      Zarr reserves these names
a leading ``.``                          ``..``, ``.zarray``, helper files; some servers hide such names
a trailing ``.``                         trimmed by Windows
the ``.`` of ``zarr.json``               the node's own document
======================================== ================================================================

The mark ``==`` never comes from an escaped character. Alone it is the empty name. Followed by 32 hexadecimal digits at
the end it marks a shortened name: components have at most 255 bytes, the limit of most filesystems; a longer one keeps
its beginning and gets the first 128 bits of the SHA-256 of the original's UTF-8 form. Nothing here is ever undone: of
every name that was changed the root document has the original. No percent sign is in any path, so a reader that decodes
a path too often still asks for the right object.

Names such as ``c`` or ``c.0.1`` stay. They look like chunks of an array, but the children of a group are
other objects (``c.0.1/zarr.json``), a group has no chunks and an array no children. Names that differ
only in case or in Unicode normalisation are different names: filesystems that take them for one are not
supported, and neither are the device names of Windows (``aux``, ``nul``) on Windows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from zarrckpt._errors import CorruptCheckpointError, UnsupportedValueError
from zarrckpt._format.state_path import KEY_BITS, is_unicode

MAX_COMPONENT_BYTES = 255
MAX_COMPONENTS = 128
"""Of a path: what is nested deeper has no place in any store."""

_MARK = "=="
_KEPT_BYTES = MAX_COMPONENT_BYTES - len(_MARK) - 32

# Without white space and what XML cannot hold.
_BEYOND_ASCII = (
    r"\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\ud7ff\ue000-\ufefe\uff00-\ufffd"
    r"\U00010000-\U0010ffff"
)
_UNCHANGED = rf"A-Za-z0-9._\-{_BEYOND_ASCII}"
_ESCAPED = re.compile(rf"[^{_UNCHANGED}]|\A_(?=_)|\A\.|\.\Z|(?<=\Azarr)\.(?=json\Z)")
_SOUND = re.compile(rf"(?!__|\.|zarr\.json\Z)[={_UNCHANGED}]+(?<!\.)")
"""A component that :func:`escape` may have made; names of this package's own groups begin with "@"."""


def escape(component: str) -> str:
    """The node name for one level of a state dict; the table above says how.

    Different names have different results; shortened ones, as far as SHA-256 tells them apart.
    """
    if not component:
        return _MARK
    escaped = _ESCAPED.sub(lambda match: _code(match[0]), component)
    encoded = escaped.encode()
    if len(encoded) <= MAX_COMPONENT_BYTES:
        return escaped
    digest = hashlib.sha256(component.encode()).hexdigest()[:32]
    kept = encoded[:_KEPT_BYTES].decode("utf-8", "ignore")  # no half characters,
    kept = re.sub(r"=[0-9A-F]?\Z", "", kept)  # and no half codes
    return f"{kept}{_MARK}{digest}"


def node_path(components: Sequence[str | int]) -> str:
    """The node path of an entry, relative to its tree: escaped names joined by ``/``, integers in decimal.

    Keys that Python holds equal (1 and True, a str and an equal StrEnum member) have one path. No
    components give the empty path. Raises UnsupportedValueError for keys of other types, and for lone surrogates.
    """
    if len(components) > MAX_COMPONENTS:
        raise UnsupportedValueError(
            f"the entry {list(components)!r:.200} is nested {len(components)} levels deep, at most {MAX_COMPONENTS} "
            "are kept"
        )
    return "/".join(map(_node_name, components))


def _node_name(component: str | int) -> str:
    if isinstance(component, str) and is_unicode(component):
        return escape(component)
    if not isinstance(component, int):
        found = f"{component!r:.100} of type {type(component).__name__}"
    elif component.bit_length() > KEY_BITS:  # its repr may be refused, so it can't be shown
        found = f"an int of {component.bit_length()} bits"
    else:
        return format(int(component), "d")
    raise UnsupportedValueError(
        f"nothing can be stored under the key {found}: expected a str of Unicode characters, or an int of up to "
        f"{KEY_BITS} bits"
    )


def unique_paths(entries: Iterable[Sequence[str | int]]) -> dict[tuple[str | int, ...], str]:
    """The node path of each entry, in order; an entry that comes twice counts once.

    Raises UnsupportedValueError naming both where two entries would share a node (the keys 1 and "1"),
    or where a node would have to be one entry's array and the group that holds another. Time grows with
    the total number of components.
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


def check_paths(paths: Iterable[object], where: str) -> tuple[str, ...]:
    """The paths of nodes from a stored document, before they become parts of keys.

    Accepts relative paths of one or more components that no store or filesystem takes for anything but names.
    Raises CorruptCheckpointError otherwise; ``where`` names the document.
    """
    checked = []
    for path in paths:
        if not isinstance(path, str):
            raise CorruptCheckpointError(f"{where}: {path!r:.80} is no node path, expected a string")
        components = path.split("/", MAX_COMPONENTS)
        deep = f"more than {MAX_COMPONENTS} names" if len(components) > MAX_COMPONENTS else None
        if fault := deep or next(filter(None, map(_name_fault, components)), None):
            raise CorruptCheckpointError(f"{where}: {path!r:.300} is no node path: {fault}")
        checked.append(path)
    return tuple(checked)


def _name_fault(component: str) -> str | None:
    if not component:
        return "found an empty name, expected names joined by single '/'"
    if not _SOUND.fullmatch(component):
        # A marker that names one of this package's own groups would have clean-ups delete other saves' objects.
        return f"found the name {component!r:.100}, expected one with each special character as '=XX'"
    if len(component.encode()) > MAX_COMPONENT_BYTES:
        return f"a name in it is longer than {MAX_COMPONENT_BYTES} bytes"
    return None


def _clash(one: tuple[str | int, ...], other: tuple[str | int, ...]) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"the entries {list(one)!r:.500} and {list(other)!r:.500} would be stored under clashing node paths "
        f"{node_path(one)!r} and {node_path(other)!r}; rename one of them"
    )


def _code(text: str) -> str:
    return "".join(f"={byte:02X}" for byte in text.encode())
