"""A federation in one process, or in a few of one machine.

Hides: worker processes. Promises: the model that a real federation would come to; whatever a
client's work raises, but the user's Ctrl-C, is one failed client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from nafi.errors import InputError
from nafi.federated.acceptance import Acceptance
from nafi.federated.callbacks import Callback
from nafi.federated.client import Trainer
from nafi.federated.messages import task_from, task_to, update_from, update_to
from nafi.federated.run import Evaluate, Outcome, Progress, Run, conduct
from nafi.federated.seats import EXPIRE, Seats
from nafi.federated.strategy import Strategy, Task, Update
from nafi.options import number, optional, whole
from nafi.workers import Workers, as_failure

Work = Callable[[str, Task], tuple[Update, float]]
# Does several clients' tasks: (client, task) pairs in, outcomes in the same order out.
Crew = Callable[[Iterator[tuple[str, Task]]], Iterator[Outcome]]


def simulate(
    strategy: Strategy,
    clients: Sequence[str],
    work: Work,
    *,
    workers: int = 1,
    deadline: float | None = None,
    evaluate: Evaluate | None = None,
    checkpoint: Path | str | None = None,
    resume: bool = False,
    acceptance: Acceptance | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
    expire: int | None = EXPIRE,
) -> Run:
    """Run a strategy to its end.

    work: does a client's task; a `Trainer`, as a rule. With several workers it goes to each of
        their processes once, so it must be picklable.
    evaluate: looks at a copy of the global model after each round; its numbers go into the round's
        record
    checkpoint: a file that holds the run after each round; resume: continue it if it exists
    acceptance: which updates are used, and how many a round needs; by default every client must
        deliver one that can be used, or the run ends with a `QuorumError`. Its classes are by
        default those of `work`, if that is a `Trainer`
    workers: processes that train; 1 is this one
    deadline: seconds for a client's task, after which the client has failed and its process is
        replaced. It needs several workers: nothing can stop what this process itself is at
    progress: called with (what is done, steps done, steps in all)
    callbacks: told when a round starts, when it is finished with its record, and when all are
    expire: rounds in a row after which a client that is away, or is asked and does not deliver, is
        forgotten: what the strategy keeps of it is dropped, and it comes back as a new one. None
        for never

    A record has the round, its clients, who was refused and why, bytes down and up, counted from
    the tensors that are sent, seconds, the clients' mean loss, the widths that clients train next,
    and what `evaluate` found.
    """
    names = list(clients)
    whole(1).check(workers, "workers")
    optional(number(above=0)).check(deadline, "deadline")
    if deadline is not None and workers == 1:
        raise InputError(
            "deadline: a client that works in this process cannot be stopped; give workers=2 or "
            "more, or leave deadline out"
        )
    if not names or len(set(names)) < len(names):
        raise InputError(f"clients: found {names!r}, expected names that differ")
    rules = acceptance or Acceptance()
    if rules.classes is None:
        rules = replace(rules, classes=getattr(work, "classes", None))
    with _crew(work, workers, deadline) as crew:
        return conduct(
            strategy,
            lambda: names,
            lambda round: round.finish(crew(round.hand_out())),
            rules,
            evaluate=evaluate,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            resume=resume,
            progress=progress,
            callbacks=callbacks,
            seats=Seats(expire),
            facts=work.facts() if isinstance(work, Trainer) else None,
            sizes=work.sizes() if isinstance(work, Trainer) else None,
        )


@contextmanager
def _crew(work: Work, workers: int, deadline: float | None) -> Iterator[Crew]:
    if workers == 1:
        yield lambda tasks: (_tried(work, client, task) for client, task in tasks)
        return
    with Workers(workers, partial(_do, work), deadline) as pool:
        yield lambda tasks: map(_outcome, pool.results((c, task_to(task)) for c, task in tasks))


def _tried(work: Work, client: str, task: Task) -> Outcome:
    try:
        return work(client, task)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a client that wants to end the process fails alone
        return as_failure(error)


def _do(work: Work, message: tuple[str, bytes]) -> tuple[bytes, float]:
    """A client's task in a worker process."""
    client, content = message
    update, loss = work(client, task_from(content))
    return update_to(update), loss


def _outcome(answer: tuple[bytes, float] | Exception) -> Outcome:
    try:
        if isinstance(answer, Exception):
            raise answer
        content, loss = answer
        return update_from(content), loss
    except Exception as error:
        return error
