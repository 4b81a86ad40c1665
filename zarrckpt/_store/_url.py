"""Parse users' urls and paths. ``s3://`` never becomes ``s3:/``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from zarrckpt._errors import StorageError
from zarrckpt._store._secrets import redact_url

_PROTOCOL_NAME = r"[A-Za-z][A-Za-z0-9+.\-_]+"
_PROTOCOL = re.compile(rf"({_PROTOCOL_NAME})://")
_ONE_SLASH = re.compile(rf"({_PROTOCOL_NAME}):/(?!/)(.*)", re.DOTALL)
_CHAIN = re.compile(rf"({_PROTOCOL_NAME})::")
"""Matches the beginning of a chain of urls of fsspec, such as ``simplecache::s3://bucket/run``."""
_TYPO = re.compile(rf"\s*({_PROTOCOL_NAME})\s*(?::|//)(.*)", re.DOTALL)
_ARN = re.compile(r"arn:[^:]*:s3:(?:::)?(.*)", re.DOTALL)
_LATE_URL = re.compile(rf"{_PROTOCOL_NAME}://.*", re.DOTALL)

CLOUD = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "adl": "az",
}
"""The cloud's short name for each protocol that obstore supports."""

_LOCAL = ("file", "local")

_TYPED = {*CLOUD, "file", "hf", "http", "https", "memory", "sftp"}
"""Protocols in likely typing mistakes: "s3:bucket/x" is a mistake, "lr:0.1/x" is a folder."""

RESOLVERS = {"async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "chained", "dask", "dir", "dvc"} | {
    *("filecache", "generic", "kerchunk", "libarchive", "reference", "simplecache", "tar", "zip")
}
"""Protocols of fsspec whose filesystem opens another url, unpacks it, or follows references in it."""


@dataclass(frozen=True)
class ParsedUrl:
    """A parsed url. Its ``kind`` is "local", "s3", "gs", "az" or "fsspec"."""

    kind: str
    address: str
    """The normalised url or path, with the credentials that it contains."""
    bucket: str = ""
    path: str = ""
    """The absolute path of a local url, or the key prefix in a cloud, without "/" at either end."""
    account: str = ""
    """Azure's storage account, if the url names one (``container@account.dfs...``)."""


def normalize(url: str | os.PathLike[str]) -> str:
    """Return a url without trailing "/", or the absolute path of a local one.

    ``str(Path("s3://b/x"))`` is "s3:/b/x", so a missing slash after a known protocol is added. A text without a known
    protocol is a local path as a whole, even if it contains "::". Raises StorageError for a text that looks like a
    mistyped url, such as "s3//bucket/x".
    """
    text = text_of(url)
    if not text:
        raise StorageError("the url is empty: expected a local path or a url such as 's3://bucket/run/step-7'")
    text = _repair(text)
    found = _PROTOCOL.match(text)
    if found is None and not _begins_chain(text):
        _refuse_mistyped(text)
        return os.path.abspath(os.path.expanduser(text))
    if found is not None and found[1].lower() in _LOCAL:
        return _local_path(text, text[found.end() :])
    root = found.end() if found else 0
    _check_text(text, str.encode)  # only a local path may contain bytes that are not UTF-8
    return text[:root] + text[root:].rstrip("/")


def parse(url: str | os.PathLike[str]) -> ParsedUrl:
    """Parse a url. Raises StorageError for a url that no store supports."""
    address = normalize(url)
    found = _PROTOCOL.match(address)
    if found is None and not _begins_chain(address):
        return ParsedUrl("local", address, path=address)
    protocol = found[1].lower() if found else ""
    if found is None or protocol not in CLOUD:
        return ParsedUrl("fsspec", address)
    bucket, _, path = address[found.end() :].partition("/")
    account = ""
    if CLOUD[protocol] == "az" and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        account = host.partition(".")[0]
    if not bucket or "@" in bucket or ":" in bucket:
        raise StorageError(
            f"{redact_url(address)!r} names no bucket: expected {protocol}://bucket/path. Pass credentials in the "
            "environment or storage_options, and an endpoint in storage_options"
        )
    return ParsedUrl(CLOUD[protocol], address, bucket, path.strip("/"), account)


