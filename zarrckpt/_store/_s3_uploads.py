"""Multipart uploads on S3 that have not ended, through botocore where that is installed: obstore does not list them.

A process that is killed in the middle of one leaves its parts in the bucket: no listing of objects shows them, and they
are paid for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from zarrckpt._store._base import Upload
from zarrckpt._store._options import Translated, is_true
from zarrckpt._store._s3_options import environment, is_set


@dataclass(frozen=True)
class S3Uploads:
    """The uploads below a folder of a bucket."""

    client: Callable[[], Any]
    """Makes botocore's client. Raises ImportError where it is not installed."""
    bucket: str
    folder: str

    def list(self) -> list[Upload]:
        """All that have not ended, keys below the folder. A request for each thousand."""
        prefix = f"{self.folder}/" if self.folder else ""
        pages = self.client().get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
        found = [item for page in pages for item in page.get("Uploads", ())]
        return [Upload(item["Key"].removeprefix(prefix), item["UploadId"]) for item in found]

    def abort(self, upload: Upload) -> None:
        """Remove an upload and its parts; one that has ended meanwhile is no error. One request."""
        client = self.client()
        key = f"{self.folder}/{upload.key}" if self.folder else upload.key
        try:
            client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload.id)
        except client.exceptions.NoSuchUpload:
            return


def s3_uploads(out: Translated, bucket: str, folder: str) -> S3Uploads:
    """The uploads at a place, with the settings that obstore's client has. No request is made."""
    return S3Uploads(lambda: _client(out, bucket), bucket, folder.strip("/"))


def _client(out: Translated, bucket: str) -> Any:
    import botocore.config  # type: ignore[import-untyped]
    import botocore.session  # type: ignore[import-untyped]

    virtual = is_true(out.config.get("virtual_hosted_style_request", False))
    endpoint = out.config.get("endpoint")
    if endpoint and virtual:
        endpoint = endpoint.replace(f"://{bucket}.", "://", 1)
    style = "virtual" if virtual else "path" if endpoint else "auto"
    config: dict[str, Any] = {"s3": {"addressing_style": style}, "retries": {"mode": "standard"}}
    if is_set(out, "skip_signature"):
        config["signature_version"] = botocore.UNSIGNED
    region = next((out.config[name] for name in ("region", "default_region") if out.config.get(name)), None)
    session = botocore.session.Session()
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session.create_client(
        "s3",
        region_name=region or environment("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1",
        endpoint_url=endpoint,
        verify=not is_true(out.client.get("allow_invalid_certificates", False)),
        config=botocore.config.Config(**config),
        **_credentials(out),
    )


@lru_cache(maxsize=1)
def _descriptions(data_path: str | None) -> Any:
    """botocore's descriptions of services: each session would read them anew, for 0.13 s a client."""
    import botocore.loaders  # type: ignore[import-untyped]

    return botocore.loaders.create_loader(data_path)


def _credentials(out: Translated) -> Mapping[str, Any]:
    if out.credential_provider is None:
        return {}
    found = out.credential_provider()
    return {
        "aws_access_key_id": found["access_key_id"],
        "aws_secret_access_key": found["secret_access_key"],
        "aws_session_token": found.get("token"),
    }
