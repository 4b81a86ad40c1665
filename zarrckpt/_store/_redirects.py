"""Prevent obstore from sending requests to other hosts after a redirect.

obstore follows redirects to any host and has no option against it. Its HTTP library removes ``Authorization`` only from
the first request to another host. A second redirect by that host sends it there. All other headers (session tokens,
customer keys for encryption, ``default_headers``) are sent, and the url with its query as ``Referer``.

So a client without a proxy gets an unreachable proxy for all hosts except its own. A redirect to another host then
fails before a byte is sent there.
"""

from __future__ import annotations

import inspect
import ipaddress
import os
import re
import socket
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from zarrckpt._errors import StorageError
from zarrckpt._store._aws import has_keys_in_environment
from zarrckpt._store._options import ClientArguments, is_true
from zarrckpt._store._secrets import redact_url

NO_PROXY_THERE = "http://127.0.0.1:0"
"""No server can listen on port 0."""

HOSTS_VARIABLE = "ZARRCKPT_REDIRECT_HOSTS"

_ENDPOINTS = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
_ENDPOINT_VARIABLES = {"gs": ("GOOGLE_BASE_URL",), "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")}
_CLOUD_HOSTS = {
    "s3": ("amazonaws.com", "amazonaws.com.cn"),
    "gs": ("googleapis.com",),
    "az": ("core.windows.net", "fabric.microsoft.com"),
}
"""The domains of each cloud's storage, which are used if no endpoint is passed."""
_SIGN_IN_HOSTS = {
    "s3": ("amazonaws.com", "amazonaws.com.cn"),
    "gs": ("googleapis.com", "google.internal", "accounts.google.com"),
    "az": ("login.microsoftonline.com", "login.microsoftonline.us", "login.partner.microsoftonline.cn"),
}
"""The servers from which obstore itself gets credentials, in addition to the machine's own services."""
_MACHINE_HOSTS = ("169.254.0.0/16", "fd00:ec2::/32")
_OTHER_CLIENT = ", or use s3fs, which follows no redirects: storage_options={'backend': 'fsspec', ...}"
_CLOUD_VARIABLE = re.compile("(AWS|GOOGLE|AZURE|AZURITE|IDENTITY|MSI)_")
_OWN_CREDENTIALS = {
    "s3": "",
    "gs": "bearer_token service_account_key",
    "az": "account_key sas_token token",
}
"""Options that need no server to sign in."""


def restrict_redirects(kind: str, out: ClientArguments) -> None:
    """Restrict the redirects of a client (``s3``, ``gs``, ``az``) to its own hosts and ``redirect_hosts``.

    Raises StorageError if redirects to other hosts may be followed and requests contain secrets that these hosts would
    get.
    """
    allowed = out.redirect_hosts or tuple(re.split("[ ,]+", os.environ.get(HOSTS_VARIABLE, "").strip(" ,")))
    allowed = tuple(name for name in allowed if name)
    endpoint = _endpoint(kind, out)
    proxied = _is_proxied(kind, out, endpoint)
    if not proxied and "*" not in allowed:
        hosts = dict.fromkeys((*_own_hosts(kind, out, endpoint), *map(_host, allowed)))
        out.client["proxy_url"], out.client["proxy_excludes"] = NO_PROXY_THERE, ",".join(hosts)
    if allowed or (proxied and endpoint and not _is_of(endpoint, _CLOUD_HOSTS[kind])):
        why = (
            f"redirects to other hosts are allowed (redirect_hosts, {HOSTS_VARIABLE})"
            if allowed
            else ("behind a proxy zarrckpt cannot stop redirects to other hosts (NO_PROXY leaves hosts out)")
        )
        _refuse_secret_headers(kind, out, why)


def _endpoint(kind: str, out: ClientArguments) -> str:
    """Return the url of the server, or "" for the cloud's own servers."""
    variables = (os.environ.get(name) for name in _ENDPOINT_VARIABLES.get(kind, ()))
    return str(out.config.get(_ENDPOINTS[kind]) or next(filter(None, variables), ""))


def _own_hosts(kind: str, out: ClientArguments, endpoint: str) -> Iterator[str]:
    """Yield the hosts that requests may go to: those of the storage and those from which obstore gets credentials.

    A domain includes all hosts below it.
    """
    if endpoint:
        yield _host(endpoint)
    else:
        yield from _CLOUD_HOSTS[kind]
    if not _has_credentials(kind, out):
        yield from (*_SIGN_IN_HOSTS[kind], *_MACHINE_HOSTS)
    # Endpoints for credentials, emulators and the like have many names.
    named = [*out.config.values(), *(value for name, value in os.environ.items() if _CLOUD_VARIABLE.match(name))]
    yield from (_host(text) for text in map(str, named) if re.match("https?://", text, re.IGNORECASE))
    if kind == "az":
        yield "127.0.0.1"  # the emulator


