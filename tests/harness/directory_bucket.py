"""A server that behaves like a directory bucket of S3 Express One Zone, as far as that is documented.

The rules are those of https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html: a zonal host
for each bucket, sessions, prefixes that end in "/", listings without an order, no ``start-after``, no tags and no other
storage class. Signatures are not checked. Clients reach the server through a proxy, which is the server itself.
"""

from __future__ import annotations

import ssl
from typing import Any

from harness.s3_objects import Failed
from harness.s3_server import Answer, Request, S3Server, xml
from harness.s3_wire import Encrypted, Wire

BUCKET = "some-bucket--usw2-az1--x-s3"
HOST = f"{BUCKET}.s3express-usw2-az1.us-west-2.amazonaws.com"
_SESSION = "a-session-token"


class DirectoryBucket(S3Server):
    """The server of one bucket. Requests to other hosts are refused."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._context = context
        self.faults.unordered = self.faults.keep_folders = True

    @property
    def storage_options(self) -> dict[str, Any]:
        """The package's options for the bucket, without any that say that it is a directory bucket."""
        options = {"key": "k", "secret": "s", "region": "us-west-2"}
        return {**options, "proxy_url": self.endpoint, "allow_invalid_certificates": True}

    def _request(self, wire: Wire, request: Request) -> bool:
        if request.method == "CONNECT":
            assert not isinstance(wire.socket, Encrypted)
            wire.socket.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            wire.socket = Encrypted(wire.socket, self._context)
            return request.target == f"{HOST}:443"
        request.target = f"/{BUCKET}{request.target}"
        return super()._request(wire, request)

    def check(self, request: Request) -> None:
        super().check(request)
        headers, query = request.headers, request.query
        if headers["host"] != HOST:
            raise Failed(403, "AccessDenied")
        if "session" not in query and headers.get("x-amz-s3session-token") != _SESSION:
            raise Failed(403, "AccessDenied")
        if {"x-amz-tagging", "x-amz-acl"} & headers.keys():
            raise Failed(501, "NotImplemented")
        if headers.get("x-amz-storage-class", "EXPRESS_ONEZONE") != "EXPRESS_ONEZONE":
            raise Failed(400, "InvalidStorageClass")
        ends = {query.get("prefix", "")[-1:], query.get("delimiter", "")}
        if "start-after" in query or not ends <= {"", "/"}:
            raise Failed(400, "InvalidRequest")

    def carry_out(self, request: Request, body: memoryview) -> Answer:
        if "session" not in request.query:
            return super().carry_out(request, body)
        credentials = {"AccessKeyId": "k", "SecretAccessKey": "s", "Expiration": "2100-01-01T00:00:00Z"}
        items = "".join(f"<{name}>{text}</{name}>" for name, text in {**credentials, "SessionToken": _SESSION}.items())
        return xml(f"<CreateSessionResult><Credentials>{items}</Credentials></CreateSessionResult>")
