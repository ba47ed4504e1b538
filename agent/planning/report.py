"""Show a plan's evidence to people: `print_plan` as tables, `explain` one group in sentences.

The figures come first, in the digits and units that table, text and chart share.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.common.errors import AgentError
from agent.common.html.pages import show_share

Evidence = Mapping[str, Any]  # a plan's, as JSON holds it
Group = Mapping[str, Any]
Candidate = Mapping[str, Any]

SCHEMA = 3  # version of the evidence
_LISTED = 0.01  # share of all noise: an INT8 group that adds less, and needed no repair, is only counted
_MOST_ROWS = 40  # groups in the table, unless all are requested
_CONFUSIONS = 3  # pairs listed per candidate, the worst
_NOISE_MAKERS = 3  # groups named in a sentence
_ROUNDING = 1e-9  # share of the all-float time: the error of a sum of differences


class CostScale:
    """Show the costs of plans and groups: in ms if they were measured, else in % of what all float costs.

    A plan's time includes `costs.fixed`, which no plan changes; a group's and a boundary's are theirs alone.
    """

    def __init__(self, evidence: Evidence) -> None:
        costs = evidence["costs"]
        self.measured: bool = costs["source"] == "measured"
        self.unit = "ms" if self.measured else "%"
        self.all_float: float = costs["fixed"] + sum(group["time_float"] for group in evidence["groups"])
        self._factor = 1.0 if self.measured else 100.0 / (self.all_float or 1.0)

    def value(self, time: float) -> float:
        """Return a time of the evidence in `unit`."""
        return time * self._factor

    def show(self, time: float) -> str:
        return f"{show_digits(self.value(time))} {self.unit}"

    def pair(self, group: Group) -> str:
        """Show INT8 / float, without the unit."""
        return f"{show_digits(self.value(group['time_int8']))} / {show_digits(self.value(group['time_float']))}"


def chosen_candidate(evidence: Evidence) -> Candidate | None:
    """Return the accepted candidate; None if every layer stays float."""
    chosen: int | None = evidence["chosen"]
    return None if chosen is None else evidence["candidates"][chosen]


def precision_of(group: Group) -> str:
    return "INT8" if group["precision"] == "int8" else "float"


def noise_share(evidence: Evidence, groups: Sequence[Group]) -> float:
    """Return the share of these groups in the noise that INT8 in all groups would add."""
    everything = sum(group["sensitivity"] for group in evidence["groups"])
    return sum(group["sensitivity"] for group in groups) / everything if everything else 0.0


def show_confidence(evidence: Evidence) -> str:
    return f"{100.0 * (1.0 - evidence['certificate']['error_probability']):.3g} % confidence"


def show_digits(value: float) -> str:
    """Show about three digits of a time in ms, or of a percentage; both are >= 0."""
    if 0.0 < value < 0.0005:
        return "< 0.001"
    return f"{value:.1f}" if value >= 10.0 else f"{value:.2f}" if value >= 1.0 else f"{value:.3f}"


def show_loss(loss: float) -> str:
    """Show three decimals, or two digits of a small loss."""
    if 0.0 < loss < 0.0001:
        return "< 0.0001"
    return f"{loss:.3f}" if loss >= 0.01 else f"{loss:.2g}"


def show_costs(evidence: Evidence) -> str:
    """Show in one line what the plan's costs are, and why; empty if none was needed."""
    costs = evidence["costs"]
    if costs["source"] == "macs":
        return f"estimated from multiply-accumulates: {costs['why']}"
    if costs["source"] != "measured":
        return ""
    shown = f"measured on {costs['builds']} engines, spread {show_share(costs['noise'])}"
    if costs["passes"] > 1:
        shown += f", {costs['passes']} times because of the noise"
    hidden = sum(not group["timed"] for group in evidence["groups"])
    if hidden:
        shown += (
            f"; {hidden} of {len(evidence['groups'])} groups are within the noise, and rely on multiply-accumulates"
        )
    return f"{shown}: {costs['doubt']}" if costs["doubt"] else shown


def show_ious(ious: Mapping[str, float]) -> str:
    """Show the mean IoU of all frames together, and the worst class. ious: by class, one at least."""
    worst = min(ious, key=ious.__getitem__)
    return f"{sum(ious.values()) / len(ious):.3f} in the mean over classes; the worst is '{worst}', {ious[worst]:.3f}"


