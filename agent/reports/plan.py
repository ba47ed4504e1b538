"""Show a precision plan: which layers are INT8, float or repaired, what each costs, and which plans were tried.

A plan of a job and one of `tared plan` have the same evidence, and the same report: facts, and sections of tables and
figures. `tared report` draws them as a page, and `tared plan` prints the tables (agent/cli/plan_print.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.common.html.charts import Axis, Mark, scatter_chart, strip
from agent.common.html.pages import Figure, Section, Table, show_share
from agent.planning.evidence import JOB, READABLE
from calibrate.plan import PrecisionPlan

Evidence = Mapping[str, Any]  # a plan's, as JSON holds it
Group = Mapping[str, Any]
Candidate = Mapping[str, Any]

_COLORS = {"INT8": "c0", "INT8, repaired": "c2", "float": "c1"}
_OUTCOMES = {"tried on the search frames": "idle", "accepted": "good", "refused": "bad"}
_LEAST_WIDTH = 0.004  # share of the map: a layer of hardly any work can still be seen
_NOISE_MAKERS = 3  # groups named in a sentence
_CONFUSIONS = 3  # pairs listed per candidate, the worst
_MAP_TITLE = "Precision of each group of layers, in the network's order"
_HOW_TO_READ = (
    "From left to right stand the groups of layers that share a decision, in the network's order, as wide as their "
    "work, and as high as the square root of the noise that INT8 adds there."
)


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


def chosen_candidate(evidence: Evidence) -> Candidate | None:
    """Return the certified candidate; None without one."""
    chosen: int | None = evidence["chosen"]
    return None if chosen is None else evidence["candidates"][chosen]


def noise_share(evidence: Evidence, groups: Sequence[Group]) -> float:
    """Return the share of these groups in the noise that INT8 in all groups would add."""
    everything = sum(group["sensitivity"] for group in evidence["groups"])
    return sum(group["sensitivity"] for group in groups) / everything if everything else 0.0


def noise_is(evidence: Evidence, group: Group) -> str:
    """Return how a group's noise is known."""
    if group["measured"]:
        return "measured"
    return "measured in a block" if evidence["sensed"] else "predicted"


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
    """Show in one line what the plan's costs are, and why."""
    costs = evidence["costs"]
    if costs["source"] != "measured":
        return f"estimated from multiply-accumulates: {costs['why']}"
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


# ---- the facts


def plan_facts(plan: PrecisionPlan) -> dict[str, str]:
    """Return what a plan is, in a few words each."""
    evidence = plan.evidence
    facts = {"layers in float": str(len(plan.floats)), "layers repaired": str(len(_repaired(plan)))}
    if evidence.get("schema") not in READABLE:
        return facts
    groups, chosen = evidence["groups"], chosen_candidate(evidence)
    int8 = sum(group["precision"] == "int8" for group in groups)
    share = sum(group["macs_share"] for group in groups if group["precision"] == "int8")
    share = evidence.get("int8_macs_share", share)  # with what the model itself has in INT8
    facts = {"INT8": f"{show_share(share)} of multiply-accumulates, {int8} of {len(groups)} groups", **facts}
    facts["loss allowed"] = show_loss(evidence["max_loss"])
    if chosen is not None:
        validity = "on that stretch of a live camera" if evidence["live"] else f"with {show_confidence(evidence)}"
        origin = "" if evidence["held_out"] else " of the calibration's own source"
        by_source = chosen["trial"]["by_source"]
        for source, trial in by_source.items():
            bound = f"{show_loss(trial['loss'])} measured, at most {show_loss(trial['upper'])}"
            empty = f" and {trial['empty_frames']} empty ones" if trial["empty_frames"] else ""
            name = "loss" if len(by_source) == 1 else f"loss in {source}"
            facts[name] = f"{bound} {validity}, from {trial['frames']} frames{empty}{origin}"
        if chosen["trial"].get("ious"):
            facts["IoU with float"] = f"of all pixels {show_ious(chosen['trial']['ious'])}"
    if evidence.get("labels"):
        facts["score on labels"] = show_labels(evidence["labels"])
    facts["costs"] = show_costs(evidence)
    facts["search"] = f"{evidence['seconds']:.0f} s"
    if evidence.get("by") != JOB:
        facts["search"] += f", {evidence['builds']} engines, {evidence['frame_counts']['to_search']} frames"
    if evidence.get("interrupted"):
        facts["stopped early"] = f"by its {evidence['interrupted']}: this is the best of what was tried until then"
    return facts


# ---- the sections


