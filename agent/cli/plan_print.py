"""Print a plan's evidence: `print_plan` as tables, `explain` one group in sentences.

The figures come first, in the digits and units of the report (agent/reports/plan.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from agent.common.errors import AgentError
from agent.common.html.pages import Table, show_share
from agent.common.table import tabulate
from agent.reports.plan import (
    CostScale,
    Evidence,
    Group,
    candidate_table,
    group_table,
    noise_is,
    noise_share,
    plan_facts,
    retraining_lines,
)
from calibrate.plan import PrecisionPlan

_LISTED = 0.01  # share of all noise: an INT8 group that adds less, and needed no repair, is only counted
_MOST_ROWS = 40  # groups in the table, unless all are requested
_ROUNDING = 1e-9  # share of the all-float time: the error of a sum of differences
_PROSE = ("group", "plan", "why", "outcome")


def print_plan(plan: PrecisionPlan, console: Console, all_groups: bool = False) -> None:
    """Print the verdict, the facts, the groups by noise, and the plans that were tried.

    Listed are groups that stay float, were repaired or add much noise; the others are counted, unless `all_groups`.
    """
    evidence = plan.evidence
    console.print(Text(evidence.get("verdict", "A job of the daemon found this plan."), style="bold"))
    facts = RichTable(box=None, show_header=False, pad_edge=False)
    for name, fact in plan_facts(plan).items():
        facts.add_row(name, Text(fact, overflow="fold"))
    console.print(facts)
    rows = sorted(evidence["groups"], key=lambda group: -group["sensitivity"])  # stable: ties stay in graph order
    listed = [
        group
        for group in rows
        if group["precision"] == "float" or group["repairs"] or noise_share(evidence, [group]) >= _LISTED
    ]
    shown = rows if all_groups else listed[:_MOST_ROWS]
    _print_table(group_table(evidence, shown), console)
    names = {group["name"] for group in shown}
    for line in _rest(evidence, [group for group in rows if group["name"] not in names]):
        console.print(Text(line))
    if evidence["candidates"]:
        _print_table(candidate_table(evidence), console)
    if "retraining" in evidence:
        console.print()
        for line in retraining_lines(evidence):
            console.print(Text(line))


def _print_table(table: Table, console: Console) -> None:
    """Print a table of a report; the rows that stand out are bold."""
    heads = [head for head, _ in table.heads]
    rows = [
        [Text(cell if isinstance(cell, str) else cell[0], "bold" if number in table.chosen else "") for cell in row]
        for number, row in enumerate(table.rows)
    ]
    right = [head for head, is_number in table.heads if is_number]
    console.print(f"\n{table.title}", tabulate(heads, rows, console.width, _PROSE, right), sep="\n", highlight=False)


def _rest(evidence: Evidence, groups: Sequence[Group]) -> Iterator[str]:
    """Yield lines on the groups that the table leaves out, and on the noise that the plan keeps."""
    for precision in ("float", "int8"):
        left_out = [group for group in groups if group["precision"] == precision]
        if left_out:
            share = show_share(noise_share(evidence, left_out))
            count = f"and {len(left_out)} more in {_precision(left_out[0])}"
            yield f"{count}, together {share} of the noise (--all shows them)"
    kept = show_share(noise_share(evidence, [group for group in evidence["groups"] if group["precision"] == "int8"]))
    yield f"The plan keeps {kept} of the noise that INT8 in all groups would add."


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
    yield from _costs(evidence, index)
    rank = 1 + sum(other["sensitivity"] > group["sensitivity"] for other in groups)
    of_all = f"{show_share(noise_share(evidence, [group]))} of what all groups add, rank {rank} of {len(groups)}"
    noise = f"{group['sensitivity']:.2g} to the output's divergence ({noise_is(evidence, group)})"
    yield f"Alone in INT8 it adds {noise}: {of_all}."
    if group["nsr_db"] is not None:
        yield f"On its own output, the noise of INT8 is predicted at {group['nsr_db']:.1f} dB relative to the signal."
    if group["repairs"]:
        yield f"Repairs for INT8: {'; '.join(group['repairs'])}."
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
        f"{scale.show(cost)} with {other['name']}, which is {_precision(other)}"
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


def _precision(group: Group) -> str:
    return "INT8" if group["precision"] == "int8" else "float"
