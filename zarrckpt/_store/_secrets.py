"""Recognize secrets in options, and keep them out of pickles, reprs and messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from zarrckpt._errors import one_line

MARKER = "<secret, not pickled>"
"""The replacement of a secret in a pickled or printed recipe."""

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"secret|token|key|passw|passphrase|credential|connection_?string|auth$|authorization|cookie|private"
    r"|(^|[_-])(sas|pass|pwd|cert)($|[_-])|(^|[_-])sig(nature)?$|^session$",
    re.IGNORECASE,
)
# Names that look secret but are not: identifiers, switches and paths of files. They are compared without "_", "-" and
# the vendor's prefix.
_PUBLIC = {
    "bucketkeyenabled",
    "containerauthorizationtokenfile",
    "containercredentialsfulluri",
    "containercredentialsrelativeuri",
    "credentialtype",
    "fabrictokenserviceurl",
    "federatedtokenfile",
    "keyfilename",
    "skipsignature",
    "ssebucketkeyenabled",
    "ssekmskeyid",
    "webidentitytokenfile",
    "applicationcredentials",
}
# Values of gcsfs's option ``token`` that are not tokens.
_PUBLIC_VALUES = {"anon", "cloud", "google_default", "browser", "cache"}

# Servers quote the signed text and the key's id when they refuse a request. Presigned urls contain their signature.
_TAGS = "AWSAccessKeyId|SignatureProvided|StringToSign(?:Bytes)?|CanonicalRequest(?:Bytes)?|AuthenticationErrorDetail"
_PATTERNS = [
    (re.compile(rf"<({_TAGS})>.*?(?:</\1>|\Z)", re.IGNORECASE | re.DOTALL), rf"<\1>{HIDDEN}</\1>"),
    (
        re.compile(
            r"\b(X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig|token|password)"
            r"=[^&\s\"'<>]+",
            re.IGNORECASE,
        ),
        rf"\1={HIDDEN}",
    ),
    (re.compile(r"\b(authorization|x-amz-security-token|cookie)(\"?\s*:\s*)[^\n<]+", re.IGNORECASE), rf"\1\2{HIDDEN}"),
    (re.compile(r"\bBearer\s+[\w\-.~+/=]+", re.IGNORECASE), f"Bearer {HIDDEN}"),
]

# user:password@host. A name without ":" before "@" is Azure's container or a login name, which is not secret.
# A password may contain a "/", and before that a "@". Digits and a "/" after ":" are a port, not a password.
_LOGIN = re.compile(r"://[^/@\s:]*:(?!\d*/)([^@\s]*(?:@[^@/\s]*)*)@")
_QUERY = re.compile(r"([?&;#]([^?&;#=/\s]+)=)([^&;#\s\"'<>]+)")


def is_secret_name(name: object) -> bool:
    """Whether an option, header, environment variable or query parameter of this name contains a secret."""
    name = unquote(str(name))
    if not _SECRET_NAME.search(name):
        return False
    bare = re.sub(r"^(aws|azure|google|gcs)_|[_\-]", "", name.lower())
    return bare not in _PUBLIC


def redact(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``options`` in which :data:`MARKER` replaces each secret, also in nested ones."""
    return {name: _redacted(name, value) for name, value in options.items()}


def redact_url(url: str) -> str:
    """Return a url for messages, with its secrets replaced by :data:`HIDDEN` and control characters escaped."""
    return one_line(scrub(url))


def _url_secrets(text: str) -> Iterator[str]:
    """Yield the secrets in a url. The url may lack its protocol, such as a proxy's address."""
    url = text if "://" in text else f"://{text}"
    yield from (found[1] for found in _LOGIN.finditer(url))
    yield from (found[3] for found in _QUERY.finditer(url) if is_secret_name(found[2]))


def has_marker(value: Any) -> bool:
    """Whether :func:`redact` has replaced a secret in this value."""
    if isinstance(value, Mapping):
        return any(has_marker(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(has_marker(item) for item in value)
    return isinstance(value, str) and MARKER in value


def secret_values(options: Mapping[str, Any]) -> list[str]:
    """Return the secret texts in ``options`` and in the clouds' environment variables, for :func:`scrub`."""
    clouds = {
        name: value for name, value in os.environ.items() if name.upper().startswith(("AWS_", "AZURE_", "GOOGLE_"))
    }
    return [*_secrets_in(options), *_secrets_in(clouds)]


def hide(text: str, known: Iterable[str]) -> str:
    """Return ``text`` without the ``known`` secrets. The time is linear in its length."""
    for secret in sorted(set(known), key=len, reverse=True):
        # Very short secrets also occur in normal words. The patterns of :func:`scrub` still hide the usual places.
        if len(secret) >= 6:
            text = text.replace(secret, HIDDEN).replace(quote(secret, safe=""), HIDDEN)
    return text


def scrub(text: str, known: Iterable[str] = ()) -> str:
    """Return ``text`` without the ``known`` secrets and without texts that look like secrets.

    The time may grow with the square of the length, so callers shorten servers' texts first.
    """
    text = hide(text, known)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    text = _LOGIN.sub(f"://{HIDDEN}@", text)
    return _QUERY.sub(lambda found: f"{found[1]}{HIDDEN}" if is_secret_name(found[2]) else found[0], text)


def _redacted(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        # A dict with a secret name is a secret as a whole, such as a service account's key. In other dicts, such as
        # headers, each name decides.
        return MARKER if is_secret_name(name) else redact(value)
    if isinstance(value, list | tuple):
        return type(value)(_redacted(name, item) for item in value)
    if _is_secret(name, value):
        return MARKER
    text = _text(value)
    return MARKER if any(_url_secrets(text)) or scrub(text) != text else value


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value in _PUBLIC_VALUES):
        return False
    return is_secret_name(name)


def _secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from (map(str, value.values()) if is_secret_name(name) else _secrets_in(value))
        elif isinstance(value, list | tuple):
            for item in value:
                yield from _secrets_in({name: item})
        elif _is_secret(name, value):
            yield _text(value)
        else:
            yield from _url_secrets(_text(value))


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
