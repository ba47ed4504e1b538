"""The owner's word: `precision` in MODEL.yaml, matched with a graph's nodes."""

from __future__ import annotations

import pytest
from zoo import Net, residual_net

from agent.common.errors import ConfigError
from agent.models.model import Rules, read_rules
from agent.vision.spec import PrecisionRules
from engines.quantise.placement import place


def rules(keep_float: tuple[str, ...] = (), force_int8: tuple[str, ...] = ()) -> Rules:
    master = residual_net()
    return read_rules(PrecisionRules(keep_float=keep_float, force_int8=force_int8), master, place(master))


def refused(keep_float: tuple[str, ...] = (), force_int8: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as error:
        rules(keep_float, force_int8)
    assert error.value.code == "precision.rule"
    return str(error.value)


def test_a_rule_is_a_name_a_glob_or_an_operator_type() -> None:
    assert rules(("Conv_t0",)).floats == {"Conv_t0": "keep_float: Conv_t0"}
    assert rules(("Conv_t[02]",)).floats == dict.fromkeys(("Conv_t0", "Conv_t2"), "keep_float: Conv_t[02]")
    assert set(rules(("Conv",)).floats) == {"Conv_t0", "Conv_t2", "Conv_t4"}
    assert rules(force_int8=("Gemm",)).int8 == {"Gemm_t9": "force_int8: Gemm"}


def test_the_first_rule_of_a_node_is_its_reason() -> None:
    assert rules(("Conv_t0", "Conv")).floats["Conv_t0"] == "keep_float: Conv_t0"


def test_nodes_that_are_float_anyway_need_no_entry_in_the_plan() -> None:
    assert rules(("Relu", "Conv_t0")).floats == {"Conv_t0": "keep_float: Conv_t0"}


def test_names_with_brackets_are_names() -> None:
    net = Net()
    net.conv("image", 3, 4)
    net.nodes[-1].name = "head[0]/Conv"
    master = net.model("t0")
    found = read_rules(PrecisionRules(keep_float=("head[0]/Conv",)), master, place(master))
    assert set(found.floats) == {"head[0]/Conv"}


def test_a_rule_for_nothing_names_what_is_near() -> None:
    reported = refused(("Conv_t1",))
    assert "keep_float: Conv_t1, which matches no node" in reported
    assert "Conv_t0" in reported
    assert "force_int8: Cnov" in refused(force_int8=("Cnov",))


def test_layers_that_cannot_be_int8_cannot_be_forced() -> None:
    assert "'Relu_t1' cannot be INT8" in refused(force_int8=("Relu",))


def test_a_glob_that_forces_may_match_more_than_layers() -> None:
    assert set(rules(force_int8=("*_t[012]",)).int8) == {"Conv_t0", "Conv_t2"}


def test_a_node_has_one_rule() -> None:
    assert "'Conv_t0' under keep_float: Conv_t0 and force_int8: Conv" in refused(("Conv_t0",), ("Conv",))
