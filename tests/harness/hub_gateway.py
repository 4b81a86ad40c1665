"""A server that behaves like the S3 gateway of Hugging Face's Storage Buckets, as far as it is documented.

The documentation (https://huggingface.co/docs/hub/storage-buckets-s3) has these rules. The endpoint ends with a
namespace. A GetObject is answered by a redirect to another server, unless the client is one of AWS's. Conditions hold
for PutObject only. Bodies in ``aws-chunked`` framing, copies of parts, ListObjectsV1, and some keys are refused.
Metadata and tags are dropped. The documentation does not describe the e-tags of the other server, so they can be chosen
here. Copies of objects are left out, because the package makes none.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from harness.s3_stub import Handler, S3Stub
from harness.store_servers import REGION, S3Place

NAMESPACE = "some-org"
EDGE_HOST = "localhost"
"""A host that differs from the gateway's, 127.0.0.1, for every client."""
_KEYS = Credentials("HFAKTEST", "not-so-secret")
_PROXIED = ("aws-cli", "botocore", "aws-sdk-rust")
_NO_KEY = re.compile(r"^/|/$|//|\.\./|^\./|\.\.$|[\\\0]")


@dataclass
class HubGateway(S3Stub):
    """The gateway, with the edge server to which it redirects readers."""

    edge_e_tags: str = "other"
    """The e-tags of objects read at the edge: "other" than the gateway's, "same", or "none"."""
    edge: S3Stub = field(default_factory=lambda: _Edge())

    @property
    def handler(self) -> type[Handler]:
        return _GatewayHandler

    def __enter__(self) -> HubGateway:
        self.edge.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.edge.__exit__(*error)

    def bucket(self) -> S3Place:
        name = f"hub-{uuid.uuid4().hex}"
        return HubPlace(f"{self.endpoint}/{NAMESPACE}", name, _KEYS.access_key, _KEYS.secret_key)


class HubPlace(S3Place):
    """A bucket whose objects come from another host."""

    @property
    def storage_options(self) -> dict[str, Any]:
        return {**super().storage_options, "redirect_hosts": [EDGE_HOST]}

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "ZARRCKPT_REDIRECT_HOSTS": EDGE_HOST}


class _Edge(S3Stub):
    signature = uuid.uuid4().hex

    @property
    def endpoint(self) -> str:
        return super().endpoint.replace("127.0.0.1", EDGE_HOST)

    @property
    def handler(self) -> type[Handler]:
        return _EdgeHandler


class _GatewayHandler(Handler):
    server_stub: HubGateway

    def _serve(self, work: object) -> None:
        if refused := self._refusal():
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, code = refused
            return self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())
        super()._serve(work)

    def _refusal(self) -> tuple[int, str] | None:
        target, headers = urlsplit(self.path), self.headers
        namespace, _, key = unquote(target.path).lstrip("/").partition("/")
        key = key.partition("/")[2]
        if namespace != NAMESPACE:
            return 404, "NoSuchBucket"
        if not self._is_signed():
            return 403, "SignatureDoesNotMatch"
        if "aws-chunked" in headers.get("Content-Encoding", "") or "STREAMING" in headers["x-amz-content-sha256"]:
            return 501, "NotImplemented"
        if "x-amz-copy-source" in headers or (not key and self.command == "GET" and "list-type=2" not in target.query):
            return 501, "NotImplemented"
        if re.search("delimiter=(?!%2F|&|$)", target.query):
            return 400, "InvalidArgument"
        return (400, "InvalidArgument") if key and _NO_KEY.search(key) else None

    def _is_signed(self) -> bool:
        said = re.search("SignedHeaders=([^,]+), *Signature=(.+)", self.headers.get("Authorization", ""))
        if said is None:
            return False
        signed = {name: self.headers[name] for name in said[1].split(";")}
        target = urlsplit(self.path)
        # The signature is of "%20", but clients send "+".
        parameters = dict(parse_qsl(target.query, keep_blank_values=True))
        request = AWSRequest(self.command, f"http://{self.headers['Host']}{target.path}", signed, params=parameters)
        request.context["timestamp"] = self.headers["x-amz-date"]
        signer = S3SigV4Auth(_KEYS, "s3", REGION)
        text = signer.string_to_sign(request, signer.canonical_request(request))
        return bool(signer.signature(text, request) == said[2])

    def _get(self) -> None:
        found = self.server_stub.objects.get(self._key)
        agent = self.headers.get("User-Agent", "").lower()
        if self.command == "HEAD" or found is None or any(name in agent for name in _PROXIED):
            return super()._get()
        edge, name = self.server_stub.edge, hashlib.sha256(found.data).hexdigest()
        e_tag = {"other": f'"{name}"', "same": found.e_tag, "none": ""}[self.server_stub.edge_e_tags]
        with edge.lock:
            edge.store(name, found.data, {}).e_tag = e_tag
        query = f"X-Amz-Expires=60&X-Amz-Signature={edge.signature}"
        self._answer(302, headers={"Location": f"{edge.endpoint}/{name}?{query}"})


class _EdgeHandler(Handler):
    server_stub: _Edge

    def _get(self) -> None:
        if "Authorization" in self.headers:
            return self._answer(400, b"<Error><Code>InvalidArgument</Code></Error>")
        if self._query.get("X-Amz-Signature") != [self.server_stub.signature]:
            return self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        super()._get()