def show_labels(labels: Mapping[str, Any]) -> str:
    """Show what the plan and float score on labelled images."""
    scores = (f"{name} {score:.3f}, float {labels['float'][name]:.3f}" for name, score in labels["plan"].items())
    return f"{'; '.join(scores)} ({labels['dataset']})"


def print_plan(evidence: Evidence, console: Console, all_groups: bool = False) -> None:
    """Print the verdict in a few rows, the groups by noise, and the candidates.

    Listed are groups that stay float, were repaired or add much noise; the others are counted, unless `all_groups`.
    """
    console.print(Text(evidence["verdict"], style="bold"))
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, fact in _facts(evidence):
        facts.add_row(name, Text(fact, overflow="fold"))
    console.print(facts)
    rows = sorted(evidence["groups"], key=lambda group: -group["sensitivity"])  # stable: ties stay in graph order
    listed = [
        group
        for group in rows
        if group["precision"] == "float" or group["repairs"] or noise_share(evidence, [group]) >= _LISTED
    ]
    shown = rows if all_groups else listed[:_MOST_ROWS]
    console.print()
    console.print(_group_table(evidence, shown))
    names = {group["name"] for group in shown}
    for line in _rest(evidence, [group for group in rows if group["name"] not in names]):
        console.print(Text(line))
    if evidence["candidates"]:
        console.print()
        console.print(_candidate_table(evidence))
    for number, candidate in enumerate(evidence["candidates"], start=1):
        for line in _outcome(number, candidate):
            console.print(Text(line))
    console.print()
    for line in retraining_lines(evidence):
        console.print(Text(line))


def retraining_lines(evidence: Evidence) -> Iterator[str]:
    """Yield sentences on what Q/DQ-aware training could win: a faster plan, the loss that is left, or nothing."""
    found = evidence["retraining"]
    if found is None:
        yield "No plan was tried that shows what training could win."
        return
    target, loss = found["target"], found["loss"]
    if target is not None:
        yield _target(target)
    if loss:
        makers = [f"{one['name']} {show_share(one['noise_share'])}" for one in found["noisiest"][:_NOISE_MAKERS]]
        yield (
            f"The plan loses {show_loss(loss)}. Of the noise that its INT8 layers add, {', '.join(makers)}: "
            "training would have to win the loss there."
        )
    if target is None and loss == 0.0:
        yield "INT8 leaves nothing to win by training: no faster plan was found, and this one lost nothing."
    elif target is None and loss is None:
        yield "No faster plan was found for training to win, and the loss of all float was not measured."


def _target(target: Mapping[str, Any]) -> str:
    count, names = len(target["names"]), target["names"]
    shown = ", ".join(names[:_NOISE_MAKERS]) + (f" and {count - _NOISE_MAKERS} more" if count > _NOISE_MAKERS else "")
    groups = f"{shown} ({show_share(target['macs_share'])} of multiply-accumulates, now float)"
    if target["time_ms"] is not None:
        ms, plan_ms = show_digits(target["time_ms"]), show_digits(target["plan_time_ms"])
        time = f"the latency would be {ms} instead of {plan_ms} ms, both predicted"
    else:
        time = f"the cost would be {show_share(target['time_ratio'])} of this plan's, by multiply-accumulates"
    measured = f"As they are, that plan loses {show_loss(target['loss'])} on the search frames"
    if target["to_win"] is None:
        needed = ""
    elif target["to_win"] > 0.0:
        now, win = show_loss(target["plan_loss"]), show_loss(target["to_win"])
        needed = f", and this one {now}: Q/DQ-aware training would have to win {win} of fidelity there"
    else:
        needed = ", no more than this one, but it was not certified"
    return f"If {groups} kept float's answers in INT8, {time}. {measured}{needed}."


