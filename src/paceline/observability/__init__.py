"""The reports of an engine about itself. Imported by the engine; imports only the scheduler's telemetry records.

`metrics`: instruments, their dispatch, and the instrument that counts. `metric_table`: the definition of each metric, and the
values at one moment. `heartbeat`: whether a loop is alive. `trace_file`: the events of a trace and their files.
"""
