"""Which axes of a network's tensors carry the same neurons; knows nothing of Bayes."""

from nafi.graph.batchnorm import attach_batchnorm, fold_batchnorm
from nafi.graph.check import check_spec
from nafi.graph.groups import SpecWarning, groups
from nafi.graph.neurons import Neurons, Role, gather, scatter
from nafi.graph.permute import permute
from nafi.graph.rebuild import rebuild
from nafi.graph.spec import ModelSpec, NeuronGroup, Pinned, Segment
from nafi.graph.trace import Inputs, named_tensors, shared_names

__all__ = [
    "Inputs",
    "ModelSpec",
    "NeuronGroup",
    "Neurons",
    "Pinned",
    "Role",
    "Segment",
    "SpecWarning",
    "attach_batchnorm",
    "check_spec",
    "fold_batchnorm",
    "gather",
    "groups",
    "named_tensors",
    "permute",
    "rebuild",
    "scatter",
    "shared_names",
]
