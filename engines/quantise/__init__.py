"""INT8 by rule and plan: where Q/DQ go, what a group of layers costs, and how layers are repaired.

Read in this order: placement, apply_plan, fusion.

    placement    place: the rules of Q/DQ placement; Placement, ScaleGroup
    apply_plan   quantised_graph, observed_graph, insert_qdq: a plan and a calibration written into the graph
    equalise     equalise, shift_biases: a plan's repairs written into the float graph
    repairs      observe_channels, propose_repairs: which repairs a model's layers need
    fusion       fusion_groups, int8_macs_share: the groups that a plan decides over
    costs        measure_costs, macs_costs: what each group costs in INT8 and in float
"""
