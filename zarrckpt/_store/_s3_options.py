"""S3: the names of s3fs and boto3, and obstore's own."""

from __future__ import annotations

import base64
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from zarrckpt._errors import StorageError
from zarrckpt._store import _aws_credentials as aws
from zarrckpt._store._options import (
    COMMON,
    Table,
    Translated,
    Translator,
    allow_plain_http,
    is_plain_http,
    is_true,
    pem,
)

_CONFIG = """
    access_key_id secret_access_key session_token region default_region endpoint bucket checksum_algorithm
    conditional_put container_credentials_relative_uri container_credentials_full_uri
    container_authorization_token_file copy_if_not_exists disable_tagging disable_bulk_delete
    imdsv1_fallback metadata_endpoint request_payer role_arn role_session_name s3_express
    server_side_encryption skip_signature sse_bucket_key_enabled sse_customer_key_base64 sse_kms_key_id
    sts_endpoint unsigned_payload virtual_hosted_style_request web_identity_token_file
"""

_TABLE = {
    **COMMON,
    **{name: f"config:{name}" for name in _CONFIG.split()},
    # s3fs
    "key": "config:access_key_id",
    "username": "config:access_key_id",
    "secret": "config:secret_access_key",
    "password": "config:secret_access_key",
    "token": "config:session_token",
    "anon": "config:skip_signature",
    "endpoint_url": "config:endpoint",
    "endpoint_url_s3": "config:endpoint",
    "requester_pays": "config:request_payer",
    "profile": "profile",
    "use_ssl": "use_ssl",
    "client_kwargs": "client_kwargs",
    "config_kwargs": "config_kwargs",
    "s3_additional_kwargs": "s3_additional_kwargs",
    # boto3
    "region_name": "config:region",
    "verify": "verify",
}

_CLIENT_KWARGS = {
    "endpoint_url": "config:endpoint",
    "region_name": "config:region",
    "aws_access_key_id": "config:access_key_id",
    "aws_secret_access_key": "config:secret_access_key",
    "aws_session_token": "config:session_token",
    "verify": "verify",
    "use_ssl": "use_ssl",
}

_CONFIG_KWARGS = {
    "connect_timeout": "client:connect_timeout",
    "read_timeout": "client:read_timeout",
    "user_agent": "client:user_agent",
    "region_name": "config:region",
    "retries": "retries",
    "proxies": "proxies",
    "s3": "s3",
    "signature_version": "signature_version",
    # obstore opens as many connections as there are calls.
    "max_pool_connections": "ignored",
}

_ADDITIONAL = {
    "ServerSideEncryption": "config:server_side_encryption",
    "SSEKMSKeyId": "config:sse_kms_key_id",
    "BucketKeyEnabled": "config:sse_bucket_key_enabled",
    "SSECustomerAlgorithm": "sse_customer_algorithm",
    "SSECustomerKey": "sse_customer_key",
    "ChecksumAlgorithm": "config:checksum_algorithm",
    "RequestPayer": "config:request_payer",
    "StorageClass": "attribute:Storage-Class",
    "ContentType": "attribute:Content-Type",
    "CacheControl": "attribute:Cache-Control",
    "Metadata": "metadata",
    "Tagging": "tagging",
}

_S3FS_ONLY = "it belongs to s3fs: leave it out, or use s3fs by storage_options={'backend': 'fsspec', ...}"


