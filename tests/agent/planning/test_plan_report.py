"""The printed plan has the right figures, and all that matter."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from plan_evidence import by_macs, evidence, group, of_a_job, one_group, unmeasured
from rich.console import Console

from agent.cli.main import main
from agent.cli.plan_print import explain, print_plan
from agent.common.errors import AgentError
from agent.planning.evidence import SCHEMA
from calibrate.plan import PrecisionPlan


def printed(found: dict[str, Any], width: int = 170, all_groups: bool = False) -> str:
    text = io.StringIO()
    print_plan(PrecisionPlan({"head": "why"}, evidence=found), Console(file=text, width=width), all_groups)
    return text.getvalue()


def row(shown: str, *starts: str) -> str:
    """The one line that starts with these words, its runs of spaces as one."""
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    (found,) = [line for line in lines if line.startswith(" ".join(starts))]
    return found


def test_ten_seconds_are_enough() -> None:
    shown = printed(evidence())
    assert shown.splitlines()[0].startswith("INT8 in 5 of 6 groups loses at most 0.0487")
    assert row(shown, "INT8 84") == "INT8 84.0 % of multiply-accumulates, 5 of 6 groups"
    assert row(shown, "loss 0.0") == (
        "loss 0.020 measured, at most 0.049 with 95 % confidence, from 140 frames and 3 empty ones"
    )
    assert row(shown, "loss allowed") == "loss allowed 0.050"
    assert row(shown, "score on labels") == "score on labels map 0.335, float 0.340 (coco.zip)"
    assert row(shown, "costs") == "costs measured on 8 engines, spread 3.0 %"
    assert row(shown, "search") == "search 81 s, 9 engines, 32 frames"
    assert "stopped early" not in shown


def test_the_worst_class_of_pixels_is_named() -> None:
    found = evidence()
    assert "IoU with float" not in printed(found)
    found["candidates"][1]["trial"]["ious"] = {"car": 1.0, "pole": 0.5}
    assert row(printed(found), "IoU") == (
        "IoU with float of all pixels 0.750 in the mean over classes; the worst is 'pole', 0.500"
    )


def test_a_sentence_says_how_much_training_could_win() -> None:
    def said(found: dict[str, Any]) -> str:
        return " ".join(printed(found).split())

    assert said(evidence()).endswith(
        "If head (16.0 % of multiply-accumulates, now float) kept float's answers in INT8, the latency would be 4.00 "
        "instead of 5.30 ms, both predicted. As they are, that plan loses 0.300 on the search frames, and this one "
        "0.015: Q/DQ-aware training would have to win 0.285 of fidelity there. The plan loses 0.020. Of the noise that "
        "its INT8 layers add, stem 50.0 %, mid_1 45.0 %: training would have to win the loss there."
    )
    assert "the cost would be 75.5 % of this plan's, by multiply-accumulates. As they are" in said(by_macs())
    refused = evidence()
    refused["retraining"]["target"].update(to_win=0.0, plan_loss=0.3)
    assert "no more than this one, but it was not certified." in said(refused)
    won = {**evidence(), "retraining": {"loss": 0.0, "noisiest": [], "target": None}}
    assert said(won).endswith(
        "INT8 leaves nothing to win by training: no faster plan was found, and this one lost nothing."
    )
    assert said({**evidence(), "retraining": None}).endswith("No plan was tried that shows what training could win.")


def test_groups_come_by_noise_and_the_quiet_ones_are_counted() -> None:
    shown = printed(evidence())
    assert row(shown, "head") == "head 3 float it adds most of the noise 16.0 % 0.500 1.40 60.0 % measured"
    assert row(shown, "mid_2").endswith("16.0 % 0.500 1.00 1.2 % measured in a block")
    assert "its noise is within the budget; equalised over 16 channels; threshold mse" in row(shown, "stem")
    places = [shown.index(f"\n{name} ") for name in ("head", "stem", "mid_1", "mid_2")]
    assert places == sorted(places)
    assert "tail_1" not in shown
    assert "and 2 more in INT8, together 0.8 % of the noise (--all shows them)" in shown
    assert "The plan keeps 40.0 % of the noise that INT8 in all groups would add." in shown


def test_a_large_network_is_cut_at_forty_rows_unless_all_are_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repaired = [group(f"conv_{number}", 1.0, repairs=["clip"]) for number in range(60)]
    quiet = [group(f"conv_{number}", 1.0) for number in range(60, 105)]
    found = {**evidence(), "schema": SCHEMA, "groups": [*repaired, *quiet], "edges": []}
    (tmp_path / "plan.json").write_text(PrecisionPlan({}, evidence=found).to_json())
    show = ["plan", str(tmp_path / "plan.json"), "--show"]
    assert main(show) == 0
    shown = capsys.readouterr().out
    assert shown.count("\nconv_") == 40
    assert "and 65 more in INT8, together 61.9 % of the noise" in " ".join(shown.split())
    assert main([*show, "--all"]) == 0
    shown = capsys.readouterr().out
    assert (shown.count("\nconv_"), "more in INT8" in shown) == (105, False)


def test_predictions_are_called_predictions() -> None:
    shown = printed(unmeasured())
    assert "measured, at most" not in shown
    assert "labels" not in shown
    assert row(shown, "stopped early").startswith("stopped early by its budget")
    assert row(shown, "head").endswith("60.0 % predicted")


def test_the_plan_of_a_job_is_shown_and_explained_as_any_other() -> None:
    shown = printed(of_a_job())
    assert shown.startswith("A job of the daemon found this plan.")
    assert row(shown, "plan of 4.6").endswith("0.300 fidelity 0.7")
    assert row(shown, "search") == "search 81 s"
    assert explain(of_a_job(), "head").startswith("head stays float: it adds most of the noise.")


def test_costs_by_multiply_accumulates_are_shares_and_no_times() -> None:
    shown = printed(by_macs())
    assert row(shown, "costs") == "costs estimated from multiply-accumulates: the measured times were noise"
    assert row(shown, "head") == "head 3 float it adds most of the noise 16.0 % 7.81 21.9 60.0 % measured"  # of 6.4
    assert row(shown, "plan of 4.6").startswith("plan of 4.6 ms 84.0 % 1 71.9 0.300")
    said = explain(by_macs(), "head")
    assert "It costs 7.81 % in INT8 and 21.9 % in float of what all float costs (estimated from" in said
    assert "ms" not in said


def test_costs_that_noise_hid_are_reported_with_their_reason() -> None:
    found = evidence()
    found["costs"].update(passes=3, builds=24, doubt="2 groups differ by less than the noise, measured 3 times")
    for one in found["groups"][:2]:
        one["timed"] = False
    assert row(printed(found, 250), "costs") == (
        "costs measured on 24 engines, spread 3.0 %, 3 times because of the noise; 2 of 6 groups are within "
        "the noise, and rely on multiply-accumulates: 2 groups differ by less than the noise, measured 3 times"
    )
    assert "(the difference is within the noise, and relies on multiply-accumulates, spread 3.0 %)" in explain(
        found, "stem"
    )
    assert "(measured, spread 3.0 %)" in explain(found, "head")


def test_a_network_without_noise_divides_by_nothing() -> None:
    found = one_group()
    found["groups"][0]["sensitivity"] = 0.0
    assert row(printed(found), "stem").endswith("0.0 % measured in a block")


def test_names_from_a_model_are_no_markup() -> None:
    found = one_group()
    found["groups"][0].update(name="[bold]/conv[0]", why="[red]so")
    assert row(printed(found), "[bold]/conv[0] 1 INT8 [red]so")


def test_a_narrow_terminal_loses_nothing() -> None:
    shown = printed(evidence(), width=80)
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    for part in ("loss 0.020", "at most 0.049", "20.1 / 12.2", "INT8, ms 0.500; float, ms 1.40", "noise is measured"):
        assert part in words
    assert "refused: it confuses classes; it takes 'truck' for 'car' 19 of 60 times" in words


@pytest.mark.parametrize(
    ("share", "shown"), [(0.0, "0.0 %"), (0.0002, "< 0.1 %"), (0.9999, "> 99.9 %"), (1.0, "100.0 %"), (0.123, "12.3 %")]
)
def test_a_share_is_nothing_or_everything_only_if_it_is(share: float, shown: str) -> None:
    found = evidence()
    found["int8_macs_share"] = share
    assert row(printed(found), f"INT8 {shown} of")


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.0, "0 "), (0.00001, "< 0.0001 "), (0.0042, "0.0042 "), (0.25, "0.250 ")]
)
def test_a_small_loss_keeps_its_digits(loss: float, shown: str) -> None:
    found = evidence()
    found["candidates"][1]["trial"]["by_source"]["clip.mp4"]["loss"] = loss
    assert row(printed(found), f"loss {shown}measured")


def test_all_about_a_float_group() -> None:
    assert explain(evidence(), "head").splitlines() == [
        "head stays float: it adds most of the noise.",
        "It is one layer: head; 16.0 % of the model's multiply-accumulates.",
        "It takes 0.500 ms in INT8 and 1.40 ms in float (measured, spread 3.0 %).",
        "Where a neighbour's precision differs, values are converted: "
        "0.250 ms with mid_1, which is INT8; 0.150 ms with mid_2, which is INT8.",
        "Alone in INT8 it adds 0.6 to the output's divergence (measured): 60.0 % of what all groups add, rank 1 of 6.",
        "On its own output, the noise of INT8 is predicted at -1.5 dB relative to the signal.",
        # 0.5 - 1.4 of its own, and both conversions saved
        "In the chosen plan, INT8 for this group alone would take 1.30 ms less, conversions included, "
        "and add 0.6 to a summed divergence of 0.4.",
    ]


def flipped_ms(found: dict[str, Any], name: str) -> float:
    match = re.search(r"alone would take ([\d.]+) ms (less|more)", explain(found, name))
    assert match is not None
    return float(match[1]) * (-1.0 if match[2] == "less" else 1.0)


def plan_ms(found: dict[str, Any]) -> float:
    groups = found["groups"]
    times: float = sum(one["time_int8" if one["precision"] == "int8" else "time_float"] for one in groups)
    changes: float = sum(cost for a, b, cost in found["edges"] if groups[a]["precision"] != groups[b]["precision"])
    return times + changes


@pytest.mark.parametrize("index", range(6))
def test_the_printed_difference_is_that_of_turning_a_group_over(index: int) -> None:
    found = evidence()
    found["edges"] += [[0, 5, 0.3], [index, index, 9.0]]  # a residual around all; and one that never differs
    one = found["groups"][index]
    before, shown = plan_ms(found), flipped_ms(found, one["name"])
    one["precision"] = "float" if one["precision"] == "int8" else "int8"
    assert shown == pytest.approx(plan_ms(found) - before, abs=0.005)


def test_no_difference_is_printed_as_none() -> None:
    found = one_group()
    found["groups"][0].update(time_int8=0.1 + 0.2, time_float=0.3)
    assert "would take as long as now" in explain(found, "stem")


def test_groups_are_found_by_layer_and_by_pattern() -> None:
    assert explain(evidence(), "mid_1b") == explain(evidence(), "mid_1")
    both = explain(evidence(), "mid_*").split("\n\n")
    assert both == [explain(evidence(), "mid_1"), explain(evidence(), "mid_2")]


def test_a_name_with_brackets_is_itself_before_it_is_a_pattern() -> None:
    found = one_group()
    found["groups"][0].update(name="conv[0]", layers=["conv[0]"])
    assert explain(found, "conv[0]").startswith("conv[0] runs in INT8")


def test_an_unknown_group_names_its_neighbours() -> None:
    with pytest.raises(AgentError, match=r"'hed'.*such as head; ") as raised:
        explain(evidence(), "hed")
    assert raised.value.code == "plan.group"
    with pytest.raises(AgentError, match=r"such as stem, mid_1, mid_1b;"):
        explain(evidence(), "*zzz")


def test_the_explanation_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {**evidence(), "schema": SCHEMA}
    found["groups"][0].update(name="conv[0] :smile:", layers=["conv[0] :smile:"])
    (tmp_path / "plan.json").write_text(PrecisionPlan({}, evidence=found).to_json())
    assert main(["plan", str(tmp_path / "plan.json"), "--explain", "conv*"]) == 0
    assert capsys.readouterr().out.split() == explain(found, "conv*").split()


def test_the_plan_of_an_earlier_version_is_shown() -> None:
    """Its candidates have no names, and it does not say who found it."""
    found = evidence()
    del found["by"]
    for candidate in found["candidates"]:
        for key in ("plan", "offered", "outcome"):
            del candidate[key]
    shown = printed({**found, "schema": 3})
    assert row(shown, "plan 2").endswith("accepted: its loss is at most 0.0487")
