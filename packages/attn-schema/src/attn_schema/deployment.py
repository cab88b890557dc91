"""Configuration of how many engines (replicas) serve a model."""

from __future__ import annotations

from typing import Annotated

from attn_core.errors import InvalidValue
from msgspec import Meta

from attn_schema.engine import EngineConfig
from attn_schema.schema import MAX_INT32, Checked

MAX_REPLICAS = 1000
PREFILL_MIN_TOKENS = 256
"""The default of `prefill_min_tokens`. Transferring a KV state costs 15 ms plus the transfer of its bytes: the time in
which one core computes some 60 tokens of a model of 15 million parameters, and an accelerator more. See
benchmarks/disaggregated_prefill.py."""


class DeploymentConfig(Checked, frozen=True, kw_only=True):
    """The number of engines that serve a model. Without any option it is one engine, in a process of its own.

    With `replicas` or `max_replicas` the engines are a Ray Serve deployment: a fixed number, or autoscaled with the
    load. With `prefill_replicas` in addition, those engines decode, and further engines compute long prompts
    (disaggregated prefill).
    """

    replicas: Annotated[
        int,
        Meta(ge=1, le=MAX_REPLICAS, description="Engines that serve the model, as a Ray Serve deployment."),
    ] | None = None  # fmt: skip
    min_replicas: Annotated[
        int,
        Meta(
            ge=0, le=MAX_REPLICAS,
            description="Minimum number of engines, with max_replicas. With 0, all engines are removed while there are "
            "no requests, and the next request waits until one has started.",
        ),
    ] = 1  # fmt: skip
    max_replicas: Annotated[
        int,
        Meta(ge=1, le=MAX_REPLICAS, description="Maximum number of engines; autoscaling keeps their number between "
        "min_replicas and this."),
    ] | None = None  # fmt: skip
    target_requests: Annotated[
        float,
        Meta(gt=0, description="Target number of running and waiting requests per engine for autoscaling."),
    ] = 16.0  # fmt: skip
    idle_seconds: Annotated[
        float, Meta(ge=0, description="Seconds for which the load must stay lower before an engine is removed.")
    ] = 60.0  # fmt: skip

    prefill_replicas: Annotated[
        int,
        Meta(
            ge=1, le=MAX_REPLICAS,
            description="Additional engines that compute long prompts and transfer the resulting KV state to the "
            "engines that generate (disaggregated prefill); requires replicas or max_replicas.",
        ),
    ] | None = None  # fmt: skip
    prefill_min_tokens: Annotated[
        int,
        Meta(
            ge=2, le=MAX_INT32,
            description="Shortest prompt, in tokens, that a prefill replica computes; in a prompt given as text, four "
            "bytes count as one token.",
        ),
    ] = PREFILL_MIN_TOKENS  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill_replicas is not None and not self.deployed:
            allowed = "none without replicas or max_replicas, the number of engines that generate"
            raise InvalidValue.of("prefill_replicas", self.prefill_replicas, allowed)
        if self.max_replicas is None:
            return
        if self.replicas is not None:
            raise InvalidValue.of("max_replicas", self.max_replicas, "none with replicas, which is a fixed number")
        if self.min_replicas > self.max_replicas:
            raise InvalidValue.of("min_replicas", self.min_replicas, f"at most {self.max_replicas}, max_replicas")

    @property
    def deployed(self) -> bool:
        """Whether the engines are a Ray Serve deployment, rather than one engine in an actor of its own."""
        return self.replicas is not None or self.max_replicas is not None

    @property
    def at_first(self) -> int:
        """The number of engines to start with."""
        return self.replicas or max(self.min_replicas, 1)

    @property
    def decode(self) -> DeploymentConfig:
        """The deployment of the engines that generate, without the prefill replicas."""
        return self.replace(prefill_replicas=None)

    @property
    def prefill(self) -> DeploymentConfig:
        """The deployment of the prefill replicas."""
        return DeploymentConfig(replicas=self.prefill_replicas)

    @property
    def together(self) -> DeploymentConfig:
        """A deployment of the maximum number of engines, generating and prefill replicas together."""
        return DeploymentConfig(replicas=(self.max_replicas or self.at_first) + (self.prefill_replicas or 0))


class ServedModelConfig(Checked, frozen=True, kw_only=True):
    """The settings of one model that a server serves, as written in the server's config file."""

    source: Annotated[str, Meta(description="Folder or registered name; the model's name if not given.")] = ""
    engine: Annotated[
        EngineConfig, Meta(description="Engine options; those of the file's table `engine` if not given.")
    ] | None = None  # fmt: skip
    deployment: Annotated[
        DeploymentConfig, Meta(description="Number of engines; as in the file's table `deployment` if not given.")
    ] | None = None  # fmt: skip


class ClusterConfig(Checked, frozen=True, kw_only=True):
    """The models that a server serves. The config file is read again at SIGHUP, without a restart of the server."""

    models: Annotated[
        dict[str, ServedModelConfig],
        Meta(
            description="Models by the names that requests use.",
            extra={"wire": False, "flag": False},
        ),
    ] = {}  # noqa: RUF012 - msgspec copies it  # fmt: skip
