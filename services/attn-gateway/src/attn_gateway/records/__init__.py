"""Storage that servers share: records in a database, leases with fencing tokens, and artefacts by URL."""

from attn_gateway.records.artifacts import ArtifactStore, Manifest
from attn_gateway.records.database import Database, database_url
from attn_gateway.records.leases import Lease, Leases
from attn_gateway.records.models import ModelRecord, ModelRecords
from attn_gateway.records.owners import Owners
from attn_gateway.records.served import ServedModel, ServedModels

__all__ = [
    "ArtifactStore",
    "Database",
    "Lease",
    "Leases",
    "Manifest",
    "ModelRecord",
    "ModelRecords",
    "Owners",
    "ServedModel",
    "ServedModels",
    "database_url",
]
