"""The owner's word about precision: rules of the model spec, matched with the nodes of its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from onnx import ModelProto, NodeProto

from agent.errors import ConfigError
from agent.model_spec import PrecisionRules
from engines.placement import Placement


@dataclass(frozen=True)
class Rules:
    """floats: node -> the rule that keeps it float. int8: layer -> the rule that forces it into INT8."""

    floats: Mapping[str, str]
    int8: Mapping[str, str]

    def applied(self, floats: Mapping[str, str]) -> dict[str, str]:
        """The layers that stay float where a plan says these, each with its reason: the owner's word goes first."""
        return {**{layer: why for layer, why in floats.items() if layer not in self.int8}, **self.floats}


def read_rules(rules: PrecisionRules, master: ModelProto, placement: Placement) -> Rules:
    """Match the rules with a master graph and where INT8 may go in it.

    A rule is a node's name, a glob of names, or an operator type. Raises ConfigError `precision.rule` for one that
    matches nothing, that forces what cannot be INT8, that keeps float what the model itself has in INT8, or for a node
    under both kinds.
    """
    floats = _first_rule(_matches(rules.keep_float, "keep_float", master))
    own = sorted(floats.keys() & set(placement.own))
    if own:
        found = f"{floats[own[0]]}, and '{own[0]}' is INT8 in the model itself"
        raise _refusal(found, "rules for the model's float part", "leave it out, or give the model before quantisation")
    forced = _matches(rules.force_int8, "force_int8", master)
    for rule, nodes in forced.items():
        if not any(node in placement.weights for node in nodes):
            reason = placement.floats.get(nodes[0], "it has no weights of its own")
            found = f"{rule}, and '{nodes[0]}' cannot be INT8: {reason}"
            raise _refusal(found, "rules for layers that can be", "leave the rule out")
    int8 = {node: rule for node, rule in _first_rule(forced).items() if node in placement.weights}
    both = sorted(floats.keys() & int8.keys())
    if both:
        found = f"'{both[0]}' under {floats[both[0]]} and {int8[both[0]]}"
        raise _refusal(found, "one rule for a node", "take it out of one of the two")
    return Rules({node: rule for node, rule in floats.items() if node in placement.reads}, int8)


def _matches(patterns: tuple[str, ...], kind: str, master: ModelProto) -> dict[str, list[str]]:
    """Per rule the names of the nodes that it matches, at least one."""
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        nodes = [node.name for node in master.graph.node if _fits(node, pattern)]
        if not nodes:
            names = [*(node.name for node in master.graph.node), *(node.op_type for node in master.graph.node)]
            near = ", ".join(get_close_matches(pattern, dict.fromkeys(names), n=3)) or names[0]
            raise _refusal(
                f"{kind}: {pattern}, which matches no node",
                "a node's name, a glob, or an operator type",
                f"the nearest names are {near}; 'tared plan' lists all layers",
            )
        found[f"{kind}: {pattern}"] = nodes
    return found


def _first_rule(matches: Mapping[str, list[str]]) -> dict[str, str]:
    """Per node the first rule that matches it."""
    found: dict[str, str] = {}
    for rule, nodes in matches.items():
        found = dict.fromkeys(nodes, rule) | found
    return found


def _fits(node: NodeProto, pattern: str) -> bool:
    return pattern in (node.op_type, node.name) or fnmatchcase(node.name, pattern)


def _refusal(found: str, expected: str, remedy: str) -> ConfigError:
    return ConfigError("precision.rule", found, expected, remedy)
