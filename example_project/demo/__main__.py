"""`make demo`: run the flight-delay pipeline, lose its compute twice, and show what that cost.

First loss: the whole process tree of the run is killed in the middle of training. Second loss: the tree is stopped in
the middle of inference, as a machine that hangs or a laptop that sleeps, and woken after another run has taken over.
Nobody touches anything in between. At the end the weights and predictions must equal those of a run that never died.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import psutil
from rich.console import Console

from dagster_resilient import open_store
from example_project.demo import checks
from example_project.demo.cluster import TTL_SECONDS, Cluster, DemoError, end_tree, signal_all, wait_for
from example_project.demo.report import print_table
from example_project.model import STEPS

JOB = "delay_pipeline"
MONTHS = [f"2013-{month:02d}-01" for month in range(1, 13)]
RANGE = {"dagster/asset_partition_range_start": MONTHS[0], "dagster/asset_partition_range_end": MONTHS[-1]}
SAVE_INTERVAL = 100


@dataclass
class Loss:
    """One loss of compute and its recovery; times in seconds since the loss."""

    run_id: str
    what: str
    reached: str
    detected: float = 0.0
    resumed: float = 0.0
    resumed_at: str = ""
    redone: str = ""
    redone_from_zero: str = ""
    next_run: str = ""


@dataclass
class Demo:
    """The story, told while it happens."""

    cluster: Cluster
    steps: int
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True, width=130))
    begun: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self.console.print(f"[dim]{time.monotonic() - self.begun:6.1f} s[/dim]  {text}")

    def play(self) -> list[Loss]:
        """Launch the pipeline, lose it twice, wait for the end."""
        config = json.dumps({"ops": {"delay_model": {"config": {"steps": self.steps}}}})
        self.cluster.launch(JOB, RANGE, config)
        first = wait_for("the run", lambda: next(iter(self.cluster.runs()), None))
        self.say(f"run {first.run_id[:8]} queued: 12 months, {self.steps:,} training steps, 12 months of predictions")
        killed = self.kill_in_training(first)
        stopped = self.stop_in_inference(self.cluster.run(killed.next_run))
        self.finish(stopped)
        return [killed, stopped]

    # ---- first loss

    def kill_in_training(self, run: dg.DagsterRun) -> Loss:
        """Kill the run's whole process tree (SIGKILL), in the middle of training."""
        middle = self.steps // 2 + SAVE_INTERVAL // 2
        reached = wait_for(f"training step {middle}", lambda: self.training_step(run.run_id, middle), 300)
        signal_all(self.cluster.processes(run.run_id), signal.SIGKILL)
        at = time.monotonic()
        saved = checks.last_checkpoint(self.cluster.store, "delay_model")
        loss = Loss(run.run_id, "killed in training", f"step {reached}")
        self.say(f"[red]killed[/red] all of run {run.run_id[:8]} at training step {reached} (last checkpoint: {saved})")
        self.detect(loss, at)
        resumed = wait_for("training to go on", lambda: self.resumed_step(loss.next_run))
        loss.resumed = time.monotonic() - at
        loss.resumed_at = f"step {resumed}"
        months = 2 * len(MONTHS)
        loss.redone, loss.redone_from_zero = f"{SAVE_INTERVAL} steps at most", f"{reached} steps, {months} months"
        self.say(f"[green]resumed[/green] from training step {resumed}: at most {SAVE_INTERVAL} steps are redone")
        if resumed != saved or reached - resumed > SAVE_INTERVAL:
            raise DemoError(
                f"Training resumed at step {resumed}, not at the last checkpoint {saved} (of step {reached})."
            )
        return loss

    def training_step(self, run_id: str, least: int) -> int | None:
        """The training step of the last heartbeat, once it has come far enough."""
        self.fail_if_over(run_id)
        step = int(self.cluster.progress(run_id, "delay_model").get("step", 0))
        if step >= self.steps:
            raise DemoError(f"Training was over before it could be killed at step {least}; give it more --steps.")
        return step if step >= least else None

    def resumed_step(self, run_id: str) -> int | None:
        """The checkpoint that a run restored, once it trains."""
        self.fail_if_over(run_id)
        progress = self.cluster.progress(run_id, "delay_model")
        return int(progress.get("resumed_from") or 0) if "step" in progress else None

    # ---- second loss

    def stop_in_inference(self, run: dg.DagsterRun) -> Loss:
        """Stop the run's whole process tree (SIGSTOP) in the middle of the range; wake it after the recovery."""
        store = self.cluster.store
        wait_for("predictions", lambda: self.predicted(run.run_id, 4), 180)
        zombie = self.cluster.freeze(run.run_id)
        at = time.monotonic()
        done = checks.committed(store, "delay_predictions", MONTHS)
        loss = Loss(run.run_id, "stopped in inference", f"{len(done)} of {len(MONTHS)} months")
        self.say(f"[red]stopped[/red] all of run {run.run_id[:8]} after {len(done)} months of predictions")
        try:
            self.detect(loss, at)
            first = wait_for("predictions to go on", lambda: self.next_prediction(loss.next_run, done))
            loss.resumed, loss.resumed_at = time.monotonic() - at, first
            self.say(f"[green]resumed[/green] at partition {first}; {len(done)} months are not computed again")
            self.wake(run, zombie)
        finally:
            end_tree(zombie)
        months = 2 * len(MONTHS) + len(done)
        loss.redone, loss.redone_from_zero = "the month in flight", f"{self.steps} steps, {months} months"
        return loss

    def predicted(self, run_id: str, least: int) -> bool | None:
        """Whether enough months are committed."""
        self.fail_if_over(run_id)
        months = checks.committed(self.cluster.store, "delay_predictions", MONTHS[: least + 1])
        return True if len(months) >= least else None

    def next_prediction(self, run_id: str, before: Sequence[str]) -> str | None:
        """The first month that the new run committed."""
        self.fail_if_over(run_id)
        now = checks.committed(self.cluster.store, "delay_predictions", MONTHS)
        return next((key for key in now if key not in before), None)

    def wake(self, run: dg.DagsterRun, zombie: list[psutil.Process]) -> None:
        """Wake the zombie, which believes that it is still in charge; it must be refused."""
        self.say(f"[yellow]woken[/yellow]: run {run.run_id[:8]} goes on where it was stopped, and tries to commit")
        signal_all(zombie, signal.SIGCONT)
        errors = wait_for("the zombie's error", lambda: self.refusal(run.run_id), 60)
        if "FencedError" not in errors:
            raise DemoError(f"The woken run failed, but not with FencedError:\n{errors[-1500:]}")
        self.say("[green]refused[/green]: the woken run met FencedError; nothing of it became visible")

    def refusal(self, run_id: str) -> str | None:
        """The errors of the woken run's steps, once there are any; meanwhile nothing may be committed twice."""
        months = checks.committed(self.cluster.store, "delay_predictions", MONTHS)
        checks.committers(self.cluster.store, "delay_predictions", months)
        return checks.step_errors(self.cluster.instance, run_id) or None

    # ---- both

    def detect(self, loss: Loss, at: float) -> None:
        """Wait until the loss is detected and the re-execution is there."""
        status = dg.DagsterRunStatus.FAILURE
        wait_for("the loss to be detected", lambda: self.cluster.run(loss.run_id).status is status or None)
        loss.detected = time.monotonic() - at
        self.say(f"detected after {loss.detected:.1f} s")
        child = wait_for("the re-execution", lambda: self.child_of(loss.run_id))
        loss.next_run = child.run_id
        self.say(f"{self.reason(loss.run_id)}")
        self.say(f"re-execution {child.run_id[:8]} queued: {self.selection(child)}")
        self.check_lineage(child, loss.run_id)
        self.check_selection(child)

    def child_of(self, run_id: str) -> dg.DagsterRun | None:
        """The re-execution of a run."""
        return next((run for run in self.cluster.runs() if run.parent_run_id == run_id), None)

    def check_lineage(self, child: dg.DagsterRun, parent: str) -> None:
        """The re-execution names its parent and the root of the group."""
        root = self.cluster.runs()[0].run_id
        if child.parent_run_id != parent or child.root_run_id != root:
            raise DemoError(f"Run {child.run_id} is no re-execution of {parent} under the root {root}.")

    def check_selection(self, child: dg.DagsterRun) -> None:
        """What was finished before either loss is not selected again."""
        again = {"flights", "flight_features"} & {key.to_user_string() for key in child.asset_selection or ()}
        if again:
            raise DemoError(f"Run {child.run_id} selects finished assets again: {', '.join(sorted(again))}.")

    def selection(self, run: dg.DagsterRun) -> str:
        """What a run selects, in words."""
        names = sorted(key.to_user_string() for key in run.asset_selection or ())
        start, end = (run.tags.get(tag) for tag in RANGE)
        return ", ".join(names) + (f" [{start} .. {end}]" if start else "")

    def reason(self, run_id: str) -> str:
        """What the recovery decided and why, from the run's own event log, where the UI shows it."""
        reason = checks.recovery_event(self.cluster.instance, run_id)
        if reason is None:
            raise DemoError(f"Run {run_id} is FAILURE, but its log does not say why.")
        return reason

    def fail_if_over(self, run_id: str) -> None:
        """Do not wait for a run that ended."""
        run = self.cluster.run(run_id)
        if run.is_finished and run.status is not dg.DagsterRunStatus.SUCCESS:
            raise DemoError(f"Run {run_id} ended as {run.status.value}.")

    def finish(self, last: Loss) -> None:
        """Wait for the last run's success, then check that each partition was committed once."""
        success = dg.DagsterRunStatus.SUCCESS
        run_id = last.next_run

        def over() -> bool | None:
            self.fail_if_over(run_id)
            return True if self.cluster.run(run_id).status is success else None

        wait_for("the last run", over, 180)
        self.say(f"run {run_id[:8]} succeeded; nobody had a hand in it")
        for asset in ("flights", "flight_features", "delay_predictions"):
            by = checks.committers(self.cluster.store, asset, MONTHS)
            shares = ", ".join(f"{count} by {run[:8]}" for run, count in by.items())
            self.say(f"{asset}: each month committed exactly once ({shares})")