def plan_sections(plan: PrecisionPlan) -> list[Section]:
    """Return the sections of a report on a plan: of `tared plan`, of a job, or one that a person wrote."""
    evidence = plan.evidence
    if evidence.get("schema") in READABLE:
        return [*_searched(plan), *_repairs(plan)]
    text = "This plan has no evidence: a person wrote it."
    if evidence:
        text = "Another version of tared made this plan. Plan again to see the measurements of the search."
    return [Section("Precision", [text], tables=_floats(plan)), *_repairs(plan)]


def _searched(plan: PrecisionPlan) -> Iterator[Section]:
    evidence, repaired = plan.evidence, _repaired(plan)
    kinds = [_kind(group, repaired) for group in evidence["groups"]]
    figures = [_map(evidence["groups"], kinds)] if evidence["groups"] else []
    tables = [group_table(evidence, evidence["groups"])]
    yield Section("Precision, layer by layer", [_HOW_TO_READ], figures=figures, tables=tables)
    figures = [Figure("Plans that were tried", _scatter(evidence), _OUTCOMES)]
    text = [_certificate(evidence)]
    yield Section("Loss and time", text, figures=figures, tables=[candidate_table(evidence)])
    if "retraining" in evidence:
        yield Section("What training could win", list(retraining_lines(evidence)))


def _kind(group: Group, repaired: Mapping[str, Sequence[str]]) -> str:
    if group["precision"] != "int8":
        return "float"
    return "INT8, repaired" if repaired.keys() & set(group["layers"]) else "INT8"


def _map(groups: Sequence[Group], kinds: Sequence[str]) -> Figure:
    """Draw the precision map; at half of its height where no noise is known."""
    loudest = max(group["sensitivity"] for group in groups)
    cells = [
        (
            max(group["macs_share"], _LEAST_WIDTH),
            math.sqrt(group["sensitivity"] / loudest) if loudest else 0.5,
            _COLORS[kind],
            f"{group['name']}: {kind}; {show_share(group['macs_share'])} of the work; {group['why']}",
        )
        for group, kind in zip(groups, kinds, strict=True)
    ]
    return Figure("Precision map", strip(cells, _MAP_TITLE), _COLORS)


def group_table(evidence: Evidence, groups: Sequence[Group]) -> Table:
    """Return the table of these groups, in their order."""
    scale, places = CostScale(evidence), {group["name"]: number for number, group in enumerate(evidence["groups"], 1)}
    unit = "ms" if scale.measured else "% of float"
    heads = (
        ("group", False), ("order", True), ("precision", False), ("why", False), ("work", True),
        (f"INT8, {unit}", True), (f"float, {unit}", True), ("noise", True), ("noise is", False),
    )  # fmt: skip
    rows = [
        (
            group["name"] + (f" +{len(group['layers']) - 1}" if len(group["layers"]) > 1 else ""),
            (str(places[group["name"]]), places[group["name"]]),
            "INT8" if group["precision"] == "int8" else "float",
            "; ".join([group["why"], *(repair for repair in group["repairs"] if repair not in group["why"])]),
            (show_share(group["macs_share"]), group["macs_share"]),
            *((show_digits(scale.value(time)), time) for time in (group["time_int8"], group["time_float"])),
            (show_share(noise_share(evidence, [group])), group["sensitivity"]),
            noise_is(evidence, group),
        )
        for group in groups
    ]
    return Table(heads, rows, f"{len(rows)} of {len(places)} groups of layers", filters=True)


def candidate_table(evidence: Evidence) -> Table:
    """Return the table of the plans that were tried."""
    scale = CostScale(evidence)
    heads = (
        ("plan", False), ("in INT8", True), ("floats", True), (f"predicted, {scale.unit}", True),
        ("predicted loss", True), ("loss", True), ("at most", True), ("frames", True), ("ms, INT8 / float", True),
        ("outcome", False),
    )  # fmt: skip
    rows = []
    for number, candidate in enumerate(evidence["candidates"], start=1):
        trial, time = candidate["trial"] or {}, candidate["time"]
        times = [show_digits(trial[key]) for key in ("latency_ms", "latency_float_ms")] if trial else []
        rows.append(
            (
                candidate.get("plan", f"plan {number}"),
                (show_share(candidate["int8_macs_share"]), candidate["int8_macs_share"]),
                (str(candidate["floats"]), candidate["floats"]),
                (show_digits(scale.value(time)), time),
                (show_loss(candidate["predicted_loss"]), candidate["predicted_loss"]),
                *((show_loss(trial[key]) if trial else "", trial.get(key, "")) for key in ("loss", "upper")),
                (str(trial.get("frames", "")), trial.get("frames", "")),
                (" / ".join(times), trial.get("latency_ms", "")),
                "; ".join(_outcome(candidate)),
            )
        )
    chosen = [] if evidence["chosen"] is None else [evidence["chosen"]]
    return Table(heads, rows, "Plans that were tried", chosen=chosen)


