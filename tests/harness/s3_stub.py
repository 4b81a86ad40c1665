"""A small S3 server in this process, whose faults can be chosen.

It ignores conditions, loses answers, refuses and quotes secrets, stalls, uses TLS, serves as a proxy, and records every
request. No real server offers these negative cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from harness.store_servers import S3Place

LONG = 60.0
"""Seconds of a server that hangs. A client that waits for it takes longer than half of them, one with a timeout far
less.
"""


@dataclass
class Request:
    """One request as the stub got it."""

    method: str
    target: str
    headers: dict[str, str]


@dataclass
class Strike:
    """One request of a kind that fails: it is refused, or done and answered in part."""

    kind: str
    """See :func:`kind_of`."""
    status: int = 0
    """The status of the refusal. With 0 the request is done."""
    code: str = ""
    sent: float = 0.0
    """The share of the answer that is sent before the connection is closed."""
    spared: int = 0
    """Number of requests of the kind that come before it."""


def kind_of(method: str, query: Collection[str]) -> str:
    """Return the kind of a request: get, head, list, put, begin, part, end, abort, delete or bulk."""
    match method:
        case "GET":
            return "list" if "list-type" in query else "get"
        case "POST":
            return "bulk" if "delete" in query else "begin" if "uploads" in query else "end"
        case "PUT":
            return "part" if "partNumber" in query else "put"
        case "DELETE":
            return "abort" if "uploadId" in query else "delete"
    return method.lower()


@dataclass
class Faults:
    """The faults of the stub. They may be changed while it runs."""

    ignore_conditions: bool = False
    no_conditions: bool = False
    """Every put with a condition gets a 501, as on Backblaze B2."""
    lose_answers: int = 0
    """Number of puts that are done, after which the connection is closed instead of an answer."""
    server_errors: int = 0
    """Number of requests that get a 503."""
    strike: Strike | None = None
    """One request that fails."""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By kind of request: all get an error of this status and code."""
    region: str = ""
    """The region of all buckets, in a header of each answer."""
    accepts_key: Callable[[str, Request], bool] = lambda key, request: True
    """Requests whose access key it does not accept get a 400 ExpiredToken."""
    resets: int = 0
    """Number of connections that are closed before a request is read."""
    refusal: str = ""
    """Every request gets a 403 with this text."""
    refusal_status: int = 403
    refuse_deletes: int = 0
    """The status of every answer to a deletion. With 0 they are done."""
    stall_seconds: float = 0.0
    page: int = 1000
    """Entries in one answer to a listing."""
    refuse_matches: bool = False
    """If-Match never holds, as on Ceph 16 with versioning."""
    bare_e_tags: bool = False
    """If-Match holds for e-tags without quotes only, as in Ceph."""
    ignore_ranges: bool = False
    """Requests for a part get the whole object."""
    cut_bodies: int = 0
    """Number of objects of which half is sent before the connection is closed."""
    pause_bodies: float = 0.0
    """Seconds between the two halves of an object."""
    trickle: float = 0.0
    """Seconds before each byte of the second half of an object."""
    hang_up: bool = False
    """Connections are closed after each answer without notice."""
    parting_words: bytes = b""
    """Bytes that are sent after each answer, unasked, before the connection is closed."""
    other_ranges: bool = False
    """Ranges of the right length, from the object's begin."""
    keep_folders: bool = False
    """Folders are listed also when all their objects are deleted, as SeaweedFS does."""
    most_of_a_range: int | None = None
    """Maximum bytes that are sent of a longer range."""
    redirect_to: str = ""
    """Every request is redirected to this server (302)."""
    announced: int | None = None
    """The announced length of every object."""
    endless: bool = False
    """Objects are sent in pieces, without an end."""
    listing: bytes | None = None
    """The answer to every listing."""


@dataclass
class _Object:
    data: bytes
    e_tag: str
    generation: int
    headers: dict[str, str]


