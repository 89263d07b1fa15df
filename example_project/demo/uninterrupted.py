"""The pipeline in one process that nothing disturbs: what the recovered result is compared with."""

from __future__ import annotations

import sys

import dagster as dg

from example_project.definitions import defs

RANGE = {"dagster/asset_partition_range_start": "2013-01-01", "dagster/asset_partition_range_end": "2013-12-01"}


def main() -> int:
    """Run the job in this process, in an instance that is gone afterwards."""
    steps = int(sys.argv[1])
    job = defs.resolve_job_def("delay_pipeline")
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(
            instance=instance, tags=RANGE, run_config={"ops": {"delay_model": {"config": {"steps": steps}}}}
        )
    return 0 if done.success else 1


if __name__ == "__main__":
    sys.exit(main())
