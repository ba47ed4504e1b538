"""All about one group of a plan, in plain sentences. Reads a plan's evidence and nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from rich.console import Console
from rich.text import Text

from agent.errors import AgentError
from agent.planning.figures import CostScale, Evidence, Group, noise_share, precision_of, show_share

_ROUNDING = 1e-9  # of what all float takes: less is what a sum of differences may be off


def print_explanation(evidence: Evidence, group: str, console: Console) -> None:
    """`explain` on a console."""
    console.print(Text(explain(evidence, group)))


def explain(evidence: Evidence, group: str) -> str:
    """All about one group in plain sentences, a line each; several are told one after the other. Raises as `named`."""
    return "\n\n".join("\n".join(_sentences(evidence, index)) for index in named(evidence, group))


def named(evidence: Evidence, group: str) -> list[int]:
    """The groups of this name, or that have a layer of it, or that match it as a glob.

    Raises AgentError (`plan.group`) when nothing has that name.
    """
    names = [dict.fromkeys((one["name"], *one["layers"])) for one in evidence["groups"]]
    found = [index for index, own in enumerate(names) if group in own]
    found = found or [index for index, own in enumerate(names) if any(fnmatchcase(name, group) for name in own)]
    if not found:
        known = [name for own in names for name in own]
        near = difflib.get_close_matches(group, known, cutoff=0.5) or known[:3]
        raise AgentError(
            "plan.group",
            f"no group or layer '{group}'",
            f"one of this plan's, such as {', '.join(near)}",
            "name one, or a pattern such as 'Conv_4*'; --all lists the groups",
        )
    return found


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
        yield "What it adds to the output's divergence was not looked at: the time was up before."
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
    """What each precision takes, and where values are converted."""
    scale, costs, group = CostScale(evidence), evidence["costs"], evidence["groups"][index]
    takes = f"{scale.show(group['time_int8'])} in INT8 and {scale.show(group['time_float'])} in float"
    if scale.measured:
        yield f"It takes {takes} (measured, spread {show_share(costs['noise'])})."
    else:
        yield f"It costs {takes} of what all float costs (estimated from multiply-accumulates: {costs['why']})."
    boundaries = [
        f"{scale.show(cost)} with {other['name']}, which is {precision_of(other)}"
        for other, cost in _boundaries(evidence, index)
    ]
    if boundaries:
        yield f"Where a neighbour's precision differs, values are converted: {'; '.join(boundaries)}."


def _boundaries(evidence: Evidence, index: int) -> list[tuple[Group, float]]:
    """The neighbours of a group, each with what the boundary takes where the two differ."""
    pairs = [((b if a == index else a), cost) for a, b, cost in evidence["edges"] if a != b and index in (a, b)]
    return [(evidence["groups"][other], cost) for other, cost in pairs]


def _flipped(evidence: Evidence, index: int) -> str:
    """What the plan would gain and lose with this group alone turned over."""
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
    turned = f"{'INT8' if to_int8 else 'float'} for this group alone"
    return (
        f"In the chosen plan, {turned} would take {takes}, conversions included, and {noise} "
        f"a summed divergence of {kept:.2g}."
    )
