"""The same network at other widths.

Hides: how sizes are tried out. Promises: a module that runs, trains, prints and exports like one
that was made at these widths, or an error that names the line of the network's code that stands in
the way; never a network whose code still assumes the old sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from nafi.errors import SpecError
from nafi.graph.inputs import Inputs
from nafi.graph.resize import load_resized, resize_state
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import named_tensors, unwrapped
from nafi.graph.trial import make_trial
from nafi.graph.weight_norm import fill_directions


def rebuild(
    model: nn.Module,
    spec: ModelSpec,
    widths: Mapping[str, int],
    example_inputs: Inputs | None = None,
) -> nn.Module:
    """A copy of the network with some groups at other widths.

    widths: group -> new width; groups not named keep theirs. Neurons are kept from the front, new
        ones are zero (running variances one), so that widening a group that is not rigid leaves
        the function as it was.
    example_inputs: those of `groups`, which the spec remembers, unless others are given.
    """
    model = unwrapped(model)
    trial = make_trial(model, spec, widths, example_inputs)
    settings, trouble = trial.fitting()
    if trouble is not None:
        raise SpecError(trial.advice(trouble))
    state = resize_state(named_tensors(model), spec, widths)
    twin = load_resized(model, spec, trial.new_spec, state)
    for setting in settings:
        setting.applied(twin)
    return fill_directions(twin)
