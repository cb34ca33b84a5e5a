"""Tables and pages from records."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nafi.errors import InputError
from nafi.experiments import read_records, report_of
from nafi.reports import (
    demo_table,
    score_table,
    sections,
    write_demo_page,
    write_fusion_page,
    write_markdown,
    write_page,
)
from nafi.reports.fusion import _score_bars
from nafi.reports.records import Paper, Summary, TextTable, compared_table, markdown, width_table
from nafi.reports.views import USUAL, VIEWS, Material
from tests.pages import Page


def record(
    method: str, trial: int, test: float, experiment: str = "mnist-nets", **more: Any
) -> dict[str, Any]:
    return {
        "experiment": experiment,
        "trial": trial,
        "clients": 15,
        "hidden": 1,
        "method": method,
        "chosen": {},
        "test": test,
        "test_picked": test + 1,
        "widths": [200 + 2 * trial],
        "local_width": 100,
        "config": {"name": experiment, "title": "A & B"},
        "versions": {"nafi": "0"},
        **more,
    }


NETS = [
    record("ensemble", 0, 99.0, widths=[]),
    record("nafi", 0, 90.0),
    record("nafi", 1, 94.0),
    record("pfnm", 0, 91.0),
    record("pfnm", 1, 91.0),
]


def test_mean_and_spread() -> None:
    summary = Summary.of([90.0, 94.0])
    assert str(summary) == "92.00 ± 2.83"
    assert str(Summary.of([90.0])) == "90.00"


def test_the_best_of_a_column_is_a_single_model() -> None:
    table = score_table(NETS, "t")
    assert table.headings == ("method", "15 clients")
    assert table.rows == (
        ("pfnm", "91.00 ± 0.00"),
        ("nafi", "92.00 ± 2.83"),
        ("ensemble", "99.00"),
    )
    assert table.best == {(1, 1)}
    assert table.note == "1 to 2 trials"
    assert "| nafi | **92.00 ± 2.83** |" in markdown(table)


def test_widths_and_the_paper() -> None:
    assert width_table(NETS).rows == (("pfnm", "201"), ("nafi", "201"))
    beside = {row[0]: row[1] for row in compared_table(NETS, paper("mnist-nets")).rows}
    assert beside["nafi"] == "92.0 (87.3)"
    assert "ot" not in beside


def paper(name: str) -> Paper:
    """The paper's figures as an experiment that comes with nafi has them."""
    return Paper.of(report_of({"config": {"name": name}})["paper"])


def test_the_papers_figures() -> None:
    assert paper("mnist-layers").figures[10, 3]["nafi"] == (72.04, 4.75)
    assert paper("cifar10").figures[20, 1]["fedma"] == (42.61, 2.07)
    assert paper("carvana").figures[8, 1]["nafi"] == (96.47, 0.76)
    assert sorted(paper("mnist-nets").figures) == [(15, 1), (20, 1), (25, 1), (30, 1)]


@pytest.mark.parametrize(("samples", "noted"), [(None, False), (900, True), (60000, False)])
def test_fewer_samples_than_the_paper_had_are_noted(samples: int | None, noted: bool) -> None:
    records = [record("nafi", 0, 90.0, config={"samples": samples})]
    note = compared_table(records, paper("mnist-nets")).note
    assert ("ours trains on 900 samples" in note) == noted


def test_a_paper_on_other_data_says_so_instead_of_how_it_chose() -> None:
    records = [record("fedma", 0, 40.0, clients=20)]
    table = compared_table(records, paper("shakespeare-rounds"))
    assert table.rows == (("fedma", "40.0 (49.1)"),)
    assert "another data set" in table.note
    assert "penalty" not in table.note


