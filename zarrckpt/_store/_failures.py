"""Translate a client's exception to an error of this package. It names operation, url, reason and next step.

Errors contain no secrets. The errors of obstore 0.12 have no attributes for a status, a code or a kind, only a text and
coarse classes (most failures are a GenericError). So patterns find these in the text.
"""

from __future__ import annotations

import errno
import html
import re
import sys
from collections.abc import Iterator, Sequence

from zarrckpt._errors import (
    CorruptCheckpointError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    one_line,
    printable,
)
from zarrckpt._store._next_steps import next_step, permission_step
from zarrckpt._store._secrets import hide, scrub

_BEGIN, _END = 300, 700
_EXAMINED = 4096
"""Number of characters of a client's error that are examined at each end. A server may send any number."""
# obstore repeats the error after this text, as a Rust structure over many lines.
_DETAILS = "\n\nDebug source"

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that mean that an object is absent."""

_SERVER = re.compile(r"https?://[^/\s\"]+")
_NO_BUCKET = r"<Code>NoSuchBucket</Code>|\(NoSuchBucket\)"
_ABORT = r"performing DELETE \S*uploadId="
_FAULTS = [
    (re.compile(words), sentence)
    for words, sentence in (
        (
            # The proxy that _redirects sets for all hosts except the client's own.
            r"connect error\",\s+127\.0\.0\.1:0,",
            "{} redirects the request to another host, which is not allowed by default. Check the endpoint. If it is "
            "right, pass storage_options={{'redirect_hosts': [...]}} with the other host's name, or '*' for any",
        ),
        (
            _ABORT,
            "{} failed during a multipart upload, and failed to abort it as well. obstore keeps only the second error. "
            "Check the server's log and the permissions of the credentials, and try again",
        ),
        (r"ConnectionRefused", "{} refuses connections. Check the endpoint's host and port, and that the server runs"),
        (r"dns error|gaierror", "the host of {} is not known. Check the endpoint's name and the network"),
        (r"InvalidContentType", "{} does not speak TLS. Check the endpoint: for plain HTTP it begins with http://"),
        (
            r"InvalidCertificate",
            "the certificate of {} is not trusted. Check the endpoint, or pass the authority's certificate as "
            "root_certificate",
        ),
        (r"\bParse\(", "{} does not answer in HTTP. Check the endpoint: for TLS it begins with https://"),
        (
            r"ConnectionReset|IncompleteMessage|connection was not ready",
            "{} closed the connection without an answer. Check the endpoint (for TLS it begins with https://), the "
            "server and the network",
        ),
        (
            r"kind: Timeout,\s+source: reqwest::Error \{\s+kind: Request,\s+source: TimedOut",
            "{} accepts connections but does not answer in time. Check the endpoint's host and port, and the server. "
            "To wait longer, pass read_timeout",
        ),
        (
            r"kind: Timeout,(?s:.){,200}Connect",
            "{} accepts no connection in time. Check the endpoint's host and port, and the network",
        ),
        (
            _NO_BUCKET,
            "{} has no such bucket (NoSuchBucket). Check that the bucket exists, and that the endpoint and the region "
            "are those of the bucket",
        ),
    )
]
"""Pairs of a pattern and a message. The patterns match what obstore and s3fs write about wrong addresses."""

_NO_ANSWER = re.compile(r"kind: (Connect|Interrupted|Timeout)\b|IncompleteMessage|connection was not ready|\bParse\(")
"""Matches errors of obstore if no server has answered."""

_TOO_MANY = r"\w*Throttl\w*|SlowDown|TooManyRequests(Exception)?|RequestLimitExceeded|BandwidthLimitExceeded"
_PASSING = re.compile(
    rf"(status code: 40[039]\b(?s:.)*?<Code>|\(code: )({_TOO_MANY}|RequestTimeout(Exception)?|IncompleteBody"
    r"|PriorRequestNotComplete|OperationAborted|ConditionalRequestConflict)(</Code>|\))"
)
"""Matches a server's answer if the request may succeed soon."""
_THROTTLING = re.compile(rf"status code: (429|503)\b|(<Code>|\(code: )({_TOO_MANY})(</Code>|\))")
"""Matches a server's answer if it asks for fewer requests."""
_TRANSIENT = re.compile(
    # The answer did not arrive, or only in part.
    r"kind: (Interrupted|Timeout)\b|IncompleteMessage|UnexpectedEof|ConnectionReset|error decoding response body"
    # The request was not sent.
    r"|HttpError \{\s+kind: (Connect|Request)\b"
    # The server failed, in the last case with status 200. A server without the request's operation answers 501.
    r"|status code: (408|429|5(?!01)\d\d)\b|Server returned error response: "
)
"""Matches errors of obstore after which the request may be repeated. obstore itself repeats after most of them."""
_REPEATED = re.compile(r", after (\d+) retries, max_retries: \1\b")
"""Matches errors of obstore after it has itself repeated the request max_retries times."""
_SELDOM_PASSING = re.compile(
    # A request that waited long has an old signature. If the clock is wrong, repeats do not help.
    r"<Code>RequestTimeTooSkewed</Code>"
    # The connection was closed before the request was sent.
    r"|connection was not ready"
    # A truncated answer looks like an invalid document.
    r"|[Ii]nvalid (list|DeleteObjects|multipart) response"
    # An answer to HEAD has no error code. Status 409 on a request without a condition is a conflict with another one.
    r"|performing HEAD (?s:.)*status code: 40[03]\b|status code: 409\b"
    # An upload is complete if its last answer was lost. The error of an abort replaces the original error.
    r"|<Code>NoSuchUpload</Code>"
    rf"|{_ABORT}"
)
_SELDOM_REPEATS = 2
_REFUSED = re.compile(r"status code: (403|405|501)\b")