def uninterrupted(folder: Path, steps: int) -> str:
    """Run the same pipeline in one process that nothing disturbs; return the URL of its store."""
    url = str(folder / "uninterrupted")
    environment = {**os.environ, "RESILIENT_URL": url, "DAGSTER_HOME": str(folder / "dagster_home")}
    command = [sys.executable, "-m", "example_project.demo.uninterrupted", str(steps)]
    subprocess.run(command, env=environment, check=True, capture_output=True)  # noqa: S603 - our own command
    return url


def main() -> int:
    """Run the demo; 0 only if everything it promises was seen."""
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where everything is kept; emptied first")
    parser.add_argument("--module", default="example_project.definitions", help="the code location")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    options = parser.parse_args()
    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    with Cluster(folder, options.module) as cluster:
        demo = Demo(cluster, options.steps)
        try:
            losses = demo.play()
            demo.say("the same pipeline once more, in one process that nothing disturbs")
            compare(demo, uninterrupted(folder, options.steps))
        except DemoError as error:
            demo.console.print(f"[bold red]The demo failed:[/bold red] {error}\n\n[dim]{cluster.log_tail()}[/dim]")
            return 1
    print_table(demo.console, losses, TTL_SECONDS)
    where = f"DAGSTER_HOME={cluster.home} RESILIENT_URL={cluster.url}"
    demo.console.print(f"\nLook around: [bold]{where} .venv/bin/dagster-webserver -m {options.module}[/bold]")
    return 0


def compare(demo: Demo, url: str) -> None:
    """The result must equal the uninterrupted run's, bit for bit."""
    other = open_store(url)
    parts: list[tuple[str, Sequence[str | None]]] = [("delay_model", [None]), ("delay_predictions", MONTHS)]
    for asset, partitions in parts:
        size = checks.same_bytes(demo.cluster.store, other, asset, partitions)
        demo.say(f"[green]equal[/green]: {asset}, bit for bit that of the uninterrupted run ({size:,} bytes)")


if __name__ == "__main__":
    sys.exit(main())