def test_all_that_are_equally_good_are_bold() -> None:
    """Equal as far as digits are shown; the ensemble is no single model."""
    records = [
        record("fedavg", 0, 90.0),
        record("pfnm", 0, 91.004),
        record("nafi", 0, 91.0),
        record("ensemble", 0, 91.0),
    ]
    table = score_table(records, "t")
    assert [row[0] for row in table.rows] == ["fedavg", "pfnm", "nafi", "ensemble"]
    assert table.best == {(1, 1), (2, 1)}


def test_a_report_of_a_profile_cites_its_command() -> None:
    config = {"name": "mnist-nets", "profile": "quick", "title": "Q"}
    records = [record("nafi", 0, 90.0, experiment="mnist-nets-quick", config=config)]
    (section,) = sections({"mnist-nets-quick": records}, report_of)
    assert section.command == "nafi run mnist-nets --profile quick --trials 1"


def test_a_report_of_a_users_own_experiment_cites_its_file() -> None:
    plain = record("nafi", 0, 90.0, experiment="mine")
    config = {"name": "mine", "profile": "quick", "title": "Q"}
    quick = record("nafi", 0, 90.0, experiment="mine-quick", config=config)
    found = sections({"mine": [plain], "mine-quick": [quick]}, report_of)
    assert [section.command for section in found] == [
        "nafi run mine.toml --trials 1",
        "nafi run mine.toml --profile quick --trials 1",
    ]


def test_an_experiment_of_the_users_names_its_own_views() -> None:
    own = {"views": ["widths", "score"], "titles": {"score": "Mine"}}
    records = [{**r, "experiment": "mine", "report": own} for r in NETS]
    (section,) = sections({"mine": records}, report_of)
    assert [table.title for table in section.tables] == ["Widths of the fused networks", "Mine"]
    with pytest.raises(InputError, match="there is no view 'scores'; known: attacks, barrier"):
        sections({"mine": [{**NETS[0], "report": {"views": ["scores"]}}]}, report_of)


def test_it_is_told_which_experiment_is_drawn() -> None:
    told: list[tuple[str, int, int]] = []
    few = {"b": NETS[:1], "none": [], "a": NETS[:1]}
    sections(few, report_of, progress=lambda *step: told.append(step))
    assert told == [("drawing a", 0, 2), ("drawing b", 1, 2)]


def test_any_view_can_have_another_title() -> None:
    for name, records in runs().items():
        for view in VIEWS:
            report = {"views": [view], "titles": {view: "Another title"}}
            (section,) = sections({name: [{**r, "report": report} for r in records]})
            assert {table.title for table in section.tables} <= {"Another title"}
            if not section.tables:
                assert all("Another title" in figure for figure in section.figures)


def test_leads_are_differences_within_a_trial() -> None:
    """Trials differ by 20 points, the lead by 2: its spread is that of the lead."""
    runs = [
        record("pfnm", 0, 60.0),
        record("pfnm", 1, 80.0),
        record("pfnm", 2, 10.0),  # a trial that nafi does not have
        record("nafi", 0, 61.0),
        record("nafi", 1, 83.0),
        record("ot", 0, 65.0),
    ]
    leads = [("nafi", "pfnm"), ("ot", "nafi"), ("nafi", "fedavg")]
    (table, _) = VIEWS["leads"](Material(runs, leads=leads))
    assert isinstance(table, TextTable)
    assert table.headings == ("lead, in points", "15 clients")
    assert table.rows == (("nafi over pfnm", "+2.0 ± 1.4"), ("ot over nafi", "+4.0"))
    assert table.note == "differences within each trial, 1 to 2 trials"


