"""Change many boards of a fleet, wave by wave, each wave judged before the next one starts.

A rollout lives in the store: its specification, its boards and its commands, one table each (`rows`). An operator
writes to these tables through `register`. A `controller` process claims rollouts and takes their steps, with the help
of:

    stepper      one step in a transaction: results, where the rollout goes next, new commands, verdicts
    board_steps  the commands that boards get, and what results make of boards
    sender       commands on their way to boards

`spec` is what an operator requests: the boards, their order, waves and hours, limits, and the gates (`gates`).

Public names:
    register      ALL, WAVE, Overview, RolloutRegister
    controller    LEASE_S, Controller
    spec          RolloutSpec
    rows          BoardRow, BoardStage, Rollout, RolloutState, count_words
"""
