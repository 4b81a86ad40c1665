"""Translate storage_options to the arguments of obstore's clients.

obstore's own names are passed unchanged, and obstore refuses unknown ones. The most common names of s3fs, gcsfs and
adlfs are translated. No option is dropped silently, because it may be one for encryption.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from zarrckpt._errors import StorageError, one_line
from zarrckpt._store import _aws
from zarrckpt._store._url import ParsedUrl, check_endpoint

# obstore's default for a whole request with its body is 30 s, which is too short for 16 MiB over a slow network. With
# this timeout a request that hangs still gets a second try within the retry_timeout.
REQUEST_TIMEOUT = timedelta(seconds=180)
# Each pause is random, between the first pause and ``base`` times the last one. With obstore's base of 2 the pauses do
# not grow on average, so if a server throttles many clients, they fail one after the other.
_BACKOFF = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 4}
RETRY = {"max_retries": 30, "retry_timeout": timedelta(seconds=300), "backoff": _BACKOFF}

_PREFIXES = {"s3": ("aws_",), "gs": ("google_", "gcs_"), "az": ("azure_storage_", "azure_")}
"""Optional prefixes of obstore's names."""

_ALIASES = {
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "endpoint_url_s3": "endpoint",
    },
    "gs": {"anon": "skip_signature", "endpoint_url": "base_url", "service_account_path": "service_account"},
    "az": {
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "access_key": "account_key",
        "master_key": "account_key",
        "sas_key": "sas_token",
        "bearer_token": "token",
    },
}

_SIGN_IN_METHODS = {
    "s3": (
        "skip_signature",
        "access_key_id secret_access_key session_token",
        "profile",
        "web_identity_token_file",
        "container_credentials_relative_uri container_credentials_full_uri",
    ),
    "gs": (
        "skip_signature",
        "token",
        "service_account",
        "service_account_key",
        "application_credentials",
        "bearer_token",
    ),
    "az": ("skip_signature", "account_key", "sas_token", "token", "client_secret", "use_azure_cli"),
}
"""Options of each way to sign in, or not to. A caller uses at most one way. A credential_provider is another way."""
_SWITCHES = ("skip_signature", "use_azure_cli")

_FIXED_CREDENTIALS = {
    "s3": ("access_key_id", "session_token"),
    "gs": ("bearer_token",),
    "az": ("account_key", "sas_token", "token"),
}

_CLIENT = """
    allow_http allow_invalid_certificates connect_timeout default_content_type default_headers http1_only
    http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_only
    pool_idle_timeout pool_max_idle_per_host proxy_url proxy_ca_certificate proxy_excludes
    root_certificate randomize_addresses read_timeout timeout user_agent
"""
_SECONDS = ("connect_timeout", "read_timeout", "timeout", "pool_idle_timeout", "http2_keep_alive_timeout")

_S3FS_OPTIONS = "To use options of s3fs, gcsfs or adlfs, pass storage_options={'backend': 'fsspec', ...}"

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass
class ClientArguments:
    """The arguments of an obstore client."""

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=lambda: {"timeout": REQUEST_TIMEOUT})
    retry: dict[str, Any] = field(default_factory=lambda: dict(RETRY))
    put: dict[str, Any] = field(default_factory=dict)
    """Arguments of every put: attributes and tags."""
    credential_provider: Callable[..., Any] | None = None
    keys: tuple[str, ...] | None = None
    """The keys that the provider returns, if they were passed as options."""
    fixed_credentials: str | None = None
    """The option that contains the credentials."""
    renewable: bool = True
    """Whether the source of the credentials may return new ones later."""
    redirect_hosts: tuple[str, ...] = ()
    """Hosts that redirects may lead to in addition to the endpoint's, with their subdomains; "*" for all."""