class S3Translator(Translator):
    """Options of ``s3://`` urls."""

    cloud = "s3://"
    table: ClassVar[Table] = _TABLE
    prefixes = ("aws_",)
    elsewhere: ClassVar[Table] = {
        "acl": "obstore sets no ACL; use s3fs by storage_options={'backend': 'fsspec', ...}, or a bucket policy",
        "session": "pass credential_provider= instead, or profile=",
        **dict.fromkeys(
            (
                "asynchronous",
                "cache_regions",
                "default_block_size",
                "default_cache_type",
                "default_fill_cache",
                "fixed_upload_size",
                "listings_expiry_time",
                "local_expiry_check",
                "loop",
                "max_concurrency",
                "max_paths",
                "skip_instance_cache",
                "use_listings_cache",
                "version_aware",
            ),
            _S3FS_ONLY,
        ),
    }

    def set_profile(self, value: str) -> None:
        self.extra["profile"] = value

    def set_use_ssl(self, value: bool) -> None:
        self.extra["use_ssl"] = value

    def set_verify(self, value: bool | str) -> None:
        if value is False:
            self.out.client["allow_invalid_certificates"] = True
        elif value is not True:
            self.out.client["root_certificate"] = pem(value)

    def set_client_kwargs(self, value: Mapping[str, Any]) -> None:
        self.read(value, _CLIENT_KWARGS, "client_kwargs")

    def set_config_kwargs(self, value: Mapping[str, Any]) -> None:
        self.read(value, _CONFIG_KWARGS, "config_kwargs")

    def set_s3_additional_kwargs(self, value: Mapping[str, Any]) -> None:
        self.read(value, _ADDITIONAL, "s3_additional_kwargs")

    def set_retries(self, value: Mapping[str, Any]) -> None:
        self.read(
            value,
            {"max_attempts": "max_attempts", "total_max_attempts": "max_attempts", "mode": "ignored"},
            "config_kwargs['retries']",
        )

    def set_max_attempts(self, value: int) -> None:
        self.out.retry["max_retries"] = value

    def set_proxies(self, value: Mapping[str, str]) -> None:
        if value:
            self.out.client["proxy_url"] = value.get("https") or value.get("http")

    def set_s3(self, value: Mapping[str, Any]) -> None:
        self.read(
            value,
            {"addressing_style": "addressing_style", "payload_signing_enabled": "payload_signing"},
            "config_kwargs['s3']",
        )

    def set_addressing_style(self, value: str) -> None:
        self.out.config["virtual_hosted_style_request"] = value == "virtual"

    def set_payload_signing(self, value: bool) -> None:
        self.out.config["unsigned_payload"] = not value

    def set_signature_version(self, value: Any) -> None:
        if value in ("s3v4", "v4"):
            return
        if not isinstance(value, str):
            # botocore.UNSIGNED is an object of its own.
            self.out.config["skip_signature"] = True
            return
        raise StorageError(
            f"signature_version {value!r} is not offered by obstore: only 's3v4'; for others, "
            "use s3fs by storage_options={'backend': 'fsspec', ...}"
        )

    def set_sse_customer_algorithm(self, value: str) -> None:
        if value != "AES256":
            raise StorageError(f"SSECustomerAlgorithm {value!r}: S3 offers 'AES256' only")
        self.out.config["server_side_encryption"] = "sse-c"

    def set_sse_customer_key(self, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.out.config["server_side_encryption"] = "sse-c"
        self.out.config["sse_customer_key_base64"] = base64.b64encode(raw).decode()

    def set_tagging(self, value: str) -> None:
        self.set_tags(dict(parse_qsl(value, keep_blank_values=True)))


def translate(options: Mapping[str, Any], bucket: str, provider: Callable[..., Any] | None) -> Translated:
    """Options, environment and profile -> what ``obstore.store.S3Store`` takes."""
    reader = S3Translator(options)
    out, profile = reader.out, reader.extra.get("profile")
    out.config.pop("bucket", None)
    found = aws.resolve(out.config, profile, provider)
    out.credential_provider = found.provider
    if found.region and not out.config.get("region") and not environment("AWS_REGION", "AWS_DEFAULT_REGION"):
        out.config["region"] = found.region
    endpoint = out.config.pop("endpoint", None) or environment(
        "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"
    )
    _set_endpoint(out, endpoint or found.endpoint, bucket, reader.extra.get("use_ssl", True))
    _leave_payloads_unsigned(out)
    bundle = environment("AWS_CA_BUNDLE")
    if bundle and "root_certificate" not in out.client:
        out.client["root_certificate"] = pem(bundle)
    return out


def _set_endpoint(out: Translated, endpoint: str | None, bucket: str, use_ssl: bool) -> None:
    if not endpoint:
        if not is_true(use_ssl):
            raise StorageError("use_ssl=False needs an endpoint_url, which then begins with 'http://'")
        return
    if "://" not in endpoint:
        endpoint = f"{'https' if is_true(use_ssl) else 'http'}://{endpoint}"
    endpoint = endpoint.rstrip("/")
    if is_true(out.config.get("virtual_hosted_style_request", False)):
        # obstore wants the bucket inside the endpoint then.
        scheme, host = endpoint.split("://", 1)
        endpoint = endpoint if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"
    # obstore prefers the variable AWS_ENDPOINT_URL_S3 to an ``endpoint`` that is passed; not to this one.
    out.config["endpoint"] = out.config["aws_endpoint_url_s3"] = endpoint
    allow_plain_http(out, endpoint)


def _leave_payloads_unsigned(out: Translated) -> None:
    """TLS protects what is sent: hashing it as well, for the signature, would cost a core for each GB/s.

    Nor does anybody listen on the way to a server on this machine. On the way to others, over plain HTTP, the signature
    is the only protection: whoever listens could put other bytes with it.
    """
    endpoint = out.config.get("endpoint", "")
    if not environment("AWS_UNSIGNED_PAYLOAD") and (not is_plain_http(endpoint) or _is_here(endpoint)):
        out.config.setdefault("unsigned_payload", True)


def _is_here(endpoint: str) -> bool:
    """Whether a server's address is one of the loopback interface."""
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_set(out: Translated, name: str) -> bool:
    """Whether a switch of the S3 client is on, or a value is given, by the options or by the environment."""
    value = out.config.get(name, os.environ.get(f"AWS_{name.upper()}"))
    return bool(value) and str(value).strip().lower() not in ("0", "false", "no", "off")


def environment(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def is_amazon(out: Translated) -> bool:
    """Whether requests go to Amazon itself, whose conditional puts are known to hold."""
    endpoint = out.config.get("endpoint")
    return not endpoint or re.search(r"\.amazonaws\.com(\.cn)?(:\d+)?$", endpoint) is not None
