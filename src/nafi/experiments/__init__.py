"""The laboratory: data, clients and experiments to run nafi on; nothing of the core imports it."""

from nafi.errors import require

require("pydantic", "sklearn", "pooch", "PIL")

from nafi.experiments.config import Experiment  # noqa: E402
from nafi.experiments.demo import Demo, DemoRow, run_demo  # noqa: E402
from nafi.experiments.files import experiment_names, load_experiment, report_of  # noqa: E402
from nafi.experiments.problems import PROBLEMS, Problem, find_photo, load_data  # noqa: E402
from nafi.experiments.records import read_records, read_runs  # noqa: E402
from nafi.experiments.runner import run_experiment  # noqa: E402

__all__ = [
    "PROBLEMS",
    "Demo",
    "DemoRow",
    "Experiment",
    "Problem",
    "experiment_names",
    "find_photo",
    "load_data",
    "load_experiment",
    "read_records",
    "read_runs",
    "report_of",
    "run_demo",
    "run_experiment",
]
