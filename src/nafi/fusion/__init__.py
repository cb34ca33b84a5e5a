"""S models in, one model out; uses `matching` and `graph`."""

from nafi.fusion.api import fuse
from nafi.fusion.averaging import FedAvg
from nafi.fusion.bayesian import Bayesian, Nafi, Pfnm
from nafi.fusion.budget import measured_size, read_budget
from nafi.fusion.clients import check_class_axis, check_clients
from nafi.fusion.descent import Descent, in_place, next_group
from nafi.fusion.distill import distill
from nafi.fusion.ensemble import Ensemble, EnsembleNetwork
from nafi.fusion.forecast import Forecast, forecast
from nafi.fusion.frontier import BUDGETS, Frontier, Point, frontier
from nafi.fusion.head import (
    SCALES,
    HeadFit,
    HeadStatistics,
    add_statistics,
    empty_head,
    fit_head,
    solve_head,
    statistics,
)
from nafi.fusion.judge import Validate, Verdict, verdict
from nafi.fusion.last_layer import LastLayer
from nafi.fusion.layer_sums import (
    Targets,
    Written,
    add_to_layer,
    layer_shapes,
    layer_statistics,
    layer_weights,
    owned_outputs,
    recurrent_weights,
    refittable,
)
from nafi.fusion.merge import merge_tensors, merged_network
from nafi.fusion.method import AligningMethod, Alignment, Method, Progress
from nafi.fusion.moments import input_moments
from nafi.fusion.networks import FusionWarning, Networks, prepare_networks
from nafi.fusion.pooling import bounded_sums, pool_layers
from nafi.fusion.probe import PROBE_LIMIT, made_up_count, read_probe
from nafi.fusion.rebasin import Rebasin
from nafi.fusion.recording import sole_writers
from nafi.fusion.registry import METHODS, make_method, method_names, option_names
from nafi.fusion.result import Agreement, Body, FusionResult, Scores
from nafi.fusion.screen import CHANGES_AGREE, Screen, as_real
from nafi.fusion.screened_head import screened_statistics
from nafi.fusion.stack import Stack
from nafi.fusion.statistics import (
    RIDGES,
    LayerStatistics,
    are_sums,
    pooled_deviation,
    pooled_fit,
    ridge_errors,
)
from nafi.fusion.stored import FileTensors, StoredModels
from nafi.fusion.transport import Transport, align_to_one
from nafi.fusion.widths import check_budget_in_rounds, check_max_width, width_limits
from nafi.graph import calibrate

__all__ = [
    "BUDGETS",
    "CHANGES_AGREE",
    "METHODS",
    "PROBE_LIMIT",
    "RIDGES",
    "SCALES",
    "Agreement",
    "AligningMethod",
    "Alignment",
    "Bayesian",
    "Body",
    "Descent",
    "Ensemble",
    "EnsembleNetwork",
    "FedAvg",
    "FileTensors",
    "Forecast",
    "Frontier",
    "FusionResult",
    "FusionWarning",
    "HeadFit",
    "HeadStatistics",
    "LastLayer",
    "LayerStatistics",
    "Method",
    "Nafi",
    "Networks",
    "Pfnm",
    "Point",
    "Progress",
    "Rebasin",
    "Scores",
    "Screen",
    "Stack",
    "StoredModels",
    "Targets",
    "Transport",
    "Validate",
    "Verdict",
    "Written",
    "add_statistics",
    "add_to_layer",
    "align_to_one",
    "are_sums",
    "as_real",
    "bounded_sums",
    "calibrate",
    "check_budget_in_rounds",
    "check_class_axis",
    "check_clients",
    "check_max_width",
    "distill",
    "empty_head",
    "fit_head",
    "forecast",
    "frontier",
    "fuse",
    "in_place",
    "input_moments",
    "layer_shapes",
    "layer_statistics",
    "layer_weights",
    "made_up_count",
    "make_method",
    "measured_size",
    "merge_tensors",
    "merged_network",
    "method_names",
    "next_group",
    "option_names",
    "owned_outputs",
    "pool_layers",
    "pooled_deviation",
    "pooled_fit",
    "prepare_networks",
    "read_budget",
    "read_probe",
    "recurrent_weights",
    "refittable",
    "ridge_errors",
    "screened_statistics",
    "sole_writers",
    "solve_head",
    "statistics",
    "verdict",
    "width_limits",
]