def has_protocol(text: str) -> bool:
    """Whether a text is a url and not a plain path."""
    return _PROTOCOL.match(_repair(text)) is not None


def is_chain(url: str) -> bool:
    """Whether a url is a chain of urls of fsspec, joined by "::". In a url of one protocol "::" is a part of a name."""
    found = _PROTOCOL.match(url)
    _, colons, rest = url[found.end() if found else 0 :].partition("::")
    return _begins_chain(url) or (bool(colons) and "://" in rest)


def join_url(url: str | os.PathLike[str], name: str) -> str:
    """Return the url or path of ``name`` (one or more path components) below ``url``."""
    (base, query), tail = split_query(normalize(url)), name.strip("/")
    if not tail:
        return f"{base}{query}"
    return f"{base}{'' if base.endswith('/') else '/'}{tail}{query}"


def split_query(url: str) -> tuple[str, str]:
    """Return a url without its query, and the query with its "?", which signs the requests of a presigned url.

    Only web addresses have one. In other urls "?" is a part of a name.
    """
    if not url.lower().startswith(("http://", "https://")):
        return url, ""
    base, mark, query = url.partition("?")
    return base, f"{mark}{query}"


def check_endpoint(text: str) -> None:
    """Raise StorageError for a text that is not a server's address. obstore panics at some of them."""
    try:
        found = urlsplit(text)
        valid = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        valid = False
    if not valid or not re.fullmatch("[!-~]+", text):
        raise StorageError(
            f"the endpoint {redact_url(text)!r} is not an address of a server: expected https://host or "
            "http://host:port, in ASCII and without spaces"
        )


def text_of(url: str | os.PathLike[str]) -> str:
    """Return a url or path as text. Raises StorageError for other types, and for text that the system cannot encode."""
    if not isinstance(url, str | os.PathLike):
        raise StorageError(f"a url must be a str or a path, not {type(url).__name__}: pass str(...) of it")
    text = os.fspath(url)
    if not isinstance(text, str):
        raise StorageError("a path must be text, not bytes: pass os.fsdecode(...) of it")
    return _check_text(text)


def _check_text(text: str, encode: Callable[[str], bytes] = os.fsencode) -> str:
    try:
        valid = b"\0" not in encode(text)
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise StorageError(f"{redact_url(text)!r} contains a NUL or a lone surrogate: remove it from the path or url")
    return text


def _begins_chain(text: str) -> bool:
    found = _CHAIN.match(text)
    return found is not None and found[1].lower() in RESOLVERS


def _refuse_mistyped(text: str) -> None:
    """Raise StorageError for a text that is most likely a mistyped url."""
    if meant := _meant_url(text):
        raise StorageError(
            f"{redact_url(text)!r} looks like a mistyped url: expected {redact_url(meant)!r}. For a local folder of "
            "this name, pass its absolute path"
        )


def _meant_url(text: str) -> str:
    """Return the url that a text without a protocol at its beginning resembles, or "" for a path."""
    if found := _ARN.fullmatch(text):
        return f"s3://{found[1]}" if found[1] and ":" not in found[1] else "s3://bucket/path"
    if (found := _TYPO.fullmatch(text)) and (protocol := found[1].lower()) in _TYPED:
        return f"{protocol}://{'/' if protocol in _LOCAL else ''}{found[2].lstrip(':/ ')}"
    found = None if text[0] in "/~" else _LATE_URL.search(text)
    return found[0] if found else ""


def _repair(text: str) -> str:
    if _begins_chain(text):
        first, *others = text.split("::")
        return "::".join([first, *map(_repair, others)])
    found = _ONE_SLASH.match(text)
    if found is None or not _known(found[1].lower()):
        return text
    # "file:/tmp/x" is a valid url with an empty host. With any other protocol, a Path has removed one slash.
    lost = "//" if found[1].lower() in _LOCAL else "/"
    return f"{found[1]}:{lost}/{found[2]}"


def _known(protocol: str) -> bool:
    if protocol in CLOUD or protocol in _LOCAL:
        return True
    import fsspec

    return protocol in fsspec.available_protocols()


def _local_path(url: str, rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise StorageError(f"{redact_url(url)!r} names a host: expected 'file:///path', with three slashes")
    return os.path.abspath(_check_text(unquote(f"/{path}")))