_REFUSED_CODES = (
    "ExpiredToken|ExpiredTokenException|InvalidToken|InvalidTokenId|TokenRefreshRequired|InvalidAccessKeyId"
    "|InvalidClientTokenId|SignatureDoesNotMatch|AuthenticationFailed"
)
_REFUSED_CODE = re.compile(rf"<Code>({_REFUSED_CODES})</Code>|\(({_REFUSED_CODES})\) when calling")
_REFUSED_KEYS = re.compile(
    rf"{_REFUSED_CODE.pattern}|status code: 401\b"
    r"|performing HEAD (?s:.)*?status code: 40[03]\b|\(40[013]\) when calling the HeadObject"
)
"""Matches errors of obstore and s3fs if credentials have expired or were revoked. Answers to HEAD give no reason."""

_PAGE = re.compile(r"<(!doctype html|html)\b.*?(</html>|$)", re.DOTALL | re.IGNORECASE)
_TITLE = re.compile(r"<title>\s*(.*?)\s*</title>", re.DOTALL | re.IGNORECASE)

_ERROR_DOCUMENT = re.compile(r"(<\?xml[^>]*>\s*)?<Error\b.*?</Error>", re.DOTALL)


def storage_error(
    what: str, url: str, error: BaseException, known: Sequence[str], hint: str = "", proxy: str = ""
) -> StorageError:
    """Return a StorageError with a reason and a cause, both without secrets.

    Args:
        what: the operation.
        url: the url for the message.
        error: the client's error.
        known: secrets to remove.
        hint: the next step, unless the error's code has a more exact one.
        proxy: the proxy of the requests and the setting that names it.
    """
    text = _text_of(error, known)
    step = next_step(text, is_panic(error))
    if not step or refuses_credentials(error):
        # For credentials, the code gives the reason, and the hint names their source.
        step = ". ".join(filter(None, (step, hint)))
    unreached = no_answer(error) or "status code: 407" in text
    detail = _address_fault(text, proxy if unreached else "") or ". ".join(
        filter(None, (reason(error, known).rstrip("."), step))
    )
    failure = StorageError(f"{_cut(what)} in {url} failed: {detail}")
    failure.no_bucket = re.search(_NO_BUCKET, text) is not None
    failure.__cause__ = clean_cause(error, known)
    return failure