def _facts(evidence: Evidence) -> Iterator[tuple[str, str]]:
    groups, labels = evidence["groups"], evidence["labels"]
    chosen = chosen_candidate(evidence)
    int8 = sum(group["precision"] == "int8" for group in groups)
    yield "INT8", f"{show_share(evidence['int8_macs_share'])} of multiply-accumulates, {int8} of {len(groups)} groups"
    yield "loss", _loss_fact(evidence, chosen)
    for source, trial in trials_by_source(chosen).items():
        yield "", f"{_loss_and_bound(trial)}, from {_frames(trial)} of {source}"
    if chosen and chosen["trial"] and chosen["trial"].get("ious"):
        yield "IoU with float", f"of all pixels {show_ious(chosen['trial']['ious'])}"
    yield "latency", _latency_fact(evidence)
    if labels:
        yield "labels", show_labels(labels)
    if shown_costs := show_costs(evidence):
        yield "costs", shown_costs
    frames = evidence["frame_counts"]["to_search"]
    yield "search", f"{evidence['builds']} engines, {frames} frames, {evidence['seconds']:.0f} s"
    if evidence["interrupted"]:
        yield "stopped early", f"by its {evidence['interrupted']}: this is the best of what was tried until then"


def _loss_fact(evidence: Evidence, chosen: Candidate | None) -> str:
    if chosen is None:
        return "0: every layer stays float" if evidence["float_precision"] == "fp32" else "not measured: all is float"
    trial = chosen["trial"]
    if trial is None:
        return f"{show_loss(chosen['predicted_loss'])} predicted, not measured"
    validity = "on that stretch of a live camera" if evidence["live"] else f"with {show_confidence(evidence)}"
    allowed = f"allowed {show_loss(evidence['max_loss'])}"
    origin = "" if evidence["held_out"] else " of the calibration's own source"
    sources = len(trials_by_source(chosen))
    basis = f"in the worst of {sources} sources" if sources else f"from {_frames(trial)}"
    return f"{_loss_and_bound(trial)} {validity} ({allowed}), {basis}{origin}"


def trials_by_source(candidate: Candidate | None) -> Mapping[str, Mapping[str, Any]]:
    """Return a candidate's trials by source; empty if it was tried in one, or not at all."""
    trial = candidate["trial"] if candidate else None
    sources: Mapping[str, Mapping[str, Any]] = trial["by_source"] if trial else {}
    return sources if len(sources) > 1 else {}


def _loss_and_bound(trial: Mapping[str, Any]) -> str:
    return f"{show_loss(trial['loss'])} measured, at most {show_loss(trial['upper'])}"


def _frames(trial: Mapping[str, Any]) -> str:
    empty = f" and {trial['empty_frames']} empty ones" if trial["empty_frames"] else ""
    return f"{trial['frames']} frames{empty}"


def _latency_fact(evidence: Evidence) -> str:
    ms, float_ms = evidence["latency_ms"], evidence["latency_float_ms"]
    if evidence["chosen"] is None and float_ms is not None:
        return f"{show_digits(float_ms)} ms in float"
    if ms is None or float_ms is None:
        return "not measured"
    times = f"{show_digits(ms)} ms, float {show_digits(float_ms)} ms"
    if evidence["faster"]:
        return f"{times}: INT8 is {float_ms / ms:.2f} times as fast"
    return f"{times}: INT8 is not faster on this machine, it takes {ms / float_ms:.2f} times as long"


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
    """Yield lines on the groups that the table leaves out, and on the noise that the plan keeps."""
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
            style="bold" if number == evidence["chosen"] else "",
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


def explain(evidence: Evidence, group: str) -> str:
    """Describe a group in plain sentences, a line each; several groups one after the other.

    Raises as `find_groups`.
    """
    return "\n\n".join("\n".join(_sentences(evidence, index)) for index in find_groups(evidence, group))


def find_groups(evidence: Evidence, group: str) -> list[int]:
    """Return the indices of the groups with this name, with a layer of it, or that match it as a glob.

    Raises AgentError (`plan.group`) when nothing has that name.
    """
    names = [dict.fromkeys((one["name"], *one["layers"])) for one in evidence["groups"]]
    indices = [index for index, group_names in enumerate(names) if group in group_names]
    indices = indices or [
        index for index, group_names in enumerate(names) if any(fnmatchcase(name, group) for name in group_names)
    ]
    if not indices:
        known = [name for group_names in names for name in group_names]
        near = difflib.get_close_matches(group, known, cutoff=0.5) or known[:3]
        raise AgentError(
            "plan.group",
            f"no group or layer '{group}'",
            f"one of this plan's, such as {', '.join(near)}",
            "name one, or a pattern such as 'Conv_4*'; --all lists the groups",
        )
    return indices


