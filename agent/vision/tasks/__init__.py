"""The tasks, one module each, behind the class `ModelTask` of `agent.vision.tasks.task`.

`open_task` returns the task of a model spec. To add one, see "A task" in docs/contributing/extend.md.
"""
