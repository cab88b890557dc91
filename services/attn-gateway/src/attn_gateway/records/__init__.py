"""Storage that servers share: records in a database, leases with fencing tokens, and artefacts by URL."""

from attn_gateway.records.artifacts import ArtifactStore, Manifest
from attn_gateway.records.database import Database, database_url
from attn_gateway.records.leases import Lease, Leases
from attn_gateway.records.loaded_models import LoadedModel, LoadedModels
from attn_gateway.records.models import ModelRecord, ModelRecords
from attn_gateway.records.owners import Owners

__all__ = [
    "ArtifactStore",
    "Database",
    "Lease",
    "Leases",
    "LoadedModel",
    "LoadedModels",
    "Manifest",
    "ModelRecord",
    "ModelRecords",
    "Owners",
    "database_url",
]