def translate(parsed: ParsedUrl, options: Mapping[str, Any], provider: Callable[..., Any] | None) -> ClientArguments:
    """Translate options, environment and profile to the arguments of obstore's client. None means "not given"."""
    out, special = ClientArguments(credential_provider=provider), {"s3": "profile", "gs": "token"}.get(parsed.kind)
    given: dict[str, tuple[str, Any]] = {}
    for name, value in options.items():
        if value is not None:
            _refuse_controls(_obstore_name(parsed.kind, name), name, value)
            first, _ = given.setdefault(_obstore_name(parsed.kind, name), (name, value))
            if first != name:
                raise StorageError(
                    f"storage_options contain {first!r} and {name!r}, which mean the same: pass one of them"
                )
    if _signs_in(parsed.kind, given, provider):
        # The caller's options take precedence over AWS_SKIP_SIGNATURE and similar variables.
        out.config["skip_signature"] = False
    fixed = (given[bare][0] for bare in _FIXED_CREDENTIALS[parsed.kind] if bare in given)
    out.fixed_credentials = next(fixed, None)
    _, extra = given.pop(special or "", ("", None))
    for bare, (name, value) in given.items():
        _set_option(out, parsed.kind, bare, name, value)
    match parsed.kind:
        case "s3":
            _complete_s3(out, parsed.bucket, extra)
        case "gs":
            _complete_gs(out, extra)
        case _:
            _complete_az(out, parsed.account)
    out.renewable = out.fixed_credentials is None and not is_true(out.config.get("skip_signature"))
    return out


_MULTILINE = ("root_certificate", "proxy_ca_certificate", "service_account_key")
"""Options that may be the content of a file, with line breaks."""


def _refuse_controls(bare: str, name: str, value: Any) -> None:
    """Raise StorageError for a text that requests cannot contain, since obstore panics at many of them."""
    if bare in _MULTILINE or (bare == "token" and isinstance(value, Mapping)):
        return
    if isinstance(value, Mapping):
        for inner, item in value.items():
            _refuse_controls(str(inner), f"{name}[{one_line(str(inner))!r}]", item)
            _refuse_controls("", f"{name}, in a name,", str(inner))
    elif isinstance(value, str) and (found := _CONTROL.search(value)):
        raise StorageError(
            f"the option {name} contains the control character {found[0]!r} at position {found.start()}: remove it. A "
            "text that was read from a file often ends with a line break, which strip() removes"
        )


def unknown(cloud: str, name: str, table: str = "storage_options") -> StorageError:
    """Return the error for an option that obstore does not have."""
    return StorageError(f"{table}[{name!r}] is not known to obstore for {cloud}://: check its name. {_S3FS_OPTIONS}")


def _signs_in(cloud: str, given: Mapping[str, tuple[str, Any]], provider: object) -> bool:
    """Whether the caller passes a way to sign in. Raises StorageError for two ways."""
    found = {} if provider is None else {"provider": "credential_provider"}
    for way in _SIGN_IN_METHODS[cloud]:
        for name, value in (given[bare] for bare in way.split() if bare in given):
            if way not in _SWITCHES or is_true(value):
                found.setdefault(way, name)
    if len(found) > 1:
        one, other, *_ = found.values()
        raise StorageError(f"{one!r} and {other!r} are two ways to sign in at {cloud}://: pass one of them")
    return bool(found) and "skip_signature" not in found


def _obstore_name(cloud: str, name: str) -> str:
    """Return obstore's name for an option, without the cloud's prefix."""
    lower = name.lower()
    bare = next((lower.removeprefix(start) for start in _PREFIXES[cloud] if lower.startswith(start)), lower)
    return _ALIASES[cloud].get(bare, bare)


def _set_option(out: ClientArguments, cloud: str, bare: str, name: str, value: Any) -> None:
    if bare in _CLIENT.split():
        out.client[bare] = _client_value(bare, value)
    elif bare == "client_options":
        for inner, item in _table("client_options", value, {"timeout": 600}).items():
            if inner not in _CLIENT.split():
                raise unknown(cloud, str(inner), table="client_options")
            out.client[inner] = _client_value(inner, item)
    elif bare == "retry_config":
        out.retry = _retry(value)
    elif bare == "redirect_hosts":
        out.redirect_hosts = _names(bare, value)
    elif bare == "storage_class":
        out.put["attributes"] = {"Storage-Class": str(value)}
    elif bare == "tags":
        out.put["tags"] = {str(tag): str(item) for tag, item in _table("tags", value, {"team": "nlp"}).items()}
    elif isinstance(value, str | bool | int | os.PathLike):
        out.config[bare] = value if isinstance(value, bool) else str(value)
    else:
        kind = type(value).__name__
        raise StorageError(f"the option {name} is a {kind}: expected a str, an int, a bool or a path. {_S3FS_OPTIONS}")