def test_leads_after_two_rounds_and_with_the_solved_head() -> None:
    def in_rounds(method: str, scores: list[float], solved: list[float]) -> dict[str, Any]:
        rounds = [
            {"test": t, "head_test": h, "validation": t}
            for t, h in zip(scores, solved, strict=True)
        ]
        config = {"name": "r", "title": "R", "rounds": 3}
        more = {"rounds": rounds, "head_test": solved[-1], "config": config}
        return record(method, 0, scores[-1], **more)

    runs = [
        in_rounds("nafi", [1.0, 5.0, 9.0], [2.0, 7.0, 9.5]),
        in_rounds("fedavg", [3.0, 4.0, 8.0], [3.0, 9.0, 10.0]),
    ]
    tables = list(VIEWS["leads"](Material(runs, leads=[("nafi", "fedavg")])))
    assert {table.title: table.rows[0][1] for table in tables if isinstance(table, TextTable)} == {
        "Leads after the last round": "+1.0",
        "Leads after the last round, last layer solved": "-0.5",
        "Leads after two rounds": "+1.0",
        "Leads after two rounds, last layer solved": "-2.0",
    }


def test_two_rounds_are_counted_in_epochs() -> None:
    """Rounds of three epochs: a method may have six in one, or two in each of many."""

    def in_rounds(method: str, scores: list[float], **chosen: Any) -> dict[str, Any]:
        rounds = [{"test": score, "validation": score} for score in scores]
        config = {"name": "r", "title": "R", "rounds": 5, "training": {"epochs": 3}}
        return record(method, 0, scores[-1], rounds=rounds, config=config, chosen=chosen)

    runs = [
        in_rounds("fedavg", [1.0, 2.0, 3.0, 4.0, 5.0]),
        in_rounds("nafi-refit-early", [6.0], epochs=6, rounds=1),
        in_rounds("nafi-refit", [7.0], epochs=15, rounds=1),  # too late
        in_rounds("match-refit", [8.0], rounds=1),  # too early
        in_rounds("ot", [9.0, 9.0], epochs=0),
        in_rounds("fedma", [10.0, 20.0, 30.0, 40.0], epochs=2, rounds=4),
        record("local", 0, 9.0, config={"name": "r", "rounds": 5, "training": {"epochs": 3}}),
    ]
    (table,) = VIEWS["early"](Material(runs))
    assert isinstance(table, TextTable)
    assert table.rows == (("fedavg", "2.00"), ("fedma", "30.00"), ("nafi-refit-early", "6.00"))


def test_the_barrier_is_the_loss_above_the_clients_of_the_trial() -> None:
    runs = [
        record("local", 0, 50.0, test_loss=1.0),
        record("local", 1, 50.0, test_loss=2.0),
        record("nafi", 0, 50.0, test_loss=1.25),
        record("nafi", 1, 50.0, test_loss=2.25),
        record("nafi", 2, 50.0, test_loss=9.0),  # of clients that nobody knows
    ]
    (table,) = VIEWS["barrier"](Material(runs))
    assert isinstance(table, TextTable)
    assert table.rows == (("nafi", "0.25 ± 0.00"),)


RESULTS = Path(__file__).parents[1] / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda file: file.stem)
def test_any_view_goes_with_any_experiment(file: Path) -> None:
    material = Material(read_records(file))
    made = {name: list(view(material)) for name, view in VIEWS.items()}
    assert made["score"]
    assert bool(made["penalty"]) == ("sensitivity" in file.stem)
    # For layers of one width: of the MLPs.
    assert bool(made["size"]) == file.stem.startswith(("mnist", "oneshot-deep", "digits"))


def test_views_leave_out_what_they_are_not_made_for() -> None:
    """Methods without widths, without a penalty, or with one of several."""
    size = list(VIEWS["size"](Material([*NETS, record("fedavg", 0, 80.0, widths=[])])))
    assert isinstance(size[0], TextTable)
    assert size[0].headings == ("clients", "pfnm", "nafi")
    records = [*runs()["mnist-sensitivity"], record("fedavg", 0, 80.0)]
    penalty = list(VIEWS["penalty"](Material(records)))
    assert isinstance(penalty[0], TextTable)
    assert penalty[0].headings == ("clients", "1e-08", "0.1", "1")
    other = record("pfnm", 0, 80.0, chosen={"penalty": 0.1})
    assert not list(VIEWS["penalty"](Material([*records, other])))