def no_answer(error: BaseException) -> bool:
    """Whether a request failed without an answer: no server listens, or it does not use this protocol."""
    text = _ends(str(error))
    return _NO_ANSWER.search(text) is not None and "response body" not in text


def is_redirect(error: BaseException) -> bool:
    """Whether a server redirected a request to a host that is not allowed."""
    return _FAULTS[0][0].search(_ends(str(error))) is not None


def not_implemented(error: BaseException) -> bool:
    """Whether the server does not implement the request (status 501)."""
    return getattr(error, "errno", None) == errno.ENOSYS or "501 Not Implemented" in str(error)


def refuses_for_good(error: BaseException) -> bool:
    """Whether a server forbids a request or does not know it (status 403, 405 or 501)."""
    return any(_REFUSED.search(str(one)) for one in _chain(error)) and not is_passing(error)


def max_repeats(error: BaseException) -> int:
    """Return how often a request may be repeated, with a new signature, after this error.

    Repeats are safe for all requests. A second delete finds no object, which is no error. After a refused condition the
    caller reads the object.
    """
    text = _ends(str(error))
    if is_passing(error) or (_TRANSIENT.search(text) and not _REPEATED.search(text) and not is_redirect(error)):
        return sys.maxsize
    return _SELDOM_REPEATS if _SELDOM_PASSING.search(text) else 0


def is_passing(error: BaseException) -> bool:
    """Whether a server's answer means that the same request may succeed soon."""
    return _PASSING.search(_ends(str(error))) is not None


def is_throttling(error: BaseException) -> bool:
    """Whether a server's answer asks for fewer requests."""
    return _THROTTLING.search(_ends(str(error))) is not None


def hides_reason(error: BaseException) -> bool:
    """Whether the abort of a multipart upload failed. obstore then drops the error that caused the abort."""
    return re.search(_ABORT, _ends(str(error))) is not None


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust client. It is no ``Exception``, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"


def never_sent(error: BaseException) -> bool:
    """Whether the server closed the connection before any part of the request was sent."""
    return "connection was not ready" in str(error)


def refuses_credentials(error: BaseException) -> bool:
    """Whether a server refused, or may have refused, the credentials. New ones may be accepted."""
    return _REFUSED_KEYS.search(_ends(f"{error} {error.__cause__ or ''}")) is not None


def is_sign_in(error: BaseException) -> bool:
    """Whether a request failed because obstore got no credentials from the machine's own account."""
    return "performing token request" in str(error)


def permission_hint(cloud: str, what: str, error: BaseException) -> str:
    """Return the next step after a refusal of ``what`` for lack of a permission, otherwise ""."""
    text = _text_of(error, ())
    return "" if _REFUSED_CODE.search(text) else permission_step(cloud, what, text)


def _address_fault(text: str, proxy: str) -> str:
    """Return a message with the next step if an error usually means a wrong address, otherwise ""."""
    server = _SERVER.search(text)
    named = server[0] if server else "the server"
    if proxy:
        return (
            f"{named} was not reached through the proxy {proxy}. Check that the proxy runs and accepts the host, or "
            "exclude the host from it with NO_PROXY"
        )
    return next((sentence for words, sentence in _FAULTS if words.search(text)), "").format(named)


def not_found(key: str, url: str, error: BaseException | None = None, known: Sequence[str] = ()) -> ObjectNotFoundError:
    """Return the error for an absent object. If the bucket is missing, the reason in the message contains that."""
    detail = f" ({reason(error, known)})" if error is not None else ""
    failure = ObjectNotFoundError(f"there is no object {key!r} in {url}{detail}")
    failure.__cause__ = None if error is None else clean_cause(error, known)
    return failure


def conflict(key: str, url: str, replacing: bool) -> ObjectExistsError:
    """Return the error for a put whose condition does not hold."""
    if replacing:
        return ObjectExistsError(f"{key!r} in {url} is not the version that was read: another process changed it")
    return ObjectExistsError(f"{key!r} exists already in {url}")


