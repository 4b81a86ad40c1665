"""A small S3 server in memory on the loopback interface, with faults to choose: in this process or in a separate one.

Any credentials are accepted, every bucket exists, and checksums and signatures are ignored. It implements get (ranges,
If-Match), head, put (aws-chunked, If-None-Match, If-Match, copy), multipart uploads, delete, bulk delete and listings.
With ``x-goog-if-generation-match`` it serves GCS as well. It also serves as a proxy.

:class:`S3Server` runs in threads of this process and records every request. :func:`served` runs one in another process,
which does not slow this one down; the benchmarks measure with it. There, ``/-/stats`` returns counts as JSON,
``/-/reset`` starts them again, and ``/-/clear?bucket=`` empties a bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from harness.s3_objects import Entry, Failed, Log, Objects, Stored
from harness.s3_wire import Wire
from harness.store_servers import AUTHORITY, REGION, S3Place, make_certificate, server_context

LONG = 60.0
"""Seconds of a server that hangs. A client that waits for it takes longer than half of them, one with a timeout far
less.
"""


@dataclass
class Request:
    """One request as the server got it. Names of headers are in lower case."""

    method: str
    target: str
    headers: dict[str, str]

    @cached_property
    def path(self) -> str:
        """The bucket and the key. A proxy gets the whole url, a server only the path."""
        return unquote(urlsplit(self.target).path).lstrip("/")

    @cached_property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    @property
    def kind(self) -> str:
        """The kind of the request, see :func:`kind_of`. A put whose bytes are those of another object is a copy."""
        return "copy" if self.copy_source else kind_of(self.method, self.query)

    @property
    def copy_source(self) -> str:
        """The bucket and the key of the object to copy, or ""."""
        return unquote(self.headers.get("x-amz-copy-source") or self.headers.get("x-goog-copy-source", "")).lstrip("/")


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
class Strike:
    """One request of a kind that fails: it is refused, or done and answered in part."""

    kind: str
    """See :attr:`Request.kind`."""
    status: int = 0
    """The status of the refusal. With 0 the request is done."""
    code: str = ""
    sent: float = 0.0
    """The share of the answer that is sent before the connection is closed."""
    spared: int = 0
    """Number of requests of the kind that come before it."""


@dataclass
class Faults:
    """The conditions and faults of the server. They may be changed while it runs."""

    latency: float = 0.0
    """Seconds before each answer."""
    bandwidth: float = 0.0
    """Bytes per second of each new connection. With 0 it is not limited."""
    throttle: float = 0.0
    """The share of requests that get a 503."""
    reset_share: float = 0.0
    """The share of answers of which half is sent before the connection is reset."""
    ignore_conditions: bool = False
    no_conditions: bool = False
    """Every put with a condition gets a 501, as on Backblaze B2."""
    lose_answers: int = 0
    """Number of puts that are done, after which the connection is closed instead of an answer."""
    server_errors: int = 0
    """Number of requests that get a 503."""
    strike: Strike | None = None
    """One request that fails."""
    delay: Callable[[Request], float] = lambda request: 0.0
    """The seconds after which a request is carried out."""
    dropped: Collection[str] = ()
    """Kinds of requests that are not carried out, and after which the connection is closed instead of an answer."""
    failed_copies: int = 0
    """Number of copies that are not made and get an answer of status 200 with an error in its body."""
    cut_copies: bool = False
    """The copy of an object has the first half of its bytes."""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By kind of request: all get an error of this status and code."""
    accepts_key: Callable[[str, Request], bool] = lambda key, request: True
    """Requests whose access key it does not accept get a 400 ExpiredToken."""
    resets: int = 0
    """Number of connections that are closed before a request is read."""
    refusal: str = ""
    """Every request gets a 403 with this text."""
    refusal_status: int = 403
    refuse_deletes: int = 0
    """The status of every answer to a deletion. With 0 they are done."""
    page: int = 1000
    """Maximum number of entries in one answer to a listing."""
    refuse_matches: bool = False
    """If-Match never holds, as on Ceph 16 with versioning."""
    bare_e_tags: bool = False
    """If-Match holds for e-tags without quotes only, as in Ceph."""
    ignore_ranges: bool = False
    """Requests for a part get the whole object."""
    cut_bodies: int = 0
    """Number of parts of objects of which half is sent before the connection is closed."""
    pause_bodies: float = 0.0
    """Seconds between the two halves of a body."""
    trickle: float = 0.0
    """Seconds before each byte of the second half of a body."""
    hang_up: bool = False
    """Connections are closed after each answer without notice."""
    parting_words: bytes = b""
    """Bytes that are sent after each answer, unasked, before the connection is closed."""
    other_ranges: bool = False
    """Ranges of the right length, from the object's begin."""
    keep_folders: bool = False
    """Folders are listed also when all their objects are deleted, as SeaweedFS does."""
    unordered: bool = False
    """Listings are not in the order of the keys, as in directory buckets of S3."""
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
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    views: list[memoryview] = field(default_factory=list)
    is_object: bool = False
    sent: float | None = None
    """The share that is sent before the connection is closed. None if all is sent."""
    reset: bool = False
    """Whether the connection is then reset instead."""

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)

    def head(self, length: int | None = None) -> bytes:
        """Return the status line and the headers."""
        headers = {**self.headers, "Server": "harness", "x-amz-request-id": "0"}
        headers["Content-Length"] = str(self.nbytes if length is None else length)
        try:
            reason = HTTPStatus(self.status).phrase
        except ValueError:
            reason = "Unknown"
        lines = [f"HTTP/1.1 {self.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def xml(text: str, status: int = 200) -> Answer:
    data = b'<?xml version="1.0" encoding="UTF-8"?>\n' + text.encode()
    return Answer(status, {"Content-Type": "application/xml"}, [memoryview(data)])


class S3Server:
    """The server in this process. As a context manager it listens on a free port, in threads."""

    def __init__(self, faults: Faults | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.faults, self.tls = faults or Faults(), tls
        self.requests: list[Request] = []
        self.connections = 0
        """Number of connections that were opened."""
        self.store, self.log = Objects(), Log()
        self._random, self._lock = random.Random(0), threading.Lock()

    @property
    def objects(self) -> dict[str, Stored]:
        """All objects by bucket and key."""
        return self.store.objects

    def put_object(self, path: str, data: bytes) -> Stored:
        """Store an object."""
        return self.store.put(path, (memoryview(data),))

    def __enter__(self) -> S3Server:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        threading.Thread(target=self.serve, args=(self._listener,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def endpoint(self) -> str:
        """The url of the server."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"

    def bucket(self) -> S3Place:
        """Return a place in a new bucket."""
        return S3Place(self.endpoint, f"stub-{uuid.uuid4().hex}")

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    # -- connections

    def _connection(self, connection: socket.socket) -> None:
        self.log.connection(+1)
        open_end: Any = connection
        try:
            with self._lock:
                self.connections += 1
                reset = self.faults.resets > 0
                self.faults.resets -= reset
            if reset:
                return
            wire = Wire(connection, self.faults.bandwidth, self.tls)
            open_end = wire.socket
            while (head := wire.head()) is not None and self._request(wire, Request(*head)):
                pass
        except OSError:
            pass  # the client is gone
        finally:
            self.log.connection(-1)
            open_end.close()

    def _request(self, wire: Wire, request: Request) -> bool:
        """Read, carry out and answer a request. Return False if the connection ends."""
        if request.path.startswith("-/"):
            return self._own(wire, request)
        began, status, sent, body = self.log.begin(), 0, 0, memoryview(b"")
        if request.headers.get("expect", "").lower() == "100-continue":
            wire.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            body = wire.body(request.headers)
            self.requests.append(request)
            if self.faults.latency:
                time.sleep(self.faults.latency)
            answer = self.answer(request, body)
            status, sent = answer.status, 0 if request.method == "HEAD" else answer.nbytes
            return self._send(wire, request, answer) and request.headers.get("connection", "").lower() != "close"
        finally:
            entry = Entry(began, time.monotonic(), request.kind, request.path, body.nbytes, sent, status)
            self.log.end(entry)

    def answer(self, request: Request, body: memoryview) -> Answer:
        """Return the answer to a request, which is an error for some of its faults."""
        faults = self.faults
        if faults.redirect_to:
            return Answer(302, {"Location": f"{faults.redirect_to}{request.target}"})
        if faults.refusal:
            return Answer(faults.refusal_status, {}, [memoryview(faults.refusal.encode())])
        time.sleep(faults.delay(request))
        if request.kind in faults.dropped:
            return Answer(sent=0.0)
        try:
            self.check(request)
            strike = self._strike(request.kind)
            answer = self.carry_out(request, body)
            answer.sent = strike.sent if strike is not None else None
            with self._lock:
                if request.kind in ("put", "copy") and faults.lose_answers > 0:
                    faults.lose_answers -= 1
                    answer.sent = 0.0
            return answer
        except Failed as failed:
            return xml(f"<Error><Code>{failed.code}</Code><Message>{failed.code}</Message></Error>", failed.status)

    def check(self, request: Request) -> None:
        """Raise Failed if a request is refused."""
        faults = self.faults
        if faults.refuse_deletes and request.kind in ("delete", "abort", "bulk"):
            raise Failed(faults.refuse_deletes, "Refused")
        signer = request.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
        if not faults.accepts_key(signer, request):
            raise Failed(400, "ExpiredToken")
        with self._lock:
            slow = faults.server_errors > 0
            faults.server_errors -= slow
        if slow or (faults.throttle and self._random.random() < faults.throttle):
            raise Failed(503, "SlowDown")
        if request.kind in faults.refused:
            raise Failed(*faults.refused[request.kind])

    def _strike(self, kind: str) -> Strike | None:
        """Return the strike if it hits this request. Raise Failed if it is refused."""
        with self._lock:
            strike = self.faults.strike
            if strike is None or strike.kind != kind:
                return None
            if strike.spared:
                strike.spared -= 1
                return None
            self.faults.strike = None
        if strike.status:
            raise Failed(strike.status, strike.code)
        return strike

    def _send(self, wire: Wire, request: Request, answer: Answer) -> bool:
        """Send an answer. Return False if the connection ends."""
        faults, head = self.faults, request.method == "HEAD"
        if faults.reset_share and self._random.random() < faults.reset_share:
            answer.sent, answer.reset = 0.5, True
        if answer.sent is not None:
            data = answer.head() + b"".join([] if head else answer.views)
            wire.socket.sendall(data[: int(len(data) * answer.sent)])
            if answer.reset:
                wire.reset()
            return False
        if answer.is_object and faults.announced is not None:
            wire.send(answer.head(faults.announced))
            return False
        if answer.is_object and faults.endless:
            answer.headers["Transfer-Encoding"] = "chunked"
            wire.send(answer.head())
            for _ in range(2**14):
                wire.socket.sendall(b"10000\r\n%b\r\n" % bytes(2**16))
            return False
        views = [] if head else answer.views
        with self._lock:
            cut = answer.status == 206 and not head and faults.cut_bodies > 0
            faults.cut_bodies -= cut
        if views and (cut or faults.pause_bodies or faults.trickle):
            body = b"".join(views)
            half = len(body) // 2
            wire.send(answer.head(), [memoryview(body)[:half]])
            if cut:
                return False
            time.sleep(faults.pause_bodies)
            for byte in body[half:] if faults.trickle else [body[half:]]:
                time.sleep(faults.trickle)
                wire.socket.sendall(bytes([byte]) if isinstance(byte, int) else byte)
        else:
            wire.send(answer.head(), views)
        if faults.parting_words:
            wire.socket.sendall(faults.parting_words)
        return not (faults.hang_up or faults.parting_words)

    def _own(self, wire: Wire, request: Request) -> bool:
        data: dict[str, Any] = {}
        match request.path:
            case "-/stats":
                data = self.log.stats()
            case "-/reset":
                self.log.reset()
                self.requests.clear()
            case "-/clear":
                folder = f"{request.query['bucket']}/{request.query.get('prefix', '')}"
                for path, _ in self.store.below(folder):
                    self.store.delete(path)
        answer = Answer(views=[memoryview(json.dumps(data).encode())])
        wire.send(answer.head(), answer.views)
        return True

    # -- operations

    def carry_out(self, request: Request, body: memoryview) -> Answer:
        """Carry out a request, and return its answer. Raise Failed if it cannot be done."""
        match request.method:
            case "GET" | "HEAD":
                is_bucket = "/" not in request.path.rstrip("/")
                if request.kind == "list" or (request.method == "GET" and is_bucket):
                    return self._list(request)
                return self.get(request)
            case "PUT":
                return self._put(request, body)
            case "POST":
                return self._post(request, body)
            case "DELETE":
                if request.kind == "abort":
                    self.store.abort(request.query["uploadId"])
                else:
                    self.store.delete(request.path)
                return Answer(204)
        raise Failed(501, "NotImplemented")

    def get(self, request: Request) -> Answer:
        """Return an object or a part of it."""
        stored, faults = self.store.get(request.path), self.faults
        if (match := request.headers.get("if-match")) and match != stored.e_tag:
            raise Failed(412, "PreconditionFailed")
        headers = {**_headers(stored), "Content-Type": "binary/octet-stream", "Accept-Ranges": "bytes"}
        begin, end, status = 0, stored.size, 200
        if "partNumber" in request.query:
            number = int(request.query["partNumber"]) - 1
            begin = sum(part.nbytes for part in stored.parts[:number])
            end, status = begin + stored.parts[number].nbytes, 206
            headers["x-amz-mp-parts-count"] = str(len(stored.parts))
        elif (asked := request.headers.get("range")) and not faults.ignore_ranges:
            (begin, end), status = _span(asked, stored.size), 206
            if faults.other_ranges:
                begin, end = 0, end - begin
            end = min(end, begin + (faults.most_of_a_range or stored.size))
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{stored.size}"
        return Answer(status, headers, stored.views(begin, end), is_object=True)

    def _conditions(self, request: Request) -> dict[str, Any]:
        headers, faults = request.headers, self.faults
        names = ("if-none-match", "if-match", "x-goog-if-generation-match")
        if not any(name in headers for name in names) or faults.ignore_conditions:
            return {}
        if faults.no_conditions:
            raise Failed(501, "NotImplemented")
        if faults.refuse_matches and "if-match" in headers:
            raise Failed(412, "PreconditionFailed")
        match, generation = headers.get("if-match"), headers.get(names[2])
        if match is not None and faults.bare_e_tags:
            match = f'"{match}"'
        return {
            "create_only": names[0] in headers or generation == "0",
            "match": match,
            "generation": int(generation) if generation is not None and generation != "0" else None,
        }

    def _put(self, request: Request, body: memoryview) -> Answer:
        query = request.query
        if "/" not in request.path.rstrip("/"):
            return Answer(headers={"Location": f"/{request.path}"})
        if request.kind == "part":
            part = self.store.put_part(query["uploadId"], int(query["partNumber"]), body)
            return Answer(headers={"ETag": part.e_tag})
        if request.kind == "copy":
            return self._copy(request)
        stored = self.store.put(request.path, (body,), **self._conditions(request))
        return Answer(headers=_headers(stored))

    def _copy(self, request: Request) -> Answer:
        source = self.store.get(request.copy_source)
        with self._lock:
            fails = self.faults.failed_copies > 0
            self.faults.failed_copies -= fails
        if fails:
            return xml("<Error><Code>InternalError</Code><Message>InternalError</Message></Error>")
        views = source.views(0, source.size // 2 if self.faults.cut_copies else source.size)
        if "partNumber" in request.query:
            body = memoryview(b"".join(views))
            part = self.store.put_part(request.query["uploadId"], int(request.query["partNumber"]), body)
            return xml(f"<CopyPartResult><ETag>{part.e_tag}</ETag></CopyPartResult>")
        copied = self.store.put(request.path, tuple(views), **self._conditions(request))
        time_stored = f"<LastModified>{_iso(copied)}</LastModified>"
        return xml(f"<CopyObjectResult><ETag>{copied.e_tag}</ETag>{time_stored}</CopyObjectResult>")

    def _post(self, request: Request, body: memoryview) -> Answer:
        bucket, _, key = request.path.partition("/")
        names = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        match request.kind:
            case "bulk":
                keys = [item.text or "" for item in ET.fromstring(bytes(body)).iter() if item.tag.endswith("Key")]
                for key in keys:
                    self.store.delete(f"{request.path.rstrip('/')}/{key}")
                gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
                return xml(f"<DeleteResult>{gone}</DeleteResult>")
            case "begin":
                text = f"{names}<UploadId>{self.store.begin_upload()}</UploadId>"
                return xml(f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>")
        if "uploadId" not in request.query:
            raise Failed(501, "NotImplemented")
        elements = ET.fromstring(bytes(body)).iter()
        numbers = [int(item.text or 0) for item in elements if item.tag.endswith("PartNumber")]
        upload = request.query["uploadId"]
        stored = self.store.complete(request.path, upload, numbers, **self._conditions(request))
        text = f"<Location>/{bucket}</Location>{names}<ETag>{escape(stored.e_tag)}</ETag>"
        return xml(f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>")

    def _list(self, request: Request) -> Answer:
        query, folder, faults = request.query, request.path.rstrip("/") + "/", self.faults
        if faults.listing is not None:
            return Answer(headers={"Content-Type": "application/xml"}, views=[memoryview(faults.listing)])
        if folder == "/" and "list-type" not in query:
            items = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in self.store.buckets())
            return xml(f"<ListAllMyBucketsResult><Buckets>{items}</Buckets></ListAllMyBucketsResult>")
        if "location" in query:
            return xml('<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"></LocationConstraint>')
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found: list[tuple[str, Stored | None]] = [*self.store.below(folder + prefix)]
        if faults.keep_folders and delimiter:
            found += [(path, None) for path in self.store.folders if path.startswith(folder + prefix)]
            found = sorted((path, stored) for path, stored in found if path != folder + prefix)
        names: dict[str, Stored | None] = {}
        for path, stored in found:
            key = path.removeprefix(folder)
            rest = key[len(prefix) :]
            name = prefix + rest[: rest.index(delimiter) + 1] if delimiter and delimiter in rest else key
            names.setdefault(name, stored if name == key else None)
        token, start = query.get("continuation-token", ""), query.get("start-after") or query.get("marker", "")
        place = _shuffled if faults.unordered else str
        left = [name for name in names if name > start and (not token or place(name) > place(token))]
        most = min(int(query.get("max-keys", 1000)), faults.page)
        page, cut = sorted(left, key=place)[:most], len(left) > most
        rows = [_row(name, names[name]) for name in page]
        facts = f"<Name>{folder[:-1]}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
        facts += f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(cut).lower()}</IsTruncated>"
        if cut:
            mark = escape(page[-1])
            facts += f"<NextContinuationToken>{mark}</NextContinuationToken><NextMarker>{mark}</NextMarker>"
        space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return xml(f"<ListBucketResult {space}>{facts}{''.join(rows)}</ListBucketResult>")


def _headers(stored: Stored) -> dict[str, str]:
    e_tag = {"ETag": stored.e_tag} if stored.e_tag else {}
    return {
        **e_tag,
        "Last-Modified": formatdate(stored.time, usegmt=True),
        "x-goog-generation": str(stored.generation),
    }


def _span(asked: str, size: int) -> tuple[int, int]:
    """Return the half-open range of a Range header."""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    begin = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if begin >= end:
        raise Failed(416, "InvalidRange")
    return begin, end


def _iso(stored: Stored) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.time))


def _shuffled(name: str) -> str:
    """Return a key by which names are in an arbitrary order."""
    return hashlib.sha256(name.encode()).hexdigest()


def _row(name: str, stored: Stored | None) -> str:
    """Return the row of an object in a listing, or of a prefix that several share."""
    if stored is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    facts = f"<Key>{escape(name)}</Key><LastModified>{_iso(stored)}</LastModified><ETag>{escape(stored.e_tag)}</ETag>"
    return f"<Contents>{facts}<Size>{stored.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"


# -- in a separate process


@dataclass(frozen=True)
class Served:
    """A server in another process. ``authority`` is the file of its certificate authority if it uses TLS."""

    endpoint: str
    authority: str | None = None

    def _ask(self, path: str) -> dict[str, Any]:
        context = ssl.create_default_context(cafile=self.authority) if self.authority else None
        with urllib.request.urlopen(f"{self.endpoint}/-/{path}", timeout=60, context=context) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def stats(self) -> dict[str, Any]:
        """Return the requests by kind, body bytes in and out, the maxima of connections and requests at a time, and
        the round trips in a row.
        """
        return self._ask("stats")

    def reset(self) -> None:
        """Start the counts again."""
        self._ask("reset")

    def clear(self, bucket: str, prefix: str = "") -> None:
        """Delete the objects of a bucket below a prefix."""
        self._ask(f"clear?bucket={bucket}&prefix={prefix}")

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which AWS clients find the server, and trust it."""
        trust = dict.fromkeys(("AWS_CA_BUNDLE", "TENSORSTORE_CA_BUNDLE"), self.authority) if self.authority else {}
        return {
            **trust,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "benchsecret",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """The package's options for the server."""
        return {"key": "bench", "secret": "benchsecret", "endpoint_url": self.endpoint, "region": REGION}


@contextlib.contextmanager
def served(*, tls: bool = False, **faults: float) -> Iterator[Served]:
    """Run a server in another process, on a free port."""
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness.s3_server", json.dumps(faults), *(["--tls", folder] if tls else [])]
        root = Path(__file__).resolve().parents[1]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root)
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            if not endpoint:
                raise RuntimeError(f"the server did not start; it exited with {process.wait()}")
            yield Served(endpoint, f"{folder}/{AUTHORITY}" if tls else None)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve until the standard input ends. Print the endpoint.")
    parser.add_argument("faults", help="fields of Faults, as JSON")
    parser.add_argument("--tls", type=Path, metavar="FOLDER", help="use TLS, and put the certificate there")
    args = parser.parse_args()
    if args.tls:
        make_certificate(args.tls)
    with S3Server(Faults(**json.loads(args.faults)), server_context(args.tls) if args.tls else None) as server:
        print(server.endpoint, flush=True)
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
