"""A fake of the Cloud TPU and Compute Engine REST APIs, in one process, with a clock that tests control.

from fake import FakeCloud, Fault
"""

from fake.faults import Fault
from fake.machines import Machines
from fake.process import PROJECT, FakeCloud

__all__ = ["PROJECT", "FakeCloud", "Fault", "Machines"]
