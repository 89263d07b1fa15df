"""Training that resumes exactly: the session, when it saves, and what it saves.

Importing this package does not load torch.
"""

from dagster_resilient.checkpoint.policies import AnySavePolicy, EverySeconds, EverySteps, SavePolicy
from dagster_resilient.checkpoint.session import TrainingSession
from dagster_resilient.checkpoint.task import TrainingTask

__all__ = ["AnySavePolicy", "EverySeconds", "EverySteps", "SavePolicy", "TrainingSession", "TrainingTask"]
