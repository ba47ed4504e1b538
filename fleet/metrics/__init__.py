"""Metrics of the control room's processes for Prometheus: `--metrics` of `fleet collect`, `fleet rollout run`, `web`.

Imported where the option is given, because prometheus_client costs memory.

Reading order: `store` (what the fleet's store knows), `processes` (what each process counts).

Public names:
    store      StoreMetrics, device_metrics, rollout_metrics
    processes  ProcessMetrics, collector_metrics, controller_metrics, web_metrics
"""