def test_an_experiment_that_says_nothing_gets_the_usual_views() -> None:
    assert set(USUAL) <= set(VIEWS)
    (section,) = sections({"mine": [record("nafi", 0, 90.0, experiment="mine")]}, report_of)
    assert [table.title for table in section.tables] == [
        "Test accuracy, chosen on validation data",
        "Widths of the fused networks",
        "test-picked: chosen on test data, not comparable",
    ]
    assert section.figures == ()


def runs() -> dict[str, list[dict[str, Any]]]:
    """Records of all kinds of experiments."""
    size = [
        record(m, t, 90.0, experiment="mnist-size", clients=c, widths=[c * w])
        for m, w in [("nafi", 20), ("pfnm", 50)]
        for t in range(2)
        for c in (5, 10)
    ]
    sensitivity = [
        record(
            f"nafi, penalty {p:g}", 0, 90 - p, experiment="mnist-sensitivity", chosen={"penalty": p}
        )
        for p in (1e-8, 0.1, 1.0)
    ]
    width = [
        record(m, 0, a, experiment="mnist-width", widths=w)
        for m, a, w in [
            ("nafi, 1.0x", 85, [100]),
            ("nafi, 2.0x", 90, [200]),
            ("pfnm, 2.0x", 89, [200]),
            ("ensemble", 91, []),
            ("all neurons", 92, [1500]),
        ]
    ]
    curves = {"fedavg": [10, 20, 15], "nafi-layerwise": [5, 25, 30], "nafi-average": [5, 20, 25]}
    rounds = [
        record(
            method,
            trial,
            values[-1] + trial,
            experiment="cifar10-quick",
            clients=clients,
            config={"name": "cifar10", "title": "In rounds", "profile": "quick"},
            rounds=[
                {"test": v + trial, "validation": v, "bytes_down": 2_000_000, "bytes_up": 10**6}
                for v in values
            ],
        )
        for method, values in curves.items()
        for trial in range(2)
        for clients in (5, 10, 15)
    ]
    return {
        "cifar10-quick": rounds,
        "mnist-nets": NETS,
        "mnist-size": size,
        "mnist-sensitivity": sensitivity,
        "mnist-width": width,
    }


def test_a_page_is_whole(tmp_path: Path) -> None:
    found = sections(runs(), report_of)
    write_page(tmp_path / "r.html", found)
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert page.tags["section"] == 5
    assert page.tags["svg"] == 4
    assert page.tags["table"] == sum(len(section.tables) for section in found)
    assert page.fetched == []
    assert "A &amp; B" in text
    assert '<td data-label="15 clients" class="best">92.00 ± 2.83</td>' in text
    size = next(s for s in found if s.command.startswith("nafi run mnist-size"))
    assert size.command == "nafi run mnist-size --trials 2"
    assert size.tables[0].rows[0] == (
        "5",
        f"{math.log(0.5):.2f} ± 0.00",
        f"{math.log(0.2):.2f} ± 0.00",
    )


def test_attacks_are_not_compared_to_the_paper() -> None:
    plain, flip = (record(m, 0, 92.0, experiment="mnist-poison") for m in ("nafi", "nafi-flip"))
    records = [plain, {**flip, "test": 82.0, "attack": "flip"}]
    (found,) = sections({"mnist-poison": records}, report_of)
    assert [table.rows for table in found.tables] == [(("nafi", "92.00"), ("nafi-flip", "82.00"))]


