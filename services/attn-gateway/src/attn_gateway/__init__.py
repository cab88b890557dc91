"""The gRPC door: health, reflection, rich errors, tokens, TLS; services are plugins."""

from attn_gateway.call import Call, call_of
from attn_gateway.cluster import Cluster, ClusterSettings, ModelToLoad
from attn_gateway.gateway import Gateway, serving
from attn_gateway.paging import page_of
from attn_gateway.service import GrpcService
from attn_gateway.settings import GatewaySettings, TlsFiles, read_token
from attn_gateway.status import status_of

__all__ = [
    "Call",
    "Cluster",
    "ClusterSettings",
    "Gateway",
    "GatewaySettings",
    "GrpcService",
    "ModelToLoad",
    "TlsFiles",
    "call_of",
    "page_of",
    "read_token",
    "serving",
    "status_of",
]
