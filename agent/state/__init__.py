"""What a board remembers over a restart, in one file: `state.sqlite`.

Reading order: schema, store, then the two that fill a new file: salvage and takeover. The stores themselves lie where
they are used: jobs (agent.jobs), commands, settings and releases (agent.commands), regimes, gains and the audit
(agent.monitoring), policies (agent.control), announcements (agent.uplink).

Public names:
    salvage   Row, copy_table, insert_rows
    schema    MIGRATIONS, TABLES
    store     RepairedError, StateStore
    takeover  take_over, for a state directory of 0.2.0
"""