def test_what_attackers_do_is_told_by_attack() -> None:
    def run(trial: int, test: float, recalls: list[float], attack: str = "") -> dict[str, Any]:
        name = f"fedavg, screened under {attack}" if attack else "fedavg, screened"
        more = {"attack": attack} if attack else {}
        measured = {"recalls": recalls, "target": trial, "backdoor": 5.0 + trial}
        return record(name, trial, test, experiment="digits-attacks", **more, **measured)

    records = [
        run(0, 90.0, [90.0, 80.0]),
        run(1, 92.0, [90.0, 90.0]),
        run(0, 80.0, [50.0, 90.0], "erase-class"),
        run(1, 84.0, [80.0, 88.0], "erase-class"),
    ]
    (found,) = sections({"digits-attacks": records}, report_of)
    scores, lost, wanted = found.tables
    assert scores.headings == lost.headings == ("method", "nobody", "erase-class")
    assert scores.rows == (("fedavg, screened", "91.0 ± 1.4", "82.0 ± 2.8"),)
    assert lost.rows == (("fedavg, screened", "0.0", "25.0"),)
    assert wanted.headings[2] == "recall of the target class, erase-class"
    assert wanted.rows == (("fedavg, screened", "90.0", "69.0 ± 26.9", "5.5 ± 0.7"),)


def test_rounds_are_told_apart_from_the_last_one() -> None:
    section = sections({"cifar10-quick": runs()["cifar10-quick"]}, report_of)[0]
    assert section.command == "nafi run cifar10 --profile quick --trials 2"
    tables = {table.title: {row[0]: row[1] for row in table.rows} for table in section.tables}
    last = tables["Test accuracy after the last round"]
    assert last["fedavg"] == "15.50 ± 0.71"
    best = tables["Test accuracy of the round that is best on validation data"]
    assert best["fedavg"] == "20.50 ± 0.71"
    sent = tables["Megabytes down / up, all rounds and clients"]
    assert sent["nafi-average"] == "6.0 / 3.0"
    beside = tables["Ours, and the paper's in brackets"]
    assert beside["nafi-layerwise"] == "30.5 (52.6)"
    (figure,) = section.figures
    for text in ("5 clients", "15 clients", "round"):
        assert f"<!-- {text} -->" in figure  # matplotlib's own note of what it draws


def test_one_shot_among_rounds_has_no_curve_and_is_not_the_papers() -> None:
    records = runs()["cifar10-quick"]
    shot = [
        {**r, "method": "nafi-oneshot", "rounds": r["rounds"][:1]}
        for r in records
        if r["method"] == "nafi-average"
    ]
    both = [{**r, "config": {**r["config"], "rounds": 3}} for r in [*records, *shot]]
    section = sections({"cifar10-quick": both}, report_of)[0]
    having = {t.title for t in section.tables if "nafi-oneshot" in {row[0] for row in t.rows}}
    assert "Test accuracy after the last round" in having
    assert not {title for title in having if "best" in title or "paper" in title}
    assert "nafi-oneshot" not in section.figures[0]
    assert "nafi-average" in section.figures[0]


def test_every_site_has_a_column_and_the_worst_of_each_trial_the_last() -> None:
    scores = {
        ("fedavg", 0): {"large": 90.0, "odd": 40.0},
        ("fedavg", 1): {"large": 50.0, "odd": 80.0},
        ("nafi-average", 0): {"large": 80.0, "odd": 60.0},
        ("nafi-average", 1): {"large": 80.0, "odd": 64.0},
    }
    records = [record(m, t, 70.0, sites=s, metric="test dice") for (m, t), s in scores.items()]
    (table,) = VIEWS["sites"](Material([*records, record("nafi", 0, 99.0)]))
    assert isinstance(table, TextTable)
    assert table.title == "Test dice of each lab, 15 clients"
    assert table.headings == ("method", "large", "odd", "worst lab")
    # Of fedavg another lab is worst in each trial: 40 and 50, not the lower of both means.
    assert [[text.split(" ")[0] for text in row] for row in table.rows] == [
        ["fedavg", "70.00", "60.00", "45.00"],
        ["nafi-average", "80.00", "62.00", "62.00"],
    ]
    assert table.best == {(1, 1), (1, 2), (1, 3)}
    assert table.note == "2 trials"
    others = [{**r, "clients": 7} for r in records]
    tables = list(VIEWS["sites"](Material([*records, *others])))
    assert [t.title.split(", ")[1] for t in tables if isinstance(t, TextTable)] == [
        "7 clients",
        "15 clients",
    ]
    assert not list(VIEWS["sites"](Material(NETS)))


