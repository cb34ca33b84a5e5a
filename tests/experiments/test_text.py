"""Plays as data, and the networks that read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nafi.errors import InputError
from nafi.experiments import text
from nafi.experiments.entries import mean_loss, token_accuracy
from nafi.experiments.partition import dealt_sites, largest_sites
from nafi.experiments.problems import token_loss
from nafi.experiments.sequences import GPT, CharacterLSTM, ViT, transformer_widths
from nafi.experiments.trials import TrialSettings, load_trial
from nafi.federated import Samples
from nafi.graph import groups

LONG = "abcdefghij" * 90


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Romeo speaks twice, Juliet once and more, a citizen hardly at all."""
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    content = f"Romeo:\n{LONG}\n\nJuliet:\n{LONG}{LONG}\n\nCitizen:\nAye.\n\nRomeo:\nO: {LONG}"
    (folder / "input.txt").write_text(content, encoding="utf-8")
    monkeypatch.setenv("NAFI_DATA", str(tmp_path))
    text.roles.cache_clear()
    yield content
    text.roles.cache_clear()


def spelled(numbers: torch.Tensor) -> str:
    return "".join(text.CHARACTERS[n] for n in numbers.tolist())


@pytest.mark.usefixtures("play")
def test_roles_are_what_somebody_says_in_all_speeches_who_says_most_first() -> None:
    romeo, juliet = text.roles()
    assert (romeo.name, juliet.name) == ("Romeo", "Juliet")
    assert spelled(romeo.text) == f"{LONG}\nO: {LONG}\n"
    train, test = juliet.parts
    assert spelled(torch.cat([train, test])) == f"{LONG}{LONG}\n"
    assert len(test) == round(0.1 * len(juliet.text))


@pytest.mark.usefixtures("play")
@pytest.mark.parametrize("load", [text.last_characters, text.all_characters])
def test_windows_stay_within_a_role_and_a_part(load: object) -> None:
    data = load()  # type: ignore[operator]
    for samples, sites, part in ((data.train, data.sites, 0), (data.test, data.test_sites, 1)):
        wholes = [spelled(role.parts[part]) for role in text.roles()]
        for window, label, site in zip(samples.inputs, samples.labels, sites, strict=True):
            following = label[None] if label.ndim == 0 else label[-1:]
            assert spelled(window) + spelled(following) in wholes[site]
    if data.train.labels.ndim == 2:
        assert torch.equal(data.train.inputs[:, 1:], data.train.labels[:, :-1])


def test_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("Romeo:\nÀ moi\n\nAll:\nO", "utf-8")
    monkeypatch.setenv("NAFI_DATA", str(tmp_path))
    text.roles.cache_clear()
    with pytest.raises(InputError, match=r"another text: unknown characters \['À'\]"):
        text.roles()
    monkeypatch.delenv("NAFI_DATA")
    with pytest.raises(InputError, match="set NAFI_DATA=DIR"):
        text.roles()


def test_clients_are_the_largest_sites_or_get_sites_as_a_whole() -> None:
    sites = np.repeat(np.arange(5), [3, 9, 4, 8, 6])
    parts = largest_sites(sites, 2)
    assert [set(sites[part]) for part in parts] == [{1}, {3}]
    dealt = dealt_sites(sites, 2, np.random.default_rng(0))
    assert sorted(np.concatenate(dealt)) == list(range(30))
    assert not set(sites[dealt[0]]) & set(sites[dealt[1]])
    with pytest.raises(InputError, match="come from 5 sites"):
        largest_sites(sites, 6)


@pytest.mark.usefixtures("play")
def test_models_are_tested_on_the_roles_of_clients_and_the_same_data_is_held_back_once() -> None:
    settings = {"data": "shakespeare", "seed": 0, "alpha": 0.5, "validation": 0.2}
    trial = load_trial(TrialSettings(clients=1, **settings))  # type: ignore[arg-type]
    assert list(trial.test_by_site) == ["Romeo"]
    assert len(trial.test_by_site["Romeo"]) == len(trial.test)
    same = load_trial(TrialSettings(clients=2, partition="same", **settings))  # type: ignore[arg-type]
    first, second = same.data.values()
    assert torch.equal(first.inputs, second.inputs)
    assert len(first) + len(same.validation) == len(text.last_characters().train)


def test_scores_and_losses_count_every_place() -> None:
    """A network that always says the first of three classes, twice as likely as the others."""

    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([2.0, 1.0, 1.0]).log().expand(*x.shape, 3)

    labels = torch.tensor([[0, 0, 1], [2, 0, 1]])
    samples = Samples(torch.zeros(2, 3, dtype=torch.long), labels)
    assert token_accuracy(Same(), samples) == pytest.approx(50.0)
    wanted = -(3 * np.log(0.5) + 3 * np.log(0.25)) / 6
    assert mean_loss(Same(), samples, token_loss) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("build", "widths", "inputs"),
    [
        (CharacterLSTM, [3, 5], torch.zeros(2, text.LENGTH, dtype=torch.long)),
        (GPT, transformer_widths(8, 2, 2), torch.zeros(2, text.LENGTH, dtype=torch.long)),
        (ViT, [6, 2, 3, 4, 7], torch.zeros(2, 3, 32, 32)),
    ],
)
def test_widths_are_those_of_the_groups(build: type, widths: list[int], inputs: object) -> None:
    torch.manual_seed(0)
    spec = groups(build(widths), (inputs,))
    assert list(spec.widths.values()) == widths
