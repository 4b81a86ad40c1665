"""Azure Blob Storage: the names of adlfs, and obstore's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from zarrckpt._errors import StorageError
from zarrckpt._store._options import COMMON, Table, Translated, Translator, allow_plain_http, is_true

_CONFIG = """
    account_name account_key client_id client_secret credential_type tenant_id authority_host sas_key
    token use_emulator use_fabric_endpoint encryption_key endpoint msi_endpoint object_id msi_resource_id
    federated_token_file use_azure_cli skip_signature container_name disable_tagging
    fabric_token_service_url fabric_workload_host fabric_session_token fabric_cluster_identifier
"""

_CONNECTION = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
    "usedevelopmentstorage": "use_emulator",
}
_NOT_FOR_BLOBS = ("defaultendpointsprotocol", "queueendpoint", "tableendpoint", "fileendpoint", "dfsendpoint")


class AzureTranslator(Translator):
    """Options of ``az://`` and ``abfs(s)://`` urls."""

    cloud = "az://"
    table: ClassVar[Table] = {
        **COMMON,
        **{name: f"config:{name}" for name in _CONFIG.split()},
        "sas_token": "config:sas_key",
        "anon": "config:skip_signature",
        "connection_string": "connection_string",
        "account_url": "config:endpoint",
    }
    prefixes = ("azure_storage_", "azure_")
    elsewhere: ClassVar[Table] = {
        "credential": "pass credential_provider= (obstore.auth.azure wraps azure-identity's credentials), or "
        "account_key, sas_token, client_id with client_secret and tenant_id, or use_azure_cli=True",
        "account_host": "pass endpoint='https://<host>'",
        "location_mode": "it belongs to adlfs: leave it out, or use adlfs by storage_options={'backend': 'fsspec'}",
    }

    def set_connection_string(self, value: str) -> None:
        pairs = (part.partition("=") for part in value.split(";"))
        parts = {name.strip().lower(): item for name, _, item in pairs if item}
        suffix = parts.pop("endpointsuffix", "core.windows.net")
        for name, item in parts.items():
            if name in _CONNECTION:
                self.out.config[_CONNECTION[name]] = item
            elif name not in _NOT_FOR_BLOBS:
                raise StorageError(
                    f"storage_options['connection_string'] has the part {name!r}, which is not known here: expected "
                    f"{', '.join(_CONNECTION)} and endpointsuffix"
                )
        if suffix != "core.windows.net" and "accountname" in parts:
            # A cloud of its own (China, US government).
            self.out.config.setdefault("endpoint", f"https://{parts['accountname']}.blob.{suffix}")


def translate(options: Mapping[str, Any], account: str, provider: Callable[..., Any] | None) -> Translated:
    """Options -> what ``obstore.store.AzureStore`` takes; ``account`` is the one that the url names, or ""."""
    out = AzureTranslator(options).out
    out.config.pop("container_name", None)
    if account:
        out.config.setdefault("account_name", account)
    out.credential_provider = provider
    emulator = is_true(out.config.get("use_emulator", os.environ.get("AZURE_STORAGE_USE_EMULATOR")))
    endpoint = out.config.get("endpoint") or os.environ.get("AZURE_STORAGE_ENDPOINT")
    allow_plain_http(out, "http://" if emulator else endpoint)
    return out
