"""Permuted copies of a network fuse back into it, for every architecture of the zoo."""

from __future__ import annotations

import warnings

import pytest
import torch

import nafi
from nafi.fusion import FusionWarning
from nafi.graph import SpecWarning, permute
from nafi.graph.permute import random_permutations
from tests.fusion.networks import gap
from tests.graph import zoo


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.tested())
def test_permuted_copies_fuse_back(name: str) -> None:
    model, inputs = zoo.seeded(name)
    model = model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)
        warnings.simplefilter("ignore", FusionWarning)  # groups whose width the code fixes
        spec = zoo.traced(name)
        generator = torch.Generator().manual_seed(1)
        copies = [permute(model, spec, random_permutations(spec, generator)) for _ in range(3)]
        for method, options in [("nafi", {"prior_ratio": 100.0}), ("ot", {}), ("rebasin", {})]:
            found = nafi.fuse(copies, inputs, method=method, spec=spec, **options)
            assert found.widths == spec.widths, method
            assert gap(found.model, model, inputs) < 1e-4, method
            for group in spec.groups:
                assert (found.owners(group) == len(copies)).all(), (method, group)
