"""storage_options under the names that fsspec and obstore users know -> what obstore takes.

One table per cloud maps each known name to a target: "config:x" (the store's configuration), "client:x"
(the HTTP client), "attribute:x" (every put), or the name of a method that does more. An unknown name is
an error: an option that is silently dropped may be the encryption.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from zarrckpt._errors import StorageError

# obstore's own default bounds a whole request, body included, by 30 s: too short for 64 MiB over a slow
# line. A request that hangs still gets one more try within RETRY_TIMEOUT.
TIMEOUT = timedelta(seconds=180)
RETRY = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=300),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
}

_CLIENT = """
    allow_http allow_invalid_certificates connect_timeout default_content_type default_headers http1_only
    http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_only
    pool_idle_timeout pool_max_idle_per_host proxy_url proxy_ca_certificate proxy_excludes
    root_certificate randomize_addresses read_timeout timeout user_agent
"""
_SECONDS = ("connect_timeout", "read_timeout", "timeout", "pool_idle_timeout", "http2_keep_alive_timeout")

COMMON = {
    **{name: f"client:{name}" for name in _CLIENT.split()},
    "storage_class": "attribute:Storage-Class",
    "content_type": "attribute:Content-Type",
    "cache_control": "attribute:Cache-Control",
    "tags": "tags",
    "metadata": "metadata",
    "client_options": "client_options",
    "retry_config": "retry_config",
    "backend": "backend",
}

Table = Mapping[str, str]


@dataclass
class Translated:
    """What an obstore client is built from."""

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=lambda: {"timeout": TIMEOUT})
    retry: dict[str, Any] = field(default_factory=lambda: dict(RETRY))
    attributes: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    credential_provider: Callable[..., Any] | None = None


class Translator:
    """Reads options by a table into a :class:`Translated`. Subclassed per cloud for the options that need more."""

    cloud = ""
    table: ClassVar[Table] = COMMON
    prefixes: tuple[str, ...] = ()
    """obstore takes its names with these in front as well."""
    elsewhere: ClassVar[Table] = {}
    """Options that obstore cannot serve -> what to do instead."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.out = Translated()
        self.extra: dict[str, Any] = {}
        self.read(options, self.table, "storage_options")

    def read(self, options: Mapping[str, Any], table: Table, where: str) -> None:
        """Apply every option of one (nested) mapping. None means "not given", as in fsspec."""
        if not isinstance(options, Mapping):
            raise StorageError(f"{where} is of type {type(options).__name__}: expected a mapping of names to values")
        for name, value in options.items():
            if value is not None:
                self._apply(self._target(name, table, where), value)

    def _target(self, name: str, table: Table, where: str) -> str:
        lower = str(name).lower()
        bare = next((lower.removeprefix(start) for start in self.prefixes if lower.startswith(start)), lower)
        for known in (name, lower, bare):
            if known in table:
                return table[known]
        if lower in self.elsewhere:
            raise StorageError(f"{where}[{name!r}] cannot be served here: {self.elsewhere[lower]}")
        near = difflib.get_close_matches(bare, table, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(sorted(table))}."
        raise StorageError(
            f"{where}[{name!r}] is not known for {self.cloud}: {hint} Or use fsspec's own filesystem, "
            "with all its options, by storage_options={'backend': 'fsspec', ...}"
        )

    def _apply(self, target: str, value: Any) -> None:
        kind, _, name = target.partition(":")
        if kind == "config":
            self.out.config[name] = value
        elif kind == "client":
            self.out.client[name] = self._client_value(name, value)
        elif kind == "attribute":
            self.out.attributes[name] = str(value)
        else:
            getattr(self, f"set_{target}")(value)

    def _client_value(self, name: str, value: Any) -> Any:
        if name in _SECONDS:
            return duration(name, value)
        if name in ("root_certificate", "proxy_ca_certificate"):
            return pem(value)
        return value

    # -- the options that every cloud has

    def set_client_options(self, value: Mapping[str, Any]) -> None:
        self.read(value, {name: f"client:{name}" for name in _CLIENT.split()}, "client_options")

    def set_retry_config(self, value: Mapping[str, Any]) -> None:
        if not isinstance(value, Mapping):
            raise _unlike("retry_config", value, 'a mapping such as {"max_retries": 3, "retry_timeout": 60}')
        for name, item in value.items():
            if name not in RETRY:
                raise StorageError(f"retry_config[{name!r}] is not known: expected {', '.join(RETRY)}")
            if name == "max_retries" and type(item) is not int:
                raise _unlike("retry_config['max_retries']", item, "a number such as 3")
            self.out.retry[name] = duration("retry_config['retry_timeout']", item) if name == "retry_timeout" else item

    def set_tags(self, value: Mapping[str, str]) -> None:
        self.out.tags.update({str(name): str(item) for name, item in value.items()})

    def set_metadata(self, value: Mapping[str, str]) -> None:
        self.out.attributes.update({str(name): str(item) for name, item in value.items()})

    def set_backend(self, value: str) -> None:
        if value != "obstore":
            raise StorageError(f"storage_options['backend'] is {value!r}: expected 'obstore' or 'fsspec'")

    def set_ignored(self, value: Any) -> None:
        """Accepted for the sake of options that serve other libraries as well; without meaning here."""


def duration(name: str, value: Any) -> Any:
    """An option's seconds, or its text with units, as obstore takes them."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return timedelta(seconds=value)
    if isinstance(value, timedelta) or (isinstance(value, str) and re.fullmatch(r" *(\d+ *[a-zA-Z]+ *)+", value)):
        return value
    raise _unlike(name, value, "seconds, such as 30, or a text with a unit, such as '30s'")


def _unlike(name: str, value: Any, expected: str) -> StorageError:
    return StorageError(f"the option {name} is {value!r:.80}: expected {expected}")


def pem(value: Any) -> str:
    """A certificate: PEM text or bytes as they are, or the content of the file that is named."""
    text = value.decode() if isinstance(value, bytes) else os.fspath(value)
    if "-----BEGIN" in text:
        return text
    try:
        with open(text, encoding="ascii") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the certificate file {text!r} cannot be read: {error}") from error


def is_true(value: Any) -> bool:
    """A switch, as a bool or as the text of an environment variable."""
    return value is True or str(value).strip().lower() in ("1", "true", "yes", "on")


def is_plain_http(endpoint: str | None) -> bool:
    """Whether requests to an endpoint go without TLS; without an endpoint they go to the cloud's own, with it."""
    return re.match("http://", endpoint or "", re.IGNORECASE) is not None


def allow_plain_http(out: Translated, endpoint: str | None) -> None:
    """An endpoint that begins with http:// is meant so."""
    if is_plain_http(endpoint):
        out.client.setdefault("allow_http", True)
