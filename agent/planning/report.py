"""`tared plan` as a person reads it: the verdict, the groups that matter, the candidates.

Reads a plan's evidence and nothing else; all its keys are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.planning.figures import (
    Candidate,
    CostScale,
    Evidence,
    Group,
    chosen_candidate,
    noise_share,
    precision_of,
    show_confidence,
    show_digits,
    show_loss,
    show_share,
)

_TELLING = 0.01  # of all noise: an INT8 group that adds less, and needed no repair, is only counted
_MOST_ROWS = 40  # of groups, unless all are asked for
_CONFUSIONS = 3  # pairs told per candidate, the worst


def print_plan(evidence: Evidence, console: Console, all_groups: bool = False) -> None:
    """The verdict in a few rows, the groups by noise, the candidates.

    Of the groups: those that stay float, that were repaired or that add much noise; the others are counted, unless
    `all_groups` is set.
    """
    console.print(Text(evidence["verdict"], style="bold"))
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, fact in _facts(evidence):
        facts.add_row(name, Text(fact, overflow="fold"))
    console.print(facts)
    rows = sorted(evidence["groups"], key=lambda group: -group["sensitivity"])  # stable: ties stay in graph order
    shown = rows if all_groups else [group for group in rows if _matters(evidence, group)][:_MOST_ROWS]
    console.print()
    console.print(_group_table(evidence, shown))
    told = {group["name"] for group in shown}
    for line in _rest(evidence, [group for group in rows if group["name"] not in told]):
        console.print(Text(line))
    if evidence["candidates"]:
        console.print()
        console.print(_candidate_table(evidence))
    for number, candidate in enumerate(evidence["candidates"], start=1):
        for line in _outcome(number, candidate):
            console.print(Text(line))


def _facts(evidence: Evidence) -> Iterator[tuple[str, str]]:
    groups, costs, labels = evidence["groups"], evidence["costs"], evidence["labels"]
    chosen = chosen_candidate(evidence)
    int8 = sum(group["precision"] == "int8" for group in groups)
    yield "INT8", f"{show_share(evidence['int8_macs_share'])} of multiply-accumulates, {int8} of {len(groups)} groups"
    yield "loss", _loss_fact(evidence, chosen)
    yield "latency", _latency_fact(evidence)
    if labels:
        scores = (f"{name} {score:.3f}, float {labels['float'][name]:.3f}" for name, score in labels["plan"].items())
        yield "labels", f"{'; '.join(scores)} ({labels['dataset']})"
    if costs["source"] == "measured":
        yield "costs", f"measured on {costs['builds']} engines, spread {show_share(costs['noise'])}"
    elif costs["source"] == "macs":
        yield "costs", f"estimated from multiply-accumulates: {costs['why']}"
    frames = evidence["frames"]["search"]
    yield "search", f"{evidence['builds']} engines, {frames} frames, {evidence['seconds']:.0f} s"
    if evidence["interrupted"]:
        yield "stopped early", f"by its {evidence['interrupted']}: this is the best of what was tried until then"


def _loss_fact(evidence: Evidence, chosen: Candidate | None) -> str:
    if chosen is None:
        return "0: every layer stays float" if evidence["float_precision"] == "fp32" else "not measured: all is float"
    trial = chosen["trial"]
    if trial is None:
        return f"{show_loss(chosen['predicted_loss'])} predicted, not measured"
    empty = f" and {trial['empty_frames']} empty ones" if trial["empty_frames"] else ""
    sure = "on that stretch of a live camera" if evidence["live"] else f"with {show_confidence(evidence)}"
    bound = f"at most {show_loss(trial['upper'])} {sure}"
    allowed = f"allowed {show_loss(evidence['max_loss'])}"
    known = "" if evidence["held_out"] else " of the calibration's own source"
    return f"{show_loss(trial['loss'])} measured, {bound} ({allowed}), from {trial['frames']} frames{empty}{known}"


def _latency_fact(evidence: Evidence) -> str:
    ms, float_ms = evidence["latency_ms"], evidence["latency_float_ms"]
    if evidence["accepted"] is None and float_ms is not None:
        return f"{show_digits(float_ms)} ms in float"
    if ms is None or float_ms is None:
        return "not measured"
    told = f"{show_digits(ms)} ms, float {show_digits(float_ms)} ms"
    if evidence["faster"]:
        return f"{told}: INT8 is {float_ms / ms:.2f} times as fast"
    return f"{told}: INT8 is not faster on this machine, it takes {ms / float_ms:.2f} times as long"


def _matters(evidence: Evidence, group: Group) -> bool:
    return group["precision"] == "float" or bool(group["repairs"]) or noise_share(evidence, [group]) >= _TELLING


def _group_table(evidence: Evidence, groups: Sequence[Group]) -> Table:
    scale = CostScale(evidence)
    table = Table(box=None, pad_edge=False, title="groups, by the noise they add in INT8", title_justify="left")
    table.add_column("group\n", overflow="fold", min_width=10)
    table.add_column("precision\n")
    table.add_column("why\n", overflow="fold")
    unit = "time, ms" if scale.measured else "cost, % of\nall float,"
    table.add_column(f"{unit}\nINT8 / float", justify="right", no_wrap=True)
    table.add_column("noise\nshare", justify="right", no_wrap=True)
    table.add_column("noise is\n", no_wrap=True)
    for group in groups:
        more = f" +{len(group['layers']) - 1}" if len(group["layers"]) > 1 else ""
        table.add_row(
            Text(group["name"] + more),
            Text(precision_of(group), style="" if group["precision"] == "int8" else "yellow"),
            Text("; ".join([group["why"], *(repair for repair in group["repairs"] if repair not in group["why"])])),
            scale.pair(group),
            show_share(noise_share(evidence, [group])),
            "measured" if group["measured"] else "predicted",
        )
    return table


def _rest(evidence: Evidence, groups: Sequence[Group]) -> Iterator[str]:
    """What the table leaves out, and what noise the plan leaves in."""
    for precision in ("float", "int8"):
        left_out = [group for group in groups if group["precision"] == precision]
        if left_out:
            share = show_share(noise_share(evidence, left_out))
            count = f"and {len(left_out)} more in {precision_of(left_out[0])}"
            yield f"{count}, together {share} of the noise (--all shows them)"
    kept = show_share(noise_share(evidence, [group for group in evidence["groups"] if group["precision"] == "int8"]))
    yield f"The plan keeps {kept} of the noise that INT8 in all groups would add."


def _candidate_table(evidence: Evidence) -> Table:
    scale = CostScale(evidence)
    table = Table(box=None, pad_edge=False, title="candidates", title_justify="left")
    predicted = "predicted\ntime" if scale.measured else "predicted\ncost"
    for name in ("", "INT8 of\nMACs", "floats\n", predicted, "predicted\nloss"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("measured\n(at most)", "frames\n", "ms, INT8\n/ float"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, candidate in enumerate(evidence["candidates"]):
        trial, measured = candidate["trial"], ("-", "-", "-")
        if trial is not None:
            latency = f"{show_digits(trial['latency_ms'])} / {show_digits(trial['latency_float_ms'])}"
            measured = (f"{show_loss(trial['loss'])} ({show_loss(trial['upper'])})", str(trial["frames"]), latency)
        table.add_row(
            str(number + 1),
            show_share(candidate["int8_macs_share"]),
            str(candidate["floats"]),
            scale.show(candidate["time"]),
            show_loss(candidate["predicted_loss"]),
            *measured,
            style="bold" if number == evidence["accepted"] else "",
        )
    return table


def _outcome(number: int, candidate: Candidate) -> Iterator[str]:
    trial = candidate["trial"]
    if trial is None:
        yield f"{number} was not tried"
        return
    yield f"{number} was {'accepted' if trial['accepted'] else 'refused'}: {trial['reason']}"
    for pair in trial["confused"][:_CONFUSIONS]:
        yield f"  it takes '{pair['reference']}' for '{pair['candidate']}' {pair['count']} of {pair['of']} times"
