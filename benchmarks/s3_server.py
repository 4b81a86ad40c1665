"""A small S3 server in memory for the benchmarks, on the loopback interface, as a process of its own.

    python -m benchmarks.s3_server --port 9000 --latency 0.025 --bandwidth 90e6 --throttle 0.2 --tls FOLDER

A thread a connection, bodies received straight into the object's memory and sent from it. Any credentials will do, any
bucket exists, checksums and signatures are not looked at. It knows: get (ranges, If-Match), head, put (aws-chunked,
If-None-Match: *, If-Match, copy), multipart uploads, delete, bulk delete, ListObjectsV2 and V1, ListBuckets,
HeadBucket, GetBucketLocation. ``/-/stats`` gives counts as JSON, ``/-/reset`` starts them anew, ``/-/clear?bucket=``
empties a bucket. With ``--tls`` it makes a certificate for 127.0.0.1 in that folder, and takes TLS alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
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
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.s3_objects import Buckets, Entry, Failed, Log, Stored
from benchmarks.s3_wire import Wire

REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 400: "Bad Request", 404: "Not Found"}
REASONS |= {412: "Precondition Failed", 416: "Range Not Satisfiable", 501: "Not Implemented", 503: "Slow Down"}


@dataclass(frozen=True)
class Conditions:
    """How well the server works: seconds before each answer, bytes a second and connection, shares of faults."""

    latency: float = 0.0
    bandwidth: float = 0.0
    throttle: float = 0.0
    resets: float = 0.0


@dataclass(frozen=True)
class Request:
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: memoryview

    @property
    def operation(self) -> str:
        """What the log calls it: the method, or LIST, UPLOAD (multipart's begin and end), BULK DELETE."""
        if self.method == "GET" and not self.key:
            return "LIST"
        if self.method == "POST":
            return "BULK DELETE" if "delete" in self.query else "UPLOAD"
        return self.method


@dataclass
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    views: list[memoryview] = field(default_factory=list)
    length: int | None = None

    def head(self) -> bytes:
        length = sum(view.nbytes for view in self.views) if self.length is None else self.length
        lines = [f"HTTP/1.1 {self.status} {REASONS[self.status]}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join([*lines, "Server: benchmarks", "x-amz-request-id: 0", "", ""])).encode("latin-1")


def xml(text: str, status: int = 200) -> Answer:
    data = b'<?xml version="1.0" encoding="UTF-8"?>\n' + text.encode()
    return Answer(status, {"Content-Type": "application/xml"}, [memoryview(data)])


# -- operations


def get(buckets: Buckets, request: Request) -> Answer:
    stored = buckets.get(request.bucket, request.key)
    if (match := request.headers.get("if-match")) and match != stored.etag:
        raise Failed(412, "PreconditionFailed")
    headers = {"ETag": stored.etag, "Last-Modified": formatdate(stored.time, usegmt=True), "Accept-Ranges": "bytes"}
    headers["Content-Type"] = "binary/octet-stream"
    begin, end, status = 0, stored.size, 200
    if "partNumber" in request.query:
        number = int(request.query["partNumber"]) - 1
        begin = sum(part.nbytes for part in stored.parts[:number])
        end, status = begin + stored.parts[number].nbytes, 206
        headers["x-amz-mp-parts-count"] = str(len(stored.parts))
    elif given := request.headers.get("range"):
        begin, end = span(given, stored.size)
        status = 206
    if status == 206:
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{stored.size}"
    views = [] if request.method == "HEAD" else stored.views(begin, end)
    return Answer(status, headers, views, end - begin)


def span(given: str, size: int) -> tuple[int, int]:
    """The half-open range that a Range header means."""
    first, _, last = given.removeprefix("bytes=").partition("-")
    begin = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if begin >= end:
        raise Failed(416, "InvalidRange")
    return begin, end


def conditions_of(request: Request) -> dict[str, Any]:
    return {"create_only": "if-none-match" in request.headers, "match": request.headers.get("if-match")}


def put(buckets: Buckets, request: Request) -> Answer:
    if not request.key:
        return Answer(headers={"Location": f"/{request.bucket}"})
    if "uploadId" in request.query:
        part = buckets.put_part(request.query["uploadId"], int(request.query["partNumber"]), request.body)
        return Answer(headers={"ETag": part.etag})
    if source := request.headers.get("x-amz-copy-source"):
        bucket, _, key = unquote(source).lstrip("/").partition("/")
        stored = buckets.put(request.bucket, request.key, buckets.get(bucket, key).parts)
        return xml(
            f"<CopyObjectResult><ETag>{stored.etag}</ETag><LastModified>{iso(stored)}</LastModified></CopyObjectResult>"
        )
    stored = buckets.put(request.bucket, request.key, (request.body,), **conditions_of(request))
    return Answer(headers={"ETag": stored.etag})


def post(buckets: Buckets, request: Request) -> Answer:
    names = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
    if "delete" in request.query:
        keys = [item.text or "" for item in ET.fromstring(bytes(request.body)).iter() if item.tag.endswith("Key")]
        for key in keys:
            buckets.delete(request.bucket, key)
        gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return xml(f"<DeleteResult>{gone}</DeleteResult>")
    if "uploads" in request.query:
        text = f"{names}<UploadId>{buckets.begin_upload()}</UploadId>"
        return xml(f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>")
    if "uploadId" in request.query:
        elements = ET.fromstring(bytes(request.body)).iter()
        numbers = [int(item.text or 0) for item in elements if item.tag.endswith("PartNumber")]
        upload, conditions = request.query["uploadId"], conditions_of(request)
        stored = buckets.complete(request.bucket, request.key, upload, numbers, **conditions)
        text = f"<Location>/{request.bucket}</Location>{names}<ETag>{escape(stored.etag)}</ETag>"
        return xml(f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>")
    raise Failed(501, "NotImplemented")


def delete(buckets: Buckets, request: Request) -> Answer:
    if "uploadId" in request.query:
        buckets.abort(request.query["uploadId"])
    elif request.key:
        buckets.delete(request.bucket, request.key)
    return Answer(204)


def iso(stored: Stored) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.time))


def list_objects(buckets: Buckets, request: Request) -> Answer:
    if not request.bucket:
        items = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in buckets.names())
        return xml(f"<ListAllMyBucketsResult><Buckets>{items}</Buckets></ListAllMyBucketsResult>")
    if "location" in request.query:
        return xml('<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"></LocationConstraint>')
    query = request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after") or query.get("marker", "")
    most, last, cut = int(query.get("max-keys", 1000)), "", False
    rows: list[str] = []
    for key, stored in buckets.keys(request.bucket, prefix):
        rest = key[len(prefix) :]
        name = prefix + rest[: rest.index(delimiter) + 1] if delimiter and delimiter in rest else key
        if name <= after or name == last:
            continue
        if cut := len(rows) >= most:
            break
        last = name
        rows.append(listed(name, stored if name == key else None))
    facts = f"<Name>{request.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
    facts += f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(cut).lower()}</IsTruncated>"
    if cut:
        facts += f"<NextContinuationToken>{escape(last)}</NextContinuationToken><NextMarker>{escape(last)}</NextMarker>"
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return xml(f"<ListBucketResult {space}>{facts}{''.join(rows)}</ListBucketResult>")


