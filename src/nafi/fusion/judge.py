"""Is a fused model any good? Measured against the clients it was made of.

Hides: how clients and their ensemble are run and scored. Promises: networks are left as they are; a
verdict says what was measured, never more, and what to try where the result is worse than a client.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.fusion.clients import Clients
from nafi.fusion.ensemble import EnsembleNetwork, shares_of, weighted_sum
from nafi.fusion.method import Progress
from nafi.fusion.networks import FusionWarning
from nafi.fusion.probe import NOISE, SYNTHETIC, batch_size
from nafi.fusion.result import Agreement, FusionResult, Scores
from nafi.graph import Inputs, call, copy_network, evaluating, first_line

Validate = Callable[[nn.Module], float]
# What `fuse` says of networks with several hidden layers that were merged without any inputs.
WITHOUT_PROBE = (
    "weights alone were merged: with two or more hidden layers, expect less than of a client. Give "
    'some dozens of unlabelled inputs (probe=, --probe FILE); or probe="noise", if you have none; '
    "or train on in rounds (the strategy match-then-average)"
)
# The same of models that stay in their files, which no probe can be run on.
FROM_FILES = (
    "weights alone were merged: with two or more hidden layers, expect less than of a client. If "
    "all models fit into memory, load them and give a probe, or train on in rounds"
)
# Inputs whose outputs are averaged at once.
_AT_ONCE = 16

# What brings more than another setting of the same method.
_MORE = (
    "solve the last layer from clients' labels: nafi statistics, then nafi head",
    "keep clients side by side, cut down to a budget: method stack (--method stack --budget "
    '"1.0 params")',
)


@dataclass(frozen=True)
class Verdict:
    """What is known of a result, in a sentence or two.

    tone: good if the fused model is at least as good as every client; bad if it is not, or says
        less of what the ensemble says than any client does; unknown if nobody has measured that
    advice: what to try or to measure next
    """

    tone: Literal["good", "bad", "unknown"]
    text: str
    advice: tuple[str, ...] = ()


def score(validate: Validate, model: nn.Module) -> float:
    """What `validate` says of a model: minus infinity for NaN, so that it never wins."""
    value = validate(model)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"validate: returned {value!r}, expected a number") from None
    return -inf if isnan(number) else number


def score_clients(
    clients: Clients, example_inputs: Inputs, validate: Validate, progress: Progress
) -> Scores:
    """The scores of each client alone and of their ensemble, with none of a fused model yet."""
    found: list[float] = []
    total = len(clients) + 1
    for model, name in zip(clients.models, clients.names, strict=True):
        progress(f"scoring {name}", len(found), total)
        found.append(score(validate, copy_network(model).eval()))
    progress("scoring the ensemble", len(found), total)
    ensemble = _ensemble_score(clients, example_inputs, validate)
    return Scores(tuple(found), ensemble, -inf, clients.names)


def _ensemble_score(clients: Clients, example_inputs: Inputs, validate: Validate) -> float | None:
    """Of all clients side by side, each with the weight that it has in the fusion.

    A fusion that knows who has seen which class would look better than it is beside an ensemble
    that does not.
    """
    if clients.stored:  # side by side they would all be in memory
        return None
    models = [copy_network(model) for model in clients.models]
    network = EnsembleNetwork(models, *shares_of(clients)).eval()
    try:
        leaves = outputs_of(network, example_inputs)
    except (RuntimeError, ValueError, TypeError):  # outputs of different shapes, say
        return None
    if not _averages(leaves):
        return None
    try:
        return score(validate, network)
    except Exception as error:  # a user's function may ask for more than outputs
        text = f"validate: the ensemble cannot be scored: {type(error).__name__}: "
        warnings.warn(text + first_line(error), FusionWarning, stacklevel=4)
        return None


def agreement(
    clients: Clients, fused: nn.Module, probe: Inputs, by_input: Tensor | None = None
) -> Agreement | None:
    """How far the fused model does on a probe what its clients' mean does; None without a mean.

    Clients weigh in the mean what they weigh in the fusion: by classes or samples, if known, and
    for each input by_input (S, inputs), if that was distilled.
    """
    outputs = [outputs_of(model, probe) for model in clients.models]
    shapes = [[leaf.shape for leaf in leaves] for leaves in outputs]
    if any(found != shapes[0] for found in shapes) or not _averages(outputs[0]):
        return None
    shares = shares_of(clients)
    mean = [_mean(leaves, *shares, by_input) for leaves in zip(*outputs, strict=True)]
    classes = len(mean) == 1 and mean[0].ndim == 2 and mean[0].shape[1] > 1
    compare = _same_classes if classes else _explained
    return Agreement(
        "classes" if classes else "values",
        compare(outputs_of(fused, probe), mean),
        tuple(compare(leaves, mean) for leaves in outputs),
        batch_size(probe),
        clients.names,
    )


def _mean(
    outputs: Sequence[Tensor],
    shares: Tensor,
    class_shares: Tensor | None,
    by_input: Tensor | None,
) -> Tensor:
    """Of all clients' outputs, some inputs at a time: those of words can be larger than a model."""
    if not outputs[0].ndim:
        return weighted_sum(torch.stack(list(outputs)), shares, class_shares)
    return torch.cat(
        [
            weighted_sum(
                torch.stack([output[at : at + _AT_ONCE] for output in outputs]),
                shares,
                class_shares,
                None if by_input is None else by_input[:, at : at + _AT_ONCE],
            )
            for at in range(0, len(outputs[0]), _AT_ONCE)
        ]
    )


