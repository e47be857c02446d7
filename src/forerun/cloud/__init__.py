"""Cloud runs: rent a slice, train a job on it, survive preemption, stay within a budget, and delete the slice.

Everything that must survive the loss of the laptop is in the cloud: labels and metadata of the resources, and a few
files in the run's bucket folder (`record`). A controller (`control`) reads them, decides on the next action and calls a
`Provider`. On each host, an agent (`host`) reports progress, enforces the deadline and deletes the slice at the end.
"""
