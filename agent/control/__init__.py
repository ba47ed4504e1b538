"""Control: carry out in the main thread what agent.core decides, and report it.

Reading order: `executor` (events in, actions out), `exchange` (from verdict to `current`), `watch`, `events`.

executor     Executor: owns the state and the devices, and gathers facts
exchange     EngineExchange: loads engines, has them tried, makes them current or takes them back
watch        Watch: evidence, regimes and policies of the engine in service
upkeep       StoreUpkeep: room in the artefact store
events       StateChangeReporter: reports drift, low fidelity, trouble of a view
policies     Policies: what the owner lets be shown of an engine's answers
snapshot     take_snapshot, BoardSnapshot, CameraSnapshot: the board at one moment, for all that shows it
reasons      explain, Reasons: of a snapshot, why the board is degraded, and what holds a job back
summary      RunSummary, Swap, Rollback, Alarm, Period, Score, CameraSummary
"""