def outputs_of(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """All tensors that a network returns; numbers in double precision."""
    with evaluating(model):
        outputs: Any = call(model, inputs)
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [leaf.cpu().double() if leaf.is_floating_point() else leaf.cpu() for leaf in leaves]


def _averages(leaves: Sequence[Tensor]) -> bool:
    """Whether the mean of such outputs means something: numbers, not indices of classes."""
    return bool(leaves) and all(leaf.is_floating_point() for leaf in leaves)


def _same_classes(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return float((outputs[0].argmax(dim=1) == expected[0].argmax(dim=1)).double().mean())


def _explained(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """R squared, the mean over the outputs."""
    parts = [_r_squared(one, two) for one, two in zip(outputs, expected, strict=True)]
    return sum(parts) / len(parts)


def _r_squared(output: Tensor, expected: Tensor) -> float:
    """About the mean of each channel, or about zero where a channel does not vary."""
    others = [d for d in range(expected.ndim) if d != 1]
    centred = expected - expected.mean(dim=others, keepdim=True) if others else expected
    spread = float(centred.square().sum()) or float(expected.square().sum())
    error = float((output - expected).square().sum())
    if not error < inf:
        return -inf
    return 1 - error / spread if spread else float(error == 0)


def told(value: float) -> str:
    """A score in four digits."""
    return f"{value:.4g}" if value > -inf else "NaN"


def verdict(result: FusionResult) -> Verdict:
    """What is known of a result."""
    if result.scores is not None:
        return _scored(result.scores, _advice(result))
    score_it = "score it against its clients: validate=, or --validate module:function"
    advice = (score_it, *_counts(result))
    if result.agreement is not None:
        made_up = result.diagnostics.get("probe") in (NOISE, SYNTHETIC)
        where = f"On {result.agreement.inputs} inputs "
        where += "that were made up" if made_up else "of the probe"
        where += ", to which its layers were fitted," if result.fits else ""
        known = f"{where} {_agreed(result.agreement)}"
        if not made_up and result.agreement.fused < min(result.agreement.clients):
            text = f"Probably worse than its clients, though nobody has scored it. {known}"
            return Verdict("bad", text, (score_it, *_advice(result)))
        real = "give some dozens of real inputs, which are far better: probe=, or --probe FILE"
        text = f"Nobody has scored this model. {known}"
        return Verdict("unknown", text, (*advice, *([real] if made_up else [])))
    probe = "give some dozens of unlabelled inputs (or noise): probe=, or --probe FILE"
    probe = str(result.diagnostics.get("advice", probe))
    return Verdict(
        "unknown", "Nobody has measured whether this model is any good.", (*advice, probe)
    )


def _scored(scores: Scores, advice: tuple[str, ...]) -> Verdict:
    fused, best = told(scores.fused), told(scores.best)
    client = scores.names[scores.clients.index(scores.best)]
    if not scores.better:
        text = f"Worse than a client: the fused model scores {fused}, {client} alone {best}."
        return Verdict("bad", text, advice)
    beside = ""
    if scores.ensemble is not None:
        beside = f", and {_side(scores.fused, scores.ensemble)} their ensemble"
        beside += f" ({told(scores.ensemble)})"
    above = _side(scores.fused, scores.best)
    text = f"The fused model scores {fused}: {above} the best client ({best}){beside}."
    below = scores.ensemble is not None and scores.fused < scores.ensemble
    return Verdict("good", text, _MORE if below else ())


def _side(value: float, other: float) -> str:
    if value == other:
        return "level with"
    return "above" if value > other else "below"


def _agreed(found: Agreement) -> str:
    low, high = min(found.clients), max(found.clients)
    if found.of == "classes":
        return (
            f"it says what the ensemble of its clients says {found.fused:.0%} of the time; "
            f"clients alone do {low:.0%} to {high:.0%}."
        )
    return (
        f"it explains {found.fused:.2f} of the variance of its clients' mean output (R squared); "
        f"clients alone do {low:.2f} to {high:.2f}."
    )


def _advice(result: FusionResult) -> tuple[str, ...]:
    """What to try where a result is worse than a client."""
    probe = (
        "give more inputs as a probe, or such as are closer to what the network is for"
        if result.agreement is not None or result.fits
        else "give some dozens of unlabelled inputs to refit its layers on: probe=, or --probe"
    )
    return (
        *_counts(result),
        _wider(result),
        probe,
        *_MORE,
        "train on from it in rounds: the strategy match-then-average",
    )


def _wider(result: FusionResult) -> str:
    """Advice in the words in which the limit was given."""
    if result.diagnostics.get("options", {}).get("budget") is not None:
        return "let it be larger: a budget of 2 or 4 times a client's parameters"
    return (
        "let it be wider: max_width=2.0, or --max-width 2x, and without a probe a penalty of 0.01"
    )


def _counts(result: FusionResult) -> tuple[str, ...]:
    """Advice where counts of classes would have been used."""
    if result.diagnostics.get("class_counts", True):
        return ()
    return (
        "if clients know different classes, say how many samples of each they have: class_counts=, "
        "or --class-counts",
    )


def warn_if_worse(result: FusionResult) -> None:
    """Say it where a result is worse than a client, or probably is."""
    found = verdict(result)
    if found.tone == "bad":
        text = f"{found.text} What to try: {'; '.join(found.advice)}"
        warnings.warn(text, FusionWarning, stacklevel=3)
