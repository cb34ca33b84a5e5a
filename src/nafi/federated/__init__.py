"""Rounds: clients train, the server matches or averages; uses `fusion`."""

from nafi.federated.acceptance import Acceptance, QuorumError, UpdateError
from nafi.federated.architecture import Architecture, Form
from nafi.federated.averaging import FusionRounds
from nafi.federated.client import Trainer
from nafi.federated.layerwise import Layerwise
from nafi.federated.privacy import Noise
from nafi.federated.run import Run
from nafi.federated.samples import Samples
from nafi.federated.simulation import simulate
from nafi.federated.strategies import STRATEGIES, make_strategy
from nafi.federated.strategy import State, Strategy, Task, Update
from nafi.federated.training import Training, train

__all__ = [
    "STRATEGIES",
    "Acceptance",
    "Architecture",
    "Form",
    "FusionRounds",
    "Layerwise",
    "Noise",
    "QuorumError",
    "Run",
    "Samples",
    "State",
    "Strategy",
    "Task",
    "Trainer",
    "Training",
    "Update",
    "UpdateError",
    "make_strategy",
    "simulate",
    "train",
]