def test_masks_stand_side_by_side() -> None:
    mask = np.zeros((6, 10), dtype=np.uint8)
    mask[2:4, 3:7] = 1
    bits = base64.b64encode(np.packbits(mask).tobytes()).decode()
    records = [
        record(
            method,
            0,
            90.0,
            clients=8,
            experiment="carvana-quick",
            config={"name": "carvana", "title": "Cars", "profile": "quick"},
            metric="test dice",
            pictures=[{"sample": s, "shape": [6, 10], "bits": bits} for s in (3, 7)],
            rounds=[{"test": 90.0, "validation": 91.0, "bytes_down": 1, "bytes_up": 1}],
        )
        for method in ("fedavg", "nafi-layerwise")
    ]
    asked: list[int] = []

    def photos(sample: int, settings: Any) -> Any:
        asked.append(sample)
        return np.full((6, 10, 3), 200, dtype=np.uint8), mask

    for known, columns in [(None, 2), (photos, 4)]:
        (section,) = sections({"carvana-quick": records}, report_of, known)
        assert section.tables[0].title == "Test dice after the last round"
        beside = {row[0]: row[1] for row in section.tables[1].rows}
        assert beside["nafi-layerwise"] == "90.0 (96.5)"
        curves, pictures = section.figures
        assert "test dice" in curves
        assert pictures.count("data:image/png") == 2 * columns
    assert asked == [3, 7]


def test_markdown_goes_between_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "results.md"
    file.write_text("before\n<!-- generated: begin -->\nold\n<!-- generated: end -->\nafter\n")
    for _ in range(2):
        write_markdown(file, sections({"mnist-nets": NETS}, report_of))
        text = file.read_text()
        assert text.startswith("before\n<!-- generated: begin -->\n")
        assert text.endswith("<!-- generated: end -->\nafter\n")
        assert "old" not in text
        assert text.count("| nafi | **92.00 ± 2.83** |") == 1
    file.write_text("no marks")
    with pytest.raises(InputError, match="needs the lines"):
        write_markdown(file, sections({"mnist-nets": NETS}, report_of))


def scored(clients: list[float | None], ensemble: float | None, fused: float) -> dict[str, Any]:
    entries = [{"name": f"client <{s}>", "score": score} for s, score in enumerate(clients)]
    return {"clients": entries, "ensemble": ensemble, "fused": fused}


@pytest.mark.parametrize(
    ("scores", "bars", "best"),
    [
        (scored([20.0, 40.0], 30.0, 50.0), [(0, 40), (0, 80), (0, 60), (0, 100)], 80),
        (scored([-4.0, -2.0], None, -1.0), [(0, 100), (50, 50), (75, 25)], 50),
        (scored([-1.0, 3.0], None, 1.0), [(0, 25), (25, 75), (25, 25)], 100),
        (scored([None, 2.0], None, 2.0), [(0, 0), (0, 100), (0, 100)], 100),
        (scored([0.0, 0.0], None, 0.0), [(0, 0)] * 3, 0),
    ],
)
def test_bars_of_scores_start_at_zero(
    scores: dict[str, Any], bars: list[tuple[float, float]], best: float
) -> None:
    drawn = _score_bars(scores)
    assert [(bar["start"], bar["size"]) for bar in drawn] == bars
    assert {bar["best"] for bar in drawn} == {best}


FIT = {"ridge": 0.01, "before": 0.5, "after": 0.125, "inputs": 27, "samples": 800}


