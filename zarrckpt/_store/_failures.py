"""A client's exception -> our own error: what was done, where, why, and the next step; never a secret."""

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
from zarrckpt._store._next_steps import next_step
from zarrckpt._store._secrets import hide, scrub

_BEGIN, _END = 300, 700
_EXAMINED = 4096
"""Characters of a client's error that are looked at, at each end: a server may send any number of them."""
# obstore appends the same facts once more, as a Rust structure over many lines.
_DETAILS = "\n\nDebug source"

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What says that there is no such object."""

NO_BUCKET = "has no such bucket"
"""In the message of an error: the bucket is missing."""

_SERVER = re.compile(r"https?://[^/\s\"]+")
_ABORT = r"performing DELETE \S*uploadId="
_FAULTS = [
    (re.compile(words), sentence)
    for words, sentence in (
        (
            # The proxy for all hosts but the client's own: see _redirects.
            r"connect error\",\s+127\.0\.0\.1:0,",
            "{} redirects the request to another host, and redirects lead there only if that is asked for. Check the "
            "endpoint; if it is right, pass storage_options={{'redirect_hosts': [...]}} with the other host's name, or "
            "'*' for any",
        ),
        (
            _ABORT,
            "{} failed during an upload in parts, and failed to abort it as well. obstore keeps only the second error. "
            "Check the server's log, and what the credentials allow, and try again",
        ),
        (r"ConnectionRefused", "nothing listens at {}. Check the endpoint's host and port, and that the server runs"),
        (r"dns error|gaierror", "the host of {} is not known. Check the endpoint's name, and the network"),
        (r"InvalidContentType", "{} does not speak TLS. Check the endpoint: for plain HTTP it begins with http://"),
        (
            r"InvalidCertificate",
            "the certificate of {} is not trusted. Check the endpoint, or pass the authority as root_certificate",
        ),
        (r"\bParse\(", "{} does not answer in HTTP. Check the endpoint: for TLS it begins with https://"),
        (
            r"ConnectionReset|IncompleteMessage|connection was not ready",
            "{} closed the connection without an answer. Check the endpoint (for TLS it begins with https://), the "
            "server and the network",
        ),
        (
            r"kind: Timeout,\s+source: reqwest::Error \{\s+kind: Request,\s+source: TimedOut",
            "{} accepts connections and does not answer in time. Check the endpoint's host and port, and the server; "
            "to wait longer, pass read_timeout",
        ),
        (
            r"kind: Timeout,(?s:.){,200}Connect",
            "{} takes no connection in time. Check the endpoint's host and port, and the network",
        ),
        (
            r"<Code>NoSuchBucket</Code>|\(NoSuchBucket\)",
            f"{{}} {NO_BUCKET} (NoSuchBucket). Check that the bucket exists, and that the endpoint and the region "
            "are its own",
        ),
    )
]
"""What obstore and s3fs write, in details that nobody reads, of what is wrong with an address -> what to say."""

_NO_ANSWER = re.compile(r"kind: (Connect|Interrupted|Timeout)\b|IncompleteMessage|connection was not ready|\bParse\(")
"""In what obstore writes: no server has answered."""

_PASSING = re.compile(
    r"(status code: 40[039]\b(?s:.)*?<Code>|\(code: )(RequestTimeout(Exception)?|IncompleteBody|\w*Throttl\w*|SlowDown"
    r"|TooManyRequests(Exception)?|RequestLimitExceeded|BandwidthLimitExceeded|PriorRequestNotComplete"
    r"|OperationAborted|ConditionalRequestConflict)(</Code>|\))"
)
"""In a server's answer: the same request may succeed soon. obstore repeats those with status 429, 500 and above."""
_LOST = re.compile(
    r"kind: (Interrupted|Timeout)\b|IncompleteMessage|UnexpectedEof|ConnectionReset|error decoding response body"
)
"""In what obstore writes: the answer did not arrive, or not as a whole."""
_REPEATED = re.compile(r", after (\d+) retries, max_retries: \1\b")
"""In what obstore writes: it has repeated the request itself, as often as it may."""
_SELDOM_PASSING = re.compile(
    # A request that waited long has an old signature. A clock that is wrong stays wrong.
    r"<Code>RequestTimeTooSkewed</Code>"
    # The connection was closed before the request was sent.
    r"|connection was not ready"
    # An answer that is cut looks like one that is no such document at all.
    r"|[Ii]nvalid (list|DeleteObjects|multipart) response"
    # An answer to HEAD has no code, and a conflict with nobody's condition is one with another request.
    r"|performing HEAD (?s:.)*status code: 40[03]\b|status code: 409\b"
    # An upload whose last answer was lost is gone, and the error of an abort replaces the reason for it.
    r"|<Code>NoSuchUpload</Code>"
    rf"|{_ABORT}"
)
_FEW = 2