def _outcome(candidate: Candidate) -> Iterator[str]:
    trial = candidate["trial"]
    if trial is None:
        yield candidate.get("outcome") or ("no engine was built" if not candidate.get("offered") else "")
        return
    yield f"{'accepted' if trial['accepted'] else 'refused'}: {trial['reason']}"
    for pair in trial["confused"][:_CONFUSIONS]:
        yield f"it takes '{pair['reference']}' for '{pair['candidate']}' {pair['count']} of {pair['of']} times"


def _certificate(evidence: Evidence) -> str:
    if evidence.get("by") == JOB:
        return "A job found this plan. It tries plans from the fastest on, until an engine is accepted."
    validity = "on the stretch of a live camera" if evidence["live"] else f"with {show_confidence(evidence)}"
    return (
        f"A plan is accepted where the bound of its loss stays within {show_loss(evidence['max_loss'])}, {validity}. "
        "The frames that certify it are held out from the search."
    )


def _scatter(evidence: Evidence) -> Any:
    scale, points = CostScale(evidence), []
    for number, candidate in enumerate(evidence["candidates"]):
        trial, time, name = candidate["trial"], candidate["time"], candidate.get("plan", f"plan {number + 1}")
        share, loss = show_share(candidate["int8_macs_share"]), candidate["predicted_loss"]
        words = f"{name}: {scale.show(time)}, {share} in INT8: loss {show_loss(loss)}"
        points.append((scale.value(time), float(loss), "idle", words))
        if trial is not None:
            words = f"{name}: loss {show_loss(trial['loss'])}, at most {show_loss(trial['upper'])}"
            color = "good" if number == evidence["chosen"] else "bad"
            points.append((scale.value(time), float(trial["upper"]), color, words))
    points.append((scale.value(scale.all_float), 0.0, "c1", f"all float, {scale.show(scale.all_float)}"))
    limit = Mark(evidence["max_loss"], f"loss allowed, {show_loss(evidence['max_loss'])}", "warning", across=True)
    x_title = f"predicted {'time' if scale.measured else 'cost'}, {scale.unit}"
    return scatter_chart(points, Axis(x_title), Axis("loss, or its bound", 0.0), "Loss against time", [limit])


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


def _floats(plan: PrecisionPlan) -> list[Table]:
    if not plan.floats:
        return []
    rows = sorted(plan.floats.items())
    return [Table((("layer in float", False), ("why", False)), rows, f"{len(rows)} layers in float")]


_REPAIRS = {
    "divisors": "input divided channel by channel",
    "offsets": "input centred",
    "clips": "weights clipped",
    "shifts": "bias corrected",
}


def _repaired(plan: PrecisionPlan) -> dict[str, list[str]]:
    """Return the repairs of each layer, in words."""
    found = dict[str, list[str]]()
    for kind, words in _REPAIRS.items():
        for layer in getattr(plan.effective, kind):
            found.setdefault(layer, []).append(words)
    return found


def _repairs(plan: PrecisionPlan) -> Iterator[Section]:
    layers = _repaired(plan)
    if not layers and not plan.repairs.methods:
        return
    rows = [(layer, "; ".join(repairs)) for layer, repairs in layers.items()]
    tables = [Table((("layer", False), ("repairs", False)), rows, f"{len(rows)} layers repaired", filters=True)]
    if plan.repairs.methods:
        methods = sorted(plan.repairs.methods.items())
        tables.append(
            Table((("tensor", False), ("threshold by", False)), methods, "Tensors with a method of their own")
        )
    tried = [
        (
            kind,
            (str(row["layer_count"]), row["layer_count"]),
            *((f"{row[key]:.3g}", row[key]) for key in ("divergence", "divergence_without")),
            "kept" if row["kept"] else "not kept",
        )
        for kind, row in plan.evidence.get("repairs_tried", {}).items()
    ]
    if tried:
        heads = (("kind", False), ("layers", True), ("divergence with it", True), ("without it", True), ("", False))
        tables.insert(0, Table(heads, tried, "Each kind was tried by leaving it out"))
    yield Section("Repairs", ["Repairs keep a layer in INT8 that would lose too much as it is."], tables=tables)
