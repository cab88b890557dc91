"""Storage that servers share: records in a database, leases with fencing tokens, and artefacts by URL."""

from attn_gateway.records.artifacts import ArtifactStore, Manifest
from attn_gateway.records.database import Database, database_url
from attn_gateway.records.gateways import GatewayRecord, GatewayRecords, ServedModel, ServedState
from attn_gateway.records.leases import Lease, Leases
from attn_gateway.records.models import ModelRecord, ModelRecords
from attn_gateway.records.owners import Owners

__all__ = [
    "ArtifactStore",
    "Database",
    "GatewayRecord",
    "GatewayRecords",
    "Lease",
    "Leases",
    "Manifest",
    "ModelRecord",
    "ModelRecords",
    "Owners",
    "ServedModel",
    "ServedState",
    "database_url",
]
