"""AWS's configuration (profiles, SSO, roles): credentials, region and endpoint for S3, as botocore resolves them.

botocore is optional and slow to import. It is used only if there is a configuration or an unusual region. Without it,
only the environment is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from zarrckpt._errors import StorageError

_S3_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""In order of precedence. The last one is obstore's own."""
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
_SECRET_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_KINDS_OF_ENDPOINT = ("use_dualstack_endpoint", "use_fips_endpoint")
_ENDPOINT_SETTINGS = {"endpoint_url", "services", "s3", *_KINDS_OF_ENDPOINT}
_USUAL_REGION = re.compile(r"(?!cn-)[a-z]{2}-[a-z]+-\d+")
"""Matches a region whose server is s3.REGION.amazonaws.com. The servers of others have more parts in their names."""
_BUCKET = "bucket"
"""An arbitrary bucket in a request that is never sent."""


@dataclass(frozen=True)
class S3Settings:
    """The server that the environment and AWS's configuration name."""

    region: str | None = None
    endpoint: str | None = None
    """The server's url, or None for the region's usual one."""
    virtual_hosts: bool = False
    """Whether the bucket is a part of the host name."""


def first_variable(*names: str) -> str | None:
    """Return the first of these environment variables that is set and not empty, or None."""
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def has_keys_in_environment() -> bool:
    """Whether the environment contains an access key, which takes precedence over AWS_PROFILE."""
    return bool(os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"))


def find_credentials(profile: str | None) -> Callable[[], Any] | None:
    """Return a provider of the credentials of a profile, of SSO or of the machine's role.

    Returns None if boto3 is not installed and obstore may find the machine's role itself. Raises StorageError if no
    credentials are found.
    """
    try:
        from botocore.session import Session  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        file = _file("AWS_SHARED_CREDENTIALS_FILE")
        if profile is None and not os.environ.get("AWS_PROFILE") and not os.path.isfile(file):
            return None
        raise StorageError(f"AWS profiles, SSO and {file} are read through boto3: pip install boto3") from error
    with _botocore_errors(profile, "credentials"):
        session = Session(profile=profile)
        if session.get_credentials() is None:
            raise StorageError(
                f"no AWS credentials were found in {f'the profile {profile!r}' if profile else 'the environment'}, the "
                "AWS configuration or this machine's role: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "AWS_PROFILE, or pass storage_options={'key': ..., 'secret': ...} or credential_provider=; for a "
                "public bucket, storage_options={'anon': True}"
            )
        # botocore renews credentials that expire within ten minutes. Asked every five minutes, it never returns expired
        # ones.
        return Boto3CredentialProvider(session, ttl=timedelta(minutes=5))


def find_settings(profile: str | None, region: str | None, endpoint: str | None) -> S3Settings:
    """Return region and endpoint by botocore's rules. The caller's region and endpoint take precedence.

    If the caller passes both, no files are read. Raises StorageError for a configuration that botocore refuses.
    """
    if region and endpoint:
        return S3Settings(region, endpoint)
    files = tuple(map(_state, map(_file, _FILES)))
    environment = tuple(
        sorted(item for item in os.environ.items() if item[0].startswith("AWS_") and item[0] not in _SECRET_VARIABLES)
    )
    names = {name for name, value in environment if value}
    region = region or first_variable("AWS_REGION", "AWS_DEFAULT_REGION")
    special = names & {f"AWS_{name.upper()}" for name in _KINDS_OF_ENDPOINT} or not _is_usual(region)
    if profile is not None or any(files) or special:
        found = _ask_botocore(profile, region, endpoint, environment, files)
        if found is not None:
            return found
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    return S3Settings(region, endpoint or _environment_endpoint(region, ignored))


@lru_cache(16)
def _ask_botocore(
    profile: str | None, region: str | None, endpoint: str | None, environment: object, files: object
) -> S3Settings | None:
    """Complete the settings, or return None without botocore. The last two arguments are only keys of the cache."""
    try:
        from botocore.session import Session
    except ImportError:
        return None
    with _botocore_errors(profile, "endpoint"):
        session = Session(profile=profile)
        region = region or session.get_config_variable("region")
        s3 = session.get_config_variable("s3") or {}
        virtual = s3.get("addressing_style") == "virtual" or str(s3.get("use_accelerate_endpoint")).lower() == "true"
        ignored = bool(session.get_config_variable("ignore_configured_endpoint_urls"))
        endpoint = endpoint or _environment_endpoint(region, ignored)
        special = session.get_scoped_config().keys() & _ENDPOINT_SETTINGS or not _is_usual(region)
        if not endpoint and (special or any(map(session.get_config_variable, _KINDS_OF_ENDPOINT))):
            region, endpoint = _ask_client(session, region, virtual)
        return S3Settings(region, endpoint, virtual)


def _ask_client(session: Any, region: str | None, virtual: bool) -> tuple[str | None, str | None]:
    """Return region and endpoint of a client of botocore, which takes 0.1 s to make. Sends no request.

    The key here is never used. Without one, the client would look for credentials.
    """
    from botocore import UNSIGNED  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    style = {"addressing_style": "virtual" if virtual else "path"}
    # Other defaults_modes may send a request for the machine's region.
    config = Config(signature_version=UNSIGNED, defaults_mode="legacy", s3=style)
    client = session.create_client(
        "s3", region_name=region, aws_access_key_id="none", aws_secret_access_key="none", config=config
    )
    url = urlsplit(client.generate_presigned_url("list_objects_v2", Params={"Bucket": _BUCKET}))
    path = url.path.removesuffix("/").removesuffix(f"/{_BUCKET}")
    endpoint = f"{url.scheme}://{url.netloc.removeprefix(f'{_BUCKET}.')}{path}"
    region = None if client.meta.region_name == "aws-global" else client.meta.region_name
    usual = endpoint in ("https://s3.amazonaws.com", _usual_endpoint(region))
    return region, None if usual else endpoint


def _environment_endpoint(region: str | None, ignored: bool) -> str | None:
    """Return the endpoint in a variable. obstore reads these itself, so to ignore them another one must be set."""
    found = first_variable(*_S3_ENDPOINT_VARIABLES)
    return _usual_endpoint(region) if found and ignored else found


def _is_usual(region: str | None) -> bool:
    return not region or _USUAL_REGION.fullmatch(region) is not None


def _usual_endpoint(region: str | None) -> str:
    return f"https://s3.{region or 'us-east-1'}.amazonaws.com"


def _file(variable: str) -> str:
    return os.path.expanduser(os.environ.get(variable) or _FILES[variable])


def _state(path: str) -> tuple[str, int, int] | None:
    """Return a value that changes when a file changes, or None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_mtime_ns, found.st_size


@contextmanager
def _botocore_errors(profile: str | None, what: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

    try:
        yield
    except (BotoCoreError, ValueError) as error:
        name = profile or os.environ.get("AWS_PROFILE", "default")
        raise StorageError(f"reading the {what} for S3 from the AWS profile {name!r} failed: {error}") from error
