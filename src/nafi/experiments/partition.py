"""How samples fall to clients.

Hides: the draws. Promises: every sample goes to exactly one client, every client has enough, and
the same generator gives the same partition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nafi.errors import InputError

Index = npt.NDArray[np.intp]

_ATTEMPTS = 1000


def dirichlet_partition(
    labels: npt.NDArray[np.int64],
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    least: int = 10,
) -> list[Index]:
    """Share out each class by Dir(alpha) over the clients.

    A client that holds its part of all samples already gets no more of the class; the draw is
    repeated until every client has at least `least` samples.
    """
    if clients < 1 or len(labels) < clients * least:
        raise InputError(f"{len(labels)} samples are too few for {clients} clients of {least}")
    for _ in range(_ATTEMPTS):
        parts: list[list[Index]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(clients, alpha))
            shares = shares * (sizes < len(labels) / clients)
            if shares.sum() == 0:
                shares = np.ones(clients)
            # Rounded, so that a client without a share gets no sample for want of precision.
            cuts = np.rint(np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(int)
            for pieces, piece in zip(parts, np.split(members, cuts), strict=True):
                pieces.append(piece)
            sizes += [len(pieces[-1]) for pieces in parts]
        if sizes.min() >= least:
            return [np.sort(np.concatenate(pieces)) for pieces in parts]
    raise InputError(
        f"no partition of {len(labels)} samples over {clients} clients with at least {least} each "
        f"was found at alpha {alpha:g}; use fewer clients or a larger alpha"
    )


def class_partition(
    labels: npt.NDArray[np.int64], clients: int, rng: np.random.Generator
) -> list[Index]:
    """Every class goes to one client; each gets as many classes, give or take one."""
    known = np.unique(labels)
    if labels.ndim != 1 or not 1 <= clients <= len(known):
        raise InputError(
            f"clients: found {clients}, expected at most one for each of the {len(known)} classes"
        )
    owned = np.array_split(rng.permutation(known), clients)
    return [np.flatnonzero(np.isin(labels, classes)) for classes in owned]


def quantity_partition(
    count: int, clients: int, alpha: float, rng: np.random.Generator, least: int = 10
) -> list[Index]:
    """Share out samples of one kind: clients get shares of Dir(alpha), and at least `least`."""
    if clients < 1 or count < clients * least:
        raise InputError(f"{count} samples are too few for {clients} clients of {least}")
    shares = rng.dirichlet(np.full(clients, alpha))
    # Drawing until all have enough would take forever with many clients: the rest is shared out.
    sizes = least + np.floor(shares * (count - clients * least)).astype(int)
    sizes[np.argmax(sizes)] += count - sizes.sum()
    return [np.sort(part) for part in np.split(rng.permutation(count), np.cumsum(sizes)[:-1])]


def site_partition(
    sites: Index | None, clients: int, rng: np.random.Generator, least: int = 2
) -> list[Index]:
    """Every client has samples of one site.

    With more clients than sites, the largest part is cut in two until there are enough; which
    samples go to which half is drawn.
    """
    known = np.unique(_known(sites))
    if not 1 <= len(known) <= clients:
        raise InputError(f"clients: found {clients}, but the data come from {len(known)} sites")
    parts = [np.flatnonzero(sites == site) for site in known]
    while len(parts) < clients:
        largest = int(np.argmax([len(part) for part in parts]))
        halves = np.array_split(rng.permutation(parts[largest]), 2)
        parts[largest : largest + 1] = [np.sort(half) for half in halves]
    smallest = min(len(part) for part in parts)
    if smallest < least:
        raise InputError(f"a client would have {smallest} samples; it needs {least} or more")
    return parts


def largest_sites(sites: Index | None, clients: int) -> list[Index]:
    """The sites with the most samples, one for each client; the others are left out."""
    known, counts = np.unique(_known(sites), return_counts=True)
    if not 1 <= clients <= len(known):
        raise InputError(f"clients: found {clients}, but the data come from {len(known)} sites")
    order = np.argsort(-counts, kind="stable")[:clients]
    return [np.flatnonzero(sites == known[place]) for place in order]


def dealt_sites(sites: Index | None, clients: int, rng: np.random.Generator) -> list[Index]:
    """Every site goes to one client as a whole; who has least gets the next one, as drawn."""
    known = rng.permutation(np.unique(_known(sites)))
    if not 1 <= clients <= len(known):
        raise InputError(f"clients: found {clients}, but the data come from {len(known)} sites")
    parts: list[list[Index]] = [[] for _ in range(clients)]
    for site in known:
        least = min(parts, key=lambda part: sum(map(len, part)))
        least.append(np.flatnonzero(sites == site))
    return [np.sort(np.concatenate(part)) for part in parts]


def _known(sites: Index | None) -> Index:
    return np.array([], dtype=np.intp) if sites is None else sites


def hold_back(part: Index, share: float, rng: np.random.Generator) -> tuple[Index, Index]:
    """A client's samples to train on, and a share of them, at least one, held for validation."""
    shuffled = rng.permutation(part)
    cut = max(1, round(share * len(part)))
    return shuffled[cut:], shuffled[:cut]


def class_counts(
    labels: npt.NDArray[np.int64], parts: list[Index], classes: int
) -> npt.NDArray[np.int64]:
    """(S, K) samples per client and class."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
