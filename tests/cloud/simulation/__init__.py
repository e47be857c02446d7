"""A deterministic simulation of cloud runs: controllers, keeper, agents, hosts, API, bucket and clock with one seed.

The controllers, the agents, the record, the keeper's loop and `forerun down` are those of forerun. In a quarter of the
seeds, so is the provider of the Cloud TPU API. The cloud, the bucket, the hosts' operating system, the training and the
time are simulated in one thread. One `random.Random(seed)` decides everything. `simulation.py` runs a seed, and
`checks.py` has the invariants, with its own computation of the bill.

A writer of the bucket (`record_faults.py`) may damage, forge, delete and delay every file of the record at any time. At
worst, the run stops early:

- A forged stop, end, finish or host report ends an attempt or the run before its time. Checkpoints remain.
- No content of the bucket prolongs the life of a machine: each of the three limits (controller, agent, API) holds when
  the two others are absent.
- No content of the bucket lets two attempts write at the same time.
- No content of the bucket prevents `forerun down` from deleting everything.
"""
