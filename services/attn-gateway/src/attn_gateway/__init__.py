"""The gRPC server: health, reflection, rich errors, tokens and TLS; its services are plugins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from attn_core.lazy import lazy_names

if TYPE_CHECKING:
    from attn_gateway.call import Call as Call
    from attn_gateway.call import Caller as Caller
    from attn_gateway.call import Metadata as Metadata
    from attn_gateway.calls import Calls as Calls
    from attn_gateway.calls import Handler as Handler
    from attn_gateway.calls import handlers_of as handlers_of
    from attn_gateway.cluster import Cluster as Cluster
    from attn_gateway.cluster import ClusterSettings as ClusterSettings
    from attn_gateway.cluster import ModelToLoad as ModelToLoad
    from attn_gateway.gateway import Gateway as Gateway
    from attn_gateway.gateway import probe as probe
    from attn_gateway.gateway import serving as serving
    from attn_gateway.paging import page_of as page_of
    from attn_gateway.service import HttpServer as HttpServer
    from attn_gateway.service import Service as Service
    from attn_gateway.service import ServingState as ServingState
    from attn_gateway.settings import GatewaySettings as GatewaySettings
    from attn_gateway.settings import ReplicaTls as ReplicaTls
    from attn_gateway.settings import TlsFiles as TlsFiles
    from attn_gateway.status import code_of as code_of
    from attn_gateway.status import status_of as status_of
    from attn_gateway.tenants import Tenant as Tenant
    from attn_gateway.tenants import Tenants as Tenants
    from attn_gateway.tenants import read_tenants as read_tenants

# Ray forks processes beside a running gRPC server, and gRPC logs each fork. It reads these variables only once, when it
# is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Listing plugins imports this package, and must not import gRPC with it.
lazy_names(
    __name__,
    {
        "call": ("Call", "Caller", "Metadata"),
        "calls": ("Calls", "Handler", "handlers_of"),
        "cluster": ("Cluster", "ClusterSettings", "ModelToLoad"),
        "gateway": ("Gateway", "probe", "serving"),
        "paging": ("page_of",),
        "service": ("HttpServer", "Service", "ServingState"),
        "settings": ("GatewaySettings", "ReplicaTls", "TlsFiles"),
        "status": ("code_of", "status_of"),
        "tenants": ("Tenant", "Tenants", "read_tenants"),
    },
)
