"""Show a precision plan: which layers are INT8, float or repaired, in the network's order, and what each costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.common.html.charts import Axis, Mark, scatter_chart, strip
from agent.common.html.pages import Figure, Section, Table, show_share
from agent.planning.report import (
    SCHEMA,
    CostScale,
    chosen_candidate,
    noise_share,
    retraining_lines,
    show_confidence,
    show_costs,
    show_ious,
    show_labels,
    show_loss,
)
from calibrate.plan import PrecisionPlan

_COLORS = {"INT8": "c0", "INT8, repaired": "c2", "float": "c1"}
_LEAST_WIDTH = 0.004  # share of the map: a layer of hardly any work can still be seen
_MAP_TITLE = "Precision of each group of layers, in the network's order"
_ORDER = (
    "From left to right stand the groups of layers that share a decision, in the network's order, as wide as their work"
)
_HOW_TO_READ = f"{_ORDER}, and as high as the square root of the noise that INT8 adds there."
_OF_JOBS = {"tried", "costs", "groups"}  # keys in the evidence of a job's plan


def plan_sections(plan: PrecisionPlan) -> list[Section]:
    """Return the sections of a report on a plan: of `tared plan`, of a job, or one that a person wrote."""
    evidence = plan.evidence
    text = "This plan has no evidence: a person wrote it, or nothing had to be searched."
    if "candidates" in evidence:
        if evidence.get("schema") == SCHEMA:
            return [*_searched(plan), *_repairs(plan)]
        text = "Another version of tared made this plan. Plan again to see the measurements of the search."
    elif evidence.keys() >= _OF_JOBS:
        return [*_of_job(plan), *_repairs(plan)]
    return [Section("Precision", [text], tables=_floats(plan)), *_repairs(plan)]


def plan_facts(plan: PrecisionPlan) -> dict[str, str]:
    """Return what a plan is, in a few words each."""
    evidence, facts = plan.evidence, dict[str, str]()
    if "int8_macs_share" in evidence:
        facts["multiply-accumulates in INT8"] = show_share(evidence["int8_macs_share"])
    facts["layers in float"] = str(len(plan.floats))
    facts["layers repaired"] = str(len(_repaired(plan)))
    if evidence.get("max_loss") is not None:
        facts["loss allowed"] = show_loss(evidence["max_loss"])
    if evidence.get("labels"):
        facts["score on labels"] = show_labels(evidence["labels"])
    if evidence.get("seconds") is not None:
        facts["search"] = f"{evidence['seconds']:.0f} s"
    return facts


def _searched(plan: PrecisionPlan) -> Iterator[Section]:
    evidence = plan.evidence
    yield Section(
        "Precision, layer by layer",
        [_HOW_TO_READ],
        figures=[_map([(group, _kind(group), f"; {group['why']}") for group in evidence["groups"]])],
        tables=[_group_table(evidence)],
    )
    yield Section(
        "Loss and time",
        _certificate(evidence),
        figures=[Figure("Plans that were tried", _frontier(evidence), _FRONTIER)],
        tables=[_candidates(evidence)],
    )
    yield Section("What training could win", list(retraining_lines(evidence)), tables=_retraining(evidence))


_FRONTIER = {"predicted on the search frames": "idle", "accepted": "good", "refused": "bad"}


def _kind(group: Mapping[str, Any]) -> str:
    return "float" if group["precision"] != "int8" else "INT8, repaired" if group["repairs"] else "INT8"


def _map(rows: Sequence[tuple[Mapping[str, Any], str, str]], height: float = 0.0) -> Figure:
    """Draw the precision map.

    Args:
        rows: Each group with its kind, and what is to be said of it beside that.
        height: Of each group where no noise is known, in [0, 1].
    """
    loudest = max((group["sensitivity"] for group, *_ in rows), default=0.0)
    cells = [
        (
            max(group["macs_share"], _LEAST_WIDTH),
            math.sqrt(group["sensitivity"] / loudest) if loudest else height,
            _COLORS[kind],
            f"{group['name']}: {kind}; {show_share(group['macs_share'])} of the work{more}",
        )
        for group, kind, more in rows
    ]
    return Figure("Precision map", strip(cells, _MAP_TITLE), _COLORS)


def _group_table(evidence: Mapping[str, Any]) -> Table:
    scale = CostScale(evidence)
    unit = "ms" if scale.measured else "% of float"
    heads = (
        ("group", False), ("order", True), ("precision", False), ("why", False), ("repairs", False),
        ("work", True), (f"INT8, {unit}", True), (f"float, {unit}", True), ("noise", True), ("noise is", False),
    )  # fmt: skip
    rows = [
        (
            group["name"] + (f" +{len(group['layers']) - 1}" if len(group["layers"]) > 1 else ""),
            (str(number), number),
            _kind(group),
            group["why"],
            "; ".join(group["repairs"]),
            (show_share(group["macs_share"]), group["macs_share"]),
            *((f"{scale.value(time):.3g}", time) for time in (group["time_int8"], group["time_float"])),
            (show_share(noise_share(evidence, [group])), group["sensitivity"]),
            "measured" if group["measured"] else "predicted",
        )
        for number, group in enumerate(evidence["groups"], start=1)
    ]
    return Table(heads, rows, f"All {len(rows)} groups", filters=True)


def _certificate(evidence: Mapping[str, Any]) -> list[str]:
    validity = "on the stretch of a live camera" if evidence["live"] else f"with {show_confidence(evidence)}"
    text = [
        f"A plan is accepted where the bound of its loss stays within {show_loss(evidence['max_loss'])}, {validity}. "
        "The frames that certify it are held out from the search."
    ]
    chosen = chosen_candidate(evidence)
    if chosen and chosen["trial"] and chosen["trial"].get("ious"):
        text.append(
            f"The IoU of its classes with float's, of the pixels of all frames: {show_ious(chosen['trial']['ious'])}."
        )
    if costs := show_costs(evidence):
        text.append(f"Times are {costs}.")
    return text


def _frontier(evidence: Mapping[str, Any]) -> Any:
    scale, points = CostScale(evidence), []
    for plan in evidence["frontier"]:
        if plan["loss"] is not None:
            share = show_share(plan["int8_macs_share"])
            words = f"{scale.show(plan['time'])}, {share} in INT8: loss {plan['loss']:.3g}"
            points.append((scale.value(plan["time"]), float(plan["loss"]), "idle", words))
    for number, candidate in enumerate(evidence["candidates"]):
        trial = candidate["trial"]
        if trial is not None:
            words = f"plan {number + 1}: loss {show_loss(trial['loss'])}, at most {show_loss(trial['upper'])}"
            color = "good" if number == evidence["chosen"] else "bad"
            points.append((scale.value(candidate["time"]), float(trial["upper"]), color, words))
    points.append((scale.value(scale.all_float), 0.0, "c1", f"all float, {scale.show(scale.all_float)}"))
    limit = Mark(evidence["max_loss"], f"loss allowed, {show_loss(evidence['max_loss'])}", "warning", across=True)
    x_title = f"predicted {'time' if scale.measured else 'cost'}, {scale.unit}"
    return scatter_chart(points, Axis(x_title), Axis("loss, or its bound", 0.0), "Loss against time", [limit])


def _candidates(evidence: Mapping[str, Any]) -> Table:
    scale = CostScale(evidence)
    heads = (
        ("plan", True), ("in INT8", True), ("groups in float", True), (f"predicted, {scale.unit}", True),
        ("predicted loss", True), ("loss", True), ("at most", True), ("frames", True), ("outcome", False),
    )  # fmt: skip
    rows = []
    for number, candidate in enumerate(evidence["candidates"], start=1):
        trial = candidate["trial"] or {}
        rows.append(
            (
                (str(number), number),
                (show_share(candidate["int8_macs_share"]), candidate["int8_macs_share"]),
                (str(candidate["floats"]), candidate["floats"]),
                (f"{scale.value(candidate['time']):.3g}", candidate["time"]),
                (show_loss(candidate["predicted_loss"]), candidate["predicted_loss"]),
                *((show_loss(trial[key]) if trial else "", trial.get(key, "")) for key in ("loss", "upper")),
                (str(trial.get("frames", "")), trial.get("frames", "")),
                str(trial.get("reason", "not tried")),
            )
        )
    chosen = [] if evidence["chosen"] is None else [evidence["chosen"]]
    return Table(heads, rows, "Plans that were built and certified, or refused", chosen=chosen)


def _retraining(evidence: Mapping[str, Any]) -> list[Table]:
    """Show the groups in which a faster plan differs, and those that make most of the noise of the chosen plan."""
    found = evidence.get("retraining") or {"target": None, "noisiest": [], "loss": None}
    groups = {group["name"]: group for group in evidence["groups"]}
    tables = []
    for names, title in (
        (found["target"]["names"] if found["target"] else [], "Now float, and INT8 in the faster plan"),
        ([one["name"] for one in found["noisiest"]] if found["loss"] else [], "Loudest of those in INT8"),
    ):
        rows = [
            (
                name,
                (show_share(groups[name]["macs_share"]), groups[name]["macs_share"]),
                (show_share(noise_share(evidence, [groups[name]])), groups[name]["sensitivity"]),
                "measured" if groups[name]["measured"] else "predicted",
            )
            for name in names
        ]
        if rows:
            heads = (("group", False), ("work", True), ("noise, of INT8 in all groups", True), ("noise is", False))
            tables.append(Table(heads, rows, title))
    return tables


def _of_job(plan: PrecisionPlan) -> Iterator[Section]:
    evidence = plan.evidence
    heads = (("plan", False), ("work in INT8", True), ("loss on the frames that try plans", True), ("outcome", False))
    rows = [
        (
            each["plan"],
            (show_share(each["int8_macs_share"]), each["int8_macs_share"]),
            (show_loss(each["loss"]), each["loss"]),
            each["outcome"],
        )
        for each in evidence["tried"]
    ]
    if evidence["groups"]:
        yield _groups_of_job(plan)
    text = ["A job found this plan. It tries plans from the fastest on, until an engine is accepted."]
    yield Section("Plans that the job tried", text, tables=[Table(heads, rows), *_floats(plan)])


def _groups_of_job(plan: PrecisionPlan) -> Section:
    """Show the map and the groups; their noise was measured where the job had to search, and else is predicted."""
    evidence, repaired = plan.evidence, _repaired(plan)
    loudest = max(group["sensitivity"] for group in evidence["groups"])
    pairs = [(group, _kind_in(plan, repaired, group["layers"])) for group in evidence["groups"]]
    rows = [
        (
            group["name"],
            (str(number), number),
            kind,
            "; ".join(dict.fromkeys(words for layer in group["layers"] for words in repaired.get(layer, ()))),
            (show_share(group["macs_share"]), group["macs_share"]),
            (show_share(group["sensitivity"] / loudest) if loudest else "", group["sensitivity"] if loudest else ""),
            _noise_is(group, evidence) if loudest else "",
        )
        for number, (group, kind) in enumerate(pairs, start=1)
    ]
    heads = (
        ("group of layers", False), ("order", True), ("precision", False), ("repairs", False), ("work", True),
        ("noise, of the loudest", True), ("noise is", False),
    )  # fmt: skip
    text = _HOW_TO_READ if loudest else f"{_ORDER}. This plan served before, and its noise was not measured again."
    figure = _map([(group, kind, "") for group, kind in pairs], 0.5)
    table = Table(heads, rows, filters=True)
    return Section("Precision, layer by layer", [text], figures=[figure], tables=[table])


def _noise_is(group: Mapping[str, Any], evidence: Mapping[str, Any]) -> str:
    if group["measured"]:
        return "measured"
    return "measured in a block" if evidence["sensed"] else "predicted"


def _kind_in(plan: PrecisionPlan, repaired: Mapping[str, Sequence[str]], layers: Sequence[str]) -> str:
    if plan.floats.keys() >= set(layers):
        return "float"
    return "INT8, repaired" if repaired.keys() & set(layers) else "INT8"


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
