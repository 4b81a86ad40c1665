"""The next step after an error of a server, by the code in its answer."""

from __future__ import annotations

import re
import urllib.request
from email.message import Message
from functools import lru_cache
from typing import IO
from urllib.error import HTTPError
from urllib.parse import urlsplit

_REGION_SECONDS = 5.0
"""Time for the one request for a region."""

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
_URL = re.compile(r"performing [A-Z]+ (https?://[^\s\"]+)")


def next_step(text: str, panic: bool, may_ask: bool) -> str:
    """Return the next step for the code in a client's error, or "" if there is none for this code.

    Args:
        text: the text of the error and its cause, without secrets.
        panic: whether the error is a panic of a Rust client.
        may_ask: whether to ask the server for the region of a bucket if that is needed. One request, at most five
            seconds.
    """
    if panic:
        return _BAD_SETTING
    if _WRONG_REGION.search(text):
        return _region_step(text, may_ask)
    return next((step for words, step in _STEPS_BY_CODE if words.search(text)), "")


def _region_step(text: str, may_ask: bool) -> str:
    found, url = _NAMED_REGION.search(text), _URL.search(text)
    region = next(filter(None, found.groups()), "") if found else ""
    if not region and url is not None and may_ask:
        address = urlsplit(url[1])
        region = _region_of(f"{address.scheme}://{address.netloc}/{address.path.lstrip('/').partition('/')[0]}")
    if not region:
        return (
            "The bucket is in another region: find it (aws s3api get-bucket-location), and pass it as "
            "storage_options={'region': ...}"
        )
    return (
        f"The bucket is in the region {region}: pass storage_options={{'region': '{region}'}}, or set "
        f"AWS_REGION={region}. If you pass an endpoint, it must be one of that region"
    )


@lru_cache(maxsize=16)
def _region_of(url: str) -> str:
    """Return the region that a server names for a bucket, or "" if it names none.

    Servers name it even to clients that may not read the bucket. obstore drops this header of the answer. The request
    contains no credentials and follows no redirect.
    """
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_REGION_SECONDS) as answer:
            headers = answer.headers
    except HTTPError as error:
        headers = error.headers
        error.close()
    except (OSError, ValueError):
        return ""
    region = str(headers.get("x-amz-bucket-region", ""))
    return region if re.fullmatch(_REGION_NAME, region) else ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Return no request, so that a redirect raises HTTPError."""