def _sentences(evidence: Evidence, index: int) -> Iterator[str]:
    groups = evidence["groups"]
    group = groups[index]
    yield f"{group['name']} {'runs in INT8' if group['precision'] == 'int8' else 'stays float'}: {group['why']}."
    made_of = f"{len(group['layers'])} layers under one decision" if len(group["layers"]) > 1 else "one layer"
    share = show_share(group["macs_share"])
    yield f"It is {made_of}: {', '.join(group['layers'])}; {share} of the model's multiply-accumulates."
    if group["rule"]:
        yield f"Its precision is set by the rule {group['rule']}."
    if evidence["costs"]["source"] != "none":
        yield from _costs(evidence, index)
    if not evidence["sensed"]:
        yield "What it adds to the output's divergence was not measured: the time was up before."
        return
    rank = 1 + sum(other["sensitivity"] > group["sensitivity"] for other in groups)
    of_all = f"{show_share(noise_share(evidence, [group]))} of what all groups add, rank {rank} of {len(groups)}"
    source = "measured" if group["measured"] else "predicted"
    yield f"Alone in INT8 it adds {group['sensitivity']:.2g} to the output's divergence ({source}): {of_all}."
    if group["nsr_db"] is not None:
        yield f"On its own output, the noise of INT8 is predicted at {group['nsr_db']:.1f} dB relative to the signal."
    if group["restored"] is not None:
        change = f"takes {group['restored']:.2g} off" if group["restored"] >= 0 else f"adds {-group['restored']:.2g} to"
        yield f"With all others in INT8, this one in float {change} the output's divergence (measured)."
    if group["repairs"]:
        yield f"Repairs for INT8: {'; '.join(group['repairs'])}."
    if evidence["costs"]["source"] != "none":
        yield _flipped(evidence, index)


def _costs(evidence: Evidence, index: int) -> Iterator[str]:
    """Yield sentences on the cost of each precision, and on conversions."""
    scale, costs, group = CostScale(evidence), evidence["costs"], evidence["groups"][index]
    takes = f"{scale.show(group['time_int8'])} in INT8 and {scale.show(group['time_float'])} in float"
    if scale.measured:
        how = "measured" if group["timed"] else "the difference is within the noise, and relies on multiply-accumulates"
        yield f"It takes {takes} ({how}, spread {show_share(costs['noise'])})."
    else:
        yield f"It costs {takes} of what all float costs (estimated from multiply-accumulates: {costs['why']})."
    boundaries = [
        f"{scale.show(cost)} with {other['name']}, which is {precision_of(other)}"
        for other, cost in _boundaries(evidence, index)
    ]
    if boundaries:
        yield f"Where a neighbour's precision differs, values are converted: {'; '.join(boundaries)}."


def _boundaries(evidence: Evidence, index: int) -> list[tuple[Group, float]]:
    """Return the neighbours of a group, each with the cost of the boundary if the two differ."""
    pairs = [((b if a == index else a), cost) for a, b, cost in evidence["edges"] if a != b and index in (a, b)]
    return [(evidence["groups"][other], cost) for other, cost in pairs]


def _flipped(evidence: Evidence, index: int) -> str:
    """Describe what the plan would gain and lose if this group alone changed its precision."""
    scale, group = CostScale(evidence), evidence["groups"][index]
    to_int8 = group["precision"] == "float"
    time = group["time_int8"] - group["time_float"] if to_int8 else group["time_float"] - group["time_int8"]
    for other, cost in _boundaries(evidence, index):
        time += cost if other["precision"] == group["precision"] else -cost
    takes = f"{scale.show(abs(time))} {'less' if time < 0.0 else 'more'}"
    if abs(time) <= _ROUNDING * scale.all_float:
        takes = "as long as now"
    kept = sum(other["sensitivity"] for other in evidence["groups"] if other["precision"] == "int8")
    noise = f"{'add' if to_int8 else 'take'} {group['sensitivity']:.2g} {'to' if to_int8 else 'off'}"
    change = f"{'INT8' if to_int8 else 'float'} for this group alone"
    return (
        f"In the chosen plan, {change} would take {takes}, conversions included, and {noise} "
        f"a summed divergence of {kept:.2g}."
    )