_REFUSED_CODES = (
    "ExpiredToken|ExpiredTokenException|InvalidToken|InvalidTokenId|TokenRefreshRequired|InvalidAccessKeyId"
    "|InvalidClientTokenId|SignatureDoesNotMatch|AuthenticationFailed"
)
_REFUSED_KEYS = re.compile(
    rf"<Code>({_REFUSED_CODES})</Code>|\(({_REFUSED_CODES})\) when calling|status code: 401\b"
    r"|performing HEAD (?s:.)*?status code: 40[03]\b|\(40[013]\) when calling the HeadObject"
)
"""In what obstore and s3fs write: the credentials have ended or were withdrawn. Answers to HEAD give no reason."""

_PAGE = re.compile(r"<(!doctype html|html)\b.*?(</html>|$)", re.DOTALL | re.IGNORECASE)
_TITLE = re.compile(r"<title>\s*(.*?)\s*</title>", re.DOTALL | re.IGNORECASE)

_ERROR_DOCUMENT = re.compile(r"(<\?xml[^>]*>\s*)?<Error\b.*?</Error>", re.DOTALL)


def storage_error(
    what: str, url: str, error: BaseException, known: Sequence[str], hint: str = "", may_ask: bool = False
) -> StorageError:
    """A StorageError with a scrubbed reason and a scrubbed cause. A code with a next step of its own needs no hint.

    ``may_ask``: see :func:`~zarrckpt._store._next_steps.next_step`.
    """
    text = _scrubbed(f"{error} {error.__cause__ or ''}", known)
    step = next_step(text, is_panic(error), may_ask)
    if not step or refuses_credentials(error):
        # Of credentials, the code gives the reason, and the hint where they come from.
        step = ". ".join(filter(None, (step, hint)))
    said = _address_fault(text) or ". ".join(filter(None, (reason(error, known).rstrip("."), step)))
    failure = StorageError(f"{_cut(what)} in {url} failed: {said}")
    failure.__cause__ = clean_cause(error, known)
    return failure


def no_answer(error: BaseException) -> bool:
    """Whether a request failed before any server answered it: nobody is there, or nobody that speaks this protocol."""
    text = _ends(str(error))
    return _NO_ANSWER.search(text) is not None and "response body" not in text


def is_redirect(error: BaseException) -> bool:
    """Whether a server sent a request on to a host that it is not meant for."""
    return _FAULTS[0][0].search(_ends(str(error))) is not None


def not_implemented(error: BaseException) -> bool:
    """Whether the server has not got what the request asks for (501)."""
    return getattr(error, "errno", None) == errno.ENOSYS or "501 Not Implemented" in str(error)


def most_repeats(error: BaseException) -> int:
    """How often a request may be made again, signed anew, that failed with this error.

    No request is harmed by that: what is deleted twice is absent, and a refused condition is settled by a read.
    """
    text = _ends(str(error))
    if is_passing(error) or (_LOST.search(text) and not _REPEATED.search(text)):
        return sys.maxsize
    return _FEW if _SELDOM_PASSING.search(text) else 0


def is_passing(error: BaseException) -> bool:
    """Whether a server asks for the same request again."""
    return _PASSING.search(_ends(str(error))) is not None


def hides_reason(error: BaseException) -> bool:
    """Whether an error is that of the abort of an upload in parts: obstore drops the error that it is aborted for."""
    return re.search(_ABORT, _ends(str(error))) is not None


def is_panic(error: BaseException) -> bool:
    """Whether a client written in Rust gave up on what it cannot handle: no Exception, and its class has no address."""
    return type(error).__name__ == "PanicException"


def never_sent(error: BaseException) -> bool:
    """Whether the server closed the connection before any of the request was on its way."""
    return "connection was not ready" in str(error)


def refuses_credentials(error: BaseException) -> bool:
    """Whether a server refused credentials, or may have: others may be accepted."""
    return _REFUSED_KEYS.search(_ends(f"{error} {error.__cause__ or ''}")) is not None


