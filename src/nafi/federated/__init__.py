"""Rounds: clients train, the server matches or averages; uses `fusion`."""

from nafi.federated.acceptance import Acceptance, QuorumError, UpdateError
from nafi.federated.architecture import Architecture, Expected, Form
from nafi.federated.averaging import FedAvg, FedProx, FusionRounds, MatchThenAverage
from nafi.federated.callbacks import Callback, JsonLines, Scalars
from nafi.federated.checkpoint import read_records, read_state, write_state
from nafi.federated.client import Trainer
from nafi.federated.fedadam import FedAdam
from nafi.federated.layerwise import Layerwise, LayerwiseState, Member
from nafi.federated.messages import task_from, task_to, update_from, update_to
from nafi.federated.privacy import Noise
from nafi.federated.randomness import derived_seed, seeded
from nafi.federated.refit import MatchRefit, RefitState
from nafi.federated.request import Request
from nafi.federated.run import Evaluate, Progress, Run
from nafi.federated.samples import Samples, as_numbers, in_batches
from nafi.federated.simulation import simulate
from nafi.federated.strategies import STRATEGIES, make_strategy, option_names, strategy
from nafi.federated.strategy import State, Strategy, Task, Update
from nafi.federated.training import Loss, Optimiser, Training, check_device, make_optimiser, train

__all__ = [
    "STRATEGIES",
    "Acceptance",
    "Architecture",
    "Callback",
    "Evaluate",
    "Expected",
    "FedAdam",
    "FedAvg",
    "FedProx",
    "Form",
    "FusionRounds",
    "JsonLines",
    "Layerwise",
    "LayerwiseState",
    "Loss",
    "MatchRefit",
    "MatchThenAverage",
    "Member",
    "Noise",
    "Optimiser",
    "Progress",
    "QuorumError",
    "RefitState",
    "Request",
    "Run",
    "Samples",
    "Scalars",
    "State",
    "Strategy",
    "Task",
    "Trainer",
    "Training",
    "Update",
    "UpdateError",
    "as_numbers",
    "check_device",
    "derived_seed",
    "in_batches",
    "make_optimiser",
    "make_strategy",
    "option_names",
    "read_records",
    "read_state",
    "seeded",
    "simulate",
    "strategy",
    "task_from",
    "task_to",
    "train",
    "update_from",
    "update_to",
    "write_state",
]
