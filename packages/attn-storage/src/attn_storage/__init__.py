"""Storage that servers share: records in a database, leases with fencing tokens, and artefacts by URL."""

from attn_storage.artifacts import ArtifactStore, Manifest
from attn_storage.database import Database, database_url
from attn_storage.gateways import GatewayRecord, GatewayRecords, ServedModel, ServedState
from attn_storage.leases import Lease, Leases
from attn_storage.models import ModelRecord, ModelRecords
from attn_storage.owners import Owners

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
