"""IO managers: every output is committed whole and verified on load."""

from dagster_resilient.io_managers.resilient import ResilientIOManager

__all__ = ["ResilientIOManager"]
