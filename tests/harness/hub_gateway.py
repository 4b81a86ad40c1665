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
from typing import Any
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from harness.s3_objects import Failed
from harness.s3_server import Answer, Request, S3Server
from harness.store_servers import REGION, S3Place

NAMESPACE = "some-org"
EDGE_HOST = "localhost"
"""A host that differs from the gateway's, 127.0.0.1, for every client."""
_KEYS = Credentials("HFAKTEST", "not-so-secret")
_PROXIED = ("aws-cli", "botocore", "aws-sdk-rust")
_NO_KEY = re.compile(r"^/|/$|//|\.\./|^\./|\.\.$|[\\\0]")


class HubGateway(S3Server):
    """The gateway, with the edge server to which it redirects readers."""

    def __init__(self) -> None:
        super().__init__()
        self.edge_e_tags = "other"
        """The e-tags of objects read at the edge: "other" than the gateway's, "same", or "none"."""
        self.edge = _Edge()

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

    def check(self, request: Request) -> None:
        super().check(request)
        headers, query = request.headers, urlsplit(request.target).query
        namespace, _, key = request.path.partition("/")
        key = key.partition("/")[2]
        if namespace != NAMESPACE:
            raise Failed(404, "NoSuchBucket")
        if not _is_signed(request):
            raise Failed(403, "SignatureDoesNotMatch")
        if "aws-chunked" in headers.get("content-encoding", "") or "STREAMING" in headers["x-amz-content-sha256"]:
            raise Failed(501, "NotImplemented")
        if "x-amz-copy-source" in headers or (not key and request.method == "GET" and "list-type=2" not in query):
            raise Failed(501, "NotImplemented")
        if re.search("delimiter=(?!%2F|&|$)", query) or (key and _NO_KEY.search(key)):
            raise Failed(400, "InvalidArgument")

    def get(self, request: Request) -> Answer:
        found = self.objects.get(request.path)
        agent = request.headers.get("user-agent", "").lower()
        if request.method == "HEAD" or found is None or any(name in agent for name in _PROXIED):
            return super().get(request)
        name = hashlib.sha256(found.data).hexdigest()
        e_tag = {"other": f'"{name}"', "same": found.e_tag, "none": ""}[self.edge_e_tags]
        self.edge.put_object(name, found.data).e_tag = e_tag
        query = f"X-Amz-Expires=60&X-Amz-Signature={self.edge.signature}"
        return Answer(302, {"Location": f"{self.edge.endpoint}/{name}?{query}"})


def _is_signed(request: Request) -> bool:
    said = re.search("SignedHeaders=([^,]+), *Signature=(.+)", request.headers.get("authorization", ""))
    if said is None:
        return False
    signed = {name: request.headers[name] for name in said[1].split(";")}
    url = f"http://{request.headers['host']}{urlsplit(request.target).path}"
    # The signature is of "%20", but clients send "+".
    made = AWSRequest(request.method, url, signed, params=request.query)
    made.context["timestamp"] = request.headers["x-amz-date"]
    signer = S3SigV4Auth(_KEYS, "s3", REGION)
    text = signer.string_to_sign(made, signer.canonical_request(made))
    return bool(signer.signature(text, made) == said[2])


class HubPlace(S3Place):
    """A bucket whose objects come from another host."""

    @property
    def storage_options(self) -> dict[str, Any]:
        return {**super().storage_options, "redirect_hosts": [EDGE_HOST]}

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "ZARRCKPT_REDIRECT_HOSTS": EDGE_HOST}


class _Edge(S3Server):
    signature = uuid.uuid4().hex

    @property
    def endpoint(self) -> str:
        return super().endpoint.replace("127.0.0.1", EDGE_HOST)

    def carry_out(self, request: Request, body: memoryview) -> Answer:
        if "authorization" in request.headers:
            raise Failed(400, "InvalidArgument")
        if request.query.get("X-Amz-Signature") != self.signature:
            raise Failed(403, "AccessDenied")
        return self.get(request)
