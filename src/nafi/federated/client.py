"""The client's side of a round: a task and samples in, an update out.

Hides: how a network is made from a task. Promises: nothing of the samples leaves but weights,
counts and the extras that the task asks for; the same task and samples give the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import nn

from nafi.errors import InputError, few
from nafi.federated.architecture import Architecture, Tensors, load_tensors
from nafi.federated.fingerprint import described
from nafi.federated.prefix import CACHE_BYTES
from nafi.federated.privacy import Noise
from nafi.federated.samples import Samples
from nafi.federated.statistics import is_sum, sums_of, targets_of
from nafi.federated.strategy import Task, Update, plain, tensors_of
from nafi.federated.training import Loss, train
from nafi.fusion import Targets

Data = Mapping[str, Samples] | Callable[[str], Samples]
# Computes what a task asks for beside weights: (trained network, samples, task) -> named tensors.
Extras = Callable[[nn.Module, Samples, Task], Tensors]


@dataclass(frozen=True)
class Trainer:
    """Does tasks for clients.

    data: client -> its samples; it is asked in the process that trains
    classes: how many there are, to count them; None for targets that are no classes
    noise: clip the client's change and add noise to it before it leaves; see there for counts
    extras: computes what tasks ask for beside weights; no noise is added to that
    statistics: whether to answer with sums over samples, which leave without noise, too
    """

    architecture: Architecture
    data: Data
    classes: int | None = None
    loss: Loss = F.cross_entropy
    device: str = "cpu"
    cache_bytes: int = CACHE_BYTES
    noise: Noise | None = None
    extras: Extras | None = None
    statistics: bool = True

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        """The client's update, and the mean loss of its last epoch, which stays with it."""
        inputs = self.architecture.example_inputs
        if isinstance(inputs, Mapping) or len(inputs) != 1:
            raise InputError("a Trainer feeds networks of one input; write a function of your own")
        self._check_extras(task)
        samples = self.data(client) if callable(self.data) else self.data[client]
        model, spec = self.architecture.network(task.form)
        missing = [name for name in spec.axes if name not in task.tensors]
        if missing:
            drawn = self.architecture.drawn(task.form, task.start)
            load_tensors(model, {name: drawn[name] for name in missing})
        load_tensors(model, task.tensors)
        sent = [name for name in spec.axes if name not in task.frozen]
        before = tensors_of(model, sent) if self.noise is not None else {}
        loss = train(
            model,
            samples,
            task.training,
            seed=task.seed,
            frozen=task.frozen,
            loss=self.loss,
            device=self.device,
            cache_bytes=self.cache_bytes,
        )
        trained = tensors_of(model, sent)
        if self.noise is not None:
            shapes = self.architecture.shapes(task.form)
            variances = {name for name, expected in shapes.items() if expected.variance}
            trained = self.noise.applied(before, trained, variances)
        asked = any(not is_sum(name) for name in task.asks)
        extras = dict(self.extras(model, samples, task)) if asked and self.extras else {}
        if task.sums:
            extras |= sums_of(model, samples, task.sums, self._targets(task))
        total, counts = self._disclosed(samples)
        return Update(client, task.round, trained, total, counts, plain(extras)), loss

    def facts(self) -> dict[str, Any]:
        """What decides a run's result, beside strategy and samples; plain data."""
        return {"loss": described(self.loss), "noise": str(self.noise)}

    def sizes(self) -> dict[str, int]:
        """Client -> how many samples it has and says so, as far as that is known beforehand."""
        exact = self.noise is None or self.noise.counts == "exact"
        known = self.data if exact and isinstance(self.data, Mapping) else {}
        return {client: len(samples) for client, samples in known.items()}

    def _targets(self, task: Task) -> Targets | None:
        """The client's own network, where a task asks what it says."""
        if not task.sums.outputs:
            return None
        return targets_of(self.architecture, task.form, task.extras)

    def _check_extras(self, task: Task) -> None:
        """Refuse before any training what cannot be answered afterwards."""
        if task.sums and not self.statistics:
            raise InputError("the strategy asks for sums over samples, which this client refuses")
        if task.sums and self.noise is not None:
            raise InputError("sums over samples would leave without noise; leave noise out")
        asked = {name: kind for name, kind in task.asks.items() if not is_sum(name)}
        required = [name for name, expected in asked.items() if expected.required]
        if required and self.extras is None:
            raise InputError(
                f"the strategy asks for {few(required)} beside weights; give the client a function "
                "that computes it (extras)"
            )
        if asked and self.extras is not None and self.noise is not None:
            raise InputError("extras would leave without noise; leave noise or extras out")

    def _disclosed(self, samples: Samples) -> tuple[int, tuple[int, ...] | None]:
        """The number of samples, and of each class, as the client tells them."""
        counts = self._counts(samples)
        if self.noise is None:
            return len(samples), counts
        sent = self.noise.disclosed((len(samples),) if counts is None else counts)
        return sum(sent), None if counts is None else sent

    def _counts(self, samples: Samples) -> tuple[int, ...] | None:
        if self.classes is None:
            return None
        labels = samples.labels
        if labels.ndim != 1 or labels.is_floating_point() or int(labels.min()) < 0:
            raise InputError(
                f"labels: found shape {tuple(labels.shape)} of {labels.dtype}, expected a class "
                "from 0 on for each sample; leave classes out where there are none"
            )
        counts = np.bincount(labels.numpy(), minlength=self.classes)
        if len(counts) > self.classes:
            raise InputError(
                f"labels: found class {len(counts) - 1}, expected less than {self.classes}"
            )
        return tuple(int(count) for count in counts)
