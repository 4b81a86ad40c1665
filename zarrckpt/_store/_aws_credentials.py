"""Where S3 credentials come from: options, a provider, the environment, a profile or SSO, the machine's role."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from zarrckpt._errors import StorageError
from zarrckpt._store._options import is_true

_PROVIDED = ("web_identity_token_file", "container_credentials_relative_uri", "container_credentials_full_uri")


@dataclass(frozen=True)
class Found:
    """A provider for obstore (None: it finds credentials itself, or needs none), and what a profile says besides."""

    provider: Callable[..., Any] | None = None
    region: str | None = None
    endpoint: str | None = None


@dataclass(frozen=True, repr=False)
class StaticCredentials:
    """Credentials given as options. A provider, since obstore would mix them with AWS_SESSION_TOKEN otherwise."""

    key: str
    secret: str
    token: str | None

    def __call__(self) -> dict[str, Any]:
        """What obstore asks for."""
        return {"access_key_id": self.key, "secret_access_key": self.secret, "token": self.token, "expires_at": None}

    def __reduce__(self) -> NoReturn:
        raise StorageError(
            "secrets are not pickled: give credentials by environment variables, or pass a picklable "
            "credential_provider, where a store goes to another process"
        )


class ProfileCredentials:
    """Credentials of an AWS profile, SSO included, through botocore; asked for again every few minutes."""

    def __init__(self, profile: str | None) -> None:
        self._profile = profile
        self._credentials: Any = None

    def __call__(self) -> dict[str, Any]:
        """What obstore asks for; botocore renews expiring credentials in time."""
        if self._credentials is None:
            self._credentials = _session(self._profile).get_credentials()
        if self._credentials is None:
            raise StorageError(_none_found(self._profile))
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=5),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return ProfileCredentials, (self._profile,)


def resolve(config: dict[str, Any], profile: str | None, provider: Callable[..., Any] | None) -> Found:
    """Decide who gives the credentials; takes explicit ones out of ``config``."""
    key, secret, token = (config.pop(name, None) for name in ("access_key_id", "secret_access_key", "session_token"))
    if provider is not None:
        if key or secret or token or profile:
            raise StorageError("give either credential_provider= or keys or a profile, not several of them")
        return Found(provider)
    if is_true(config.get("skip_signature", os.environ.get("AWS_SKIP_SIGNATURE"))):
        return Found()
    if key or secret or token:
        if not (key and secret):
            raise StorageError(
                "storage_options hold only one of key and secret (access key id and secret access key), or a token "
                "without them: give both, and the token with them"
            )
        return Found(StaticCredentials(str(key), str(secret), None if token is None else str(token)))
    if profile is None and _obstore_finds_them(config, os.environ):
        return Found()
    return _from_profile(profile)


def _obstore_finds_them(config: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return True
    return any(config.get(name) or environment.get(f"AWS_{name.upper()}") for name in _PROVIDED)


def _from_profile(profile: str | None) -> Found:
    try:
        session = _session(profile)
    except ImportError as error:
        if profile is None and not os.environ.get("AWS_PROFILE"):
            # Without botocore there is still obstore's own way to the machine's role.
            return Found()
        raise StorageError("AWS profiles and SSO are read through boto3: pip install boto3") from error
    import botocore.exceptions  # type: ignore[import-untyped]

    try:
        if session.get_credentials() is None:
            raise StorageError(_none_found(profile))
        scoped = session.get_scoped_config()
        return Found(ProfileCredentials(profile), session.get_config_variable("region"), scoped.get("endpoint_url"))
    except botocore.exceptions.BotoCoreError as error:
        name = profile or os.environ.get("AWS_PROFILE", "default")
        raise StorageError(f"the AWS profile {name!r} gives no credentials: {error}") from error


def _session(profile: str | None) -> Any:
    import botocore.session  # type: ignore[import-untyped]

    return botocore.session.Session(profile=profile)


def _none_found(profile: str | None) -> str:
    where = "the environment, the AWS configuration or this machine's role"
    where = f"the AWS profile {profile!r}" if profile else where
    return (
        f"no AWS credentials were found in {where}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
        "or pass storage_options={'key': ..., 'secret': ...} or credential_provider=; for a public bucket, "
        "storage_options={'anon': True}"
    )
