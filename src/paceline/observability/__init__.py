"""What an engine reports about itself. Imported by the engine; imports only the scheduler's telemetry records.

`instruments`: hooks and their dispatch. `metrics` counts, as `metric_table` defines, and returns a `metrics_snapshot`.
`heartbeat`: whether a loop is alive. Traces: `trace_events`, written to and read from a `trace_file`.
"""
