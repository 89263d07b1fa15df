"""The deployment of the calm runs: that of the chaos tests, on an S3 server of which a slow connection leads astray."""

from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

from cluster import HERE, ChaosCluster

from dagster_resilient import open_store

_SETTINGS = """
telemetry: {enabled: false}
concurrency: {runs: {max_concurrent_runs: 50}, pools: {default_limit: 1}}
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config: {dequeue_interval_seconds: 1}
"""


@dataclass
class CalmCluster(ChaosCluster):
    """See the module.

    Attributes:
        place: The store's URL.
        options: Its storage options.
        slow_endpoint: Of the slow connection to it.
    """

    place: str = ""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    slow_endpoint: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.home / "dagster.yaml").write_text(_SETTINGS)
        self.url = self.place
        self.store = open_store(self.place, self.options)
        self.environment = {
            **self.environment,
            "AWS_ACCESS_KEY_ID": self.options["key"],
            "AWS_SECRET_ACCESS_KEY": self.options["secret"],
            "AWS_ENDPOINT_URL": self.options["endpoint_url"],
            "CALM_SLOW_URL": self.slow_endpoint,
        }

    def _start(self, name: str, *arguments: str | Path) -> Popen[bytes]:
        """Serve the calm code location in place of the other one."""
        other = HERE / "pipeline.py"
        return super()._start(name, *(HERE / "calm_pipeline.py" if one == other else one for one in arguments))