@dataclass
class S3Stub:
    """A small S3 server (path style, no authentication). With ``x-goog-if-generation-match`` it serves GCS as well."""

    faults: Faults = field(default_factory=Faults)
    tls: ssl.SSLContext | None = None
    objects: dict[str, _Object] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    """Number of connections that were opened."""

    @property
    def handler(self) -> type[Handler]:
        """The class that answers requests. Servers with other behaviour override it."""
        return Handler

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.upload_headers: dict[str, dict[str, str]] = {}
        self.generation = 1000
        self.folders: set[str] = set()

    def __enter__(self) -> S3Stub:
        handler = type("Handler", (self.handler,), {"server_stub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """The url of the server."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    def bucket(self) -> S3Place:
        """Return a place in a new bucket. Any bucket exists here."""
        return S3Place(self.endpoint, f"stub-{uuid.uuid4().hex}")

    def store(self, key: str, data: bytes, headers: dict[str, str]) -> _Object:
        """Keep an object. Called with the lock held."""
        self.generation += 1
        made = _Object(data, f'"{hashlib.md5(data).hexdigest()}"', self.generation, headers)
        self.objects[key] = made
        parts = key.split("/")
        self.folders |= {f"{'/'.join(parts[:depth])}/" for depth in range(1, len(parts))}
        return made


class Handler(BaseHTTPRequestHandler):
    """Implements just enough of S3's protocol, one object per path."""

    server_stub: S3Stub
    protocol_version = "HTTP/1.1"
    # An answer is several writes. The second must not wait for the acknowledgement of the first.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean."""

    def setup(self) -> None:
        super().setup()
        self.server_stub.connections += 1

    def handle(self) -> None:
        with self.server_stub.lock:
            reset = self.server_stub.faults.resets > 0
            self.server_stub.faults.resets -= reset
        if not reset:
            super().handle()

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle_one_request()

    def do_PUT(self) -> None:
        self._serve(self._put)

    def do_GET(self) -> None:
        self._serve(self._get)

    def do_HEAD(self) -> None:
        self._serve(self._get)

    def do_DELETE(self) -> None:
        self._serve(self._delete)

    def do_POST(self) -> None:
        self._serve(self._post)

    def _serve(self, work: Callable[[], None]) -> None:
        stub, faults = self.server_stub, self.server_stub.faults
        # A proxy gets the whole url, a server only the path.
        target = urlsplit(self.path)
        self._key = unquote(target.path).lstrip("/")
        self._query = parse_qs(target.query, keep_blank_values=True)
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        stub.requests.append(request)
        if faults.stall_seconds:
            time.sleep(faults.stall_seconds)
        if faults.redirect_to:
            return self._answer(302, headers={"Location": f"{faults.redirect_to}{self.path}"})
        if faults.refusal:
            return self._answer(faults.refusal_status, faults.refusal.encode())
        if faults.refuse_deletes and (self.command == "DELETE" or "delete" in self._query):
            return self._answer(faults.refuse_deletes, b"<Error><Code>Refused</Code></Error>")
        signer = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        if not faults.accepts_key(signer, request):
            return self._answer(400, b"<Error><Code>ExpiredToken</Code></Error>")
        with stub.lock:
            if faults.server_errors > 0:
                faults.server_errors -= 1
                return self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            kind = kind_of(self.command, self._query)
            if kind in faults.refused:
                status, code = faults.refused[kind]
                return self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())
            strike = faults.strike if faults.strike is not None and faults.strike.kind == kind else None
            if strike is not None and strike.spared:
                strike.spared -= 1
            elif strike is not None:
                faults.strike = None
                if strike.status:
                    return self._answer(strike.status, f"<Error><Code>{strike.code}</Code></Error>".encode())
                work = partial(self._answer_in_part, work, strike.sent)
        work()
        if faults.hang_up or faults.parting_words:
            self.close_connection = True
        self.wfile.write(faults.parting_words)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.server_stub.faults.region:
            self.send_header("x-amz-bucket-region", self.server_stub.faults.region)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status == 206 and self.server_stub.faults.cut_bodies > 0:
            self.server_stub.faults.cut_bodies -= 1
            self.wfile.write(body[: len(body) // 2])
            return self._cut()
        if self.command != "HEAD":
            faults = self.server_stub.faults
            half = len(body) // 2 if faults.pause_bodies or faults.trickle else len(body)
            self.wfile.write(body[:half])
            time.sleep(faults.pause_bodies)
            if not faults.trickle:
                self.wfile.write(body[half:])
                return
            for byte in body[half:]:
                time.sleep(faults.trickle)
                self.wfile.write(bytes([byte]))

    def _put(self) -> None:
        stub = self.server_stub
        with stub.lock:
            if "partNumber" in self._query:
                part, upload = int(self._query["partNumber"][0]), self._query["uploadId"][0]
                stub.uploads[upload][part] = self._body
                return self._answer(200, headers={"ETag": f'"part-{part}"'})
            if stub.faults.no_conditions and ("If-None-Match" in self.headers or "If-Match" in self.headers):
                return self._answer(501, b"<Error><Code>NotImplemented</Code></Error>")
            if not stub.faults.ignore_conditions and not self._condition_holds():
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            made = stub.store(self._key, self._body, {k.lower(): v for k, v in self.headers.items()})
            lost = stub.faults.lose_answers > 0
            stub.faults.lose_answers -= lost
        if lost:
            return self._cut()
        self._answer(200, headers=_object_headers(made))

    def _answer_in_part(self, work: Callable[[], None], share: float) -> None:
        wire, self.wfile = self.wfile, io.BytesIO()
        work()
        answer, self.wfile = self.wfile.getvalue(), wire
        self.wfile.write(answer[: int(len(answer) * share)])
        self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _condition_holds(self) -> bool:
        found = self.server_stub.objects.get(self._key)
        if self.headers.get("If-None-Match") == "*" and found is not None:
            return False
        wanted = self.headers.get("If-Match")
        if wanted is not None and self.server_stub.faults.refuse_matches:
            return False
        if wanted is not None:
            bare = self.server_stub.faults.bare_e_tags
            return found is not None and wanted == (found.e_tag.strip('"') if bare else found.e_tag)
        generation = self.headers.get("x-goog-if-generation-match")
        return generation is None or int(generation) == (found.generation if found is not None else 0)

    def _get(self) -> None:
        if "list-type" in self._query:
            return self._list()
        with self.server_stub.lock:
            found = self.server_stub.objects.get(self._key)
        if found is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data, status, headers = found.data, 200, _object_headers(found)
        asked = self.headers.get("Range")
        if asked and not self.server_stub.faults.ignore_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first or 0), min(int(last) + 1 if last else len(data), len(data))
            if not first:  # "-20": the last 20 bytes
                start, end = max(len(data) - int(last), 0), len(data)
            if self.server_stub.faults.other_ranges:
                start, end = 0, end - start
            end = min(end, start + (self.server_stub.faults.most_of_a_range or len(data)))
            if start >= len(data):
                return self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            data, status = data[start:end], 206
        if self.server_stub.faults.announced is not None:
            self.close_connection = True
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(self.server_stub.faults.announced)}.items():
                self.send_header(name, value)
            return self.end_headers()
        if self.server_stub.faults.endless:
            return self._send_without_end(status, {**headers, "Content-Length": str(len(data))})
        if self.command == "HEAD":
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            return
        self._answer(status, data, headers)

    def _send_without_end(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Transfer-Encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        piece = bytes(2**16)
        for _ in range(2**30 // len(piece)):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _delete(self) -> None:
        with self.server_stub.lock:
            self.server_stub.objects.pop(self._key, None)
        self._answer(204)

    def _post(self) -> None:
        stub, text = self.server_stub, self._body.decode()
        with stub.lock:
            if "delete" in self._query:
                keys = [html.unescape(part.split("</Key>")[0]) for part in text.split("<Key>")[1:]]
                for key in keys:
                    stub.objects.pop(f"{self._key.rstrip('/')}/{key}", None)
                deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
                return self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
            if "uploads" in self._query:
                upload = uuid.uuid4().hex
                stub.uploads[upload] = {}
                stub.upload_headers[upload] = {k.lower(): v for k, v in self.headers.items()}
                names = f"<Bucket>b</Bucket><Key>k</Key><UploadId>{upload}</UploadId>"
                body = f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>"
                return self._answer(200, body.encode())
            upload = self._query["uploadId"][0]
            if upload not in stub.uploads:
                return self._answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            parts = stub.uploads.pop(upload)
            made = stub.store(self._key, b"".join(parts[n] for n in sorted(parts)), stub.upload_headers.pop(upload))
        names = f"<Location>l</Location><Bucket>b</Bucket><Key>k</Key><ETag>{escape(made.e_tag)}</ETag>"
        body = f"<CompleteMultipartUploadResult>{names}</CompleteMultipartUploadResult>"
        self._answer(200, body.encode())

    def _list(self) -> None:
        if self.server_stub.faults.listing is not None:
            return self._answer(200, self.server_stub.faults.listing)
        bucket = self._key.rstrip("/") + "/"
        prefix = self._query.get("prefix", [""])[0]
        delimiter = self._query.get("delimiter", [""])[0]
        with self.server_stub.lock:
            found = {
                key[len(bucket) :]: item for key, item in self.server_stub.objects.items() if key.startswith(bucket)
            }
            if self.server_stub.faults.keep_folders and delimiter:
                kept = {name.removeprefix(bucket) for name in self.server_stub.folders if name.startswith(bucket)}
                found = {**found, **dict.fromkeys(kept)}
        lines: dict[str, str] = {}
        for key in sorted(key for key in found if key.startswith(prefix) and key != prefix):
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                name = f"{prefix}{head}{delimiter}"
                lines[name] = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                continue
            item = found[key]
            lines[key] = (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(item.data)}</Size><ETag>{escape(item.e_tag)}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        after = self._query.get("start-after", [""])[0]
        lines = {key: line for key, line in lines.items() if key > after}
        first = int(self._query.get("continuation-token", ["0"])[0])
        last = first + self.server_stub.faults.page
        more = f"<NextContinuationToken>{last}</NextContinuationToken>" if last < len(lines) else ""
        entries = "".join([*lines.values()][first:last])
        truncated = f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        body = f"<ListBucketResult>{truncated}{more}{entries}</ListBucketResult>"
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})


def _object_headers(item: _Object) -> dict[str, str]:
    return {
        **({"ETag": item.e_tag} if item.e_tag else {}),
        "Last-Modified": formatdate(1767225600, usegmt=True),
        "x-goog-generation": str(item.generation),
    }
