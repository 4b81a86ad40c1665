"""Credentials for Google Cloud Storage and Azure: the advice if there are none, and a check that takes seconds.

Without credentials obstore asks the metadata server of a virtual machine. Elsewhere its requests wait for minutes.
"""

from __future__ import annotations

import http.client
import os
import re
import time

from zarrckpt._errors import StorageError
from zarrckpt._store._options import ClientArguments, is_true

_SECONDS = 3.0
_OTHER_SOURCES = {
    "gs": r"(google_)?(service_account|application_credentials|bearer_token|skip_signature)",
    "az": r"(azure_(storage_)?)?((account|access|master|sas)_key|(sas_)?token|client_secret|federated_token_file"
    r"|use_azure_cli|(msi|identity)_|fabric_|credential_type|use_emulator|skip_signature)",
}
"""Patterns of the options and variables (in lower case) with which obstore asks no metadata server."""
_GOOGLE_FILE = "~/.config/gcloud/application_default_credentials.json"
_METADATA_HOST = "169.254.169.254"

SIGN_IN_STEPS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (with boto3 installed), or pass "
    "storage_options={'key': ..., 'secret': ...} or credential_provider=",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS to the JSON file of a service account, run 'gcloud auth "
    "application-default login', or pass storage_options={'token': 'FILE.json'} or credential_provider=",
    "az": "Set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or pass storage_options={'account_key': ...}, "
    "{'sas_token': ...}, {'use_azure_cli': True} (after 'az login') or credential_provider=",
}
"""The next step by cloud if there are no credentials."""
PUBLIC_STEP = "; to read a public bucket, pass storage_options={'anon': True}"


def require_machine_account(kind: str, bucket: str, out: ClientArguments) -> None:
    """Raise StorageError if only a metadata server may have credentials for a bucket, and none answers in seconds."""
    if kind not in _OTHER_SOURCES or out.credential_provider is not None or _has_other_source(kind, out):
        return
    host = (os.environ.get("GCE_METADATA_HOST") if kind == "gs" else None) or _METADATA_HOST
    deadline = time.monotonic() + _SECONDS
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = http.client.HTTPConnection(host, timeout=min(left, _SECONDS / 2))
            connection.request("GET", "/", headers={"Metadata-Flavor": "Google", "Metadata": "true"})
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            # In a new pod of Kubernetes the server may need seconds to start.
            time.sleep(min(0.5, left))
        else:
            return
        finally:
            connection.close()
    raise StorageError(
        f"no credentials for {kind}://{bucket} were found in storage_options or the environment, and this machine has "
        f"no metadata server. {SIGN_IN_STEPS[kind]}{PUBLIC_STEP}"
    )


def require_azure_account(container: str, account: str, out: ClientArguments) -> None:
    """Raise StorageError if no storage account of Azure is named. Its message also names missing credentials."""
    emulator = is_true(out.config.get("use_emulator", os.environ.get("AZURE_STORAGE_USE_EMULATOR")))
    if account or out.config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or emulator:
        return
    has_credentials = out.credential_provider is not None or _has_other_source("az", out)
    raise StorageError(
        f"az://{container} names no storage account. Pass storage_options={{'account_name': ...}}, set "
        f"AZURE_STORAGE_ACCOUNT_NAME, or use the url az://{container}@ACCOUNT.blob.core.windows.net/path"
        + ("" if has_credentials else f". There are no credentials either. {SIGN_IN_STEPS['az']}{PUBLIC_STEP}")
    )


def _has_other_source(kind: str, out: ClientArguments) -> bool:
    named = [name for name, value in (*out.config.items(), *os.environ.items()) if value not in ("", False, None)]
    file = kind == "gs" and os.path.isfile(os.path.expanduser(_GOOGLE_FILE))
    return file or any(re.match(_OTHER_SOURCES[kind], name.lower()) for name in named)
