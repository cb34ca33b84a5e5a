"""The client's side of a round: a task and samples in, an update out.

Hides: how a network is made from a task. Promises: nothing of the samples leaves but weights and
counts; the same task and samples give the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F

from nafi.errors import InputError
from nafi.federated.architecture import Architecture, load_tensors
from nafi.federated.prefix import CACHE_BYTES
from nafi.federated.privacy import Noise
from nafi.federated.samples import Samples
from nafi.federated.strategy import Task, Update, tensors_of
from nafi.federated.training import Loss, train

Data = Mapping[str, Samples] | Callable[[str], Samples]


@dataclass(frozen=True)
class Trainer:
    """Does tasks for clients.

    data: client -> its samples; it is asked in the process that trains
    classes: how many there are, to count them; None for targets that are no classes
    noise: clip the client's change and add noise to it before it leaves
    """

    architecture: Architecture
    data: Data
    classes: int | None = None
    loss: Loss = F.cross_entropy
    device: str = "cpu"
    cache_bytes: int = CACHE_BYTES
    noise: Noise | None = None

    def __call__(self, client: str, task: Task) -> tuple[Update, float]:
        """The client's update, and the mean loss of its last epoch, which stays with it."""
        if len(self.architecture.example_inputs) != 1:
            raise InputError("a Trainer feeds networks of one input; write a function of your own")
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
            trained = self.noise.applied(before, trained)
        return Update(client, task.round, trained, len(samples), self._counts(samples)), loss

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