def _retry(value: Any) -> dict[str, Any]:
    """Return a ``retry_config`` completed with the defaults. Raise for unknown names, which obstore would ignore."""
    given = dict(_table("retry_config", value, {"max_retries": 3, "retry_timeout": 60}))
    backoff = given.pop("backoff", None)
    backoff = dict(_table("retry_config['backoff']", {} if backoff is None else backoff, {"base": 3}))
    for table, defaults in ((given, RETRY), (backoff, _BACKOFF)):
        for name, item in table.items():
            if name not in defaults:
                raise StorageError(f"retry_config has no {name!r}: expected {', '.join(defaults)}")
            if name == "max_retries" and (type(item) is not int or item < 0):
                raise _wrong_value("retry_config['max_retries']", item, "a number such as 3")
            table[name] = item if name in ("max_retries", "base") else _seconds(f"retry_config[{name!r}]", item)
    return {**RETRY, **given, "backoff": {**_BACKOFF, **backoff}}


def _table(name: str, value: Any, example: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_value(name, value, f"a mapping such as {dict(example)}")
    return value


def _names(name: str, value: Any) -> tuple[str, ...]:
    names = re.split("[ ,]+", value.strip(" ,")) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(item, str) for item in names):
        raise _wrong_value(name, value, "a list of host names, such as ['cdn.example.com'], or '*'")
    return tuple(filter(None, names))


def _client_value(name: str, value: Any) -> Any:
    if name in _SECONDS:
        return _duration(name, value)
    return _read_certificate(value) if name in ("root_certificate", "proxy_ca_certificate") else value


def _duration(name: str, value: Any) -> Any:
    """Return an option's seconds, or its text with units, in obstore's form."""
    if isinstance(value, str) and re.fullmatch(r" *(\d+ *[a-zA-Z]+ *)+", value):
        return value
    return _seconds(name, value, ", or a text with a unit, such as '30s'")


def _seconds(name: str, value: Any, otherwise: str = "") -> timedelta:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return timedelta(seconds=value)
    if isinstance(value, timedelta):
        return value
    raise _wrong_value(name, value, f"seconds, such as 30{otherwise}")


def _wrong_value(name: str, value: Any, expected: str) -> StorageError:
    return StorageError(f"the option {name} is {value!r:.80}: expected {expected}")


def _read_certificate(value: Any) -> str:
    """Return a certificate in PEM. The value is PEM text, PEM bytes or the name of a file."""
    text = value.decode() if isinstance(value, bytes) else os.path.expanduser(value)
    if "-----BEGIN" in text:
        return text
    try:
        with open(text, encoding="ascii") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the certificate file {text!r} cannot be read: {error}") from error


def is_true(value: Any) -> bool:
    """Whether a switch is on. It is a bool or the text of an environment variable."""
    return value is True or str(value).strip().lower() in ("1", "true", "yes", "on")


def _is_plain_http(endpoint: str | None) -> bool:
    """Whether requests to an endpoint are sent without TLS. Without an endpoint they use the cloud's own, with TLS."""
    return (endpoint or "").lower().startswith("http://")


def _allow_plain_http(out: ClientArguments, endpoint: str | None) -> None:
    """Allow plain HTTP for an endpoint that begins with http://. Raises StorageError if it is no address."""
    if endpoint:
        check_endpoint(endpoint)
    if _is_plain_http(endpoint):
        out.client.setdefault("allow_http", True)


# -- S3


def is_amazon(out: ClientArguments) -> bool:
    """Whether requests to S3 go to Amazon itself, which honours conditional puts."""
    endpoint = out.config.get("endpoint")
    return not endpoint or re.search(r"\.amazonaws\.com(\.cn)?(:\d+)?$", endpoint) is not None


def is_directory_bucket(bucket: str) -> bool:
    """Whether a bucket is one of S3 Express One Zone, or an access point of one. Amazon reserves these names."""
    return bucket.endswith(("--x-s3", "--xa-s3"))