def _has_credentials(kind: str, out: ClientArguments) -> bool:
    """Whether obstore makes no request to sign in."""
    if out.credential_provider is not None or _is_anonymous(kind, out):
        return True
    given = any(out.config.get(name) for name in _OWN_CREDENTIALS[kind].split())
    return given or (kind == "s3" and has_keys_in_environment())


def _is_anonymous(kind: str, out: ClientArguments) -> bool:
    variable = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}[kind]
    return is_true(out.config.get("skip_signature", os.environ.get(f"{variable}_SKIP_SIGNATURE")))


def _is_proxied(kind: str, out: ClientArguments, endpoint: str) -> bool:
    """Whether requests go through a proxy. If so, obstore accepts no second proxy for the other hosts."""
    if out.client.get("proxy_url"):
        return True
    proxies = urllib.request.getproxies()
    found = urlsplit(endpoint or "https://")
    if not any(name in proxies for name in ("http", "https", "all")):
        return False
    direct = not (found.scheme in proxies or "all" in proxies)
    direct = direct or bool(found.hostname and urllib.request.proxy_bypass(found.hostname))
    # Requests for credentials may need the proxy although those to the endpoint do not.
    return not (direct and _has_credentials(kind, out))


def proxy_of(kind: str, out: ClientArguments) -> str:
    """Return the proxy of requests to the storage and the setting that names it, or "" if there is none."""
    own = str(out.client.get("proxy_url") or "")
    if own:
        return "" if own == NO_PROXY_THERE else f"{redact_url(own)} (the option proxy_url)"
    found = urlsplit(_endpoint(kind, out) or "https://")
    if found.hostname and urllib.request.proxy_bypass(found.hostname):
        return ""
    names = [f"{found.scheme}_proxy", f"{found.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY"]
    return next((f"{redact_url(os.environ[name])} ({name})" for name in names if os.environ.get(name)), "")


def _is_of(endpoint: str, domains: tuple[str, ...]) -> bool:
    host = _host(endpoint)
    return any(host == domain or host.endswith(f".{domain}") for domain in domains)


def _host(text: str) -> str:
    """Return the host of a url, or a host's name, in the form that requests use."""
    host = urlsplit(text if "://" in text else f"//{text}").hostname or text
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        # "127.1" is an address as well.
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, UnicodeError):
        pass
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host


def _refuse_secret_headers(kind: str, out: ClientArguments, why: str) -> None:
    """Raise StorageError if requests contain secrets that another host would get with a redirect."""
    found = ["default_headers"] if out.client.get("default_headers") else []
    if kind == "s3":
        if out.config.get("sse_customer_key_base64") or os.environ.get("AWS_SSE_CUSTOMER_KEY_BASE64"):
            found.append("sse_customer_key_base64")
        if _has_session_token(out):
            found.append("a session token")
    elif not _is_anonymous(kind, out):
        found.append("credentials other than an S3 signature")
    if found:
        raise _refusal(" and ".join(found), why, "" if kind != "s3" else _OTHER_CLIENT)
    if kind == "s3" and out.keys is None and out.credential_provider is not None:
        out.credential_provider = _WithoutToken(out.credential_provider, why)


def _has_session_token(out: ClientArguments) -> bool:
    """Whether requests contain a session token, as far as this is known before the first. Roles always have one."""
    if out.keys is not None:
        return bool(out.keys[2])
    if out.credential_provider is not None or _is_anonymous("s3", out):
        return False
    return bool(os.environ.get("AWS_SESSION_TOKEN")) or not has_keys_in_environment()


def _refusal(what: str, why: str, otherwise: str) -> StorageError:
    return StorageError(
        f"requests contain {what}, and {why}. The host of a redirect would get it. Remove one of the two settings"
        f"{otherwise}"
    )


class _WithoutToken:
    """A credential provider that refuses credentials with a session token."""

    def __init__(self, provider: Callable[..., Any], why: str) -> None:
        self._provider, self._why = provider, why

    def __call__(self) -> Any:
        found = self._provider()
        return self._awaited(found) if inspect.isawaitable(found) else self._checked(found)

    async def _awaited(self, found: Awaitable[Any]) -> Any:
        return self._checked(await found)

    def _checked(self, found: Any) -> Any:
        if found.get("token"):
            raise _refusal("a session token", self._why, _OTHER_CLIENT)
        return found
