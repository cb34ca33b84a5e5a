"""Folding batch normalisation keeps the function, and so does putting it back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.graph import attach_batchnorm, check_spec, fold_batchnorm, rebuild
from tests.graph import zoo


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        return model.eval()(*inputs)


# The network and how many of its normalisations follow a layer directly.
NETWORKS = {
    "vgg": 6,
    "unet_bilinear": 18,
    "unet_transposed": 18,
    "resnet_bottleneck": 22,
    "mobilenet": 17,
    "grouped_conv": 4,
    "monai_densenet": 10,
}


@pytest.mark.parametrize(
    "name", [*list(NETWORKS)[:-1], pytest.param("monai_densenet", marks=pytest.mark.slow)]
)
def test_folding_and_attaching_keep_the_function(name: str) -> None:
    model, inputs = zoo.seeded(name)
    spec = nafi.groups(model, inputs, check=False)
    before = outputs(model, inputs)
    folded, folded_spec = fold_batchnorm(model, spec)
    norms = [m for m in folded.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    total = sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert total - len(norms) == NETWORKS[name] == len(spec.batchnorms)
    assert (outputs(folded, inputs) - before).abs().max() < 1e-5 * before.abs().max()
    check_spec(folded, inputs, folded_spec)
    back, back_spec = attach_batchnorm(folded, folded_spec)
    assert (outputs(back, inputs) - before).abs().max() < 1e-5 * before.abs().max()
    check_spec(back, inputs, back_spec)
    assert back_spec.batchnorms == spec.batchnorms
    assert outputs(model, inputs).equal(before)


def test_transposed_convolutions_in_groups_and_missing_pieces() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(6, 8, 2, 2, groups=2, bias=False)
            self.norm = nn.BatchNorm2d(8, affine=False)
            self.linear = nn.Linear(8, 5)
            self.norm1 = nn.BatchNorm1d(5)
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.norm(self.up(x))).mean(dim=(2, 3))
            return self.head(torch.relu(self.norm1(self.linear(x))))

    torch.manual_seed(0)
    model = Net()
    model.train()
    for _ in range(3):  # statistics that are not the initial ones
        model(3 * torch.randn(16, 6, 4, 5) + 1)
    inputs = (torch.randn(4, 6, 4, 5),)
    before = outputs(model, inputs)
    spec = nafi.groups(model, inputs)
    folded, folded_spec = fold_batchnorm(model, spec)
    assert isinstance(folded.up.bias, nn.Parameter)
    assert (outputs(folded, inputs) - before).abs().max() < 1e-5
    check_spec(folded, inputs, folded_spec)
    wide = rebuild(folded, folded_spec, {"linear": 9})
    back, _ = attach_batchnorm(wide, folded_spec.resized({"linear": 9}))
    assert back.norm1.num_features == 9
    assert (outputs(back, inputs) - before).abs().max() < 1e-5


def test_a_norm_that_is_not_the_only_reader_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.pre, self.head = nn.BatchNorm2d(3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            raw = self.conv(self.pre(x))
            return self.head((self.norm(raw) + raw).mean(dim=(2, 3)))

    model = Net()
    spec = nafi.groups(model, (torch.zeros(2, 3, 6, 7),))
    assert spec.batchnorms == ()
    folded, _ = fold_batchnorm(model, spec)
    assert isinstance(folded.norm, nn.BatchNorm2d)