def _address_fault(text: str) -> str:
    """A sentence for what is usually a wrong address, with the next step; "" for anything else."""
    server = _SERVER.search(text)
    found = (sentence for words, sentence in _FAULTS if words.search(text))
    return next(found, "").format(server[0] if server else "the server")


def not_found(key: str, url: str, error: BaseException | None = None, known: Sequence[str] = ()) -> ObjectNotFoundError:
    """The object is not there; the store's own words tell whether a bucket is missing."""
    said = f" ({reason(error, known)})" if error is not None else ""
    failure = ObjectNotFoundError(f"there is no object {key!r} in {url}{said}")
    failure.__cause__ = None if error is None else clean_cause(error, known)
    return failure


def conflict(key: str, url: str, replacing: bool) -> ObjectExistsError:
    """A condition was lost."""
    if replacing:
        return ObjectExistsError(f"{key!r} in {url} is not the version that was read: somebody wrote it meanwhile")
    return ObjectExistsError(f"{key!r} exists already in {url}")


def short_object(key: str, url: str, expected: int, found: int) -> CorruptCheckpointError:
    """The object ends before the bytes that were asked for."""
    return CorruptCheckpointError(
        f"object {key!r} in {url} is too short: {expected} bytes were expected, {found} are there"
    )


def ranges_ignored(key: str, url: str, asked: int, found: int) -> StorageError:
    """The server sent more of an object than was asked for."""
    return StorageError(
        f"reading {key!r} in {url} failed: the server sent {found} bytes, expected the {asked} that were asked for. It "
        "serves no ranges of bytes: use a server that does"
    )


def long_object(key: str, url: str, most: int) -> CorruptCheckpointError:
    """The object, or what a server sends of it, is longer than it may be."""
    return CorruptCheckpointError(f"object {key!r} in {url} is too long: at most {most} bytes were expected")


def is_full(error: StorageError) -> bool:
    """Whether a disk was full, or its quota used up: then nothing of what was asked for is done, now or later."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: BaseException, known: Sequence[str]) -> str:
    """The client's own words on one line, scrubbed and cut."""
    text = str(error).split(_DETAILS, 1)[0]
    if error.__cause__ is not None and str(error.__cause__) not in text:
        # s3fs puts the server's error code into the cause only.
        text = f"{text} ({error.__cause__})"
    if not _is_system_s(error):
        text = _cut(" ".join(_PAGE.sub(_titled, _ERROR_DOCUMENT.sub(_said, _scrubbed(text, known))).split()))
    return one_line(f"{type(error).__name__}: {text}") if text else type(error).__name__


def _scrubbed(text: str, known: Sequence[str]) -> str:
    """A client's error without secrets, and without its middle if it is very long."""
    return scrub(_ends(hide(text, known)))


def _ends(text: str) -> str:
    """A text without its middle if it is very long. The end begins with a word, not within a secret."""
    if len(text) <= 2 * _EXAMINED:
        return text
    end = text[-_EXAMINED:]
    begin = re.search(r"[\s<]|$", end)
    return f"{text[:_EXAMINED]} ... {end[begin.start() if begin else 0 :]}"


def _cut(text: str) -> str:
    """A text that is not too long: a url comes first, however long, and what the server said last."""
    return text if len(text) <= _BEGIN + _END else f"{text[:_BEGIN]} ... {text[-_END:]}"


def _said(document: re.Match[str]) -> str:
    """What a server's XML document says of an error: its code, and its message where there is one."""
    found = (re.search(rf"<{name}>(.*?)</{name}>", document[0], re.DOTALL) for name in ("Code", "Message"))
    return ": ".join(html.unescape(part[1]) for part in found if part is not None) or document[0]


def _titled(page: re.Match[str]) -> str:
    """What is left of a web page, which no object store sends: its title."""
    title = _TITLE.search(page[0])
    return f"(a web page{f': {html.unescape(title[1])[:80]}' if title else ''})"


def clean_cause(error: BaseException, known: Sequence[str]) -> BaseException:
    """The exception itself, or a stand-in where it or one that it came from quotes a secret or control characters."""
    texts = (text for item in _chain(error) for text in (str(item), repr(item)))
    if _is_system_s(error) or all(
        len(text) <= 8 * _EXAMINED and printable(scrub(text, known)) == text for text in texts
    ):
        return error
    return RuntimeError(reason(error, known))


def _is_system_s(error: BaseException) -> bool:
    """Whether an error is the operating system's own: it quotes a path, and no secret. A save meets many of these."""
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