def fusion_page(path: Path) -> str:
    """A page with all that it can show."""
    write_fusion_page(
        path,
        [{"group": "conv", "local": [4, 4], "width": 6, "shared": [4, 2]}],
        "2 models fused by nafi",
        "One network of 2 checkpoints.",
        {"seconds": "1.0"},
        verdict={"tone": "bad", "text": "Worse than a client.", "advice": ("try <width>",)},
        scores=scored([0.2, 0.5], 0.4, 0.3),
        agreement={**scored([0.5, 0.75], None, 0.875), "of": "classes", "inputs": 64},
        fits={"conv.weight": FIT, "head.weight": {**FIT, "before": 3.0}},
        kept={"position": "no product", "token": "no product", "scale": "nobody reads it"},
    )
    return path.read_text()


def test_a_page_of_a_fusion_shows_scores_and_refits(tmp_path: Path) -> None:
    text = fusion_page(tmp_path / "page.html")
    page = Page(text)
    assert page.tags["svg"] == 4 + 3 + 1 + 2  # scores, agreement, groups, refitted weights
    assert page.tags["td"] == 7 + 2 * 7
    assert page.fetched == []
    parts = ["One network of 2", "Worse than a client.", "<h2>Scores", "<svg", "<table"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)  # what it is, the score, the picture, then tables
    assert '<dt>no product</dt><dd class="names">position, token</dd>' in text
    assert "client &lt;0&gt;: 0.2" in text
    assert "<li>try &lt;width&gt;</li>" in text
    assert '<rect class="before" x="0" y="0" width="50.0"' in text
    assert '<rect class="after" x="0" y="5" width="12.5"' in text
    assert '<rect class="before" x="0" y="0" width="100.0"' in text  # as far as there is room


def demo_row(method: str, mean: float, **more: Any) -> dict[str, Any]:
    """A row of the demonstration at the size of one client."""
    usual = {"neurons": 100.0, "parameters": 6310.0, "size": 1.0, "missing": ""}
    accuracy = {"mean": mean, "spread": 1.25}
    return {"method": method, "accuracy": accuracy, "without_probe": None, "uses_probe": True} | {
        **usual,
        **more,
    }


FOUND = {
    "references": [
        demo_row("one client, mean", 70.0, uses_probe=False),
        demo_row("one client, best", 80.0, uses_probe=False),
        demo_row("ensemble of 2", 95.0, uses_probe=False, size=2.0),
    ],
    "methods": [
        demo_row("nafi", 92.0, without_probe={"mean": 81.0, "spread": None}),
        demo_row("ot", 0.0, accuracy=None, missing="needs POT: pip install 'nafi[ot]'"),
        demo_row("fedavg", 10.0, without_probe={"mean": 10.0, "spread": 2.0}, uses_probe=False),
        demo_row("stack", 93.0),
    ],
    "curves": {"nafi": [[1.0, 92.0], [2.0, 94.0]], "stack": [[0.5, 90.0], [1.0, 93.0]]},
    "local": [[60.0, 80.0], [62.0, 78.0]],
    "counts": [[10, 0, 5], [0, 12, 3]],
    "trials": 3,
    "tested": 449,
    "hidden": [50, 50],
    "probe": 64,
}


def demo_page(path: Path) -> str:
    write_demo_page(path, FOUND, "nafi demo")
    return path.read_text()


def test_the_demo_has_a_row_for_what_could_not_run(tmp_path: Path) -> None:
    rows = {row[0]: row[1:3] for row in demo_table(FOUND).rows}
    assert rows["nafi"] == ("92.0 ± 1.2", "81.0")
    assert rows["ot"] == ("not installed", "")
    assert rows["stack"] == ("93.0 ± 1.2", "needs one")
    assert rows["one client, best"] == ("80.0 ± 1.2", "")
    page = demo_page(tmp_path / "demo.html")
    assert "ot: needs POT: pip install &#39;nafi[ot]&#39;" in page
    assert "92.0% of the test digits" in page
    assert "<!-- fedavg 10.0 ↓   -->" in page
    assert "The best at this size is stack: 93.0%." in page
    (bold,) = {place for place, _ in demo_table(FOUND).best}
    assert demo_table(FOUND).rows[bold][0] == "stack"
