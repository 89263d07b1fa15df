"""Pure decisions: what is lost, what a failure is worth, what is missing. No I/O, no Dagster."""

from dagster_resilient.recovery.detect import Look, Observation, Sighting, hung, observe
from dagster_resilient.recovery.plan import NOT_COMMITTED, AssetFacts, Plan, plan
from dagster_resilient.recovery.policy import Decision, FailureClass, RecoveryPolicy, attempts_of_other_kind, classify
from dagster_resilient.recovery.rests import Rests

__all__ = [
    "NOT_COMMITTED",
    "AssetFacts",
    "Decision",
    "FailureClass",
    "Look",
    "Observation",
    "Plan",
    "RecoveryPolicy",
    "Rests",
    "Sighting",
    "attempts_of_other_kind",
    "classify",
    "hung",
    "observe",
    "plan",
]
