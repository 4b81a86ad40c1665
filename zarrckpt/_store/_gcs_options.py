"""Google Cloud Storage: the names of gcsfs, and obstore's own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from zarrckpt._errors import StorageError
from zarrckpt._store._options import COMMON, Table, Translated, Translator, allow_plain_http

_CONFIG = """
    service_account service_account_key base_url bearer_token bucket application_credentials
    skip_signature
"""


class GcsTranslator(Translator):
    """Options of ``gs://`` urls."""

    cloud = "gs://"
    table: ClassVar[Table] = {
        **COMMON,
        **{name: f"config:{name}" for name in _CONFIG.split()},
        "token": "token",
        "anon": "config:skip_signature",
        "endpoint_url": "config:base_url",
        # gcsfs needs the project to make buckets only.
        "project": "ignored",
    }
    prefixes = ("google_", "gcs_")
    elsewhere: ClassVar[Table] = {
        "requester_pays": "obstore has no requester pays for Google Cloud; use gcsfs by "
        "storage_options={'backend': 'fsspec', ...}",
        "session_kwargs": "use client_options",
    }

    def set_token(self, value: Any) -> None:
        """gcsfs takes many kinds of token."""
        if isinstance(value, Mapping):
            self.out.config["service_account_key"] = json.dumps(dict(value))
        elif value == "anon":
            self.out.config["skip_signature"] = True
        elif value in ("google_default", "cloud"):
            return
        elif isinstance(value, str | os.PathLike) and os.path.isfile(value):
            self.out.config["application_credentials"] = os.fspath(value)
        else:
            raise StorageError(
                "storage_options['token'] for gs:// must be 'anon', 'google_default', 'cloud', a service account's "
                "dict, or the path of its JSON file; for a raw access token pass bearer_token="
            )


def translate(options: Mapping[str, Any], bucket: str, provider: Callable[..., Any] | None) -> Translated:
    """Options -> what ``obstore.store.GCSStore`` takes."""
    out = GcsTranslator(options).out
    out.config.pop("bucket", None)
    out.credential_provider = provider
    allow_plain_http(out, out.config.get("base_url") or os.environ.get("GOOGLE_BASE_URL"))
    return out
