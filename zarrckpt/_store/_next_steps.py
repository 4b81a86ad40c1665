"""The next step after an error of a server, by the code in its answer, and for a refusal by operation."""

from __future__ import annotations

import re

_BAD_SETTING = (
    "obstore failed, most likely because it cannot send an option, an environment variable or a credential. Look for "
    "line breaks and other control characters in regions, keys, tokens and header values, and for invalid addresses"
)

_STEPS_BY_CODE = [
    (re.compile(words, re.IGNORECASE), step)
    for words, step in (
        (
            r"(content-md5|x-amz-checksum)[^<]{0,80} required|required[^<]{0,80}(content-md5|x-amz-checksum)",
            "The server refuses objects without a checksum (as for buckets with Object Lock): pass "
            "storage_options={'checksum_algorithm': 'SHA256'}",
        ),
        (
            r"\bRequestTimeTooSkewed\b",
            "The clocks of this machine and of the server differ by more than the server allows: set the clock, for "
            "example by NTP, and try again",
        ),
        (
            r"Quota\w*Exceeded|QuotaExceeded|StorageFull|StorageLimitExceeded|\b507 Insufficient Storage|\(507\)",
            "The server's storage is full, or the quota is used up: remove old checkpoints (zarrckpt rm, or "
            "keep=zarrckpt.Keep(newest=...) of a manager), or raise the quota",
        ),
        (
            r"\bInvalidObjectState\b|\bBlobArchived\b",
            "The object is archived (such as in S3 Glacier) and cannot be read now: restore all objects below the "
            "checkpoint's path (aws s3api restore-object), wait for completion, and read again",
        ),
        (
            r"\b(ExpiredToken(Exception)?|InvalidToken|TokenRefreshRequired)\b",
            "The credentials have expired, or the session token does not belong to the keys",
        ),
    )
]
_WRONG_REGION = re.compile(
    r"redirect without LOCATION|\b(PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraintException)\b"
)
_REGION_NAME = "[a-z0-9-]{1,40}"
_NAMED_REGION = re.compile(rf"<Region>({_REGION_NAME})</Region>|expecting '({_REGION_NAME})'")


def next_step(text: str, panic: bool) -> str:
    """Return the next step for the code in a client's error, or "" if there is none for this code.

    ``text`` is the text of the error and its cause, without secrets. ``panic`` is whether it is a panic of a Rust
    client.
    """
    if panic:
        return _BAD_SETTING
    if _WRONG_REGION.search(text):
        return _region_step(text)
    return next((step for words, step in _STEPS_BY_CODE if words.search(text)), "")


_PERMISSIONS = {
    "s3": {
        "reading": "s3:GetObject (and s3:ListBucket, without which an absent object is a refusal)",
        "listing": "s3:ListBucket",
        "writing": "s3:PutObject",
        "deleting": "s3:DeleteObject",
        "copying": "s3:GetObject and s3:PutObject",
    },
    "gs": {
        "reading": "storage.objects.get",
        "listing": "storage.objects.list",
        "writing": "storage.objects.create (and storage.objects.delete, to replace an object)",
        "deleting": "storage.objects.delete",
        "copying": "storage.objects.get and storage.objects.create",
    },
    "az": {
        "reading": "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/read",
        "listing": "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/read (for a SAS: list)",
        "writing": "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/write",
        "deleting": "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/delete",
        "copying": "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/read and .../blobs/write",
    },
}
"""The provider's name of the permission that an operation needs, by cloud and by the first word of its description."""
_VERBS = {"creating": "writing", "replacing": "writing"}
_NAMED_PERMISSION = re.compile(r"not authorized to perform: ([\w:*-]+)|does not have ([\w.]+) (?:access|permission)")
"""Matches the permission in answers of Amazon and Google. It may be another one, such as kms:GenerateDataKey."""
_REFUSAL = re.compile(
    r"status code: 403\b|\b(AccessDenied|Forbidden|AuthorizationFailure|AuthorizationPermissionMismatch)\b"
    r"|\b(InsufficientAccountPermissions|AuthorizationResourceTypeMismatch|AuthorizationServiceMismatch)\b"
)


def permission_step(cloud: str, what: str, text: str) -> str:
    """Return the next step if a server refused an operation for lack of a permission, otherwise "".

    Args:
        cloud: "s3", "gs" or "az".
        what: the operation, such as "deleting 'k'".
        text: the text of the error and its cause.
    """
    verb = what.partition(" ")[0]
    needed = _PERMISSIONS.get(cloud, {}).get(_VERBS.get(verb, verb), "")
    if found := _NAMED_PERMISSION.search(text):
        needed = found[1] or found[2]
    elif not _REFUSAL.search(text):
        return ""
    return f"The credentials need the permission {needed}: check their policy and that of the bucket" if needed else ""


def _region_step(text: str) -> str:
    found = _NAMED_REGION.search(text)
    region = next(filter(None, found.groups()), "") if found else ""
    if not region:
        return (
            "The bucket is in another region: find it (aws s3api get-bucket-location), and pass it as "
            "storage_options={'region': ...}"
        )
    return (
        f"The bucket is in the region {region}: pass storage_options={{'region': '{region}'}}, or set "
        f"AWS_REGION={region}. If you pass an endpoint, it must be one of that region"
    )
