"""Fits, how long, how much, which slice: asked of the TPU compiler on a machine without a TPU.

- asking: `question`, `compiler` (the child process), `worker` (what it runs), `answers`, `verdict`, `cache`, `progress`
- memory: `memory` (the compiler's report), `ledger` (what fills the peak), `remedies` and `refusal` (what would fit)
- time: `hlo` (the scheduled program), `work`, `loops`, `traffic`, `attention_cost` (what its instructions cost),
  `machine` (every assumption), `simulation`, `step_time`, `calibration`
- money and showing: `money`, `figures`, `report`, `charts`, `page`, `defaults` (slices that make sense)
- search: `candidates`, `footprint`, `strategy`, `search`, `ranking`, `scoreboard`, `winner`
"""