def _complete_s3(out: ClientArguments, bucket: str, profile: str | None) -> None:
    config = out.config
    key, secret, token = (config.pop(name, None) for name in ("access_key_id", "secret_access_key", "session_token"))
    anonymous = is_true(config.get("skip_signature", os.environ.get("AWS_SKIP_SIGNATURE")))
    if key or secret or token:
        _use_keys(out, key, secret, token)
    elif profile is not None or not (out.credential_provider or anonymous or _obstore_finds_credentials(config)):
        out.credential_provider = _aws.find_credentials(profile)
    found = _aws.find_settings(profile, config.get("region"), config.pop("endpoint", None))
    config.setdefault("copy_if_not_exists", os.environ.get("AWS_COPY_IF_NOT_EXISTS") or "multipart")
    if found.region:
        config["region"] = found.region
    if found.virtual_hosts and "." not in bucket and not os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"):
        config.setdefault("virtual_hosted_style_request", True)
    if endpoint := found.endpoint:
        _use_endpoint(out, endpoint, bucket)
    elif is_directory_bucket(bucket):
        config.setdefault("s3_express", True)
    # TLS protects the payload, and so does the loopback interface. Hashing the payload for the signature would cost one
    # core per GB/s. Over plain HTTP to another machine the signed payload is the only protection: an attacker on the
    # network could otherwise put other bytes with the same signature.
    if not _aws.first_variable("AWS_UNSIGNED_PAYLOAD") and (not _is_plain_http(endpoint) or _is_loopback(endpoint)):
        config.setdefault("unsigned_payload", True)
    bundle = _aws.first_variable("AWS_CA_BUNDLE")
    if bundle and "root_certificate" not in out.client:
        out.client["root_certificate"] = _read_certificate(bundle)


def _use_keys(out: ClientArguments, key: str | None, secret: str | None, token: str | None) -> None:
    if not (key and secret):
        raise StorageError(
            "storage_options contain only one of key and secret (access key id and secret access key), or a token "
            "without them: pass both, and the token with them"
        )
    out.keys = (key, secret, token or "")
    keys = {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
    # A provider, because with keys in its configuration obstore would also use AWS_SESSION_TOKEN.
    out.credential_provider = lambda: keys


def _obstore_finds_credentials(config: Mapping[str, Any]) -> bool:
    names = ("web_identity_token_file", "container_credentials_relative_uri", "container_credentials_full_uri")
    named = any(config.get(name) or os.environ.get(f"AWS_{name.upper()}") for name in names)
    return named or _aws.has_keys_in_environment()


def _use_endpoint(out: ClientArguments, endpoint: str, bucket: str) -> None:
    endpoint = endpoint.rstrip("/")
    scheme, separator, host = endpoint.partition("://")
    if not separator:
        raise StorageError(f"the endpoint {endpoint!r} has no protocol: begin it with 'https://' or 'http://'")
    if is_true(out.config.get("virtual_hosted_style_request")) and not host.startswith(f"{bucket}."):
        # In this style obstore expects the bucket in the endpoint.
        endpoint = f"{scheme}://{bucket}.{host}"
    # obstore prefers the variable AWS_ENDPOINT_URL_S3 to the option ``endpoint``, but not to ``aws_endpoint_url_s3``.
    out.config["endpoint"] = out.config["aws_endpoint_url_s3"] = endpoint
    _allow_plain_http(out, endpoint)


def _is_loopback(endpoint: str | None) -> bool:
    """Whether a server's address is on the loopback interface."""
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


# -- Google Cloud Storage and Azure


def _complete_gs(out: ClientArguments, token: Any) -> None:
    """Complete the options for Google Cloud Storage. gcsfs accepts several kinds of ``token``."""
    if isinstance(token, Mapping):
        out.config["service_account_key"] = json.dumps(dict(token))
    elif token == "anon":
        out.config["skip_signature"] = True
    elif isinstance(token, str | os.PathLike) and os.path.isfile(path := os.path.expanduser(token)):
        out.config["application_credentials"] = path
    elif token is not None:
        raise StorageError(
            "storage_options['token'] for gs:// must be 'anon', a service account's dict, or the path of its JSON "
            "file. For a raw access token pass bearer_token=. For the machine's own account pass no token"
        )
    _allow_plain_http(out, out.config.get("base_url") or _aws.first_variable("GOOGLE_BASE_URL"))


def _complete_az(out: ClientArguments, account: str) -> None:
    named = out.config.setdefault("account_name", account) if account else ""
    if named != account:
        raise StorageError(f"the url names the account {account!r} but the option account_name is {named!r}: pass one")
    emulator = is_true(out.config.get("use_emulator", os.environ.get("AZURE_STORAGE_USE_EMULATOR")))
    endpoint = out.config.get("endpoint") or _aws.first_variable("AZURE_STORAGE_ENDPOINT")
    _allow_plain_http(out, "http://127.0.0.1" if emulator else endpoint)