def listed(name: str, stored: Stored | None) -> str:
    """An object in a listing; where there is none, a prefix that several share."""
    if stored is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    facts = f"<Key>{escape(name)}</Key><LastModified>{iso(stored)}</LastModified><ETag>{escape(stored.etag)}</ETag>"
    return f"<Contents>{facts}<Size>{stored.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"


OPERATIONS: dict[str, Callable[[Buckets, Request], Answer]] = {
    "GET": get,
    "HEAD": get,
    "PUT": put,
    "POST": post,
    "DELETE": delete,
}


# -- connections


class Server:
    """Accepts connections until the process ends."""

    def __init__(self, conditions: Conditions, context: ssl.SSLContext | None = None, seed: int = 0) -> None:
        self.conditions, self.buckets, self.log = conditions, Buckets(), Log()
        self._context = context
        self._random = random.Random(seed)

    def serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        self.log.connection(+1)
        open_end: Any = connection
        try:
            wire = Wire(connection, self.conditions.bandwidth, self._context)
            open_end = wire.socket
            while (head := wire.head()) is not None and self._request(wire, *head):
                pass
        except OSError:
            pass  # the client is gone
        finally:
            self.log.connection(-1)
            open_end.close()

    def _request(self, wire: Wire, method: str, target: str, headers: dict[str, str]) -> bool:
        """Read, carry out, answer; False where the connection ends."""
        url = urlsplit(target)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if bucket == "-":
            self._own(wire, key, dict(parse_qsl(url.query)))
            return True
        began = self.log.begin()
        if headers.get("expect", "").lower() == "100-continue":
            wire.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        status = sent = 0
        body = memoryview(b"")
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        operation = Request(method, bucket, key, query, headers, body).operation
        try:
            body = wire.body(headers)
            if self.conditions.latency:
                time.sleep(self.conditions.latency)
            faulty = self._random.random()
            answer = self._answer(Request(method, bucket, key, query, headers, body), faulty)
            status = answer.status
            cut = faulty > 1 - self.conditions.resets
            half = sum(view.nbytes for view in answer.views) // 2
            sent = wire.send(answer.head(), answer.views, half if cut else None)
            if cut:
                wire.reset()
            return not cut and headers.get("connection", "").lower() != "close"
        finally:
            name = f"{bucket}/{key}"
            self.log.end(Entry(began, time.monotonic(), operation, name, body.nbytes, sent, status))

    def _answer(self, request: Request, faulty: float) -> Answer:
        try:
            if faulty < self.conditions.throttle:
                raise Failed(503, "SlowDown")
            if request.operation == "LIST":
                return list_objects(self.buckets, request)
            if request.method == "HEAD" and not request.key:
                return Answer(headers={"x-amz-bucket-region": "us-east-1"})
            return OPERATIONS[request.method](self.buckets, request)
        except Failed as failed:
            if request.method == "HEAD":
                return Answer(failed.status)
            text = f"<Error><Code>{failed.code}</Code><Message>{failed.code}</Message></Error>"
            return xml(text, failed.status)

    def _own(self, wire: Wire, what: str, query: dict[str, str]) -> None:
        data: dict[str, Any] = {}
        if what == "stats":
            data = self.log.stats()
        elif what == "reset":
            self.log.reset()
        elif what == "clear":
            for key, _ in self.buckets.keys(query["bucket"], query.get("prefix", "")):
                self.buckets.delete(query["bucket"], key)
        answer = Answer(views=[memoryview(json.dumps(data).encode())])
        wire.send(answer.head(), answer.views)


AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"


def make_certificate(folder: Path) -> None:
    """A certificate for 127.0.0.1 and its key, and the authority that it is of."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in ("benchmarks", "127.0.0.1")]
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().issuer_name(names[0]).not_valid_before(now - day).not_valid_after(now + day)
    own = builder.subject_name(names[0]).public_key(authority.public_key()).serial_number(1)
    own = own.add_extension(x509.BasicConstraints(True, None), True)
    server = builder.subject_name(names[1]).public_key(key.public_key()).serial_number(2)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    server = server.add_extension(address, False).add_extension(x509.BasicConstraints(False, None), True)
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / AUTHORITY).write_bytes(own.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / CERTIFICATE).write_bytes(server.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / KEY).write_bytes(key.private_bytes(pem, *plain))


# -- from another process


@dataclass(frozen=True)
class Served:
    """A server that runs: its endpoint, the file of its authority where it takes TLS, and its own questions."""

    endpoint: str
    authority: str | None = None

    def _ask(self, path: str) -> dict[str, Any]:
        context = ssl.create_default_context(cafile=self.authority) if self.authority else None
        with urllib.request.urlopen(f"{self.endpoint}/-/{path}", timeout=60, context=context) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def stats(self) -> dict[str, Any]:
        """Requests by kind, body bytes in and out, the most connections and requests at once, round trips in line."""
        return self._ask("stats")

    def reset(self) -> None:
        """Start the counts anew."""
        self._ask("reset")

    def clear(self, bucket: str, prefix: str = "") -> None:
        """Throw away the objects of a bucket below a prefix."""
        self._ask(f"clear?bucket={bucket}&prefix={prefix}")

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which AWS clients find it, and trust it."""
        trust = dict.fromkeys(("AWS_CA_BUNDLE", "TENSORSTORE_CA_BUNDLE"), self.authority) if self.authority else {}
        return {
            **trust,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "benchsecret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """zarrckpt's options for it."""
        return {"key": "bench", "secret": "benchsecret", "endpoint_url": self.endpoint, "region": "us-east-1"}


@contextlib.contextmanager
def served(
    latency: float = 0, bandwidth: float = 0, throttle: float = 0, resets: float = 0, tls: bool = False
) -> Iterator[Served]:
    """Run a server as a process of its own, on a free port."""
    command = [sys.executable, "-m", "benchmarks.s3_server", "--port", "0"]
    command += [f"--latency={latency}", f"--bandwidth={bandwidth}", f"--throttle={throttle}", f"--resets={resets}"]
    root = Path(__file__).resolve().parent.parent
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        command += ["--attached", *(["--tls", folder] if tls else [])]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0 is any free one (default); the endpoint is printed")
    parser.add_argument("--latency", type=float, default=0, help="seconds before each answer")
    parser.add_argument("--bandwidth", type=float, default=0, help="bytes a second, of each connection")
    parser.add_argument("--throttle", type=float, default=0, help="share of requests answered by 503 SlowDown")
    parser.add_argument("--resets", type=float, default=0, help="share of answers cut short by a reset")
    parser.add_argument("--tls", type=Path, metavar="FOLDER", help="take TLS, and put the certificate there")
    parser.add_argument("--attached", action="store_true", help="end with whoever holds the other end of stdin")
    args = parser.parse_args()
    if args.attached:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    listener = socket.create_server(("127.0.0.1", args.port), backlog=1024)
    context = None
    if args.tls:
        make_certificate(args.tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.tls / CERTIFICATE, args.tls / KEY)
    print(f"http{'s' if context else ''}://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    Server(Conditions(args.latency, args.bandwidth, args.throttle, args.resets), context).serve(listener)


if __name__ == "__main__":
    main()
