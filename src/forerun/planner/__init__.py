"""Prediction of memory, step time and cost of a job on TPU slices and GPU machines, without the devices.

The compilers of TPUs and GPUs run on any Linux host. They report the memory of a program and dump the scheduled
program, from which the step time is simulated.

- `compile`: run the compiler in a child process, and cache its results
- `hlo`: parse the scheduled program
- `memory`: read the compiler's memory report, and break the peak down by contents
- `time`: simulate the scheduled program
- `trace`: write the simulated timeline for Perfetto
- `cost`: hours, dollars and checkpoints of a complete run
- `report`: tables, JSON and HTML pages, and suggestions for a job that does not fit
- `search`: choose slices, meshes, micro-batch sizes and remat policies
"""
