"""Which axes of a network's tensors carry the same neurons; knows nothing of Bayes."""

from nafi.graph.bases import (
    Bases,
    Freedom,
    Side,
    closest_rotation,
    free_bases,
    keeping_mean,
    rotate,
    sides,
)
from nafi.graph.blocks import Block, blocks
from nafi.graph.check import check_spec
from nafi.graph.fingerprint import fingerprint, without_addresses
from nafi.graph.groups import SpecWarning, groups
from nafi.graph.growth import Growth, growth
from nafi.graph.inputs import (
    Inputs,
    arguments,
    call,
    check_inputs,
    first_line,
    returned_tensors,
    run_batches,
)
from nafi.graph.lazy_layers import has_lazy_layers, lacks_weights, materialise
from nafi.graph.lift import (
    Kept,
    Placement,
    Placements,
    Positions,
    Rotated,
    Shares,
    Thinned,
    in_order,
    lift,
    lift_axes,
    lift_block,
    lifted_rows,
    owned,
)
from nafi.graph.neurons import Neurons, Role, Stretch, gather, rows_first, scatter, stretches
from nafi.graph.normalisation import (
    Normalisation,
    OutputMoments,
    attach_batchnorm,
    calibrate,
    claimed_moments,
    fold_batchnorm,
    measured_moments,
)
from nafi.graph.permute import permute, permute_state, random_permutations
from nafi.graph.products import (
    Convolution,
    Product,
    SeenEnough,
    ValueReads,
    sample_rows,
    watch,
)
from nafi.graph.rebuild import rebuild
from nafi.graph.resize import resize_state
from nafi.graph.rules import Call, Value, rule
from nafi.graph.spec import ModelSpec, NeuronGroup, Pinned, Place, holds_numbers, widened
from nafi.graph.spectral import estimate_spectral, unit_spectral
from nafi.graph.tensors import Axis, Kind, Layer, Segment, TensorSpec
from nafi.graph.ties import Tie, equal_widths, tied_limits
from nafi.graph.trace import copy_network, evaluating, named_tensors, shared_names, unwrapped
from nafi.graph.weight_norm import gains_of_directions, unit_directions

__all__ = [
    "Axis",
    "Bases",
    "Block",
    "Call",
    "Convolution",
    "Freedom",
    "Growth",
    "Inputs",
    "Kept",
    "Kind",
    "Layer",
    "ModelSpec",
    "NeuronGroup",
    "Neurons",
    "Normalisation",
    "OutputMoments",
    "Pinned",
    "Place",
    "Placement",
    "Placements",
    "Positions",
    "Product",
    "Role",
    "Rotated",
    "SeenEnough",
    "Segment",
    "Shares",
    "Side",
    "SpecWarning",
    "Stretch",
    "TensorSpec",
    "Thinned",
    "Tie",
    "Value",
    "ValueReads",
    "arguments",
    "attach_batchnorm",
    "blocks",
    "calibrate",
    "call",
    "check_inputs",
    "check_spec",
    "claimed_moments",
    "closest_rotation",
    "copy_network",
    "equal_widths",
    "estimate_spectral",
    "evaluating",
    "fingerprint",
    "first_line",
    "fold_batchnorm",
    "free_bases",
    "gains_of_directions",
    "gather",
    "groups",
    "growth",
    "has_lazy_layers",
    "holds_numbers",
    "in_order",
    "keeping_mean",
    "lacks_weights",
    "lift",
    "lift_axes",
    "lift_block",
    "lifted_rows",
    "materialise",
    "measured_moments",
    "named_tensors",
    "owned",
    "permute",
    "permute_state",
    "random_permutations",
    "rebuild",
    "resize_state",
    "returned_tensors",
    "rotate",
    "rows_first",
    "rule",
    "run_batches",
    "sample_rows",
    "scatter",
    "shared_names",
    "sides",
    "stretches",
    "tied_limits",
    "unit_directions",
    "unit_spectral",
    "unwrapped",
    "watch",
    "widened",
    "without_addresses",
]