def short_object(key: str, url: str, expected: int, found: int) -> CorruptCheckpointError:
    """Return the error for an object that ends before the requested bytes."""
    return CorruptCheckpointError(
        f"object {key!r} in {url} is too short: found {found} bytes, expected at least {expected}"
    )


def ranges_ignored(key: str, url: str, asked: int, found: int) -> StorageError:
    """Return the error for a server that sends more of an object than the requested range."""
    return StorageError(
        f"reading {key!r} in {url} failed: the server sent {found} bytes, expected the {asked} that were requested. It "
        "does not support byte ranges. Use a server that does"
    )


def long_object(key: str, url: str, max_bytes: int) -> CorruptCheckpointError:
    """Return the error for an object that is longer than the limit."""
    return CorruptCheckpointError(f"object {key!r} in {url} is too long: expected at most {max_bytes} bytes")


def is_full(error: StorageError) -> bool:
    """Whether a disk was full or its quota used up. If so, the operation was not done and cannot be repeated."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: BaseException, known: Sequence[str]) -> str:
    """Return the text of the client's error on one line, shortened and without secrets."""
    text = str(error).split(_DETAILS, 1)[0]
    if error.__cause__ is not None and str(error.__cause__) not in text:
        # s3fs puts the server's error code into the cause only.
        text = f"{text} ({error.__cause__})"
    if not _is_system_s(error):
        short = _PAGE.sub(_titled, _ERROR_DOCUMENT.sub(_code_and_message, _scrubbed(text, known)))
        text = _cut(" ".join(short.split()))
    return one_line(f"{type(error).__name__}: {text}") if text else type(error).__name__


def _text_of(error: BaseException, known: Sequence[str]) -> str:
    return _scrubbed(f"{error} {error.__cause__ or ''}", known)


def _scrubbed(text: str, known: Sequence[str]) -> str:
    """Remove secrets from a client's error, and its middle if it is very long."""
    return scrub(_ends(hide(text, known)))


def _ends(text: str) -> str:
    """Remove the middle of a very long text. The end part begins with a whole word, not within a secret."""
    if len(text) <= 2 * _EXAMINED:
        return text
    end = text[-_EXAMINED:]
    begin = re.search(r"[\s<]|$", end)
    return f"{text[:_EXAMINED]} ... {end[begin.start() if begin else 0 :]}"


def _cut(text: str) -> str:
    """Shorten a long text in its middle. It may begin with a long url, and ends with the server's answer."""
    return text if len(text) <= _BEGIN + _END else f"{text[:_BEGIN]} ... {text[-_END:]}"


def _code_and_message(document: re.Match[str]) -> str:
    """Return the code and, if there is one, the message of an error from a server's XML document."""
    found = (re.search(rf"<{name}>(.*?)</{name}>", document[0], re.DOTALL) for name in ("Code", "Message"))
    return ": ".join(html.unescape(part[1]) for part in found if part is not None) or document[0]


def _titled(page: re.Match[str]) -> str:
    """Replace a web page, which no object store sends, by its title."""
    title = _TITLE.search(page[0])
    return f"(a web page{f': {html.unescape(title[1])[:80]}' if title else ''})"


def clean_cause(error: BaseException, known: Sequence[str]) -> BaseException:
    """Return the exception, or a replacement if it or one of its causes contains a secret or control characters."""
    texts = (text for item in _chain(error) for text in (str(item), repr(item)))
    if _is_system_s(error) or all(
        len(text) <= 8 * _EXAMINED and printable(scrub(text, known)) == text for text in texts
    ):
        return error
    return RuntimeError(reason(error, known))


def _is_system_s(error: BaseException) -> bool:
    """Whether the operating system raised the error. It contains a path, but no secret. A save meets many of these."""
    return (
        isinstance(error, OSError)
        and error.filename is not None
        and error.__cause__ is None
        and error.__context__ is None
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        item = todo.pop()
        if item is not None and id(item) not in seen:
            seen.add(id(item))
            yield item
            todo += [item.__cause__, item.__context__]
